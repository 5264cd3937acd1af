//! Faults of texts that users write, and what they probably meant.

use std::fmt;

/// Fault of a value: the rest of the sentence after its key, and a hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Without a full stop.
    pub message: String,
    /// Advice.
    pub hint: Option<String>,
}

impl Wrong {
    /// A fault with advice.
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Wrong {
            message: message.into(),
            hint: Some(hint.into()),
        }
    }

    /// A fault that says itself what to do.
    pub fn bare(message: impl Into<String>) -> Self {
        Wrong {
            message: message.into(),
            hint: None,
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, ": {hint}"),
            None => Ok(()),
        }
    }
}

/// Fault of a word that is none of `known`.
pub fn no_such_word(word: &str, known: &[&str]) -> Wrong {
    Wrong::new(
        format!("cannot be \"{}\"", word.escape_debug()),
        meant(word, known),
    )
}

/// The hint for a word that is none of `known`: the nearest, or all.
pub fn meant(word: &str, known: &[&str]) -> String {
    let nearest = known
        .iter()
        .map(|&other| (distance(word, other), other))
        .min();
    match nearest {
        Some((far, other)) if far <= 1 + other.len() / 4 => format!("did you mean \"{other}\"?"),
        _ => format!("known are {}", known.join(", ")),
    }
}

/// Levenshtein distance, in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_edits() {
        for (a, b, edits) in [("", "abc", 3), ("port", "port", 0), ("prot", "port", 2)] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
            assert_eq!(distance(b, a), edits, "{b} {a}");
        }
    }

    #[test]
    fn hint_names_the_nearest_or_all() {
        let known = ["port", "mark_mask"];
        assert_eq!(meant("mark_msk", &known), "did you mean \"mark_mask\"?");
        assert_eq!(meant("colour", &known), "known are port, mark_mask");
    }
}
