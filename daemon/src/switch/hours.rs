//! Rules that name a time of day hold when it begins, and no more when it ends, for connections that are
//! there already too. New ones the kernel sorts by itself, also while no daemon runs.

use std::rc::Rc;
use std::time::Duration;

use dibs_io::LocalTime;
use dibs_switch::engine::{rules, wants};

use crate::control::events::Audience;
use crate::kernel::connections;
use crate::rulebook::rules::Rule;
use crate::switch::Daemon;
use crate::switch::reconcile;
use crate::switch::wakers::Task;

/// A clock that was set, or another time zone, is noticed after this.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Follows the time of day for good.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = turn_rules(&daemon, dibs_io::local_time()).await {
            tracing::warn!("cannot follow the time of day: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Hours);
        let next = daemon.state.borrow().rules.next_turn(dibs_io::local_time());
        match next {
            Some(next) => drop(tokio::time::timeout(next.min(LOOK_EVERY), due).await),
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
    let lives = connections::all(daemon).await?;
    for rule in &turned {
        let holds = if rule.holds { "holds" } else { "holds no more" };
        daemon.events.tell_of(
            Audience::of_rule(rule),
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
