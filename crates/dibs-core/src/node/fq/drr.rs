//! The lists in which flows with something queued wait for their turn (RFC 8290).

use std::collections::VecDeque;

use crate::slab::Key;

/// One of the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum List {
    /// Flows that had nothing to send before.
    New,
    /// The others.
    Old,
    /// Flows whose turn it was when there was no room on a trusted path, which they need.
    TrustedOnly,
}

/// The flows on each.
#[derive(Debug, Default)]
pub(super) struct Lists([VecDeque<Key>; 3]);

impl Lists {
    /// On all of them.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }

    pub(super) fn len_of(&self, list: List) -> usize {
        self.0[list as usize].len()
    }

    pub(super) fn iter(&self, list: List) -> impl Iterator<Item = Key> {
        self.0[list as usize].iter().copied()
    }

    pub(super) fn front(&self, list: List) -> Option<Key> {
        self.0[list as usize].front().copied()
    }

    pub(super) fn push_back(&mut self, list: List, key: Key) {
        self.0[list as usize].push_back(key);
    }

    pub(super) fn pop_front(&mut self, list: List) {
        self.0[list as usize].pop_front();
    }

    /// The first of one list becomes the last of another one.
    pub(super) fn move_front(&mut self, from: List, to: List) {
        let key = self.0[from as usize].pop_front();
        self.0[to as usize].extend(key);
    }

    /// The first becomes the last.
    pub(super) fn rotate(&mut self, list: List) {
        self.0[list as usize].rotate_left(1);
    }
}
