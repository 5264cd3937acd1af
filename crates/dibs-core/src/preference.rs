//! What a path may be used for, and why it is not used.

use core::num::NonZeroU64;

use dibs_settings::Role;

/// Usage of a local path, as the user lets it be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Role among the paths.
    pub role: Role,
    /// Bytes of UDP payload a second that it sends at most.
    pub rate: Option<NonZeroU64>,
    /// Its volume for this while is used up: it carries nothing of connections, in either direction.
    pub spent: bool,
}

/// Why a path carries no new data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unused {
    /// The user says so.
    Never,
    /// Its volume is used up.
    Spent,
    /// The peer says that its volume is used up there.
    SpentThere,
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
            Self::Never => "its role is off",
            Self::Spent => "its data cap is used up",
            Self::SpentThere => "its data cap is used up at the peer",
            Self::InterfaceDown => "its interface is down",
            Self::Joining => "the peer has not answered yet",
            Self::Unanswered => "the peer does not answer over it",
            Self::Backup => "it is a backup, and other paths work",
            Self::NotPreferred => "another path is preferred",
            Self::PreferredTooFar => "preferred, but its round trip is too long",
            Self::PreferredUnanswered => "preferred, but it did not answer in time",
            Self::Slower => "other paths deliver earlier what waits",
        }
    }
}
