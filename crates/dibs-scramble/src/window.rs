//! The state of one direction.

use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::BUFFER_LEN;

/// The last 64 plaintext bytes, oldest first, and their XOR.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub(crate) struct Window {
    pub(crate) bytes: [u8; BUFFER_LEN],
    pub(crate) xor: u8,
}

impl Window {
    pub(crate) fn new(bytes: &[u8; BUFFER_LEN]) -> Self {
        Self {
            bytes: *bytes,
            xor: bytes.iter().fold(0, |xor, byte| xor ^ byte),
        }
    }

    /// Moves on by `n` bytes, fewer than a block, given the block whose first `n` bytes they are in
    /// both forms.
    pub(crate) fn advance(&mut self, plain: &[u8; BUFFER_LEN], sent: &[u8; BUFFER_LEN], n: usize) {
        self.xor = sent[n - 1] ^ self.bytes[n - 1];
        self.bytes.copy_within(n.., 0);
        self.bytes[BUFFER_LEN - n..].copy_from_slice(&plain[..n]);
    }

    /// Moves on by any number of plaintext bytes.
    pub(crate) fn push(&mut self, plain: &[u8]) {
        let last = &plain[plain.len().saturating_sub(BUFFER_LEN)..];
        self.bytes.copy_within(last.len().., 0);
        self.bytes[BUFFER_LEN - last.len()..].copy_from_slice(last);
        self.xor = self.bytes.iter().fold(0, |xor, byte| xor ^ byte);
    }
}
