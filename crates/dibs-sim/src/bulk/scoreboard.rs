//! What a sender has under way, segment by segment, and what of it the receiver has: SACK's scoreboard
//! (RFC 6675) with the times that RACK (RFC 8985) needs.

use std::collections::VecDeque;
use std::time::Duration;

use dibs_core::Time;

use super::segment::{Ack, BLOCKS, MSS};

/// A segment under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    /// When it was sent last.
    pub(super) sent: Time,
    /// Segments that had been delivered when it was sent.
    pub(super) delivered: u64,
    sacked: bool,
    lost: bool,
    /// Sent again since it was lost.
    again: bool,
    /// Sent again at any time.
    ever_again: bool,
    /// RACK looks at it. What was marked is off its list until it is sent again, as in Linux.
    listed: bool,
}

/// What one acknowledgement told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct News {
    /// Segments that had not been acknowledged by SACK before.
    pub(super) acked: u64,
    /// Newly acknowledged by SACK.
    pub(super) sacked: u64,
    /// Something that was sent only once, and not after `high`.
    pub(super) original: bool,
    /// A segment that was sent again was acknowledged for good.
    pub(super) again: bool,
    /// When the first and the last of those were sent that were acknowledged for good, and were sent once.
    pub(super) acked_span: Option<(Time, Time)>,
    /// The same of those by SACK.
    pub(super) sacked_span: Option<(Time, Time)>,
    /// The one sent last.
    pub(super) newest: Option<(u64, Packet)>,
    /// Segments that the lowest late one lay below the highest known: reordering.
    pub(super) reordered: Option<u64>,
}

/// RACK's clock: the segment sent last of those delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rack {
    pub(super) sent: Time,
    pub(super) number: u64,
    pub(super) rtt: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Board {
    /// Number of the first segment of `packets`.
    base: u64,
    packets: VecDeque<Packet>,
    sacked: u64,
    lost: u64,
    again: u64,
    /// The segment behind the highest that SACK named.
    fack: u64,
    /// Segments by the time that they were sent last.
    order: VecDeque<(Time, u64)>,
    /// Blocks named before: what is in them is known.
    known: [(u64, u64); BLOCKS],
    /// No lost segment that waits lies below.
    hint: u64,
    pub(super) rack: Rack,
}

impl Board {
    /// Segments that are not acknowledged for good.
    pub(super) fn out(&self) -> u64 {
        self.packets.len() as u64
    }

    /// Those that are thought to be on their way.
    pub(super) fn in_flight(&self) -> u64 {
        self.out() - self.sacked - self.lost + self.again
    }

    pub(super) fn sacked(&self) -> u64 {
        self.sacked
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Segments on their way for the second time.
    pub(super) fn again(&self) -> u64 {
        self.again
    }

    /// The next new segment.
    pub(super) fn next(&self) -> u64 {
        self.base + self.out()
    }

    /// When the first one was sent last.
    pub(super) fn head_sent(&self) -> Option<Time> {
        self.packets.front().map(|p| p.sent)
    }

    /// A new segment is sent, when so many had been delivered.
    pub(super) fn send_new(&mut self, now: Time, delivered: u64) {
        self.order.push_back((now, self.next()));
        self.packets.push_back(Packet {
            sent: now,
            delivered,
            sacked: false,
            lost: false,
            again: false,
            ever_again: false,
            listed: true,
        });
    }

    /// Lost segments that follow each other and have not been sent again, at most `most`: the first and their number.
    pub(super) fn next_lost(&mut self, most: u64) -> Option<(u64, u64)> {
        let waits = |p: &Packet| p.lost && !p.again && !p.sacked;
        if self.lost <= self.again {
            return None;
        }
        let from = self.hint.max(self.base);
        let skipped = (from - self.base) as usize;
        let at = self.packets.iter().skip(skipped).position(waits)?;
        self.hint = from + at as u64;
        let run = self.packets.iter().skip(skipped + at);
        let run = run.take(most as usize).take_while(|p| waits(p)).count();
        Some((self.hint, run as u64))
    }

    /// A segment is sent again.
    pub(super) fn send_again(&mut self, now: Time, number: u64, delivered: u64) {
        let p = &mut self.packets[(number - self.base) as usize];
        p.sent = now;
        p.delivered = delivered;
        p.ever_again = true;
        p.listed = true;
        if !p.again {
            p.again = true;
            self.again += 1;
        }
        self.order.push_back((now, number));
    }

    /// Takes an acknowledgement; `high` is where the recovery under way began.
    pub(super) fn take(&mut self, ack: &Ack, now: Time, least: Duration, high: u64) -> News {
        let mut news = News::default();
        let fack = self.fack;
        let mut late = u64::MAX;
        let repeated = usize::from(ack.repeated().is_some());
        let mut known = self.known;
        for (slot, block) in ack.blocks[repeated..].iter().take(BLOCKS).enumerate() {
            self.take_block(*block, now, least, high, &mut news, &mut late);
            known[slot] = *block;
        }
        self.known = known;
        let upto = (ack.upto / MSS).min(self.next());
        while self.base < upto {
            let p = self.packets.pop_front().expect("it is not acknowledged");
            let number = self.base;
            self.base += 1;
            self.lost -= u64::from(p.lost);
            self.again -= u64::from(p.again);
            if p.sacked {
                self.sacked -= 1;
                news.again |= p.ever_again;
                continue;
            }
            news.acked += 1;
            news.again |= p.ever_again;
            if !p.ever_again {
                let first = news.acked_span.map_or(p.sent, |(first, _)| first);
                news.acked_span = Some((first, p.sent));
                news.original |= number < high;
                if number < fack {
                    late = late.min(number);
                }
            }
            self.note_delivered(number, p, now, least, &mut news);
        }
        news.reordered = (late < fack).then(|| fack - late);
        news
    }

    fn take_block(
        &mut self,
        (from, to): (u64, u64),
        now: Time,
        least: Duration,
        high: u64,
        news: &mut News,
        late: &mut u64,
    ) {
        // Only what it covers whole.
        let (first, end) = (
            from.div_ceil(MSS).max(self.base),
            (to / MSS).min(self.next()),
        );
        let known = { self.known.iter() }.find(|k| from <= k.0 && k.1 <= to && k.0 < k.1);
        let (skip, resume) = match known {
            Some(k) => (k.0.div_ceil(MSS), k.1 / MSS),
            None => (end, end),
        };
        let parts = [(first, skip.min(end)), (resume.max(first), end)];
        for number in parts.into_iter().flat_map(|(from, to)| from..to) {
            let p = &mut self.packets[(number - self.base) as usize];
            if p.sacked {
                continue;
            }
            let was = *p;
            p.sacked = true;
            (p.lost, p.again, p.listed) = (false, false, false);
            self.sacked += 1;
            self.lost -= u64::from(was.lost);
            self.again -= u64::from(was.again);
            news.sacked += 1;
            if !was.ever_again {
                if number < self.fack {
                    *late = (*late).min(number);
                }
                news.original |= number < high;
                let first = news.sacked_span.map_or(was.sent, |(first, _)| first);
                news.sacked_span = Some((first, was.sent));
            }
            self.note_delivered(number, was, now, least, news);
        }
        self.fack = self.fack.max(end);
    }

    /// RACK's clock (RFC 8985, 6.2, step 1 and 2), and the segment sent last of those delivered.
    fn note_delivered(
        &mut self,
        number: u64,
        p: Packet,
        now: Time,
        least: Duration,
        news: &mut News,
    ) {
        let newest = news.newest.map(|(n, other)| (other.sent, n));
        if newest.is_none_or(|newest| newest < (p.sent, number)) {
            news.newest = Some((number, p));
        }
        let rtt = now.since(p.sent);
        if p.ever_again && rtt < least {
            return;
        }
        self.rack.rtt = rtt;
        if (p.sent, number) > (self.rack.sent, self.rack.number) {
            self.rack.sent = p.sent;
            self.rack.number = number;
        }
    }

    /// Marks what was sent so long before what has been delivered that it is lost (RFC 8985, 6.2, step 5).
    /// Returns how many, whether one of them had been sent again, and how long until the rest is.
    pub(super) fn detect(&mut self, now: Time, window: Duration) -> (u64, bool, Option<Duration>) {
        let allowed = self.rack.rtt + window;
        let (mut lost, mut again) = (0, false);
        while let Some(&(sent, number)) = self.order.front() {
            let at = number.checked_sub(self.base);
            let p = at.and_then(|at| self.packets.get_mut(at as usize));
            let Some(p) = p.filter(|p| p.listed && p.sent == sent) else {
                self.order.pop_front();
                continue;
            };
            if (sent, number) >= (self.rack.sent, self.rack.number) {
                return (lost, again, None);
            }
            if now.since(sent) < allowed {
                let before = self
                    .order
                    .partition_point(|o| *o < (self.rack.sent, self.rack.number));
                let last = self.order[before.max(1) - 1].0;
                return (lost, again, Some((last + allowed).since(now)));
            }
            p.listed = false;
            self.order.pop_front();
            again |= p.again;
            lost += self.mark(number);
        }
        (lost, again, None)
    }

    /// Marks as lost the first segment and what is older than a round trip (`tcp_timeout_mark_lost`).
    pub(super) fn time_out(&mut self, now: Time) {
        for number in self.base..self.next() {
            let p = &mut self.packets[(number - self.base) as usize];
            if number > self.base && now.since(p.sent) < self.rack.rtt {
                continue;
            }
            p.listed = false;
            self.mark(number);
        }
    }

    fn mark(&mut self, number: u64) -> u64 {
        let p = &mut self.packets[(number - self.base) as usize];
        if p.sacked {
            return 0;
        }
        self.hint = self.hint.min(number);
        if p.again {
            p.again = false;
            self.again -= 1;
        }
        let new = !p.lost;
        p.lost = true;
        self.lost += u64::from(new);
        1
    }

    /// Nothing is thought to be lost any more; RACK's list stays as it is (`tcp_undo_cwnd_reduction`).
    pub(super) fn unmark(&mut self) {
        self.packets.iter_mut().for_each(|p| p.lost = false);
        self.lost = 0;
    }
}
