//! Chunks that are sent again, or for the first time by a path that they had to wait for.

use std::collections::VecDeque;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};
use smallvec::SmallVec;

use super::super::out::{Out, Source};
use super::super::paths::{Avoid, Choice, Wanted};
use super::super::peer::Peer;
use super::super::shared::Shared;
use super::run::{MAX_BATCH, MAX_SEGMENTS, padding};
use super::small::pad;
use super::{CLEAR, SendCx, Shape, key_of, token};
use crate::chunk::Delayed;
use crate::chunk::{Chunk, Content, Fragment, Origin, Pending, Placement};
use crate::counters::Counter;
use crate::flow::conn::Conn;
use crate::session::{OVERHEAD, TAG_LEN};
use crate::slab::Key;

/// Times that a chunk is sent before it is left to TCP.
const MAX_SENDS: u8 = 12;

/// What was lost, or left out of a run, by who may carry it; shares wait with their path.
#[derive(Default)]
pub(in crate::node) struct RetransmitQueue {
    pub(in crate::node) trusted: VecDeque<Delayed>,
    pub(super) any: VecDeque<Delayed>,
    /// The oldest of what waits for an acknowledgement when what waits for a path was put behind it last.
    pub(super) postponed: Option<Key>,
    /// Chunks that were cut into pieces.
    fragmented: u32,
}

impl RetransmitQueue {
    /// The peer restarted.
    pub(in crate::node) fn clear(&mut self) {
        self.trusted.clear();
        self.any.clear();
    }

    /// The name of the next chunk in pieces. Odd ones; even ones are of opaque packets.
    fn next_fragmented(&mut self) -> u32 {
        let id = self.fragmented.wrapping_mul(2).wrapping_add(1);
        self.fragmented = self.fragmented.wrapping_add(1);
        id
    }
}

/// Chunks that go again in one send, and the shapes of their datagrams.
type RetransmitRun = SmallVec<[(Key, Shape); 8]>;

impl Peer {
    /// Sends what was lost, or left out of a run, and only trusted paths may carry.
    pub(super) fn send_delayed_trusted(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let placement = match self.is_lax(cx.shared) {
            true => Placement::Any,
            false => Placement::TrustedOnly,
        };
        let mut queue = std::mem::take(&mut self.retransmit.trusted);
        let out = self.send_delayed(cx, placement, &mut queue);
        self.retransmit.trusted = queue;
        out
    }

    /// Sends again what was lost and any path may carry.
    pub(super) fn send_delayed_any(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let mut queue = std::mem::take(&mut self.retransmit.any);
        let out = self.send_delayed(cx, Placement::Any, &mut queue);
        self.retransmit.any = queue;
        out
    }

    /// Sends the first of a queue that still waits for its acknowledgement. Nothing that this calls
    /// may add to the queue but by `cut_chunk`, which returns what to put in its place.
    fn send_delayed(
        &mut self,
        cx: &mut SendCx<'_>,
        placement: Placement,
        queue: &mut VecDeque<Delayed>,
    ) -> Option<Out> {
        let mut at = 0;
        while let Some(&Delayed { key, lost_by }) = queue.get(at) {
            let Some(pending) = self.in_flight.get(key) else {
                queue.remove(at);
                continue;
            };
            if matches!(pending.content, Content::Control(_)) && placement == Placement::Any {
                // That untrusted paths may carry data says nothing of the daemons' own words.
                at += 1;
                continue;
            }
            if self.is_stale(pending) {
                queue.remove(at);
                self.in_flight.remove(key, &mut cx.shared.pool);
                continue;
            }
            let wanted = OVERHEAD + 128 + pending.content.payload_len();
            let avoid = lost_by.map_or(Avoid::Nothing, Avoid::Link);
            let wanted = Wanted::alone(placement, wanted, avoid);
            let choice = self.paths.choose(cx.shared, cx.now, &wanted);
            let (link, budget) = match choice {
                Choice::Send { link, budget } => (link, budget),
                Choice::Wait(at) => {
                    self.paths.wait_until(at);
                    return None;
                }
                Choice::Nobody => return None,
            };
            let out = match &pending.content {
                Content::Chunk(chunk) if self.shape(cx.shared, link, chunk).is_some() => {
                    self.retransmit_chunks(cx, (link, budget), queue, at)
                }
                Content::Chunk(_) => {
                    queue.remove(at);
                    if lost_by.is_some() {
                        cx.shared.count(Counter::ChunkResent);
                    }
                    for piece in self.cut_chunk(cx.shared, key).into_iter().rev() {
                        let piece = Delayed {
                            key: piece,
                            lost_by,
                        };
                        queue.insert(at, piece);
                    }
                    None
                }
                other => {
                    let is_control = matches!(other, Content::Control(_));
                    queue.remove(at);
                    if lost_by.is_some() {
                        cx.shared.count(Counter::ChunkResent);
                    }
                    if is_control {
                        self.transmit_message(cx, link, key)
                    } else {
                        self.send_fragment(cx, link, key)
                    }
                }
            };
            if out.is_some() {
                return out;
            }
        }
        None
    }

    /// Whether it belongs to an incarnation that is over: the peer has forgotten it, and the words
    /// that open the flow speak of another one.
    pub(super) fn is_stale(&self, pending: &Pending) -> bool {
        let Some(origin) = self.in_flight.origin(&pending.content) else {
            return false;
        };
        let conn = self.flows.get(origin.conn);
        conn.is_none_or(|conn| conn.out.stream.incarnation() != origin.incarnation)
    }

    /// Whether a chunk fits a datagram of this path, and how it stands there.
    pub(super) fn shape(&self, shared: &Shared, link: usize, chunk: &Chunk) -> Option<Shape> {
        let head = self.in_flight.head(chunk);
        let open = self.flows.get(head.conn).and_then(Conn::open_frame);
        let mut shape = Shape {
            payload: usize::from(chunk.len),
            header: frame::chunk_len(&head.tcp.get(), chunk.solo, open.as_ref()),
            tag: TAG_LEN,
        };
        let mtu = usize::from(self.paths[link].path.mtu());
        if shape.len() > mtu {
            return None;
        }
        if self.is_padded(shared, head.conn) {
            shape.header += padding(shape.len(), mtu);
        }
        Some(shape)
    }

    /// Whether what is sent of a connection shows only a few lengths.
    fn is_padded(&self, shared: &Shared, conn: Key) -> bool {
        let conn = self.flows.get(conn);
        conn.is_some_and(|conn| shared.bumps.of(conn.bump).is_padded())
    }

    /// Whether a chunk goes encrypted, not only its headers.
    fn is_sealed(&self, shared: &Shared, chunk: &Chunk) -> bool {
        let conn = self.flows.get(self.in_flight.head(chunk).conn);
        conn.is_some_and(|conn| shared.bumps.of(conn.bump).is_sealed())
    }

    /// Encodes the chunk at `queue[at]` anew, and those behind it that can go in the same send, and
    /// moves their bytes to a buffer of their own. They leave the queue.
    pub(super) fn retransmit_chunks(
        &mut self,
        cx: &mut SendCx<'_>,
        (link, budget): (usize, usize),
        queue: &mut VecDeque<Delayed>,
        at: usize,
    ) -> Option<Out> {
        let first = match &self.in_flight.get(queue.get(at)?.key)?.content {
            Content::Chunk(chunk) => chunk,
            _ => return None,
        };
        let inside = self.is_sealed(cx.shared, first);
        let run = self.take_run(cx.shared, (link, budget), queue, at, inside);
        let stride = run.first()?.1.len();
        let total = run.iter().map(|(_, shape)| shape.len()).sum();
        let mut buffer = cx.shared.pool.take_for(total);
        let (sealed, end) = self.seal_run(cx, link, &run, inside, &mut buffer);
        for (key, _) in run[sealed..].iter().rev() {
            let key = *key;
            queue.insert(at, Delayed { key, lost_by: None });
        }
        if sealed == 0 {
            cx.shared.pool.give(buffer);
            return None;
        }
        if inside {
            // What is kept is what was encrypted, not the ciphertext.
            cx.shared.scratch.datagrams.clear();
            cx.shared
                .scratch
                .datagrams
                .extend_from_slice(&buffer[..end]);
            cx.shared.pool.give(buffer);
            return Some(Out::by(&self.paths[link], stride, Source::Scratch));
        }
        let batch = self.in_flight.add_batch(buffer);
        let mut at = 0;
        for (key, shape) in &run[..sealed] {
            let pool = &mut cx.shared.pool;
            self.in_flight
                .rebatch(*key, batch, (at + CLEAR) as u32, pool);
            at += shape.len();
        }
        let source = Source::Batch(batch, end);
        Some(Out::by(&self.paths[link], stride, source))
    }

    /// Takes chunks from a queue that can go in one send: that at `at`, and those behind it.
    fn take_run(
        &mut self,
        shared: &mut Shared,
        (link, budget): (usize, usize),
        queue: &mut VecDeque<Delayed>,
        at: usize,
        inside: bool,
    ) -> RetransmitRun {
        let mut run = RetransmitRun::new();
        let mut total = 0;
        while let Some(&Delayed { key, lost_by }) = queue.get(at) {
            let Some(pending) = self.in_flight.get(key) else {
                break;
            };
            let Content::Chunk(chunk) = &pending.content else {
                break;
            };
            if self.is_stale(pending) || self.is_sealed(shared, chunk) != inside {
                break;
            }
            let Some(shape) = self.shape(shared, link, chunk) else {
                break;
            };
            let stride = run.first().map_or(shape.len(), |(_, first)| first.len());
            let fits = total + shape.len() <= budget.min(MAX_BATCH) && run.len() < MAX_SEGMENTS;
            // The datagrams of one send are equally long, but for the last.
            if !run.is_empty() && (shape.len() > stride || !fits) {
                break;
            }
            queue.remove(at);
            if lost_by.is_some() {
                shared.count(Counter::ChunkResent);
            }
            let is_last = shape.len() < stride;
            total += shape.len();
            run.push((key, shape));
            if is_last {
                break;
            }
        }
        run
    }

    /// Writes the datagrams of a run to a buffer, one behind the other; how many, and their bytes.
    fn seal_run(
        &mut self,
        cx: &mut SendCx<'_>,
        link: usize,
        run: &RetransmitRun,
        inside: bool,
        buffer: &mut [u8],
    ) -> (usize, usize) {
        let (mut sealed, mut end) = (0, 0);
        for (key, shape) in run {
            let Some(Pending {
                content: Content::Chunk(chunk),
                ..
            }) = self.in_flight.get(*key)
            else {
                panic!("it was just seen");
            };
            let head = self.in_flight.head(chunk);
            let open = self.flows.get(head.conn).and_then(Conn::open_frame);
            let datagram = &mut buffer[end..end + shape.len()];
            let from = chunk.at as usize;
            datagram[CLEAR..CLEAR + shape.payload]
                .copy_from_slice(&self.in_flight.batch(chunk.batch)[from..from + shape.payload]);
            let block = &mut datagram[CLEAR + shape.payload..][..shape.header];
            // What the frame leaves is padding.
            block.fill(0);
            chunk
                .frame(head.strand, head.tcp.get(), open)
                .encode(&mut Writer::new(block));
            let link = &mut self.paths[link];
            let size = shape.len() as u16;
            let seq = link.path.on_sent(cx.now, size, token(*key), true);
            let session = &mut *cx.session;
            let outcome = session.seal(datagram, link.id, seq, shape.header, inside);
            if outcome.is_err() {
                // Nothing leaves without protection.
                cx.shared.count(Counter::KeysExhausted);
                break;
            }
            sealed += 1;
            end += shape.len();
        }
        (sealed, end)
    }

    /// A chunk that was cut for a larger path becomes fragments, which are sent like chunks.
    fn cut_chunk(&mut self, shared: &mut Shared, key: Key) -> Vec<Key> {
        let Some(Pending {
            content: Content::Chunk(chunk),
            ..
        }) = self.in_flight.get(key)
        else {
            panic!("the caller saw a chunk");
        };
        let chunk = *chunk;
        let head = self.in_flight.head(&chunk);
        let open = self.flows.get(head.conn).and_then(Conn::open_frame);
        let mut block = vec![0; frame::chunk_len(&head.tcp.get(), chunk.solo, open.as_ref())];
        chunk
            .frame(head.strand, head.tcp.get(), open)
            .encode(&mut Writer::new(&mut block));
        let payload = (chunk.batch, chunk.at as usize, usize::from(chunk.len));
        self.cut_to_fragments(shared, key, &block, payload)
    }

    /// What waits under `key` becomes fragments of its header block and its payload (batch, place and
    /// length), and waits no more.
    pub(super) fn cut_to_fragments(
        &mut self,
        shared: &mut Shared,
        key: Key,
        block: &[u8],
        (batch, from, len): (Key, usize, usize),
    ) -> Vec<Key> {
        let pending = self.in_flight.get(key).expect("the caller saw it");
        let placement = pending.placement;
        let origin = self.in_flight.origin(&pending.content);
        let origin = origin.expect("only pieces of streams are cut");
        let (header, total) = (block.len(), block.len() + len);
        let mut buffer = shared.pool.take_for(total);
        buffer[..header].copy_from_slice(block);
        buffer[header..total].copy_from_slice(&self.in_flight.batch(batch)[from..from + len]);
        let id = self.retransmit.next_fragmented();
        let batch = self.in_flight.add_batch(buffer);
        // Every path carries the least size, so one cut serves them all.
        let room = usize::from(crate::path::MIN_MTU) - OVERHEAD - frame::FRAGMENT_OVERHEAD;
        let mut pieces = Vec::new();
        for at in (0..total).step_by(room) {
            let len = room.min(total - at) as u16;
            let fragment = Fragment {
                origin,
                id,
                total: total as u32,
                header: header as u16,
                batch,
                at: at as u32,
                len,
            };
            pieces.push(self.in_flight.add_fragment(fragment, placement));
        }
        self.in_flight.remove(key, &mut shared.pool);
        pieces
    }

    pub(super) fn send_fragment(
        &mut self,
        cx: &mut SendCx<'_>,
        link: usize,
        key: Key,
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Fragment { key: fragment, .. },
            ..
        }) = self.in_flight.get(key)
        else {
            panic!("the caller saw a fragment");
        };
        let f = self.in_flight.fragment(*fragment);
        let from = f.at as usize;
        let piece = Frame::Fragment {
            id: f.id,
            at: f.at,
            total: f.total,
            header: f.header,
            bytes: &self.in_flight.batch(f.batch)[from..from + usize::from(f.len)],
        };
        let mut block = vec![0; frame::FRAGMENT_OVERHEAD + usize::from(f.len)];
        frame::encode(&piece, &mut Writer::new(&mut block));
        if self.is_padded(cx.shared, f.origin.conn) {
            pad(
                &mut block,
                usize::from(self.paths[link].path.mtu()) - OVERHEAD,
            );
        }
        self.finish(cx, link, &block, true, token(key))
    }

    /// Deals with what a path declared lost.
    pub(in crate::node) fn take_lost(
        &mut self,
        shared: &mut Shared,
        path: u8,
        lost: &mut Vec<u64>,
    ) {
        for token in lost.drain(..) {
            let Some(key) = key_of(token) else { continue };
            let Some(pending) = self.in_flight.get_mut(key) else {
                continue;
            };
            if pending.copies > 0 {
                // Another path has it still.
                pending.copies -= 1;
                continue;
            }
            let again = match pending.content {
                Content::Chunk(_) | Content::Fragment { .. } | Content::Share(_) => {
                    pending.sent < MAX_SENDS
                }
                Content::Control(_) => true,
                Content::Opened { .. } => false,
            };
            if again {
                pending.sent = pending.sent.saturating_add(1);
                let delayed = Delayed {
                    key,
                    lost_by: Some(path),
                };
                let was_repeated = pending.sent > 2;
                match pending.placement {
                    _ if was_repeated && matches!(pending.content, Content::Control(_)) => {
                        self.messages.on_lost_again(delayed);
                    }
                    Placement::TrustedOnly => self.retransmit.trusted.push_back(delayed),
                    Placement::Any => self.retransmit.any.push_back(delayed),
                    Placement::Only(_) => self.lose_share(shared, key),
                }
            } else {
                let pending = self.in_flight.get(key).expect("it was just seen");
                let origin = self.in_flight.origin(&pending.content);
                self.in_flight.remove(key, &mut shared.pool);
                if let Some(origin) = origin {
                    self.give_up(shared, origin);
                }
            }
        }
    }

    /// A chunk is left to TCP: the chain cannot be restored beyond it, so a new one begins.
    pub(super) fn give_up(&mut self, shared: &mut Shared, origin: Origin) {
        shared.count(Counter::ChunkGivenUp);
        if let Some(conn) = self.flows.get_mut(origin.conn)
            && conn.out.stream.incarnation() == origin.incarnation
            && origin
                .epoch
                .is_some_and(|epoch| conn.out.stream.is_current(epoch))
        {
            conn.out.stream.break_chain();
        }
    }
}
