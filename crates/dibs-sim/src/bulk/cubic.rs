//! CUBIC (RFC 9438) with HyStart (Ha, Rhee 2011), as Linux has them (`tcp_cubic.c`).

use std::time::Duration;

use dibs_core::Time;

use super::event::{Event, State, Window};

/// What a loss leaves of the window.
const BETA: f64 = 717.0 / 1024.0;
/// Growth, in segments over seconds cubed.
const C: f64 = 0.4;
/// Segments for each of which Reno-friendly growth adds one, over the window (RFC 9438, 4.3).
const FRIENDLY: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// Windows below which HyStart does nothing.
const LOW_WINDOW: u64 = 16;
/// Acknowledgements that follow each other so closely are one train.
const TRAIN_GAP: Duration = Duration::from_millis(2);
/// Round trips of a round that are looked at for their least.
const SAMPLES: u32 = 8;
/// A round trip longer by an eighth, within these, ends slow start.
const DELAY_LEAST: Duration = Duration::from_millis(4);
const DELAY_MOST: Duration = Duration::from_millis(16);
/// After a loss round trips say nothing for so long.
const DISCARD: Duration = Duration::from_secs(1);
/// The window's goal is looked at so often.
const LOOK_EVERY: Duration = Duration::from_nanos(1_000_000_000 / 32);

#[derive(Debug, Default)]
pub(super) struct Cubic {
    /// Segments acknowledged for each by which the window grows.
    count: f64,
    last_max: u64,
    last_cwnd: u64,
    last_time: Option<Time>,
    origin: u64,
    k: f64,
    least: Option<Duration>,
    epoch: Option<Time>,
    acked: f64,
    friendly: f64,
    /// Acknowledged since the window grew.
    credit: f64,
    hystart: HyStart,
}

#[derive(Debug, Default)]
struct HyStart {
    found: bool,
    round_start: Time,
    last_ack: Time,
    end: u64,
    round_least: Option<Duration>,
    samples: u32,
}

impl Cubic {
    pub(super) fn new(now: Time) -> Self {
        let mut cubic = Self::default();
        cubic.reset(now);
        cubic
    }

    /// Forgets what a timeout has made worthless.
    pub(super) fn reset(&mut self, now: Time) {
        *self = Self::default();
        self.hystart.begin(now, 0);
    }

    pub(super) fn on_ack(&mut self, event: &Event, window: &mut Window) {
        if let Some(rtt) = event.rtt {
            self.on_rtt(event, rtt, window);
        }
        if event.state == State::Recovery || !event.may_grow || !window.limits {
            return;
        }
        let mut acked = event.delivered;
        if window.slow_start() {
            let cwnd = (window.cwnd + acked).min(window.ssthresh);
            acked -= cwnd - window.cwnd;
            window.cwnd = cwnd;
            if acked == 0 {
                return;
            }
        }
        self.update(event.now, window.cwnd, acked);
        self.grow(window, acked);
    }

    /// A loss: the threshold, and the goal of the growth after it.
    pub(super) fn reduce(&mut self, cwnd: u64) -> u64 {
        self.epoch = None;
        self.last_max = match cwnd < self.last_max {
            true => (cwnd as f64 * (1.0 + BETA) / 2.0) as u64,
            false => cwnd,
        };
        ((cwnd as f64 * BETA) as u64).max(2)
    }

    fn on_rtt(&mut self, event: &Event, rtt: Duration, window: &mut Window) {
        if self.epoch.is_some_and(|t| event.now.since(t) < DISCARD) {
            return;
        }
        let least = self.least.map_or(rtt, |least| least.min(rtt));
        self.least = Some(least);
        let looks = !self.hystart.found && window.slow_start();
        if looks && window.cwnd >= LOW_WINDOW && self.hystart.ends(event, rtt, least) {
            window.ssthresh = window.cwnd;
        }
    }

    fn update(&mut self, now: Time, cwnd: u64, acked: u64) {
        self.acked += acked as f64;
        let looked = self.last_time.map(|t| now.since(t));
        if self.last_cwnd == cwnd && looked.is_some_and(|t| t <= LOOK_EVERY) {
            return;
        }
        if self.epoch.is_none() || self.last_time != Some(now) {
            self.last_cwnd = cwnd;
            self.last_time = Some(now);
            let epoch = *self.epoch.get_or_insert_with(|| {
                self.acked = acked as f64;
                self.friendly = cwnd as f64;
                (self.k, self.origin) = match self.last_max.checked_sub(cwnd) {
                    Some(below) => ((below as f64 / C).cbrt(), self.last_max),
                    None => (0.0, cwnd),
                };
                now
            });
            let t = (now + self.least.unwrap_or_default()).since(epoch);
            let goal = self.origin as f64 + C * (t.as_secs_f64() - self.k).powi(3);
            self.count = match goal > cwnd as f64 {
                true => cwnd as f64 / (goal - cwnd as f64),
                false => 100.0 * cwnd as f64,
            };
            if self.last_max == 0 {
                self.count = self.count.min(20.0);
            }
        }
        let each = cwnd as f64 / FRIENDLY;
        while self.acked > each {
            self.acked -= each;
            self.friendly += 1.0;
        }
        if self.friendly > cwnd as f64 {
            self.count = self.count.min(cwnd as f64 / (self.friendly - cwnd as f64));
        }
        self.count = self.count.max(2.0);
    }

    fn grow(&mut self, window: &mut Window, acked: u64) {
        if self.credit >= self.count {
            self.credit = 0.0;
            window.cwnd += 1;
        }
        self.credit += acked as f64;
        let more = (self.credit / self.count).floor();
        self.credit -= more * self.count;
        window.cwnd += more as u64;
    }
}

impl HyStart {
    fn begin(&mut self, now: Time, end: u64) {
        self.round_start = now;
        self.last_ack = now;
        self.end = end;
        self.round_least = None;
        self.samples = 0;
    }

    /// Whether slow start ends: acknowledgements came in one train for half the least round trip, or the
    /// round's least is longer than that by more than it may.
    fn ends(&mut self, event: &Event, rtt: Duration, least: Duration) -> bool {
        let now = event.now;
        if event.una > self.end {
            self.begin(now, event.next);
        }
        if now.since(self.last_ack) <= TRAIN_GAP {
            self.last_ack = now;
            if now.since(self.round_start) > least / 2 {
                self.found = true;
            }
        }
        let round_least = self.round_least.map_or(rtt, |least| least.min(rtt));
        self.round_least = Some(round_least);
        if self.samples < SAMPLES {
            self.samples += 1;
        } else if round_least > least + (least / 8).clamp(DELAY_LEAST, DELAY_MOST) {
            self.found = true;
        }
        self.found
    }
}
