//! What CoDel dropped, until TCP has sent it again.
//!
//! A drop tells TCP to slow down; that it repairs the loss soon is not sure. Linux takes back what it marked
//! as lost as soon as an acknowledgement shows that some of it was only late (`tcp_undo_cwnd_reduction`), as
//! happens where paths reorder, and after each outage. RACK has taken a segment that it marked off its list by
//! then, so nothing but the timer finds it, and that may have measured an outage as a round trip. So a copy
//! stays here for as long as TCP takes to find a loss, and goes if TCP has not sent it again.

use std::collections::BTreeSet;
use std::time::Duration;

use dibs_wire::SeqNumber;

use super::super::Shared;
use super::super::links::Link;
use super::super::peer::Peer;
use crate::buffer::Pool;
use crate::counters::Counter;
use crate::flow::left_out::LeftOut;
use crate::flow::queue::INTERVAL;
use crate::slab::Key;
use crate::time::Time;

/// Bytes of buffers that are kept, at most; what is due first goes for another one. It has to last for a few
/// segments of each of a thousand flows: what goes too early TCP sends as well.
pub(in crate::node) const MAX_LEFT_OUT: usize = 16 << 20;

/// When segments that CoDel dropped should have been sent again, over all connections, which have them.
#[derive(Default)]
pub(in crate::node) struct LeftOuts {
    due: BTreeSet<(Time, Key)>,
    memory: usize,
}

impl LeftOuts {
    /// When the first one is due.
    pub(in crate::node) fn first_due(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    /// How many there are.
    #[cfg(test)]
    pub(in crate::node) fn len(&self) -> usize {
        self.due.len()
    }

    /// Bytes of their buffers.
    #[cfg(test)]
    pub(in crate::node) const fn memory(&self) -> usize {
        self.memory
    }

    fn forget(&mut self, conn: Key, kept: LeftOut, pool: &mut Pool) {
        self.take(conn, &kept);
        pool.give(kept.buffer);
    }

    fn take(&mut self, conn: Key, kept: &LeftOut) {
        self.due.remove(&(kept.due, conn));
        self.memory -= kept.buffer.len();
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
    pub(super) fn keep_left_out(
        &mut self,
        now: Time,
        shared: &mut Shared,
        key: Key,
        mut kept: LeftOut,
    ) {
        while self.left_out.memory + kept.buffer.len() > MAX_LEFT_OUT
            && self.requeue_first(now, shared)
        {}
        while !self.left_out.due.insert((kept.due, key)) {
            kept.due += Duration::from_nanos(1);
        }
        self.left_out.memory += kept.buffer.len();
        let conn = self.conns.get_mut(key).expect("the caller has it");
        conn.out.left_out.push(kept);
    }

    /// A segment of the local kernel was queued: what it brings again need not be kept.
    pub(in crate::node) fn note_repaired(
        &mut self,
        shared: &mut Shared,
        key: Key,
        seq: SeqNumber,
        len: usize,
    ) {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let repaired = |kept: &mut LeftOut| kept.is_in(seq, len);
        for kept in conn.out.left_out.extract_if(.., repaired) {
            self.left_out.forget(key, kept, &mut shared.pool);
        }
    }

    /// A connection ended, or begins anew.
    pub(in crate::node) fn forget_left_out(
        &mut self,
        shared: &mut Shared,
        key: Key,
        kept: Vec<LeftOut>,
    ) {
        for kept in kept {
            self.left_out.forget(key, kept, &mut shared.pool);
        }
    }

    /// Queues what TCP should have sent again by now.
    pub(in crate::node) fn requeue_left_out(&mut self, now: Time, shared: &mut Shared) {
        while self.left_out.first_due().is_some_and(|due| due <= now) {
            self.requeue_first(now, shared);
        }
    }

    /// Queues what is due first in front of what waits, as if TCP had sent it again; false if there is nothing.
    fn requeue_first(&mut self, now: Time, shared: &mut Shared) -> bool {
        let Some(&(due, key)) = self.left_out.due.first() else {
            return false;
        };
        let conn = self.conns.get_mut(key);
        let out = &mut conn
            .expect("what it left out is forgotten with a connection")
            .out;
        let at = out.left_out.iter().position(|kept| kept.due == due);
        let kept = out
            .left_out
            .swap_remove(at.expect("each that is due is kept"));
        self.left_out.take(key, &kept);
        let end = kept.payload_at + kept.len;
        self.queued_memory += kept.buffer.len();
        out.queue.push_front(now, kept.buffer, kept.payload_at, end);
        shared.count(Counter::CodelReturned);
        self.backlog += kept.len;
        self.schedule(key);
        true
    }
}
