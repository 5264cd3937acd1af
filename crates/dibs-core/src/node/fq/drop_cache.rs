//! Cache of segments that CoDel dropped, until TCP has sent them again.
//!
//! A drop tells TCP to slow down; that it repairs the loss soon is not sure. Linux takes back what it marked
//! as lost as soon as an acknowledgement shows that some of it was only late (`tcp_undo_cwnd_reduction`), as
//! happens where paths reorder, and after each outage. RACK has taken a segment that it marked off its list by
//! then, so nothing but the timer finds it, and that may have measured an outage as a round trip. So a copy
//! stays here for as long as TCP takes to find a loss, and goes if TCP has not sent it again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dibs_wire::SeqNumber;

use crate::buffer::Pool;
use crate::flow::dropped::DroppedSegment;
use crate::slab::Key;
use crate::time::Time;

/// Bytes of buffers that are kept, at most; what is due first goes for another one. It has to last for a few
/// segments of each of a thousand flows: what goes too early TCP sends as well.
pub(in crate::node) const MAX_DROPPED: usize = 16 << 20;
/// Invariant: each segment that is due is kept.
const DUE: &str = "each that is due is kept";

/// Segments that CoDel dropped and TCP has not sent again.
#[derive(Default)]
pub(super) struct DropCache {
    /// By connection.
    dropped: BTreeMap<Key, Vec<DroppedSegment>>,
    /// When they should have been sent again.
    due: BTreeSet<(Time, Key)>,
    memory: usize,
}

impl DropCache {
    /// When the first one is due.
    pub(super) fn first_due(&self) -> Option<Time> {
        self.due.first().map(|(due, _)| *due)
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

    /// True if one more may be kept.
    pub(super) const fn has_room(&self, kept: &DroppedSegment) -> bool {
        self.memory + kept.buffer.len() <= MAX_DROPPED
    }

    /// Keeps what was dropped of a connection.
    pub(super) fn keep(&mut self, key: Key, mut kept: DroppedSegment) {
        while !self.due.insert((kept.due, key)) {
            kept.due += Duration::from_nanos(1);
        }
        self.memory += kept.buffer.len();
        self.dropped.entry(key).or_default().push(kept);
    }

    /// A segment of the local kernel was queued: what it brings again need not be kept.
    pub(super) fn on_retransmitted(
        &mut self,
        pool: &mut Pool,
        key: Key,
        seq: SeqNumber,
        len: usize,
    ) {
        let Some(dropped) = self.dropped.get_mut(&key) else {
            return;
        };
        let repaired = |kept: &mut DroppedSegment| kept.is_in(seq, len);
        for kept in dropped.extract_if(.., repaired) {
            self.due.remove(&(kept.due, key));
            self.memory -= kept.buffer.len();
            pool.give(kept.buffer);
        }
        if dropped.is_empty() {
            self.dropped.remove(&key);
        }
    }

    /// A connection ended, or begins anew.
    pub(super) fn forget_all(&mut self, pool: &mut Pool, key: Key) {
        for kept in self.dropped.remove(&key).into_iter().flatten() {
            self.due.remove(&(kept.due, key));
            self.memory -= kept.buffer.len();
            pool.give(kept.buffer);
        }
    }

    /// Takes the first one, and its connection.
    pub(super) fn take_first(&mut self) -> Option<(Key, DroppedSegment)> {
        let (due, key) = self.due.pop_first()?;
        let dropped = self.dropped.get_mut(&key).expect(DUE);
        let at = dropped.iter().position(|kept| kept.due == due);
        let kept = dropped.swap_remove(at.expect(DUE));
        if dropped.is_empty() {
            self.dropped.remove(&key);
        }
        self.memory -= kept.buffer.len();
        Some((key, kept))
    }
}
