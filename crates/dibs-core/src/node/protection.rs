//! What protected bytes on their way.

use dibs_settings::BumpId;

use crate::bump::{Bump, Method};

/// What protected the bytes of a chunk, a segment or a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Protection {
    /// Nothing: whoever was on the path may have made them.
    None,
    /// They were seen, not changed.
    Authentic,
    /// They were not seen either.
    Encrypted,
    /// They were put together of what several paths carried, for this bump.
    Split(BumpId),
}

impl Protection {
    /// True if a flow of this bump may have bytes that came like this: never less than it promises.
    pub(super) fn satisfies(self, bump: &Bump) -> bool {
        match bump.method {
            Method::Chain(_) => true,
            Method::Seal(_) => self == Self::Encrypted,
            Method::Split(_) => self == Self::Split(bump.number),
        }
    }
}
