//! Bytes that tell where they belong, so that an eavesdropper's recording can be searched for all of
//! a stream at once.

/// Bytes of a word.
const WORD: usize = 8;
/// No stream of a test is longer than this many words; what looks like a word and lies beyond is
/// chance.
const MOST_WORDS: u64 = 1 << 28;
/// Odd, and so with an inverse modulo 2^64.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const INVERSE: u64 = inverse(FACTOR);

/// An endless stream: each aligned word is an invertible mix of the seed and its own number.
#[derive(Clone, Copy, Debug)]
pub struct Plaintext {
    seed: u32,
}

impl Plaintext {
    /// The stream of a seed; the seeds of one test differ.
    pub fn new(seed: u32) -> Self {
        Self { seed }
    }

    /// Writes the bytes from `offset` on.
    pub fn fill(&self, offset: u64, bytes: &mut [u8]) {
        let mut number = offset / WORD as u64;
        let mut skip = (offset % WORD as u64) as usize;
        let mut rest = bytes;
        while !rest.is_empty() {
            let word = self.word(number);
            let len = rest.len().min(WORD - skip);
            rest[..len].copy_from_slice(&word[skip..][..len]);
            rest = &mut rest[len..];
            (number, skip) = (number + 1, 0);
        }
    }

    /// Place in the stream of a part that occurs in `bytes`; any part of 23 bytes holds two
    /// whole words. One alone tells nothing: of 2^36 words of ciphertext one is in the stream by chance,
    /// and all tests together hear more than a twentieth of that.
    pub fn find(&self, bytes: &[u8]) -> Option<u64> {
        (0..bytes.len().saturating_sub(2 * WORD - 1)).find_map(|at| {
            let number = self.number(&bytes[at..])?;
            (self.number(&bytes[at + WORD..]) == Some(number + 1)).then_some(number * WORD as u64)
        })
    }

    /// The number of the word that these bytes begin with, if it is of this stream.
    #[inline]
    fn number(&self, bytes: &[u8]) -> Option<u64> {
        let word = u64::from_le_bytes(*bytes.first_chunk()?);
        let mixed = fold(fold(word).wrapping_mul(INVERSE));
        let number = u64::from(mixed as u32);
        ((mixed >> 32) as u32 == self.seed && number < MOST_WORDS).then_some(number)
    }

    fn word(&self, number: u64) -> [u8; WORD] {
        assert!(number < MOST_WORDS, "the stream ends here");
        let mixed = u64::from(self.seed) << 32 | number;
        fold(fold(mixed).wrapping_mul(FACTOR)).to_le_bytes()
    }
}

/// Its own inverse.
#[inline]
const fn fold(word: u64) -> u64 {
    word ^ word >> 32
}

/// Newton's iteration doubles the correct low bits each time; an odd number is its own inverse in
/// the lowest three.
const fn inverse(odd: u64) -> u64 {
    let mut found = odd;
    let mut step = 0;
    while step < 5 {
        found = found.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(found)));
        step += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_23_bytes_is_found() {
        let stream = Plaintext::new(7);
        for offset in 4000..4016 {
            let mut bytes = [0; 23];
            stream.fill(offset, &mut bytes);
            let mut frame = vec![0xa5; 5];
            frame.extend(bytes);
            let found = stream.find(&frame).expect("two whole words");
            assert!((offset..offset + 8).contains(&found), "{offset} {found}");
            assert_eq!(Plaintext::new(8).find(&frame), None);
        }
    }

    #[test]
    fn a_word_by_chance_is_not_found() {
        let stream = Plaintext::new(7);
        for number in [0, 1, 4000, MOST_WORDS - 1] {
            let word = stream.word(number);
            let frame = [&[0xa5; 30][..], &word, &[0x5a; 30]].concat();
            assert_eq!(stream.find(&frame), None);
            // Nor are two that do not belong together.
            assert_eq!(stream.find(&[word, word].concat()), None);
        }
    }

    #[test]
    fn a_part_is_the_same_however_it_is_cut() {
        let stream = Plaintext::new(1);
        let mut whole = [0; 100];
        stream.fill(0, &mut whole);
        let mut part = [0; 50];
        stream.fill(33, &mut part);
        assert_eq!(part, whole[33..83]);
    }

    #[test]
    fn other_bytes_are_not_found() {
        let bytes: Vec<u8> = (0..1_000_000u32)
            .map(|n| (n.wrapping_mul(0x9e37_79b1) >> 24) as u8)
            .collect();
        assert_eq!(Plaintext::new(1).find(&bytes), None);
        assert_eq!(Plaintext::new(1).find(&[0; 64]), None);
    }
}
