//! What the backstop is told: which connections are on bumps, by choice or because they follow.

use dibs_config::Level;
use dibs_control::{BackstopInfo, BackstopState, RuleOrigin};
use dibs_policy::{Backstop, Desired, Error, Known, Place, Standing, Strength};
use dibs_settings::BumpId;
use dibs_switch::engine::entries::Ends;
use dibs_wire::FlowKey;

use crate::kernel::gateway;
use crate::rulebook::rules::Rule;
use crate::switch::wakers::Task;
use crate::switch::{Daemon, State};

/// For the user.
pub(crate) fn info(standing: &Standing) -> BackstopInfo {
    let (state, reason) = match standing {
        Standing::Idle => (BackstopState::Idle, None),
        Standing::Stands(Strength::Lasting) => (BackstopState::Lasting, None),
        Standing::Stands(Strength::WhileRunning) => (BackstopState::WhileRunning, None),
        Standing::Stands(Strength::Shared) => (BackstopState::Shared, None),
        Standing::Missing => {
            let why = Error::NoNftables.to_string();
            (BackstopState::Missing, Some(why))
        }
        Standing::Failed(why) => (BackstopState::Failed, Some(why.clone())),
    };
    BackstopInfo { state, reason }
}

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
        locked: gateway::locked_passing(daemon),
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
    let state = info(now).state;
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
    daemon.kernel.unbacked(&daemon.config, &wish).await
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
pub(crate) async fn note_followed(daemon: &Daemon, ends: &Ends, bump: Option<BumpId>) {
    // As it sends: of this host, or of a host behind it.
    let is_ours = |pair: &&FlowKey| {
        daemon.host.has(pair.src) && daemon.peer_of(pair.dst).is_some()
            || gateway::passes(daemon, pair)
    };
    let Some(pair) = ends.iter().find(is_ours) else {
        return;
    };
    let mut backstop = daemon.kernel.backstop().await;
    let (was, chosen) = daemon.update(pair, |conn| {
        (conn.handle_followed(bump), conn.choice.get().is_some())
    });
    let place = match (bump, was) {
        (Some(_), None) => Place::Bumped,
        (None, Some(_)) => Place::Elsewhere,
        _ => return,
    };
    if !chosen {
        note_places(daemon, &mut backstop, &[(*pair, place)]).await;
    }
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
    let _ = backstop.set_locked(gateway::locked_passing(daemon)).await;
    tell_standing(daemon, &before, backstop.standing());
}
