//! Comparison of the numbers by which the two kernels know the bytes of a connection that came from plain. Some firewalls and
//! proxies change them on the way, and a bump carries what the kernels say unchanged: each kernel would drop it as strange.
//!
//! A connection at rest has the same numbers at both ends. One that sends is ahead of what the other end has, so a distance that a
//! window reaches decides nothing by itself. Each end has, at some time, just what the other one sent before it came to the bump:
//! where that is seen the numbers fit. They differ if the peer's kernel acknowledges more than the local one has sent. Otherwise they differ
//! if the lowest data that came by the bump comes again long after, and neither kernel gets on, although the one that does not take what
//! it hears has answered: the local one if it lacks that data, else the peer's, which does not take that it is acknowledged. A kernel that
//! does not answer is asked; it may not hear what the bump gives it, as behind a firewall.

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
    stage: Stage,
    /// It came again, and the local kernel has said nothing without data since.
    unanswered: bool,
    /// Moment at which a higher one came late, and it did not.
    passed: Option<Time>,
}

/// Stage of data that comes again, as TCP sends what is not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It has come, and the local kernel lacks it.
    Lacked,
    /// It came again so long after that what lies before it would have come meanwhile: the local kernel is to answer.
    LackedAgain,
    /// It has come, and by the numbers the local kernel has it.
    Had,
    /// It came again: the peer's kernel did not take that it is acknowledged, or has not heard that.
    HadAgain,
    /// The peer's kernel has spoken without data since, so it hears the local one.
    HadAnswered,
    /// One of the kernels does not take what the other one says.
    Ignored,
}

/// Numbers of both kernels since a connection came to a bump.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    acked: Option<SeqNumber>,
    sent_end: Option<SeqNumber>,
    /// Number of what the local kernel sent last.
    sent: Option<SeqNumber>,
    /// The local kernel has just said where it stands, by a segment without data.
    answers: bool,
    /// Numbers of the first segments by a bump: of the local kernel, and of the peer's, as far as is known.
    first: [Option<SeqNumber>; 2],
    /// Bump by which those two were said.
    pub sent_by: Option<BumpId>,
    peers_seq: Option<SeqNumber>,
    peers_ack: Option<SeqNumber>,
    /// First comparison.
    begun: Option<Time>,
    /// Data has just come from the peer's kernel.
    came: Option<Stage>,
    /// The local kernel sent data again, and has said nothing else since.
    resends: bool,
    /// Data went by a bump, either way.
    had_data: bool,
    given: Option<Given>,
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

    /// Notes where the local kernel stands, which sends `by` this bump or another one.
    pub fn note_local(&mut self, segment: &Segment<'_>, end: SeqNumber, by: BumpId) {
        let is_bare = end == segment.seq;
        // A question whether the peer's kernel is there lies before what was sent (RFC 9293, 3.8.4).
        let asks = is_bare && self.sent.is_some_and(|sent| sent.is_after(segment.seq));
        let again = self.sent_end.is_some_and(|sent| sent.is_after(segment.seq));
        self.resends |= again && !is_bare;
        if is_bare && !asks {
            (self.resends, self.unanswered) = (false, None);
            self.answers = true;
            if let Some(given) = &mut self.given {
                given.unanswered = false;
                if given.stage == Stage::LackedAgain {
                    given.stage = Stage::Ignored;
                }
            }
        }
        if !asks {
            self.sent = Some(segment.seq);
        }
        self.had_data |= end != segment.seq;
        self.acked = segment.has(flags::ACK).then_some(segment.ack);
        self.sent_end = Some(end);
        self.sent_by = Some(by);
        note_first(&mut self.first[0], segment.seq);
    }

    /// Notes where the peer's kernel stands, by a segment with so many bytes of data or with a FIN, or by one without.
    pub fn note_peers(&mut self, seq: SeqNumber, tcp: &TcpFields<'_>, data: Option<usize>) {
        self.peers_seq = Some(seq);
        self.answers = false;
        match data {
            Some(len) => self.note_came(seq, tcp, len),
            None => {
                if let Some(given) = &mut self.given
                    && given.stage == Stage::HadAgain
                    && !given.seq.is_after(seq)
                {
                    given.stage = Stage::HadAnswered;
                }
            }
        }
        note_first(&mut self.first[1], seq);
        self.peers_ack = (tcp.flags & flags::ACK != 0).then_some(tcp.ack);
    }

    /// Notes data of the peer's kernel.
    fn note_came(&mut self, seq: SeqNumber, tcp: &TcpFields<'_>, len: usize) {
        let end = seq.add(u32::try_from(len.max(1)).unwrap_or(u32::MAX));
        let has = |acked: SeqNumber| !end.is_after(acked);
        // One byte that it has may only ask whether it is there (RFC 9293, 3.8.4). The last one of data is pushed.
        let asks = len == 1 && tcp.flags & flags::PSH == 0;
        match self.acked.map(has) {
            Some(true) if asks => {}
            Some(true) => self.came = Some(Stage::Had),
            Some(false) | None => self.came = Some(Stage::Lacked),
        }
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
        self.note_progress(now, by);
        let ignored = { self.given }.is_some_and(|given| given.stage == Stage::Ignored);
        let fit = self.fit;
        let is_further = |least: u32| {
            let mut undecided = fit.iter().zip(apart).filter(|(fit, _)| !**fit);
            undecided.any(|(_, apart)| apart.is_some_and(|apart| apart > least))
        };
        self.apart = is_further(NEAR);
        let acks_unsent = mem::take(&mut self.answers) && !fit[1] && self.acks_unsent();
        if self.apart && ignored || is_further(MOST_APART) || acks_unsent {
            (self.differ, self.over) = (true, true);
            return Compared::Differ;
        }
        if self.fit == [true; 2] {
            (self.differ, self.over) = (false, true);
        }
        let is_silent = self.sent_by.is_none() || self.resends;
        if by.is_some() && (is_silent || self.given.is_some_and(|given| given.unanswered)) {
            let since = *self.unanswered.get_or_insert(now);
            if now.since(since) >= PATIENCE {
                self.unanswered = Some(now);
                return Compared::Ask;
            }
        }
        Compared::Open
    }

    /// True if the peer's kernel acknowledges more than the local one has sent, where that has just said how much it has.
    fn acks_unsent(&self) -> bool {
        let beyond = self.peers_ack.zip(self.sent_end);
        beyond.is_some_and(|(ack, sent)| ack.is_after(sent.add(NEAR)))
    }

    /// Notes whether either kernel got on, and what the local one was given since, `by` a bump.
    fn note_progress(&mut self, now: Time, by: Option<BumpId>) {
        let came = self.came.take();
        self.had_data |= came.is_some();
        let sent = self.peers_seq.filter(|_| came.is_some());
        let latest = [self.acked, self.peers_ack, sent];
        for (of, (had, latest)) in self.had.iter_mut().zip(latest).enumerate() {
            let before = *had;
            if latest.is_some_and(|it| before.is_none_or(|before| it.is_after(before))) {
                *had = latest;
                if before.is_some() {
                    (self.given, self.unanswered, self.resends) = (None, None, false);
                    self.got_on |= of < 2;
                }
            }
        }
        // What is late on a bump that the connection has left says nothing.
        let by = by.filter(|by| self.sent_by.is_none_or(|sent_by| sent_by == *by));
        if let (Some(seq), Some(by), Some(stage)) = (self.peers_seq, by, came) {
            self.note_data(
                now,
                Given {
                    seq,
                    by,
                    since: now,
                    stage,
                    unanswered: false,
                    passed: None,
                },
            );
        }
    }

    /// Notes data that the local kernel is given.
    fn note_data(&mut self, now: Time, new: Given) {
        let Some(given) = self.given.as_mut().filter(|given| given.by == new.by) else {
            self.given = Some(new);
            return;
        };
        let is_late = now.since(given.since) >= IGNORED_FOR;
        if new.seq.is_after(given.seq) {
            // The lower one would have come with it, unless it was acknowledged meanwhile.
            let passed = given.passed.or(is_late.then_some(now));
            given.passed = passed;
            if passed.is_some_and(|passed| now.since(passed) >= IGNORED_FOR) {
                *given = new;
            }
            return;
        }
        given.passed = None;
        // A higher one came first, or where the local kernel stands was not known.
        let has = |stage| !matches!(stage, Stage::Lacked | Stage::LackedAgain);
        if given.seq.is_after(new.seq) || has(new.stage) && !has(given.stage) {
            *given = new;
            return;
        }
        given.unanswered = true;
        match given.stage {
            Stage::Lacked if is_late => {
                given.stage = Stage::LackedAgain;
                // The next word is an answer to this.
                self.unanswered = None;
            }
            Stage::Had => given.stage = Stage::HadAgain,
            Stage::HadAnswered if is_late => given.stage = Stage::Ignored,
            _ => {}
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
    fn hear(numbers: &mut Numbers, ms: u64, at: [u32; 2], data: Option<usize>) -> Compared {
        hear_pushed(numbers, ms, at, data, 0)
    }

    /// The same, with PSH or without.
    fn hear_pushed(
        numbers: &mut Numbers,
        ms: u64,
        [seq, ack]: [u32; 2],
        data: Option<usize>,
        push: u16,
    ) -> Compared {
        let tcp = TcpFields {
            flags: flags::ACK | push,
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
    /// local one has 1000 and sends from 500 on. The local one lacks what the peer's sends, which acknowledges less than was sent.
    fn strange() -> impl Iterator<Item = [u32; 2]> {
        let offsets = [1 << 17, (1 << 26) + 5];
        { offsets.into_iter() }.flat_map(|by| [[1000 + by, 500], [1000, 500u32.wrapping_sub(by)]])
    }

    #[test]
    fn a_kernel_that_acknowledges_what_was_not_sent_differs() {
        for (by, differs) in [(1 << 16, false), ((1 << 16) + 1, true)] {
            let mut numbers = Numbers::default();
            assert_eq!(hear(&mut numbers, 0, [9, 500 + by], None), Compared::Open);
            // A probe says nothing of what was sent, nor does data that is sent again.
            assert_eq!(say(&mut numbers, 1, [1000, 400], 100), Compared::Open);
            assert_eq!(say(&mut numbers, 2, [1000, 399], 0), Compared::Open);
            let expected = match differs {
                true => Compared::Differ,
                false => Compared::Open,
            };
            assert_eq!(say(&mut numbers, 3, [1000, 500], 0), expected);
        }
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

    /// What lay before the data was lost in plain, and the way by the bump was interrupted, so it has not been sent again.
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

    /// All before the last byte was acknowledged in plain, or the peer counts lower numbers. If the peer's kernel only sends it again, it may
    /// not hear that it is acknowledged, as behind a firewall.
    #[test]
    fn a_kernel_that_answers_and_still_sends_what_the_other_one_has_differs() {
        let far = 1 << 17;
        for (peers, acked, len) in [([999, 500], 1000, 1), ([1000, 500], 1000 + far, 100)] {
            for answers in [false, true] {
                let mut numbers = Numbers::default();
                let mut differs = None;
                for ms in [0, 200, 600, 1400, 3000, 6200] {
                    let local = [acked, 500 + far];
                    let compared = hear_pushed(&mut numbers, ms, peers, Some(len), flags::PSH);
                    assert_ne!(compared, Compared::Ask, "the local kernel answers");
                    if compared == Compared::Differ {
                        differs = differs.or(Some(ms));
                    }
                    assert_eq!(say(&mut numbers, ms + 1, local, 0), Compared::Open);
                    if answers {
                        let [seq, ack] = [peers[0] + u32::try_from(len).unwrap(), peers[1]];
                        hear(&mut numbers, ms + 20, [seq, ack], None);
                    }
                }
                assert_eq!(differs, answers.then_some(3000), "{len}");
            }
        }
    }

    #[test]
    fn a_kernel_that_sends_again_is_asked_whether_it_hears_the_other_one() {
        let mut numbers = Numbers::default();
        let mut asked = Vec::new();
        for ms in [0, 200, 600, 1400, 3000] {
            assert_eq!(say(&mut numbers, ms, [1000, 1 << 20], 100), Compared::Open);
            if hear(&mut numbers, ms + 20, [1000, 500], None) == Compared::Ask {
                asked.push(ms);
            }
        }
        assert_eq!(asked, [1400, 3000]);
        // It has answered.
        assert_eq!(
            say(&mut numbers, 3021, [1000, (1 << 20) + 100], 0),
            Compared::Open
        );
        assert_eq!(hear(&mut numbers, 6000, [1000, 500], None), Compared::Open);
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
        assert_eq!(hear(&mut numbers, ms, far, None), Compared::Differ);
    }
}
