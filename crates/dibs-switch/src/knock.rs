//! Proof that plain carries a connection, before the connection leaves its bump for plain (docs/switching.md).
//!
//! Each end sends an acknowledgement in plain, by the ordinary route, and says its numbers by a KNOCK message or by
//! the answer to that. An end that sees these numbers arrive as that very connection has heard the other end. A router
//! or a firewall that does not know the connection, or has lost track of its numbers, drops or translates the
//! acknowledgement: then the connection stays on its bump.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use dibs_core::Time;
use dibs_core::node::ConnSnapshot;
use dibs_wire::emit::Headers;
use dibs_wire::packet::{self, FlowKey, IpMeta, Packet, flags};
use dibs_wire::{SeqNumber, emit, virtio};

use crate::messages::{Answer, Outcome, Unanswered};

/// Time for an acknowledgement to arrive.
pub const WITHIN: Duration = Duration::from_secs(2);
/// Time before the first repetition; each later one waits twice as long, up to 16 times as long. The other end may begin
/// to listen late, because it deals with one question at a time.
const REPEAT_AFTER: Duration = Duration::from_millis(20);
const DOUBLINGS: u32 = 4;
const LONGEST_WAIT: Duration = Duration::from_millis(320);
/// Acknowledgements that the end that is asked sends once it has heard the other.
const LEAST_SENT: u32 = 3;
/// Acknowledgements that are kept while the numbers of the other end are not known yet.
const MOST_HEARD: usize = 8;
/// The number beside the answer of an end that has the connection in plain already, and sends no acknowledgement.
const IN_PLAIN: u64 = 0;
/// How far the acknowledgement in front of another one is behind that. Linux's conntrack takes what is up to 66,000 bytes
/// behind what it has seen (MAXACKWINDOW).
const BEHIND: u32 = 64_000;
/// Hop limit of an acknowledgement.
const TTL: u8 = 64;
/// Window of an acknowledgement. No kernel takes it, as the acknowledgement is an old one.
const WINDOW: u16 = 512;

/// The numbers of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Numbers {
    seq: u32,
    ack: u32,
}

impl Numbers {
    /// Numbers of an end that has sent up to `sent_end` and acknowledged `acked`.
    ///
    /// The acknowledgement is one byte behind the latest. So a reset that a stranger answers with has a number outside
    /// the window of the kernel here, and ends nothing (RFC 5961, 3.2).
    pub fn of(sent_end: SeqNumber, acked: SeqNumber) -> Self {
        Self {
            seq: sent_end.raw(),
            ack: acked.add(u32::MAX).raw(),
        }
    }

    /// Number behind what the end has sent, and what it acknowledges here.
    pub(crate) fn seen(self) -> (SeqNumber, SeqNumber) {
        (SeqNumber::new(self.seq), SeqNumber::new(self.ack))
    }

    /// The numbers in a message.
    pub fn to_wire(self) -> u64 {
        u64::from(self.seq) << 32 | u64::from(self.ack)
    }

    /// The numbers out of a message.
    pub fn from_wire(wire: u64) -> Self {
        Self {
            seq: (wire >> 32) as u32,
            ack: wire as u32,
        }
    }
}

/// Numbers of an end with the window that its kernel last advertised, as a header has it: a firewall that follows the numbers lets pass
/// what the other end sends into that window, although what advertised it went by the bump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing {
    /// The numbers.
    pub numbers: Numbers,
    /// The window.
    pub window: u16,
}

impl Standing {
    /// Numbers and window of a connection in the data path; none if it has not both sent and acknowledged.
    pub fn of(conn: &ConnSnapshot) -> Option<Self> {
        let (sent_end, acked) = conn.stands?;
        Some(Self {
            numbers: Numbers::of(sent_end, acked),
            window: conn.window,
        })
    }

    /// Numbers and windows of these connections in the data path; the latest of one that was seen on several bumps.
    pub fn latest(conns: &[ConnSnapshot], pairs: &[FlowKey]) -> BTreeMap<FlowKey, Self> {
        let mut known: HashMap<FlowKey, (Time, Self)> = HashMap::new();
        for conn in conns {
            if let Some(shown) = Self::of(conn) {
                let found = (conn.last_seen, shown);
                let latest = known.entry(conn.tuple).or_insert(found);
                *latest = (*latest).max(found);
            }
        }
        let latest = |pair: &FlowKey| Some((*pair, known.get(pair)?.1));
        pairs.iter().filter_map(latest).collect()
    }

    /// Number behind what the end has sent, and what it has acknowledged.
    pub(crate) fn stands(self) -> (SeqNumber, SeqNumber) {
        let (sent_end, behind) = self.numbers.seen();
        (sent_end, behind.add(1))
    }
}

impl From<Numbers> for Standing {
    /// With a window that lets little pass, for it is not known.
    fn from(numbers: Numbers) -> Self {
        Self {
            numbers,
            window: WINDOW,
        }
    }
}

/// Packets that this host sends for an acknowledgement: one that acknowledges less in front of it.
///
/// A firewall that follows the numbers drops what acknowledges bytes that it has not seen, as they went by the bump. The
/// one in front tells it what this end has sent, so that it lets the other end's acknowledgement of that pass.
pub fn packets(pair: &FlowKey, own: Standing) -> [Vec<u8>; 2] {
    [behind(own), own].map(|own| packet(pair, own))
}

/// Packets for a connection that leaves for plain: more may have gone by the bump than the first one of [`packets()`] covers, since the
/// firewall saw the other end's bytes up to `seen`.
pub fn partings(pair: &FlowKey, own: Standing, seen: Option<SeqNumber>) -> Vec<Vec<u8>> {
    let front = behind(own);
    let is_far = |seen: &SeqNumber| SeqNumber::new(front.numbers.ack).is_after(*seen);
    let first = seen.filter(is_far).map(|seen| {
        let ack = seen.raw();
        let numbers = Numbers { ack, ..own.numbers };
        packet(pair, Standing { numbers, ..front })
    });
    first.into_iter().chain(packets(pair, own)).collect()
}

/// The same end with an acknowledgement that no kernel takes, and so not its window either: the firewall lets pass what the other end
/// sends by then.
fn behind(own: Standing) -> Standing {
    let ack = own.numbers.ack.wrapping_sub(BEHIND);
    Standing {
        numbers: Numbers { ack, ..own.numbers },
        window: u16::MAX,
    }
}

fn packet(pair: &FlowKey, own: Standing) -> Vec<u8> {
    let numbers = (
        SeqNumber::new(own.numbers.seq),
        SeqNumber::new(own.numbers.ack),
    );
    segment(pair, numbers, (own.window, None), &[])
}

/// Packet with an acknowledgement without data, of these numbers (seq, ack) and time stamps (TSval, TSecr).
pub(crate) fn acknowledgement(
    pair: &FlowKey,
    numbers: (SeqNumber, SeqNumber),
    timestamps: Option<(u32, u32)>,
) -> Vec<u8> {
    segment(pair, numbers, (WINDOW, timestamps), &[])
}

/// Packet with one byte that the other end has already, of these numbers (seq, ack) and with this window.
pub(crate) fn shown(pair: &FlowKey, numbers: (SeqNumber, SeqNumber), window: u16) -> Vec<u8> {
    segment(pair, numbers, (window, None), &[0])
}

fn segment(
    pair: &FlowKey,
    (seq, ack): (SeqNumber, SeqNumber),
    (window, timestamps): (u16, Option<(u32, u32)>),
    payload: &[u8],
) -> Vec<u8> {
    let headers = Headers {
        tuple: *pair,
        meta: IpMeta {
            ttl: TTL,
            ..IpMeta::default()
        },
        seq,
        ack,
        flags: flags::ACK,
        window,
        urgent: 0,
        timestamps,
        options: None,
    };
    let mut bytes = vec![0; headers.encoded_len()];
    headers.write(&mut bytes, payload.len(), 0);
    bytes.extend(payload);
    let (header, packet) = bytes.split_at_mut(virtio::LEN);
    let header = virtio::VirtioHdr::decode(header.first_chunk().expect("a header was written"));
    let completed = header.is_ok_and(|header| emit::complete_checksum(&header, packet));
    assert!(completed, "the offsets are those that were just written");
    packet.to_vec()
}

/// The connection, as this host sends, and the numbers of an acknowledgement without data that came in.
pub fn read(bytes: &[u8]) -> Option<(FlowKey, Numbers)> {
    let Ok(Packet::Tcp(segment)) = packet::parse(bytes) else {
        return None;
    };
    let pair = segment.tuple.reversed();
    let numbers = Numbers {
        seq: segment.seq.raw(),
        ack: segment.ack.raw(),
    };
    let is_empty = segment.flags == flags::ACK && segment.payload.is_empty();
    is_empty.then_some((pair, numbers))
}

/// One end's part in a knock: what it sends when, and what it has heard.
///
/// [`poll_send`](Self::poll_send) says what is to be sent by now, and [`due`](Self::due) when there is more to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Knock {
    /// When it began, or began to send again.
    since: Time,
    /// Numbers and window that this end sends; none if it is in plain already, and has nothing to prove.
    own: Option<Standing>,
    /// Acknowledgements sent since then.
    sent: u32,
    /// The latest numbers that arrived.
    heard: Vec<Numbers>,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The end that asks, with the other end's word.
    Asks(Option<Answer>),
    /// The end that is asked, by an end that sends these numbers.
    Answers { expected: Numbers, word: Word },
}

/// Word of the end that is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// Nothing yet.
    Waits,
    /// The other end was heard.
    Heard,
    /// Nothing was heard in time.
    GaveUp,
}

impl Knock {
    /// The part of the end that asks.
    pub fn ask(now: Time, own: Standing) -> Self {
        Self {
            since: now,
            own: Some(own),
            sent: 0,
            heard: Vec::new(),
            role: Role::Asks(None),
        }
    }

    /// The part of the end that is asked, by an end that sends the numbers `expected`; `own`: unless it is in plain
    /// already.
    pub fn answer(now: Time, own: Option<Standing>, expected: Numbers) -> Self {
        let word = Word::Waits;
        Self {
            since: now,
            own,
            sent: 0,
            heard: Vec::new(),
            role: Role::Answers { expected, word },
        }
    }

    /// An acknowledgement of the connection came in, in plain.
    pub fn handle_heard(&mut self, numbers: Numbers, now: Time) {
        match &mut self.role {
            Role::Answers { expected, word } if *expected == numbers && *word == Word::Waits => {
                *word = Word::Heard;
                // What was sent before may have met a firewall that knew nothing of the connection yet.
                (self.since, self.sent) = (now, 0);
            }
            Role::Asks(_) if !self.heard.contains(&numbers) => {
                if self.heard.len() == MOST_HEARD {
                    self.heard.remove(0);
                }
                self.heard.push(numbers);
            }
            _ => {}
        }
    }

    /// The other end answered, or did not.
    pub fn handle_answer(&mut self, answer: Answer) {
        if let Role::Asks(known) = &mut self.role {
            *known = Some(answer);
        }
    }

    /// Outcome at the end that asked, once that is known.
    pub fn outcome(&self, now: Time) -> Option<Answer> {
        let Role::Asks(answer) = self.role else {
            return None;
        };
        match answer? {
            Ok((Outcome::Done, wire)) if wire != IN_PLAIN && !self.has_heard(wire) => {
                (now >= self.end()).then_some(Ok((Outcome::NotHeard, 0)))
            }
            answer => Some(answer),
        }
    }

    /// Numbers of the other end, once this end heard them.
    pub fn theirs(&self) -> Option<Numbers> {
        match self.role {
            Role::Asks(Some(Ok((Outcome::Done, wire)))) if self.has_heard(wire) => {
                Some(Numbers::from_wire(wire))
            }
            Role::Answers {
                expected,
                word: Word::Heard,
            } => Some(expected),
            Role::Asks(_) | Role::Answers { .. } => None,
        }
    }

    fn has_heard(&self, wire: u64) -> bool {
        self.heard.contains(&Numbers::from_wire(wire))
    }

    /// Answer of the end that was asked, once that is known.
    pub fn reply(&mut self, now: Time) -> Option<(Outcome, u64)> {
        let end = self.end();
        let Role::Answers { word, .. } = &mut self.role else {
            return None;
        };
        if *word == Word::Waits && now >= end {
            *word = Word::GaveUp;
        }
        match word {
            Word::Waits => None,
            Word::Heard => Some((
                Outcome::Done,
                self.own.map_or(IN_PLAIN, |own| own.numbers.to_wire()),
            )),
            Word::GaveUp => Some((Outcome::NotHeard, 0)),
        }
    }

    /// When it gives up.
    fn end(&self) -> Time {
        match self.role {
            // The other end needs that long to give up, and its word as long again.
            Role::Asks(_) => self.since + 2 * WITHIN,
            Role::Answers { .. } => self.since + WITHIN,
        }
    }

    /// When the next acknowledgement is to be sent, if there is one.
    fn next_send(&self) -> Option<Time> {
        self.own?;
        let most = match self.role {
            Role::Asks(None) => u32::MAX,
            Role::Asks(Some(_)) => 0,
            Role::Answers { word, .. } => match word {
                Word::Waits => u32::MAX,
                Word::Heard => LEAST_SENT,
                Word::GaveUp => 0,
            },
        };
        let doubled = REPEAT_AFTER * ((1 << self.sent.min(DOUBLINGS)) - 1);
        let at = self.since + doubled + LONGEST_WAIT * self.sent.saturating_sub(DOUBLINGS);
        (self.sent < most && at < self.end()).then_some(at)
    }

    /// The numbers of an acknowledgement that is to be sent now, if one is.
    pub fn poll_send(&mut self, now: Time) -> Option<Standing> {
        self.next_send().filter(|due| *due <= now)?;
        self.sent += 1;
        self.own
    }

    /// When there is something to do, unless something arrives before: to send, or to give up.
    pub fn due(&self) -> Option<Time> {
        let gives_up = match self.role {
            Role::Asks(Some(Ok((Outcome::Done, _)))) => Some(self.end()),
            Role::Answers {
                word: Word::Waits, ..
            } => Some(self.end()),
            Role::Asks(_) | Role::Answers { .. } => None,
        };
        self.next_send().into_iter().chain(gives_up).min()
    }
}

/// Why a connection stays on its bump that was to go to plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The kernel here does not say which numbers the connection has.
    #[error(
        "the kernel gave no answer about it, so dibs cannot find out whether the network carries it in plain"
    )]
    Unknown,
    /// The Internet knows it by an address of the host through which it leaves a bump.
    #[error(
        "the network does not carry it in plain: it reaches the Internet through the other host, and would \
         have another address"
    )]
    Exit,
    /// Its address outlived the interface that had it, for the bump alone.
    #[error("the network does not carry it in plain: this host has its address no more")]
    NoAddress,
    /// Routers do not know yet of so many bytes that went by the bump.
    #[error(
        "the network does not carry it in plain yet: a router or firewall on the way has {} MB of what went by the bump left \
         to follow, so repeat the command",
        .0.div_ceil(1_000_000)
    )]
    Behind(u32),
    /// The peer answered so, or not at all.
    #[error("{}", words(*.0))]
    Peer(Answer),
}

impl Refusal {
    /// The peer's answer, as it decides whether and when the peer is asked again.
    pub fn answer(self) -> Answer {
        match self {
            Self::Unknown => Err(Unanswered::NotAsked),
            Self::Exit | Self::NoAddress | Self::Behind(_) => Ok((Outcome::NotHeard, 0)),
            Self::Peer(answer) => answer,
        }
    }
}

fn words(answer: Answer) -> &'static str {
    match answer {
        Ok((Outcome::NotHeard, _)) => {
            "the network does not carry it in plain: a router or firewall on the way translates it (NAT) or \
             does not know it, or a host is too busy to show it within 2 s"
        }
        Ok((Outcome::NoConnection | Outcome::OtherSocket, _)) => {
            "the peer does not know this connection, or knows it by other addresses (NAT)"
        }
        Ok(_) => {
            "the peer could not find out whether the network carries it in plain: see the log of dibsd there"
        }
        Err(Unanswered::NoSession) => {
            "there is no session with the peer, so dibs cannot find out whether the network carries it in plain"
        }
        Err(_) => "the peer did not say whether the network carries it in plain",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    const START: Time = Time::from_nanos(1_000_000_000_000);
    const OURS: Numbers = Numbers { seq: 5, ack: 9 };
    const THEIRS: Numbers = Numbers { seq: 10, ack: 4 };

    #[test]
    fn a_packet_says_its_numbers_to_the_other_end() {
        let numbers = Numbers::of(SeqNumber::new(7), SeqNumber::new(0));
        assert_eq!(
            numbers,
            Numbers {
                seq: 7,
                ack: u32::MAX
            }
        );
        assert_eq!(Numbers::from_wire(numbers.to_wire()), numbers);
        let [_, bytes] = packets(&pair(), numbers.into());
        assert_eq!(read(&bytes), Some((pair().reversed(), numbers)));
        let mut data = bytes.clone();
        data[33] |= 0x08;
        assert_eq!(read(&data), None, "it has another flag");
        assert_eq!(read(&bytes[..39]), None);
    }

    #[test]
    fn one_that_acknowledges_less_goes_in_front() {
        let sent = packets(&pair(), OURS.into()).map(|bytes| read(&bytes).expect("it is one"));
        let [(_, first), (_, second)] = sent;
        assert_eq!((second, first.seq), (OURS, OURS.seq));
        assert_eq!(first.ack, OURS.ack.wrapping_sub(BEHIND));
    }

    /// Sends as two ends do over a way that lets through what `passes` says of the time since the start and the
    /// sender; the word of the end that is asked takes 10 ms. What came of it, and when.
    fn run(passes: impl Fn(Duration, bool) -> bool) -> (Answer, Duration) {
        let (mut asks, mut answers) = (
            Knock::ask(START, OURS.into()),
            Knock::answer(START, Some(THEIRS.into()), OURS),
        );
        let (mut now, mut word) = (START, None);
        loop {
            while let Some(Standing { numbers, .. }) = asks.poll_send(now) {
                if passes(now.since(START), true) {
                    answers.handle_heard(numbers, now);
                }
            }
            while let Some(Standing { numbers, .. }) = answers.poll_send(now) {
                if passes(now.since(START), false) {
                    asks.handle_heard(numbers, now);
                }
            }
            if word.is_none() {
                word = answers.reply(now).map(|reply| (reply, now));
            }
            if let Some((reply, at)) = word
                && now >= at + Duration::from_millis(10)
            {
                asks.handle_answer(Ok(reply));
            }
            if let Some(answer) = asks.outcome(now) {
                return (answer, now.since(START));
            }
            assert!(asks.due().is_none_or(|due| due > now) && now < START + 5 * WITHIN);
            now += Duration::from_millis(1);
        }
    }

    #[test]
    fn both_ends_have_to_hear_the_other() {
        let done = Ok((Outcome::Done, THEIRS.to_wire()));
        let not_heard = Ok((Outcome::NotHeard, 0));
        let (answer, took) = run(|_, _| true);
        assert_eq!((answer, took), (done, Duration::from_millis(10)));
        // The first ones are lost.
        let (answer, took) = run(|at, _| at >= Duration::from_millis(300));
        assert!(answer == done && took < WITHIN, "{answer:?} {took:?}");
        // A firewall lets the answers pass once it has seen a question, or the other way round.
        for first in [true, false] {
            let opened = std::cell::Cell::new(false);
            let (answer, _) = run(|at, asks| {
                let opens = asks == first && at >= Duration::from_millis(100);
                opened.set(opened.get() || opens);
                opened.get()
            });
            assert_eq!(answer, done, "{first}");
        }
        for deaf in [true, false] {
            let (answer, took) = run(|_, asks| asks != deaf);
            assert_eq!(answer, not_heard);
            assert!(took >= WITHIN, "{took:?}");
        }
    }

    #[test]
    fn other_numbers_prove_nothing() {
        let mut answers = Knock::answer(START, Some(THEIRS.into()), OURS);
        answers.handle_heard(THEIRS, START);
        assert_eq!(answers.reply(START), None);
        assert_eq!(answers.reply(START + WITHIN), Some((Outcome::NotHeard, 0)));
        assert_eq!(answers.due(), None, "nothing is left to do");
        let mut asks = Knock::ask(START, OURS.into());
        for ack in 0..100 {
            asks.handle_heard(Numbers { seq: 0, ack }, START);
        }
        assert_eq!(asks.heard.len(), MOST_HEARD);
        asks.handle_answer(Ok((Outcome::Done, THEIRS.to_wire())));
        assert_eq!(asks.outcome(START), None);
        asks.handle_heard(THEIRS, START);
        assert!(asks.outcome(START).is_some());
    }

    #[test]
    fn an_end_in_plain_has_only_to_hear() {
        let mut answers = Knock::answer(START, None, OURS);
        assert_eq!(
            (answers.poll_send(START), answers.reply(START)),
            (None, None)
        );
        answers.handle_heard(OURS, START);
        let reply = answers.reply(START).expect("it has heard");
        assert_eq!((reply, answers.due()), ((Outcome::Done, IN_PLAIN), None));
        let mut asks = Knock::ask(START, OURS.into());
        asks.handle_answer(Ok(reply));
        assert_eq!(asks.outcome(START), Some(Ok(reply)));
    }

    #[test]
    fn a_refusal_ends_it_at_once() {
        for answer in [Ok((Outcome::NoConnection, 0)), Err(Unanswered::NoSession)] {
            let mut asks = Knock::ask(START, OURS.into());
            assert_eq!(asks.poll_send(START), Some(OURS.into()));
            asks.handle_answer(answer);
            assert_eq!(asks.outcome(START), Some(answer));
            assert_eq!(asks.poll_send(START + WITHIN), None);
        }
    }
}
