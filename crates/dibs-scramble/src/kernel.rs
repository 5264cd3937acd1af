//! The kernels, how one is chosen, and how they see a pass over the data.
//!
//! They work on blocks of 64 bytes, so that the plaintext 64 bytes back is the same byte of the
//! block before. That leaves, for scrambling, an XOR over the end of the block before and the
//! beginning of this one:
//!
//! ```text
//! B[i] = before[i..64] ^ plain[0..=i]
//! ```
//!
//! which depends on no other output, and for descrambling one recurrence of length 65 with 64 bytes
//! in parallel:
//!
//! ```text
//! Y = B ^ before,  plain = B ^ (Y moved up by one byte, its first byte being the running XOR)
//! ```

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pass;
mod portable;

use std::sync::LazyLock;

pub(crate) use pass::{Across, InPlace, Pass};

use crate::window::Window;

/// An implementation that this CPU can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Kernel {
    /// The kernels of this CPU, fastest first; the last one runs everywhere.
    pub fn available() -> impl Iterator<Item = Self> {
        let kinds = [
            #[cfg(target_arch = "x86_64")]
            avx512::detected().then_some(Kind::Avx512),
            #[cfg(target_arch = "x86_64")]
            is_x86_feature_detected!("avx2").then_some(Kind::Avx2),
            #[cfg(target_arch = "aarch64")]
            std::arch::is_aarch64_feature_detected!("neon").then_some(Kind::Neon),
            Some(Kind::Portable),
        ];
        kinds.into_iter().flatten().map(Self)
    }

    /// The fastest kernel of this CPU.
    pub fn best() -> Self {
        static BEST: LazyLock<Kernel> = LazyLock::new(|| {
            Kernel::available()
                .next()
                .expect("the portable kernel runs everywhere")
        });
        *BEST
    }

    /// A short name, such as `avx512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            Kind::Portable => "portable",
        }
    }

    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn scramble(self, window: &mut Window, pass: impl Pass) {
        match self.0 {
            // SAFETY: a kernel of this kind exists only where `available` found the CPU features.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => _ = unsafe { avx512::scramble::<false>(window, pass) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::scramble(window, pass) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe { neon::scramble(window, pass) },
            Kind::Portable => portable::scramble(window, pass),
        }
    }

    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn descramble(self, window: &mut Window, pass: impl Pass) {
        match self.0 {
            // SAFETY: a kernel of this kind exists only where `available` found the CPU features.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => _ = unsafe { avx512::descramble::<false>(window, pass) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { avx2::descramble(window, pass) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe { neon::descramble(window, pass) },
            Kind::Portable => portable::descramble(window, pass),
        }
    }

    /// Scrambles, and returns the CRC-32C of the plaintext; nothing if there is no kernel for both.
    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn scramble_summed(self, window: &mut Window, pass: impl Pass) -> Option<u32> {
        match self.0 {
            // SAFETY: a kernel of this kind exists only where `available` found the CPU features.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(unsafe { avx512::scramble::<true>(window, pass) }),
            _ => None,
        }
    }

    /// Descrambles, and returns the CRC-32C of the plaintext; nothing if there is no kernel for both.
    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn descramble_summed(self, window: &mut Window, pass: impl Pass) -> Option<u32> {
        match self.0 {
            // SAFETY: a kernel of this kind exists only where `available` found the CPU features.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(unsafe { avx512::descramble::<true>(window, pass) }),
            _ => None,
        }
    }
}
