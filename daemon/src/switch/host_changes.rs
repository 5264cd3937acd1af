//! Changes of the host: interfaces and addresses, and steering that others undid.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use dibs_config::BumpConfig;
use dibs_policy::{Standing, Watch};
use dibs_settings::BumpId;
use tokio::time::sleep;

use crate::host::interfaces::Inventory;
use crate::kernel::connections;
use crate::switch::wakers::Task;
use crate::switch::{Daemon, reconcile};

/// What changes together is looked at together.
const SETTLE: Duration = Duration::from_millis(50);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Follows interfaces and addresses, and puts back steering that others undid.
pub(crate) async fn follow(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_once(&daemon).await;
        tracing::warn!("cannot follow the host's interfaces: {error:#}");
        sleep(RETRY).await;
    }
}

async fn follow_once(daemon: &Daemon) -> anyhow::Result<Infallible> {
    let own = daemon.kernel.backstop().await.port();
    let mut watch = Watch::open(own)?;
    // What changed before, while the daemon started or this failed, nobody told of.
    if refresh_interfaces(daemon).await? {
        reconcile::repair(daemon, false).await;
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
        reconcile::repair(daemon, !moved).await;
    }
}

/// Looks at the interfaces again, and tells the data path what is new. Whether the host's addresses are, or other
/// interfaces go by names of the file.
pub(crate) async fn refresh_interfaces(daemon: &Daemon) -> anyhow::Result<bool> {
    let before = daemon.host.refresh().await?;
    daemon.host.follow_links().await?;
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
        daemon.save()?;
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
                format!("device {device} is there: connections on {name} go on"),
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
