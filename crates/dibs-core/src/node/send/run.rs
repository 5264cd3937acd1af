//! A run: datagrams of one flow for one path, cut from the head of its queue and sealed where they lie.
use std::collections::VecDeque;
use std::sync::Arc;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Open};
use dibs_wire::packet::{Segment, flags};

use super::super::Shared;
use super::super::links::{Link, PROOF_SPACING};
use super::super::peer::{Delayed, Out, Peer, Source};
use super::data::parsed;
use super::small::{MOST_ACK, put_ack};
use super::{CLEAR, NOT_BARE, Shape, Turn, token};
use crate::bump::{Bump, Chain};
use crate::chunk::{Chunk, Content, Head, Placement, Strand, Unacknowledged};
use crate::counters::Counter;
use crate::flow::conn::{ConnStats, Outgoing};
use crate::flow::fields::{self, OwnedFields};
use crate::session::{Integrity, TAG_LEN};
use crate::slab::Key;
use crate::time::Time;

/// Segments of one GSO send, at most (the kernel's UDP_MAX_SEGMENTS of old).
pub(super) const MAX_SEGMENTS: usize = 64;
/// Bytes of one GSO send, at most: an IPv6 payload with its UDP header.
pub(super) const MAX_BATCH: usize = 65_000;
/// Chunks left out of untrusted runs that may wait for a trusted path.
pub(super) const MAX_DELAYED: usize = 64;
/// Bytes of a datagram beside its payload, usually less.
pub(super) const MOST_BESIDE: usize = 128;
/// A datagram that falls short of the others of its send by no more than this part of them is padded:
/// the send goes on behind it, with the next segment.
pub(super) const MOST_PADDED: usize = 32;
/// Lengths of padded datagrams: powers of two between these, or the path's.
const MIN_BUCKET: usize = 128;
const MAX_BUCKET: usize = 1024;

impl Peer {
    /// Cuts the head of the queue into chunks of one path, and what follows, as many as fit one send.
    pub(super) fn fill_run(
        &mut self,
        turn: &mut Turn<'_>,
        key: Key,
        (link, budget): (usize, usize),
    ) -> Option<Out> {
        let flows = self.new_flows.len() + self.old_flows.len() + self.strict_flows.len();
        let alone = flows == 1;
        let may_be_untrusted = self.is_lax(turn.shared);
        let bumps = Arc::clone(&turn.shared.bumps);
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let open = conn.open_frame();
        let bump = bumps.of(conn.bump);
        let link = &mut self.links[link];
        let mtu = usize::from(link.path.mtu());
        let budget = budget.min(link.path.quantum().max(mtu)).min(MAX_BATCH);
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS);
        let wanted = conn.out.queue.bytes().div_ceil(mtu - MOST_BESIDE) + 1;
        let buffer = turn.shared.pool.take_for(wanted.min(most) * mtu);
        let mut run = Run {
            key,
            batch: self.waiting.add_batch(buffer),
            waiting: &mut self.waiting,
            delayed: &mut self.delayed_trusted,
            allowed: link.trusted || may_be_untrusted,
            guarded: bump.chain().map(Chain::guarded),
            bare: turn.session.integrity() == Integrity::Off
                && open.is_none()
                && bump.chain().is_some(),
            bump,
            link,
            open,
            mtu,
            most: wanted.min(most),
            at: 0,
            kept: 0,
            stride: 0,
            pieces: 0,
            sent: 0,
            unused: true,
            deferred: false,
            full: false,
        };
        let (bytes_before, memory_before) = (conn.out.queue.bytes(), conn.out.queue.memory());
        while let Some(mut head) = conn.out.queue.pop() {
            let segment = parsed(&head.buffer);
            let done = segment.payload.len() - head.left();
            if let Left::Some(left) = run.cut(
                turn,
                &mut conn.out,
                &mut conn.stats,
                &segment,
                done,
                head.mss,
            ) {
                head.payload_at = head.end - left;
                conn.out.queue.put_back(head);
                break;
            }
            turn.shared.pool.give(head.buffer);
            // The next one goes along unless it is another's turn, or CoDel's.
            let turns = alone || conn.out.deficit > 0;
            if run.full || !turns || !conn.out.queue.passes(turn.now, turn.quantum) {
                break;
            }
        }
        let Run {
            batch,
            link,
            at,
            stride,
            pieces,
            sent,
            unused,
            deferred,
            ..
        } = run;
        self.backlog -= bytes_before - conn.out.queue.bytes();
        self.queued_memory -= memory_before - conn.out.queue.memory();
        conn.by_path.entry(link.local).sent += sent;
        let out = Out {
            path: link.local,
            to: link.remote,
            segment: stride,
            source: match bump.is_sealed() {
                true => Source::Scratch,
                false => Source::Batch(batch, at),
            },
        };
        if pieces > 0 {
            return Some(out);
        }
        if unused {
            self.waiting.drop_empty_batch(batch, &mut turn.shared.pool);
        }
        if deferred {
            return self.send_delayed_trusted(turn);
        }
        None
    }
}

/// A run of datagrams of one flow for one path, being filled.
struct Run<'a> {
    key: Key,
    waiting: &'a mut Unacknowledged,
    /// What only a trusted path may carry and this one is not.
    delayed: &'a mut VecDeque<Delayed>,
    link: &'a mut Link,
    bump: &'a Bump,
    /// With a chain, how many bytes at the start of an epoch are for trusted paths.
    guarded: Option<u64>,
    /// The path may carry what is for trusted ones.
    allowed: bool,
    /// Chained bytes go without a tag.
    bare: bool,
    open: Option<Open>,
    mtu: usize,
    /// Datagrams, at most.
    most: usize,
    batch: Key,
    /// Bytes of datagrams filled.
    at: usize,
    /// Bytes of what is encrypted as they were, filled in the batch: the datagrams lie elsewhere.
    kept: usize,
    /// Length of all datagrams but the last.
    stride: usize,
    pieces: usize,
    /// Payload bytes filled.
    sent: u64,
    /// The batch holds no chunk.
    unused: bool,
    /// Some were left to a trusted path.
    deferred: bool,
    /// Nothing more fits.
    full: bool,
}

/// What a run leaves of a segment.
enum Left {
    Nothing,
    /// So many payload bytes; with none, a FIN.
    Some(usize),
}

impl Run<'_> {
    /// Cuts a segment from payload offset `done` on.
    fn cut(
        &mut self,
        turn: &mut Turn<'_>,
        out: &mut Outgoing,
        stats: &mut ConnStats,
        segment: &Segment<'_>,
        mut done: usize,
        mss: usize,
    ) -> Left {
        let total = segment.payload.len();
        let tcp = fields::of_segment(segment, out.meta);
        let header = frame::chunk_len(&tcp, self.open.as_ref());
        let base = out.stream.offset_of(segment.seq);
        let may_be_bare = self.bare && done < total && tcp.flags & NOT_BARE == 0;
        let tag = if may_be_bare { 0 } else { TAG_LEN };
        // The far host may forward them to where nothing longer fits.
        let room = (self.mtu - CLEAR - header - tag).min(mss.max(1));
        // Pieces of equal length, so that a send can go on with those of the next segment.
        let even = total.div_ceil(total.div_ceil(room).max(1));
        let mut head = None;
        loop {
            if self.pieces == self.most {
                self.full = true;
                return Left::Some(total - done);
            }
            let offset = base + done as u64;
            let position = out.stream.position(offset, (total - done).max(1));
            let due = self.guarded.is_some() && out.until_trusted <= 0;
            let guarded = self
                .guarded
                .is_some_and(|bytes| position.solo || out.stream.is_guarded(offset, bytes));
            let placement = match due || guarded {
                true => Placement::TrustedOnly,
                false => Placement::Any,
            };
            let allowed = placement.allows(self.link.id, self.allowed);
            // Now and then one that proves how far the numbers have come.
            let bare = may_be_bare
                && !(position.solo || position.first)
                && !self.link.path.next_seq().is_multiple_of(PROOF_SPACING);
            let tag = if bare { 0 } else { TAG_LEN };
            let len = (self.mtu - CLEAR - header - tag)
                .min(even)
                .min(position.limit)
                .min(total - done);
            let mut shape = Shape {
                payload: len,
                header,
                tag,
            };
            let last = done + len == total;
            let acks = match last && out.queue.is_empty() && allowed && !bare {
                true => self.acknowledge(turn.now, shape.len()),
                false => 0,
            };
            shape.header += acks;
            if self.bump.is_padded() {
                shape.header += padding(shape.len(), self.mtu);
            }
            let short = self.stride.saturating_sub(shape.len());
            if short <= self.stride / MOST_PADDED {
                shape.header += short;
            }
            let defer = !allowed && !guarded && self.delayed.len() < MAX_DELAYED;
            // The datagrams of one send are equally long, but for the last.
            if (!allowed && !defer) || (self.pieces > 0 && shape.len() > self.stride) {
                self.full = true;
                return Left::Some(total - done);
            }
            let bytes = &segment.payload[done..done + len];
            let piece_tcp = fields::of_piece(&tcp, done, last);
            let numbers = len as u64 + u64::from(last && tcp.flags & flags::FIN != 0);
            stats.retransmissions += u64::from(position.solo);
            let solo_at = position.solo.then_some(offset);
            let conn = self.key;
            let new_head = |out: &Outgoing| Head {
                conn,
                strand: strand(out),
                tcp: OwnedFields::new(&piece_tcp),
            };
            // Made where it is written: a copy of what was just written in parts waits for the writes.
            let (key, flags) = (self.batch, piece_tcp.flags);
            let chunk = |batch, at, head| Chunk {
                offset,
                batch,
                at,
                crc: 0,
                len: len as u16,
                head,
                flags,
                solo: position.solo,
                first: position.first,
                detached: position.detached,
            };
            if defer {
                // It goes by a trusted path when that has room; the others need not wait for it.
                let mut buffer = turn.shared.pool.take_for(len);
                let crc = out.transform(self.bump, solo_at, bytes, &mut buffer[..len]);
                let batch = self.waiting.add_batch(buffer);
                let head = self.waiting.add_head(batch, new_head(out));
                let chunk = Chunk {
                    crc,
                    ..chunk(batch, 0, head)
                };
                let key = self.waiting.add(Content::Chunk(chunk), placement);
                self.delayed.push_back(Delayed { key, lost_by: None });
                self.deferred = true;
            } else {
                let number = match head {
                    Some((number, epoch)) if epoch == out.stream.epoch() => number,
                    _ => self.waiting.add_head(self.batch, new_head(out)),
                };
                // An urgent pointer counts from each piece on its own.
                let known = (number, out.stream.epoch());
                head = tcp.urgent.is_none().then_some(known);
                let at = match self.bump.is_sealed() {
                    true => self.kept as u32,
                    false => (self.at + CLEAR) as u32,
                };
                // Before the pass over the bytes, which does not wait for it to be written.
                let content = Content::Chunk(chunk(key, at, number));
                let pending = self.waiting.add(content, placement);
                let range = self.at..self.at + shape.len();
                let kept = self.waiting.batch_mut(self.batch);
                let datagram = if self.bump.is_sealed() {
                    kept[self.kept..self.kept + len].copy_from_slice(bytes);
                    turn.shared.scratch.resize(range.end, 0);
                    &mut turn.shared.scratch[range.clone()]
                } else {
                    &mut kept[range.clone()]
                };
                let (payload, rest) = datagram[CLEAR..].split_at_mut(len);
                let crc = out.transform(self.bump, solo_at, bytes, payload);
                let (block, padding) = rest[..shape.header].split_at_mut(header);
                Chunk {
                    crc,
                    ..chunk(key, at, number)
                }
                .frame(strand(out), piece_tcp, self.open)
                .encode(&mut Writer::new(block));
                let (block, padding) = padding.split_at_mut(acks);
                if !block.is_empty() {
                    block.copy_from_slice(&self.link.frames);
                    self.link.frames.clear();
                }
                if !padding.is_empty() {
                    padding.fill(0);
                }
                self.waiting.set_crc(pending, crc);
                let size = shape.len() as u16;
                let seq = self.link.path.on_sent(turn.now, size, token(pending), true);
                let inside = self.bump.is_sealed();
                let datagram = match inside {
                    true => &mut turn.shared.scratch[range],
                    false => &mut self.waiting.batch_mut(self.batch)[range],
                };
                let id = self.link.id;
                let sealed = match tag {
                    0 => turn.session.seal_bare(datagram, id, seq, shape.header),
                    _ => turn.session.seal(datagram, id, seq, shape.header, inside),
                };
                self.unused = false;
                if sealed.is_err() {
                    // Nothing leaves without protection; the scrambler is ahead of what left.
                    turn.shared.count(Counter::KeysExhausted);
                    out.stream.break_chain();
                    turn.shared.scratch.truncate(self.at);
                    self.full = true;
                    return Left::Some(total - done);
                }
                self.pieces += 1;
                self.sent += len as u64;
                self.at += shape.len();
                self.kept += len;
                self.stride = self.stride.max(shape.len());
                self.full = shape.len() < self.stride;
            }
            out.stream.advance(offset, numbers, position.solo);
            if self.link.trusted || defer {
                stats.bytes_trusted += len as u64;
            }
            if self.guarded.is_some() {
                out.until_trusted += match due {
                    true => next_trusted(turn.shared, len),
                    false => -(len as i64),
                };
            }
            out.deficit -= shape.len() as i64;
            done += len;
            if last {
                return Left::Nothing;
            }
            if self.full {
                return Left::Some(total - done);
            }
        }
    }
}

impl Run<'_> {
    /// What the path has to acknowledge goes along with a datagram of `len` bytes that has room for it: left in
    /// the path's frames, of this length. A connection that asks and answers needs no others then.
    fn acknowledge(&mut self, now: Time, len: usize) -> usize {
        let longest = match self.pieces {
            0 => self.mtu,
            _ => self.stride,
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

/// Bytes that bring a datagram of `len` to the next of the lengths that an observer may see.
pub(super) fn padding(len: usize, mtu: usize) -> usize {
    let bucket = len.next_power_of_two().max(MIN_BUCKET);
    let bucket = if bucket > MAX_BUCKET {
        mtu
    } else {
        bucket.min(mtu)
    };
    bucket.saturating_sub(len)
}

/// Bytes from a chunk of `len` bytes to the next one that goes by a trusted path come what may:
/// unpredictable, with the configured share as its mean, however short the chunks are. What others
/// went beyond it is made up for.
fn next_trusted(shared: &mut Shared, len: usize) -> i64 {
    if shared.trusted_share >= 1.0 {
        return 0;
    }
    if shared.trusted_share <= 0.0 {
        return i64::MAX / 2;
    }
    let mean = len as f64 * (1.0 - shared.trusted_share) / shared.trusted_share;
    let most = (2.0 * mean).min(f64::from(u32::MAX)) as u64;
    shared.random_below(most) as i64
}
