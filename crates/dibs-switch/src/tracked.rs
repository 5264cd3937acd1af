//! What conntrack has of connections on bumps, and what is amiss with it where they are locked.

use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use crate::marks::SeenMark;

/// Entry of conntrack, as far as there is anything to look at.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its mark.
    pub mark: SeenMark,
    /// Conntrack saw a RST of it.
    pub closed: bool,
    /// Conntrack saw both ends finish.
    pub finished: bool,
}

/// Correction of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// It gets LOCKED, as long as it is locked on this bump.
    Lock(BumpId),
    /// Its connection goes on: what had it closed was a plain RST, which was dropped, but after conntrack had seen it.
    Revive,
    /// It loses LOCKED: another connection of the same ends is not to inherit it.
    Unlock,
}

/// Entries that conntrack has of connections on bumps, as this host sends, in their order: there may be thousands, and
/// a hash table would be twice as large.
#[derive(Debug, Default)]
pub struct Tracked(Vec<(FlowKey, Entry)>);

impl Tracked {
    /// The last word on each connection counts.
    pub fn new(mut found: Vec<(FlowKey, Entry)>) -> Self {
        found.reverse();
        found.sort_by_key(|(pair, _)| *pair);
        found.dedup_by_key(|(pair, _)| *pair);
        Self(found)
    }

    /// The mark of a connection that is on a bump.
    pub fn mark(&self, pair: &FlowKey) -> Option<SeenMark> {
        let at = self.0.binary_search_by_key(pair, |(known, _)| *known);
        let (_, entry) = self.0[at.ok()?];
        Some(entry.mark).filter(|mark| mark.bump.is_some())
    }

    /// The bump that the kernel has a connection on.
    pub fn bump(&self, pair: &FlowKey) -> Option<BumpId> {
        self.mark(pair)?.bump
    }

    /// All of it.
    pub fn iter(&self) -> impl Iterator<Item = &(FlowKey, Entry)> {
        self.0.iter()
    }

    /// Forgets what is not on one of these bumps.
    pub fn retain_on(&mut self, carried: impl Fn(BumpId) -> bool) {
        self.0
            .retain(|(_, entry)| entry.mark.bump.is_some_and(&carried));
    }
}
