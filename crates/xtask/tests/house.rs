//! House rules (CONTRIBUTING.md) that a look at the tree can check.

use std::fs;
use std::path::{Path, PathBuf};

/// First words that name nothing: a reader who does not know the thing already learns nothing from them.
const NAMELESS: [&str; 8] = [
    "What", "Who", "Which", "Whether", "Where", "It", "Those", "Of",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Rust sources under a directory, by path from the root.
fn sources(at: &str, found: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(at)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let path = format!("{at}/{name}");
        if root().join(&path).is_dir() && name != "target" {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Comments of public items in a source that begin with none of its words: line and text.
fn nameless(source: &str) -> Vec<(usize, &str)> {
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(text) = line.strip_prefix("/// ") else {
            continue;
        };
        let begins = at == 0 || !lines[at - 1].starts_with("///");
        let first = text.split(|c: char| !c.is_alphanumeric()).next();
        let mut behind = lines[at..].iter();
        let item = behind.find(|line| !line.starts_with("///") && !line.starts_with("#["));
        if begins
            && first.is_some_and(|word| NAMELESS.contains(&word))
            && item.is_some_and(|item| item.starts_with("pub "))
        {
            found.push((at + 1, text));
        }
    }
    found
}

#[test]
fn comments_of_public_items_begin_with_a_name() {
    assert_eq!(
        nameless("/// It goes.\n#[must_use]\npub fn a() {}"),
        [(1, "It goes.")]
    );
    assert_eq!(
        nameless("/// Item.\npub fn a() {}\n/// It goes.\nfn b() {}"),
        []
    );
    let mut files = Vec::new();
    for at in [
        "crates",
        "daemon",
        "dibsctl",
        "netns-tests",
        "benches",
        "fuzz",
    ] {
        sources(at, &mut files);
    }
    assert!(files.len() > 500, "sources are missing: {}", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let source = fs::read_to_string(root().join(&file)).unwrap();
        let found = nameless(&source).into_iter();
        wrong.extend(found.map(|(line, text)| format!("{file}:{line}: {text}")));
    }
    assert!(
        wrong.is_empty(),
        "these name nothing:\n{}",
        wrong.join("\n")
    );
}
