//! Bytes for people to look at.

use std::fmt::Write as _;
use std::ops::Range;

/// Bytes of a line in hexadecimal, and of a line of text.
const WIDTH: usize = 16;
const LINE: usize = 96;

/// Bytes in hexadecimal and as text, as the papers show captures: at most so many lines.
pub fn hex(bytes: &[u8], lines: usize) -> String {
    let mut text = String::new();
    for (number, line) in bytes.chunks(WIDTH).take(lines).enumerate() {
        let mut hexadecimal = String::new();
        for byte in line {
            write!(hexadecimal, "{byte:02x} ").expect("a string takes it");
        }
        let readable = readable(line);
        let (offset, width) = (number * WIDTH, WIDTH * 3);
        writeln!(text, "  {offset:04x}  {hexadecimal:width$} {readable}")
            .expect("a string takes it");
    }
    text
}

/// Bytes as text, whatever they are; below what is uncertain stands a question mark each.
pub fn text(bytes: &[u8], uncertain: &[Range<usize>]) -> String {
    let doubted = |at: usize| uncertain.iter().any(|range| range.contains(&at));
    let mut out = String::new();
    let mut start = 0;
    while start < bytes.len() {
        let rest = &bytes[start..bytes.len().min(start + LINE)];
        let ends = rest.iter().position(|byte| *byte == b'\n');
        let length = ends.unwrap_or(rest.len());
        let line = &rest[..length];
        let spaced = |byte: &u8| if b"\t\r".contains(byte) { b' ' } else { *byte };
        let shown = readable(&line.iter().map(spaced).collect::<Vec<u8>>());
        writeln!(out, "  {}", shown.trim_end()).expect("a string takes it");
        let marks = (start..start + length).map(|at| if doubted(at) { '?' } else { ' ' });
        let marks: String = marks.collect();
        if !marks.trim_end().is_empty() {
            writeln!(out, "  {}", marks.trim_end()).expect("a string takes it");
        }
        start += length + usize::from(ends.is_some());
    }
    out
}

/// A character for each byte.
pub(crate) fn readable(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| printable(byte)).collect()
}

fn printable(byte: u8) -> char {
    match byte {
        b' '..=b'~' => char::from(byte),
        _ => '.',
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dumps_show_bytes_and_text() {
        let dump = hex(b"0123456789abcdef\x00\tZ", 6);
        let mut lines = dump.lines();
        assert_eq!(
            lines.next().unwrap(),
            "  0000  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  0123456789abcdef"
        );
        assert!(lines.next().unwrap().ends_with(" ..Z"));
        assert_eq!(hex(&[0; 4096], 6).lines().count(), 6);
    }

    #[test]
    fn doubts_are_marked_below() {
        let shown = text(b"the\tcat\nsat\x1b[2J", &[4..6, 9..10]);
        assert_eq!(shown, "  the cat\n      ??\n  sat.[2J\n   ?\n");
        assert_eq!(text(&[b'x'; 200], &[]).lines().count(), 3);
    }
}
