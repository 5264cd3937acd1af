//! Connections that are on a bump neither by choice nor by a rule of this host's, and what their marks say.

use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;

/// What came by a bump after its connection had left it does not pull it back for so long.
pub const STRAGGLERS: Duration = Duration::from_secs(5);

/// Where such a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// The bump.
    pub bump: BumpId,
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
    /// Nobody: it was to go to plain, and plain does not carry it.
    Kept,
}

/// What we gave a connection's mark last, or took up from another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Its bump, if it has one.
    pub bump: Option<BumpId>,
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
    pub was: Option<BumpId>,
}

/// What the kernel says that a connection's mark is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenMark {
    /// Its bump, if it has one.
    pub bump: Option<BumpId>,
    /// It has OVERRIDE.
    pub chosen: bool,
    /// It has LOCKED.
    pub locked: bool,
    /// This host carries its bump, if it has one.
    pub carried: bool,
    /// Events of other things leave a mark of 0 out.
    pub told: bool,
}

/// What a mark comes to that our record does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Another program chose so.
    Chosen,
    /// It was cleared with a bump that went, or by hand: the choice outlives that.
    Lost,
    /// It is on its bump only for what came by it after it had left.
    Straggler,
    /// Another program, or a rule that takes it from another bump, has it there: the peer does not follow by itself.
    News,
    /// A rule of ours has it there, or what came from the peer.
    Known,
}
