//! Rules that prefer their bump ask which peers have a session: elsewhere what begins is plain, and moved
//! once there is one. What is on a bump stays there, whatever becomes of the session.

use std::rc::Rc;
use std::time::Duration;

use dibs_config::Level;
use dibs_switch::engine::{Machine as _, Mark, rules};

use crate::host::live::Live;
use crate::kernel::connections;
use crate::switch::Daemon;
use crate::switch::marking::all_of;
use crate::switch::wakers::Task;
use crate::switch::{reconcile, sessions};

/// Between two looks while a rule asks.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Follows the sessions for good.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = look_at_sessions(&daemon).await {
            tracing::warn!("cannot follow the sessions: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Sessions);
        if prefers(&daemon) {
            let _ = tokio::time::timeout(LOOK_EVERY, due).await;
        } else {
            due.await;
        }
    }
}

fn prefers(daemon: &Daemon) -> bool {
    let state = daemon.state.borrow();
    let mut rules = state.rules.in_force();
    rules.any(|rule| rule.level == Level::Prefer)
}

/// Notes which peers have a session, and does what rules make of that.
async fn look_at_sessions(daemon: &Daemon) -> anyhow::Result<()> {
    let answers = sessions::sessions(daemon).await?;
    let turned: Vec<usize> = {
        let mut state = daemon.state.borrow_mut();
        let known = state.peers.iter_mut().zip(&answers).enumerate();
        let turned = known.filter_map(|(index, (peer, answers))| {
            let before = std::mem::replace(&mut peer.answers, *answers);
            (before != *answers).then_some(index)
        });
        turned.collect()
    };
    if turned.is_empty() || !prefers(daemon) {
        return Ok(());
    }
    let _turn = daemon.users.own_turn().await;
    reconcile::steer(daemon).await?;
    let lives = connections::all(daemon).await?;
    for peer in turned {
        let lives = lives.iter().filter(|live| live.peer == peer);
        let lives: Vec<Live> = lives.copied().collect();
        if answers[peer] {
            rules::follow_ruled(daemon, &lives).await;
        } else {
            release_opening(daemon, &lives).await?;
        }
    }
    Ok(())
}

/// Connections that a rule put on its bump before anybody knew that the peer is gone, and of which
/// nothing but a SYN is under way, begin in plain like those after them.
async fn release_opening(daemon: &Daemon, lives: &[Live]) -> anyhow::Result<()> {
    for live in lives.iter().filter(|live| live.opening) {
        let waits = daemon.state.borrow().ruling(live).may_begin_plain();
        if waits {
            all_of(daemon.mark(|| vec![Mark::moved(live.pair, None)]).await)?;
        }
    }
    Ok(())
}
