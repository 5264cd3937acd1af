//! Comparison of the numbers by which the two kernels know the bytes of a connection that came from plain. Some firewalls and
//! proxies change them on the way, and a bump carries what the kernels say unchanged: each kernel would drop it as strange.
//!
//! A connection at rest has the same numbers at both ends. One that sends is ahead of what the other end has, so a distance that a
//! window reaches decides nothing by itself. Each end has, at some time, just what the other one sent before it came to the bump:
//! where that is seen the numbers fit. They differ if that is not seen although data has come by the bump for so long that TCP sent
//! it again, the peer's kernel still speaks, and neither has got on. Only the end that the data comes to can tell: on a slow way
//! it is long under way.

use std::mem;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{Segment, flags};

use crate::time::Time;

/// Distance that no window reaches: kernels that are further apart do not speak of the same bytes.
pub(super) const MOST_APART: u32 = 1 << 27;
/// Distance at which numbers are taken to be those of one stream. A firewall that draws its offset comes as near once in 2^15.
const NEAR: u32 = 1 << 16;
/// Time after which a kernel that said nothing is asked. It answers strange numbers twice a second at most
/// (`net.ipv4.tcp_invalid_ratelimit`).
const PATIENCE: Duration = Duration::from_millis(550);
/// Time after which data that the local kernel has not taken counts. What it waits for may have been lost in plain, and TCP sends it
/// again after a round trip and 0.2 s, or as much once more: a long way takes 0.6 s.
const IGNORED_FOR: Duration = Duration::from_secs(2);
/// Time in which numbers are found to fit or to differ, as a rule: TCP sends again after 0.2, 0.6, 1.4 and 3 s.
const DECIDED_WITHIN: Duration = Duration::from_secs(4);

/// Result of a [comparison](Numbers::compare).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// Nothing new.
    Open,
    /// The kernels do not count the same bytes alike. Said once.
    Differ,
    /// The local kernel said nothing while the peer's spoke: it is to be asked.
    Ask,
}

/// Numbers of both kernels since a connection came to a bump.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    acked: Option<SeqNumber>,
    sent_end: Option<SeqNumber>,
    /// Numbers of the first segments by a bump: of the local kernel, and of the peer's, as far as is known.
    first: [Option<SeqNumber>; 2],
    /// Bump by which those two were said.
    pub sent_by: Option<BumpId>,
    peers_seq: Option<SeqNumber>,
    peers_ack: Option<SeqNumber>,
    /// First comparison.
    begun: Option<Time>,
    /// Data has just come from the peer's kernel.
    is_data: bool,
    /// Moment at which data for the local kernel came first since one of them got on.
    given: Option<Time>,
    /// Moment at which the peer's kernel spoke first since then, while the local one was silent.
    unanswered: Option<Time>,
    /// Highest acknowledgements of both kernels, and number of the peer's data.
    had: [Option<SeqNumber>; 3],
    /// Directions that were seen to fit: to the local kernel, and from it.
    fit: [bool; 2],
    /// Both kernels spoke, and one of them had more than before.
    got_on: bool,
    /// Both kernels spoke, and a direction is not seen to fit.
    apart: bool,
    differ: bool,
    /// They were compared, and are not compared again.
    over: bool,
}

impl Numbers {
    /// True if the kernels were seen to count differently.
    pub const fn differ(&self) -> bool {
        self.differ
    }

    /// True if nothing is left to be compared.
    pub const fn is_over(&self) -> bool {
        self.over
    }

    /// True if the numbers were seen to fit, or to differ, or the connection gets on.
    pub const fn is_compared(&self) -> bool {
        self.over || self.got_on
    }

    /// True if what the peer's kernel sends was not seen to fit what the local one has, and may soon be: it could lie in its window by
    /// chance.
    pub fn may_be_strange(&self, now: Time) -> bool {
        let is_open = |begun| now.since(begun) < DECIDED_WITHIN;
        self.begun.is_some_and(is_open) && (self.differ || !(self.over || self.fit[0]))
    }

    /// True if the numbers do not fit, and the connection does not get on, so that it is at rest or its numbers differ.
    pub const fn is_apart(&self) -> bool {
        self.apart && !self.is_compared()
    }

    /// Forgets everything but whether they differed: they are compared anew.
    pub fn forget(&mut self) {
        *self = Self {
            differ: self.differ,
            ..Self::default()
        };
    }

    /// Notes where the local kernel stands, which sends `by` this bump or another one.
    pub fn note_local(&mut self, segment: &Segment<'_>, end: SeqNumber, by: BumpId) {
        self.acked = segment.has(flags::ACK).then_some(segment.ack);
        self.sent_end = Some(end);
        self.sent_by = Some(by);
        note_first(&mut self.first[0], segment.seq);
    }

    /// Notes where the peer's kernel stands, by a segment with so many bytes of data or with a FIN, or by one without.
    pub fn note_peers(&mut self, seq: SeqNumber, tcp: &TcpFields<'_>, data: Option<usize>) {
        self.peers_seq = Some(seq);
        // A byte that the local kernel has may only ask whether that is still there (RFC 9293, 3.8.4): it is not ignored, and nothing
        // gets on by it.
        let has = |end| self.acked.is_none_or(|acked| acked == end);
        self.is_data |= data.is_some_and(|len| len != 1 || !has(seq.add(1)));
        note_first(&mut self.first[1], seq);
        self.peers_ack = (tcp.flags & flags::ACK != 0).then_some(tcp.ack);
    }

    /// Compares where both kernels stand, as far as that is known, after a word of the local kernel, or of the peer's `by` a bump.
    pub fn compare(&mut self, now: Time, by: Option<BumpId>) -> Compared {
        if self.over {
            return Compared::Open;
        }
        self.begun.get_or_insert(now);
        let apart = [
            apart(self.acked, [self.peers_seq, self.first[1]]),
            apart(self.peers_ack, [self.sent_end, self.first[0]]),
        ];
        for (fit, apart) in self.fit.iter_mut().zip(apart) {
            *fit |= apart.is_some_and(|apart| apart <= NEAR);
        }
        self.note_progress(now);
        // What is late on a bump that the connection has left says nothing.
        let is_here = by.is_some_and(|by| self.sent_by.is_none_or(|sent_by| sent_by == by));
        let ignored = is_here && { self.given }.is_some_and(|at| now.since(at) >= IGNORED_FOR);
        let fit = self.fit;
        let is_further = |least: u32| {
            let mut undecided = fit.iter().zip(apart).filter(|(fit, _)| !**fit);
            undecided.any(|(_, apart)| apart.is_some_and(|apart| apart > least))
        };
        self.apart = is_further(NEAR);
        if self.apart && ignored || is_further(MOST_APART) {
            (self.differ, self.over) = (true, true);
            return Compared::Differ;
        }
        if self.fit == [true; 2] {
            (self.differ, self.over) = (false, true);
        }
        if by.is_some() && self.sent_by.is_none() {
            let since = *self.unanswered.get_or_insert(now);
            if now.since(since) >= PATIENCE {
                self.unanswered = Some(now);
                return Compared::Ask;
            }
        }
        Compared::Open
    }

    /// Notes whether either kernel got on, and what it was given since.
    fn note_progress(&mut self, now: Time) {
        let is_data = mem::take(&mut self.is_data);
        let sent = self.peers_seq.filter(|_| is_data);
        let latest = [self.acked, self.peers_ack, sent];
        for (of, (had, latest)) in self.had.iter_mut().zip(latest).enumerate() {
            let before = *had;
            if latest.is_some_and(|it| before.is_none_or(|before| it.is_after(before))) {
                *had = latest;
                if before.is_some() {
                    (self.given, self.unanswered) = (None, None);
                    self.got_on |= of < 2;
                }
            }
        }
        if is_data {
            self.given.get_or_insert(now);
        }
    }
}

/// Notes a number, if none is known that lies before it.
fn note_first(first: &mut Option<SeqNumber>, seq: SeqNumber) {
    if first.is_none_or(|first| first.is_after(seq)) {
        *first = Some(seq);
    }
}

/// Distance of what one kernel has from the nearest place where the other one was.
fn apart(has: Option<SeqNumber>, was: [Option<SeqNumber>; 2]) -> Option<u32> {
    let has = has?;
    let was = was.into_iter().flatten();
    was.map(|at| has.distance_from(at).unsigned_abs()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares after a word of the peer's kernel, with data or without, which stands at `seq` and `ack`; the local kernel stands at
    /// `acked` and `sent_end`.
    fn hear(
        numbers: &mut Numbers,
        now: Time,
        local: [u32; 2],
        peers: [u32; 2],
        is_data: bool,
    ) -> Compared {
        let [[acked, sent_end], [seq, ack]] = [local, peers].map(|of| of.map(SeqNumber::new));
        (numbers.acked, numbers.sent_end) = (Some(acked), Some(sent_end));
        (numbers.peers_seq, numbers.peers_ack) = (Some(seq), Some(ack));
        (numbers.sent_by, numbers.is_data) = (BumpId::new(1), is_data);
        numbers.compare(now, BumpId::new(1))
    }

    #[test]
    fn kernels_that_do_not_take_what_they_are_given_differ() {
        let at = |ms| Time::ZERO + Duration::from_millis(ms);
        // Less than a long window, of one direction or the other.
        for offset in [1 << 17, (1 << 26) + 5, (1u32 << 26).wrapping_neg()] {
            for peers in [[1000 + offset, 500], [1000, 500 + offset]] {
                let mut numbers = Numbers::default();
                let mut hear = |ms, is_data| {
                    let compared = hear(&mut numbers, at(ms), [1000, 500], peers, is_data);
                    (compared, numbers.is_compared())
                };
                // At rest nothing is known, however long it is.
                for ms in [0, 900] {
                    assert_eq!(hear(ms, false), (Compared::Open, false), "{offset}");
                }
                for ms in [2000, 2200, 3999] {
                    assert_eq!(hear(ms, true), (Compared::Open, false), "{offset}");
                }
                assert_eq!(hear(4000, false), (Compared::Differ, true));
                assert_eq!(hear(4001, true), (Compared::Open, true));
            }
        }
    }

    /// Data that this end sent in plain was lost, and its kernel waits for long before it sends that again.
    #[test]
    fn a_kernel_that_only_asks_whether_the_other_one_is_there_does_not_differ() {
        let [acked, given] = [1000, 500].map(SeqNumber::new);
        let mut numbers = Numbers {
            sent_end: Some(given.add(1 << 17)),
            sent_by: BumpId::new(1),
            ..Numbers::default()
        };
        let tcp = TcpFields {
            flags: flags::ACK,
            window: 0,
            ack: given,
            timestamps: None,
            meta: None,
            options: None,
            urgent: None,
        };
        let mut hear = |seq, seconds| {
            numbers.note_peers(seq, &tcp, Some(1));
            let now = Time::ZERO + Duration::from_secs(seconds);
            let compared = numbers.compare(now, BumpId::new(1));
            numbers.acked = Some(acked);
            compared
        };
        for seconds in [0, 5, 10] {
            assert_eq!(hear(acked.add(u32::MAX), seconds), Compared::Open);
        }
        // Another byte it would have to take.
        assert_eq!(hear(acked, 11), Compared::Open);
        assert_eq!(hear(acked, 13), Compared::Differ);
    }

    #[test]
    fn a_kernel_that_has_what_was_sent_before_the_bump_counts_alike() {
        for from_peer in [true, false] {
            // 1 MB is under way in plain; what follows by the bump is quicker, and is far ahead when that has arrived.
            let mut numbers = Numbers::default();
            for step in 0..=10 {
                let [has, sent, rests] = [step * 100_000, (step + 1) * 1_000_000, 500]
                    .map(|number| Some(SeqNumber::new(number)));
                let [local, peers] = match from_peer {
                    true => [(has, rests), (rests, sent)],
                    false => [(rests, sent), (has, rests)],
                };
                (numbers.acked, numbers.sent_end) = local;
                (numbers.peers_ack, numbers.peers_seq) = peers;
                note_first(&mut numbers.first[usize::from(from_peer)], sent.unwrap());
                (numbers.sent_by, numbers.is_data) = (BumpId::new(1), from_peer);
                let now = Time::ZERO + step * Duration::from_millis(300);
                assert_eq!(numbers.compare(now, BumpId::new(1)), Compared::Open);
                assert_eq!(numbers.is_over(), step == 10, "{step}");
            }
        }
    }

    #[test]
    fn a_connection_that_gets_on_is_not_taken_for_a_renumbered_one() {
        // 3 MB are under way from here, and are acknowledged now and then. At last it rests.
        let mut numbers = Numbers::default();
        let mut now = Time::ZERO;
        for step in 0..20 {
            let acked = 500 + step * 1_000_000;
            let local = [1000, acked + 3_000_000];
            let compared = hear(&mut numbers, now, local, [1000, acked], true);
            assert_eq!(compared, Compared::Open);
            assert_eq!(
                (numbers.is_compared(), numbers.is_over()),
                (step > 0, false)
            );
            now = now + IGNORED_FOR - Duration::from_millis(1);
        }
        let rests = [1000, 5];
        let compared = hear(&mut numbers, now, rests, rests, false);
        assert_eq!(compared, Compared::Open);
        assert!(numbers.is_over() && !numbers.differ());
        // It is compared anew after a reset, or where it comes back.
        numbers.forget();
        let far = [1000, 5 + (1 << 28)];
        let compared = hear(&mut numbers, now, rests, far, false);
        assert_eq!(compared, Compared::Differ);
    }
}
