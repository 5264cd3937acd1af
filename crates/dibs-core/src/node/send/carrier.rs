//! Carrier of a send: one path, or several that behave as one, each of which carries a share of what is split.

use dibs_wire::frame;
use smallvec::SmallVec;

use crate::bump::Split;
use crate::node::paths::PathSet;
use crate::session::{CLEAR_HEADER_LEN, OVERHEAD, TAG_LEN};

/// Bytes of a datagram beside the share in it.
pub(super) const SHARE_OVERHEAD: usize = OVERHEAD + frame::SHARE_LEN;
/// A whole begins with the length of its payload; payload and header block follow.
pub(super) const PREFIX: usize = 2;
/// Bytes of a piece beside its payload, usually less: of a datagram, and of what is split.
pub(super) const MAX_OVERHEAD: usize = 128;
const MAX_SPLIT_OVERHEAD: usize = 64;

/// The links of a set, by index of the share that each carries.
pub(super) type Links = SmallVec<[usize; 4]>;

/// One path, or a bundle of them.
pub(super) struct Carrier<'a> {
    /// Their indices among the links.
    pub(super) links: Links,
    /// Split that makes the shares for them.
    pub(super) split: Option<&'a dyn Split>,
    /// Bytes that each of them may carry now.
    pub(super) budget: usize,
    /// The longest datagram that all of them carry.
    pub(super) mtu: usize,
}

impl<'a> Carrier<'a> {
    /// One path, by its index among the links.
    pub(super) fn link(paths: &PathSet, link: usize, budget: usize) -> Self {
        Self {
            links: Links::from_slice(&[link]),
            split: None,
            budget,
            mtu: usize::from(paths[link].path.mtu()),
        }
    }

    /// Several, for the shares of what is split.
    pub(super) fn bundle(paths: &PathSet, links: Links, split: &'a dyn Split) -> Self {
        let mtus = links.iter().map(|at| paths[*at].path.mtu());
        let mtu = mtus.min().expect("a set has links").into();
        Self {
            links,
            split: Some(split),
            budget: usize::MAX,
            mtu,
        }
    }

    /// Bytes that each may carry in one send.
    pub(super) fn burst(&self, paths: &PathSet) -> usize {
        let quanta = self.links.iter().map(|at| paths[*at].path.quantum());
        let quantum = quanta.min().expect("a carrier has links");
        self.budget.min(quantum.max(self.mtu))
    }

    /// The longest piece: a datagram, or what becomes one for each path.
    pub(super) fn longest(&self) -> usize {
        self.split
            .map_or(self.mtu, |split| split.capacity(self.mtu - SHARE_OVERHEAD))
    }

    /// Payload of a piece, usually more.
    pub(super) fn usual_payload(&self) -> usize {
        let overhead = match self.split {
            Some(_) => MAX_SPLIT_OVERHEAD,
            None => MAX_OVERHEAD,
        };
        self.longest() - overhead
    }

    /// Bytes in front of a piece's payload.
    pub(super) const fn front(&self) -> usize {
        match self.split {
            Some(_) => PREFIX,
            None => CLEAR_HEADER_LEN,
        }
    }

    /// Bytes behind its header block.
    pub(super) const fn tag(&self) -> usize {
        match self.split {
            Some(_) => 0,
            None => TAG_LEN,
        }
    }

    /// Room for a header block without payload.
    pub(super) fn room(&self) -> usize {
        self.longest() - self.front() - self.tag()
    }
}
