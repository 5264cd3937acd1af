//! Round trips and the retransmission timeout (RFC 6298, with Linux's least timeout over the round trip).

use std::time::Duration;

/// What variation counts for at least, of the timeout (`TCP_RTO_MIN`).
const LEAST_VARIATION: Duration = Duration::from_millis(200);
/// Before anything was measured.
const INITIAL: Duration = Duration::from_secs(1);
/// The longest timeout (`TCP_RTO_MAX`).
const LONGEST: Duration = Duration::from_secs(120);

#[derive(Debug, Default)]
pub(super) struct Rtt {
    smoothed: Option<Duration>,
    variation: Duration,
    least: Option<Duration>,
    /// Timeouts in a row.
    backoff: u32,
}

impl Rtt {
    pub(super) fn sample(&mut self, rtt: Duration) {
        self.least = Some(self.least.map_or(rtt, |least| least.min(rtt)));
        match self.smoothed {
            None => {
                self.smoothed = Some(rtt);
                self.variation = rtt / 2;
            }
            Some(smoothed) => {
                self.variation = (self.variation * 3 + smoothed.abs_diff(rtt)) / 4;
                self.smoothed = Some((smoothed * 7 + rtt) / 8);
            }
        }
        self.backoff = 0;
    }

    pub(super) fn back_off(&mut self) {
        self.backoff = (self.backoff + 1).min(10);
    }

    /// Zero as long as nothing was measured.
    pub(super) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or_default()
    }

    pub(super) fn least(&self) -> Option<Duration> {
        self.least
    }

    /// When to send the last segment as a probe, the timeout aside (RFC 8985, 7.2); `alone`: one segment is
    /// under way, whose acknowledgement may be delayed.
    pub(super) fn probe_after(&self, alone: bool) -> Duration {
        let slack = if alone { 200 } else { 2 };
        self.smoothed.map_or(INITIAL, |smoothed| {
            smoothed * 2 + Duration::from_millis(slack)
        })
    }

    pub(super) fn timeout(&self) -> Duration {
        let once = match self.smoothed {
            Some(smoothed) => smoothed + LEAST_VARIATION.max(4 * self.variation),
            None => INITIAL,
        };
        (once * (1 << self.backoff)).min(LONGEST)
    }
}
