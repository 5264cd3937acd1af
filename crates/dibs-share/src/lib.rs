//! Splitting a secret into shares, for paths of which an observer may have some, and joining them.
//!
//! A [`Scheme`] says how many shares there are and how many of them give the secret back. Whoever
//! holds fewer learns nothing but its length, whatever they can compute.
//!
//! - All are needed: XOR sharing, as MICSS does it (Pohly and McDaniel 2014). All shares but the
//!   last are random pads; the last is the secret XOR the pads.
//! - Fewer are needed: Shamir's sharing ("How to share a secret", 1979) of each byte on its own, over
//!   GF(2^8) with the polynomial 0x11b, that of AES. The secret is the value at 0 of a polynomial
//!   whose other coefficients are random, and the share of index `i` its value at `x = i + 1`.
//!
//! Both are sums of slices, each multiplied by a public factor, and so is the way back. That sum is
//! what a [`Kernel`] computes, in a time that depends on lengths, indices and the scheme, and not on
//! a byte of a secret, a share or a pad.
//!
//! That fewer shares say nothing stands and falls with the random bytes: fresh for each split, and
//! from a generator that cannot be told from chance. [`Pads`] is one. The shares are then as strong
//! as that generator.

mod field;
mod kernel;
mod pads;
mod scheme;

pub use kernel::Kernel;
pub use pads::{Pads, SEED_LEN};
pub use scheme::{InvalidScheme, JoinError, MAX_SHARES, Scheme};
