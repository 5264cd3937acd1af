//! What goes on by itself: news of the data path, changes of the host, connections
//! that end, steering that others undo, the watchdog.

use std::collections::HashSet;
use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use dibs_core::node::Event;
use dibs_policy::{BumpId, Watch};
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at, sleep, timeout};

use crate::daemon::{Daemon, Steered};
use crate::driver::{Notice, Notices};
use crate::interfaces::own_addresses;
use crate::live::Live;
use crate::paths::Link;
use crate::questions::Desks;
use crate::switching::{Mark, all_of};
use crate::terms::is_our_tun;
use crate::wakers::Task;
use dibs_switch::conns::Pair;
use dibs_switch::table::Conn;

/// What changes together is looked at together.
const SETTLE: Duration = Duration::from_millis(50);
/// Between two looks for connections that ended.
const SWEEP: Duration = Duration::from_secs(2);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Sweeps between two looks for what no event tells of; with iptables-legacy each is one.
const SWEEPS_PER_CHECK: u32 = 15;

/// Follows the data path until it ends.
pub async fn follow_data_path(daemon: Rc<Daemon>, mut notices: Notices) {
    let desks = Desks::open(&daemon);
    while let Some(notice) = notices.next().await {
        match notice {
            Notice::Node(Event::Control { peer, bytes }) => desks.take(&daemon, peer, &bytes),
            Notice::Node(event) => note(&daemon, event),
            Notice::TunLost { bump, tun, error } => {
                let name = tun.name().to_owned();
                // Closed first, so that the name is free.
                drop(tun);
                let daemon = Rc::clone(&daemon);
                tokio::task::spawn_local(async move {
                    restore_tun(&daemon, bump, &name, &error).await;
                });
            }
        }
    }
}

fn note(daemon: &Rc<Daemon>, event: Event) {
    daemon.wakers.wake(Task::Sessions);
    match event {
        Event::PeerUp { peer, restarted } => {
            {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                state.since = Some(crate::clock::wall());
                state.outdated = None;
                if restarted {
                    state.want = 0;
                    state.devices.clear();
                }
            }
            let name = daemon.peer_name(peer).to_owned();
            let how = if restarted { " anew: it restarted" } else { "" };
            daemon.events.tell(
                "session_up",
                format!("the session with peer {name} is established{how}"),
                &[("peer", name)],
            );
            let daemon = Rc::clone(daemon);
            tokio::task::spawn_local(async move {
                // How late it was when we called.
                daemon.events.note("save", daemon.save());
                daemon.tell_lacks(peer).await;
                if let Err(error) = daemon.recover(peer).await {
                    tracing::warn!("connections go on late: {error:#}");
                }
                daemon.resync(peer).await;
            });
        }
        Event::PeerDown { peer } => {
            daemon.state.borrow_mut().peers[peer].since = None;
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "session_down",
                format!("the session with peer {name} is down"),
                &[("peer", name)],
            );
        }
        Event::Outdated { peer, behind } => {
            let news = {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                // Somebody repeats an old call of a peer that is there.
                !state.answers && state.outdated.replace(behind).is_none()
            };
            if news {
                tracing::warn!("peer {}: {}", daemon.peer_name(peer), outdated(behind));
            }
        }
        Event::KeysExhausted { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "keys_exhausted",
                format!(
                    "the keys of the session with peer {name} are used up: nothing is sent until \
                     a new session is agreed"
                ),
                &[("peer", name)],
            );
        }
        Event::Path { peer, path, state } => {
            let name = daemon.config.paths[path].name.clone();
            let peer = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "path",
                format!("path {name} to peer {peer} is {state}"),
                &[("path", name), ("peer", peer), ("state", state.to_owned())],
            );
        }
        Event::Control { .. } | Event::Drained { .. } => {
            unreachable!("messages and ends of drains are taken before")
        }
    }
}

/// Why the calls of a peer come to nothing, and what helps.
pub(crate) fn outdated(behind: Duration) -> String {
    format!(
        "its calls are refused, for they are {} s older than its latest: if its clock was set back, set it \
         right, or restart dibsd here, which then remembers no latest call; otherwise somebody repeats old ones",
        behind.as_secs()
    )
}

async fn restore_tun(daemon: &Daemon, bump: u8, name: &str, error: &std::io::Error) {
    daemon.events.tell(
        "tun_lost",
        format!("device {name} is gone ({error}); making it again"),
        &[("device", name.to_owned())],
    );
    if let Some(id) = BumpId::new(bump) {
        daemon.steerer.lock().await.tun_lost(id);
    }
    if let Err(error) = daemon.steer().await {
        tracing::error!("cannot restore {name}: {error:#}");
    }
}

/// Follows interfaces and addresses, and puts back steering that others undid.
pub async fn follow_host(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_host_once(&daemon).await;
        tracing::warn!("cannot follow the host's interfaces: {error:#}");
        sleep(RETRY).await;
    }
}

async fn follow_host_once(daemon: &Daemon) -> anyhow::Result<Infallible> {
    let own = daemon.backstop.lock().await.port();
    let mut watch = Watch::open(own)?;
    // What changed before, while the daemon started or this failed, nobody told of.
    if refresh_interfaces(daemon).await? {
        repair(daemon, false).await;
    }
    loop {
        let failed = daemon.state.borrow().links.iter().any(Link::has_failed);
        // No event tells of whoever has the port, a lock, a table, or all the descriptors, that he lets go.
        let again = failed || daemon.amiss().is_some() || daemon.lacks_backstop().await;
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

/// Has the kernel brought to what is wanted, if anything is. `undone`: what is amiss was there before.
async fn repair(daemon: &Daemon, undone: bool) {
    let before = daemon.amiss();
    let none = daemon.state.borrow().installed.is_empty();
    if none && before.is_none() {
        return;
    }
    let undone = undone && !none;
    match daemon.steer().await {
        Ok(Steered { steps, settled }) if steps > 0 && settled && undone => {
            daemon.restored.set(daemon.restored.get() + steps);
            daemon.events.tell(
                "steering_restored",
                format!("another program changed the steering: put {steps} thing(s) back"),
                &[("steps", steps.to_string())],
            );
        }
        Ok(_) => {}
        Err(_) => {
            let now = daemon.amiss();
            if let Some(why) = now.as_ref().filter(|_| now != before) {
                tracing::error!("steering: {why}");
            }
        }
    }
}

/// Looks at the interfaces again, and tells the data path what is new. Whether the host's addresses are.
pub(crate) async fn refresh_interfaces(daemon: &Daemon) -> anyhow::Result<bool> {
    let fresh = daemon.interfaces.list().await?;
    let before = std::mem::replace(&mut daemon.state.borrow_mut().inventory, fresh.clone());
    daemon.follow_links(false).await?;
    daemon.tell_devices(&before, &fresh);
    warn_of_own_addresses(daemon);
    let old = daemon.state.borrow().addresses.clone();
    let changed = keep_addresses(daemon, &old).await?;
    if changed && !daemon.state.borrow().installed.is_empty() {
        daemon.save()?;
    }
    Ok(changed)
}

/// Warns of addresses that the file gives to peers and this host has.
pub(crate) fn warn_of_own_addresses(daemon: &Daemon) {
    let faults = own_addresses(&daemon.config, &daemon.state.borrow().inventory);
    daemon.events.warn_while("addresses of this host", faults);
}

/// Notes the host's addresses, and those of `old` that connections still use: they outlive the interface
/// whose address it was. Whether that is news.
pub(crate) async fn keep_addresses(daemon: &Daemon, old: &[IpAddr]) -> anyhow::Result<bool> {
    let inventory = daemon.state.borrow().inventory.clone();
    let mut addresses = inventory.host_addresses(is_our_tun);
    if old.iter().any(|address| !addresses.contains(address)) {
        let lives = daemon.sockets().await?;
        let used: HashSet<_> = lives.iter().map(|live| live.pair.local.ip()).collect();
        addresses.extend(old.iter().filter(|address| used.contains(address)));
        addresses.sort_unstable();
        addresses.dedup();
    }
    let changed = daemon.state.borrow().addresses != addresses;
    if changed {
        daemon.driver.set_addresses(addresses.clone())?;
        daemon.state.borrow_mut().addresses = addresses;
    }
    // What was a path's outlives its interface, too.
    let mut reachable = inventory.reachable(&daemon.config.paths);
    {
        let state = daemon.state.borrow();
        let outlives = |address: &&IpAddr| {
            state.addresses.contains(address)
                && !inventory.host_addresses(is_our_tun).contains(address)
        };
        reachable.extend(state.reachable.iter().filter(outlives));
    }
    reachable.sort_unstable();
    reachable.dedup();
    if daemon.state.borrow().reachable != reachable {
        daemon.driver.set_reachable(reachable.clone())?;
        daemon.state.borrow_mut().reachable = reachable;
    }
    Ok(changed)
}

/// Forgets what was chosen for connections that ended, and bumps that nobody uses.
pub async fn sweep(daemon: Rc<Daemon>) {
    // At the start there is more urgent work.
    let mut ticks = interval_at(Instant::now() + SWEEP, SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round = 0;
    loop {
        ticks.tick().await;
        if daemon.file.is_behind() {
            daemon.events.note("save", daemon.save());
        }
        let idle = {
            let state = daemon.state.borrow();
            let conns = || state.conns.iter().map(|(_, conn)| conn);
            let moves = |conn: &Conn| conn.choice.get().is_some() || conn.has_left();
            state.installed.is_empty() && !conns().any(moves)
        };
        if idle {
            continue;
        }
        daemon
            .events
            .note("look for connections that ended", sweep_once(&daemon).await);
        let cleared = daemon.steerer.lock().await.clear_others().await;
        daemon
            .events
            .note("remove what an earlier run left", cleared);
        round = (round + 1) % SWEEPS_PER_CHECK;
        if round == 0 {
            let tried = daemon.widen_rules().await;
            daemon
                .events
                .note("try rules again that one IP version lacks", tried);
        }
        if round == 0 || !daemon.steerer.lock().await.is_told().await {
            repair(&daemon, true).await;
        }
    }
}

async fn sweep_once(daemon: &Daemon) -> anyhow::Result<()> {
    // That one of these fails is no reason to leave out the others.
    let forgotten = forget_ended(daemon).await;
    let followed = daemon.let_follow().await;
    let retired = daemon.retire().await;
    forgotten.and(followed.map_err(Into::into)).and(retired)
}

/// Forgets connections that ended, and takes their marks: another one of the same ends is not to inherit them.
/// One that is there already gets what is chosen for it.
async fn forget_ended(daemon: &Daemon) -> anyhow::Result<()> {
    {
        let state = daemon.state.borrow();
        if !state.conns.iter().any(|(_, conn)| conn.is_swept()) {
            return Ok(());
        }
    }
    let (gone, taken) = {
        let _turn = daemon.looking.lock().await;
        let named = |live: Live| Some((live.pair, live.socket));
        let mut alive = daemon.sockets_as(named).await?;
        alive.sort_unstable();
        let socket_of = |pair: &Pair| {
            let at = alive.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
            Some(alive[at].1)
        };
        // What becomes of those is told by events.
        let passing: HashSet<Pair> = {
            let state = daemon.state.borrow();
            let marked = state.conns.iter().filter(|(_, conn)| conn.is_marked());
            let pairs = marked.map(|(pair, _)| *pair);
            pairs.filter(|pair| daemon.may_live(pair)).collect()
        };
        let conns = &mut daemon.state.borrow_mut().conns;
        conns.sweep(socket_of, |pair| passing.contains(pair))
    };
    let chosen = all_of(daemon.mark_choices(&taken).await);
    let cleared = {
        let _turn = daemon.marking.lock().await;
        let none: Vec<Mark> = gone.iter().map(|pair| Mark::moved(*pair, 0)).collect();
        all_of(daemon.write(&none).await)
    };
    let saved = match gone.is_empty() {
        true => Ok(()),
        false => daemon.save(),
    };
    chosen.and(cleared).map_err(Into::into).and(saved)
}

/// Tells systemd that we live, as long as the data path answers.
pub async fn watchdog(daemon: Rc<Daemon>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = interval(limit / 3);
    loop {
        ticks.tick().await;
        match timeout(limit / 3, daemon.driver.ping()).await {
            Ok(Ok(())) => {
                // Systemd is there, or it would not have set the limit.
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
            }
            _ => tracing::error!("the data path does not answer"),
        }
    }
}
