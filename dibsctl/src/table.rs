//! Aligned columns.

use std::fmt;

use crate::units::printable;

/// Columns under headers. A header that starts with `>` has its column flush right; a column
/// without any content is left out.
pub(crate) struct Table {
    pub(crate) headers: Vec<&'static str>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// A table of these things, one a row: each column by its header, and what a thing has there.
macro_rules! table {
    ($rows:expr, $row:ident: $($header:literal, $cell:expr;)*) => {
        $crate::table::Table::new([$($header),*], $rows.iter().map(|$row| [$($cell),*]))
    };
}
pub(crate) use table;

impl Table {
    pub(crate) fn new<const N: usize>(
        headers: [&'static str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) -> Self {
        let clean = |row: [String; N]| row.iter().map(|cell| printable(cell)).collect();
        Table {
            headers: headers.to_vec(),
            rows: rows.into_iter().map(clean).collect(),
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns: Vec<_> = (0..self.headers.len())
            .filter(|column| self.rows.iter().any(|row| !row[*column].is_empty()))
            .map(|column| {
                let header = self.headers[column];
                let title = header.strip_prefix('>').unwrap_or(header);
                let cells = self.rows.iter().map(|row| row[column].chars().count());
                let width = cells.max().unwrap_or(0).max(title.len());
                (column, title, header.starts_with('>'), width)
            })
            .collect();
        let line = |cell: &dyn Fn(usize, &'static str) -> String| {
            let cells = columns.iter().map(|(column, title, right, width)| {
                let text = cell(*column, title);
                if *right {
                    format!("{text:>width$}")
                } else {
                    format!("{text:<width$}")
                }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        writeln!(f, "{}", line(&|_, title| title.to_owned()))?;
        for row in &self.rows {
            writeln!(f, "{}", line(&|column, _| row[column].clone()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_empty_ones_vanish() {
        let row = |name: &str, size: &str| [name.to_owned(), String::new(), size.to_owned()];
        let table = Table::new(
            ["NAME", "NOTE", ">SIZE"],
            [row("\u{e9}t\u{e9}", "1"), row("longer", "12345")],
        );
        assert_eq!(
            table.to_string(),
            "NAME     SIZE\n\u{e9}t\u{e9}         1\nlonger  12345\n"
        );
    }
}
