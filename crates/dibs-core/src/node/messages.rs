//! Words between the two daemons: reliable, each given once, in any order.
//!
//! Those to the peer wait for their turn, up to a bound, and few are on their way at once. Of the peer's as many are
//! taken as the owner deals with.

use std::collections::VecDeque;

use super::notice::Event;
use super::shared::Journal;
use crate::chunk::Message;
use crate::counters::Counter;
use crate::session::PeerId;
use crate::time::Time;

/// Longest message between the daemons, in bytes.
pub const MAX_CONTROL: usize = 1024;
/// Messages to the peer that wait for their turn, at most.
pub(super) const MAX_WAITING: usize = 256;
/// Of the peer's that the owner has not dealt with, at most: what comes beyond is not taken, so not acknowledged, and
/// the peer sends it again. As many as an honest daemon has waiting at once.
pub(super) const MAX_TAKEN: usize = 256;
/// On their way at once, at most.
pub(super) const WINDOW: usize = 16;
/// Numbers of the peer's messages that are remembered, so that none is given twice.
const SEEN: usize = 256;

/// A message to a peer that cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// There is no such peer.
    #[error("no such peer")]
    UnknownPeer,
    /// The peer has no session.
    #[error("no session with this peer")]
    NoSession,
    /// Too many wait already: the peer does not take them.
    #[error("too many messages wait for this peer")]
    TooMany,
    /// It would not fit a datagram.
    #[error("the message is longer than {MAX_CONTROL} bytes")]
    TooLong,
}

/// See the module.
#[derive(Default)]
pub(super) struct Messages {
    /// Messages that wait for their turn, and get their numbers with it.
    waiting: VecDeque<Message>,
    next_id: u32,
    seen: VecDeque<u32>,
    taken: usize,
}

impl Messages {
    /// Lets a message wait for its turn, until this time at most; false if too many do.
    pub(super) fn push(&mut self, bytes: &[u8], until: Option<Time>) -> bool {
        let has_room = self.waiting.len() < MAX_WAITING;
        if has_room {
            let bytes = bytes.into();
            self.waiting.push_back(Message {
                id: 0,
                bytes,
                until,
            });
        }
        has_room
    }

    /// True if one may go while so many are on their way. Those that nobody waits for any more are gone.
    pub(super) fn is_due(&mut self, now: Time, on_their_way: usize) -> bool {
        if on_their_way >= WINDOW {
            return false;
        }
        self.waiting.retain(|message| !message.is_late(now));
        !self.waiting.is_empty()
    }

    /// The next one, which is on its way from now on.
    pub(super) fn pop(&mut self) -> Option<Message> {
        let mut message = self.waiting.pop_front()?;
        message.id = self.next_id;
        self.next_id = message.id.wrapping_add(1);
        Some(message)
    }

    /// Takes a message of the peer's daemon, unless the owner has too many to deal with: then it is to come
    /// again, so nothing of it is remembered. False if it counts as not received.
    pub(super) fn receive(
        &mut self,
        journal: &mut Journal,
        peer: PeerId,
        (id, bytes): (u32, &[u8]),
    ) -> bool {
        if bytes.len() > MAX_CONTROL {
            journal.count(Counter::FrameMalformed);
            return true;
        }
        if self.seen.contains(&id) {
            return true;
        }
        if self.taken >= MAX_TAKEN {
            journal.count(Counter::ControlRefused);
            return false;
        }
        if self.seen.len() == SEEN {
            self.seen.pop_front();
        }
        self.seen.push_back(id);
        self.taken += 1;
        let (peer, bytes) = (peer.index(), bytes.to_vec());
        journal.events.push(Event::Control { peer, bytes });
        true
    }

    /// The owner has dealt with one.
    pub(super) fn on_done(&mut self) {
        self.taken = self.taken.saturating_sub(1);
    }

    /// The peer restarted: those that the old instance had not taken, oldest first, are for the new one.
    pub(super) fn restart(&mut self, unacknowledged: Vec<Message>) {
        for message in unacknowledged.into_iter().rev() {
            self.waiting.push_front(message);
        }
        self.seen.clear();
    }

    /// Numbers remembered, and messages with the owner.
    #[cfg(test)]
    pub(super) fn counts(&self) -> [usize; 2] {
        [self.seen.len(), self.taken]
    }
}
