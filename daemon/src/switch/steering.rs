//! Steering: brings the kernel to what is wanted, and leaves it. Changes of the host are followed for that: interfaces and
//! addresses, and what others undid.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use dibs_config::BumpConfig;
use dibs_policy::{Standing, Watch};
use dibs_settings::BumpId;
use tokio::time::sleep;

use crate::data::Gone;
use crate::host::interfaces::Inventory;
use crate::host::process::or_warn;
use crate::kernel::connections;
use crate::rulebook::kept::Kept;
use crate::switch::{Daemon, Task, marking};

/// What [`steer`] did.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Steered {
    /// Changes of the kernel's state. 0: everything was as wanted.
    pub(crate) steps: u64,
    /// Nothing else was wanted than when the kernel was last brought to it: changes undo what others did.
    pub(crate) settled: bool,
}

/// Brings the kernel to what is wanted. A bump that nothing uses any more stays, see
/// [`retire`].
pub(crate) async fn steer(daemon: &Daemon) -> anyhow::Result<Steered> {
    // Before the kernel has new connections go by a bump.
    tell_flow_schedulers(daemon)?;
    let done = steer_once(daemon).await;
    daemon.kernel.note_steered(&done);
    match done {
        Ok(_) => keep_for_guard(daemon).await,
        Err(_) => daemon.wakers.wake(Task::Repair),
    }
    done
}

/// Keeps what was carried out now for the guard. What `cleanup` suspends is in force again after a start.
async fn keep_for_guard(daemon: &Daemon) {
    let now = || {
        let rules = &daemon.state.borrow().rules;
        let inventory = daemon.host.inventory();
        let kept = || {
            let offset = rules.utc_offset();
            Kept::of(&daemon.config, &inventory, rules.in_force(), offset)
        };
        (!rules.is_suspended()).then(kept)
    };
    let directory = daemon.config.daemon.state_dir.clone();
    let kept = daemon.kept.keep(directory, now).await;
    daemon
        .events
        .note("keep what rules want for the guard", kept);
}

/// Tells the data path the schedulers of the rules that hold now.
pub(crate) fn tell_flow_schedulers(daemon: &Daemon) -> Result<(), Gone> {
    let state = daemon.state.borrow();
    let told = &daemon.flow_schedulers;
    told.tell(&daemon.driver, state.rules.active())
}

async fn steer_once(daemon: &Daemon) -> anyhow::Result<Steered> {
    let Some(mut steerer) = daemon.kernel.begin().await? else {
        return Ok(Steered::default());
    };
    let (wish, pins, fresh, settled) = {
        let state = daemon.state.borrow();
        let fresh = state.installed.is_empty() && !state.in_use().is_empty();
        let settled = !state.pins_are_stale() && state.is_installed();
        (daemon.wish(None), state.conns.pins(), fresh, settled)
    };
    or_warn(daemon.kernel.backstop().await.narrow(&wish).await);
    let report = steerer.set(&wish).await?;
    let undone = u64::from(marking::set(daemon, &wish).await);
    {
        let mut state = daemon.state.borrow_mut();
        for bump in &wish.bumps {
            state.installed.entry(bump.id).or_default();
        }
        state.pinned = pins;
    }
    // While nothing was installed, the kernel forgot what was chosen.
    if fresh {
        marking::mark_all_choices(daemon).await;
    }
    Ok(Steered {
        steps: report.steps.len() as u64 + undone,
        settled,
    })
}

/// Removes everything of ours from the kernel; what is still in use comes back with the next
/// [`steer`], unless this is `for_good`.
pub(crate) async fn remove_all(daemon: &Daemon, for_good: bool) -> anyhow::Result<()> {
    let mut steerer = daemon.kernel.steerer().await;
    if for_good {
        daemon.kernel.let_go();
    }
    {
        let mut state = daemon.state.borrow_mut();
        state.installed.clear();
        state.pinned.clear();
        state.conns.update_all(|_, conn| {
            conn.place.handle_followed(None);
        });
    }
    daemon.kernel.backstop().await.remove().await?;
    steerer.cleanup(&daemon.config).await.map(drop)
}

/// Has everything that is in use installed; quick if it is.
pub(crate) async fn install(daemon: &Daemon) -> anyhow::Result<()> {
    let installed = daemon.state.borrow().is_installed();
    if !installed {
        steer(daemon).await?;
    }
    Ok(())
}

/// Removes bumps that two sweeps in a row found unused (what is on its way has arrived by then), and
/// brings rules for single connections up to date.
pub(crate) async fn retire(daemon: &Daemon) -> anyhow::Result<()> {
    let due = {
        let mut state = daemon.state.borrow_mut();
        let mut used = state.in_use();
        // What our marks have on a bump stays on it, though neither rules nor choices say so: rules may come and go quickly.
        let written = { state.conns.iter() }.filter_map(|(_, conn)| conn.place.written());
        used.extend(written.flatten());
        // While a peer is asked for its part, the connection stands where it stood: on any of them.
        let asked = state.conns.iter().any(|(_, conn)| conn.is_asked());
        for (bump, unused) in &mut state.installed {
            *unused = match asked || used.contains(bump) {
                true => 0,
                false => *unused + 1,
            };
        }
        let before = state.installed.len();
        state.installed.retain(|_, unused| *unused < 2);
        state.installed.len() < before || state.pins_are_stale()
    };
    if due {
        steer(daemon).await?;
    }
    Ok(())
}

/// Has the kernel brought to what is wanted, if anything is. `undone`: what is amiss was there before.
pub(crate) async fn repair(daemon: &Daemon, undone: bool) {
    let before = daemon.kernel.amiss();
    let none = daemon.state.borrow().installed.is_empty();
    if none && before.is_none() {
        return;
    }
    let undone = undone && !none;
    match steer(daemon).await {
        Ok(Steered { steps, settled }) if steps > 0 && settled && undone => {
            daemon.kernel.note_restored(steps);
            daemon.events.tell(
                "steering_restored",
                format!(
                    "another program changed rules or routes of dibs: put {steps} of them back"
                ),
                &[("steps", steps.to_string())],
            );
        }
        Ok(_) => {}
        Err(_) => {
            let now = daemon.kernel.amiss();
            if let Some(why) = now.as_ref().filter(|_| now != before) {
                tracing::error!("steering: {why}");
            }
        }
    }
}

/// What changes together is looked at together.
const SETTLE: Duration = Duration::from_millis(50);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Follows interfaces and addresses, and puts back steering that others undid.
pub(crate) async fn follow_host(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_once(&daemon).await;
        tracing::warn!("cannot watch the host's interfaces: {error:#}");
        sleep(RETRY).await;
    }
}

async fn follow_once(daemon: &Daemon) -> anyhow::Result<Infallible> {
    let own = daemon.kernel.backstop().await.port();
    let mut watch = Watch::open(own)?;
    // What changed before, while the daemon started or this failed, nobody told of.
    if refresh_interfaces(daemon).await? {
        repair(daemon, false).await;
    }
    loop {
        // No event tells of whoever has the port, a lock, a table, or all the descriptors, that he lets go.
        let again = daemon.host.has_failed_path()
            || daemon.kernel.amiss().is_some()
            || matches!(daemon.kernel.standing().await, Standing::Failed(_));
        tokio::select! {
            changed = watch.changed() => changed?,
            () = sleep(RETRY), if again => {}
            () = daemon.wakers.woken(Task::Repair) => continue,
        }
        sleep(SETTLE).await;
        let moved = refresh_interfaces(daemon).await?;
        repair(daemon, !moved).await;
    }
}

/// Looks at the interfaces again, and tells the data path what is new. Whether the host's addresses are, or other
/// interfaces go by names of the file.
pub(crate) async fn refresh_interfaces(daemon: &Daemon) -> anyhow::Result<bool> {
    let before = daemon.host.refresh().await?;
    // What is looked at below is not seen to be new again.
    or_warn(daemon.host.follow_links().await);
    if before.networks(BumpId::is_tun) != daemon.host.inventory().networks(BumpId::is_tun) {
        daemon.endpoints.note_network();
        daemon.wakers.wake(Task::Names);
    }
    let renamed = named_otherwise(daemon, &before);
    tell_devices(daemon, &before);
    warn_of_own_addresses(daemon);
    let old = daemon.host.addresses().clone();
    let changed = keep_addresses(daemon, &old).await?;
    if changed && !daemon.state.borrow().installed.is_empty() {
        daemon.save_or_warn();
    }
    Ok(changed || renamed)
}

/// True if rules of the kernel have to name interfaces otherwise than before.
fn named_otherwise(daemon: &Daemon, before: &Inventory) -> bool {
    let (state, now) = (daemon.state.borrow(), daemon.host.inventory());
    let rules = state.rules.all().iter();
    let of_rules = rules.filter_map(|rule| rule.selection.interface().map(String::as_str));
    let devices = daemon.config.bumps.iter().filter_map(BumpConfig::device);
    let mut names = of_rules.chain(devices);
    names.any(|name| before.device_name(name) != now.device_name(name))
}

/// Warns of addresses that the file gives to peers and this host has.
pub(crate) fn warn_of_own_addresses(daemon: &Daemon) {
    let faults = daemon.host.own_addresses();
    daemon.events.warn_while("addresses of this host", faults);
}

/// Notes the host's addresses, and those of `old` that connections still use: they outlive the interface
/// whose address it was. Whether that is news.
pub(crate) async fn keep_addresses(daemon: &Daemon, old: &[IpAddr]) -> anyhow::Result<bool> {
    let mut missing = daemon.host.missing(old);
    if !missing.is_empty() {
        let lives = connections::sockets(&daemon.kernel).await?;
        let used: HashSet<_> = lives.iter().map(|live| live.pair.src).collect();
        missing.retain(|address| used.contains(address));
    }
    Ok(daemon.host.keep_addresses(missing)?)
}

/// Tells of devices in use that are gone, or back.
fn tell_devices(daemon: &Daemon, before: &Inventory) {
    let now = &*daemon.host.inventory();
    let is_up = |inventory: &Inventory, device: &str| {
        inventory
            .named(device)
            .is_some_and(|interface| interface.up)
    };
    for bump in daemon.bumps.all() {
        let Some(device) = &bump.device else { continue };
        let used = daemon.state.borrow().installed.contains_key(&bump.id);
        let name = &bump.name;
        let (kind, what) = match (is_up(before, device), is_up(now, device)) {
            (true, false) if used => (
                "device_lost",
                format!("device {device} is gone: connections on {name} are blocked"),
            ),
            (false, true) if used => (
                "device_back",
                format!("device {device} is back: connections on {name} continue"),
            ),
            _ => continue,
        };
        daemon.events.tell(
            kind,
            what,
            &[("device", device.clone()), ("bump", name.clone())],
        );
    }
}
