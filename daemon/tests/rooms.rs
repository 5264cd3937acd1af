//! Rooms of the daemon (docs/architecture.md, "Rooms of the daemon"), looked over in its sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Files of the daemon, beside those of tests.
const MOST_FILES: usize = 40;
/// Files that refer to each other one after the other.
const MOST_LEVELS: usize = 9;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Rooms by the document, the lowest first.
fn rooms() -> Vec<String> {
    let text = fs::read_to_string(root().join("../docs/architecture.md")).unwrap();
    let section = text.split("\n## Rooms of the daemon\n").nth(1).unwrap();
    let rows = section.split("\n## ").next().unwrap().lines();
    let room = |row: &str| Some(row.strip_prefix("| `")?.split('/').next()?.to_owned());
    rows.filter_map(room).collect()
}

/// Sources below a directory by module path, without their tests.
fn sources(at: &Path, module: &[String], found: &mut BTreeMap<Vec<String>, String>) {
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let inner = [module, std::slice::from_ref(&name)].concat();
        match (path.is_dir(), name.as_str()) {
            (true, _) => sources(&path, &inner, found),
            (false, "tests") => {}
            (false, _) => {
                let source = fs::read_to_string(&path).unwrap();
                let code = source.split("#[cfg(test)]").next().unwrap();
                let lines = code
                    .lines()
                    .filter(|line| !line.trim_start().starts_with("//"));
                let module = if name == "mod" {
                    module.to_vec()
                } else {
                    inner
                };
                found.insert(module, lines.collect());
            }
        }
    }
}

/// Paths that a tree behind `crate::` names.
fn paths(tree: &str, before: &[String], found: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let end = tree.find('{').unwrap_or(tree.len());
    let segments = tree[..end]
        .split("::")
        .map(|segment| segment.trim().to_owned());
    let segments = segments.filter(|segment| !segment.is_empty());
    let path = before.iter().cloned().chain(segments).collect::<Vec<_>>();
    if end == tree.len() {
        return found.push(path);
    }
    let (mut depth, mut begin) = (0, end + 1);
    for (at, byte) in tree.bytes().enumerate().skip(end + 1) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth > 0 => depth -= 1,
            b',' | b'}' if depth == 0 => {
                if !tree[begin..at].trim().is_empty() {
                    paths(&tree[begin..at], &path, found);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// Modules that a source refers to, of those that there are.
fn references(
    module: &[String],
    source: &str,
    all: &BTreeMap<Vec<String>, String>,
) -> BTreeSet<Vec<String>> {
    let mut named = Vec::new();
    for behind in source.split("crate::").skip(1) {
        let is_path = |c: char| c.is_alphanumeric() || "_: ".contains(c);
        let end = match behind.find(|c: char| !is_path(c)) {
            Some(at) if behind[at..].starts_with('{') => behind.find(';').unwrap(),
            Some(at) => at,
            None => behind.len(),
        };
        paths(&behind[..end], &[], &mut named);
    }
    let known = |path: Vec<String>| {
        let prefixes = (1..=path.len()).rev().map(|length| path[..length].to_vec());
        { prefixes }.find(|prefix| all.contains_key(prefix))
    };
    let found = named.into_iter().filter_map(known);
    found.filter(|other| other != module).collect()
}

#[test]
fn paths_are_read_as_rust_writes_them() {
    let mut found = Vec::new();
    paths("a::{self, b::{C, d}, E}", &[], &mut found);
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["a::self", "a::b::C", "a::b::d", "a::E"]);
}

#[test]
fn no_room_uses_a_higher_one() {
    let rooms = rooms();
    assert!(rooms.len() > 4, "the document has no table: {rooms:?}");
    let mut files = BTreeMap::new();
    sources(&root().join("src"), &[], &mut files);
    assert!(files.len() <= MOST_FILES, "there are {} files", files.len());
    files.retain(|module, _| !["lib", "main"].contains(&module[0].as_str()));
    let height = |module: &[String]| rooms.iter().position(|room| *room == module[0]);
    let mut waiting: BTreeMap<_, _> = { files.iter() }
        .map(|(module, source)| (module.clone(), references(module, source, &files)))
        .collect();
    assert!(
        waiting.values().any(|others| others.len() > 9),
        "none refers to others"
    );
    for (module, others) in &waiting {
        let own = height(module).unwrap_or_else(|| panic!("{module:?} is in no room"));
        for other in others {
            assert!(height(other) <= Some(own), "{module:?} uses {other:?}");
        }
    }
    for level in 0.. {
        let free = waiting.iter().filter(|(_, others)| others.is_empty());
        let free: Vec<_> = free.map(|(module, _)| module.clone()).collect();
        if waiting.is_empty() {
            assert!(
                level <= MOST_LEVELS,
                "files refer to each other on {level} levels"
            );
            break;
        }
        assert!(
            !free.is_empty(),
            "these refer to each other: {:?}",
            waiting.keys()
        );
        waiting.retain(|module, _| !free.contains(module));
        let left = |other: &Vec<String>| !free.contains(other);
        waiting.values_mut().for_each(|others| others.retain(left));
    }
}
