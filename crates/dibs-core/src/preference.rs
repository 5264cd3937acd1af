//! How the user would have the paths used: the scheduler, the hint, and each path's role and limits.

use std::fmt;
use std::str::FromStr;

/// How new data is shared out over the paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheduler {
    /// Earliest predicted delivery within the windows; a slower path where the sender has enough under way for it.
    #[default]
    Balanced,
    /// The lowest smoothed round trip that has room, as MPTCP's default of old.
    LowestRtt,
    /// In turn, those that have room.
    RoundRobin,
    /// Each chunk by every path that its placement allows; the first copy counts.
    Redundant,
    /// The fastest path, or another one if what that takes meanwhile leaves the sender's window free for it
    /// (Ferlin et al. 2016).
    Blest,
}

impl Scheduler {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Balanced,
        Self::LowestRtt,
        Self::RoundRobin,
        Self::Redundant,
        Self::Blest,
    ];

    /// As the configuration names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Balanced => "balanced",
            Self::LowestRtt => "lowest-rtt",
            Self::RoundRobin => "round-robin",
            Self::Redundant => "redundant",
            Self::Blest => "blest",
        }
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheduler {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let mut all = Self::ALL.into_iter();
        all.find(|one| one.name() == name).ok_or(UnknownName)
    }
}

/// What a path is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Data.
    #[default]
    Primary,
    /// Data that the primary paths have no room for.
    Secondary,
    /// Data while no primary or secondary path may carry it.
    Backup,
    /// Nothing: as if its interface were down.
    Never,
}

impl Role {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Primary, Self::Secondary, Self::Backup, Self::Never];

    /// As the configuration names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Secondary => "secondary",
            Self::Backup => "backup",
            Self::Never => "never",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let mut all = Self::ALL.into_iter();
        all.find(|one| one.name() == name).ok_or(UnknownName)
    }
}

/// Nothing has such a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nothing has such a name")]
pub struct UnknownName;

/// What a local path may be used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What it is for.
    pub role: Role,
    /// Bytes of UDP payload a second that it sends at most.
    pub rate: Option<u64>,
    /// Its volume for this while is used up: as if its interface were down.
    pub spent: bool,
}

/// The user's hint (Liyanage et al. 2021): new data by this path as long as it is usable. It is soft: trust, roles
/// and paths that do not answer stand above it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hint {
    /// The local path.
    pub path: usize,
    /// Probes of it, when it stops answering, whose interval does not grow.
    pub weight: u32,
    /// It is usable while its smoothed round trip is at most so many times the least one of all paths.
    pub delta: f64,
}

impl Hint {
    /// [`weight`](Self::weight) where nothing is said.
    pub const WEIGHT: u32 = 100;
    /// [`delta`](Self::delta) where nothing is said.
    pub const DELTA: f64 = 2.0;
}

/// Why a path carries no new data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unused {
    /// The user says so.
    Never,
    /// Its volume is used up.
    Spent,
    /// Its interface is down.
    InterfaceDown,
    /// The peer has not answered yet.
    Joining,
    /// The peer does not answer by it.
    Unanswered,
    /// It is a backup, and others are there.
    Backup,
    /// The hint names another path.
    NotPreferred,
    /// The hint names it, but its round trip is too long for that.
    PreferredTooFar,
    /// The hint names it, but it did not answer in time.
    PreferredUnanswered,
    /// It is so much slower than the others that they deliver earlier what waits.
    Slower,
}

impl Unused {
    /// For the user.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Never => "its role is never",
            Self::Spent => "its volume is used up",
            Self::InterfaceDown => "its interface is down",
            Self::Joining => "the peer has not answered yet",
            Self::Unanswered => "the peer does not answer by it",
            Self::Backup => "it is a backup, and other paths are there",
            Self::NotPreferred => "another path is preferred",
            Self::PreferredTooFar => "preferred, but its round trip is too long beside the others'",
            Self::PreferredUnanswered => "preferred, but it did not answer in time",
            Self::Slower => "the other paths deliver earlier what waits",
        }
    }
}
