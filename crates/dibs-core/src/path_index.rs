//! Which local path.

use dibs_settings::Hint;

/// The place of a local path in the configuration. On the wire a path to a peer has an [id](crate::session::PathId), and
/// among the paths to that peer another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathIndex(usize);

impl PathIndex {
    /// Counted from 0.
    pub const fn new(index: usize) -> Self {
        Self(index)
    }

    /// Counted from 0.
    pub const fn get(self) -> usize {
        self.0
    }

    /// True if the user would have new data go by it.
    pub fn is_preferred(self, hint: &Hint) -> bool {
        self.0 == hint.path
    }
}
