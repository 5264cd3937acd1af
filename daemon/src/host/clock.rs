//! How late it is.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dibs_core::Time;
use serde::{Deserialize, Serialize};

/// By the clock that the node goes by.
pub(crate) fn now() -> Time {
    Time::from_nanos(dibs_io::boottime_ns())
}

/// When that is, for who sleeps until then.
pub(crate) fn instant(at: Time) -> tokio::time::Instant {
    tokio::time::Instant::now() + at.since(now())
}

/// Seconds since 1970.
pub(crate) fn wall() -> f64 {
    since_1970().as_secs_f64()
}

/// By the host's clock.
fn since_1970() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

/// A time of day that does not go back, whatever becomes of the host's clock: peers refuse a call that is older
/// than an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MonotonicWall {
    /// Milliseconds since 1970.
    wall: u64,
    /// Milliseconds since the host started, then.
    uptime: u64,
}

impl MonotonicWall {
    /// What the clock says, or where it would be if it had gone on from `before`, whichever is later. After
    /// the host has started anew nobody knows how long it was off.
    fn now(wall: Duration, uptime: Duration, before: Option<Self>) -> Self {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (wall, uptime) = (millis(wall), millis(uptime));
        let at_least = before.map_or(0, |before| {
            let since = uptime.saturating_sub(before.uptime);
            before.wall.saturating_add(since)
        });
        let wall = wall.max(at_least);
        Self { wall, uptime }
    }

    /// What the host's clocks say by now.
    pub(crate) fn after_last(before: Option<Self>) -> Self {
        let uptime = Duration::from_nanos(dibs_io::boottime_ns());
        Self::now(since_1970(), uptime, before)
    }

    /// Later than any moment that this stands for.
    pub(crate) fn after(self) -> Duration {
        Duration::from_millis(self.wall.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_calls_does_not_go_back() {
        let at = |wall, uptime, before| {
            MonotonicWall::now(
                Duration::from_secs(wall),
                Duration::from_secs(uptime),
                before,
            )
        };
        let first = at(1000, 10, None);
        assert_eq!(first.after(), Duration::from_millis(1_000_001));
        // Set back by an hour while nobody looked.
        let second = at(500, 30, Some(first));
        assert_eq!(second, at(1020, 30, None));
        // Another start of the host.
        assert_eq!(at(400, 5, Some(second)), at(1020, 5, None));
        assert_eq!(at(2000, 40, Some(second)), at(2000, 40, None));
    }
}
