//! Chunks that are sent again, or for the first time by a path that they had to wait for.

mod postpone;

use std::collections::VecDeque;
use std::time::Duration;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Frame};

use super::carrier::{MAX_OVERHEAD, SHARE_OVERHEAD};
use super::context::SendCx;
use super::datagram::{Asks, MAX_BATCH, MAX_SEGMENTS, Seal, Shape, key_of, pad, padding};
use super::{control, shares};
use crate::buffer::Pool;
use crate::chunk::{Chunk, Content, Delayed, Fragment, Placement};
use crate::counters::Counter;
use crate::in_flight::{InFlight, Pending};
use crate::node::flows::FlowTable;
use crate::node::out::{Out, Source};
use crate::node::paths::{Avoid, Kind, PathSet, Wanted};
use crate::node::shared::Shared;
use crate::session::{CLEAR_HEADER_LEN, OVERHEAD, PathId, TAG_LEN};
use crate::slab::Key;
use crate::time::Time;

/// Times that a chunk is sent before it is left to TCP.
const MAX_SENDS: u8 = 12;
/// Chunks left out of untrusted runs that may wait for a trusted path.
const MAX_DEFERRED: usize = 64;
/// Between two messages that were lost more than once and are sent again.
const MESSAGE_SPACING: Duration = Duration::from_millis(25);

/// Entries that were lost, or left out of a run, by the paths that may carry them; shares wait with their path.
#[derive(Default)]
pub(in crate::node) struct RetransmitQueue {
    trusted: VecDeque<Delayed>,
    any: VecDeque<Delayed>,
    /// Messages between the daemons that were lost more than once, and when the next one is sent again.
    messages: VecDeque<Delayed>,
    /// Messages that are to be sent again now.
    messages_due: VecDeque<Delayed>,
    messages_at: Time,
    /// The oldest of what waits for an acknowledgement when what waits for a path was put behind it last.
    postponed: Option<Key>,
    /// Chunks that were cut into pieces.
    fragmented: u32,
}

impl RetransmitQueue {
    /// The peer restarted.
    pub(in crate::node) fn clear(&mut self) {
        self.trusted.clear();
        self.any.clear();
        self.messages.clear();
        self.messages_due.clear();
    }

    /// True if no more may wait for a trusted path that need not: beyond that trust wins over speed.
    pub(super) fn is_full(&self) -> bool {
        self.trusted.len() >= MAX_DEFERRED
    }

    /// Lets a chunk that was left out of a run wait for a trusted path.
    pub(super) fn defer(&mut self, key: Key) {
        self.trusted.push_back(Delayed { key, lost_by: None });
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(in crate::node) fn poll_timeout(&self) -> Option<Time> {
        (!self.messages.is_empty()).then_some(self.messages_at)
    }

    /// Sends a message again that was lost more than once. The peer may have no room for it: that is not to take
    /// the path from data, nor is data to wait because this is the oldest that the peer has not got.
    pub(in crate::node) fn handle_timeout(
        &mut self,
        now: Time,
        pool: &mut Pool,
        flows: &FlowTable,
        in_flight: &mut InFlight,
    ) {
        if now >= self.messages_at
            && let Some(mut message) = self.messages.pop_front()
        {
            self.messages_at = now + MESSAGE_SPACING;
            if postpone(now, flows, in_flight, pool, &mut message) {
                self.messages_due.push_back(message);
            }
        }
    }

    /// Sends messages of the daemons again that were lost.
    pub(super) fn send_messages(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        self.send_of(cx, cx.message_placement(), |all| &mut all.messages_due)
    }

    /// Sends what was lost, or left out of a run, and only trusted paths may carry.
    pub(super) fn send_trusted(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        let placement = match cx.is_lax() {
            true => Placement::Any,
            false => Placement::TrustedOnly,
        };
        self.send_of(cx, placement, |all| &mut all.trusted)
    }

    /// Sends again what was lost and any path may carry.
    pub(super) fn send_any(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        self.send_of(cx, Placement::Any, |all| &mut all.any)
    }

    fn send_of(
        &mut self,
        cx: &mut SendCx<'_>,
        placement: Placement,
        of: fn(&mut Self) -> &mut VecDeque<Delayed>,
    ) -> Option<Out> {
        let mut queue = std::mem::take(of(self));
        let out = self.send(cx, placement, &mut queue);
        *of(self) = queue;
        out
    }

    /// Sends again shares that their path lost, by that path.
    pub(super) fn send_shares(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        (0..cx.paths.len()).find_map(|at| {
            let link = &mut cx.paths[at];
            let placement = Placement::Only(link.id);
            let mut queue = std::mem::take(&mut link.shares);
            let out = self.send(cx, placement, &mut queue);
            cx.paths[at].shares = queue;
            out
        })
    }

    /// Sends the first of a queue that still waits for its acknowledgement. Nothing that this calls
    /// may add to the queue.
    fn send(
        &mut self,
        cx: &mut SendCx<'_>,
        placement: Placement,
        queue: &mut VecDeque<Delayed>,
    ) -> Option<Out> {
        while let Some(&Delayed { key, lost_by }) = queue.front() {
            let Some(pending) = cx.in_flight.get(key) else {
                queue.pop_front();
                continue;
            };
            if is_stale(cx.now, cx.flows, cx.in_flight, pending) {
                queue.pop_front();
                cx.in_flight.remove(key, &mut cx.shared.pool);
                continue;
            }
            let content = pending.content;
            let overhead = match content {
                Content::Share(_) => SHARE_OVERHEAD,
                _ => OVERHEAD + MAX_OVERHEAD,
            };
            let wanted = overhead + content.payload_len();
            let avoid = lost_by.map_or(Avoid::Nothing, Avoid::Link);
            let mut wanted = Wanted::alone(placement, wanted, avoid);
            if matches!(content, Content::Control(_)) {
                wanted.kind = Kind::Message;
            }
            let (link, budget) = cx.choose(&wanted)?;
            let out = match &content {
                Content::Chunk(chunk) if shape(cx, link, chunk).is_some() => {
                    retransmit_chunks(cx, (link, budget), queue)
                }
                content => {
                    queue.pop_front();
                    if lost_by.is_some() {
                        cx.shared.count(Counter::ChunkResent);
                    }
                    self.send_alone(cx, link, key, content)
                        .unwrap_or_else(|pieces| {
                            let pieces = pieces.into_iter().map(|key| Delayed { key, lost_by });
                            pieces.rev().for_each(|piece| queue.push_front(piece));
                            None
                        })
                }
            };
            if out.is_some() {
                return out;
            }
        }
        None
    }

    /// Sends what does not go in a run; else the pieces that it becomes, for it was cut for a larger path.
    fn send_alone(
        &mut self,
        cx: &mut SendCx<'_>,
        link: usize,
        key: Key,
        content: &Content,
    ) -> Result<Option<Out>, Vec<Key>> {
        let mtu = usize::from(cx.paths[link].path.mtu());
        match content {
            Content::Share(share) if SHARE_OVERHEAD + usize::from(share.len) <= mtu => {
                Ok(shares::retransmit(cx, link, key, share))
            }
            Content::Share(share) => {
                let block = shares::share_block(cx, share);
                let payload = (share.batch, share.at as usize, usize::from(share.len));
                Err(self.cut(cx, key, &block, payload))
            }
            Content::Chunk(chunk) => {
                let segment = cx.in_flight.segment(chunk);
                let open = cx.flows.open_frame(segment.conn);
                let len = frame::chunk_len(&segment.tcp.get(), chunk.solo, open.as_ref());
                let mut block = vec![0; len];
                chunk
                    .frame(segment.chain, segment.tcp.get(), open)
                    .encode(&mut Writer::new(&mut block));
                let payload = (chunk.batch, chunk.at as usize, usize::from(chunk.len));
                Err(self.cut(cx, key, &block, payload))
            }
            Content::Fragment { key: fragment, .. } => Ok(send_fragment(cx, link, key, *fragment)),
            Content::Control(_) | Content::Opened { .. } => Ok(control::transmit(cx, link, key)),
        }
    }

    /// Makes fragments of what waits under `key`: of its header block and its payload (batch, place and length). The
    /// whole waits no more.
    fn cut(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        block: &[u8],
        (batch, from, len): (Key, usize, usize),
    ) -> Vec<Key> {
        let SendCx {
            shared, in_flight, ..
        } = cx;
        let pending = in_flight.get(key).expect("the caller saw it");
        let placement = pending.placement;
        let origin = in_flight.origin(&pending.content);
        let origin = origin.expect("only pieces of streams are cut");
        let (header, total) = (block.len(), block.len() + len);
        let mut buffer = shared.pool.take_for(total);
        buffer[..header].copy_from_slice(block);
        buffer[header..total].copy_from_slice(&in_flight.batch(batch)[from..from + len]);
        // Odd numbers; even ones are of opaque packets.
        let id = self.fragmented.wrapping_mul(2).wrapping_add(1);
        self.fragmented = self.fragmented.wrapping_add(1);
        let batch = in_flight.add_batch(buffer);
        // Every path carries the least size, so one cut serves them all.
        let room = usize::from(crate::path::MIN_MTU) - OVERHEAD - frame::FRAGMENT_OVERHEAD;
        let pieces = (0..total).step_by(room).map(|at| {
            let fragment = Fragment {
                origin,
                id,
                total: total as u32,
                header: header as u16,
                batch,
                at: at as u32,
                len: room.min(total - at) as u16,
            };
            in_flight.add_fragment(fragment, placement)
        });
        let pieces = pieces.collect();
        in_flight.remove(key, &mut shared.pool);
        pieces
    }

    /// Deals with what a path declared lost.
    pub(in crate::node) fn on_lost(
        &mut self,
        shared: &mut Shared,
        (paths, flows, in_flight): (&mut PathSet, &mut FlowTable, &mut InFlight),
        path: PathId,
        lost: &mut Vec<u64>,
    ) {
        for token in lost.drain(..) {
            let Some(key) = key_of(token) else { continue };
            let Some(pending) = in_flight.get_mut(key) else {
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
            if !again {
                give_up(shared, flows, in_flight, key);
                continue;
            }
            pending.sent = pending.sent.saturating_add(1);
            let lost_by = Some(path);
            let delayed = Delayed { key, lost_by };
            let was_repeated = pending.sent > 2;
            match pending.placement {
                _ if matches!(pending.content, Content::Control(_)) => match was_repeated {
                    true => self.messages.push_back(delayed),
                    false => self.messages_due.push_back(delayed),
                },
                Placement::TrustedOnly => self.trusted.push_back(delayed),
                Placement::Any => self.any.push_back(delayed),
                Placement::Only(id) => lose_share(shared, (paths, flows, in_flight), id, delayed),
            }
        }
    }
}

/// Lets a share wait for the path of this id, which lost it.
pub(in crate::node) fn lose_share(
    shared: &mut Shared,
    (paths, flows, in_flight): (&mut PathSet, &mut FlowTable, &mut InFlight),
    id: PathId,
    share: Delayed,
) {
    match paths.by_id(id) {
        Some(link) => link.shares.push_back(share),
        // No other may carry it.
        None => give_up(shared, flows, in_flight, share.key),
    }
}

/// Leaves what waits to TCP: a chain cannot be restored beyond it, so a new one begins.
fn give_up(shared: &mut Shared, flows: &mut FlowTable, in_flight: &mut InFlight, key: Key) {
    let Some(pending) = in_flight.get(key) else {
        return;
    };
    let origin = in_flight.origin(&pending.content);
    in_flight.remove(key, &mut shared.pool);
    let Some(origin) = origin else { return };
    shared.count(Counter::ChunkGivenUp);
    if let Some(conn) = flows.get_mut(origin.conn)
        && conn.out.stream.incarnation() == origin.incarnation
        && { origin.epoch }.is_some_and(|epoch| conn.out.stream.is_current(epoch))
    {
        conn.out.stream.break_chain();
    }
}

/// True if it is not to be sent any more. It belongs to an incarnation that is over: the peer has forgotten it, and the words that
/// open the flow speak of another one. Or it is a message, and nobody waits for what comes of it.
pub(super) fn is_stale(
    now: Time,
    flows: &FlowTable,
    in_flight: &InFlight,
    pending: &Pending,
) -> bool {
    if let Content::Control(message) = pending.content {
        return in_flight.message(message).is_late(now);
    }
    let Some(origin) = in_flight.origin(&pending.content) else {
        return false;
    };
    let conn = flows.get(origin.conn);
    conn.is_none_or(|conn| conn.out.stream.incarnation() != origin.incarnation)
}

/// Puts what waits behind all others, under another key; false if nothing is to wait.
fn postpone(
    now: Time,
    flows: &FlowTable,
    in_flight: &mut InFlight,
    pool: &mut Pool,
    delayed: &mut Delayed,
) -> bool {
    let Some(pending) = in_flight.get(delayed.key) else {
        return false;
    };
    if is_stale(now, flows, in_flight, pending) {
        in_flight.remove(delayed.key, pool);
        return false;
    }
    delayed.key = in_flight.postpone(delayed.key);
    true
}

/// Shape of a chunk in a datagram of this path; none if it does not fit.
pub(super) fn shape(cx: &SendCx<'_>, link: usize, chunk: &Chunk) -> Option<Shape> {
    let segment = cx.in_flight.segment(chunk);
    let open = cx.flows.open_frame(segment.conn);
    let mut shape = Shape {
        front: CLEAR_HEADER_LEN,
        payload: usize::from(chunk.len),
        header: frame::chunk_len(&segment.tcp.get(), chunk.solo, open.as_ref()),
        tag: TAG_LEN,
    };
    let mtu = usize::from(cx.paths[link].path.mtu());
    if shape.len() > mtu {
        return None;
    }
    if is_padded(cx, segment.conn) {
        shape.header += padding(shape.len(), mtu);
    }
    Some(shape)
}

/// True if what is sent of a connection shows only a few lengths.
fn is_padded(cx: &SendCx<'_>, conn: Key) -> bool {
    let conn = cx.flows.get(conn);
    conn.is_some_and(|conn| cx.shared.setup.bumps.of(conn.bump).is_padded())
}

/// Encodes the first chunk of a queue anew, and those behind it that can go in the same send. They leave the queue.
pub(super) fn retransmit_chunks(
    cx: &mut SendCx<'_>,
    (link, budget): (usize, usize),
    queue: &mut VecDeque<Delayed>,
) -> Option<Out> {
    cx.shared.scratch.datagrams.clear();
    let (mut pieces, mut stride) = (0, 0);
    while pieces < MAX_SEGMENTS
        && let Some(&Delayed { key, lost_by }) = queue.front()
        && let Some(pending) = cx.in_flight.get(key)
        && let Content::Chunk(chunk) = pending.content
        && !is_stale(cx.now, cx.flows, cx.in_flight, pending)
        && let Some(shape) = shape(cx, link, &chunk)
    {
        let start = cx.shared.scratch.datagrams.len();
        let end = start + shape.len();
        // The datagrams of one send are equally long, but for the last.
        if pieces > 0 && (shape.len() > stride || end > budget.min(MAX_BATCH)) {
            break;
        }
        if !seal_chunk(cx, link, key, &chunk, &shape) {
            cx.shared.scratch.datagrams.truncate(start);
            break;
        }
        queue.pop_front();
        if lost_by.is_some() {
            cx.shared.count(Counter::ChunkResent);
        }
        pieces += 1;
        stride = stride.max(shape.len());
        if shape.len() < stride {
            break;
        }
    }
    (pieces > 0).then(|| Out::by(&cx.paths[link], stride, Source::Scratch))
}

/// Appends a datagram with a chunk to those in the scratch buffer; false if there are no keys for it.
fn seal_chunk(cx: &mut SendCx<'_>, link: usize, key: Key, chunk: &Chunk, shape: &Shape) -> bool {
    let segment = cx.in_flight.segment(chunk);
    let conn = cx.flows.get(segment.conn).expect("it is not stale");
    let scratch = &mut cx.shared.scratch.datagrams;
    let start = scratch.len();
    // What the frame leaves is padding.
    scratch.resize(start + shape.len(), 0);
    let datagram = &mut scratch[start..];
    let (payload, block) = datagram[CLEAR_HEADER_LEN..].split_at_mut(shape.payload);
    let from = chunk.at as usize;
    payload.copy_from_slice(&cx.in_flight.batch(chunk.batch)[from..from + shape.payload]);
    chunk
        .frame(
            segment.chain,
            segment.tcp.get(),
            cx.flows.open_frame(segment.conn),
        )
        .encode(&mut Writer::new(&mut block[..shape.header]));
    let seal = match cx.shared.setup.bumps.of(conn.bump).is_sealed() {
        true => Seal::All,
        false => Seal::Headers,
    };
    let asks = Asks::AckOf(key);
    cx.sealer
        .seal(&mut cx.paths[link], datagram, shape.header, asks, seal)
}

fn send_fragment(cx: &mut SendCx<'_>, link: usize, key: Key, fragment: Key) -> Option<Out> {
    let f = cx.in_flight.fragment(fragment);
    let from = f.at as usize;
    let piece = Frame::Fragment {
        id: f.id,
        at: f.at,
        total: f.total,
        header: f.header,
        bytes: &cx.in_flight.batch(f.batch)[from..from + usize::from(f.len)],
    };
    let mut block = vec![0; frame::FRAGMENT_OVERHEAD + usize::from(f.len)];
    frame::encode(&piece, &mut Writer::new(&mut block));
    if is_padded(cx, f.origin.conn) {
        let room = usize::from(cx.paths[link].path.mtu()) - OVERHEAD;
        pad(&mut block, room);
    }
    cx.send_block(link, &block, Asks::AckOf(key))
}
