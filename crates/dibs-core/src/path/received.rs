//! The receiving side: which numbers have come in, and when to report them.

use super::ack;
use super::ranges::{Ranges, SeqRange};
use crate::time::Time;
use core::time::Duration;

/// Longest wait before received datagrams are reported.
pub(super) const MAX_ACK_DELAY: Duration = Duration::from_millis(1);

/// Most datagrams that one report waits for, at high rates.
const MAX_UNREPORTED: u32 = 128;

/// Datagrams that one report waits for, at low rates (RFC 9000, 13.2.2).
const MIN_UNREPORTED: u32 = 2;

/// Spacing of reports that the number of datagrams waited for is adapted to. A fraction of
/// [`MAX_ACK_DELAY`], so that the sender sees loss and rate in time without a report for each pair.
const SPACING: Duration = Duration::from_micros(250);

/// Ranges remembered. More than one frame carries, so that a late datagram below the reported ones
/// does not push out one of them.
const CAPACITY: usize = 2 * ack::MAX_ACK_RANGES;

/// Received numbers and the pending report.
///
/// A range is reported again and again until newer ones crowd it out: with up to 32 ranges in each
/// report every gap is repeated dozens of times, so the reports themselves need no acknowledgement.
#[derive(Debug)]
pub(super) struct Received {
    ranges: Ranges,
    largest_at: Time,
    /// Ack-eliciting datagrams since the last report.
    unreported: u32,
    first_unreported_at: Time,
    /// How many of them the next report waits for.
    threshold: u32,
    /// A gap has shown itself since the last report.
    gap: bool,
    reported_at: Time,
    /// Datagrams taken, all kinds.
    pub(super) datagrams: u64,
}

impl Received {
    pub(super) fn new(now: Time) -> Self {
        Self {
            ranges: Ranges::with_capacity(CAPACITY),
            largest_at: now,
            unreported: 0,
            first_unreported_at: now,
            threshold: MIN_UNREPORTED,
            gap: false,
            reported_at: now,
            datagrams: 0,
        }
    }

    pub(super) fn on_received(&mut self, now: Time, seq: u64, ack_eliciting: bool) {
        self.datagrams += 1;
        let largest = self.ranges.largest();
        self.ranges.insert(
            SeqRange {
                start: seq,
                end: seq,
            },
            |_| {},
        );
        let expected = largest.map_or(0, |l| l + 1);
        if seq >= expected {
            self.largest_at = now;
        }
        if ack_eliciting {
            if self.unreported == 0 {
                self.first_unreported_at = now;
            }
            self.unreported += 1;
            // A number skipped is a loss to repair; one filled late is a loss not to repair.
            self.gap |= seq != expected;
        }
    }

    /// When the pending report is due; `None` if there is nothing to report.
    pub(super) fn due_at(&self) -> Option<Time> {
        if self.unreported == 0 {
            return None;
        }
        if self.unreported >= self.threshold {
            return Some(self.first_unreported_at);
        }
        let by_delay = self.first_unreported_at + MAX_ACK_DELAY;
        // At a high rate with random loss most datagrams would follow a gap.
        let by_gap = self.reported_at + SPACING;
        Some(if self.gap {
            by_delay.min(by_gap)
        } else {
            by_delay
        })
    }

    /// Appends a report, with a count of ECN marks, to `out` if there is something to report and it fits `max_len`.
    pub(super) fn report(
        &mut self,
        now: Time,
        marked: u64,
        max_len: usize,
        out: &mut Vec<u8>,
    ) -> bool {
        let delay = now.since(self.largest_at).as_micros().min(u32::MAX.into()) as u32;
        let ranges = self.ranges.descending();
        if self.unreported == 0 || !ack::encode(delay, ranges, marked, max_len, out) {
            return false;
        }
        self.threshold = if now.since(self.reported_at) < SPACING {
            (self.threshold * 2).min(MAX_UNREPORTED)
        } else {
            (self.threshold / 2).max(MIN_UNREPORTED)
        };
        self.unreported = 0;
        self.gap = false;
        self.reported_at = now;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::ack::AckFrame;
    use super::*;

    const US: Duration = Duration::from_micros(1);
    const START: Time = Time::from_nanos(1_000_000_000);

    fn report(r: &mut Received, now: Time) -> AckFrame {
        let mut out = Vec::new();
        assert!(r.report(now, 0, 1200, &mut out));
        AckFrame::decode(&out).unwrap()
    }

    #[test]
    fn a_single_datagram_waits_for_the_delay_and_a_second_does_not() {
        let mut r = Received::new(START);
        assert_eq!(r.due_at(), None);
        r.on_received(START, 0, true);
        assert_eq!(r.due_at(), Some(START + MAX_ACK_DELAY));
        r.on_received(START + 100 * US, 1, true);
        assert!(r.due_at().unwrap() <= START + 100 * US);
        let frame = report(&mut r, START + 150 * US);
        assert_eq!((frame.largest(), frame.delay_us()), (1, 50));
        assert_eq!(r.due_at(), None);
    }

    #[test]
    fn what_elicits_none_is_reported_with_the_next_that_does() {
        let mut r = Received::new(START);
        r.on_received(START, 0, false);
        assert_eq!(r.due_at(), None);
        assert!(!r.report(START, 0, 1200, &mut Vec::new()));
        r.on_received(START, 1, true);
        assert_eq!(
            report(&mut r, START).ranges(),
            [SeqRange { start: 0, end: 1 }]
        );
    }

    #[test]
    fn the_threshold_follows_the_rate() {
        let mut r = Received::new(START);
        let mut now = START;
        let mut seq = 0;
        let mut per_report = |spacing: Duration, r: &mut Received| {
            let mut last = 0;
            for _ in 0..20 {
                last = 0;
                while r.due_at().is_none_or(|t| t > now) {
                    now += spacing;
                    r.on_received(now, seq, true);
                    seq += 1;
                    last += 1;
                }
                report(r, now);
            }
            last
        };
        assert_eq!(per_report(US, &mut r), MAX_UNREPORTED);
        assert_eq!(per_report(1000 * US, &mut r), MIN_UNREPORTED);
    }

    #[test]
    fn a_gap_is_reported_at_once_and_not_too_often() {
        let mut r = Received::new(START);
        let now = START + 1000 * US;
        r.threshold = MAX_UNREPORTED;
        r.on_received(now, 0, true);
        r.on_received(now, 2, true);
        assert!(r.due_at().unwrap() <= now);
        let ranges = [SeqRange { start: 2, end: 2 }, SeqRange { start: 0, end: 0 }];
        assert_eq!(report(&mut r, now).ranges(), ranges);
        r.threshold = MAX_UNREPORTED;
        r.on_received(now + US, 4, true);
        assert_eq!(r.due_at(), Some(now + SPACING));
    }
}
