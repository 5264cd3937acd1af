//! Delivery rate: draft-cheng-iccrg-delivery-rate-estimation.
//!
//! A sample is the amount delivered between two reports over the longer of the time that took and
//! the time its sending took. One thing differs from the draft: what a datagram remembers of the
//! moment it was sent is not the present state but that of a few milliseconds ago. On a path
//! with a round trip of 50 us and reports for 32 datagrams at once, a sample over one round trip
//! would measure how reports are clumped; over some milliseconds it measures the path.

use crate::time::Time;
use core::time::Duration;

/// Age of the state that a datagram remembers, and interval of a sample, at least.
const MIN_AGE: Duration = Duration::from_millis(2);

/// The estimator's state at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Checkpoint {
    delivered: u64,
    delivered_at: Time,
    /// When the datagram reported last was sent.
    sent_at: Time,
}

/// What a datagram remembers of the estimator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot {
    checkpoint: Checkpoint,
    app_limited: bool,
}

/// A sample of the delivery rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateSample {
    /// Bytes a second.
    pub(super) bytes_per_sec: u64,
    /// Bytes delivered in all when the measured interval began.
    pub(super) prior_delivered: u64,
    /// The sender had too little to send in the interval: the path may do more.
    pub(super) app_limited: bool,
}

/// The estimator.
#[derive(Debug)]
pub(super) struct DeliveryRate {
    now: Checkpoint,
    recent: Checkpoint,
    older: Checkpoint,
    /// Until so much is delivered, samples are app-limited.
    app_limited_until: u64,
}

impl DeliveryRate {
    pub(super) const fn new(now: Time) -> Self {
        let start = Checkpoint {
            delivered: 0,
            delivered_at: now,
            sent_at: now,
        };
        Self {
            now: start,
            recent: start,
            older: start,
            app_limited_until: 0,
        }
    }

    /// Bytes delivered in all.
    pub(super) const fn delivered(&self) -> u64 {
        self.now.delivered
    }

    /// To be called before a datagram is sent; `idle`: there was nothing to send.
    pub(super) fn on_sent(&mut self, now: Time, idle: bool) -> Snapshot {
        if idle {
            // Idle time is not delivery time.
            self.now.delivered_at = now;
            self.now.sent_at = now;
            self.recent = self.now;
            self.older = self.now;
        }
        Snapshot {
            checkpoint: self.older,
            app_limited: self.is_app_limited(),
        }
    }

    /// The sender lets the path's capacity pass unused, with `in_flight` bytes under way.
    pub(super) fn on_app_limited(&mut self, in_flight: u64) {
        // One more: until what is sent next is delivered.
        self.app_limited_until = self.now.delivered + in_flight + 1;
    }

    /// Whether what is sent now makes app-limited samples.
    pub(super) const fn is_app_limited(&self) -> bool {
        // The interval of a sample reaches back to the older state.
        self.app_limited_until > self.older.delivered
    }

    /// `bytes` were delivered at `at`, of which the datagram sent last was sent at `sent_at` with
    /// `snapshot`. No sample if the interval is shorter than `min_rtt`, or
    /// so short, after idle time, that it would measure a burst.
    pub(super) fn on_delivered(
        &mut self,
        at: Time,
        bytes: u64,
        sent_at: Time,
        snapshot: Snapshot,
        min_rtt: Duration,
    ) -> Option<RateSample> {
        // Reports may overtake each other.
        let at = at.max(self.now.delivered_at);
        // A state is final once a report comes at a later time: some come in clumps.
        if at > self.now.delivered_at
            && self.now.delivered_at.since(self.recent.delivered_at) >= MIN_AGE
        {
            self.older = self.recent;
            self.recent = self.now;
        }
        self.now = Checkpoint {
            delivered: self.now.delivered + bytes,
            delivered_at: at,
            sent_at,
        };
        let start = snapshot.checkpoint;
        let elapsed = at
            .since(start.delivered_at)
            .max(sent_at.since(start.sent_at));
        if elapsed < min_rtt.max(MIN_AGE) {
            return None;
        }
        let amount = self.now.delivered - start.delivered;
        let bytes_per_sec = (u128::from(amount) * 1_000_000_000 / elapsed.as_nanos()) as u64;
        Some(RateSample {
            bytes_per_sec,
            prior_delivered: start.delivered,
            app_limited: snapshot.app_limited,
        })
    }
}
