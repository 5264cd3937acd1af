//! Where a chain stands, and what came by solo chunks beyond.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use super::held::Store;
use crate::bump::Decode;

/// Pieces of plaintext of solo chunks that an epoch keeps, at most: more than a run of
/// retransmissions has before it becomes an epoch.
pub(super) const MAX_PLAIN: usize = 4096;

/// The plaintext of a solo chunk that the chain has still to pass over.
#[derive(Debug)]
struct Plain {
    end: u64,
    bytes: Vec<u8>,
}

/// How far the stream of an epoch is known. Most connections never have plain bytes, and nothing for them.
#[derive(Debug, Default)]
pub(super) struct Front {
    /// Next offset of the chain; none until its first chunk came and may go on. It never goes back.
    next: Option<u64>,
    /// None without `next`.
    ahead: Option<Box<Ahead>>,
}

/// What came by solo chunks beyond `next`.
///
/// A peer may send thousands of tiny solo chunks, so none makes us walk through all that is kept: how far
/// they reach is a running number. A piece is looked at when it comes, when the stream becomes known up
/// to it, and when it goes.
#[derive(Debug, Default)]
struct Ahead {
    /// `next`, and the plain bytes that join it. What begins up to here ends up to here.
    reach: u64,
    /// By offset; may overlap.
    plain: BTreeMap<u64, Plain>,
    /// How often a piece was looked at.
    #[cfg(test)]
    looks: usize,
}

impl Front {
    /// Where the chain stands.
    pub(super) const fn next(&self) -> Option<u64> {
        self.next
    }

    /// How far the stream is known: up to `next`, and over the plain bytes that join it.
    pub(super) fn reach(&self) -> Option<u64> {
        self.ahead
            .as_deref()
            .map_or(self.next, |ahead| Some(ahead.reach))
    }

    /// How often pieces were looked at.
    #[cfg(test)]
    pub(super) fn looks(&self) -> usize {
        self.ahead.as_deref().map_or(0, |ahead| ahead.looks)
    }

    /// The chain stands at `to`, or beyond it already.
    pub(super) fn move_to(&mut self, to: u64) {
        self.next = self.next.max(Some(to));
        if let Some(ahead) = &mut self.ahead {
            ahead.reach_to(to);
        }
    }

    /// Keeps the plaintext of a solo chunk if the chain still has to pass it.
    pub(super) fn keep(
        &mut self,
        (offset, end): (u64, u64),
        bytes: &[u8],
        store: &mut Store,
        used: &mut usize,
    ) {
        let Some(next) = self.next.filter(|next| end > *next) else {
            return;
        };
        let ahead = self.ahead.get_or_insert_with(|| {
            Box::new(Ahead {
                reach: next,
                ..Ahead::default()
            })
        });
        match ahead.plain.get(&offset) {
            Some(known) if known.end >= end => return,
            None if ahead.plain.len() == MAX_PLAIN => return,
            _ => {}
        }
        // Without room the chain may break later, and says so then.
        let Some(bytes) = store.take(bytes, used) else {
            return;
        };
        if let Some(shorter) = ahead.plain.insert(offset, Plain { end, bytes }) {
            store.give(shorter.bytes, used);
        }
        if offset <= ahead.reach {
            ahead.reach_to(end);
        }
    }

    /// Moves the chain on to `target`, which plain bytes reach.
    pub(super) fn pass_to(
        &mut self,
        target: u64,
        decoder: Option<&mut (dyn Decode + 'static)>,
        store: &mut Store,
        used: &mut usize,
    ) {
        let next = self.next.expect("the chain has begun");
        if next < target {
            let ahead = self.ahead.as_mut().expect("plain bytes reach up");
            ahead.pass(next, target, decoder, store, used);
        }
        self.move_to(target);
    }

    /// Forgets what the chain has passed.
    pub(super) fn forget_passed(&mut self, store: &mut Store, used: &mut usize) {
        let (Some(next), Some(ahead)) = (self.next, &mut self.ahead) else {
            return;
        };
        while let Some((&offset, plain)) = ahead.plain.first_key_value()
            && plain.end <= next
        {
            ahead.forget(offset, store, used);
        }
    }

    /// Forgets what begins at `from` or behind, which is not known yet.
    pub(super) fn forget_from(&mut self, from: u64, store: &mut Store, used: &mut usize) {
        let Some(ahead) = &mut self.ahead else { return };
        debug_assert!(from > ahead.reach, "what is known is not forgotten alone");
        while let Some((&offset, _)) = ahead.plain.last_key_value()
            && offset >= from
        {
            ahead.forget(offset, store, used);
        }
    }

    /// Forgets all that lies beyond `next`.
    pub(super) fn forget_all(&mut self, store: &mut Store, used: &mut usize) {
        let Some(mut ahead) = self.ahead.take() else {
            return;
        };
        while let Some((_, plain)) = ahead.plain.pop_first() {
            store.give(plain.bytes, used);
        }
    }

    /// Gives back the memory for what is not there.
    pub(super) fn shrink(&mut self) {
        self.ahead.take_if(|ahead| ahead.plain.is_empty());
    }
}

impl Ahead {
    /// The stream is known up to `to`, and over what joins that.
    fn reach_to(&mut self, to: u64) {
        if to <= self.reach {
            return;
        }
        let known = std::mem::replace(&mut self.reach, to);
        for (offset, plain) in self.plain.range((Excluded(known), Unbounded)) {
            #[cfg(test)]
            (self.looks += 1);
            if *offset > self.reach {
                break;
            }
            self.reach = self.reach.max(plain.end);
        }
    }

    /// Tells the decoder the bytes from `next` to `target`, and forgets the pieces that end there.
    fn pass(
        &mut self,
        mut next: u64,
        target: u64,
        mut decoder: Option<&mut (dyn Decode + 'static)>,
        store: &mut Store,
        used: &mut usize,
    ) {
        while next < target {
            let (&offset, plain) = self.plain.first_key_value().expect("plain bytes reach up");
            let len = plain.bytes.len() as u64;
            let from = next.saturating_sub(offset).min(len) as usize;
            let to = (target - offset).min(len) as usize;
            if let Some(decoder) = &mut decoder {
                decoder.advance(&plain.bytes[from..to]);
            }
            next = next.max(plain.end.min(target));
            if plain.end > target {
                break;
            }
            self.forget(offset, store, used);
        }
    }

    fn forget(&mut self, offset: u64, store: &mut Store, used: &mut usize) {
        #[cfg(test)]
        (self.looks += 1);
        let plain = self.plain.remove(&offset).expect("the caller saw it");
        store.give(plain.bytes, used);
    }
}
