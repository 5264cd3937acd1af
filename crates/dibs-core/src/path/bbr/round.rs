//! Rounds: from a datagram's sending to the report of it.

use super::AckEvent;
use crate::time::Time;
use core::time::Duration;

/// A round, and what its reports have said.
#[derive(Debug)]
pub(super) struct Round {
    number: u64,
    /// It ends when what is sent after this much was delivered is acknowledged.
    end: u64,
    reported_at: Time,
    /// Nothing is in flight.
    idle: bool,
    seen: Seen,
}

/// What the reports of one round have said.
#[derive(Debug)]
struct Seen {
    started: Time,
    rate: u64,
    app_limited: bool,
    least_rtt: Option<Duration>,
    most_rtt: Duration,
    flight: u64,
    pause: Duration,
    idled: bool,
}

impl Seen {
    const fn since(now: Time) -> Self {
        Self {
            started: now,
            rate: 0,
            app_limited: false,
            least_rtt: None,
            most_rtt: Duration::ZERO,
            flight: 0,
            pause: Duration::ZERO,
            idled: false,
        }
    }
}

impl Round {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            number: 0,
            end: 0,
            reported_at: now,
            idle: true,
            seen: Seen::since(now),
        }
    }

    /// Rounds that have ended.
    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    pub(super) const fn started(&self) -> Time {
        self.seen.started
    }

    /// The highest rate of a sample, in bytes a second.
    pub(super) const fn rate(&self) -> u64 {
        self.seen.rate
    }

    pub(super) const fn is_app_limited(&self) -> bool {
        self.seen.app_limited
    }

    /// The least and the greatest round trip.
    pub(super) const fn rtts(&self) -> (Option<Duration>, Duration) {
        (self.seen.least_rtt, self.seen.most_rtt)
    }

    /// Most bytes in flight.
    pub(super) const fn flight(&self) -> u64 {
        self.seen.flight
    }

    /// Longest time between two reports, as long as there was something to report.
    pub(super) const fn pause(&self) -> Duration {
        self.seen.pause
    }

    /// True if nothing was in flight for a while: samples of the rate have a round trip of an empty path in them.
    pub(super) const fn has_idled(&self) -> bool {
        self.seen.idled
    }

    /// Takes a report; whether the round ends by it.
    pub(super) fn on_ack(&mut self, ev: &AckEvent) -> bool {
        let seen = &mut self.seen;
        seen.idled |= self.idle;
        if !self.idle {
            seen.pause = seen.pause.max(ev.now.since(self.reported_at));
        }
        self.idle = ev.in_flight == 0;
        self.reported_at = ev.now;
        seen.flight = seen.flight.max(ev.in_flight + ev.bytes);
        if let Some(rtt) = ev.rtt {
            seen.least_rtt = Some(seen.least_rtt.map_or(rtt, |least| least.min(rtt)));
            seen.most_rtt = seen.most_rtt.max(rtt);
        }
        let Some(sample) = ev.rate else { return false };
        seen.rate = seen.rate.max(sample.bytes_per_sec);
        seen.app_limited |= sample.app_limited;
        let ended = sample.prior_delivered >= self.end;
        if ended {
            self.end = ev.delivered;
            self.number += 1;
        }
        ended
    }

    /// The next one begins.
    pub(super) const fn begin(&mut self, now: Time) {
        self.seen = Seen::since(now);
    }

    /// Its round trips say nothing.
    pub(super) const fn forget_rtt(&mut self) {
        self.seen.least_rtt = None;
        self.seen.most_rtt = Duration::ZERO;
    }
}
