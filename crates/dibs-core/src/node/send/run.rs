//! A run: datagrams of one flow for one path, cut from the head of its queue and sealed where they lie.
use std::collections::VecDeque;
use std::sync::Arc;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Open};
use dibs_wire::packet::{Segment, flags};

use super::super::Shared;
use super::super::fq::{List, parsed};
use super::super::paths::Kind;
use super::super::paths::{Link, PROOF_SPACING};
use super::super::peer::{Delayed, Out, Peer, Source};
use super::super::preference::Scheduler;
use super::data::{kind, scheduler};
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
    /// Cuts the head of a flow's queue into chunks of one path, and what follows, as many as fit one send: of this
    /// flow, and then of those whose turn it is next on its list.
    pub(super) fn fill_run(
        &mut self,
        turn: &mut Turn<'_>,
        key: Key,
        list: List,
        (link, budget): (usize, usize),
    ) -> Option<Out> {
        let may_be_untrusted = self.is_lax(turn.shared);
        let conn = self.flows.get(key).expect("the caller has it");
        let path = &self.paths[link];
        let mtu = usize::from(path.path.mtu());
        let budget = budget.min(path.path.quantum().max(mtu)).min(MAX_BATCH);
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS);
        let most = most.min(self.wanted(key, list, mtu));
        let buffer = turn.shared.pool.take_for(most * mtu);
        let mut run = Run {
            link,
            allowed: path.trusted || may_be_untrusted,
            bump: conn.bump,
            kind: kind(conn),
            scheduler: scheduler(conn, turn.shared),
            mtu,
            most,
            batch: self.waiting.add_batch(buffer),
            at: 0,
            kept: 0,
            stride: 0,
            pieces: 0,
            unused: true,
            deferred: false,
            full: false,
        };
        let bumps = Arc::clone(&turn.shared.bumps);
        let bump = bumps.of(run.bump);
        let mut last = key;
        let first = self.waiting.next_key();
        self.fill(turn, &mut run, bump, key);
        while run.pieces > 0
            && !run.full
            && let Some(next) = self.joins(turn, &run, list)
            && next != last
        {
            self.fill(turn, &mut run, bump, next);
            last = next;
        }
        if run.unused {
            self.waiting
                .drop_empty_batch(run.batch, &mut turn.shared.pool);
        } else if self.waiting.has_batch(run.batch) {
            let used = if bump.is_sealed() { run.kept } else { run.at };
            self.waiting
                .shrink_batch(run.batch, used, &mut turn.shared.pool);
        }
        if run.pieces > 0 {
            if run.scheduler == Scheduler::Redundant {
                self.note_copies(turn, link, run.batch, first);
            }
            let source = match bump.is_sealed() {
                true => Source::Scratch,
                false => Source::Batch(run.batch, run.at),
            };
            return Some(Out::by(&self.paths[link], run.stride, source));
        }
        if run.deferred {
            return self.send_delayed_trusted(turn);
        }
        None
    }

    /// Datagrams for what waits of a flow, and of those that may go along with it, about.
    fn wanted(&self, key: Key, list: List, mtu: usize) -> usize {
        let room = mtu - MOST_BESIDE;
        let conn = self.flows.get(key).expect("the caller has it");
        let mut wanted = conn.out.queue.bytes().div_ceil(room) + 1;
        if list == List::TrustedOnly {
            return wanted;
        }
        for other in self.fq.others(list).take(MAX_SEGMENTS) {
            if wanted >= MAX_SEGMENTS {
                break;
            }
            let conn = self.flows.get(other);
            wanted += conn.map_or(0, |conn| conn.out.queue.bytes().div_ceil(room));
        }
        wanted
    }

    /// The flow whose turn it is next, if what it has to send may go along in a run.
    fn joins(&mut self, turn: &Turn<'_>, run: &Run, list: List) -> Option<Key> {
        if list == List::TrustedOnly {
            return None;
        }
        let key = self.next_flow(turn, list, &mut 0)?;
        let conn = self.flows.get_mut(key).expect("it was just seen");
        let fits = conn.bump == run.bump
            && scheduler(conn, turn.shared) == run.scheduler
            && (turn.shared.policy.hint.is_none() || kind(conn) == run.kind)
            && conn.out.secrets.is_some()
            && conn.out.queue.passes(turn.now, turn.patience);
        if !fits {
            return None;
        }
        let (strict, _) = self.is_strict(turn, key);
        (run.allowed || !strict).then_some(key)
    }

    /// Takes from a flow's queue into a run what it may send now.
    fn fill(&mut self, turn: &mut Turn<'_>, run: &mut Run, bump: &Bump, key: Key) {
        let alone = self.fq.flows() == 1;
        let conn = self.flows.get_mut(key).expect("its turn was looked at");
        let open = conn.open_frame();
        let link = &mut self.paths[run.link];
        let mut cutter = Cutter {
            key,
            run,
            waiting: &mut self.waiting,
            delayed: &mut self.retransmit.trusted,
            guarded: bump.chain().map(Chain::guarded),
            bare: turn.session.integrity() == Integrity::Off
                && open.is_none()
                && bump.chain().is_some(),
            bump,
            link,
            open,
            sent: 0,
        };
        let held = self.fq.watch(&conn.out.queue);
        while let Some(mut head) = conn.out.queue.pop() {
            let segment = parsed(&head.buffer);
            let mut rest = Rest {
                left: head.left(),
                withheld: head.withheld,
                mss: head.mss,
            };
            if !cutter.cut(turn, &mut conn.out, &mut conn.stats, &segment, &mut rest) {
                (head.payload_at, head.withheld) = (head.end - rest.left, rest.withheld);
                conn.out.queue.put_back(head);
                break;
            }
            turn.shared.pool.give(head.buffer);
            // The next one goes along unless it is another's turn, or CoDel's.
            let turns = alone || conn.out.deficit > 0;
            if cutter.run.full || !turns || !conn.out.queue.passes(turn.now, turn.patience) {
                break;
            }
        }
        let (local, sent) = (cutter.link.local, cutter.sent);
        conn.by_path.entry(local).sent += sent;
        self.fq.settle(&held, &conn.out.queue);
    }
}

/// Datagrams of one path that go in one send, being filled.
struct Run {
    /// Index of the path among the links.
    link: usize,
    /// The path may carry what is for trusted ones.
    allowed: bool,
    /// The bump of all that goes.
    bump: u8,
    /// What all that goes is, if the user prefers a path.
    kind: Kind,
    /// The scheduler of all that goes.
    scheduler: Scheduler,
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
    /// The batch holds no chunk.
    unused: bool,
    /// Some were left to a trusted path.
    deferred: bool,
    /// Nothing more fits.
    full: bool,
}

/// Cuts what a flow sends into the datagrams of a run.
struct Cutter<'a> {
    key: Key,
    run: &'a mut Run,
    waiting: &'a mut Unacknowledged,
    /// What only a trusted path may carry and this one is not.
    delayed: &'a mut VecDeque<Delayed>,
    link: &'a mut Link,
    bump: &'a Bump,
    /// With a chain, how many bytes at the start of an epoch are for trusted paths.
    guarded: Option<u64>,
    /// Chained bytes go without a tag.
    bare: bool,
    open: Option<Open>,
    /// Payload bytes filled.
    sent: u64,
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
    fn cut(
        &mut self,
        turn: &mut Turn<'_>,
        out: &mut Outgoing,
        stats: &mut ConnStats,
        segment: &Segment<'_>,
        rest: &mut Rest,
    ) -> bool {
        let total = segment.payload.len();
        let tcp = fields::of_segment(segment, out.meta);
        let open = self.open;
        let header = |solo| frame::chunk_len(&tcp, solo, open.as_ref());
        let base = out.stream.offset_of(segment.seq);
        let may_be_bare = self.bare && rest.left > 0 && tcp.flags & NOT_BARE == 0;
        let tag = if may_be_bare { 0 } else { TAG_LEN };
        // The far host may forward them to where nothing longer fits.
        let room = (self.run.mtu - CLEAR - header(false) - tag).min(rest.mss.max(1));
        // Pieces of equal length, so that a send can go on with those of the next segment.
        let even = total.div_ceil(total.div_ceil(room).max(1));
        let mut head = None;
        loop {
            if self.run.pieces == self.run.most {
                self.run.full = true;
                return false;
            }
            let done = total - rest.left;
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
            let allowed = placement.allows(self.link.id, self.run.allowed);
            // Now and then one that proves how far the numbers have come.
            let bare = may_be_bare
                && !(position.solo || position.first)
                && !self.link.path.next_seq().is_multiple_of(PROOF_SPACING);
            let tag = if bare { 0 } else { TAG_LEN };
            let header = header(position.solo);
            let len = (self.run.mtu - CLEAR - header - tag)
                .min(even)
                .min(position.limit)
                .min(rest.limit());
            let withheld = rest.withheld > 0 && position.is_inside();
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
                shape.header += padding(shape.len(), self.run.mtu);
            }
            let short = self.run.stride.saturating_sub(shape.len());
            if short <= self.run.stride / MOST_PADDED {
                shape.header += short;
            }
            let defer = !allowed && !guarded && self.delayed.len() < MAX_DELAYED;
            // The datagrams of one send are equally long, but for the last.
            if (!allowed && !defer) || (self.run.pieces > 0 && shape.len() > self.run.stride) {
                self.run.full = true;
                return false;
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
            let (key, flags) = (self.run.batch, piece_tcp.flags);
            let chunk = |batch, at, head| Chunk {
                offset,
                batch,
                at,
                crc: 0,
                len: len as u16,
                head,
                flags,
                solo: position.solo,
                ahead: position.ahead,
                first: position.first,
                detached: position.detached,
                withheld,
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
                self.run.deferred = true;
            } else {
                let number = match head {
                    Some((number, epoch)) if epoch == out.stream.epoch() => number,
                    _ => self.waiting.add_head(self.run.batch, new_head(out)),
                };
                // An urgent pointer counts from each piece on its own.
                let known = (number, out.stream.epoch());
                head = tcp.urgent.is_none().then_some(known);
                let at = match self.bump.is_sealed() {
                    true => self.run.kept as u32,
                    false => (self.run.at + CLEAR) as u32,
                };
                // Before the pass over the bytes, which does not wait for it to be written.
                let content = Content::Chunk(chunk(key, at, number));
                let pending = self.waiting.add(content, placement);
                let range = self.run.at..self.run.at + shape.len();
                let kept = self.waiting.batch_mut(self.run.batch);
                let datagram = if self.bump.is_sealed() {
                    kept[self.run.kept..self.run.kept + len].copy_from_slice(bytes);
                    turn.shared.scratch.datagrams.resize(range.end, 0);
                    &mut turn.shared.scratch.datagrams[range.clone()]
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
                    true => &mut turn.shared.scratch.datagrams[range],
                    false => &mut self.waiting.batch_mut(self.run.batch)[range],
                };
                let id = self.link.id;
                let sealed = match tag {
                    0 => turn.session.seal_bare(datagram, id, seq, shape.header),
                    _ => turn.session.seal(datagram, id, seq, shape.header, inside),
                };
                self.run.unused = false;
                if sealed.is_err() {
                    // Nothing leaves without protection, and nothing of it is kept; the scrambler is ahead of what
                    // left.
                    self.waiting.remove(pending, &mut turn.shared.pool);
                    turn.shared.count(Counter::KeysExhausted);
                    out.stream.break_chain();
                    turn.shared.scratch.datagrams.truncate(self.run.at);
                    self.run.full = true;
                    return false;
                }
                self.run.pieces += 1;
                self.sent += len as u64;
                self.run.at += shape.len();
                self.run.kept += len;
                self.run.stride = self.run.stride.max(shape.len());
                self.run.full = shape.len() < self.run.stride;
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
            rest.advance(len);
            if last || self.run.full {
                return last;
            }
        }
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
