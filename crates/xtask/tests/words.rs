//! House rules for sentences that users read (CONTRIBUTING.md, "Words"): strings of the programs, and the first words of their help.

use std::fs;
use std::path::{Path, PathBuf};

/// Sources of what users read.
const PROGRAMS: [&str; 7] = [
    "dibsctl/src",
    "daemon/src",
    "crates/dibs-config/src",
    "crates/dibs-control/src",
    "crates/dibs-policy/src",
    "crates/dibs-settings/src",
    "crates/dibs-switch/src",
];
/// Sources of the command line's help.
const HELP: [&str; 6] = [
    "args.rs",
    "options.rs",
    "top.rs",
    "model.rs",
    "init.rs",
    "main.rs",
];
/// First words that name nothing.
const NAMELESS: [&str; 9] = [
    "What", "Who", "Which", "Whether", "Where", "How", "It", "Those", "As",
];
/// Words for which the field, or every reader, has another.
const PRIVATE: [&str; 7] = ["he", "him", "his", "anew", "mend", "heed", "whoever"];
/// Words behind ", for" that make it a "because".
const SUBJECTS: [&str; 14] = [
    "he", "it", "its", "no", "nobody", "one", "others", "she", "that", "the", "their", "there",
    "they", "this",
];
/// Words of the longest sentence, of which a semicolon or colon makes two.
const LONGEST: usize = 30;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sources(at: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.to_string_lossy().contains("test");
        match path.is_dir() {
            true => sources(&path, found),
            false if !is_test => found.push(path),
            false => {}
        }
    }
}

/// Text of each string of a source, without comments and its own tests.
fn strings(source: &str) -> Vec<String> {
    let source = source
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let mut found = Vec::new();
    let mut open: Option<String> = None;
    for line in source.lines() {
        let line = match &open {
            Some(_) => line.trim_start(),
            None if line.trim_start().starts_with("//") => continue,
            None => line,
        };
        let mut chars = line.chars().peekable();
        let mut before = ' ';
        while let Some(c) = chars.next() {
            match (&mut open, c) {
                (None, '"') if before != '\'' => open = Some(String::new()),
                (None, '/') if chars.peek() == Some(&'/') => break,
                (None, _) => {}
                (Some(_), '"') => found.extend(open.take()),
                (Some(text), '\\') => match chars.next() {
                    Some('n') => text.push('\n'),
                    Some(escaped) => text.push(escaped),
                    None => {}
                },
                (Some(text), _) => text.push(c),
            }
            before = c;
        }
        if let Some(text) = open.as_mut().filter(|_| !line.ends_with('\\')) {
            text.push('\n');
        }
    }
    found
}

/// Faults of a text that users read.
fn faults(text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let words: Vec<&str> = text.split_whitespace().collect();
    if words.len() < 3 {
        return faults;
    }
    if NAMELESS.contains(&words[0]) {
        faults.push(format!("begins with \"{}\", which names nothing", words[0]));
    }
    for pair in words.windows(3) {
        if pair[0].ends_with(',') && pair[1] == "for" && SUBJECTS.contains(&pair[2]) {
            faults.push(format!("\", for {}\": write because", pair[2]));
        }
    }
    let plain = |word: &&str| PRIVATE.contains(&word.trim_matches(|c: char| !c.is_alphabetic()));
    faults.extend(
        words
            .iter()
            .copied()
            .filter(|word| plain(word))
            .map(|word| format!("says \"{word}\"")),
    );
    let mut sentence = 0;
    for word in words {
        sentence += 1;
        if sentence > LONGEST {
            faults.push(format!("has a sentence of more than {LONGEST} words"));
            break;
        }
        if word.ends_with(['.', ';', ':', '?']) {
            sentence = 0;
        }
    }
    faults
}

#[test]
fn users_read_plain_sentences() {
    assert_eq!(faults("the file is refused, for it is empty").len(), 1);
    assert_eq!(faults("What is refused is named").len(), 1);
    assert_eq!(faults("the user and his rules are gone").len(), 1);
    assert_eq!(faults(&"word ".repeat(LONGEST + 1)).len(), 1);
    assert_eq!(faults(&"these are four words; ".repeat(LONGEST)), [""; 0]);
    assert_eq!(
        strings("let a = \"b \\\n    c\"; // \"d\n// \"e\"\n"),
        ["b c"]
    );
    let mut files = Vec::new();
    PROGRAMS
        .iter()
        .for_each(|at| sources(&root().join(at), &mut files));
    assert!(files.len() > 100, "sources are missing: {}", files.len());
    let mut wrong = Vec::new();
    let mut read = 0;
    for file in files {
        for text in strings(&fs::read_to_string(&file).unwrap()) {
            read += 1;
            // Pages of the manual, and tables, are no sentences.
            let is_page = text.starts_with(".SH") || text.contains("\n\n");
            let found = if is_page { Vec::new() } else { faults(&text) };
            wrong.extend(
                found
                    .iter()
                    .map(|fault| format!("{}: {fault}: {text}", file.display())),
            );
        }
    }
    assert!(read > 1000, "few strings were read: {read}");
    assert!(
        wrong.is_empty(),
        "CONTRIBUTING.md, \"Words\":\n{}",
        wrong.join("\n")
    );
}

#[test]
fn help_begins_with_a_verb_or_a_noun() {
    let mut files = Vec::new();
    sources(&root().join("dibsctl/src"), &mut files);
    let is_help = |file: &PathBuf| HELP.iter().any(|name| file.ends_with(name));
    let mut wrong = Vec::new();
    for file in files.into_iter().filter(is_help) {
        let source = fs::read_to_string(&file).unwrap();
        let mut before = "";
        for line in source.lines().map(str::trim) {
            if let Some(text) = line
                .strip_prefix("/// ")
                .filter(|_| !before.starts_with("///"))
            {
                let first = text.split(' ').next().unwrap_or_default();
                if NAMELESS.contains(&first) {
                    wrong.push(format!("{}: {text}", file.display()));
                }
            }
            before = line;
        }
    }
    assert!(
        wrong.is_empty(),
        "these begin with no name:\n{}",
        wrong.join("\n")
    );
}
