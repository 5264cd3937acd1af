//! Solo chunks that came before what was sent before them.

use std::collections::VecDeque;

use super::held::Store;
use super::{Epoch, Piece, Sink};
use crate::tcp_fields::OwnedFields;

/// Restored solo chunks that wait until what was sent before them is injected.
///
/// What TCP sends again may take a shorter path than what it sent before. Its kernel must not get it first: once it is
/// acknowledged, everything that was sent earlier and is not is taken for lost (RACK, RFC 8985), and sent again. Most
/// connections never have any.
#[derive(Debug, Default)]
pub(super) struct Overtaking(Option<Box<Queue>>);

#[derive(Debug, Default)]
struct Queue {
    /// As they came.
    pieces: VecDeque<Waiting>,
    /// What they have of the store.
    used: usize,
}

/// Where an epoch was when a solo chunk was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub(super) epoch: u32,
    /// The offset that came next.
    pub(super) upto: u64,
}

impl Awaited {
    /// Whether the epoch may still come there. One that another has followed perhaps ended before.
    pub(super) fn is_open(self, epochs: &[Epoch]) -> bool {
        let awaits = |e: &Epoch| !e.broken && e.front.next().is_some_and(|next| next < self.upto);
        let current = epochs.iter().max_by_key(|e| e.number);
        current.is_some_and(|e| e.number == self.epoch && awaits(e))
    }
}

#[derive(Debug)]
struct Waiting {
    awaited: Awaited,
    offset: u64,
    tcp: OwnedFields,
    bytes: Vec<u8>,
}

impl Overtaking {
    /// Room for the bytes of one more, restored; none if the store has none. It [waits](Self::wait_for) for something
    /// then, or is [retracted](Self::retract).
    pub(super) fn room(&mut self, piece: &Piece<'_>, store: &mut Store) -> Option<&mut [u8]> {
        let Queue { pieces, used } = self.0.get_or_insert_default().as_mut();
        let bytes = store.take(piece.bytes, used)?;
        pieces.push_back(Waiting {
            awaited: Awaited { epoch: 0, upto: 0 },
            offset: piece.offset,
            tcp: OwnedFields::new(piece.tcp),
            bytes,
        });
        Some(&mut pieces.back_mut()?.bytes)
    }

    /// The last one waits for this.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn wait_for(&mut self, awaited: Awaited) {
        let queue = self.0.as_deref_mut().expect("room was made");
        let last = queue.pieces.back_mut().expect("room was made");
        last.awaited = awaited;
    }

    /// The last one is nothing.
    pub(super) fn retract(&mut self, store: &mut Store) {
        if let Some(Queue { pieces, used }) = self.0.as_deref_mut()
            && let Some(piece) = pieces.pop_back()
        {
            store.give(piece.bytes, used);
        }
    }

    /// Injects those that wait for nothing any more.
    pub(super) fn inject(&mut self, epochs: &[Epoch], store: &mut Store, sink: &mut impl Sink) {
        self.inject_while(store, sink, |first| !first.is_open(epochs));
    }

    /// Injects them all.
    pub(super) fn inject_all(&mut self, store: &mut Store, sink: &mut impl Sink) {
        self.inject_while(store, sink, |_| true);
    }

    fn inject_while(
        &mut self,
        store: &mut Store,
        sink: &mut impl Sink,
        goes: impl Fn(Awaited) -> bool,
    ) {
        let Some(Queue { pieces, used }) = self.0.as_deref_mut() else {
            return;
        };
        while let Some(piece) = pieces.pop_front_if(|first| goes(first.awaited)) {
            let room = sink.room(piece.offset, &piece.tcp.get(), piece.bytes.len());
            room.copy_from_slice(&piece.bytes);
            sink.commit();
            store.give(piece.bytes, used);
        }
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        let queue = self.0.as_deref();
        queue.is_none_or(|queue| queue.pieces.is_empty())
    }

    /// Gives back the memory for what is not there.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() {
            self.0 = None;
        }
    }

    /// Drops them all: it has been too long.
    pub(super) fn forget_all(&mut self, store: &mut Store) {
        let Some(Queue { pieces, mut used }) = self.0.take().map(|queue| *queue) else {
            return;
        };
        store.abandoned += pieces.len() as u64;
        for piece in pieces {
            store.give(piece.bytes, &mut used);
        }
    }
}
