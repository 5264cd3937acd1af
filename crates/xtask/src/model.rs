//! `cargo xtask model`: the models of the protocol in docs/model, and Verifpal's verdict on each query beside the model's
//! own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::fuzz::ensure_nightly;
use crate::run::{make_directory, printed, run, workspace};

/// Version of the verifier: another one may search otherwise, and find more.
const VERSION: &str = "1.6.7";
/// Mark of a variant: `// variant NAME: SWITCH, SWITCH`.
const VARIANT: &str = "// variant ";
/// Mark of a line that is only in variants with one of these switches: `LINE // if SWITCH, SWITCH`.
const SWITCH: &str = "// if ";
/// Mark, above a query, of an attack that is to be found: `// attack in NAME, NAME: REASON`; `all` is every variant.
const ATTACK: &str = "// attack in ";

/// A file for the verifier; by the marks in its comments it stands for several.
struct Model {
    lines: Vec<String>,
    variants: Vec<Variant>,
}

/// A model without the lines that need other switches.
struct Variant {
    name: String,
    switches: Vec<String>,
}

/// Verdict on one query.
struct Finding {
    query: String,
    /// Line of the model, from 1.
    line: usize,
    /// The attack in one line, if one was found.
    attack: Option<String>,
}

/// Checks every model in docs/model, and shows each query of each variant.
///
/// # Errors
/// If the verifier cannot be had, a model cannot be read, or a query comes out other than its model says.
pub(crate) fn model() -> Result<()> {
    let verifier = verifier()?;
    let mut wrong = Vec::new();
    for path in models()? {
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = path
            .file_stem()
            .context("a model's name")?
            .to_string_lossy()
            .into_owned();
        let model = Model::parse(&text).with_context(|| format!("docs/model/{file}.vp"))?;
        for variant in &model.variants {
            let start = Instant::now();
            let findings = verify(&verifier, &file, &model, variant)?;
            println!(
                "== {file}, {}: {:.1} s",
                variant.name,
                start.elapsed().as_secs_f64()
            );
            for finding in &findings {
                let expected = model.expected(finding.line, &variant.name)?;
                println!("{}", shown(finding, expected.as_deref()));
                if finding.attack.is_some() != expected.is_some() {
                    wrong.push(format!("{file}, {}: {}", variant.name, finding.query));
                }
            }
        }
    }
    ensure!(
        wrong.is_empty(),
        "not as the models say:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

/// Line about one query; a verdict other than the model's stands out.
fn shown(finding: &Finding, expected: Option<&str>) -> String {
    let query = &finding.query;
    match (&finding.attack, expected) {
        (None, None) => format!("   holds   {query}"),
        (Some(_), Some(reason)) => format!("   attack  {query}: {reason}"),
        (Some(attack), None) => format!("!! ATTACK  {query}: {attack}"),
        (None, Some(reason)) => format!("!! HOLDS   {query}, though the model says: {reason}"),
    }
}

/// The models, in the order of their names.
fn models() -> Result<Vec<PathBuf>> {
    let directory = workspace().join("docs/model");
    let entries =
        fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let paths: std::io::Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let mut paths = paths.with_context(|| format!("cannot read {}", directory.display()))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "vp"));
    paths.sort();
    ensure!(!paths.is_empty(), "no models in {}", directory.display());
    Ok(paths)
}

impl Model {
    /// Reads a model, and the names in its comments.
    ///
    /// # Errors
    /// If a switch or a variant is named that is not there, or one is there that nothing names.
    fn parse(text: &str) -> Result<Self> {
        let lines: Vec<String> = text.lines().map(String::from).collect();
        let mut variants = Vec::new();
        for line in &lines {
            let Some(variant) = line.strip_prefix(VARIANT) else {
                continue;
            };
            let (name, switches) = variant
                .split_once(':')
                .context("a variant has a colon behind its name")?;
            variants.push(Variant {
                name: name.to_owned(),
                switches: listed(switches),
            });
        }
        ensure!(!variants.is_empty(), "no line begins with `{VARIANT}`");
        let model = Self { lines, variants };
        model.check()?;
        Ok(model)
    }

    fn check(&self) -> Result<()> {
        let needed: Vec<String> = self
            .lines
            .iter()
            .flat_map(|line| switches(line).1)
            .collect();
        let turned: Vec<&String> = self
            .variants
            .iter()
            .flat_map(|variant| &variant.switches)
            .collect();
        for switch in &needed {
            ensure!(
                turned.contains(&switch),
                "no variant has the switch `{switch}`"
            );
        }
        for switch in turned {
            ensure!(
                needed.contains(switch),
                "no line needs the switch `{switch}`"
            );
        }
        for (names, _) in self.lines.iter().filter_map(|line| attack(line)) {
            for name in names {
                let is_known =
                    name == "all" || self.variants.iter().any(|variant| variant.name == name);
                ensure!(is_known, "there is no variant `{name}`");
            }
        }
        Ok(())
    }

    /// The model as the verifier reads it; each line stays where it is.
    fn text(&self, variant: &Variant) -> String {
        let line = |line: &String| {
            let (code, needed) = switches(line);
            let is_in = needed.is_empty()
                || needed
                    .iter()
                    .any(|switch| variant.switches.contains(switch));
            format!("{}\n", if is_in { code } else { "" })
        };
        self.lines.iter().map(line).collect()
    }

    /// The reason for the attack that the model says is there, by the comments right above the query at this line.
    fn expected(&self, line: usize, variant: &str) -> Result<Option<String>> {
        let above = line
            .checked_sub(1)
            .and_then(|at| self.lines.get(..at))
            .context("a query's line")?;
        let comments = above.iter().rev().map(|line| line.trim_start());
        let comments = comments.take_while(|line| line.starts_with("//"));
        let mut attacks = comments.filter_map(attack);
        let found =
            attacks.find(|(names, _)| names.iter().any(|name| name == "all" || name == variant));
        Ok(found.map(|(_, reason)| reason))
    }
}

/// A line without the switches behind it, and these.
fn switches(line: &str) -> (&str, Vec<String>) {
    match line.split_once(SWITCH) {
        Some((code, names)) if !code.trim().is_empty() => (code, listed(names)),
        _ => (line, Vec::new()),
    }
}

/// The variants in which an attack is to be found, and the reason, if the line speaks of that.
fn attack(line: &str) -> Option<(Vec<String>, String)> {
    let (names, reason) = line.trim_start().strip_prefix(ATTACK)?.split_once(':')?;
    Some((listed(names), reason.trim().to_owned()))
}

fn listed(names: &str) -> Vec<String> {
    let names = names.split(',').map(str::trim);
    names
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect()
}

/// Verdicts on a variant's queries.
fn verify(verifier: &Path, file: &str, model: &Model, variant: &Variant) -> Result<Vec<Finding>> {
    let directory = workspace().join("target/model");
    make_directory(&directory)?;
    let path = directory.join(format!("{file}-{}.vp", variant.name));
    fs::write(&path, model.text(variant))
        .with_context(|| format!("cannot write {}", path.display()))?;
    let mut command = Command::new(verifier);
    command.args(["verify", "--format", "json"]).arg(&path);
    let said = printed(&mut command)?;
    findings(&said)
        .with_context(|| format!("what {} says of {}", verifier.display(), path.display()))
}

/// Verdicts in a report of one model.
fn findings(report: &[u8]) -> Result<Vec<Finding>> {
    let report: Value = serde_json::from_slice(report)?;
    let model = &report["models"][0];
    if let Some(error) = model["error"].as_str() {
        bail!("{error}");
    }
    let queries = model["analysis"]["queries"]
        .as_array()
        .context("no queries")?;
    queries.iter().map(finding).collect()
}

fn finding(query: &Value) -> Result<Finding> {
    let text = |field: &str| {
        query[field]
            .as_str()
            .with_context(|| format!("no `{field}` in {query}"))
    };
    let is_broken = query["resolved"].as_bool().context("no verdict")?;
    let is_exhausted = query["envelope"]["exhausted"]
        .as_bool()
        .context("no extent")?;
    let query_text = text("query")?;
    ensure!(
        is_broken || is_exhausted,
        "the search was cut short: {query_text}"
    );
    let line = query["range"]["line"].as_u64().context("no line")?;
    Ok(Finding {
        query: query_text.to_owned(),
        line: usize::try_from(line)?,
        attack: is_broken
            .then(|| text("conclusion").map(String::from))
            .transpose()?,
    })
}

/// The verifier, in `target/tools`; installed where it is not there. A nightly compiler builds it, as it wants a newer one than
/// this workspace does.
fn verifier() -> Result<PathBuf> {
    let tools = workspace().join("target/tools");
    let program = tools.join("bin/verifpal");
    let version = Command::new(&program).arg("--version").output();
    let is_there = version.is_ok_and(|said| {
        String::from_utf8_lossy(&said.stdout).trim() == format!("verifpal {VERSION}")
    });
    if !is_there {
        ensure_nightly()?;
        let mut install = Command::new("rustup");
        install.args([
            "run",
            "nightly",
            "cargo",
            "install",
            "--locked",
            "--ignore-rust-version",
        ]);
        run(install
            .args(["verifpal", "--version", VERSION, "--root"])
            .arg(tools))?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// A model.\n\
        // variant open: leak\n\
        // variant closed:\n\
        // variant known: known, leak\n\
        principal A[\n\
        \tknows private a\n\
        \tleaks a // if leak, known\n\
        ]\n\
        queries[\n\
        \t// Said of several.\n\
        \t// attack in open: it leaks\n\
        \t// attack in known: it is known\n\
        \tconfidentiality? a\n\
        \tconfidentiality? b\n\
        ]\n";

    #[test]
    fn a_variant_lacks_the_lines_of_other_switches_and_keeps_the_others_in_place() {
        let model = Model::parse(TEXT).unwrap();
        let [open, closed, _] = &model.variants[..] else {
            panic!("three variants")
        };
        assert_eq!(model.text(open).lines().nth(6), Some("\tleaks a "));
        assert_eq!(model.text(closed).lines().nth(6), Some(""));
        assert_eq!(model.text(closed).lines().nth(7), Some("]"));
    }

    #[test]
    fn an_attack_is_expected_where_the_comment_above_the_query_names_the_variant() {
        let model = Model::parse(TEXT).unwrap();
        assert_eq!(
            model.expected(13, "open").unwrap().as_deref(),
            Some("it leaks")
        );
        assert_eq!(
            model.expected(13, "known").unwrap().as_deref(),
            Some("it is known")
        );
        assert_eq!(model.expected(13, "closed").unwrap(), None);
        assert_eq!(model.expected(14, "open").unwrap(), None);
    }

    #[test]
    fn the_models_of_the_tree_name_only_what_is_there() {
        for path in models().unwrap() {
            let text = fs::read_to_string(&path).unwrap();
            let refused = Model::parse(&text).err();
            assert!(refused.is_none(), "{}: {refused:?}", path.display());
        }
    }

    #[test]
    fn a_name_that_stands_for_nothing_is_refused() {
        for (from, to) in [
            ("// if leak", "// if leek"),
            ("known, leak", "known, lock"),
            ("in open", "in opened"),
        ] {
            let said = Model::parse(&TEXT.replace(from, to))
                .err()
                .map(|error| error.to_string());
            assert!(said.is_some(), "{to} was taken");
        }
    }

    #[test]
    fn a_report_says_what_was_found_and_a_search_cut_short_is_no_result() {
        let report = |resolved: bool, exhausted: bool| {
            let query = serde_json::json!({
                "query": "confidentiality? a", "resolved": resolved, "range": {"line": 13},
                "envelope": {"exhausted": exhausted}, "conclusion": "a is obtained by Attacker.",
            });
            serde_json::json!({"models": [{"analysis": {"queries": [query]}}]}).to_string()
        };
        let found = findings(report(true, true).as_bytes()).unwrap();
        assert_eq!(
            found[0].attack.as_deref(),
            Some("a is obtained by Attacker.")
        );
        assert_eq!(
            (found[0].line, shown(&found[0], Some("it leaks"))),
            (13, "   attack  confidentiality? a: it leaks".to_owned())
        );
        assert!(shown(&found[0], None).starts_with("!! ATTACK"));
        let held = findings(report(false, true).as_bytes()).unwrap();
        assert!(shown(&held[0], None).starts_with("   holds"));
        assert!(shown(&held[0], Some("it leaks")).starts_with("!! HOLDS"));
        assert!(findings(report(false, false).as_bytes()).is_err());
        assert!(findings(br#"{"models": [{"error": "no such model"}]}"#).is_err());
    }
}
