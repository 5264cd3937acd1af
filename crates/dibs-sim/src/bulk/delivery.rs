//! What has been delivered, and how fast (Linux's `tcp_rate.c`).

use std::time::Duration;

use dibs_core::Time;

use super::event::Rate;
use super::scoreboard::{News, Snapshot};

/// The estimator of the delivery rate.
#[derive(Debug)]
pub(super) struct Delivery {
    /// Segments delivered.
    total: u64,
    at: Time,
    first_sent: Time,
    /// What is sent until so much was delivered is not limited by the path; zero: all is.
    limited_until: u64,
}

impl Delivery {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            total: 0,
            at: now,
            first_sent: now,
            limited_until: 0,
        }
    }

    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// Nothing was out, and something is sent.
    pub(super) const fn begin(&mut self, now: Time) {
        (self.first_sent, self.at) = (now, now);
    }

    /// What a segment that is sent remembers.
    pub(super) const fn snapshot(&self) -> Snapshot {
        Snapshot {
            delivered: self.total,
            delivered_at: self.at,
            first_sent: self.first_sent,
            app_limited: self.limited_until > 0,
        }
    }

    /// What is sent until so much was delivered is not limited by the path.
    pub(super) const fn set_limit(&mut self, until: u64) {
        self.limited_until = until;
    }

    /// The same, unless it is so for longer already.
    pub(super) fn raise_limit(&mut self, until: u64) {
        self.limited_until = self.limited_until.max(until);
    }

    pub(super) fn count(&mut self, now: Time, news: &News) {
        let count = news.acked + news.sacked;
        if count > 0 {
            self.total += count;
            self.at = now;
        }
        if let Some((_, newest)) = news.newest {
            self.first_sent = newest.sent;
        }
        if self.total > self.limited_until {
            self.limited_until = 0;
        }
    }

    /// The rate that an acknowledgement shows (`tcp_rate_gen`).
    pub(super) fn rate(&self, now: Time, news: &News, least: Option<Duration>) -> Option<Rate> {
        let (_, newest) = news.newest?;
        let before = newest.before;
        let sending = newest.sent.since(before.first_sent);
        let interval = sending.max(now.since(before.delivered_at));
        if interval < least? {
            return None;
        }
        Some(Rate {
            delivered: self.total - before.delivered,
            interval: interval.max(Duration::from_micros(1)),
            prior: before.delivered,
            app_limited: before.app_limited,
        })
    }
}
