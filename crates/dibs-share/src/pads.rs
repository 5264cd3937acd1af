//! The generator of random bytes.

use core::fmt;

use aes::{
    Aes256Enc,
    cipher::{Array, BlockCipherEncrypt, KeyInit},
};
use zeroize::{Zeroize, Zeroizing};

/// Length of a seed in bytes.
pub const SEED_LEN: usize = 32;

/// How much a key makes, the next key included, in bytes. Longer would cost cache, shorter would
/// cost time: with 4 KiB, schedules of keys are about a sixth of it.
const POOL_LEN: usize = 4096;

/// A fast generator of random bytes for [`Scheme::split`](crate::Scheme::split): Bernstein's
/// fast-key-erasure generator ("Fast-key-erasure random-number generators", 2017) on AES-256 in
/// counter mode.
///
/// A key makes 4 KiB by encrypting a counter from 0. The first 32 replace the key at
/// once; the rest are handed out and wiped as they are. So who sees its memory learns the bytes to
/// come, and none that were given. All is wiped when dropped.
///
/// The bytes depend on the seed only, and not on the sizes asked for. They are what the shares'
/// strength rests on: a seed is 32 bytes of the system's generator, of this one's use only. There is
/// no `Clone`, which would give the same bytes twice.
///
/// AES, as it is the fastest where the CPU has instructions for it. Elsewhere it is bitsliced by its
/// library and slow, but takes constant time as well.
pub struct Pads {
    /// The next key, then what is to be given; on the heap, so that moving leaves no copies.
    pool: Box<[u8; POOL_LEN]>,
    /// Where in the pool the bytes begin that were not given yet.
    next: usize,
}

impl Pads {
    /// A generator that continues from `seed`.
    pub fn new(seed: &[u8; SEED_LEN]) -> Self {
        let mut pool = Box::new([0; POOL_LEN]);
        pool[..SEED_LEN].copy_from_slice(seed);
        Self {
            pool,
            next: POOL_LEN,
        }
    }

    /// The same with the seed that `source` writes to where it stays, so that no copy is left.
    ///
    /// # Errors
    /// Those of `source`.
    pub fn seeded_by<E>(source: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
        let mut pads = Self::new(&[0; SEED_LEN]);
        source(&mut pads.pool[..SEED_LEN])?;
        Ok(pads)
    }

    /// Fills `out` with bytes that were not given before.
    pub fn fill(&mut self, mut out: &mut [u8]) {
        while !out.is_empty() {
            if self.next == POOL_LEN {
                self.refill();
            }
            let fresh = &mut self.pool[self.next..];
            let n = fresh.len().min(out.len());
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&fresh[..n]);
            fresh[..n].fill(0);
            zeroize::optimization_barrier(&fresh[..n]);
            self.next += n;
            out = later;
        }
    }

    fn refill(&mut self) {
        let mut key = Zeroizing::new([0; SEED_LEN]);
        key.copy_from_slice(&self.pool[..SEED_LEN]);
        // The blocks are counted in big-endian order (SP 800-38A, B.1).
        let cipher = Aes256Enc::new((&*key).into());
        let (blocks, _) = Array::slice_as_chunks_mut(&mut self.pool[..]);
        for (block, counter) in blocks.iter_mut().zip(0_u128..) {
            *block = counter.to_be_bytes().into();
        }
        cipher.encrypt_blocks(blocks);
        self.next = SEED_LEN;
    }
}

impl Drop for Pads {
    fn drop(&mut self) {
        self.pool.zeroize();
    }
}

impl zeroize::ZeroizeOnDrop for Pads {}

impl fmt::Debug for Pads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pads").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{POOL_LEN, Pads, SEED_LEN};

    #[test]
    fn a_source_gives_the_seed_or_its_error() {
        let bytes = |mut pads: Pads| {
            let mut bytes = [0; 100];
            pads.fill(&mut bytes);
            bytes
        };
        let seeded = Pads::seeded_by::<()>(|seed| {
            assert_eq!(seed.len(), SEED_LEN);
            seed.fill(3);
            Ok(())
        });
        assert_eq!(bytes(seeded.unwrap()), bytes(Pads::new(&[3; SEED_LEN])));
        assert_eq!(
            Pads::seeded_by(|_| Err("no entropy")).err(),
            Some("no entropy")
        );
    }

    #[test]
    fn nothing_that_was_given_is_kept() {
        let mut pads = Pads::new(&[1; SEED_LEN]);
        let mut given = [0; 100];
        pads.fill(&mut given);
        assert_ne!(pads.pool[..SEED_LEN], [1; SEED_LEN], "the key is replaced");
        assert_eq!(pads.pool[SEED_LEN..][..100], [0; 100], "what was given");
        assert_ne!(pads.pool[SEED_LEN + 100..][..100], [0; 100], "what is not");
        pads.fill(&mut [0; POOL_LEN - SEED_LEN - 100]);
        assert_eq!(pads.pool[SEED_LEN..], [0; POOL_LEN - SEED_LEN]);
    }
}
