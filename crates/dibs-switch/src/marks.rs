//! Connections that are on a bump neither by choice nor by a rule of this host's, and what their marks say.

use dibs_core::Time;

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

/// What we gave a connection's mark last, or took up from another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// 0: none.
    pub bump: u8,
    /// It has OVERRIDE.
    pub chosen: bool,
    /// Since when.
    pub at: Time,
}

/// What a connection's mark is to say, by what is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewMark {
    /// It has OVERRIDE.
    pub chosen: bool,
    /// It has LOCKED.
    pub locked: bool,
    /// The bump that it had before, as far as is known.
    pub was: Option<u8>,
}
