//! What goes to the peer next.
//!
//! In this order: what opens and keeps paths, acknowledgements (of paths and of TCP), messages
//! between the daemons, what was lost, new data.

use dibs_scramble::{BUFFER_LEN, Scrambler};
use dibs_wire::bytes::Writer;
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{self, EmptySegment, Frame, TcpFields};
use dibs_wire::packet::{self, Packet, Segment, flags};
use dibs_wire::virtio;

use super::Shared;
use super::opaque::Part;
use super::peer::{Out, Peer, Source};
use super::schedule::{Choice, balanced};
use crate::chunk::{Chunk, Content, Fragment, Pending, Placement};
use crate::counters::Counter;
use crate::flow::conn::{Conn, Outgoing, outgoing_buffer};
use crate::flow::fields::{self, OwnedFields};
use crate::flow::queue::Verdict;
use crate::session::CLEAR_HEADER_LEN as CLEAR;
use crate::session::{Integrity, OVERHEAD, Session, TAG_LEN};
use crate::slab::Key;
use crate::stream::tx::TxStream;
use crate::time::Time;

/// Segments of one GSO send, at most (the kernel's UDP_MAX_SEGMENTS of old).
const MAX_SEGMENTS: usize = 64;
/// Bytes of one GSO send, at most: an IPv6 payload with its UDP header.
const MAX_BATCH: usize = 65_000;
/// Times that a chunk is sent before it is left to TCP.
const MAX_SENDS: u8 = 12;
/// Chunks left out of untrusted runs that may wait for a trusted path.
const MAX_DEFERRED: usize = 64;
/// Bytes of buffers that may wait for acknowledgement.
const HELD_LIMIT: usize = 96 << 20;
/// What a flow may send in one round.
const QUANTUM: i64 = 16 * 1024;
/// Length of an acknowledgement frame's content, at most.
const ACK_BYTES: usize = 300;
/// Messages between the daemons that are on their way at once.
const CONTROL_WINDOW: usize = 16;

/// One-byte frame, and the type of an acknowledgement frame (see [`frame`]).
const PING: u8 = frame::PING;
const ACK: u8 = frame::ACK;

/// A token of the path layer: zero is nobody's.
fn token(key: Key) -> u64 {
    key.to_u64() + 1
}

/// The key of a token.
pub(super) fn key_of(token: u64) -> Option<Key> {
    token.checked_sub(1).map(Key::from_u64)
}

/// Where one datagram's parts are to be written.
struct Shape {
    payload: usize,
    header: usize,
    tag: usize,
}

impl Shape {
    const fn len(&self) -> usize {
        CLEAR + self.payload + self.header + self.tag
    }
}

impl Peer {
    /// The next send, or none if nothing may go now.
    pub(crate) fn poll_transmit(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        if let Some(out) = self.send_link_frames(now, shared, session) {
            return Some(out);
        }
        if let Some(out) = self.send_segments(now, shared, session) {
            return Some(out);
        }
        if let Some(out) = self.send_control(now, shared, session) {
            return Some(out);
        }
        if let Some(out) = self.send_lost(now, shared, session) {
            return Some(out);
        }
        if let Some(out) = self.send_deferred(now, shared, session) {
            return Some(out);
        }
        if let Some(out) = self.send_opaque(now, shared, session) {
            return Some(out);
        }
        self.send_data(now, shared, session)
    }

    /// Seals the header block in `block` as one datagram without payload.
    #[expect(clippy::too_many_arguments, reason = "the parts of one datagram")]
    fn finish(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        link: usize,
        block: &[u8],
        eliciting: bool,
        token: u64,
    ) -> Option<Out> {
        let link = &mut self.links[link];
        let len = OVERHEAD + block.len();
        shared.scratch.clear();
        shared.scratch.resize(len, 0);
        shared.scratch[CLEAR..CLEAR + block.len()].copy_from_slice(block);
        let seq = link.path.on_sent(now, len as u16, token, eliciting);
        if session
            .seal(&mut shared.scratch, link.id, seq, block.len(), false)
            .is_err()
        {
            shared.count(Counter::KeysExhausted);
            return None;
        }
        Some(Out {
            path: link.local,
            to: link.remote,
            segment: len,
            source: Source::Scratch,
        })
    }

    /// Frames that belong to one path: joining, probes, acknowledgements.
    fn send_link_frames(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if !shared.local[link.local].up {
                continue;
            }
            if let Some((to, challenge)) = link.poll_challenge(now) {
                let mut block = [0; 16];
                let mut w = Writer::new(&mut block);
                frame::encode(&Frame::PathChallenge { challenge }, &mut w);
                let len = w.len();
                let out = self.finish(now, shared, session, at, &block[..len], false, 0)?;
                return Some(Out { to, ..out });
            }
            if link.is_open()
                && let Some(size) = link.path.poll_mtu_probe(now)
            {
                return self.send_mtu_probe(now, shared, session, at, size);
            }
            let ack = link.is_open() && link.path.ack_due(now);
            if link.frames.is_empty() && !link.probe && !ack {
                continue;
            }
            let mut block = std::mem::take(&mut link.frames);
            if link.is_open() {
                put_ack(now, link, &mut block);
            }
            let probe = std::mem::take(&mut link.probe) && link.is_open();
            if probe {
                block.push(PING);
            }
            if block.is_empty() {
                self.links[at].frames = block;
                continue;
            }
            let out = self.finish(now, shared, session, at, &block, probe, 0);
            block.clear();
            self.links[at].frames = block;
            return out;
        }
        None
    }

    fn send_mtu_probe(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        at: usize,
        size: u16,
    ) -> Option<Out> {
        let link = &mut self.links[at];
        let len = usize::from(size);
        shared.scratch.clear();
        // A ping, and padding, which is zero.
        shared.scratch.resize(len, 0);
        shared.scratch[CLEAR] = PING;
        let seq = link.path.on_mtu_probe_sent(now, size);
        if session
            .seal(&mut shared.scratch, link.id, seq, len - OVERHEAD, false)
            .is_err()
        {
            shared.count(Counter::KeysExhausted);
            return None;
        }
        Some(Out {
            path: link.local,
            to: link.remote,
            segment: len,
            source: Source::Scratch,
        })
    }

    /// The active path with the least round trip.
    fn quickest(&self, shared: &Shared, placement: Placement) -> Option<usize> {
        let allowed = |at: &usize| {
            let link = &self.links[*at];
            link.is_active(shared) && placement.allows(link.trusted)
        };
        (0..self.links.len())
            .filter(allowed)
            .min_by_key(|at| self.links[*at].path.stats().srtt)
    }

    /// TCP segments without payload, as many as fit one datagram, and notices.
    fn send_segments(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        if self.segments.is_empty() && self.notices.is_empty() {
            return None;
        }
        let at = self.quickest(shared, Placement::Any)?;
        let room = usize::from(self.links[at].path.mtu()) - OVERHEAD;
        let mut block = std::mem::take(&mut self.notices);
        let mut opened = None;
        while let Some(head) = self.segments.front() {
            let Some(conn) = self.conns.get_mut(head.conn) else {
                self.segments.pop_front();
                continue;
            };
            if conn.out.secrets.is_none() {
                // The peer forgot the flow since this was queued.
                conn.open(session.epoch_secrets().clone(), conn.out.meta);
                conn.out.stream.begin_at(head.seq);
            }
            let tcp = head.tcp.get();
            let open = conn.open_frame();
            let len = frame::segment_len(&tcp, open.as_ref());
            if block.len() + len > room || (open.is_some() && !block.is_empty()) {
                break;
            }
            let frame = EmptySegment {
                flow: conn.out.flow,
                incarnation: conn.out.stream.incarnation(),
                seq: head.seq,
                tcp,
                open,
            };
            let start = block.len();
            block.resize(start + len, 0);
            frame.encode(&mut Writer::new(&mut block[start..]));
            if open.is_some() {
                opened = Some((head.conn, frame.incarnation));
            }
            self.segments.pop_front();
            if opened.is_some() {
                break;
            }
        }
        if block.is_empty() {
            return None;
        }
        // An opening asks for an acknowledgement, so that it need not be repeated for ever.
        let key = opened.map(|(conn, incarnation)| {
            self.waiting
                .add(Content::Opened { conn, incarnation }, Placement::Any)
        });
        if block.len() + ACK_BYTES + frame::ACK_OVERHEAD <= room {
            put_ack(now, &mut self.links[at], &mut block);
        }
        let out = self.finish(
            now,
            shared,
            session,
            at,
            &block,
            key.is_some(),
            key.map_or(0, token),
        );
        block.clear();
        self.notices = block;
        out
    }

    /// Messages between the daemons: reliable, by trusted paths.
    fn send_control(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        if self.control_out.is_empty() || self.controls_waiting >= CONTROL_WINDOW {
            return None;
        }
        let at = self.quickest(shared, Placement::TrustedOnly)?;
        let bytes = self.control_out.pop_front()?;
        let id = self.next_control;
        self.next_control = self.next_control.wrapping_add(1);
        let key = self
            .waiting
            .add(Content::Control { id, bytes }, Placement::TrustedOnly);
        self.controls_waiting += 1;
        self.send_control_again(now, shared, session, at, key)
    }

    fn send_control_again(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        at: usize,
        key: Key,
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Control { id, bytes },
            ..
        }) = self.waiting.get(key)
        else {
            return None;
        };
        let mut block = vec![0; frame::CONTROL_OVERHEAD + bytes.len()];
        frame::encode(
            &Frame::Control { id: *id, bytes },
            &mut Writer::new(&mut block),
        );
        self.finish(now, shared, session, at, &block, true, token(key))
    }

    /// Sends again what was lost.
    fn send_lost(&mut self, now: Time, shared: &mut Shared, session: &mut Session) -> Option<Out> {
        while let Some(&(key, lost_by)) = self.resend.front() {
            let Some(pending) = self.waiting.get(key) else {
                self.resend.pop_front();
                continue;
            };
            let (placement, wanted) = match &pending.content {
                Content::Chunk(chunk) => (pending.placement, usize::from(chunk.len)),
                _ => (pending.placement, 0),
            };
            let wanted = wanted + OVERHEAD + 128;
            let choice = balanced(
                &mut self.links,
                shared,
                now,
                placement,
                wanted,
                wanted,
                Some(lost_by),
            );
            let link = match choice {
                Choice::Send { link, .. } => link,
                Choice::Wait(at) => {
                    self.wait_until(at);
                    return None;
                }
                Choice::Nobody => return None,
            };
            self.resend.pop_front();
            shared.count(Counter::ChunkResent);
            let pending = self.waiting.get(key).expect("it was just seen");
            let out = match pending.content {
                Content::Control { .. } => self.send_control_again(now, shared, session, link, key),
                Content::Fragment(_) => self.send_fragment(now, shared, session, link, key),
                _ => self.send_chunk_again(now, shared, session, link, key),
            };
            if out.is_some() {
                return out;
            }
        }
        None
    }

    /// Sends chunks that an untrusted path had to leave out.
    fn send_deferred(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        while let Some(&key) = self.deferred.front() {
            let Some(Pending {
                content: Content::Chunk(chunk),
                ..
            }) = self.waiting.get(key)
            else {
                self.deferred.pop_front();
                continue;
            };
            let wanted = usize::from(chunk.len) + OVERHEAD + 128;
            let placement = Placement::TrustedOnly;
            let choice = balanced(
                &mut self.links,
                shared,
                now,
                placement,
                wanted,
                wanted,
                None,
            );
            let link = match choice {
                Choice::Send { link, .. } => link,
                Choice::Wait(at) => {
                    self.wait_until(at);
                    return None;
                }
                Choice::Nobody => return None,
            };
            self.deferred.pop_front();
            if let Some(out) = self.send_chunk_again(now, shared, session, link, key) {
                return Some(out);
            }
        }
        None
    }

    /// Encodes a chunk anew and moves its bytes to a buffer of its own.
    fn send_chunk_again(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        link: usize,
        key: Key,
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Chunk(chunk),
            ..
        }) = self.waiting.get(key)
        else {
            return None;
        };
        let Some(conn) = self.conns.get(chunk.conn) else {
            self.waiting.remove(key, &mut shared.pool);
            return None;
        };
        let open = conn.open_frame();
        let tcp = chunk.tcp.get();
        let shape = Shape {
            payload: usize::from(chunk.len),
            header: frame::chunk_len(&tcp, open.as_ref()),
            tag: TAG_LEN,
        };
        if shape.len() > usize::from(self.links[link].path.mtu()) {
            self.cut_chunk(shared, link, key);
            return None;
        }
        let mut buffer = shared.pool.take_for(shape.len());
        let datagram = &mut buffer[..shape.len()];
        let from = chunk.at as usize;
        datagram[CLEAR..CLEAR + shape.payload]
            .copy_from_slice(&self.waiting.batch(chunk.batch)[from..from + shape.payload]);
        let mut w = Writer::new(&mut datagram[CLEAR + shape.payload..][..shape.header]);
        chunk.frame(tcp, open).encode(&mut w);
        let link = &mut self.links[link];
        let seq = link.path.on_sent(now, shape.len() as u16, token(key), true);
        if session
            .seal(datagram, link.id, seq, shape.header, false)
            .is_err()
        {
            shared.count(Counter::KeysExhausted);
            shared.pool.give(buffer);
            return None;
        }
        let out = (link.local, link.remote);
        let batch = self.waiting.add_batch(buffer);
        self.waiting
            .rebatch(key, batch, CLEAR as u32, &mut shared.pool);
        Some(Out {
            path: out.0,
            to: out.1,
            segment: shape.len(),
            source: Source::Batch(batch, shape.len()),
        })
    }

    /// A chunk that was cut for a larger path becomes fragments, which are sent like chunks.
    fn cut_chunk(&mut self, shared: &mut Shared, link: usize, key: Key) {
        let Some(Pending {
            content: Content::Chunk(chunk),
            placement,
            ..
        }) = self.waiting.get(key)
        else {
            panic!("the caller saw a chunk");
        };
        let (placement, lost_by) = (*placement, self.links[link].id.wrapping_add(1));
        let open = self.conns.get(chunk.conn).and_then(Conn::open_frame);
        let tcp = chunk.tcp.get();
        let header = frame::chunk_len(&tcp, open.as_ref());
        let total = header + usize::from(chunk.len);
        let mut buffer = shared.pool.take_for(total);
        chunk
            .frame(tcp, open)
            .encode(&mut Writer::new(&mut buffer[..header]));
        let from = chunk.at as usize;
        buffer[header..total]
            .copy_from_slice(&self.waiting.batch(chunk.batch)[from..from + usize::from(chunk.len)]);
        let origin = chunk.origin();
        let id = self.next_fragmented;
        self.next_fragmented = self.next_fragmented.wrapping_add(2);
        let batch = self.waiting.add_batch(buffer);
        // Every path carries the least size, so one cut serves them all.
        let room = usize::from(crate::path::MIN_MTU) - OVERHEAD - frame::FRAGMENT_OVERHEAD;
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
            let key = self.waiting.add(Content::Fragment(fragment), placement);
            self.resend.push_back((key, lost_by));
        }
        self.waiting.remove(key, &mut shared.pool);
    }

    fn send_fragment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        link: usize,
        key: Key,
    ) -> Option<Out> {
        let Some(Pending {
            content: Content::Fragment(f),
            ..
        }) = self.waiting.get(key)
        else {
            panic!("the caller saw a fragment");
        };
        let from = f.at as usize;
        let piece = Frame::Fragment {
            id: f.id,
            at: f.at,
            total: f.total,
            header: f.header,
            bytes: &self.waiting.batch(f.batch)[from..from + usize::from(f.len)],
        };
        let mut block = vec![0; frame::FRAGMENT_OVERHEAD + usize::from(f.len)];
        frame::encode(&piece, &mut Writer::new(&mut block));
        self.finish(now, shared, session, link, &block, true, token(key))
    }

    /// A packet that is not cut, or its next piece, by a trusted path.
    fn send_opaque(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
    ) -> Option<Out> {
        let head = self.opaque.head()?;
        let wanted = head.packet.len() - head.at + OVERHEAD;
        let placement = Placement::TrustedOnly;
        let choice = balanced(
            &mut self.links,
            shared,
            now,
            placement,
            wanted,
            wanted,
            None,
        );
        let at = match choice {
            Choice::Send { link, .. } => link,
            Choice::Wait(at) => {
                self.wait_until(at);
                return None;
            }
            Choice::Nobody => return None,
        };
        let room = usize::from(self.links[at].path.mtu()) - OVERHEAD;
        let Part {
            bump,
            packet,
            number,
            at: from,
        } = self.opaque.head()?;
        let whole = frame::OPAQUE_OVERHEAD + packet.len();
        let (block, taken) = if from == 0 && whole <= room {
            let mut block = vec![0; whole];
            frame::encode(
                &Frame::Opaque { bump, packet },
                &mut Writer::new(&mut block),
            );
            (block, packet.len())
        } else {
            let len = (packet.len() - from).min(room - frame::FRAGMENT_OVERHEAD - 1);
            // The whole is an opaque frame without its length: bump, then packet.
            let mut bytes = Vec::with_capacity(len + 1);
            let first = from == 0;
            if first {
                bytes.push(bump);
            }
            bytes.extend_from_slice(&packet[from..from + len]);
            let piece = Frame::Fragment {
                id: number,
                at: if first { 0 } else { from as u32 + 1 },
                total: packet.len() as u32 + 1,
                header: 0,
                bytes: &bytes,
            };
            let mut block = vec![0; frame::FRAGMENT_OVERHEAD + bytes.len()];
            frame::encode(&piece, &mut Writer::new(&mut block));
            (block, len)
        };
        self.opaque.consume(taken);
        self.finish(now, shared, session, at, &block, true, 0)
    }

    /// New data, one run of datagrams of one flow.
    fn send_data(&mut self, now: Time, shared: &mut Shared, session: &mut Session) -> Option<Out> {
        self.held_by_trust = false;
        if self.waiting.span() >= self.peer_store || self.waiting.held() >= HELD_LIMIT {
            return None;
        }
        let flows = self.new_flows.len() + self.old_flows.len();
        let mut blocked = 0;
        while blocked <= flows {
            let (key, new) = match self.new_flows.front() {
                Some(&key) => (key, true),
                None => (*self.old_flows.front()?, false),
            };
            let Some(conn) = self.conns.get_mut(key) else {
                self.unschedule(new);
                continue;
            };
            if conn.out.queue.is_empty() {
                conn.out.scheduled = false;
                self.unschedule(new);
                continue;
            }
            if conn.out.deficit <= 0 {
                conn.out.deficit += QUANTUM;
                self.unschedule(new);
                self.old_flows.push_back(key);
                continue;
            }
            if let Some(out) = self.send_run(now, shared, session, key) {
                return Some(out);
            }
            // Nothing may go of this flow; perhaps of another.
            blocked += 1;
            self.unschedule(new);
            self.old_flows.push_back(key);
        }
        None
    }

    fn unschedule(&mut self, new: bool) {
        if new {
            self.new_flows.pop_front()
        } else {
            self.old_flows.pop_front()
        };
    }

    fn wait_until(&mut self, at: Option<Time>) {
        if let Some(at) = at {
            self.paced_until = Some(self.paced_until.map_or(at, |p| p.min(at)));
        }
    }

    /// Asks CoDel about the head of a flow's queue; true if that dropped a segment.
    fn judge(&mut self, now: Time, shared: &mut Shared, key: Key) -> bool {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        if conn.out.queue.judge(now) == Verdict::Pass {
            return false;
        }
        let head = conn
            .out
            .queue
            .head()
            .expect("a flow that is scheduled has a head");
        if mark_congestion(&mut head.buffer[virtio::LEN..]) {
            shared.count(Counter::CodelMarked);
            return false;
        }
        let dropped = head.mss.min(head.left());
        if dropped == 0 {
            return false;
        }
        shared.count(Counter::CodelDropped);
        self.backlog -= dropped;
        if let Some(buffer) = conn.out.queue.consume(dropped) {
            shared.pool.give(buffer);
        }
        true
    }

    /// Sends a run of chunks from the head of a flow's queue.
    fn send_run(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        key: Key,
    ) -> Option<Out> {
        let link = self.place(now, shared, session, key)?;
        // Only what can go is judged: waiting for a path is no congestion.
        if !self.judge(now, shared, key) {
            return self.fill_run(now, shared, session, key, link);
        }
        // A segment is missing now, so what follows stands elsewhere.
        if self
            .conns
            .get_mut(key)
            .is_some_and(|c| c.out.queue.is_empty())
        {
            return None;
        }
        let link = self.place(now, shared, session, key)?;
        self.fill_run(now, shared, session, key, link)
    }

    /// The path, and its budget, for what stands at the head of a flow's queue.
    fn place(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        key: Key,
    ) -> Option<(usize, usize)> {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let head = conn
            .out
            .queue
            .head()
            .expect("a flow that is scheduled has a head");
        let segment = parsed(&head.buffer);
        let left = head.left();
        let (seq, meta, consumed) = (segment.seq, segment.meta, segment.payload.len() - left);
        if conn.out.secrets.is_none() {
            // The peer restarted since this was queued.
            conn.open(session.epoch_secrets().clone(), meta);
        }
        let stream = &mut conn.out.stream;
        let offset = stream.offset_of(seq) + consumed as u64;
        let before = stream.epoch();
        let position = stream.position(offset, left.max(1));
        if stream.epoch() != before {
            conn.stats.epochs += 1;
        }
        // A chunk that is due for a trusted path can wait for it while others go on, up to a bound:
        // beyond it trust wins over speed.
        let due = conn.out.until_trusted == 0 && self.deferred.len() >= MAX_DEFERRED;
        let strict = position.solo || stream.is_guarded(offset) || due;
        let placement = if strict {
            Placement::TrustedOnly
        } else {
            Placement::Any
        };
        match self.choose(shared, now, placement, left + 128, self.backlog) {
            Choice::Send { link, budget } => Some((link, budget)),
            Choice::Wait(at) => {
                self.held_by_trust |= strict;
                self.wait_until(at);
                None
            }
            Choice::Nobody => {
                self.held_by_trust = true;
                None
            }
        }
    }

    /// The scheduler under the rules of trust.
    fn choose(
        &mut self,
        shared: &Shared,
        now: Time,
        placement: Placement,
        wanted: usize,
        backlog: usize,
    ) -> Choice {
        if self.has_trusted(shared) {
            return balanced(
                &mut self.links,
                shared,
                now,
                placement,
                wanted,
                backlog,
                None,
            );
        }
        // With no trusted path alive, chained flows wait, unless the user would rather not.
        if shared.hold_without_trusted {
            return Choice::Nobody;
        }
        balanced(
            &mut self.links,
            shared,
            now,
            Placement::Any,
            wanted,
            backlog,
            None,
        )
    }

    fn has_trusted(&self, shared: &Shared) -> bool {
        self.links.iter().any(|l| l.trusted && l.is_active(shared))
    }

    /// Untrusted paths may carry everything: `on_trusted_down = "untrusted"`, and it is down.
    fn is_lax(&self, shared: &Shared) -> bool {
        !shared.hold_without_trusted && !self.has_trusted(shared)
    }

    /// Cuts the head of the queue into chunks of one path, as many as fit one send.
    fn fill_run(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: &mut Session,
        key: Key,
        (link, budget): (usize, usize),
    ) -> Option<Out> {
        let trusted = self.links[link].trusted;
        let lax = self.is_lax(shared);
        let mtu = usize::from(self.links[link].path.mtu());
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let open = conn.open_frame();
        let Conn { out, stats, .. } = conn;
        let Outgoing {
            queue,
            stream,
            secrets,
            flow,
            until_trusted,
            deficit,
            meta,
            ..
        } = out;
        let secrets = secrets
            .as_ref()
            .expect("a flow has secrets before it sends");
        let head = queue.head().expect("the caller saw it");
        let segment = parsed(&head.buffer);
        let left = head.left();
        let total = segment.payload.len();
        let tcp = fields::of_segment(&segment, *meta);
        let header = frame::chunk_len(&tcp, open.as_ref());
        let may_be_bare = session.integrity() == Integrity::Off && open.is_none();
        let capacity = mtu - CLEAR - header - if may_be_bare { 0 } else { TAG_LEN };
        let base = stream.offset_of(segment.seq);
        let mut done = total - left;
        let budget = budget
            .min(self.links[link].path.quantum().max(mtu))
            .min(MAX_BATCH);
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS);
        let estimate = left.div_ceil(capacity).clamp(1, most) * mtu;
        let batch = self.waiting.add_batch(shared.pool.take_for(estimate));
        let mut at = 0;
        let mut stride = 0;
        let mut pieces = 0;
        let mut unused = true;
        let mut deferred = false;
        while pieces < most {
            let offset = base + done as u64;
            let position = stream.position(offset, (total - done).max(1));
            let due = *until_trusted == 0;
            let guarded = position.solo || stream.is_guarded(offset);
            let placement = if due || guarded {
                Placement::TrustedOnly
            } else {
                Placement::Any
            };
            let allowed = placement.allows(trusted || lax);
            let bare = may_be_bare && !position.solo;
            let tag = if bare { 0 } else { TAG_LEN };
            let len = (mtu - CLEAR - header - tag)
                .min(position.limit)
                .min(total - done);
            let shape = Shape {
                payload: len,
                header,
                tag,
            };
            let defer = !allowed && !guarded && self.deferred.len() < MAX_DEFERRED;
            // The datagrams of one send are equally long, but for the last.
            if (!allowed && !defer) || (pieces > 0 && shape.len() > stride) {
                break;
            }
            let bytes = &segment.payload[done..done + len];
            let last = done + len == total;
            let piece_tcp = piece_fields(&tcp, done, last);
            let numbers = len as u64 + u64::from(last && tcp.flags & flags::FIN != 0);
            let initial = if position.solo {
                stats.retransmissions += 1;
                Some(outgoing_buffer(secrets, *flow, stream, Some(offset)))
            } else if position.first {
                Some(outgoing_buffer(secrets, *flow, stream, None))
            } else {
                None
            };
            let chunk = Chunk {
                conn: key,
                flow: *flow,
                incarnation: stream.incarnation(),
                solo: position.solo,
                first: position.first,
                epoch: stream.epoch(),
                offset,
                crc: crc32c(bytes),
                tcp: OwnedFields::new(&piece_tcp),
                batch,
                at: (at + CLEAR) as u32,
                len: len as u16,
            };
            if defer {
                // It goes by a trusted path when that has room; the others need not wait for it.
                let mut buffer = shared.pool.take_for(len);
                transform(stream, position.solo, initial, bytes, &mut buffer[..len]);
                let batch = self.waiting.add_batch(buffer);
                let chunk = Chunk {
                    batch,
                    at: 0,
                    ..chunk
                };
                let pending = self.waiting.add(Content::Chunk(chunk), placement);
                self.deferred.push_back(pending);
                deferred = true;
                stream.advance(offset, numbers, position.solo);
                stats.bytes_trusted += len as u64;
                *until_trusted = next_trusted(shared, capacity);
                *deficit -= len as i64;
                done += len;
                if last {
                    break;
                }
                continue;
            }
            let datagram = &mut self.waiting.batch_mut(batch)[at..at + shape.len()];
            let (payload, rest) = datagram[CLEAR..].split_at_mut(len);
            transform(stream, position.solo, initial, bytes, payload);
            chunk
                .frame(piece_tcp, open)
                .encode(&mut Writer::new(&mut rest[..header]));
            let pending = self.waiting.add(Content::Chunk(chunk), placement);
            unused = false;
            let link = &mut self.links[link];
            let seq = link
                .path
                .on_sent(now, shape.len() as u16, token(pending), true);
            let datagram = &mut self.waiting.batch_mut(batch)[at..at + shape.len()];
            let sealed = if bare {
                session.seal_bare(datagram, link.id, seq, header)
            } else {
                session.seal(datagram, link.id, seq, header, false)
            };
            if sealed.is_err() {
                // Nothing leaves without protection; the scrambler is ahead of what left.
                shared.count(Counter::KeysExhausted);
                stream.break_chain();
                break;
            }
            stream.advance(offset, numbers, position.solo);
            if trusted {
                stats.bytes_trusted += len as u64;
            }
            *until_trusted = match due {
                true => next_trusted(shared, capacity),
                false => until_trusted.saturating_sub(len as u32),
            };
            *deficit -= shape.len() as i64;
            done += len;
            at += shape.len();
            pieces += 1;
            stride = stride.max(shape.len());
            if last || shape.len() < stride {
                break;
            }
        }
        if unused {
            self.waiting.drop_empty_batch(batch, &mut shared.pool);
        }
        let sent = done - (total - left);
        if pieces == 0 && !deferred {
            return None;
        }
        self.backlog -= sent;
        let emptied = if left == 0 {
            queue.pop()
        } else {
            queue.consume(sent)
        };
        if let Some(buffer) = emptied {
            shared.pool.give(buffer);
        }
        if pieces == 0 {
            return self.send_deferred(now, shared, session);
        }
        let link = &self.links[link];
        Some(Out {
            path: link.local,
            to: link.remote,
            segment: stride,
            source: Source::Batch(batch, at),
        })
    }

    /// Deals with what a path declared lost.
    pub(super) fn take_lost(&mut self, shared: &mut Shared, path: u8, lost: &mut Vec<u64>) {
        for token in lost.drain(..) {
            let Some(key) = key_of(token) else { continue };
            let Some(pending) = self.waiting.get_mut(key) else {
                continue;
            };
            let again = match pending.content {
                Content::Chunk(_) | Content::Fragment(_) => pending.sent < MAX_SENDS,
                Content::Control { .. } => true,
                Content::Opened { .. } => false,
            };
            if again {
                pending.sent = pending.sent.saturating_add(1);
                self.resend.push_back((key, path));
            } else if let Some(pending) = self.waiting.remove(key, &mut shared.pool) {
                self.give_up(shared, &pending);
            }
        }
    }

    /// A chunk is left to TCP: the chain cannot be restored beyond it, so a new one begins.
    fn give_up(&mut self, shared: &mut Shared, pending: &Pending) {
        let origin = match &pending.content {
            Content::Chunk(chunk) => chunk.origin(),
            Content::Fragment(fragment) => fragment.origin,
            Content::Control { .. } | Content::Opened { .. } => return,
        };
        shared.count(Counter::ChunkGivenUp);
        if let Some(conn) = self.conns.get_mut(origin.conn)
            && conn.out.stream.incarnation() == origin.incarnation
            && origin
                .epoch
                .is_some_and(|epoch| conn.out.stream.is_current(epoch))
        {
            conn.out.stream.break_chain();
        }
    }
}

/// The segment in a queued buffer, which was parsed before it was queued.
fn parsed(buffer: &[u8]) -> Segment<'_> {
    match packet::parse(&buffer[virtio::LEN..]) {
        Ok(Packet::Tcp(segment)) => segment,
        _ => panic!("what is queued was parsed before"),
    }
}

/// Scrambles a piece from where it was read to where it is sent from. `initial` is the buffer of a
/// solo chunk, or of a chain that begins here.
fn transform(
    stream: &mut TxStream,
    solo: bool,
    initial: Option<[u8; BUFFER_LEN]>,
    bytes: &[u8],
    out: &mut [u8],
) {
    let initial = || initial.expect("solo chunks and the start of a chain have an initial buffer");
    if solo {
        Scrambler::new(&initial()).scramble(bytes, out);
    } else {
        stream.scrambler(initial).scramble(bytes, out);
    }
}

/// Appends an acknowledgement frame, if there is anything to acknowledge.
fn put_ack(now: Time, link: &mut super::links::Link, block: &mut Vec<u8>) {
    let start = block.len();
    block.extend_from_slice(&[ACK, 0, 0]);
    if link.path.encode_ack(now, ACK_BYTES, block) {
        let len = (block.len() - start - 3) as u16;
        block[start + 1..start + 3].copy_from_slice(&len.to_be_bytes());
    } else {
        block.truncate(start);
    }
}

/// The header fields of one piece: PSH and FIN belong to the last, CWR to the first, and an urgent
/// pointer counts from the piece's own number.
fn piece_fields<'a>(tcp: &TcpFields<'a>, done: usize, last: bool) -> TcpFields<'a> {
    let mut piece = *tcp;
    if !last {
        piece.flags &= !(flags::PSH | flags::FIN | flags::RST);
    }
    if done > 0 {
        piece.flags &= !flags::CWR;
    }
    if let Some(urgent) = tcp.urgent {
        let rest = usize::from(urgent).saturating_sub(done);
        if rest == 0 && done > 0 {
            piece.flags &= !flags::URG;
            piece.urgent = None;
        } else {
            piece.urgent = Some(rest as u16);
        }
    }
    piece
}

/// Bytes until the next chunk that goes by a trusted path come what may: unpredictable, with the
/// configured share as its mean.
fn next_trusted(shared: &mut Shared, chunk: usize) -> u32 {
    if shared.trusted_share >= 1.0 {
        return 0;
    }
    if shared.trusted_share <= 0.0 {
        return u32::MAX;
    }
    let mean = chunk as f64 * (1.0 - shared.trusted_share) / shared.trusted_share;
    let most = (2.0 * mean).min(f64::from(u32::MAX - 1)) as u64;
    shared.random_below(most) as u32 + 1
}

/// Sets CE on an ECN-capable packet (RFC 3168); false if it is not capable.
fn mark_congestion(packet: &mut [u8]) -> bool {
    match packet.first().map(|b| b >> 4) {
        Some(4) if packet[1] & 3 != 0 => {
            packet[1] |= 3;
            true
        }
        Some(6) if packet[1] & 0x30 != 0 => {
            packet[1] |= 0x30;
            true
        }
        _ => false,
    }
}
