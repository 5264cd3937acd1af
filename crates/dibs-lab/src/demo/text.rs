//! What is sent: a text that anyone can read.

use std::io::{self, BufWriter, Write};

use sha2::{Digest as _, Sha256};

/// In each line, hence in any 256 bytes of the text, and in nothing that is not the text.
pub(super) const NEEDLE: &[u8] = b"Dear Bob, ";

/// What the lines say, one after the other.
const SENTENCES: [&str; 8] = [
    "the harbour master will leave the gate open at nine; bring the blue folder.",
    "transfer 12,500 to the account in Bergen before the auditors come on Monday.",
    "the prototype is in locker 42, and the combination is my sister's birthday.",
    "do not take the ferry this time, they have somebody at the ticket office.",
    "the second ledger is behind the stove; burn it when you have read this.",
    "our friend at the registry wants twice as much, and I said that we would pay.",
    "meet me by the old lighthouse, and make sure that nobody follows you there.",
    "if the curtains are drawn, walk on and call the number that you know by heart.",
];

/// A SHA-256 sum.
pub(super) type Sum = [u8; 32];

/// Writes a text of so many bytes, and returns its sum.
pub(super) fn write(out: impl Write, len: u64) -> io::Result<Sum> {
    let mut out = BufWriter::with_capacity(256 << 10, out);
    let (mut sum, mut left) = (Sha256::new(), len);
    for (number, sentence) in (1u64..).zip(SENTENCES.iter().cycle()) {
        let line = format!("{number:08}. Dear Bob, {sentence} Alice\n");
        let line = &line.as_bytes()[..left.min(line.len() as u64) as usize];
        if line.is_empty() {
            break;
        }
        out.write_all(line)?;
        sum.update(line);
        left -= line.len() as u64;
    }
    out.flush()?;
    Ok(sum.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_its_length_and_the_needle_everywhere() {
        let mut text = Vec::new();
        let sum = write(&mut text, 100_000).unwrap();
        assert_eq!(sum[..], Sha256::digest(&text)[..]);
        assert_eq!(text.len(), 100_000);
        for part in text.chunks_exact(256) {
            assert!(part.windows(NEEDLE.len()).any(|bytes| bytes == NEEDLE));
        }
    }
}
