//! Rules that name a time of day hold when it begins, and no more when it ends, for connections that are
//! there already too. New ones the kernel sorts by itself, also while no daemon runs.

use std::rc::Rc;
use std::time::Duration;

use dibs_io::LocalTime;

use crate::daemon::Daemon;
use crate::events::Audience;
use crate::rules::Rule;
use crate::wakers::Task;

/// A clock that was set, or another time zone, is noticed after this.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Seconds.
const DAY: u32 = 86_400;

/// Follows the time of day for good.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = daemon.turn_rules(dibs_io::local_time()).await {
            tracing::warn!("cannot follow the time of day: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Hours);
        match daemon.next_turn(dibs_io::local_time()) {
            Some(next) => drop(tokio::time::timeout(next.min(LOOK_EVERY), due).await),
            None => due.await,
        }
    }
}

impl Daemon {
    /// How long until a rule begins or ends to hold; none names a time of day.
    fn next_turn(&self, now: LocalTime) -> Option<Duration> {
        let state = self.state.borrow();
        let spans = state.rules.iter().filter_map(|rule| rule.selection.time);
        let until = |minute: u16| match (u32::from(minute) * 60 + DAY - now.second_of_day) % DAY {
            0 => DAY,
            seconds => seconds,
        };
        let next = spans.flat_map(|span| [until(span.start), until(span.end)]);
        let next = next.min()?;
        Some(Duration::from_secs(next.into()) - Duration::from_nanos(now.nanos.into()))
    }

    /// Has rules hold, or no more, that are to from now on.
    async fn turn_rules(&self, now: LocalTime) -> anyhow::Result<()> {
        let turns = |rule: &Rule| rule.clone().turn(now);
        let is_due = {
            let state = self.state.borrow();
            let timed = state.rules.iter().any(|rule| rule.selection.time.is_some());
            state.rules.iter().any(turns) || timed && state.utc_offset != now.utc_offset
        };
        if !is_due {
            return Ok(());
        }
        let _turn = self.users.own_turn().await;
        let turned: Vec<Rule> = {
            let mut state = self.state.borrow_mut();
            state.utc_offset = now.utc_offset;
            let turned = state.rules.iter_mut().filter_map(|rule| {
                let turned = rule.turn(now);
                turned.then(|| rule.clone())
            });
            turned.collect()
        };
        // The kernel's clock is UTC.
        self.steer().await?;
        let lives = self.connections().await?;
        for rule in &turned {
            let holds = if rule.holds { "holds" } else { "holds no more" };
            self.events.tell_of(
                Audience::of_rule(rule),
                "rule_turned",
                format!("rule {} {holds} at this time of day", rule.id),
                &[("rule", rule.id.to_string())],
            );
        }
        let gone: Vec<Rule> = turned.into_iter().filter(|rule| !rule.holds).collect();
        self.follow_changed_rules(&gone, &lives).await;
        Ok(())
    }
}
