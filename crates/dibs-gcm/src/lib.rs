//! AES-256-GCM (NIST SP 800-38D, 96-bit nonces, 128-bit tags) for datagrams of which nearly all is
//! associated data and a few dozen bytes are text.
//!
//! GHASH of `n` blocks is a polynomial in the hash key `H`:
//!
//! ```text
//! S = X[1] H^n + X[2] H^(n-1) + ... + X[n] H
//! ```
//!
//! Libraries multiply by a few powers and reduce after each group, as their inputs have any length.
//! Here a key has so many powers that a datagram is one sum of independent carry-less products with
//! one reduction at its end, while AES of the few blocks of text runs beside it.
//!
//! By hand because a library takes three times as long for such a datagram: 186 ns against 54 (docs/performance.md).
//!
//! Only for CPUs that have the vectors: elsewhere there is no [`Key`], and callers take a library's
//! AES-256-GCM, which gives the same bytes.

use core::fmt;

#[cfg(target_arch = "x86_64")]
#[path = "avx512.rs"]
mod kernel;
#[cfg(not(target_arch = "x86_64"))]
#[path = "absent.rs"]
mod kernel;

/// Length of a key in bytes.
pub const KEY_LEN: usize = 32;
/// Length of a nonce in bytes.
pub const NONCE_LEN: usize = 12;
/// Length of a tag in bytes.
pub const TAG_LEN: usize = 16;
/// The longest text in bytes (SP 800-38D, 5.2.1.1).
pub const MAX_TEXT_LEN: u64 = (1 << 36) - 32;

/// A key of AES-256-GCM with everything derived from it, wiped when dropped.
///
/// It lies on the heap, so that moving it leaves no copies behind.
pub struct Key(Box<kernel::Schedule>);

impl Key {
    /// The schedule of `key`; `None` if this CPU lacks the vector instructions.
    pub fn new(key: &[u8; KEY_LEN]) -> Option<Self> {
        kernel::Schedule::new(key).map(Self)
    }

    /// Encrypts `text` where it is, and returns the tag over `aad` and it. The caller never uses
    /// `nonce` twice under one key.
    ///
    /// # Panics
    /// If `text` is longer than [`MAX_TEXT_LEN`].
    pub fn seal(&self, nonce: &[u8; NONCE_LEN], aad: &[u8], text: &mut [u8]) -> [u8; TAG_LEN] {
        assert!(text.len() as u64 <= MAX_TEXT_LEN, "a text that GCM allows");
        self.0.seal(nonce, aad, text)
    }

    /// True if `tag` is that of `aad` and `text`; only then `text` is decrypted where it is, else it
    /// stays as it was.
    #[must_use]
    pub fn open(
        &self,
        nonce: &[u8; NONCE_LEN],
        aad: &[u8],
        text: &mut [u8],
        tag: &[u8; TAG_LEN],
    ) -> bool {
        text.len() as u64 <= MAX_TEXT_LEN && self.0.open(nonce, aad, text, tag)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").finish_non_exhaustive()
    }
}
