//! The fair queue: what all flows of a peer have waiting, and whose turn it is (RFC 8290).
//!
//! Inputs: [`enqueue`](FairQueue::enqueue) with a segment of the local kernel, [`handle_timeout`](FairQueue::handle_timeout)
//! when [`poll_timeout`](FairQueue::poll_timeout) has come. Whoever sends asks [`next_flow`](FairQueue::next_flow) for the
//! flow whose turn it is, [`judge`](FairQueue::judge)s its head, and takes from its queue in [`take`](FairQueue::take).
//! The queues themselves lie in the connections; only here are they counted.

mod drop_cache;
mod drr;

use std::time::Duration;

use dibs_wire::packet::{Packet, Segment};
use dibs_wire::{SeqNumber, packet, virtio};

use self::drop_cache::DropCache;
#[cfg(test)]
pub(super) use self::drop_cache::MAX_DROPPED;
pub(super) use self::drr::List;
use self::drr::Lists;
use super::flows::FlowTable;
use super::shared::Shared;
use crate::buffer::{Buffer, MIDDLE_LEN, Pool};
use crate::counters::Counter;
use crate::flow::conn::Outgoing;
use crate::flow::dropped::DroppedSegment;
use crate::flow::queue::{Full, INTERVAL, Patience, Verdict};
use crate::slab::Key;
use crate::time::Time;

/// Bytes of the buffers of what waits in the queues of a peer's flows, at most.
pub(super) const MAX_QUEUED: usize = 64 << 20;
/// Each flow may have so much of them as is left, divided by this: a few that send without end leave room for
/// the others, whose retransmissions would find none.
const PART_OF_LEFT: usize = 4;
/// Payload that fills a send, about.
const WORTH_A_SEND: usize = 60_000;
/// A flow that has its turn has something to send.
const HEAD: &str = "a flow that is scheduled has a head";

/// A segment's payload, and the connection whose queue it is for.
#[derive(Clone, Copy)]
pub(crate) struct SegmentPayload {
    pub(super) conn: Key,
    pub(super) seq: SeqNumber,
    /// Its bytes, and where they end in the buffer.
    pub(super) len: usize,
    pub(super) end: usize,
    /// Payload bytes of one of the segments that it stands for.
    pub(super) mss: usize,
}

/// See the module.
#[derive(Default)]
pub(super) struct FairQueue {
    lists: Lists,
    /// Bytes in all queues.
    backlog: usize,
    /// Bytes of the buffers that they lie in.
    memory: usize,
    /// Segments that CoDel dropped and TCP has not sent again.
    dropped: DropCache,
}

impl FairQueue {
    /// Payload bytes that wait, of all flows.
    pub(super) const fn backlog(&self) -> usize {
        self.backlog
    }

    /// Bytes of the buffers that they lie in.
    #[cfg(test)]
    pub(super) const fn memory(&self) -> usize {
        self.memory
    }

    /// Segments that CoDel dropped and are kept: how many, and bytes of their buffers.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        (self.dropped.len(), self.dropped.memory())
    }

    /// Flows that have something to send, about.
    pub(super) fn flows(&self) -> usize {
        self.lists.len()
    }

    /// Queues a segment's payload; drops it where there is no room.
    pub(super) fn enqueue(
        &mut self,
        now: Time,
        shared: &mut Shared,
        conns: &mut FlowTable,
        payload: SegmentPayload,
        (buffer, turn): (Buffer, usize),
    ) {
        let SegmentPayload {
            conn: key,
            seq,
            len,
            end,
            mss,
        } = payload;
        let conn = conns.get_mut(key).expect("the payload is of a connection");
        // A packet that has to wait must not pin a buffer much longer than it is.
        let buffer = if end <= MIDDLE_LEN {
            let mut fitting = shared.pool.take_for(end);
            fitting[..end].copy_from_slice(&buffer[..end]);
            shared.pool.give(buffer);
            fitting
        } else {
            buffer
        };
        let memory = buffer.len();
        let left = MAX_QUEUED.saturating_sub(self.memory);
        // What TCP sends again it would miss only by a timeout, the next of which is twice as long.
        let stream = &mut conn.out.stream;
        let again = stream.base().is_some() && {
            let offset = stream.offset_of(seq);
            stream.is_passed(offset)
        };
        let full = match again {
            true => memory > left,
            false => conn.out.queue.memory() + memory > left / PART_OF_LEFT,
        };
        let pushed = match full {
            true => Err(Full(buffer)),
            false => conn.out.queue.push(now, buffer, seq, len, mss),
        };
        if let Err(Full(buffer)) = pushed {
            conn.out.stream.note_drop();
            shared.count(Counter::QueueFull);
            return shared.pool.give(buffer);
        }
        self.backlog += len;
        self.memory += memory;
        let out = &mut conn.out;
        self.dropped
            .on_retransmitted(&mut shared.pool, key, seq, len);
        self.schedule(key, out, turn);
    }

    /// Something is queued of a flow: it gets its turns.
    fn schedule(&mut self, key: Key, out: &mut Outgoing, turn: usize) {
        if out.schedule.begin(turn) {
            self.lists.push_back(List::New, key);
        }
    }

    /// Nothing that waits of a connection is of use any more.
    pub(super) fn forget(&mut self, pool: &mut Pool, key: Key, out: &mut Outgoing) -> u64 {
        let segments = self.take(out, |out| {
            let mut segments = 0;
            while let Some(waiting) = out.queue.pop() {
                pool.give(waiting.buffer);
                segments += 1;
            }
            segments
        });
        self.dropped.forget_all(pool, key);
        segments
    }

    /// Lets `take` take from a flow's queue. What is gone then counts no more.
    pub(super) fn take<T>(
        &mut self,
        out: &mut Outgoing,
        take: impl FnOnce(&mut Outgoing) -> T,
    ) -> T {
        let (bytes, memory) = (out.queue.bytes(), out.queue.memory());
        let taken = take(out);
        self.backlog -= bytes - out.queue.bytes();
        self.memory -= memory - out.queue.memory();
        taken
    }

    /// The flow whose turn it is, which is then the first of its list; none but `passed` ones are left otherwise.
    pub(super) fn next_flow(
        &mut self,
        now: Time,
        conns: &mut FlowTable,
        (turn, more_comes): (usize, bool),
        list: List,
        passed: &mut usize,
    ) -> Option<Key> {
        while *passed < self.lists.len_of(list) {
            let key = self.lists.front(list).expect("there are more");
            let Some(conn) = conns.get_mut(key) else {
                self.lists.pop_front(list);
                continue;
            };
            // Also of one that has nothing more for now: what it sent too much of is not forgotten.
            if conn.out.schedule.is_spent() {
                conn.out.schedule.refill(turn);
                self.end_turn(list);
                *passed = 0;
                continue;
            }
            if conn.out.queue.is_empty() {
                // Who comes back at once must not be new again: the others would wait for ever.
                let stays = list == List::New && self.lists.len_of(List::Old) > 0;
                match stays {
                    true => self.end_turn(list),
                    false => {
                        conn.out.schedule.end();
                        self.lists.pop_front(list);
                    }
                }
                continue;
            }
            let waits =
                more_comes && conn.out.queue.bytes() < WORTH_A_SEND && conn.out.queue.is_fresh(now);
            if !waits {
                return Some(key);
            }
            self.pass(list);
            *passed += 1;
        }
        None
    }

    /// The first flow of those that wait for a trusted path, if it may send.
    pub(super) fn trusted_only(&self, conns: &FlowTable) -> Option<(Key, bool)> {
        let key = self.lists.front(List::TrustedOnly)?;
        let conn = conns.get(key);
        let may =
            conn.is_some_and(|conn| !conn.out.schedule.is_spent() && !conn.out.queue.is_empty());
        Some((key, may))
    }

    /// The flows of a list behind the first.
    pub(super) fn others(&self, list: List) -> impl Iterator<Item = Key> {
        self.lists.iter(list).skip(1)
    }

    /// The first flow of a list has had its turn.
    pub(super) fn end_turn(&mut self, list: List) {
        self.lists.move_front(list, List::Old);
    }

    /// The first flow of a list keeps its turn until there is room on a trusted path.
    pub(super) fn await_trusted(&mut self, list: List) {
        self.lists.move_front(list, List::TrustedOnly);
    }

    /// Nothing of the first flow of a list may go now.
    pub(super) fn pass(&mut self, list: List) {
        self.lists.rotate(list);
    }

    /// Asks CoDel about the head of a flow's queue; true if that dropped a segment from it. A copy is kept until TCP has
    /// sent it again, or should have: within `srtt` of the slowest path, that is.
    ///
    /// Inside a chain it goes out and is [withheld](crate::chunk::Chunk::withheld) at the far end. Without it a new epoch
    /// would begin, which waits for nothing: what follows would overtake, by a shorter path, what was sent before, and
    /// TCP would take all that for lost.
    pub(super) fn judge(
        &mut self,
        now: Time,
        shared: &mut Shared,
        conns: &mut FlowTable,
        key: Key,
        (patience, srtt): (Patience, Duration),
    ) -> bool {
        let conn = conns.get_mut(key).expect("the caller has it");
        if conn.out.queue.judge(now, patience) == Verdict::Pass {
            return false;
        }
        let head = conn.out.queue.head().expect(HEAD);
        if mark_congestion(&mut head.buffer[virtio::LEN..]) {
            shared.count(Counter::CodelMarked);
            return false;
        }
        let offset = head.offset(&mut conn.out.stream);
        if head.rest.withheld > 0 || conn.out.stream.is_passed(offset) {
            // TCP sends it again, and would miss it only by a timeout, which after an outage is a long one.
            return false;
        }
        let len = head.rest.mss.min(head.rest.left);
        if len == 0 {
            return false;
        }
        // How long TCP may take to find that it is missing: what follows waits as well, and its acknowledgement
        // perhaps at the far end; RACK allows for as much reordering.
        let due = now + INTERVAL + 2 * (head.sojourn(now) + srtt);
        let done = head.len - head.rest.left;
        let kept = DroppedSegment::copy(&mut shared.pool, due, &parsed(&head.buffer), done, len);
        shared.count(Counter::CodelDropped);
        let withholds = conn.out.stream.continues_at(offset);
        if withholds {
            head.rest.withheld = len;
        } else {
            conn.out.stream.note_drop();
            if let Some(buffer) = self.take(&mut conn.out, |out| out.queue.consume(len)) {
                shared.pool.give(buffer);
            }
        }
        while !self.dropped.has_room(&kept)
            && self.requeue_first(now, shared, conns, patience.burst)
        {}
        self.dropped.keep(key, kept);
        !withholds
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.dropped.first_due()
    }

    /// Queues what TCP should have sent again by now.
    pub(super) fn handle_timeout(
        &mut self,
        now: Time,
        shared: &mut Shared,
        conns: &mut FlowTable,
        turn: usize,
    ) {
        while self.dropped.first_due().is_some_and(|due| due <= now) {
            self.requeue_first(now, shared, conns, turn);
        }
    }

    /// Queues what is due first in front of what waits, as if TCP had sent it again; false if there is nothing.
    fn requeue_first(
        &mut self,
        now: Time,
        shared: &mut Shared,
        conns: &mut FlowTable,
        turn: usize,
    ) -> bool {
        let Some((key, kept)) = self.dropped.take_first() else {
            return false;
        };
        let conn = conns.get_mut(key);
        let out = &mut conn
            .expect("what was dropped of it is forgotten with a connection")
            .out;
        self.memory += kept.buffer.len();
        self.backlog += kept.len;
        out.queue.push_front(now, kept.buffer, kept.seq, kept.len);
        shared.count(Counter::CodelReturned);
        self.schedule(key, out, turn);
        true
    }
}

/// The segment in a queued buffer, which was parsed before it was queued.
pub(super) fn parsed(buffer: &[u8]) -> Segment<'_> {
    match packet::parse(&buffer[virtio::LEN..]) {
        Ok(Packet::Tcp(segment)) => segment,
        _ => panic!("what is queued was parsed before"),
    }
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
