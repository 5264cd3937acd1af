//! The test vectors of docs/protocol.md, so that document and code cannot drift apart.
//!
//! Checked twice: the code produces each of them, and so do the document's own rules, written down
//! once more in [`rules`] with nothing but the primitives. What stands between a rule and its result, which
//! the code does not show, is checked by its result.

mod frames;
mod rules;
mod session;

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A vector: its name in the document, and its bytes.
type Vector = (&'static str, Vec<u8>);

const DOCUMENT: &str = include_str!("../../../../docs/protocol.md");

/// The vectors of the document: `name = hex` lines in blocks fenced as `vectors`; an indented line
/// continues the one above.
fn documented() -> BTreeMap<&'static str, Vec<u8>> {
    let mut all: BTreeMap<_, Vec<u8>> = BTreeMap::new();
    let mut inside = false;
    let mut name = "";
    for line in DOCUMENT.lines() {
        if line.starts_with("```") {
            inside = line == "```vectors";
            continue;
        }
        if !inside {
            continue;
        }
        let digits = match line.split_once(" = ") {
            Some((new, digits)) => {
                name = new;
                assert!(
                    all.insert(name, Vec::new()).is_none(),
                    "{name} stands twice"
                );
                digits
            }
            None => line,
        };
        let bytes = all.get_mut(name).expect("a block begins with a name");
        bytes.extend(unhex(digits));
    }
    all
}

fn unhex(digits: &str) -> Vec<u8> {
    let digits = digits.trim().as_bytes();
    assert!(digits.len().is_multiple_of(2), "half a byte in a vector");
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).expect("hex digits are ASCII");
        u8::from_str_radix(pair, 16).expect("a vector is hexadecimal")
    };
    digits.chunks(2).map(byte).collect()
}

/// A vector as it stands in the document.
fn written((name, bytes): &Vector) -> String {
    let mut text = format!("{name} =");
    for (at, line) in bytes.chunks(40).enumerate() {
        text += if at == 0 { " " } else { "\n    " };
        for byte in line {
            write!(text, "{byte:02x}").expect("a String takes everything");
        }
    }
    text
}

#[test]
fn the_document_has_the_vectors_of_the_code() {
    let mut documented = documented();
    let mut wrong = String::new();
    let of_code = [session::vectors(), frames::vectors(), rules::steps()];
    for vector in of_code.iter().flatten() {
        if documented.remove(vector.0).as_ref() != Some(&vector.1) {
            wrong += &written(vector);
            wrong.push('\n');
        }
    }
    assert!(
        wrong.is_empty(),
        "docs/protocol.md lacks or contradicts:\n{wrong}"
    );
    assert!(
        documented.is_empty(),
        "nothing checks {:?} of docs/protocol.md",
        documented.keys()
    );
}
