//! Conditions of rules that come and go. A rule that names a time of day holds when it begins, and no more when it ends, for
//! connections that are there already too; new ones the kernel sorts by itself, also while no daemon runs. A rule that
//! prefers its bump asks which peers have a session: elsewhere what begins is plain, and moved once there is one. What is
//! on a bump stays there, whatever becomes of the session.

use std::rc::Rc;
use std::time::Duration;

use dibs_config::Level;
use dibs_io::LocalTime;
use dibs_switch::engine::{Machine as _, Mark, rules, wants};

use crate::host::live::Live;
use crate::rulebook::rules::Rule;
use crate::switch::marking::all_of;
use crate::switch::wakers::Task;
use crate::switch::{Daemon, reconcile, sessions};

/// A clock that was set, or another time zone, is noticed after this.
const HOURS_EVERY: Duration = Duration::from_secs(10);

/// Follows the time of day for good.
pub(crate) async fn follow_hours(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = turn_rules(&daemon, dibs_io::local_time()).await {
            tracing::warn!("cannot follow the time of day: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Hours);
        let next = daemon.state.borrow().rules.next_turn(dibs_io::local_time());
        match next {
            Some(next) => drop(tokio::time::timeout(next.min(HOURS_EVERY), due).await),
            None => due.await,
        }
    }
}

/// Has rules hold, or no more, that are to from now on.
async fn turn_rules(daemon: &Daemon, now: LocalTime) -> anyhow::Result<()> {
    if !daemon.state.borrow().rules.are_to_turn(now) {
        return Ok(());
    }
    let _turn = daemon.users.own_turn().await;
    let turned = daemon.state.borrow_mut().rules.turn(now);
    // The kernel's clock is UTC.
    reconcile::steer(daemon).await?;
    let lives = daemon.connections().await?;
    for rule in &turned {
        let holds = if rule.holds { "holds" } else { "holds no more" };
        daemon.events.tell_of(
            rule.audience(),
            "rule_turned",
            format!("rule {} {holds} at this time of day", rule.id),
            &[("rule", rule.id.to_string())],
        );
    }
    let gone: Vec<Rule> = turned.into_iter().filter(|rule| !rule.holds).collect();
    let wanted = wants::wanted(daemon);
    rules::follow_changed(daemon, gone.as_slice().into(), &lives).await;
    if wants::wanted(daemon) != wanted {
        wants::send_all(daemon).await;
    }
    Ok(())
}

/// Between two looks while a rule asks.
const SESSIONS_EVERY: Duration = Duration::from_millis(500);

/// Follows the sessions for good.
pub(crate) async fn follow_sessions(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = look_at_sessions(&daemon).await {
            tracing::warn!("cannot follow the sessions: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Sessions);
        if prefers(&daemon) {
            let _ = tokio::time::timeout(SESSIONS_EVERY, due).await;
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
    let lives = daemon.connections().await?;
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
