//! Comparison of the numbers by which the two kernels know the bytes of a connection that came from plain. Some firewalls and
//! proxies change them on the way, and a bump carries what the kernels say unchanged: each kernel would drop it as strange.
//!
//! A connection at rest has the same numbers at both ends. One that sends is ahead of what the other end has, so a distance that a
//! window reaches decides nothing by itself. Each end has, at some time, just what the other one sent before it came to the bump:
//! where that is seen the numbers fit. They differ if that is not seen although the lowest data has come by the bump again, long after
//! it came first, the local kernel has answered it, and neither has got on. A kernel that does not answer may not hear what the bump gives
//! it, as behind a firewall. Only the end that the data comes to can tell: on a slow way it is long under way. A kernel that speaks, and
//! sends no data for longer than TCP waits to send it again, has it all acknowledged. They differ, too, if the local kernel has long said
//! that it sent less than the peer's has acknowledged, or if it answers the peer's with numbers further away than any window reaches.
//! Before that answer one of them may speak of a connection that had the same ends before.

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
/// Time after which data counts that comes again. What lies before it may have been lost in plain, and TCP sends that again after a
/// round trip and 0.2 s, or as much once more: a long way takes 0.6 s.
const IGNORED_FOR: Duration = Duration::from_secs(2);
/// Time in which numbers are found to fit or to differ, as a rule: TCP sends again after 0.2, 0.6, 1.4 and 3 s.
const DECIDED_WITHIN: Duration = Duration::from_secs(4);

/// Longest time after which TCP sends again what is not acknowledged (TCP_RTO_MAX of Linux), and some more.
const LONGEST_TIMER: Duration = Duration::from_secs(125);

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

/// Lowest data of the peer's kernel that came by a bump since one of the kernels got on.
#[derive(Clone, Copy, Debug)]
struct Given {
    seq: SeqNumber,
    by: BumpId,
    /// Moment at which it came first.
    since: Time,
    /// True once it came again long after, as TCP sends data that is not acknowledged: data before it would have come meanwhile.
    again: bool,
    /// True once the local kernel has said since then that it has no more than before.
    answered: bool,
    /// Data behind it that came when it was to come again, and when: it may only have overtaken.
    next: Option<(SeqNumber, Time)>,
}

impl Given {
    fn new(seq: SeqNumber, by: BumpId, since: Time) -> Self {
        Self {
            seq,
            by,
            since,
            again: false,
            answered: false,
            next: None,
        }
    }
}

/// Words of the peer's kernel without data, one after the other, by the same number or the one before it, as a question whether the local
/// one is there has it.
#[derive(Clone, Copy, Debug)]
struct Rest {
    seq: SeqNumber,
    first: Time,
    last: Time,
}

impl Rest {
    /// The same with another word, if that belongs to it.
    fn with(self, now: Time, seq: SeqNumber) -> Option<Self> {
        let near = seq.distance_from(self.seq).unsigned_abs() <= 1;
        let goes_on = near && now.since(self.last) <= LONGEST_TIMER;
        goes_on.then_some(Self { last: now, ..self })
    }
}

/// Numbers of both kernels since a connection came to a bump.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    acked: Option<SeqNumber>,
    sent_end: Option<SeqNumber>,
    /// Number of the last data that the local kernel sent.
    sent: Option<SeqNumber>,
    /// Moment since which the peer's kernel has acknowledged more than the local one says that it sent.
    unsent: Option<Time>,
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
    /// The local kernel has just said where it stands, without data.
    is_bare: bool,
    /// Data went by a bump, either way.
    had_data: bool,
    given: Option<Given>,
    rest: Option<Rest>,
    /// Last word of the peer's kernel.
    heard: Option<Time>,
    /// Moment at which the peer's kernel spoke first since one of them got on, while the local one was silent.
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
    /// A reset came or went, and the local kernel has said nothing since.
    ended: bool,
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

    /// True if the numbers do not fit although the connection is at rest, so that nothing is under way. Where data is, a kernel may only
    /// not have heard that it arrived.
    pub const fn is_apart(&self) -> bool {
        self.apart && !self.had_data && !self.is_compared()
    }

    /// Forgets everything but whether they differed: they are compared anew.
    pub fn forget(&mut self) {
        *self = Self {
            differ: self.differ,
            ..Self::default()
        };
    }

    /// Forgets everything but whether they differed, after a reset. Words of the peer's kernel count again once the local one has
    /// spoken: what is late may be of the connection that is over.
    pub fn end(&mut self) {
        self.forget();
        self.ended = true;
    }

    /// Notes where the local kernel stands, which sends `by` this bump or another one.
    pub fn note_local(&mut self, segment: &Segment<'_>, end: SeqNumber, by: BumpId) {
        self.ended = false;
        if end == segment.seq {
            self.note_bare(segment.seq);
        } else {
            (self.had_data, self.sent) = (true, Some(segment.seq));
        }
        self.acked = segment.has(flags::ACK).then_some(segment.ack);
        self.sent_end = Some(end);
        self.sent_by = Some(by);
        note_first(&mut self.first[0], segment.seq);
    }

    /// Notes a word of the local kernel without data.
    fn note_bare(&mut self, seq: SeqNumber) {
        self.is_bare = true;
        // A question whether the peer's kernel is there lies before what was sent (RFC 9293, 3.8.4). A kernel that probes a closed window by
        // a byte has not sent that, by its own account.
        let asks = self.sent_end.is_some_and(|sent| sent.is_after(seq)) && self.sent != Some(seq);
        if let Some(given) = &mut self.given
            && !asks
        {
            given.answered = given.again;
        }
    }

    /// Notes where the peer's kernel stands, by a segment with so many bytes of data or with a FIN, or by one without.
    pub fn note_peers(&mut self, seq: SeqNumber, tcp: &TcpFields<'_>, data: Option<usize>) {
        if self.ended {
            return;
        }
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
        if self.over || self.ended {
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
        if by.is_some() {
            self.note_rest(now);
        }
        self.note_progress(now, by);
        let is_strange = self.is_ignored() || self.acks_unsent(now) || self.has_all_acked();
        let fit = self.fit;
        let is_further = |least: u32| {
            let mut undecided = fit.iter().zip(apart).filter(|(fit, _)| !**fit);
            undecided.any(|(_, apart)| apart.is_some_and(|apart| apart > least))
        };
        self.apart = is_further(NEAR);
        let is_far = is_further(MOST_APART);
        if by.is_some() {
            self.heard = Some(now);
        }
        // Where ports are used again one kernel may speak here before the other one comes: only an answer decides.
        let answers = |heard| by.is_none() && now.since(heard) < DECIDED_WITHIN;
        if self.apart && is_strange || is_far && self.heard.is_some_and(answers) {
            (self.differ, self.over) = (true, true);
            return Compared::Differ;
        }
        if self.fit == [true; 2] {
            (self.differ, self.over) = (false, true);
        }
        let is_silent = |given: Given| given.again && !given.answered;
        let is_silent = is_far || self.sent_by.is_none() || self.given.is_some_and(is_silent);
        if by.is_some() && (is_silent || self.is_past_sent()) {
            let since = *self.unanswered.get_or_insert(now);
            if now.since(since) >= PATIENCE {
                self.unanswered = Some(now);
                return Compared::Ask;
            }
        }
        Compared::Open
    }

    /// True if the local kernel answers data that came again, and has no more than before.
    fn is_ignored(&self) -> bool {
        self.given.is_some_and(|given| given.answered)
    }

    /// Notes a word of the peer's kernel, with data or without.
    fn note_rest(&mut self, now: Time) {
        let seq = self.peers_seq.filter(|_| !self.is_data);
        let new = |seq| Rest {
            seq,
            first: now,
            last: now,
        };
        self.rest = seq.map(|seq| {
            let goes_on = self.rest.and_then(|rest| rest.with(now, seq));
            goes_on.unwrap_or(new(seq))
        });
    }

    /// True if the peer's kernel has all acknowledged that it sent, and the local one has not as much.
    fn has_all_acked(&self) -> bool {
        let rested = |rest: &Rest| rest.last.since(rest.first) > LONGEST_TIMER;
        let all = { self.rest.filter(rested) }.map(|rest| rest.seq);
        !self.fit[0] && apart(self.acked, [all, None]).is_some_and(|apart| apart > NEAR)
    }

    /// True if the local kernel has said for long that it sent less than the peer's has acknowledged. The latter is on its way to it
    /// at first, and a kernel that hears it sends from there on.
    fn acks_unsent(&mut self, now: Time) -> bool {
        if !mem::take(&mut self.is_bare) {
            return false;
        }
        self.unsent = { self.is_past_sent() }.then(|| self.unsent.unwrap_or(now));
        self.unsent
            .is_some_and(|since| now.since(since) >= IGNORED_FOR)
    }

    /// True if the peer's kernel has acknowledged more than the local one last said that it sent.
    fn is_past_sent(&self) -> bool {
        let acked = self.peers_ack.zip(self.sent_end);
        !self.fit[1] && acked.is_some_and(|(ack, end)| end.add(NEAR).distance_from(ack) < 0)
    }

    /// Notes whether either kernel got on, and what the local one was given since, `by` a bump.
    fn note_progress(&mut self, now: Time, by: Option<BumpId>) {
        let is_data = mem::take(&mut self.is_data);
        self.had_data |= is_data;
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
        // What is late on a bump that the connection has left says nothing.
        let by = by.filter(|by| self.sent_by.is_none_or(|sent_by| sent_by == *by));
        if let Some((seq, by)) = sent.zip(by) {
            self.note_data(now, seq, by);
        }
    }

    /// Notes data that the local kernel is given by a bump.
    fn note_data(&mut self, now: Time, seq: SeqNumber, by: BumpId) {
        let has_passed =
            |given: &Given| { given.next }.is_some_and(|(_, came)| now.since(came) >= PATIENCE);
        if let Some(given) = self.given.filter(has_passed)
            && let Some((seq, since)) = given.next
        {
            self.given = Some(Given::new(seq, given.by, since));
        }
        match &mut self.given {
            Some(given) if given.by == by && given.seq == seq => {
                given.next = None;
                if !given.again && now.since(given.since) >= IGNORED_FOR {
                    given.again = true;
                    self.unanswered = None;
                }
            }
            Some(given) if given.by == by && seq.is_after(given.seq) => {
                // The lower one is about to come again, unless it was acknowledged meanwhile.
                if !given.again && now.since(given.since) >= IGNORED_FOR {
                    let (next, since) = given.next.unwrap_or((seq, now));
                    let lowest = if next.is_after(seq) { seq } else { next };
                    given.next = Some((lowest, since));
                }
            }
            given => *given = Some(Given::new(seq, by, now)),
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
    use std::net::IpAddr;

    use dibs_wire::packet::{FlowKey, IpMeta};

    use super::*;

    const BY: Option<BumpId> = BumpId::new(1);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// Compares after a word of the peer's kernel, with so much data or without, which stands at `seq` and `ack`.
    fn hear(numbers: &mut Numbers, ms: u64, [seq, ack]: [u32; 2], data: Option<usize>) -> Compared {
        let tcp = TcpFields {
            flags: flags::ACK,
            window: 0,
            ack: SeqNumber::new(ack),
            timestamps: None,
            meta: None,
            options: None,
            urgent: None,
        };
        numbers.note_peers(SeqNumber::new(seq), &tcp, data);
        numbers.compare(at(ms), BY)
    }

    /// Compares after a word of the local kernel with so much data, which has `acked` and sends from `seq` on.
    fn say(numbers: &mut Numbers, ms: u64, [acked, seq]: [u32; 2], len: usize) -> Compared {
        let ends = [1, 2].map(|host| (IpAddr::from([10, 0, 0, host]), 1000));
        let seq = SeqNumber::new(seq);
        let segment = Segment {
            tuple: FlowKey::tcp(ends[0], ends[1]),
            meta: IpMeta::default(),
            seq,
            ack: SeqNumber::new(acked),
            flags: flags::ACK,
            window: 0,
            urgent: 0,
            timestamps: None,
            options: &[],
            payload_at: 0,
            payload: &[0; 1500][..len],
        };
        numbers.note_local(&segment, seq.add(u32::try_from(len).unwrap()), BY.unwrap());
        numbers.compare(at(ms), None)
    }

    /// Kernels of which one counts differently, by less than a long window, in one direction or the other: what the peer's says, if the
    /// local one has 1000 and sends from 500 on, and the peer's acknowledges no more.
    fn strange() -> impl Iterator<Item = [u32; 2]> {
        let offsets = [1 << 17, (1 << 26) + 5, (1u32 << 26).wrapping_neg()];
        let peers = offsets.map(|offset| [1000 + offset, 500]);
        peers.into_iter().chain([[1000, 500 + offsets[2]]])
    }

    /// The local kernel hears that at once, and sends from there on if it has sent so much.
    #[test]
    fn an_acknowledgement_of_what_was_never_sent_is_strange_even_at_rest() {
        let sent = 500 + (1 << 17);
        for (says, last) in [(500, Compared::Differ), (sent, Compared::Open)] {
            let mut numbers = Numbers::default();
            // Until it has heard it, and a question about that.
            for (ms, seq) in [(0, 500), (10, 499), (500, 500)] {
                assert_eq!(hear(&mut numbers, ms, [1000, sent], None), Compared::Open);
                assert_eq!(say(&mut numbers, ms, [1000, seq], 0), Compared::Open);
            }
            // It does not answer what it takes for strange.
            let asked = hear(&mut numbers, 2500, [1000, sent], None);
            assert_eq!(asked, Compared::Ask);
            assert_eq!(say(&mut numbers, 2501, [1000, says], 0), last);
            assert_eq!(say(&mut numbers, 9000, [1000, says], 0), Compared::Open);
        }
    }

    #[test]
    fn a_kernel_that_sends_nothing_again_for_minutes_has_all_acknowledged() {
        let [behind, ahead] =
            [(1u32 << 17).wrapping_neg(), 1 << 17].map(|by| 1000u32.wrapping_add(by));
        for seq in [behind, ahead] {
            // Each asks the other now and then whether it is there.
            let talk = |numbers: &mut Numbers, ms, data| {
                let asked = hear(numbers, ms, [seq - 1, 500], None);
                assert_eq!(asked, Compared::Open, "{ms}");
                assert_eq!(say(numbers, ms + 1, [1000, 500], 0), Compared::Open, "{ms}");
                hear(numbers, ms + 2, [seq, 500], data)
            };
            let mut numbers = Numbers::default();
            for ms in [0, 60_000, 120_000] {
                assert_eq!(talk(&mut numbers, ms, None), Compared::Open, "{ms}");
            }
            let asked = hear(&mut numbers, 126_000, [seq, 500], None);
            assert_eq!(asked, Compared::Differ);
            assert!(numbers.differ());
            // Data may come again until then, and a kernel that was not heard for long may have some.
            for (pauses, data) in [([60_000, 60_000], Some(300)), ([0, 130_000], None)] {
                let (mut numbers, mut ms) = (Numbers::default(), 0);
                for pause in pauses {
                    talk(&mut numbers, ms, None);
                    ms += pause;
                }
                assert_eq!(talk(&mut numbers, ms, data), Compared::Open);
                assert_eq!(talk(&mut numbers, ms + 10_000, None), Compared::Open);
                assert!(!numbers.differ());
            }
        }
    }

    /// One way is slower than the other.
    #[test]
    fn data_that_overtakes_what_comes_again_changes_nothing() {
        let [far, behind] = [1000, 1100].map(|seq| seq + (1 << 17));
        let mut numbers = Numbers::default();
        for (ms, seq, differs) in [
            (0, far, Compared::Open),
            (1, behind, Compared::Open),
            (300, far, Compared::Open),
            (301, behind, Compared::Open),
            (2400, behind, Compared::Open),
            (2401, far, Compared::Differ),
        ] {
            assert_eq!(
                hear(&mut numbers, ms, [seq, 500], Some(100)),
                Compared::Open
            );
            assert_eq!(say(&mut numbers, ms, [1000, 500], 0), differs, "{ms}");
        }
    }

    /// It repeats the byte, and says in between that it has not sent it.
    #[test]
    fn a_kernel_that_probes_a_closed_window_by_a_byte_answers() {
        let mut numbers = Numbers::default();
        let peers = [1000 + (1 << 17), 500];
        for ms in [0, 2000] {
            assert_eq!(hear(&mut numbers, ms, peers, Some(100)), Compared::Open);
            assert_eq!(say(&mut numbers, ms, [1000, 500], 1), Compared::Open);
        }
        assert_eq!(say(&mut numbers, 2001, [1000, 500], 0), Compared::Differ);
    }

    #[test]
    fn kernels_that_do_not_take_what_they_are_given_differ() {
        for peers in strange() {
            let mut numbers = Numbers::default();
            // At rest nothing is known, however long it is.
            for ms in [0, 900] {
                assert_eq!(hear(&mut numbers, ms, peers, None), Compared::Open);
                assert_eq!(say(&mut numbers, ms, [1000, 500], 0), Compared::Open);
                assert!(numbers.is_apart());
            }
            for ms in [2000, 2200, 3999, 4000] {
                assert_eq!(hear(&mut numbers, ms, peers, Some(100)), Compared::Open);
                assert!(!numbers.is_compared() && !numbers.is_apart());
                let differs = match ms {
                    4000 => Compared::Differ,
                    _ => Compared::Open,
                };
                assert_eq!(say(&mut numbers, ms, [1000, 500], 0), differs, "{ms}");
            }
            assert!(numbers.is_compared() && numbers.differ());
            assert_eq!(hear(&mut numbers, 4001, peers, Some(100)), Compared::Open);
        }
    }

    /// Behind a firewall that drops what the bump gives it, a kernel only sends its own data again.
    #[test]
    fn a_kernel_that_does_not_answer_is_asked() {
        for peers in strange() {
            let mut numbers = Numbers::default();
            for (ms, asked) in [
                (0, false),
                (2000, false),
                (2549, false),
                (2550, true),
                (2551, false),
            ] {
                let compared = match asked {
                    true => Compared::Ask,
                    false => Compared::Open,
                };
                assert_eq!(hear(&mut numbers, ms, peers, Some(100)), compared, "{ms}");
                // Data, and a question whether the peer's kernel is there.
                assert_eq!(say(&mut numbers, ms, [1000, 500], 100), Compared::Open);
                assert_eq!(say(&mut numbers, ms, [1000, 499], 0), Compared::Open);
            }
            assert_eq!(say(&mut numbers, 2552, [1000, 600], 0), Compared::Differ);
        }
    }

    /// Data before it was lost in plain, and has not been sent again, because the way by the bump was interrupted.
    #[test]
    fn data_that_does_not_come_again_is_not_ignored() {
        let mut numbers = Numbers::default();
        let far = 1000 + (1 << 17);
        for (ms, seq, data) in [
            (0, far, Some(100)),
            (9000, far, None),
            (9001, far + 100, Some(100)),
        ] {
            assert_eq!(hear(&mut numbers, ms, [seq, 500], data), Compared::Open);
            assert_eq!(say(&mut numbers, ms, [1000, 500], 0), Compared::Open);
        }
        // The same kernel, which sends what is not acknowledged.
        for (ms, differs) in [(9600, Compared::Open), (11_001, Compared::Differ)] {
            assert_eq!(
                hear(&mut numbers, ms, [far + 100, 500], Some(100)),
                Compared::Open
            );
            assert_eq!(say(&mut numbers, ms, [1000, 500], 0), differs, "{ms}");
        }
    }

    /// Data that this end sent in plain was lost, and its kernel waits for long before it sends that again.
    #[test]
    fn a_kernel_that_only_asks_whether_the_other_one_is_there_does_not_differ() {
        let mut numbers = Numbers::default();
        let sends = 500 + (1 << 17);
        for seconds in [0, 5, 10] {
            assert_eq!(
                hear(&mut numbers, seconds * 1000, [999, 500], Some(1)),
                Compared::Open
            );
            assert_eq!(
                say(&mut numbers, seconds * 1000, [1000, sends], 0),
                Compared::Open
            );
        }
        // Another byte it would have to take.
        for (seconds, differs) in [(11, Compared::Open), (13, Compared::Differ)] {
            assert_eq!(
                hear(&mut numbers, seconds * 1000, [1000, 500], Some(1)),
                Compared::Open
            );
            assert_eq!(say(&mut numbers, seconds * 1000, [1000, sends], 0), differs);
        }
    }

    #[test]
    fn a_kernel_that_has_what_was_sent_before_the_bump_counts_alike() {
        for from_peer in [true, false] {
            // 1 MB is under way in plain; what follows by the bump is quicker, and is far ahead when that has arrived.
            let mut numbers = Numbers::default();
            for step in 0..=10 {
                let [has, sent] = [step * 100_000, (step + 1) * 1_000_000];
                let (local, peers) = match from_peer {
                    true => ([has, 500], [sent, 500]),
                    false => ([500, sent], [500, has]),
                };
                let ms = u64::from(step) * 300;
                let data = from_peer.then_some(1000);
                assert_eq!(say(&mut numbers, ms, local, 0), Compared::Open);
                assert_eq!(hear(&mut numbers, ms, peers, data), Compared::Open);
                assert_eq!(numbers.is_over(), step == 10, "{step}");
            }
        }
    }

    #[test]
    fn a_connection_that_gets_on_is_not_taken_for_a_renumbered_one() {
        // 3.3 MB are under way from here, and are acknowledged now and then. At last it rests.
        let mut numbers = Numbers::default();
        let mut ms = 0;
        for step in 0..20 {
            let acked = 500 + step * 1_000_000;
            assert_eq!(
                say(&mut numbers, ms, [1000, acked + 3_300_000], 0),
                Compared::Open
            );
            assert_eq!(
                hear(&mut numbers, ms, [1000, acked], Some(100)),
                Compared::Open
            );
            assert_eq!(
                (numbers.is_compared(), numbers.is_over()),
                (step > 0, false)
            );
            ms += 2000;
        }
        let rests = 500 + 19 * 1_000_000;
        assert_eq!(say(&mut numbers, ms, [1000, rests], 0), Compared::Open);
        assert!(numbers.is_over() && !numbers.differ());
        // It is compared anew after a reset, or where it comes back.
        numbers.forget();
        assert_eq!(say(&mut numbers, ms, [1000, rests], 0), Compared::Open);
        let far = [1000, rests + (1 << 28)];
        assert_eq!(hear(&mut numbers, ms, far, None), Compared::Open);
        let answer = say(&mut numbers, ms, [1000, rests], 0);
        assert_eq!(answer, Compared::Differ);
    }

    /// Another connection of the same ends is about to come from plain, and the peer's end of it is here first.
    #[test]
    fn numbers_far_apart_are_those_of_one_connection_once_the_local_kernel_answers() {
        let mut numbers = Numbers::default();
        assert_eq!(say(&mut numbers, 0, [1000, 500], 0), Compared::Open);
        let far = [1000 + (1 << 30), 500 + (1 << 29)];
        for (ms, asked) in [(0, Compared::Open), (550, Compared::Ask)] {
            assert_eq!(hear(&mut numbers, ms, far, None), asked);
        }
        assert_eq!(say(&mut numbers, 551, far, 0), Compared::Open);
        assert!(numbers.is_over() && !numbers.differ());
    }

    #[test]
    fn what_is_late_after_a_reset_does_not_count() {
        let mut numbers = Numbers::default();
        assert_eq!(say(&mut numbers, 0, [1000, 500], 0), Compared::Open);
        numbers.end();
        assert_eq!(hear(&mut numbers, 1, [1000, 500], None), Compared::Open);
        let next = [1000 + (1 << 30), 500 + (1 << 29)];
        assert_eq!(say(&mut numbers, 2, next, 0), Compared::Open);
        assert_eq!(hear(&mut numbers, 3, next, None), Compared::Open);
        assert!(numbers.is_over() && !numbers.differ());
    }
}
