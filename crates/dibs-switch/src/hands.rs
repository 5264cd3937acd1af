//! Connections that are on a bump neither by choice nor by a rule of this host's.

use std::collections::BTreeMap;

use crate::conns::Pair;

/// Which those are.
pub type Hands = BTreeMap<Pair, Handed>;

/// Where such a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// Never 0.
    pub bump: u8,
    /// Who put it there.
    pub by: Hand,
}

/// Who puts connections on bumps beside choices, and rules that the daemon can follow itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    /// The peer.
    Peer,
    /// A rule that only the kernel can follow.
    Rule,
    /// Another program.
    Other,
}
