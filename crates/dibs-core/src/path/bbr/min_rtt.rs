//! The propagation time: the round trip of an empty path.

use crate::time::Time;
use core::time::Duration;

/// Age at which it is measured again.
const MAX_AGE: Duration = Duration::from_secs(10);

/// Rounds of a measurement: the first still sees the queue, the second what is left of it.
const PROBE_ROUNDS: u64 = 2;

/// The least round trip of late.
#[derive(Debug)]
pub(super) struct MinRtt {
    least: Option<Duration>,
    /// When a round trip close to it was seen last.
    at: Time,
    /// The measurement under way: its first round and least round trip.
    probe: (u64, Duration),
}

impl MinRtt {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            least: None,
            at: now,
            probe: (0, Duration::MAX),
        }
    }

    pub(super) const fn get(&self) -> Option<Duration> {
        self.least
    }

    /// Whether it is to be measured again.
    pub(super) fn is_old(&self, now: Time) -> bool {
        now.since(self.at) > MAX_AGE
    }

    pub(super) fn update(&mut self, now: Time, rtt: Duration) {
        self.probe.1 = self.probe.1.min(rtt);
        match self.least {
            Some(least) if rtt >= least => {
                // Close to it: it still holds.
                if rtt <= least + least / 16 + Duration::from_micros(50) {
                    self.at = now;
                }
            }
            _ => self.set(now, rtt),
        }
    }

    /// It is this, whatever was seen before.
    pub(super) const fn set(&mut self, now: Time, rtt: Duration) {
        self.least = Some(rtt);
        self.at = now;
    }

    /// It is taken to hold at `now`.
    pub(super) const fn hold(&mut self, now: Time) {
        self.at = now;
    }

    pub(super) const fn begin_probe(&mut self, round: u64) {
        self.probe = (round, Duration::MAX);
    }

    /// The least round trip since the measurement began, once it has gone on for rounds enough.
    pub(super) fn probed(&self, round: u64) -> Option<Duration> {
        (round >= self.probe.0 + PROBE_ROUNDS).then_some(self.probe.1)
    }
}
