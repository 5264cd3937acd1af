//! Cuts what a flow sends into the datagrams of a run: each piece is transformed by the bump, framed, kept and sealed.

use std::collections::VecDeque;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Open, TcpFields};
use dibs_wire::packet::{Segment, flags};

use super::super::paths::{Link, PROOF_SPACING};
use super::super::shared::Shared;
use super::run::{MAX_DELAYED, MOST_PADDED, Run, padding};
use super::small::{MOST_ACK, put_ack};
use super::{CLEAR, NOT_BARE, SendCx, Shape, token};
use crate::bump::Bump;
use crate::chunk::Delayed;
use crate::chunk::{Chunk, Content, Head, InFlight, Placement, Strand};
use crate::counters::Counter;
use crate::flow::conn::{ConnStats, Outgoing};
use crate::flow::fields::{self, OwnedFields};
use crate::session::TAG_LEN;
use crate::slab::Key;
use crate::stream::tx::Position;
use crate::time::Time;

/// Cuts what a flow sends into the datagrams of a run.
pub(super) struct Cutter<'a> {
    pub(super) key: Key,
    pub(super) run: &'a mut Run,
    pub(super) in_flight: &'a mut InFlight,
    /// What only a trusted path may carry and this one is not.
    pub(super) delayed: &'a mut VecDeque<Delayed>,
    pub(super) link: &'a mut Link,
    pub(super) bump: &'a Bump,
    /// With a chain, how many bytes at the start of an epoch are for trusted paths.
    pub(super) guarded: Option<u64>,
    /// Chained bytes go without a tag.
    pub(super) bare: bool,
    pub(super) open: Option<Open>,
    /// Payload bytes filled.
    pub(super) sent: u64,
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
    fn new(cutter: &Cutter<'_>, segment: &Segment<'s>, out: &mut Outgoing, rest: &Rest) -> Self {
        let tcp = fields::of_segment(segment, out.meta);
        let may_be_bare = cutter.bare && rest.left > 0 && tcp.flags & NOT_BARE == 0;
        let tag = if may_be_bare { 0 } else { TAG_LEN };
        let frame = frame::chunk_len(&tcp, false, cutter.open.as_ref());
        // The far host may forward them to where nothing longer fits.
        let room = (cutter.run.mtu - CLEAR - frame - tag).min(rest.mss.max(1));
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
    position: Position,
    placement: Placement,
    withheld: bool,
    /// The segment ends with it.
    last: bool,
    /// It waits for a trusted path.
    deferred: bool,
    shape: Shape,
    /// Bytes of the chunk's frame, with which the header block begins, and of the acknowledgement behind it.
    frame: usize,
    acks: usize,
}

impl Piece<'_> {
    fn solo_at(&self) -> Option<u64> {
        self.position.solo.then_some(self.position.offset)
    }

    fn head(&self, conn: Key, out: &Outgoing) -> Head {
        Head {
            conn,
            strand: strand(out),
            tcp: OwnedFields::new(&self.tcp),
        }
    }

    /// Made where it is written: a copy of what was just written in parts waits for the writes.
    #[inline]
    fn chunk(&self, batch: Key, at: u32, head: u16) -> Chunk {
        let Position {
            offset,
            solo,
            ahead,
            first,
            detached,
            ..
        } = self.position;
        Chunk {
            offset,
            batch,
            at,
            crc: 0,
            len: self.bytes.len() as u16,
            head,
            flags: self.tcp.flags,
            solo,
            ahead,
            first,
            detached,
            withheld: self.withheld,
        }
    }
}

/// What is left of a segment.
pub(super) struct Rest {
    /// Payload bytes; with none, a FIN.
    pub(super) left: usize,
    /// The first of them that the receiver's kernel is not to get.
    pub(super) withheld: usize,
    /// Payload bytes of one of the segments that it stands for.
    pub(super) mss: usize,
}

impl Rest {
    /// So many bytes go now.
    pub(super) const fn advance(&mut self, len: usize) {
        self.left -= len;
        self.withheld = self.withheld.saturating_sub(len);
    }

    /// Bytes that go the same way, at most.
    pub(super) fn limit(&self) -> usize {
        match self.withheld {
            0 => self.left,
            withheld => withheld.min(self.left),
        }
    }
}

impl Cutter<'_> {
    /// Cuts what is left of a segment; false if not all of it.
    pub(super) fn cut(
        &mut self,
        cx: &mut SendCx<'_>,
        out: &mut Outgoing,
        stats: &mut ConnStats,
        segment: &Segment<'_>,
        rest: &mut Rest,
    ) -> bool {
        let whole = Whole::new(self, segment, out, rest);
        let mut head = None;
        loop {
            if self.run.pieces == self.run.most {
                self.run.full = true;
                return false;
            }
            let due = self.guarded.is_some() && out.until_trusted <= 0;
            let Some(piece) = self.plan(cx.now, out, &whole, rest, due) else {
                self.run.full = true;
                return false;
            };
            stats.retransmissions += u64::from(piece.position.solo);
            if piece.deferred {
                self.put_off(cx, out, &piece);
            } else if !self.put(cx, out, &piece, &mut head) {
                return false;
            }
            let len = piece.bytes.len();
            let fin = piece.last && whole.tcp.flags & flags::FIN != 0;
            let numbers = len as u64 + u64::from(fin);
            out.stream
                .advance(piece.position.offset, numbers, piece.position.solo);
            if self.link.trusted || piece.deferred {
                stats.bytes_trusted += len as u64;
            }
            if self.guarded.is_some() {
                out.until_trusted += match due {
                    true => next_trusted(cx.shared, len),
                    false => -(len as i64),
                };
            }
            out.deficit -= piece.shape.len() as i64;
            rest.advance(len);
            if piece.last || self.run.full {
                return piece.last;
            }
        }
    }

    /// The next piece of a segment; none if it does not fit the run.
    #[inline]
    fn plan<'s>(
        &mut self,
        now: Time,
        out: &mut Outgoing,
        whole: &Whole<'s>,
        rest: &Rest,
        due: bool,
    ) -> Option<Piece<'s>> {
        let total = whole.payload.len();
        let done = total - rest.left;
        let offset = whole.base + done as u64;
        let position = out.stream.position(offset, rest.left.max(1));
        let guarded = self
            .guarded
            .is_some_and(|bytes| position.solo || out.stream.is_guarded(offset, bytes));
        let placement = match due || guarded {
            true => Placement::TrustedOnly,
            false => Placement::Any,
        };
        let allowed = placement.allows(self.link.id, self.run.allowed);
        // Now and then one that proves how far the numbers have come.
        let bare = whole.may_be_bare
            && position.is_inside()
            && !self.link.path.next_seq().is_multiple_of(PROOF_SPACING);
        let tag = if bare { 0 } else { TAG_LEN };
        let frame = frame::chunk_len(&whole.tcp, position.solo, self.open.as_ref());
        let len = (self.run.mtu - CLEAR - frame - tag)
            .min(whole.even)
            .min(position.limit)
            .min(rest.limit());
        let last = done + len == total;
        let mut shape = Shape {
            payload: len,
            header: frame,
            tag,
        };
        let acks = match last && out.queue.is_empty() && allowed && !bare {
            true => self.acknowledge(now, shape.len()),
            false => 0,
        };
        shape.header += acks;
        if self.bump.is_padded() {
            shape.header += padding(shape.len(), self.run.mtu);
        }
        let short = self.run.stride.saturating_sub(shape.len());
        if short <= self.run.stride / MOST_PADDED {
            shape.header += short;
        }
        let deferred = !allowed && !guarded && self.delayed.len() < MAX_DELAYED;
        // The datagrams of one send are equally long, but for the last.
        let fits = self.run.pieces == 0 || shape.len() <= self.run.stride;
        ((allowed || deferred) && fits).then(|| Piece {
            bytes: &whole.payload[done..done + len],
            tcp: fields::of_piece(&whole.tcp, done, last),
            position: Position { offset, ..position },
            placement,
            withheld: rest.withheld > 0 && position.is_inside(),
            last,
            deferred,
            shape,
            frame,
            acks,
        })
    }

    /// Keeps a piece for a trusted path, to go when that has room; the others need not wait for it.
    fn put_off(&mut self, cx: &mut SendCx<'_>, out: &mut Outgoing, piece: &Piece<'_>) {
        let len = piece.bytes.len();
        let mut buffer = cx.shared.pool.take_for(len);
        let crc = out.transform(self.bump, piece.solo_at(), piece.bytes, &mut buffer[..len]);
        let batch = self.in_flight.add_batch(buffer);
        let head = self.in_flight.add_head(batch, piece.head(self.key, out));
        let chunk = Chunk {
            crc,
            ..piece.chunk(batch, 0, head)
        };
        let key = self.in_flight.add(Content::Chunk(chunk), piece.placement);
        self.delayed.push_back(Delayed { key, lost_by: None });
        self.run.deferred = true;
    }

    /// Makes the next datagram of the run of a piece; false if it could not be sealed. `head` is what the pieces of the
    /// segment before it share.
    #[inline]
    fn put(
        &mut self,
        cx: &mut SendCx<'_>,
        out: &mut Outgoing,
        piece: &Piece<'_>,
        head: &mut Option<(u16, u32)>,
    ) -> bool {
        let (batch, shape, len) = (self.run.batch, &piece.shape, piece.bytes.len());
        let is_sealed = self.bump.is_sealed();
        let number = match *head {
            Some((number, epoch)) if epoch == out.stream.epoch() => number,
            _ => self.in_flight.add_head(batch, piece.head(self.key, out)),
        };
        // An urgent pointer counts from each piece on its own.
        let known = (number, out.stream.epoch());
        *head = piece.tcp.urgent.is_none().then_some(known);
        let at = match is_sealed {
            true => self.run.kept as u32,
            false => (self.run.at + CLEAR) as u32,
        };
        // Before the pass over the bytes, which does not wait for it to be written.
        let content = Content::Chunk(piece.chunk(batch, at, number));
        let pending = self.in_flight.add(content, piece.placement);
        let range = self.run.at..self.run.at + shape.len();
        let kept = self.in_flight.batch_mut(batch);
        let datagram = if is_sealed {
            kept[self.run.kept..self.run.kept + len].copy_from_slice(piece.bytes);
            cx.shared.scratch.datagrams.resize(range.end, 0);
            &mut cx.shared.scratch.datagrams[range.clone()]
        } else {
            &mut kept[range.clone()]
        };
        let (payload, behind) = datagram[CLEAR..].split_at_mut(len);
        let crc = out.transform(self.bump, piece.solo_at(), piece.bytes, payload);
        let (block, behind) = behind[..shape.header].split_at_mut(piece.frame);
        Chunk {
            crc,
            ..piece.chunk(batch, at, number)
        }
        .frame(strand(out), piece.tcp, self.open)
        .encode(&mut Writer::new(block));
        let (block, padding) = behind.split_at_mut(piece.acks);
        if !block.is_empty() {
            block.copy_from_slice(&self.link.frames);
            self.link.frames.clear();
        }
        if !padding.is_empty() {
            padding.fill(0);
        }
        self.in_flight.set_crc(pending, crc);
        let size = shape.len() as u16;
        let seq = self.link.path.on_sent(cx.now, size, token(pending), true);
        let datagram = match is_sealed {
            true => &mut cx.shared.scratch.datagrams[range],
            false => &mut self.in_flight.batch_mut(batch)[range],
        };
        let id = self.link.id;
        let sealed = match shape.tag {
            0 => cx.session.seal_bare(datagram, id, seq, shape.header),
            _ => cx.session.seal(datagram, id, seq, shape.header, is_sealed),
        };
        self.run.unused = false;
        if sealed.is_err() {
            // Nothing leaves without protection, and nothing of it is kept; the scrambler is ahead of what
            // left.
            self.in_flight.remove(pending, &mut cx.shared.pool);
            cx.shared.count(Counter::KeysExhausted);
            out.stream.break_chain();
            cx.shared.scratch.datagrams.truncate(self.run.at);
            self.run.full = true;
            return false;
        }
        self.run.pieces += 1;
        self.sent += len as u64;
        self.run.at += shape.len();
        self.run.kept += len;
        self.run.stride = self.run.stride.max(shape.len());
        self.run.full = shape.len() < self.run.stride;
        true
    }

    /// What the path has to acknowledge goes along with a datagram of `len` bytes that has room for it: left in
    /// the path's frames, of this length. A connection that asks and answers needs no others then.
    fn acknowledge(&mut self, now: Time, len: usize) -> usize {
        let longest = match self.run.pieces {
            0 => self.run.mtu,
            _ => self.run.stride,
        };
        if len + MOST_ACK > longest || !self.link.frames.is_empty() {
            return 0;
        }
        let mut block = std::mem::take(&mut self.link.frames);
        put_ack(now, self.link, &mut block);
        self.link.frames = block;
        self.link.frames.len()
    }
}

/// Where the stream stands.
pub(super) fn strand(out: &Outgoing) -> Strand {
    Strand {
        flow: out.flow,
        incarnation: out.stream.incarnation(),
        epoch: out.stream.epoch(),
    }
}

/// Bytes from a chunk of `len` bytes to the next one that goes by a trusted path come what may:
/// unpredictable, with the configured share as its mean, however short the chunks are. What others
/// went beyond it is made up for.
fn next_trusted(shared: &mut Shared, len: usize) -> i64 {
    if shared.policy.trusted_share >= 1.0 {
        return 0;
    }
    if shared.policy.trusted_share <= 0.0 {
        return i64::MAX / 2;
    }
    let mean = len as f64 * (1.0 - shared.policy.trusted_share) / shared.policy.trusted_share;
    let most = (2.0 * mean).min(f64::from(u32::MAX)) as u64;
    shared.random_below(most) as i64
}
