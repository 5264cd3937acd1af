//! Cuts what a flow sends into the pieces of a run: each is transformed by the bump, framed, kept and sealed.

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Open, TcpFields};
use dibs_wire::packet::{Segment, flags};
use smallvec::SmallVec;

use super::carrier::SHARE_OVERHEAD;
use super::datagram::{Asks, MAX_SHORTFALL, NOT_BARE, Seal, Sealer, Shape, padding};
use super::path_frames::{MAX_ACK, put_ack};
use super::plan::Plan;
use super::retransmit::RetransmitQueue;
use super::run::Run;
use super::shares::{Shares, share_frame};
use crate::bump::Split;
use crate::chunk::{ChainId, Chunk, Content, Placement, SegmentMeta, ShareOf};
use crate::flow::conn::{ConnStats, Outgoing};
use crate::flow::queue::Rest;
use crate::in_flight::InFlight;
use crate::node::paths::{Link, PROOF_SPACING, PathSet};
use crate::node::shared::Shared;
use crate::session::CLEAR_HEADER_LEN;
use crate::slab::Key;
use crate::stream::tx::Position;
use crate::tcp_fields::{self, OwnedFields};

/// Cuts what a flow sends into the pieces of a run.
pub(super) struct Cutter<'a, 'r, 's> {
    pub(super) key: Key,
    pub(super) run: &'a mut Run<'r>,
    pub(super) shared: &'a mut Shared,
    pub(super) sealer: &'a mut Sealer<'s>,
    pub(super) in_flight: &'a mut InFlight,
    pub(super) to: To<'a>,
    /// Plan of the first piece, by which the path was chosen.
    pub(super) head: Option<Plan>,
    /// Chained bytes go without a tag.
    pub(super) bare: bool,
    pub(super) open: Option<Open>,
    /// Bytes filled that each path carries of the flow.
    pub(super) sent: u64,
}

/// Destination of the pieces.
pub(super) enum To<'a> {
    /// By one path. What only a trusted one may carry and this one is not waits.
    Link(&'a mut Link, &'a mut RetransmitQueue),
    /// A share of each by each path.
    Bundle(&'a mut PathSet, &'a mut Shares, &'a dyn Split),
}

/// A segment, as far as all its pieces have it in common.
struct Whole<'s> {
    payload: &'s [u8],
    tcp: TcpFields<'s>,
    /// Stream offset of its first byte.
    base: u64,
    may_be_bare: bool,
    /// Pieces of equal length, so that a send can go on with those of the next segment.
    even: usize,
}

impl<'s> Whole<'s> {
    fn new(
        cutter: &Cutter<'_, '_, '_>,
        segment: &Segment<'s>,
        out: &mut Outgoing,
        rest: &Rest,
    ) -> Self {
        let tcp = tcp_fields::of_segment(segment, out.meta);
        let may_be_bare = cutter.bare && rest.left > 0 && tcp.flags & NOT_BARE == 0;
        let (run, is_split) = (&cutter.run, cutter.run.carrier.split.is_some());
        let tag = if may_be_bare { 0 } else { run.carrier.tag() };
        let frame = frame::chunk_len(&tcp, is_split, cutter.open.as_ref());
        // The far host may forward them to where nothing longer fits.
        let room = (run.longest - run.carrier.front() - frame - tag).min(rest.mss.max(1));
        let total = segment.payload.len();
        Self {
            payload: segment.payload,
            tcp,
            base: out.stream.offset_of(segment.seq),
            may_be_bare,
            even: total.div_ceil(total.div_ceil(room).max(1)),
        }
    }
}

/// A piece of a segment that fits one datagram, and how it goes.
struct Piece<'s> {
    bytes: &'s [u8],
    tcp: TcpFields<'s>,
    plan: Plan,
    withheld: bool,
    /// The segment ends with it.
    last: bool,
    /// Left out of the run, until a trusted path has room.
    deferred: bool,
    shape: Shape,
    /// Bytes of the chunk's frame, with which the header block begins, and of the acknowledgement behind it.
    frame: usize,
    acks: usize,
}

impl Piece<'_> {
    fn solo_at(&self) -> Option<u64> {
        let Position { solo, offset, .. } = self.plan.position;
        solo.then_some(offset)
    }

    fn meta(&self, conn: Key, out: &Outgoing) -> SegmentMeta {
        SegmentMeta {
            conn,
            chain: chain_id(out),
            tcp: OwnedFields::new(&self.tcp),
        }
    }

    /// Made where it is written: a copy of what was just written in parts waits for the writes.
    #[inline]
    fn chunk(&self, batch: Key, at: u32, segment: u16) -> Chunk {
        let Position {
            offset,
            solo,
            ahead,
            first,
            detached,
            ..
        } = self.plan.position;
        Chunk {
            offset,
            batch,
            at,
            crc: 0,
            len: self.bytes.len() as u16,
            segment,
            flags: self.tcp.flags,
            solo,
            ahead,
            first,
            detached,
            withheld: self.withheld,
        }
    }
}

impl Cutter<'_, '_, '_> {
    /// Cuts what is left of a segment; false if not all of it.
    pub(super) fn cut(
        &mut self,
        out: &mut Outgoing,
        stats: &mut ConnStats,
        segment: &Segment<'_>,
        rest: &mut Rest,
    ) -> bool {
        let whole = Whole::new(self, segment, out, rest);
        let mut meta = None;
        loop {
            if self.run.pieces == self.run.most {
                self.run.full = true;
                return false;
            }
            let Some(piece) = self.piece(out, &whole, rest) else {
                self.run.full = true;
                return false;
            };
            let Position { offset, solo, .. } = piece.plan.position;
            stats.retransmissions += u64::from(solo);
            if piece.deferred {
                self.defer(out, &piece);
            } else if !self.put(out, &piece, &mut meta) {
                // Nothing leaves without protection, and nothing of it is kept; the scrambler is ahead of what left.
                out.stream.break_chain();
                self.run.full = true;
                return false;
            }
            let len = piece.bytes.len();
            let fin = piece.last && whole.tcp.flags & flags::FIN != 0;
            let numbers = len as u64 + u64::from(fin);
            out.stream.advance(offset, numbers, solo);
            if piece.deferred || matches!(&self.to, To::Link(link, _) if link.trusted) {
                stats.bytes_trusted += len as u64;
            }
            if self.run.bump.chain().is_some() {
                let next = || next_trusted(self.shared, len);
                out.schedule.on_chunk(len, next);
            }
            out.schedule
                .spend(piece.shape.len() * self.run.batches.len());
            rest.advance(len);
            if piece.last || self.run.full {
                return piece.last;
            }
        }
    }

    /// The next piece of a segment; none if it does not fit the run.
    #[inline]
    fn piece<'s>(
        &mut self,
        out: &mut Outgoing,
        whole: &Whole<'s>,
        rest: &Rest,
    ) -> Option<Piece<'s>> {
        let total = whole.payload.len();
        let done = total - rest.left;
        let at = (whole.base + done as u64, rest.left);
        let is_full = matches!(&self.to, To::Link(_, lost) if lost.is_full());
        let plan = self.head.take();
        let plan = plan.unwrap_or_else(|| Plan::of(out, self.run.bump, at, is_full));
        if plan.is_strict && !self.run.allowed {
            return None;
        }
        let deferred = plan.placement == Placement::TrustedOnly && !self.run.allowed;
        let position = &plan.position;
        let bare = whole.may_be_bare && position.is_inside() && self.may_be_bare();
        let carrier = &self.run.carrier;
        let front = carrier.front();
        let tag = if bare { 0 } else { carrier.tag() };
        let is_long = position.solo || carrier.split.is_some();
        let frame = frame::chunk_len(&whole.tcp, is_long, self.open.as_ref());
        let len = (self.run.longest - front - frame - tag)
            .min(whole.even)
            .min(position.limit)
            .min(rest.limit());
        let last = done + len == total;
        let mut shape = Shape {
            front,
            payload: len,
            header: frame,
            tag,
        };
        let acks = match last && out.queue.is_empty() && !deferred && !bare {
            true => self.acknowledge(shape.len()),
            false => 0,
        };
        shape.header += acks;
        if self.run.bump.is_padded() {
            shape.header += padding(shape.len(), self.run.longest);
        }
        let short = self.run.stride.saturating_sub(shape.len());
        if short <= self.run.stride / MAX_SHORTFALL {
            shape.header += short;
        }
        // The datagrams of one send are equally long, but for the last.
        let fits = self.run.pieces == 0 || shape.len() <= self.run.stride;
        fits.then(|| Piece {
            bytes: &whole.payload[done..done + len],
            tcp: tcp_fields::of_piece(&whole.tcp, done, last),
            plan,
            withheld: rest.withheld > 0 && position.is_inside(),
            last,
            deferred,
            shape,
            frame,
            acks,
        })
    }

    /// True if the next datagram may go without a tag: now and then one proves how far the numbers have come.
    fn may_be_bare(&self) -> bool {
        matches!(&self.to, To::Link(link, _) if !link.path.next_seq().is_multiple_of(PROOF_SPACING))
    }

    /// Keeps a piece for a trusted path, to go when that has room; the others need not wait for it.
    fn defer(&mut self, out: &mut Outgoing, piece: &Piece<'_>) {
        let len = piece.bytes.len();
        let mut buffer = self.shared.pool.take_for(len);
        let crc = out.transform(
            self.run.bump,
            piece.solo_at(),
            piece.bytes,
            &mut buffer[..len],
        );
        let batch = self.in_flight.add_batch(buffer);
        let segment = self.in_flight.add_segment(batch, piece.meta(self.key, out));
        let chunk = Chunk {
            crc,
            ..piece.chunk(batch, 0, segment)
        };
        let key = self
            .in_flight
            .add(Content::Chunk(chunk), piece.plan.placement);
        if let To::Link(_, lost) = &mut self.to {
            lost.defer(key);
        }
        self.run.deferred = true;
    }

    /// Makes the next datagrams of the run of a piece; false if they could not be sealed. `meta` is what the pieces of
    /// the segment before it share.
    #[inline]
    fn put(
        &mut self,
        out: &mut Outgoing,
        piece: &Piece<'_>,
        meta: &mut Option<(u16, u32)>,
    ) -> bool {
        let number = match *meta {
            Some((number, epoch)) if epoch == out.stream.epoch() => number,
            _ => {
                // The batches of a bundle have the same segments.
                let segments = self.run.batches.iter().map(|batch| {
                    let meta = piece.meta(self.key, out);
                    self.in_flight.add_segment(*batch, meta)
                });
                segments.last().expect("a run has a batch")
            }
        };
        // An urgent pointer counts from each piece on its own.
        let known = (number, out.stream.epoch());
        *meta = piece.tcp.urgent.is_none().then_some(known);
        self.run.unused = false;
        let put = match self.to {
            To::Link(..) => self.put_datagram(out, piece, number),
            To::Bundle(..) => self.put_shares(out, piece, number),
        };
        if put {
            self.run.pieces += 1;
            self.run.stride = self.run.stride.max(piece.shape.len());
            self.run.full = piece.shape.len() < self.run.stride;
        }
        put
    }

    #[inline]
    fn put_datagram(&mut self, out: &mut Outgoing, piece: &Piece<'_>, number: u16) -> bool {
        let Self {
            run,
            to: To::Link(link, _),
            ..
        } = self
        else {
            panic!("the caller saw a link");
        };
        let (batch, shape, len) = (run.batches[0], &piece.shape, piece.bytes.len());
        let is_sealed = run.bump.is_sealed();
        let at = match is_sealed {
            true => run.kept as u32,
            false => (run.at + CLEAR_HEADER_LEN) as u32,
        };
        // Before the pass over the bytes, which does not wait for it to be written.
        let content = Content::Chunk(piece.chunk(batch, at, number));
        let pending = self.in_flight.add(content, piece.plan.placement);
        let range = run.at..run.at + shape.len();
        let kept = self.in_flight.batch_mut(batch);
        let scratch = &mut self.shared.scratch.datagrams;
        let datagram = if is_sealed {
            kept[run.kept..run.kept + len].copy_from_slice(piece.bytes);
            scratch.resize(range.end, 0);
            &mut scratch[range.clone()]
        } else {
            &mut kept[range.clone()]
        };
        let (payload, behind) = datagram[CLEAR_HEADER_LEN..].split_at_mut(len);
        let crc = out.transform(run.bump, piece.solo_at(), piece.bytes, payload);
        let (block, behind) = behind[..shape.header].split_at_mut(piece.frame);
        Chunk {
            crc,
            ..piece.chunk(batch, at, number)
        }
        .frame(chain_id(out), piece.tcp, self.open)
        .encode(&mut Writer::new(block));
        let (block, padding) = behind.split_at_mut(piece.acks);
        if !block.is_empty() {
            block.copy_from_slice(&link.frames);
            link.frames.clear();
        }
        if !padding.is_empty() {
            padding.fill(0);
        }
        self.in_flight.set_crc(pending, crc);
        let datagram = match is_sealed {
            true => &mut scratch[range],
            false => &mut self.in_flight.batch_mut(batch)[range],
        };
        let seal = match (shape.tag, is_sealed) {
            (0, _) => Seal::Bare,
            (_, true) => Seal::All,
            (_, false) => Seal::Headers,
        };
        let (header, asks) = (shape.header, Asks::AckOf(pending));
        if !self.sealer.seal(link, datagram, header, asks, seal) {
            self.in_flight.remove(pending, &mut self.shared.pool);
            self.shared.scratch.datagrams.truncate(run.at);
            return false;
        }
        self.sent += len as u64;
        run.at += shape.len();
        run.kept += len;
        true
    }

    fn put_shares(&mut self, out: &mut Outgoing, piece: &Piece<'_>, number: u16) -> bool {
        let To::Bundle(paths, shares, split) = &mut self.to else {
            panic!("the caller saw a bundle");
        };
        let (run, payload) = (&mut *self.run, piece.bytes.len());
        let whole = &mut self.shared.scratch.datagrams;
        whole.clear();
        whole.extend_from_slice(&(payload as u16).to_be_bytes());
        whole.resize(piece.shape.len(), 0);
        let (bytes, block) = whole[piece.shape.front..].split_at_mut(payload);
        let crc = out.transform(run.bump, None, piece.bytes, bytes);
        Chunk {
            crc,
            ..piece.chunk(run.batches[0], 0, number)
        }
        .frame(chain_id(out), piece.tcp, self.open)
        .encode(&mut Writer::new(block));
        let set = shares.take_set();
        let len = self.shared.scratch.split(&mut self.shared.pads, *split);
        let mut pending: SmallVec<[Key; 4]> = SmallVec::new();
        for (index, (&at, &batch)) in run.carrier.links.iter().zip(&run.batches).enumerate() {
            let share = ShareOf {
                batch,
                at: (run.at + CLEAR_HEADER_LEN) as u32,
                set,
                len: len as u16,
                segment: number,
                index: index as u8,
                opens: self.open.is_some(),
            };
            let link = &mut paths[at];
            let placement = Placement::Only(link.id);
            let key = self.in_flight.add(Content::Share(share), placement);
            pending.push(key);
            let datagram = &mut self.in_flight.batch_mut(batch)[run.at..][..SHARE_OVERHEAD + len];
            datagram[CLEAR_HEADER_LEN..CLEAR_HEADER_LEN + len]
                .copy_from_slice(self.shared.scratch.share(index, len));
            let frame = share_frame(*split, run.bump.number, (set, index as u8), false);
            frame::encode(
                &frame,
                &mut Writer::new(&mut datagram[CLEAR_HEADER_LEN + len..]),
            );
            let asks = Asks::AckOf(key);
            if !self
                .sealer
                .seal(link, datagram, frame::SHARE_LEN, asks, Seal::Headers)
            {
                for key in pending {
                    self.in_flight.remove(key, &mut self.shared.pool);
                }
                return false;
            }
        }
        self.sent += len as u64;
        run.at += SHARE_OVERHEAD + len;
        true
    }

    /// Puts what the path has to acknowledge into its frames, if a datagram of `len` bytes has room for it; returns
    /// their length. A connection that asks and answers needs no other acknowledgements then.
    fn acknowledge(&mut self, len: usize) -> usize {
        let longest = match self.run.pieces {
            0 => self.run.longest,
            _ => self.run.stride,
        };
        let To::Link(link, _) = &mut self.to else {
            return 0;
        };
        if len + MAX_ACK > longest || !link.frames.is_empty() {
            return 0;
        }
        let mut block = std::mem::take(&mut link.frames);
        put_ack(self.sealer.now, link, &mut block);
        link.frames = block;
        link.frames.len()
    }
}

/// Name of the chain that the stream is at.
fn chain_id(out: &Outgoing) -> ChainId {
    ChainId {
        flow: out.flow,
        incarnation: out.stream.incarnation(),
        epoch: out.stream.epoch(),
    }
}

/// Bytes from a chunk of `len` bytes to the next one that goes by a trusted path come what may:
/// unpredictable, with the configured share as its mean, however short the chunks are. What others
/// went beyond it is made up for.
fn next_trusted(shared: &mut Shared, len: usize) -> i64 {
    if shared.setup.policy.trusted_share >= 1.0 {
        return 0;
    }
    if shared.setup.policy.trusted_share <= 0.0 {
        return i64::MAX / 2;
    }
    let mean =
        len as f64 * (1.0 - shared.setup.policy.trusted_share) / shared.setup.policy.trusted_share;
    let most = (2.0 * mean).min(f64::from(u32::MAX)) as u64;
    shared.dice.random_below(most) as i64
}
