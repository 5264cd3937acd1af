//! What bytes look like to who does not understand them.

use std::collections::HashMap;

/// Bytes of a piece that counts as repeated.
const PIECE: usize = 4;

/// Figures of some bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Statistics {
    /// How many there are.
    pub bytes: u64,
    /// The part of them that is printable ASCII, a tab or the end of a line; 0.38 of random bytes.
    pub printable: f64,
    /// Shannon's entropy of single bytes, in bits; close to 8 of many random bytes.
    pub entropy: f64,
    /// Chi-square against equally frequent bytes; about 255 of random bytes, with a standard deviation of 23.
    pub chi_square: f64,
    /// The part of all pieces of four bytes that stood there before; close to none of random bytes.
    pub repeated: f64,
}

impl Statistics {
    /// Statistics of all these bytes together; pieces lie within one of them.
    pub fn of<'a>(all: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut counts = [0u64; 256];
        let mut seen: HashMap<[u8; PIECE], ()> = HashMap::new();
        let (mut pieces, mut repeated) = (0u64, 0u64);
        for bytes in all {
            for byte in bytes {
                counts[usize::from(*byte)] += 1;
            }
            for piece in bytes.windows(PIECE) {
                let piece = piece.try_into().expect("windows have this length");
                pieces += 1;
                repeated += u64::from(seen.insert(piece, ()).is_some());
            }
        }
        let bytes: u64 = counts.iter().sum();
        if bytes == 0 {
            return Self::default();
        }
        let all = bytes as f64;
        let printable: u64 = (0u8..=255)
            .filter(|byte| matches!(byte, b' '..=b'~' | b'\t' | b'\n' | b'\r'))
            .map(|byte| counts[usize::from(byte)])
            .sum();
        let shares = counts.iter().map(|count| *count as f64 / all);
        let entropy = shares.filter(|share| *share > 0.0);
        let expected = all / 256.0;
        let squares = counts
            .iter()
            .map(|count| (*count as f64 - expected).powi(2));
        Self {
            bytes,
            printable: printable as f64 / all,
            entropy: entropy.map(|share| -share * share.log2()).sum(),
            chi_square: squares.sum::<f64>() / expected,
            repeated: repeated as f64 / pieces.max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_even_bytes_differ_in_all_figures() {
        let even: Vec<u8> = (0..=255).cycle().take(1024).collect();
        let even = Statistics::of([&even[..256], &even[256..512]]);
        assert_eq!((even.bytes, even.entropy, even.chi_square), (512, 8.0, 0.0));
        assert_eq!(even.printable, 98.0 / 256.0);
        assert_eq!(even.repeated, 0.5);
        let text = Statistics::of([&b"to be or not to be, to be or not"[..]]);
        assert_eq!(text.printable, 1.0);
        assert!(text.entropy < 4.0 && text.repeated > 0.3, "{text:?}");
        assert_eq!(Statistics::of([]), Statistics::default());
    }
}
