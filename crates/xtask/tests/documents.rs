//! Rules of the documents that a look at them can check: links lead somewhere, each page is in the contents and says whom it is
//! for, and lists have what the code has.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Documents of a directory.
fn documents(at: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(at)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|end| end == "md"))
        .collect()
}

/// Anchors of a document, as GitHub and mdBook make them of its headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Places that the links of a document lead to.
fn links(text: &str) -> Vec<&str> {
    let ends = text.split("](").skip(1);
    let places = ends.filter_map(|rest| rest.split(')').next());
    places.filter(|place| !place.contains("://")).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut wrong = Vec::new();
    for file in [
        documents(""),
        documents("docs"),
        documents("benches/results"),
    ]
    .concat()
    {
        let text = read(&file);
        for place in links(&text) {
            let (to, anchor) = place.split_once('#').unwrap_or((place, ""));
            let target = if to.is_empty() {
                file.clone()
            } else {
                file.with_file_name(to)
            };
            let there =
                target.exists() && (anchor.is_empty() || anchors(&read(&target)).contains(anchor));
            // The site has only the pages of docs, without their list.
            let is_page = file.parent().is_some_and(|parent| parent.ends_with("docs"));
            let is_lost = is_page && (to.starts_with("..") || to == "SUMMARY.md");
            if !there || is_lost {
                wrong.push(format!("{}: {place}", file.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "these lead nowhere:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn each_page_is_in_the_contents_and_says_whom_it_is_for() {
    let contents = read(&root().join("docs/SUMMARY.md"));
    for page in documents("docs") {
        let name = page.file_name().unwrap().to_str().unwrap();
        if name == "SUMMARY.md" {
            continue;
        }
        assert!(
            contents.contains(&format!("]({name})")),
            "{name} is not in the contents"
        );
        let text = read(&page);
        let first = text.lines().skip(1).find(|line| !line.is_empty());
        assert!(
            first.is_some_and(|line| line.starts_with("For ")),
            "{name}: {first:?}"
        );
    }
    let readme = read(&root().join("README.md"));
    assert!(
        readme.lines().count() <= 130,
        "README.md is too long for a stranger"
    );
}

/// Words of a table of a document, out of the first column of a section.
fn listed<'a>(page: &'a str, section: &str) -> BTreeSet<&'a str> {
    let part = page.split(&format!("\n## {section}\n")).nth(1).unwrap();
    let rows = part.split("\n## ").next().unwrap().lines();
    let cells = rows.filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells
        .flat_map(|cell| cell.trim_end_matches('`').split("`, `"))
        .collect()
}

/// Kinds of events that the daemon's sources tell of.
fn told() -> BTreeSet<String> {
    let mut kinds = BTreeSet::new();
    for entry in fs::read_dir(root().join("daemon/src/switch")).unwrap() {
        let source = read(&entry.unwrap().path());
        for call in ["tell(", "tell_of(", "tell_of_conns("] {
            for rest in source
                .split(&format!("events\n            .{call}"))
                .skip(1)
                .chain(source.split(&format!("events.{call}")).skip(1))
            {
                let arguments = rest.split(");").next().unwrap_or_default();
                let lines = arguments.lines().map(str::trim);
                let word = |line: &str| {
                    let word = line.strip_prefix('"')?.split('"').next()?;
                    let plain = word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
                    plain.then(|| word.to_owned())
                };
                kinds.extend(lines.filter_map(word));
            }
        }
    }
    kinds
}

#[test]
fn all_events_are_listed() {
    let page = read(&root().join("docs/counters.md"));
    let listed = listed(&page, "Events");
    let told = told();
    assert!(told.len() > 15, "sources tell of few: {told:?}");
    let missing: Vec<_> = told
        .iter()
        .filter(|kind| !listed.contains(kind.as_str()))
        .collect();
    assert!(missing.is_empty(), "docs/counters.md lacks {missing:?}");
    let mut sources = String::new();
    for entry in fs::read_dir(root().join("daemon/src/switch")).unwrap() {
        sources += &read(&entry.unwrap().path());
    }
    for kind in listed {
        assert!(
            sources.contains(&format!("\"{kind}\"")),
            "nothing tells of {kind}"
        );
    }
}
