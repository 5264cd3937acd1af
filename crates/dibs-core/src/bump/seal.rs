//! `seal`: each datagram is encrypted whole (docs/protocol.md, 4).

use super::{Bump, Method, Padding};

/// Number of [`seal`].
pub const SEAL: u8 = 3;

/// Authenticated encryption.
pub fn seal(padding: Padding) -> Bump {
    Bump {
        number: SEAL,
        method: Method::Seal(padding),
    }
}
