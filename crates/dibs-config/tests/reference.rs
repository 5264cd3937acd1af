//! The reference of the file, docs/dibsd.toml.md, beside what the parser takes, and what it says of what it does not take.

use std::collections::BTreeSet;

use dibs_config::{Config, Error, parse};

const PAGE: &str = include_str!("../../../docs/dibsd.toml.md");
/// No word of the file.
const NO_WORD: &str = "xyzzyxyzzyxyzzyxyzzyxyzzyxyzzy";
/// Files in which each key can be written once: kinds of bumps, and rules that name all connections or some, exclude each other.
const BUMPS: [&str; 4] = [
    "name = \"share\"\nkind = \"share\"\n[[rule]]\nbump = \"seal\"\ndport = 80\n",
    "name = \"seal\"\nkind = \"seal\"\n[[rule]]\nbump = \"seal\"\ndport = 80\n",
    "name = \"seal\"\nkind = \"seal\"\n[[rule]]\nbump = \"seal\"\n",
    "name = \"vpn\"\nkind = \"device\"\ndevice = \"tun7\"\n[[rule]]\nbump = \"seal\"\ndport = 80\n",
];

/// A key as the page has it.
#[derive(Debug)]
struct Row<'a> {
    section: &'a str,
    key: &'a str,
    default: Option<&'a str>,
    example: &'a str,
    meaning: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let mut rows = Vec::new();
    for part in PAGE.split("\n## ").skip(1) {
        let section = part.lines().next().unwrap();
        for line in part.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let code = |at: usize| {
                cells[at]
                    .strip_prefix('`')
                    .and_then(|cell| cell.strip_suffix('`'))
            };
            rows.push(Row {
                section,
                key: code(1).unwrap(),
                default: code(2),
                example: code(3).unwrap(),
                meaning: cells[4],
            });
        }
    }
    rows
}

/// A file that says this of a key.
fn file(row: &Row<'_>, value: Option<&str>, bump: &str) -> String {
    let base = format!(
        "[daemon]\n[[path]]\nname = \"lte\"\ninterface = \"wwan0\"\ntrust = \"trusted\"\n[[path]]\nname = \"wlan\"\n\
         interface = \"wlan0\"\ntrust = \"untrusted\"\n[prefer]\npath = \"wlan\"\n[[peer]]\nname = \"b\"\n\
         public_key = \"Z7di2cstr/9mOBVZdefFsSHj9M56dAUbCXAbv8M28CU=\"\naddresses = [\"10.0.1.2/32\"]\n\
         preshared_key_file = \"/etc/dibs/b.psk\"\n[[bump]]\n{bump}"
    );
    let Some(value) = value else { return base };
    let (before, rest) = base.split_once(&format!("{}\n", row.section)).unwrap();
    let (own, after) = rest
        .split_once("\n[")
        .map_or((rest, String::new()), |(own, after)| {
            (own, format!("\n[{after}"))
        });
    let others = own
        .lines()
        .filter(|line| !line.starts_with(&format!("{} =", row.key)));
    let others: Vec<_> = others.collect();
    let (section, key) = (row.section, row.key);
    format!(
        "{before}{section}\n{key} = {value}\n{}\n{after}",
        others.join("\n")
    )
}

fn read(text: &str) -> Result<String, Error> {
    let Config {
        daemon,
        paths,
        prefer,
        peers,
        bumps,
        rules,
        ..
    } = parse("dibsd.toml", text)?;
    Ok(format!(
        "{daemon:?} {paths:?} {prefer:?} {peers:?} {bumps:?} {rules:?}"
    ))
}

/// Words out of the sentence by which the parser refuses a key or a value.
fn words<'a>(sentence: &'a str, from: &str) -> Option<BTreeSet<&'a str>> {
    let (_, words) = sentence.split_once(from)?;
    Some(words.split(", ").collect())
}

#[test]
fn the_page_has_the_keys_that_the_parser_knows() {
    let rows = rows();
    for section in rows.iter().map(|row| row.section).collect::<BTreeSet<_>>() {
        let here = rows.iter().filter(|row| row.section == section);
        let shown: BTreeSet<_> = here.map(|row| row.key).collect();
        let wrong = Row {
            section,
            key: NO_WORD,
            default: None,
            example: "",
            meaning: "",
        };
        let said = read(&file(&wrong, Some("1"), BUMPS[0]))
            .unwrap_err()
            .to_string();
        assert_eq!(Some(shown), words(&said, "known are "), "{section}: {said}");
    }
}

#[test]
fn the_page_has_the_words_and_ranges_that_the_parser_names() {
    // These name what other sections define.
    let defined = |row: &Row<'_>| ["bump", "default_bump", "name", "path"].contains(&row.key);
    for row in rows().into_iter().filter(|row| !defined(row)) {
        let said = |value: &str| {
            read(&file(&row, Some(value), BUMPS[0]))
                .err()
                .map(|error| error.to_string())
        };
        let known = said(&format!("\"{NO_WORD}\"")).unwrap_or_default();
        for word in words(&known, "known are ").into_iter().flatten() {
            assert!(
                row.meaning.contains(&format!("`\"{word}\"`")),
                "{row:?} lacks {word}"
            );
        }
        let range = said("-99999999").unwrap_or_default();
        if let Some((low, high)) = range
            .split_once("has to be within ")
            .and_then(|(_, range)| range.split_once(" and "))
        {
            // All that 32 bits hold bounds nothing.
            let is_bound = high.parse().is_ok_and(|high: u32| high < u32::MAX - 1);
            assert!(
                !is_bound || row.meaning.contains(&format!("{low} to {high}")),
                "{row:?}: {range}"
            );
        }
    }
}

#[test]
fn its_defaults_change_nothing_and_its_examples_are_right() {
    for row in rows() {
        let taken = |value: Option<&str>| BUMPS.map(|bump| read(&file(&row, value, bump)));
        let examples = taken(Some(row.example));
        assert!(examples.iter().any(Result::is_ok), "{row:?}: {examples:?}");
        if let Some(default) = row.default {
            let mut both = taken(None).into_iter().zip(taken(Some(default)));
            let same = both.any(|(without, with)| without.is_ok() && without == with);
            assert!(same, "{row:?}: {default} is not the default");
        }
    }
    let (_, example) = PAGE.split_once("```toml\n").unwrap();
    read(example.split("```").next().unwrap()).unwrap();
}
