//! `share`: secret sharing over the paths (docs/threat-model.md; MICSS for n of n, Shamir 1979 for k of n).

use std::sync::Arc;

pub use dibs_share::{InvalidScheme, Pads, Scheme};

use dibs_settings::BumpId;

use super::{Bump, Method, Split};

/// Number of [`share`].
pub const SHARE: BumpId = BumpId::SHARE;

/// Secret sharing over paths.
pub fn share(scheme: Scheme) -> Bump {
    Bump {
        number: SHARE,
        method: Method::Split(Arc::new(scheme)),
    }
}

impl Split for Scheme {
    fn shares(&self) -> u8 {
        Self::shares(*self)
    }

    fn needed(&self) -> u8 {
        Self::needed(*self)
    }

    fn capacity(&self, share: usize) -> usize {
        share
    }

    fn randomness(&self, len: usize) -> usize {
        Self::randomness(*self, len)
    }

    fn split(&self, secret: &[u8], random: &[u8], shares: &mut [&mut [u8]]) {
        Self::split(*self, secret, random, shares);
    }

    fn join(&self, shares: &[(u8, &[u8])], secret: &mut Vec<u8>) -> bool {
        secret.resize(shares.first().map_or(0, |(_, share)| share.len()), 0);
        Self::join(*self, shares, secret).is_ok()
    }
}
