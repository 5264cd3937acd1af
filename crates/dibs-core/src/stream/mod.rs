//! The stream of one direction of one connection (docs/protocol.md, 6).
//!
//! [`tx`] decides where each byte that the local kernel sends stands in the stream and which epoch
//! carries it; [`rx`] restores what arrives, in whatever order, and hands it on in stream order.

pub mod rx;
pub mod tx;

/// Most bytes in front of the newest byte that a TCP window can reach back (RFC 7323, 2.3).
pub(crate) const MAX_WINDOW: i64 = 1 << 30;
