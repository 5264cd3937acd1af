//! What is wrong with a file, and where.

use std::fmt;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::path::Path;

/// Why a configuration was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("{file}: cannot be read: {reason}")]
    Read {
        /// The file as it was named.
        file: String,
        /// Reason, and what to do.
        reason: String,
    },
    /// The file says something that cannot stand.
    #[error(transparent)]
    Invalid(#[from] Box<Invalid>),
}

impl Error {
    pub(crate) fn unread(file: &Path, error: &io::Error) -> Self {
        Self::Read {
            file: file.display().to_string(),
            reason: format!("{error}{}", cure(error.kind())),
        }
    }
}

/// Advice to a user whose file cannot be read.
pub(crate) fn cure(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => ": dibsctl init makes one",
        ErrorKind::PermissionDenied => ": use sudo",
        _ => "",
    }
}

/// One fault of a file, with its place. Displays as `FILE:LINE:COLUMN: message; hint: hint`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The file as it was named.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// Fault, without a full stop.
    pub message: String,
    /// Cure that was probably meant.
    pub hint: Option<String>,
    source_line: String,
    width: usize,
}

impl Invalid {
    /// The fault at a range of bytes of `text`.
    pub(crate) fn at(
        file: &str,
        text: &str,
        span: Range<usize>,
        message: String,
        hint: Option<String>,
    ) -> Self {
        let start = text.floor_char_boundary(span.start);
        let end = text.floor_char_boundary(span.end.max(start));
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let source_line = text[line_start..].lines().next().unwrap_or("");
        let column = text[line_start..start].chars().count() + 1;
        let marked = text[start..end]
            .lines()
            .next()
            .unwrap_or("")
            .chars()
            .count();
        Invalid {
            file: file.to_owned(),
            line: text[..start].matches('\n').count() + 1,
            column,
            message,
            hint,
            source_line: source_line.chars().map(shown).collect(),
            width: marked.max(1),
        }
    }

    /// The line of the file with the fault underlined, two lines for a human reader.
    pub fn excerpt(&self) -> String {
        let number = self.line.to_string();
        // Tabs stay tabs below the line, so that the marks stand where they should.
        let indent: String = self
            .source_line
            .chars()
            .take(self.column - 1)
            .map(|c| if c == '\t' { '\t' } else { ' ' })
            .collect();
        let gutter = " ".repeat(number.len());
        let marks = "^".repeat(self.width);
        format!(
            "{number} | {}\n{gutter} | {indent}{marks}",
            self.source_line
        )
    }
}

/// What a terminal may be shown of a line.
fn shown(c: char) -> char {
    if c.is_control() && c != '\t' {
        char::REPLACEMENT_CHARACTER
    } else {
        c
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}: {}",
            self.file, self.line, self.column, self.message
        )?;
        match &self.hint {
            Some(hint) => write!(f, "; hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Invalid {}
