//! New data: fair rounds over the flows, runs of chunks by the path that the scheduler chooses.

use dibs_scramble::{BUFFER_LEN, Scrambler};
use dibs_wire::bytes::Writer;
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{self, TcpFields};
use dibs_wire::packet::{self, Packet, Segment, flags};
use dibs_wire::virtio;

use super::super::Shared;
use super::super::links::PROOF_SPACING;
use super::super::peer::{Delayed, Out, Peer, Source};
use super::super::schedule::{Choice, balanced};
use super::{CLEAR, NOT_BARE, Shape, Turn, token};
use crate::chunk::{Chunk, Content, Placement};
use crate::counters::Counter;
use crate::flow::conn::{Conn, Outgoing, outgoing_buffer};
use crate::flow::fields::{self, OwnedFields};
use crate::flow::queue::Verdict;
use crate::session::{Integrity, TAG_LEN};
use crate::slab::Key;
use crate::stream::tx::TxStream;
use crate::time::Time;

/// Segments of one GSO send, at most (the kernel's UDP_MAX_SEGMENTS of old).
const MAX_SEGMENTS: usize = 64;
/// Bytes of one GSO send, at most: an IPv6 payload with its UDP header.
const MAX_BATCH: usize = 65_000;
/// Chunks left out of untrusted runs that may wait for a trusted path.
const MAX_DELAYED: usize = 64;
/// Bytes of buffers that may wait for acknowledgement.
const HELD_LIMIT: usize = 96 << 20;
/// What a flow may send in one round.
const QUANTUM: i64 = 16 * 1024;

impl Peer {
    /// New data, one run of datagrams of one flow.
    pub(super) fn send_data(&mut self, turn: &mut Turn<'_>) -> Option<Out> {
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
            if let Some(out) = self.send_run(turn, key) {
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
        conn.out.stream.note_drop();
        shared.count(Counter::CodelDropped);
        self.backlog -= dropped;
        if let Some(buffer) = conn.out.queue.consume(dropped) {
            shared.pool.give(buffer);
        }
        true
    }

    /// Sends a run of chunks from the head of a flow's queue.
    fn send_run(&mut self, turn: &mut Turn<'_>, key: Key) -> Option<Out> {
        let link = self.place(turn, key)?;
        // Only what can go is judged: waiting for a path is no congestion.
        if !self.judge(turn.now, turn.shared, key) {
            return self.fill_run(turn, key, link);
        }
        // A segment is missing turn.now, so what follows stands elsewhere.
        if self
            .conns
            .get_mut(key)
            .is_some_and(|c| c.out.queue.is_empty())
        {
            return None;
        }
        let link = self.place(turn, key)?;
        self.fill_run(turn, key, link)
    }

    /// The path, and its budget, for what stands at the head of a flow's queue.
    fn place(&mut self, turn: &mut Turn<'_>, key: Key) -> Option<(usize, usize)> {
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
            conn.open(turn.session.epoch_secrets().clone(), meta);
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
        let due = conn.out.until_trusted <= 0 && self.delayed_trusted.len() >= MAX_DELAYED;
        let strict = position.solo || stream.is_guarded(offset) || due;
        let placement = if strict {
            Placement::TrustedOnly
        } else {
            Placement::Any
        };
        match self.choose(turn.shared, turn.now, placement, left + 128, self.backlog) {
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
    pub(super) fn choose(
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
    pub(super) fn is_lax(&self, shared: &Shared) -> bool {
        !shared.hold_without_trusted && !self.has_trusted(shared)
    }

    /// Cuts the head of the queue into chunks of one path, as many as fit one send.
    fn fill_run(
        &mut self,
        turn: &mut Turn<'_>,
        key: Key,
        (link, budget): (usize, usize),
    ) -> Option<Out> {
        let trusted = self.links[link].trusted;
        let lax = self.is_lax(turn.shared);
        let mtu = usize::from(self.links[link].path.mtu());
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let open = conn.open_frame();
        let Conn { out, stats, .. } = &mut *conn;
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
        let may_be_bare = turn.session.integrity() == Integrity::Off
            && open.is_none()
            && left > 0
            && tcp.flags & NOT_BARE == 0;
        let capacity = mtu - CLEAR - header - if may_be_bare { 0 } else { TAG_LEN };
        let base = stream.offset_of(segment.seq);
        let mut done = total - left;
        let budget = budget
            .min(self.links[link].path.quantum().max(mtu))
            .min(MAX_BATCH);
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS);
        let estimate = left.div_ceil(capacity).clamp(1, most) * mtu;
        let batch = self.waiting.add_batch(turn.shared.pool.take_for(estimate));
        let mut at = 0;
        let mut stride = 0;
        let mut pieces = 0;
        let mut unused = true;
        let mut deferred = false;
        let mut by_path = 0;
        while pieces < most {
            let offset = base + done as u64;
            let position = stream.position(offset, (total - done).max(1));
            let due = *until_trusted <= 0;
            let guarded = position.solo || stream.is_guarded(offset);
            let placement = if due || guarded {
                Placement::TrustedOnly
            } else {
                Placement::Any
            };
            let allowed = placement.allows(trusted || lax);
            // Now and then one that proves how far the numbers have come.
            let number = self.links[link].path.next_seq();
            let bare = may_be_bare
                && !(position.solo || position.first)
                && !number.is_multiple_of(PROOF_SPACING);
            let tag = if bare { 0 } else { TAG_LEN };
            let len = (mtu - CLEAR - header - tag)
                .min(position.limit)
                .min(total - done);
            let shape = Shape {
                payload: len,
                header,
                tag,
            };
            let defer = !allowed && !guarded && self.delayed_trusted.len() < MAX_DELAYED;
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
                detached: position.detached,
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
                let mut buffer = turn.shared.pool.take_for(len);
                transform(stream, position.solo, initial, bytes, &mut buffer[..len]);
                let batch = self.waiting.add_batch(buffer);
                let chunk = Chunk {
                    batch,
                    at: 0,
                    ..chunk
                };
                let pending = self.waiting.add(Content::Chunk(chunk), placement);
                self.delayed_trusted.push_back(Delayed {
                    key: pending,
                    lost_by: None,
                });
                deferred = true;
                stream.advance(offset, numbers, position.solo);
                stats.bytes_trusted += len as u64;
                *until_trusted += next_trusted(turn.shared, len);
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
                .on_sent(turn.now, shape.len() as u16, token(pending), true);
            let datagram = &mut self.waiting.batch_mut(batch)[at..at + shape.len()];
            let sealed = if bare {
                turn.session.seal_bare(datagram, link.id, seq, header)
            } else {
                turn.session.seal(datagram, link.id, seq, header, false)
            };
            if sealed.is_err() {
                // Nothing leaves without protection; the scrambler is ahead of what left.
                turn.shared.count(Counter::KeysExhausted);
                stream.break_chain();
                break;
            }
            stream.advance(offset, numbers, position.solo);
            if trusted {
                stats.bytes_trusted += len as u64;
            }
            by_path += len as u64;
            *until_trusted += match due {
                true => next_trusted(turn.shared, len),
                false => -(len as i64),
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
            self.waiting.drop_empty_batch(batch, &mut turn.shared.pool);
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
            turn.shared.pool.give(buffer);
        }
        if pieces == 0 {
            return self.send_delayed_trusted(turn);
        }
        let link = &self.links[link];
        conn.by_path.entry(link.local).sent += by_path;
        Some(Out {
            path: link.local,
            to: link.remote,
            segment: stride,
            source: Source::Batch(batch, at),
        })
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
        }
        // The field stays where nothing is urgent any more: all pieces have equally long headers.
        piece.urgent = Some(rest as u16);
    }
    piece
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
