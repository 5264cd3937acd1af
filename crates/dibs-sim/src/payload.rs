//! What the applications send: every byte known from its place, and recognisable wherever it shows.
//!
//! A stream is made of blocks of 16 bytes, a random half and a function of it. So any 31 consecutive
//! bytes of it give themselves away without a copy of it at hand, and nothing else does (but for a
//! chance of 2^-64 a place). The function is not linear: the scrambler's XOR must not keep it.

use dibs_netem::rng::mix;

/// The second half of a block whose first half is this.
const fn second(first: u64) -> u64 {
    mix(first ^ 0x6b1d_c29e_53f4_08a7)
}

/// Look of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Recognisable blocks.
    Marked,
    /// Digits in a row, as iperf sends: redundant, so scrambling hides nothing of it.
    Digits,
}

/// A stream of bytes that depend on their offset only.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Tells streams apart.
    pub key: u64,
    /// How it looks.
    pub kind: Kind,
}

impl Stream {
    /// The bytes from `offset` on.
    pub fn fill(&self, offset: u64, out: &mut [u8]) {
        match self.kind {
            Kind::Marked => {
                let (mut at, mut out) = (offset, out);
                while !out.is_empty() {
                    let half = self.half(at / 8).to_le_bytes();
                    let half = &half[(at % 8) as usize..];
                    let len = half.len().min(out.len());
                    let (these, rest) = out.split_at_mut(len);
                    these.copy_from_slice(&half[..len]);
                    at += len as u64;
                    out = rest;
                }
            }
            Kind::Digits => {
                for (i, byte) in out.iter_mut().enumerate() {
                    *byte = b'0' + ((offset + i as u64) % 10) as u8;
                }
            }
        }
    }

    /// The eight bytes with this number.
    fn half(&self, number: u64) -> u64 {
        let first = mix(self.key ^ mix(number / 2));
        match number % 2 {
            0 => first,
            _ => second(first),
        }
    }
}

/// True if marked bytes stand anywhere in `bytes`.
pub fn shows(bytes: &[u8]) -> bool {
    bytes.windows(16).any(|w| second(word(w, 0)) == word(w, 8))
}

/// The same of what an observer gets by adding neighbours: at the start of an epoch, behind the
/// zeros of the initial buffer, that is the plaintext (docs/threat-model.md).
pub fn shows_unchained(bytes: &[u8]) -> bool {
    let sums: Vec<u8> = bytes.windows(2).map(|w| w[0] ^ w[1]).collect();
    shows(&sums)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(
        bytes[at..at + 8]
            .try_into()
            .expect("eight bytes were sliced"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_bytes_show_wherever_they_stand() {
        let stream = Stream {
            key: 7,
            kind: Kind::Marked,
        };
        for offset in 0..16 {
            let mut bytes = [0x55; 60];
            assert!(!shows(&bytes));
            stream.fill(offset, &mut bytes[13..44]);
            assert!(shows(&bytes));
            let chained: Vec<u8> = bytes
                .iter()
                .scan(0, |sum, b| {
                    *sum ^= b;
                    Some(*sum)
                })
                .collect();
            assert!(!shows(&chained) && shows_unchained(&chained));
        }
    }

    #[test]
    fn a_stream_does_not_depend_on_how_it_is_read() {
        let stream = Stream {
            key: 9,
            kind: Kind::Marked,
        };
        let mut whole = [0; 100];
        stream.fill(5, &mut whole);
        let mut parts = [0; 100];
        stream.fill(5, &mut parts[..33]);
        stream.fill(38, &mut parts[33..]);
        assert_eq!(whole, parts);
    }
}
