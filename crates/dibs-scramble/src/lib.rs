//! The scrambler of Kato et al. (2017, 2018, 2019): each byte of one direction of a connection is sent as
//! its XOR with the 64 plaintext bytes before it.
//!
//! With `b` the plaintext and `B` what is sent, both counted from the start of the stream, and with
//! the initial buffer standing at `b[-64..0]`:
//!
//! ```text
//! X[i] = b[i-64] ^ ... ^ b[i-1]        the running XOR
//! B[i] = b[i] ^ X[i]                   scrambling; descrambling is the same the other way
//! X[i+1] = B[i] ^ b[i-64]              what makes it cheap
//! ```
//!
//! It keeps the length, needs no key beyond the initial buffer, and deters casual capture; it is
//! not encryption. The last line also says that `B[i] ^ B[i-1] = b[i] ^ b[i-65]` for anyone who
//! holds consecutive bytes of `B`.
//!
//! [`Scrambler`] and [`Descrambler`] run on the fastest [`Kernel`] the CPU has.
//! [`reference`](mod@reference) has the two versions the papers measured.

use core::fmt;

mod kernel;
pub mod reference;
mod window;

use kernel::{Across, InPlace};
use window::Window;

pub use kernel::Kernel;

/// Length of the shift buffer, in bytes.
pub const BUFFER_LEN: usize = 64;

/// The shift buffer at the start of a stream, oldest byte first: zeros, then the 20 bytes of the
/// HMAC of the sender's key (2017, 2018, 2019, "Initial buffer").
pub fn initial_buffer(mac: &[u8; 20]) -> [u8; BUFFER_LEN] {
    let mut buffer = [0; BUFFER_LEN];
    buffer[BUFFER_LEN - mac.len()..].copy_from_slice(mac);
    buffer
}

/// Scrambles one direction of a stream. A clone continues from the same position.
#[derive(Clone)]
pub struct Scrambler {
    window: Window,
    kernel: Kernel,
}

impl Scrambler {
    /// A scrambler at the start of a stream, `initial` being the shift buffer, oldest byte first.
    pub fn new(initial: &[u8; BUFFER_LEN]) -> Self {
        Self::with_kernel(initial, Kernel::best())
    }

    /// The same on a kernel of the caller's choice.
    pub fn with_kernel(initial: &[u8; BUFFER_LEN], kernel: Kernel) -> Self {
        Self {
            window: Window::new(initial),
            kernel,
        }
    }

    /// Scrambles the next bytes of the stream from `src` to `dst`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn scramble(&mut self, src: &[u8], dst: &mut [u8]) {
        self.kernel
            .scramble(&mut self.window, Across::new(src, dst));
    }

    /// The same; returns the CRC-32C of `src`, in one pass where there is a kernel for it.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn scramble_summed(&mut self, src: &[u8], dst: &mut [u8]) -> u32 {
        let pass = Across::new(src, dst);
        match self.kernel.scramble_summed(&mut self.window, pass) {
            Some(crc) => crc,
            None => {
                self.scramble(src, dst);
                crc_fast::crc32_iscsi(src)
            }
        }
    }

    /// Scrambles the next bytes of the stream where they are.
    pub fn scramble_in_place(&mut self, buf: &mut [u8]) {
        self.kernel.scramble(&mut self.window, InPlace::new(buf));
    }
}

impl fmt::Debug for Scrambler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state is plaintext.
        f.debug_struct("Scrambler").finish_non_exhaustive()
    }
}

/// Descrambles one direction of a stream. A clone continues from the same position.
#[derive(Clone)]
pub struct Descrambler {
    window: Window,
    kernel: Kernel,
}

impl Descrambler {
    /// A descrambler at the start of a stream, `initial` being the sender's shift buffer, oldest
    /// byte first.
    pub fn new(initial: &[u8; BUFFER_LEN]) -> Self {
        Self::with_kernel(initial, Kernel::best())
    }

    /// The same on a kernel of the caller's choice.
    pub fn with_kernel(initial: &[u8; BUFFER_LEN], kernel: Kernel) -> Self {
        Self {
            window: Window::new(initial),
            kernel,
        }
    }

    /// Descrambles the next bytes of the stream from `src` to `dst`.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn descramble(&mut self, src: &[u8], dst: &mut [u8]) {
        self.kernel
            .descramble(&mut self.window, Across::new(src, dst));
    }

    /// The same; returns the CRC-32C of what is now in `dst`, in one pass where there is a kernel for
    /// it.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn descramble_summed(&mut self, src: &[u8], dst: &mut [u8]) -> u32 {
        let pass = Across::new(src, dst);
        match self.kernel.descramble_summed(&mut self.window, pass) {
            Some(crc) => crc,
            None => {
                self.descramble(src, dst);
                crc_fast::crc32_iscsi(dst)
            }
        }
    }

    /// Moves on over bytes of the stream whose plaintext has come another way.
    pub fn advance(&mut self, plain: &[u8]) {
        self.window.push(plain);
    }

    /// Descrambles the next bytes of the stream where they are.
    pub fn descramble_in_place(&mut self, buf: &mut [u8]) {
        self.kernel.descramble(&mut self.window, InPlace::new(buf));
    }
}

impl fmt::Debug for Descrambler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descrambler").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{BUFFER_LEN, Descrambler, Scrambler};

    #[test]
    fn bytes_that_came_another_way_are_passed_over() {
        let plain: Vec<u8> = (0..400u32).map(|i| (i * 37 + 5) as u8).collect();
        for gap in [1, 5, 63, 64, 65, 200] {
            let mut sent = vec![0; plain.len()];
            Scrambler::new(&[7; BUFFER_LEN]).scramble(&plain, &mut sent);
            let mut descrambler = Descrambler::new(&[7; BUFFER_LEN]);
            let mut out = vec![0; 100];
            descrambler.descramble(&sent[..100], &mut out);
            descrambler.advance(&plain[100..100 + gap]);
            let mut rest = vec![0; plain.len() - 100 - gap];
            descrambler.descramble(&sent[100 + gap..], &mut rest);
            assert_eq!(rest, plain[100 + gap..], "gap of {gap}");
        }
    }
}
