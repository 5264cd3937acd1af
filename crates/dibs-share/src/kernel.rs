//! The kernels and how one is chosen.
//!
//! All compute the same: the sum, in GF(2^8), of slices times factors.

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod rows;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::LazyLock;

/// An implementation that this CPU can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// 64 bytes at a time, multiplied by an instruction.
    #[cfg(target_arch = "x86_64")]
    Gfni512,
    /// The same with 32 bytes.
    #[cfg(target_arch = "x86_64")]
    Gfni256,
    /// 32 bytes at a time, multiplied by looking up nibbles in registers.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same with 16 bytes.
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Kernel {
    /// The kernels of this CPU, fastest first; the last one runs everywhere.
    pub fn available() -> impl Iterator<Item = Self> {
        let kinds = [
            #[cfg(target_arch = "x86_64")]
            x86::gfni_512_detected().then_some(Kind::Gfni512),
            #[cfg(target_arch = "x86_64")]
            x86::gfni_256_detected().then_some(Kind::Gfni256),
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

    /// A short name, such as `gfni-512`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Gfni512 => "gfni-512",
            #[cfg(target_arch = "x86_64")]
            Kind::Gfni256 => "gfni-256",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            Kind::Portable => "portable",
        }
    }

    /// `out = factors[0] * rows[0] + factors[1] * rows[1] + ...`. The time depends on the lengths
    /// and the factors, which are public.
    ///
    /// # Panics
    /// If there are not as many factors as rows, or `out` and the rows differ in length.
    #[allow(unsafe_code)]
    #[inline]
    pub(crate) fn sum(self, out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
        assert_eq!(factors.len(), rows.len(), "each row has a factor");
        assert!(
            rows.iter().all(|row| row.len() == out.len()),
            "rows have the length of their sum"
        );
        match self.0 {
            // SAFETY: a kernel of this kind exists only where `available` found the CPU features.
            #[cfg(target_arch = "x86_64")]
            Kind::Gfni512 => unsafe { x86::sum_gfni_512(out, factors, rows) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Gfni256 => unsafe { x86::sum_gfni_256(out, factors, rows) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => unsafe { x86::sum_avx2(out, factors, rows) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => unsafe { neon::sum(out, factors, rows) },
            Kind::Portable => portable::sum(out, factors, rows),
        }
    }
}
