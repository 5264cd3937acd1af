//! Manual page of the configuration file, of the document that is its reference.

use std::fmt::Write as _;

/// dibsd.toml(5) of docs/dibsd.toml.md: its headings, paragraphs, tables of keys, and code.
pub(crate) fn of_file(document: &str) -> String {
    let mut page =
        ".TH dibsd.toml 5\n.SH NAME\ndibsd.toml \\- configuration of dibsd(8)\n.SH DESCRIPTION\n"
            .to_owned();
    let mut in_code = false;
    for line in document.lines().skip(1) {
        let line = line.replace('\\', "\\e");
        let cells: Vec<_> = line.split(" | ").collect();
        // Writing to a String cannot fail.
        let _ = match (line.strip_prefix("## "), &cells[..]) {
            _ if line.starts_with("```") => {
                in_code = !in_code;
                writeln!(page, "{}", if in_code { ".nf" } else { ".fi" })
            }
            _ if in_code => writeln!(page, "\\&{line}"),
            (Some(heading), _) => writeln!(page, ".SH \"{heading}\""),
            (_, [key, default, example, meaning]) if key.starts_with("| `") => writeln!(
                page,
                ".TP\n{}\n{}\nDefault: {}. Example: {}.",
                bold(&key[2..]),
                bold(meaning.trim_end_matches(" |")),
                bold(default),
                bold(example)
            ),
            _ if line.starts_with('|') => Ok(()),
            (None, _) if line.is_empty() => writeln!(page, ".PP"),
            (None, _) => writeln!(page, "{}", bold(&line)),
        };
    }
    page + ".SH FILES\n/etc/dibs/dibsd.toml\n.SH \"SEE ALSO\"\ndibsctl(1), dibsd(8), /usr/share/doc/dibs\n"
}

/// Text whose code is bold.
fn bold(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let parts = parts.map(|(at, part)| match at % 2 {
        1 => format!("\\fB{part}\\fR"),
        _ => part.to_owned(),
    });
    parts.collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_key_is_an_entry() {
        let document = include_str!("../../../docs/dibsd.toml.md");
        let page = super::of_file(document);
        let keys = document.lines().filter(|line| line.starts_with("| `"));
        assert_eq!(page.matches("\n.TP\n").count(), keys.count());
        let port = "\n\\fBport\\fR\nUDP port of all paths, 1 to 65535.\nDefault: \\fB5300\\fR. Example: \\fB443\\fR.\n";
        assert!(page.contains(port), "{page}");
        assert!(
            !page.contains('`') && page.contains("\n.SH \"[daemon]\"\n"),
            "{page}"
        );
    }
}
