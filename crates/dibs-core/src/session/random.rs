//! Randomness as the core sees it: an argument, never the system's generator.

use aws_lc_rs::hkdf;
use core::time::Duration;

use super::keys::{Secret, expand};

/// A cryptographically secure generator.
///
/// The daemon hands in the operating system's, the simulator a [`SeededRandom`].
pub trait Random {
    /// Fills `out` with unpredictable bytes.
    fn fill(&mut self, out: &mut [u8]);
}

impl<R: Random + ?Sized> Random for &mut R {
    fn fill(&mut self, out: &mut [u8]) {
        (**self).fill(out);
    }
}

/// A repeatable generator: as secret as its seed, and forgetting what it gave out.
///
/// HKDF-Expand (RFC 5869) with fast key erasure: the first 32 bytes of every output become the
/// next key.
pub struct SeededRandom {
    key: Secret,
}

impl SeededRandom {
    /// A generator whose whole output follows from `seed`.
    pub fn new(seed: [u8; 32]) -> Self {
        Self {
            key: Secret::new(seed),
        }
    }
}

impl Random for SeededRandom {
    fn fill(&mut self, out: &mut [u8]) {
        // HKDF-Expand gives at most 255 blocks of 32 bytes.
        const CHUNK: usize = 254 * 32;
        for chunk in out.chunks_mut(CHUNK) {
            let prk = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, self.key.as_bytes());
            let mut block = zeroize::Zeroizing::new(vec![0; 32 + chunk.len()]);
            expand(&prk, &[b"random"], &mut block);
            let (key, bytes) = block.split_at(32);
            self.key = Secret::from_slice(key);
            chunk.copy_from_slice(bytes);
        }
    }
}

/// Thirty-two bytes of `rng`.
pub(super) fn secret(rng: &mut dyn Random) -> Secret {
    let mut secret = Secret::new([0; 32]);
    rng.fill(secret.as_mut_bytes());
    secret
}

/// A uniform duration below `max`.
pub(super) fn jitter(rng: &mut dyn Random, max: Duration) -> Duration {
    let mut word = [0; 4];
    rng.fill(&mut word);
    let nanos = (max.as_nanos() * u128::from(u32::from_ne_bytes(word))) >> 32;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_follows_from_the_seed_alone() {
        let bytes = |seed, splits: &[usize]| {
            let mut rng = SeededRandom::new([seed; 32]);
            splits
                .iter()
                .map(|&n| {
                    let mut b = vec![0; n];
                    rng.fill(&mut b);
                    b
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(bytes(1, &[40, 20_000, 3]), bytes(1, &[40, 20_000, 3]));
        assert_ne!(bytes(1, &[40]), bytes(2, &[40]));
        let twice = bytes(1, &[32, 32]);
        assert_ne!(twice[0], twice[1], "the key moves on");
    }

    #[test]
    fn jitter_stays_below_its_bound() {
        let mut rng = SeededRandom::new([7; 32]);
        let max = Duration::from_millis(10);
        let drawn: Vec<_> = (0..200).map(|_| jitter(&mut rng, max)).collect();
        assert!(drawn.iter().all(|d| *d < max));
        assert!(drawn.iter().any(|d| *d > max / 2) && drawn.iter().any(|d| *d < max / 2));
    }
}
