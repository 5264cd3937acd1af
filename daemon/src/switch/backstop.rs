//! What the backstop is told: which connections are on bumps, by choice or because they follow.

use std::collections::BTreeSet;

use dibs_config::Level;
use dibs_control::RuleOrigin;
use dibs_policy::conntrack::Connection;
use dibs_policy::{Backstop, Desired, Error, Known, Place, Standing};
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Socket};
use dibs_wire::FlowKey;

use crate::data::bumps::marks;
use crate::host::live::Live;
use crate::kernel::{backstop_info, connections};
use crate::rulebook::rules::Rule;
use crate::switch::{Daemon, State, Task};

impl State {
    /// The connections that the backstop knows by name.
    pub(crate) fn known(&self) -> Known {
        let mut known = Known::default();
        for (pair, conn) in self.conns.iter() {
            let chosen = conn.choice.get().filter(|choice| !choice.pending);
            match chosen.map_or(conn.followed(), |choice| choice.bump) {
                Some(_) => known.bumped.insert(*pair),
                None if chosen.is_some() => known.plain.insert(*pair),
                None => false,
            };
        }
        known
    }
}

/// Brings the backstop to `wish`; whether others had undone it. Steering works without it, so where that
/// fails it is told and tried again.
pub(crate) async fn set(daemon: &Daemon, wish: &Desired) -> bool {
    let mut backstop = daemon.kernel.backstop().await;
    let known = Known {
        locked: locked_passing(daemon),
        ..daemon.state.borrow().known()
    };
    let before = backstop.standing().clone();
    let set = backstop.set(wish, &known).await;
    tell_standing(daemon, &before, backstop.standing());
    match (set, backstop.standing()) {
        (Ok(undone), _) => undone,
        (Err(error), Standing::Idle) => {
            daemon.events.note("clear nftables", Err(error));
            false
        }
        (Err(_), _) => false,
    }
}

/// Tells whether the backstop stands, if that is news.
pub(crate) fn tell_standing(daemon: &Daemon, before: &Standing, now: &Standing) {
    if before == now {
        return;
    }
    const KIND: &str = "backstop";
    const PLAIN: &str = "what others flush may let connections go on in plain";
    let state = backstop_info(now).state;
    let announce = |text| {
        daemon
            .events
            .announce(KIND, text, &[("state", state.to_string())])
    };
    match now {
        Standing::Idle => {}
        Standing::Stands(strength) => {
            let text = format!("the table of nftables {strength}");
            tracing::info!(dibs.event = KIND, "{text}");
            announce(text);
        }
        Standing::Missing => {
            let text = format!("{}: {PLAIN}", Error::NoNftables);
            tracing::warn!(dibs.event = KIND, "{text}");
            announce(text);
        }
        Standing::Failed(why) => {
            let text = format!("{why}: {PLAIN}");
            tracing::error!(dibs.event = KIND, "{text}");
            announce(text);
            daemon.wakers.wake(Task::Repair);
        }
    }
}

/// Why the kernel would not take the backstop of all that is wanted and of a rule more; see [`Kernel::unbacked`](crate::kernel::Kernel::unbacked).
pub(crate) async fn unbacked(daemon: &Daemon, added: Option<&Rule>) -> Option<String> {
    let wish = {
        let state = daemon.state.borrow();
        state.wish(
            &daemon.config,
            &daemon.host.inventory(),
            &daemon.host.addresses(),
            added,
        )
    };
    daemon.kernel.unbacked(&wish).await
}

/// To be called before the kernel is brought to what is wanted.
///
/// # Errors
/// A rule of the file requires its bump, and the kernel would not take what is to hold it when others
/// flush the firewall.
pub(crate) async fn ensure_backed(daemon: &Daemon) -> anyhow::Result<()> {
    let required = {
        let state = daemon.state.borrow();
        let is_required =
            |rule: &&Rule| rule.origin == RuleOrigin::Config && rule.level == Level::Require;
        state
            .rules
            .all()
            .iter()
            .find(is_required)
            .map(|rule| rule.id)
    };
    let Some(id) = required else { return Ok(()) };
    match unbacked(daemon, None).await {
        None => Ok(()),
        Some(why) => Err(daemon
            .config
            .refuse(
                &format!("rule.{}.require", id - 1),
                format!("rule {id} would not be held when others flush the firewall: {why}"),
                None,
            )
            .into()),
    }
}

/// Tells the backstop where connections are; its caller holds it while the marks change too.
pub(crate) async fn note_places(
    daemon: &Daemon,
    backstop: &mut Backstop,
    places: &[(FlowKey, Place)],
) {
    let places: Vec<(FlowKey, Place)> = {
        let conns = &daemon.state.borrow().conns;
        let decided = |(pair, place): &&(FlowKey, Place)| {
            *place != Place::Elsewhere || conns.get(pair).choice.get().is_none()
        };
        places.iter().filter(decided).copied().collect()
    };
    let before = backstop.standing().clone();
    // What failed shows in how it stands now, and is tried again.
    let _ = backstop.note(&places).await;
    tell_standing(daemon, &before, backstop.standing());
}

/// Notes where the kernel has put a connection, by rules here or because the peer began it.
pub(crate) async fn note_followed(daemon: &Daemon, entry: &Connection) {
    let Some(pair) = ours(daemon, entry) else {
        return;
    };
    let mut backstop = daemon.kernel.backstop().await;
    let bump = marks(&daemon.config).bump_of(entry.mark);
    let (was, chosen) = daemon.update(&pair, |conn| {
        (conn.handle_followed(bump), conn.choice.get().is_some())
    });
    let place = match (bump, was) {
        (Some(_), None) => Place::Bumped,
        (None, Some(_)) => Place::Elsewhere,
        _ => return,
    };
    if !chosen {
        note_places(daemon, &mut backstop, &[(pair, place)]).await;
    }
}

/// A connection that followed has ended.
pub(crate) async fn forget_followed(daemon: &Daemon, pair: &FlowKey) {
    let mut backstop = daemon.kernel.backstop().await;
    daemon.update(pair, |conn| conn.handle_followed(None));
    let place = (*pair, Place::Elsewhere);
    note_places(daemon, &mut backstop, &[place]).await;
}

/// Looks for connections that follow: an earlier daemon's, or those of which no event told.
pub(crate) async fn find_followed(daemon: &Daemon) -> Result<(), dibs_policy::Error> {
    for entry in daemon.kernel.conntrack()?.list(Some).await? {
        note_followed(daemon, &entry).await;
    }
    Ok(())
}

/// A TCP connection of this host, or of a host behind it, to a host behind a peer, as it sends.
fn ours(daemon: &Daemon, entry: &Connection) -> Option<FlowKey> {
    let is_ours = |pair: &FlowKey| daemon.host.has(pair.src) && daemon.peer_of(pair.dst).is_some();
    let is_ours = |pair: &FlowKey| is_ours(pair) || connections::passes(&daemon.host, pair);
    entry.ends().into_iter().find(is_ours)
}

/// Brings the backstop to what is locked of connections that pass: what is forged of others their
/// sockets sort out.
pub(crate) async fn note_locks(daemon: &Daemon) {
    let mut backstop = daemon.kernel.backstop().await;
    tell_locks(daemon, &mut backstop).await;
}

/// As [`note_locks`], for those who hold the backstop.
pub(crate) async fn tell_locks(daemon: &Daemon, backstop: &mut Backstop) {
    if daemon.config.daemon.gateway.is_empty() {
        return;
    }
    let before = backstop.standing().clone();
    // What failed shows in how it stands now, and is tried again.
    let _ = backstop.set_locked(locked_passing(daemon)).await;
    tell_standing(daemon, &before, backstop.standing());
}

/// Whether a connection that has no entry may live all the same.
pub(crate) fn may_live(daemon: &Daemon, pair: &FlowKey) -> bool {
    connections::passes(&daemon.host, pair) && !daemon.state.borrow().conns.get(pair).ended
}

/// Whether a choice for the connection `live` was made for an earlier one. What passes and has a new
/// entry, by our hand or its next packet, is named anew.
pub(crate) fn has_taken(daemon: &Daemon, live: &Live, choice: Choice) -> bool {
    if live.uid.is_none() && live.established && choice.socket == Socket::UNKNOWN {
        daemon.update(&live.pair, |conn| conn.choice.rename(live.socket));
        return false;
    }
    live.socket != choice.socket
}

/// A connection that passes has a new entry, by our hand: what was chosen for it stands, and if its
/// host does not know it any more it says so.
pub(crate) async fn rename(daemon: &Daemon, pair: &FlowKey, bump: BumpId) -> Result<(), Error> {
    for live in connections::passing_of(&daemon.kernel, std::slice::from_ref(pair)).await? {
        daemon.update(pair, |conn| conn.choice.rename(live.socket));
        if !daemon.bumps.is_outside(bump) {
            // Without the data path nobody can be asked.
            let _ = daemon.driver.solicit(bump, *pair);
        }
    }
    Ok(())
}

/// The connections that pass and are locked.
pub(crate) fn locked_passing(daemon: &Daemon) -> BTreeSet<FlowKey> {
    let locked: Vec<FlowKey> = daemon.state.borrow().conns.locked().collect();
    { locked.into_iter() }
        .filter(|pair| connections::passes(&daemon.host, pair))
        .collect()
}
