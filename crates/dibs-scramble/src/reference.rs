//! The two versions the papers published and measured (2018, section IV; 2019, figures 8 to 11), as
//! baselines and as the definition the kernels are tested against.

use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::BUFFER_LEN;

/// The straightforward version: for each byte the XOR of the whole buffer is computed anew, and the
/// buffer is shifted by copying.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Straightforward {
    buffer: [u8; BUFFER_LEN],
}

impl Straightforward {
    /// One direction at the start of a stream, `initial` being the shift buffer, oldest byte first.
    pub fn new(initial: &[u8; BUFFER_LEN]) -> Self {
        Self { buffer: *initial }
    }

    /// Scrambles the next bytes of the stream.
    pub fn scramble(&mut self, buf: &mut [u8]) {
        for byte in buf {
            let plain = *byte;
            *byte ^= self.xor();
            self.push(plain);
        }
    }

    /// Descrambles the next bytes of the stream.
    pub fn descramble(&mut self, buf: &mut [u8]) {
        for byte in buf {
            *byte ^= self.xor();
            self.push(*byte);
        }
    }

    fn xor(&self) -> u8 {
        self.buffer.iter().fold(0, |xor, byte| xor ^ byte)
    }

    fn push(&mut self, plain: u8) {
        self.buffer.copy_within(1.., 0);
        self.buffer[BUFFER_LEN - 1] = plain;
    }
}

/// The revised version: a ring buffer, the index of its newest byte, and a running XOR.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Revised {
    ring: [u8; BUFFER_LEN],
    newest: usize,
    xor: u8,
}

impl Revised {
    /// One direction at the start of a stream, `initial` being the shift buffer, oldest byte first.
    pub fn new(initial: &[u8; BUFFER_LEN]) -> Self {
        let xor = initial.iter().fold(0, |xor, byte| xor ^ byte);
        Self {
            ring: *initial,
            newest: BUFFER_LEN - 1,
            xor,
        }
    }

    /// Scrambles the next bytes of the stream.
    pub fn scramble(&mut self, buf: &mut [u8]) {
        for byte in buf {
            let plain = *byte;
            *byte ^= self.xor;
            self.push(plain);
        }
    }

    /// Descrambles the next bytes of the stream.
    pub fn descramble(&mut self, buf: &mut [u8]) {
        for byte in buf {
            *byte ^= self.xor;
            self.push(*byte);
        }
    }

    fn push(&mut self, plain: u8) {
        self.newest = (self.newest + 1) % BUFFER_LEN;
        self.xor ^= self.ring[self.newest] ^ plain;
        self.ring[self.newest] = plain;
    }
}
