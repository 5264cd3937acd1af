//! `seal`: each datagram is encrypted whole (docs/protocol.md, 4).

use super::{Bump, Kind, Method, Padding};

/// Number of [`seal`].
pub const SEAL: u8 = 3;

const PADDING: &str = "padding";

pub(super) const KIND: Kind = Kind {
    number: SEAL,
    name: "seal",
    warning: None,
    numbers: &[],
    flags: &[PADDING],
    method: |settings| {
        Ok(Method::Seal(match settings.flags.contains(PADDING) {
            true => Padding::Buckets,
            false => Padding::None,
        }))
    },
};

/// Authenticated encryption.
pub fn seal(padding: Padding) -> Bump {
    KIND.with(Method::Seal(padding))
}
