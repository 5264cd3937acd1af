//! What CoDel dropped, until TCP has sent it again.
//!
//! A drop tells TCP to slow down; that it repairs the loss soon is not sure. Linux takes back what it marked
//! as lost as soon as an acknowledgement shows that some of it was only late (`tcp_undo_cwnd_reduction`), as
//! happens where paths reorder, and after each outage. RACK has taken a segment that it marked off its list by
//! then, so nothing but the timer finds it, and that may have measured an outage as a round trip. So a copy
//! stays here for as long as TCP takes to find a loss, and goes if TCP has not sent it again.

use std::time::Duration;

use dibs_wire::SeqNumber;
use dibs_wire::packet::Segment;

use super::super::Shared;
use super::super::links::Link;
use super::super::peer::Peer;
use super::run::piece_fields;
use crate::buffer::{Buffer, Pool};
use crate::counters::Counter;
use crate::flow::fields;
use crate::flow::queue::INTERVAL;
use crate::slab::Key;
use crate::time::Time;

/// Segments that are kept, at most; the oldest goes for another one.
pub(in crate::node) const MAX_LEFT_OUT: usize = 64;

/// A segment that CoDel dropped.
pub(in crate::node) struct LeftOut {
    conn: Key,
    /// A packet of its own.
    buffer: Buffer,
    payload_at: usize,
    seq: SeqNumber,
    len: usize,
    /// When TCP should have sent it again.
    pub(in crate::node) due: Time,
}

impl LeftOut {
    /// Copies `len` payload bytes of `segment` from `done` on.
    pub(super) fn copy(
        pool: &mut Pool,
        (conn, due): (Key, Time),
        segment: &Segment<'_>,
        done: usize,
        len: usize,
    ) -> Self {
        let tcp = fields::of_segment(segment, segment.meta);
        let tcp = piece_fields(&tcp, done, done + len == segment.payload.len());
        let seq = segment.seq.add(done as u32);
        let headers = fields::headers(segment.tuple, segment.meta, seq, &tcp);
        let payload_at = headers.encoded_len();
        let mut buffer = pool.take_for(payload_at + len);
        headers.write(&mut buffer, len, 0);
        buffer[payload_at..payload_at + len].copy_from_slice(&segment.payload[done..done + len]);
        Self {
            conn,
            buffer,
            payload_at,
            seq,
            len,
            due,
        }
    }

    /// Whether all of it is among `len` bytes from `seq` on.
    fn is_in(&self, seq: SeqNumber, len: usize) -> bool {
        let (own_end, end) = (self.seq.add(self.len as u32), seq.add(len as u32));
        !seq.is_after(self.seq) && !own_end.is_after(end)
    }
}

/// How long TCP may take to find that a segment is missing that waited as long as `sojourn`: what follows
/// waits as well, and its acknowledgement perhaps at the far end; RACK allows for as much reordering.
pub(super) fn repair_time(links: &[Link], shared: &Shared, sojourn: Duration) -> Duration {
    let active = links.iter().filter(|link| link.is_active(shared));
    let slowest = active.map(|link| link.path.stats().srtt).max();
    INTERVAL + 2 * (sojourn + slowest.unwrap_or_default())
}

impl Peer {
    /// Keeps what CoDel dropped.
    pub(super) fn keep_left_out(&mut self, now: Time, shared: &mut Shared, left_out: LeftOut) {
        if self.left_out.len() == MAX_LEFT_OUT {
            let oldest = self.left_out.remove(0);
            self.requeue(now, shared, oldest);
        }
        self.left_out.push(left_out);
    }

    /// A segment of the local kernel was queued: what it brings again need not be kept.
    pub(in crate::node) fn note_repaired(
        &mut self,
        shared: &mut Shared,
        conn: Key,
        seq: SeqNumber,
        len: usize,
    ) {
        let repaired = |kept: &mut LeftOut| kept.conn == conn && kept.is_in(seq, len);
        for kept in self.left_out.extract_if(.., repaired) {
            shared.pool.give(kept.buffer);
        }
    }

    /// A connection ended, or begins anew.
    pub(in crate::node) fn forget_left_out(&mut self, shared: &mut Shared, conn: Key) {
        for kept in self.left_out.extract_if(.., |kept| kept.conn == conn) {
            shared.pool.give(kept.buffer);
        }
    }

    /// Queues what TCP should have sent again by now.
    pub(in crate::node) fn requeue_left_out(&mut self, now: Time, shared: &mut Shared) {
        while let Some(at) = self.left_out.iter().position(|kept| kept.due <= now) {
            let kept = self.left_out.remove(at);
            self.requeue(now, shared, kept);
        }
    }

    /// Queues it in front of what waits, as if TCP had sent it again.
    fn requeue(&mut self, now: Time, shared: &mut Shared, kept: LeftOut) {
        let conn = self.conns.get_mut(kept.conn);
        let conn = conn.expect("what it left out is forgotten with a connection");
        let end = kept.payload_at + kept.len;
        self.queued_memory += kept.buffer.len();
        conn.out
            .queue
            .push_front(now, kept.buffer, kept.payload_at, end);
        shared.count(Counter::CodelReturned);
        self.backlog += kept.len;
        self.schedule(kept.conn);
    }
}
