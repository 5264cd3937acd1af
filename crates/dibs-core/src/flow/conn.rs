//! A connection: the streams of both directions and what they share.

use std::collections::VecDeque;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::SeqNumber;
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{BASE_OFFSET, FlowId, Frame, Open, TcpFields};
use dibs_wire::packet::{FlowKey, IpMeta, Segment, flags};
use smallvec::SmallVec;

use super::ack_floor::AckFloor;
use super::echo_filter::EchoFilter;
use super::inject::Template;
use super::numbers::{Compared, Numbers};
use super::queue::Queue;
use super::schedule::FlowSchedule;
use super::window_clamp::WindowClamp;
use crate::bump::{Bump, Decode};
use crate::path_index::PathIndex;
use crate::session::{Direction, EpochKey, EpochSecrets, Session};
use crate::slab::Key;
use crate::stream::MAX_WINDOW;
use crate::stream::rx::{Decoders, RxStream};
use crate::stream::tx::TxStream;
use crate::time::Time;

/// Sets of shares that open a flow whose acknowledgements are counted: those that one flight has.
const MAX_OPENING: usize = 256;

/// How often a peer is told of the same broken epoch.
const REPORT_SPACING: Duration = Duration::from_millis(20);
/// Time in which it is said that a connection comes from plain whose kernel may have followed its peer to the bump before.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(5);

/// Counters of a connection that the user sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnStats {
    /// Payload bytes taken from the TUN.
    pub bytes_sent: u64,
    /// Payload bytes restored.
    pub bytes_received: u64,
    /// Segments of the local kernel that lay below what it had sent: its retransmissions.
    pub retransmissions: u64,
    /// Payload bytes sent first by trusted paths.
    pub bytes_trusted: u64,
}

/// Payload bytes of a connection that a path carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathBytes {
    /// Sent, the first time.
    pub sent: u64,
    /// Received, repetitions included.
    pub received: u64,
}

/// [`PathBytes`] by local path.
#[derive(Clone, Debug, Default)]
pub struct ByPath(SmallVec<[(PathIndex, PathBytes); 2]>);

impl ByPath {
    /// The counts of a local path.
    pub fn entry(&mut self, local: PathIndex) -> &mut PathBytes {
        let at = self.0.iter().position(|(path, _)| *path == local);
        let at = at.unwrap_or_else(|| {
            self.0.push((local, PathBytes::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    /// All that carried anything.
    pub fn iter(&self) -> impl Iterator<Item = (usize, PathBytes)> {
        self.0.iter().map(|(path, bytes)| (path.get(), *bytes))
    }
}

/// Sets of shares that open a flow, and how many of each were acknowledged: only what is split has any, and only for
/// a round trip.
#[derive(Debug, Default)]
pub struct Opening(Option<Box<Sets>>);

type Sets = VecDeque<(u32, u8)>;

impl Opening {
    /// One more of this set was; how many of it were.
    fn count(&mut self, set: u32) -> u8 {
        let sets = self.0.get_or_insert_default();
        let at = sets.iter().position(|(known, _)| *known == set);
        let at = at.unwrap_or_else(|| {
            if sets.len() == MAX_OPENING {
                sets.pop_front();
            }
            sets.push_back((set, 0));
            sets.len() - 1
        });
        sets[at].1 += 1;
        sets[at].1
    }
}

/// The direction from the local kernel to the peer.
pub struct Outgoing {
    /// Our number of the flow.
    pub flow: FlowId,
    /// Stream of the kernel's segments.
    pub stream: TxStream,
    /// IP fields that the flow was opened with.
    pub meta: IpMeta,
    /// Roots of this incarnation's epoch keys.
    pub secrets: Option<EpochSecrets>,
    /// The peer has acknowledged an opening of this incarnation.
    confirmed: bool,
    /// Sets of shares that open it.
    opening: Opening,
    /// Queue of segments that wait for a path.
    pub queue: Queue,
    /// Its turns, and how its new data is shared out over the paths.
    pub schedule: FlowSchedule,
}

impl Outgoing {
    /// The peer is to be told of a new incarnation.
    pub fn begin_anew(&mut self) {
        self.stream.reincarnate();
        self.secrets = None;
        self.unconfirm();
    }

    /// The peer is not known to know this incarnation.
    pub fn unconfirm(&mut self) {
        self.confirmed = false;
        self.opening = Opening::default();
    }

    /// The peer knows this incarnation.
    pub fn confirm(&mut self) {
        self.confirmed = true;
        self.opening = Opening::default();
    }

    /// A share of a set that opens the flow was acknowledged; with `needed` of one set it is open.
    pub fn confirm_share(&mut self, set: u32, needed: u8) {
        if !self.confirmed && self.opening.count(set) >= needed {
            self.confirm();
        }
    }

    /// Transforms bytes at `offset`, on their own or in the chain, as `bump` does; returns the CRC-32C
    /// that their chunk has: 0 if they are encrypted, which says as much.
    pub fn transform(
        &mut self,
        bump: &Bump,
        solo_at: Option<u64>,
        bytes: &[u8],
        out: &mut [u8],
    ) -> u32 {
        let Some(chain) = bump.chain() else {
            out.copy_from_slice(bytes);
            return match bump.is_sealed() {
                true => 0,
                false => crc32c(bytes),
            };
        };
        if let Some(offset) = solo_at {
            let at = (self.flow, self.stream.incarnation(), self.stream.epoch());
            let key = outgoing_key(self.secrets.as_ref(), at).solo(offset);
            return chain.encoder(&key).encode_summed(bytes, out);
        }
        let Self {
            stream,
            secrets,
            flow,
            ..
        } = self;
        let at = (*flow, stream.incarnation(), stream.epoch());
        let encoder = stream.encoder(|| chain.encoder(&outgoing_key(secrets.as_ref(), at)));
        encoder.encode_summed(bytes, out)
    }
}

fn outgoing_key(
    secrets: Option<&EpochSecrets>,
    (flow, incarnation, epoch): (FlowId, u16, u32),
) -> EpochKey {
    let secrets = secrets.expect("a flow has secrets before it sends");
    secrets.epoch_key(Direction::Outgoing, flow, u32::from(incarnation), epoch)
}

/// The direction from the peer to the local kernel.
pub struct Incoming {
    /// The peer's number of the flow.
    pub flow: FlowId,
    /// Its incarnation.
    pub incarnation: u16,
    /// IP fields that the flow was opened with.
    pub meta: IpMeta,
    /// The sequence number of [`BASE_OFFSET`].
    pub base: SeqNumber,
    /// Roots of this incarnation's epoch keys.
    pub secrets: EpochSecrets,
    /// Restores the stream.
    pub stream: RxStream,
    /// Highest offset injected.
    pub top: u64,
    /// Acknowledgement that the local kernel was told last.
    pub ack_floor: AckFloor,
}

impl Incoming {
    /// How the packets look of a connection with these addresses, as the local host sends, on this bump.
    pub fn template(&self, tuple: FlowKey, bump: BumpId) -> Template {
        Template {
            bump,
            tuple: tuple.reversed(),
            meta: self.meta,
        }
    }

    /// The sequence number at a stream offset.
    pub const fn seq(&self, offset: u64) -> SeqNumber {
        self.base.add(offset.wrapping_sub(BASE_OFFSET) as u32)
    }

    /// The offset of a sequence number near the highest injected one.
    pub fn offset_of(&self, seq: SeqNumber) -> u64 {
        self.top
            .wrapping_add_signed(i64::from(seq.distance_from(self.seq(self.top))))
    }
}

/// Number behind a segment.
fn end_of(segment: &Segment<'_>) -> SeqNumber {
    let numbered = u32::from(segment.has(flags::SYN)) + u32::from(segment.has(flags::FIN));
    segment.seq.add(segment.payload.len() as u32 + numbered)
}

/// Whether a sequence number lies ahead of the highest one so far. What lies more than a window behind does: the
/// connection went on elsewhere for a while.
fn moves_on(highest: Option<SeqNumber>, seq: SeqNumber) -> bool {
    highest.is_none_or(|highest| {
        let distance = i64::from(seq.distance_from(highest));
        !(-MAX_WINDOW..=0).contains(&distance)
    })
}

/// How the bytes of an incoming flow are restored.
pub struct IncomingDecoders<'a> {
    bump: &'a Bump,
    secrets: &'a EpochSecrets,
    flow: FlowId,
    incarnation: u16,
}

impl<'a> IncomingDecoders<'a> {
    /// Fields of one incarnation of a flow.
    pub const fn new(
        bump: &'a Bump,
        secrets: &'a EpochSecrets,
        flow: FlowId,
        incarnation: u16,
    ) -> Self {
        Self {
            bump,
            secrets,
            flow,
            incarnation,
        }
    }

    fn key(&self, epoch: u32) -> EpochKey {
        let incarnation = u32::from(self.incarnation);
        self.secrets
            .epoch_key(Direction::Incoming, self.flow, incarnation, epoch)
    }
}

impl Decoders for IncomingDecoders<'_> {
    fn epoch(&self, epoch: u32) -> Option<Box<dyn Decode>> {
        Some(self.bump.chain()?.decoder(&self.key(epoch)))
    }

    fn solo(&self, epoch: u32, offset: u64) -> Option<Box<dyn Decode>> {
        Some(self.bump.chain()?.decoder(&self.key(epoch).solo(offset)))
    }

    fn has_crc(&self) -> bool {
        !self.bump.is_sealed()
    }
}

/// One connection in one bump.
pub struct Conn {
    /// Key of the ends, which it has on every bump.
    pub ends: Key,
    /// The bump.
    pub bump: BumpId,
    /// From the local kernel.
    pub out: Outgoing,
    /// To the local kernel, once the peer opened it.
    pub inc: Option<Incoming>,
    /// The highest number that the local kernel acknowledged by this bump.
    pub acked: Option<SeqNumber>,
    /// Behind the highest number that the local kernel sent by this bump.
    pub sent_end: Option<SeqNumber>,
    /// Window that the local kernel last advertised, as it stands in the header.
    pub window: u16,
    /// Numbers since it came here from elsewhere.
    numbers: Option<Box<Numbers>>,
    /// The local kernel is kept from sending more.
    pub clamp: Option<Box<WindowClamp>>,
    /// The connection is about to leave this bump.
    pub is_leaving: bool,
    /// The local kernel is given no data, as the connection leaves for plain before its peer: what it acknowledges there of data that
    /// came by the bump is more than routers have seen.
    pub refuses: bool,
    /// The latest TSval that the local kernel sent.
    tsval: Option<u32>,
    /// There was an outage, and what comes may be from before.
    pub echo_filter: Option<Box<EchoFilter>>,
    /// Last packet of either direction.
    pub last_seen: Time,
    /// Time at which it came here, or of its first packet.
    pub since: Time,
    /// Counters.
    pub stats: ConnStats,
    /// Bytes by the path that carried them.
    pub by_path: ByPath,
    /// When the peer was last told of a broken epoch, so that it is not told with every datagram.
    reported: Option<(u32, Time)>,
}

impl Conn {
    /// A connection of which neither direction has sent anything.
    pub fn new(now: Time, ends: Key, bump: BumpId, flow: FlowId) -> Self {
        Self {
            ends,
            bump,
            out: Outgoing {
                flow,
                stream: TxStream::new(0),
                meta: IpMeta::default(),
                secrets: None,
                confirmed: false,
                opening: Opening::default(),
                queue: Queue::default(),
                schedule: FlowSchedule::default(),
            },
            inc: None,
            acked: None,
            sent_end: None,
            window: 0,
            numbers: Some(Box::default()),
            clamp: None,
            is_leaving: false,
            refuses: false,
            tsval: None,
            echo_filter: None,
            last_seen: now,
            since: now,
            stats: ConnStats::default(),
            by_path: ByPath::default(),
            reported: None,
        }
    }

    /// True if the outgoing flow is being opened.
    pub const fn is_opening(&self) -> bool {
        self.out.secrets.is_some() && !self.out.confirmed
    }

    /// The frame that opens the outgoing flow, while the peer has not confirmed it. `tuple` is as the local host sends.
    pub fn open_frame(&self, tuple: impl FnOnce() -> FlowKey) -> Option<Open> {
        let secrets = { self.out.secrets.as_ref() }.filter(|_| !self.out.confirmed)?;
        Some(Open {
            bump: self.bump.get(),
            tuple: tuple(),
            meta: self.out.meta,
            base_seq: self.out.stream.base().unwrap_or_default(),
            session: secrets.session().as_u64(),
        })
    }

    /// Opens the outgoing flow under a session: its first packet, or the peer forgot it.
    pub fn open(&mut self, secrets: EpochSecrets, meta: IpMeta) {
        self.out.meta = meta;
        self.out.secrets = Some(secrets);
        self.out.unconfirm();
    }

    /// Takes note of a segment of the local kernel, which begins the connection if it is a SYN, and of the session that
    /// there is to open the flow by. True if it begins another connection than before; a SYN that is sent again does not.
    pub fn note_segment(
        &mut self,
        now: Time,
        segment: &Segment<'_>,
        session: Option<&Session>,
    ) -> bool {
        self.last_seen = now;
        if let Some((tsval, _)) = segment.timestamps {
            self.tsval = Some(tsval);
        }
        if let Some(filter) = &mut self.echo_filter {
            filter.note(segment);
        }
        let syn = segment.has(flags::SYN);
        let begins = syn && self.sent_end != Some(end_of(segment));
        if begins {
            self.begin_comparison(segment.flags);
        }
        if syn {
            self.acked = None;
            self.sent_end = None;
            self.clamp = None;
            self.is_leaving = false;
            self.out.stream.reincarnate();
        }
        if syn || self.out.secrets.is_none() {
            match session {
                Some(session) => self.open(session.epoch_secrets().clone(), segment.meta),
                // It waits, and is opened by the session that it goes by.
                None => {
                    self.out.meta = segment.meta;
                    self.out.secrets = None;
                }
            }
        }
        // The stream's first byte follows the SYN. Whatever opens the flow tells the base.
        self.out.stream.begin_at(segment.seq.add(u32::from(syn)));
        begins
    }

    /// The local kernel sent so many bytes.
    pub const fn note_payload(&mut self, len: usize) {
        self.stats.bytes_sent += len as u64;
    }

    /// The frame that tells the peer that an epoch cannot be restored, unless it was told just before.
    pub fn report_broken(&mut self, now: Time, epoch: u32) -> Option<Frame<'static>> {
        let inc = self.inc.as_ref()?;
        let told = |(e, at): (u32, Time)| e == epoch && now.since(at) < REPORT_SPACING;
        if self.reported.is_some_and(told) {
            return None;
        }
        self.reported = Some((epoch, now));
        Some(Frame::EpochBroken {
            flow: inc.flow,
            incarnation: inc.incarnation,
            epoch,
        })
    }

    /// The connection came here from elsewhere: the kernels' numbers are to be compared. Those of an earlier time here say nothing
    /// any more.
    pub fn compare_anew(&mut self) {
        self.numbers.get_or_insert_default().forget();
        if let Some(inc) = &mut self.inc {
            inc.ack_floor = AckFloor::default();
        }
    }

    /// A connection of these ends comes from plain. What was here may be an earlier one, which the peer called otherwise: the flow is
    /// opened anew. True if what still waits to be sent here is of an earlier time.
    pub fn come_from_plain(&mut self, now: Time) -> bool {
        self.acked = None;
        let spoke = self.sent_end.take().is_some();
        if spoke {
            self.out.begin_anew();
        }
        spoke && now.since(self.last_seen) > FOLLOWED_WITHIN
    }

    /// Notes that a connection of these ends has begun by another bump, so what was here is of an earlier one. The flow is opened anew if
    /// the new one comes here, because the peer knows it by the name and numbers of the earlier one.
    pub fn end(&mut self) {
        if self.sent_end.is_some() {
            self.out.begin_anew();
        }
        (self.sent_end, self.acked) = (None, None);
        (self.clamp, self.refuses) = (None, false);
        self.echo_filter = None;
        if let Some(inc) = &mut self.inc {
            inc.ack_floor = AckFloor::default();
        }
    }

    /// Numbers of both kernels are not compared: nothing between them changed those of a connection that began here, and those of one
    /// that was here or on another bump for long are known to fit.
    pub fn skip_comparison(&mut self) {
        self.numbers = None;
    }

    /// A SYN of either kernel, with these flags, of another connection than before. Only a call says that nothing changed the numbers:
    /// an answer may be a repetition of one in plain.
    pub fn begin_comparison(&mut self, tcp: u16) {
        match tcp & flags::ACK {
            0 => self.skip_comparison(),
            _ => self
                .numbers
                .iter_mut()
                .for_each(|numbers| **numbers = Numbers::default()),
        }
    }

    /// True if the numbers of both kernels were seen to fit, or need not be compared.
    pub fn fits(&self) -> bool {
        { self.numbers.as_ref() }.is_none_or(|numbers| numbers.is_over() && !numbers.differ())
    }

    /// True if the two kernels do not count the same bytes alike, because something on the ordinary route changes TCP's numbers.
    pub fn is_renumbered(&self) -> bool {
        self.numbers
            .as_ref()
            .is_some_and(|numbers| numbers.differ())
    }

    /// True if the numbers of the two kernels do not fit although the connection is at rest, as far as that is known.
    pub fn is_apart(&self) -> bool {
        { self.numbers.as_ref() }.is_some_and(|numbers| numbers.is_apart())
    }

    /// True if the local kernel could take data for other bytes than it is, because the peer's may count otherwise.
    pub fn may_be_strange(&self, now: Time) -> bool {
        { self.numbers.as_ref() }.is_some_and(|numbers| numbers.may_be_strange(now))
    }

    /// True if both kernels' numbers were compared, or need not be.
    pub fn is_compared(&self) -> bool {
        { self.numbers.as_ref() }.is_none_or(|numbers| numbers.is_compared())
    }

    /// A reset came or went: a connection that begins with the same ends has other numbers, and a kernel that knows nothing of it answers
    /// with numbers of its own.
    fn end_numbers(&mut self) {
        if let Some(numbers) = &mut self.numbers {
            numbers.end();
        }
    }

    /// Notes the numbers of a segment of the peer's kernel with so many bytes of data or with a FIN, or of one without, and compares
    /// as [`compare`](Self::compare) does.
    pub fn compare_with(
        &mut self,
        now: Time,
        (seq, tcp): (SeqNumber, &TcpFields<'_>),
        data: Option<usize>,
    ) -> Compared {
        if tcp.flags & flags::RST != 0 {
            self.end_numbers();
            return Compared::Open;
        }
        if let Some(numbers) = &mut self.numbers {
            numbers.note_peers(seq, tcp, data);
        }
        self.compare(now, Some(self.bump))
    }

    /// The bump that the local kernel sends it by.
    pub fn sent_by(&self) -> BumpId {
        let by = self.numbers.as_ref().and_then(|numbers| numbers.sent_by);
        by.unwrap_or(self.bump)
    }

    /// Compares where both kernels stand after a word of the local kernel, or of the peer's `by` a bump.
    pub fn compare(&mut self, now: Time, by: Option<BumpId>) -> Compared {
        { self.numbers.as_mut() }.map_or(Compared::Open, |numbers| numbers.compare(now, by))
    }

    /// Notes where the local kernel stood on the bump that the connection comes from. The first word here may repeat earlier data, and
    /// routers in plain are to be shown all that was sent by bumps.
    pub fn note_stood(&mut self, sent_end: SeqNumber, acked: SeqNumber) {
        if moves_on(self.sent_end, sent_end) {
            self.sent_end = Some(sent_end);
        }
        self.note_acked(acked);
    }

    /// The local kernel has what lies in front of `ack`.
    pub fn note_acked(&mut self, ack: SeqNumber) {
        if moves_on(self.acked, ack) {
            self.acked = Some(ack);
        }
    }

    /// True if something from the peer waits for a gap to close.
    pub fn is_waiting(&self) -> bool {
        self.inc.as_ref().is_some_and(|inc| inc.stream.is_waiting())
    }

    /// The peer knows nothing of it any more; returns what there was of its direction.
    pub fn restart(&mut self) -> Option<Incoming> {
        self.out.begin_anew();
        self.echo_filter = { self.tsval }.map(|tsval| Box::new(EchoFilter::after(tsval)));
        self.inc.take()
    }

    /// Notes how far the local kernel has sent, and what it has. `entered`: number of its first segment by a bump, and what that
    /// acknowledges, if the connection came from plain.
    pub fn note_sent(
        &mut self,
        segment: &Segment<'_>,
        entered: &mut Option<(SeqNumber, SeqNumber)>,
    ) {
        let end = end_of(segment);
        if moves_on(self.sent_end, end) {
            self.sent_end = Some(end);
        }
        if segment.has(flags::SYN) {
            *entered = None;
        }
        if segment.has(flags::RST) {
            self.end_numbers();
        } else {
            self.window = segment.window;
        }
        if self.note_numbers(segment, self.bump) {
            entered.get_or_insert((segment.seq, segment.ack));
        }
        match &mut self.clamp {
            Some(clamp) => clamp.sent(end),
            // Kernels that have said nothing here may have something to say while they are to be silent.
            None if self.is_leaving => {}
            // It goes on here, whoever had it stay.
            None => self.refuses = false,
        }
    }

    /// Part that passes of a segment of the local kernel that is to be silent, as the connection is about to leave its bump: its
    /// acknowledgement, behind what was sent before. None if all of it passes.
    pub fn silenced<'a>(&self, segment: &Segment<'a>) -> Option<Segment<'a>> {
        let ends = segment.flags & (flags::SYN | flags::RST) != 0;
        let clamp = self.clamp.as_ref().filter(|_| !ends)?;
        let seq = clamp.refuses(end_of(segment))?;
        Some(Segment {
            seq,
            flags: segment.flags & flags::ACK,
            payload: &[],
            ..*segment
        })
    }

    /// Notes where the local kernel stands, which sends `by` this bump or another one. False if nothing is to be compared.
    pub fn note_numbers(&mut self, segment: &Segment<'_>, by: BumpId) -> bool {
        // Without resets, as in `compare_with`.
        let numbers = { self.numbers.as_mut() }.filter(|_| !segment.has(flags::RST));
        numbers.is_some_and(|numbers| {
            numbers.note_local(segment, end_of(segment), by);
            true
        })
    }

    /// Number behind the bytes that the local kernel was given an acknowledgement of; none where it uses no time stamps, and where
    /// the far kernel counts them otherwise.
    pub fn given(&self) -> Option<SeqNumber> {
        let inc = self.inc.as_ref().filter(|_| !self.is_renumbered())?;
        inc.ack_floor.ack()
    }

    /// Bytes that the local kernel has sent and was given no acknowledgement of; none where it uses no time stamps.
    pub fn under_way(&self) -> usize {
        let bytes = { self.sent_end.zip(self.given()) }.map(|(end, ack)| end.distance_from(ack));
        bytes.map_or(0, |bytes| usize::try_from(bytes).unwrap_or(0))
    }

    /// Gives back the memory that only a connection under way needs.
    pub fn shrink(&mut self, now: Time) {
        self.out.queue.shrink(now);
        self.numbers
            .take_if(|numbers| numbers.is_over() && !numbers.differ());
        if let Some(inc) = &mut self.inc {
            inc.stream.shrink();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a connection costs that says nothing: in the slab, beside about 130 bytes in the tables that
    /// lead to it. The whole daemon has 1.6 KiB for it (docs/performance.md).
    #[test]
    fn an_idle_connection_is_small() {
        assert!(size_of::<Conn>() <= 544, "{}", size_of::<Conn>());
    }
}
