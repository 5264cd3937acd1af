//! Pieces that wait for what lies in front of them, and the memory that they lie in.

use std::collections::{BTreeMap, VecDeque};

use crate::tcp_fields::OwnedFields;
use crate::time::Time;

/// Blocks of memory kept for the next pieces: enough to serve a burst without the allocator, too few
/// to matter. Those of chunks that came in fragments are longer, and not kept.
pub(super) const FREE_BLOCKS: usize = 4096;
pub(super) const FREE_LEN: usize = 2048;

/// An epoch gets more of the store as long as it has at most so many times what is left: alone two thirds
/// of all.
const MOST_TO_LEFT: usize = 2;

/// Bytes that a held piece costs beside its own.
pub const HELD_OVERHEAD: usize = 160;

/// Bytes that a peer may make us hold out of order; told to it in the hello.
pub const STORE_LIMIT: usize = 32 << 20;

/// Memory for held bytes, shared by the streams of a peer and bounded.
#[derive(Debug)]
pub struct Store {
    pub(super) free: Vec<Vec<u8>>,
    held: usize,
    limit: usize,
    /// Pieces given up, not counted yet.
    pub(super) abandoned: u64,
}

impl Store {
    /// Holds at most `limit` bytes.
    pub const fn new(limit: usize) -> Self {
        Self {
            free: Vec::new(),
            held: 0,
            limit,
            abandoned: 0,
        }
    }

    /// How many pieces were given up, since this was asked last, before they could be restored.
    pub const fn take_abandoned(&mut self) -> u64 {
        std::mem::replace(&mut self.abandoned, 0)
    }

    /// Bytes held, overhead included.
    pub const fn held(&self) -> usize {
        self.held
    }

    /// Memory for bytes of an epoch that has `used` so much.
    pub(super) fn take(&mut self, bytes: &[u8], used: &mut usize) -> Option<Vec<u8>> {
        let cost = bytes.len() + HELD_OVERHEAD;
        let left = self.limit.checked_sub(self.held + cost)?;
        // One that waits for a gap leaves room for the others, as a shared switch buffer does.
        if *used + cost > MOST_TO_LEFT * left {
            return None;
        }
        *used += cost;
        self.held += cost;
        let mut block = self.free.pop().unwrap_or_default();
        block.extend_from_slice(bytes);
        Some(block)
    }

    pub(super) fn give(&mut self, mut block: Vec<u8>, used: &mut usize) {
        let cost = block.len() + HELD_OVERHEAD;
        *used -= cost;
        self.held -= cost;
        if self.free.len() < FREE_BLOCKS && block.capacity() <= FREE_LEN {
            block.clear();
            self.free.push(block);
        }
    }
}

/// A chained piece that waits for what lies in front of it.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) crc: u32,
    pub(super) withheld: bool,
    pub(super) tcp: OwnedFields,
    pub(super) bytes: Vec<u8>,
}

/// Chained pieces beyond `next`, by offset.
///
/// Behind a gap most come in order: those stand in a queue. The others stand in a tree, so that no
/// order of arrival is slow. Most connections never hold anything, and have none of it.
#[derive(Debug, Default)]
pub(super) struct Holding(Option<Box<Beyond>>);

#[derive(Debug, Default)]
struct Beyond {
    queue: VecDeque<(u64, Held)>,
    tree: BTreeMap<u64, Held>,
    /// The place up to which the stream was known when somebody looked, and the first time that he saw
    /// it there.
    stuck: Option<(Option<u64>, Time)>,
}

impl Holding {
    pub(super) fn is_empty(&self) -> bool {
        self.first().is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.0
            .as_deref()
            .map_or(0, |beyond| beyond.queue.len() + beyond.tree.len())
    }

    pub(super) fn contains(&self, offset: u64) -> bool {
        let Some(Beyond { queue, tree, .. }) = self.0.as_deref() else {
            return false;
        };
        let queued = queue.binary_search_by_key(&offset, |(at, _)| *at);
        queued.is_ok() || tree.contains_key(&offset)
    }

    /// Adds a piece at an offset where none is.
    pub(super) fn insert(&mut self, offset: u64, held: Held) {
        let Beyond { queue, tree, .. } = self.0.get_or_insert_default().as_mut();
        match queue.back() {
            Some((last, _)) if offset < *last => {
                tree.insert(offset, held);
            }
            _ => queue.push_back((offset, held)),
        }
    }

    /// The lowest offset.
    pub(super) fn first(&self) -> Option<u64> {
        let Beyond { queue, tree, .. } = self.0.as_deref()?;
        let queued = queue.front().map(|(at, _)| *at);
        let treed = tree.first_key_value().map(|(at, _)| *at);
        queued.into_iter().chain(treed).min()
    }

    /// The highest offset.
    pub(super) fn last(&self) -> Option<u64> {
        let Beyond { queue, tree, .. } = self.0.as_deref()?;
        let queued = queue.back().map(|(at, _)| *at);
        let treed = tree.last_key_value().map(|(at, _)| *at);
        queued.max(treed)
    }

    /// Takes the piece at the lowest offset.
    pub(super) fn pop_first(&mut self) -> Option<Held> {
        let first = self.first()?;
        let Beyond { queue, tree, .. } = self.0.as_deref_mut()?;
        if queue.front().is_some_and(|(at, _)| *at == first) {
            queue.pop_front().map(|(_, held)| held)
        } else {
            tree.pop_first().map(|(_, held)| held)
        }
    }

    /// Since when, as far as somebody looked, pieces wait for what comes at `next`.
    pub(super) fn waits_since(&mut self, now: Time, next: Option<u64>) -> Option<Time> {
        let empty = self.is_empty();
        let beyond = self.0.as_deref_mut()?;
        beyond.stuck = match beyond.stuck {
            _ if empty => None,
            Some((at, since)) if at == next => Some((at, since)),
            _ => Some((next, now)),
        };
        Some(beyond.stuck?.1)
    }

    /// Gives back the memory for what is not there.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() {
            self.0 = None;
        }
    }
}
