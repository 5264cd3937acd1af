//! The lists in which flows with something queued wait for their turn (RFC 8290).

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use crate::slab::Key;

/// One of the lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum List {
    /// Those that had nothing to send before.
    New,
    /// The others.
    Old,
    /// Those whose turn it was when there was no room on a trusted path, which they need.
    Strict,
}

/// The flows on each.
#[derive(Debug, Default)]
pub(in crate::node) struct Turns([VecDeque<Key>; 3]);

impl Turns {
    /// On all of them.
    pub(super) fn len(&self) -> usize {
        self.0.iter().map(VecDeque::len).sum()
    }
}

impl Index<List> for Turns {
    type Output = VecDeque<Key>;

    fn index(&self, list: List) -> &VecDeque<Key> {
        &self.0[list as usize]
    }
}

impl IndexMut<List> for Turns {
    fn index_mut(&mut self, list: List) -> &mut VecDeque<Key> {
        &mut self.0[list as usize]
    }
}
