//! Segments without payload that wait to be sent.

use std::collections::VecDeque;

use dibs_wire::SeqNumber;
use dibs_wire::frame::TcpFields;
use dibs_wire::packet::flags;

use crate::slab::Key;
use crate::tcp_fields::OwnedFields;

/// How many wait, at most.
const MAX_SEGMENTS: usize = 4096;

/// A segment without payload that waits to be sent.
pub(super) struct EmptyOut {
    pub(super) conn: Key,
    pub(super) seq: SeqNumber,
    pub(super) tcp: OwnedFields,
}

impl EmptyOut {
    /// True if `later` says all that this says: both only acknowledge, and it acknowledges more. Equal ones are no
    /// repetitions for TCP, which counts them.
    fn is_surpassed_by(&self, later: &Self) -> bool {
        let only_acknowledges = |tcp: &TcpFields<'_>| {
            tcp.flags == flags::ACK && tcp.options.is_none() && tcp.urgent.is_none()
        };
        let (one, other) = (self.tcp.get(), later.tcp.get());
        self.conn == later.conn
            && self.seq == later.seq
            && only_acknowledges(&one)
            && only_acknowledges(&other)
            && other.ack.is_after(one.ack)
    }

    /// Lets it wait behind the others; false if the first of them had to go for it.
    pub(super) fn queue(self, waiting: &mut VecDeque<Self>) -> bool {
        if let Some(last) = waiting.back_mut()
            && last.is_surpassed_by(&self)
        {
            *last = self;
            return true;
        }
        let has_room = waiting.len() < MAX_SEGMENTS;
        if !has_room {
            waiting.pop_front();
        }
        waiting.push_back(self);
        has_room
    }
}
