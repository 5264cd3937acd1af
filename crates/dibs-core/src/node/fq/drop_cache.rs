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

use crate::buffer::Pool;
use crate::flow::conn::Outgoing;
use crate::flow::dropped::DroppedSegment;
use crate::slab::Key;
use crate::time::Time;

/// Bytes of buffers that are kept, at most; what is due first goes for another one. It has to last for a few
/// segments of each of a thousand flows: what goes too early TCP sends as well.
pub(in crate::node) const MAX_DROPPED: usize = 16 << 20;

/// When segments that CoDel dropped should have been sent again, over all connections, which have them.
#[derive(Default)]
pub(super) struct DropCache {
    due: BTreeSet<(Time, Key)>,
    memory: usize,
}

impl DropCache {
    /// When the first one is due.
    pub(super) fn first_due(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
    }

    /// The connection that has the first one.
    pub(super) fn first(&self) -> Option<Key> {
        self.due.first().map(|(_, key)| *key)
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }

    /// Bytes of their buffers.
    #[cfg(test)]
    pub(super) const fn memory(&self) -> usize {
        self.memory
    }

    /// Whether one more may be kept.
    pub(super) const fn has_room(&self, kept: &DroppedSegment) -> bool {
        self.memory + kept.buffer.len() <= MAX_DROPPED
    }

    /// Keeps what was dropped of a connection.
    pub(super) fn keep(&mut self, (key, out): (Key, &mut Outgoing), mut kept: DroppedSegment) {
        while !self.due.insert((kept.due, key)) {
            kept.due += Duration::from_nanos(1);
        }
        self.memory += kept.buffer.len();
        out.dropped.push(kept);
    }

    /// A segment of the local kernel was queued: what it brings again need not be kept.
    pub(super) fn on_retransmitted(
        &mut self,
        pool: &mut Pool,
        (key, out): (Key, &mut Outgoing),
        seq: SeqNumber,
        len: usize,
    ) {
        let repaired = |kept: &mut DroppedSegment| kept.is_in(seq, len);
        for kept in out.dropped.extract_if(.., repaired) {
            self.take(key, &kept);
            pool.give(kept.buffer);
        }
    }

    /// A connection ended, or begins anew.
    pub(super) fn forget_all(&mut self, pool: &mut Pool, (key, out): (Key, &mut Outgoing)) {
        for kept in std::mem::take(&mut out.dropped) {
            self.take(key, &kept);
            pool.give(kept.buffer);
        }
    }

    /// Takes the first one from its connection.
    ///
    /// # Panics
    /// If there is none, or the connection is another one.
    pub(super) fn take_first(&mut self, (key, out): (Key, &mut Outgoing)) -> DroppedSegment {
        let due = self.first_due().expect("the caller asked");
        let at = out.dropped.iter().position(|kept| kept.due == due);
        let kept = out
            .dropped
            .swap_remove(at.expect("each that is due is kept"));
        self.take(key, &kept);
        kept
    }

    fn take(&mut self, conn: Key, kept: &DroppedSegment) {
        self.due.remove(&(kept.due, conn));
        self.memory -= kept.buffer.len();
    }
}
