//! Forgets what ended, and looks for what no event tells of.

use std::collections::HashSet;
use std::rc::Rc;
use std::time::Duration;

use dibs_switch::engine::{self, Mark};
use dibs_switch::table::Conn;
use dibs_wire::FlowKey;
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::host::live::Live;
use crate::kernel::{connections, gateway};
use crate::switch::Daemon;
use crate::switch::marking::all_of;
use crate::switch::{marking, probing, reconcile};

/// Between two looks for connections that ended.
const EVERY: Duration = Duration::from_secs(2);
/// Sweeps between two looks for what no event tells of; with iptables-legacy each is one.
const SWEEPS_PER_CHECK: u32 = 15;

/// Forgets what was chosen for connections that ended, and bumps that nobody uses.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    // At the start there is more urgent work.
    let mut ticks = interval_at(Instant::now() + EVERY, EVERY);
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
        let cleared = daemon.kernel.steerer().await.clear_others().await;
        daemon
            .events
            .note("remove what an earlier run left", cleared);
        round = (round + 1) % SWEEPS_PER_CHECK;
        if round == 0 {
            let tried = probing::widen_rules(&daemon).await;
            daemon
                .events
                .note("try rules again that one IP version lacks", tried);
        }
        if round == 0 || !daemon.kernel.steerer().await.is_told().await {
            reconcile::repair(&daemon, true).await;
        }
    }
}

async fn sweep_once(daemon: &Daemon) -> anyhow::Result<()> {
    let kept = daemon.state.borrow().conns.kept().count();
    // That one of these fails is no reason to leave out the others.
    let forgotten = forget_ended(daemon).await;
    if daemon.state.borrow().conns.kept().count() < kept {
        engine::wants::send_all(daemon).await;
    }
    let followed = engine::entries::let_follow(daemon).await;
    let retired = reconcile::retire(daemon).await;
    forgotten.and(followed).and(retired)
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
        let _turn = daemon.kernel.looking().await;
        let named = |live: Live| Some((live.pair, live.socket));
        let mut alive = connections::sockets_as(daemon, named).await?;
        alive.sort_unstable();
        let socket_of = |pair: &FlowKey| {
            let at = alive.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
            Some(alive[at].1)
        };
        // What becomes of those is told by events.
        let passing: HashSet<FlowKey> = {
            let state = daemon.state.borrow();
            let marked = state.conns.iter().filter(|(_, conn)| conn.is_marked());
            let pairs = marked.map(|(pair, _)| *pair);
            pairs
                .filter(|pair| gateway::may_live(daemon, pair))
                .collect()
        };
        let conns = &mut daemon.state.borrow_mut().conns;
        conns.sweep(socket_of, |pair| passing.contains(pair))
    };
    let chosen = all_of(marking::mark_choices(daemon, &taken).await);
    let cleared = {
        let _turn = daemon.kernel.marking().await;
        let none: Vec<Mark> = gone.iter().map(|pair| Mark::moved(*pair, None)).collect();
        all_of(marking::write(daemon, &none).await)
    };
    let saved = match gone.is_empty() {
        true => Ok(()),
        false => daemon.save(),
    };
    chosen.and(cleared).map_err(Into::into).and(saved)
}
