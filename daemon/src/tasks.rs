//! What goes on by itself.

pub(crate) mod host;
pub(crate) mod names;
pub(crate) mod notices;
pub(crate) mod sweep;
