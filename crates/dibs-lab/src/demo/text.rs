//! The file that is sent: a text that anyone can read.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek as _, Write};

use sha2::{Digest as _, Sha256};

use anyhow::{Context as _, Result};

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

/// Writes a text of so many bytes to `file`, and returns its sum.
pub(super) fn write(file: &File, len: u64) -> io::Result<Sum> {
    let mut out = Summing {
        out: file,
        sum: Sha256::new(),
    };
    {
        let mut buffered = BufWriter::with_capacity(1 << 20, &mut out);
        let mut left = len;
        let mut line = Vec::new();
        for number in 1u64.. {
            line.clear();
            let sentence = SENTENCES[number as usize % SENTENCES.len()];
            writeln!(line, "{number:08}. Dear Bob, {sentence} Alice")?;
            line.truncate(left.min(line.len() as u64) as usize);
            buffered.write_all(&line)?;
            left -= line.len() as u64;
            if left == 0 {
                break;
            }
        }
        buffered.flush()?;
    }
    Ok(out.sum.finalize().into())
}

/// The sum of a file, read from its beginning.
pub(super) fn sum(file: &mut File) -> Result<Sum> {
    let mut sum = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    file.rewind().context("the received file")?;
    loop {
        match file.read(&mut buffer).context("the received file")? {
            0 => return Ok(sum.finalize().into()),
            read => sum.update(&buffer[..read]),
        }
    }
}

struct Summing<'a> {
    out: &'a File,
    sum: Sha256,
}

impl Write for Summing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_its_length_and_the_needle_everywhere() {
        let mut file = tempfile::tempfile().unwrap();
        let written = write(&file, 100_000).unwrap();
        assert_eq!(written, sum(&mut file).unwrap());
        let mut text = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), 100_000);
        for part in text.chunks_exact(256) {
            assert!(part.windows(NEEDLE.len()).any(|bytes| bytes == NEEDLE));
        }
    }
}
