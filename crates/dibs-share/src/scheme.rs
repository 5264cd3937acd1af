//! What a scheme is, how it splits and how it joins.

use crate::{Kernel, field};

/// Most shares of a scheme: dibs has no more paths.
pub const MAX_SHARES: u8 = 32;

const MAX: usize = MAX_SHARES as usize;

/// How a secret is split: `needed` (k) of `shares` (n) give it back; fewer tell nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    needed: u8,
    shares: u8,
}

/// Why there is no such scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidScheme {
    /// One share would be the secret.
    #[error("{needed} of {shares} shares: at least 2 have to be needed, as 1 would be the secret")]
    TooFewNeeded {
        /// k.
        needed: u8,
        /// n.
        shares: u8,
    },
    /// It could never be joined.
    #[error("{needed} of {shares} shares: no more can be needed than there are")]
    MoreNeededThanShares {
        /// k.
        needed: u8,
        /// n.
        shares: u8,
    },
    /// More than [`MAX_SHARES`].
    #[error("{shares} shares: at most {MAX_SHARES} are possible")]
    TooManyShares {
        /// n.
        shares: u8,
    },
}

/// Why shares do not give a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Fewer shares than the scheme needs.
    #[error("{given} shares, where {needed} are needed")]
    TooFew {
        /// How many there were.
        given: usize,
        /// k.
        needed: u8,
    },
    /// No share of the scheme has that index.
    #[error("a share of index {index}, where there are {shares}")]
    UnknownIndex {
        /// The index.
        index: u8,
        /// n.
        shares: u8,
    },
    /// Two shares of one index.
    #[error("two shares of index {index}")]
    Repeated {
        /// The index.
        index: u8,
    },
    /// Every share is as long as the secret.
    #[error("a share of {share} bytes of a secret of {secret}")]
    Length {
        /// Length of the share in bytes.
        share: usize,
        /// Length of the secret in bytes.
        secret: usize,
    },
}

impl Scheme {
    /// The scheme by which `needed` of `shares` shares give the secret.
    ///
    /// # Errors
    /// If fewer than 2 are needed, more than there are, or there are more than [`MAX_SHARES`].
    pub const fn new(needed: u8, shares: u8) -> Result<Self, InvalidScheme> {
        if shares > MAX_SHARES {
            Err(InvalidScheme::TooManyShares { shares })
        } else if needed < 2 {
            Err(InvalidScheme::TooFewNeeded { needed, shares })
        } else if needed > shares {
            Err(InvalidScheme::MoreNeededThanShares { needed, shares })
        } else {
            Ok(Self { needed, shares })
        }
    }

    /// How many shares give the secret (k).
    pub const fn needed(self) -> u8 {
        self.needed
    }

    /// How many shares there are (n).
    pub const fn shares(self) -> u8 {
        self.shares
    }

    /// How many random bytes it takes to split a secret of `len` bytes: `(k - 1) * len`.
    pub const fn randomness(self, len: usize) -> usize {
        (self.needed as usize - 1) * len
    }

    /// Splits `secret` into `shares`, by index, each as long as it. `random` has
    /// [`randomness`](Self::randomness) bytes of a generator fit for cryptography, used for this
    /// split and never again.
    ///
    /// # Panics
    /// If there are not as many shares or random bytes, or a share has another length.
    pub fn split(self, secret: &[u8], random: &[u8], shares: &mut [&mut [u8]]) {
        self.split_on(Kernel::best(), secret, random, shares);
    }

    /// The same on a kernel of the caller's choice.
    ///
    /// # Panics
    /// As [`split`](Self::split).
    pub fn split_on(self, kernel: Kernel, secret: &[u8], random: &[u8], shares: &mut [&mut [u8]]) {
        let len = secret.len();
        assert_eq!(
            random.len(),
            self.randomness(len),
            "a split takes the random bytes of its scheme"
        );
        assert_eq!(
            shares.len(),
            usize::from(self.shares),
            "a split gives the shares of its scheme"
        );
        assert!(
            shares.iter().all(|share| share.len() == len),
            "a share has the length of the secret"
        );

        let mut rows: [&[u8]; MAX] = [&[]; MAX];
        rows[0] = secret;
        for (j, row) in rows[1..self.needed.into()].iter_mut().enumerate() {
            *row = &random[j * len..][..len];
        }
        let rows = &rows[..self.needed.into()];
        if self.needed == self.shares {
            let (last, pads) = shares.split_last_mut().expect("a scheme has shares");
            for (pad, row) in pads.iter_mut().zip(&rows[1..]) {
                pad.copy_from_slice(row);
            }
            kernel.sum(last, &[1; MAX][..rows.len()], rows);
        } else {
            let factors = &mut [0; MAX][..rows.len()];
            for (share, x) in shares.iter_mut().zip(1..) {
                powers(x, factors);
                kernel.sum(share, factors, rows);
            }
        }
    }

    /// Joins shares, given with their indices, to the secret. The first `k` are taken, any further
    /// ones ignored.
    ///
    /// Nothing says whether the shares belong to one split: shares of several, or changed ones, give
    /// some other bytes.
    ///
    /// # Errors
    /// If there are fewer than `k`, or if one of the first `k` has no index of this scheme, that of
    /// another, or another length than `secret`, which then is as it was.
    pub fn join(self, shares: &[(u8, &[u8])], secret: &mut [u8]) -> Result<(), JoinError> {
        self.join_on(Kernel::best(), shares, secret)
    }

    /// The same on a kernel of the caller's choice.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_on(
        self,
        kernel: Kernel,
        shares: &[(u8, &[u8])],
        secret: &mut [u8],
    ) -> Result<(), JoinError> {
        let shares = shares.get(..self.needed.into()).ok_or(JoinError::TooFew {
            given: shares.len(),
            needed: self.needed,
        })?;
        let (mut seen, mut rows, mut places) = (0_u32, [&[][..]; MAX], [0; MAX]);
        for (i, &(index, share)) in shares.iter().enumerate() {
            if index >= self.shares {
                let shares = self.shares;
                return Err(JoinError::UnknownIndex { index, shares });
            }
            if seen >> index & 1 == 1 {
                return Err(JoinError::Repeated { index });
            }
            if share.len() != secret.len() {
                let (share, secret) = (share.len(), secret.len());
                return Err(JoinError::Length { share, secret });
            }
            seen |= 1 << index;
            rows[i] = share;
            places[i] = index + 1;
        }
        let (rows, places) = (&rows[..shares.len()], &places[..shares.len()]);
        if self.needed == self.shares {
            kernel.sum(secret, &[1; MAX][..rows.len()], rows);
        } else {
            let factors = &mut [0; MAX][..rows.len()];
            at_zero(places, factors);
            kernel.sum(secret, factors, rows);
        }
        Ok(())
    }
}

/// The powers of `x`, from that of 0 on.
fn powers(x: u8, powers: &mut [u8]) {
    let mut power = 1;
    for place in powers {
        *place = power;
        power = field::product(power, x);
    }
}

/// By what to multiply the values of a polynomial at `places` so that their sum is its value at 0
/// (Lagrange): for each place the product of `y / (y - x)` over the other places `y`.
fn at_zero(places: &[u8], factors: &mut [u8]) {
    for (factor, &x) in factors.iter_mut().zip(places) {
        let others = places.iter().filter(|&&y| y != x);
        *factor = others.fold(1, |product, &y| {
            field::product(product, field::quotient(y, y ^ x))
        });
    }
}
