//! `share`: secret sharing over the paths (docs/threat-model.md; MICSS for n of n, Shamir 1979 for k of n).

use std::sync::Arc;

use dibs_share::MAX_SHARES;
pub use dibs_share::{InvalidScheme, Pads, Scheme};

use super::{Bump, Kind, Method, Settings, Split, Unfit};

/// Number of [`share`].
pub const SHARE: u8 = 2;

const SHARES: &str = "shares";
const NEEDED: &str = "needed";

pub(super) const KIND: Kind = Kind {
    number: SHARE,
    name: "share",
    warning: None,
    numbers: &[SHARES, NEEDED],
    flags: &[],
    method: |settings| Ok(Method::Split(Arc::new(scheme(settings)?))),
};

/// Secret sharing over paths.
pub fn share(scheme: Scheme) -> Bump {
    KIND.with(Method::Split(Arc::new(scheme)))
}

/// As many shares as paths, all needed, where nothing else is said.
fn scheme(settings: &Settings) -> Result<Scheme, Unfit> {
    let set = |key| settings.numbers.get(key).copied();
    let most = settings.paths.min(MAX_SHARES.into()) as u32;
    let shares = set(SHARES).unwrap_or(most.max(2));
    if set(SHARES).is_some() && !(2..=most).contains(&shares) {
        return Err(Unfit {
            key: SHARES,
            reason: format!("is {shares}, where the file has {} paths", settings.paths),
            hint: "each share needs a path of its own, and there are two at least",
        });
    }
    let needed = set(NEEDED).unwrap_or(shares);
    Scheme::new(as_u8(needed), as_u8(shares)).map_err(|_| Unfit {
        key: NEEDED,
        reason: format!("is {needed}, of {shares} shares"),
        hint: "2 at least, for one share would be the data, and no more than there are",
    })
}

/// What is too large stays so.
fn as_u8(number: u32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
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
