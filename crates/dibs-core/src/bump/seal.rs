//! `seal`: each datagram is encrypted whole (docs/protocol.md, 4).

use dibs_settings::BumpId;

use super::{Bump, Method, Padding};

/// Number of [`seal`].
pub const SEAL: BumpId = BumpId::SEAL;

/// Authenticated encryption.
pub fn seal(padding: Padding) -> Bump {
    Bump {
        number: SEAL,
        method: Method::Seal(padding),
    }
}
