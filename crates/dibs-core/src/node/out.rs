//! What leaves by a path.

use std::net::SocketAddr;

use super::paths::Link;
use crate::buffer::Buffer;
use crate::path_index::PathIndex;
use crate::slab::Key;

/// Where the bytes of a send lie.
pub(crate) enum Source {
    /// In the shared scratch buffer.
    Scratch,
    /// In a batch, its first bytes.
    Batch(Key, usize),
    /// In a buffer of its own, its first bytes.
    Once(Buffer, usize),
}

/// A send.
pub(crate) struct Out {
    pub(crate) path: PathIndex,
    pub(crate) to: SocketAddr,
    pub(crate) segment: usize,
    pub(crate) ect: bool,
    pub(crate) source: Source,
}

impl Out {
    pub(super) fn by(link: &Link, segment: usize, source: Source) -> Self {
        Self {
            path: link.local,
            to: link.remote,
            segment,
            ect: link.path.is_ect(),
            source,
        }
    }
}
