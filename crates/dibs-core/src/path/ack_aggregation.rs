//! Aggregation of acknowledgements (BBR's extra_acked).

use crate::time::Time;

/// By how much reports run ahead of the rate when they come in clumps (Wi-Fi, busy receivers).
#[derive(Debug)]
pub(super) struct AckAggregation {
    since: Time,
    acked: u64,
    /// Largest excess of the current and of the last ten rounds.
    max: [u64; 2],
    round: u64,
}

impl AckAggregation {
    const ROUNDS: u64 = 10;

    pub(super) const fn new(now: Time) -> Self {
        Self {
            since: now,
            acked: 0,
            max: [0; 2],
            round: 0,
        }
    }

    /// The largest excess, in bytes, of the last ten to twenty rounds.
    pub(super) fn max(&self) -> u64 {
        self.max[0].max(self.max[1])
    }

    /// `bytes` were reported in `round`, at a path's `rate` in bytes a second.
    pub(super) fn update(&mut self, now: Time, bytes: u64, rate: u64, round: u64) {
        if round >= self.round + Self::ROUNDS {
            self.max = [0, self.max[0]];
            self.round = round;
        }
        let expected = (rate as f64 * now.since(self.since).as_secs_f64()) as u64;
        if self.acked <= expected {
            self.since = now;
            self.acked = 0;
        }
        let expected = if self.acked == 0 { 0 } else { expected };
        self.acked += bytes;
        self.max[0] = self.max[0].max(self.acked.saturating_sub(expected));
    }
}
