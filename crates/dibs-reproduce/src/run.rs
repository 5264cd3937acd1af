//! Running the parts, and keeping what came of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use anyhow::{Context as _, Result, bail};

use crate::finding::{Block, Outcome, Record};
use crate::page::page;
use crate::parts::{Part, Stage};

/// Parts to run, and the place of their results.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// All parts of the report, in order.
    pub parts: &'a [Part],
    /// Only these are run; all if there is none.
    pub only: Vec<String>,
    /// True if parts that ran to their end before, as quickly, are not run again.
    pub resume: bool,
    /// The directory of the report.
    pub output: PathBuf,
}

/// The report's name in its directory.
const PAGE: &str = "report.html";

impl Plan<'_> {
    /// Runs the parts, and writes the report anew after each; returns the names of those that failed.
    ///
    /// # Errors
    /// If a name is none of a part, or the directory cannot be written to.
    pub fn run(&self, stage: &Stage, about: &str) -> Result<Vec<String>> {
        let known = |name: &&String| !self.parts.iter().any(|part| part.name == **name);
        if let Some(name) = self.only.iter().find(known) {
            let names: Vec<&str> = self.parts.iter().map(|part| part.name).collect();
            bail!("no part {name}, but {}", names.join(", "));
        }
        let pictures = self.output.join("figures");
        std::fs::create_dir_all(&pictures).with_context(|| pictures.display().to_string())?;
        let chosen =
            |part: &&Part| self.only.is_empty() || self.only.iter().any(|n| n == part.name);
        let chosen: Vec<&Part> = self.parts.iter().filter(chosen).collect();
        // Of a whole run nothing is older than the run, unless that is asked for.
        if self.only.is_empty() && !self.resume {
            for part in self.parts {
                remove(&self.file(part))?;
            }
        }
        let mut failed = Vec::new();
        for (number, part) in chosen.iter().enumerate() {
            let step = format!("[{}/{}] {}", number + 1, chosen.len(), part.name);
            if self.resume && self.is_done(part, stage.quick) {
                eprintln!("{step}: done before");
                continue;
            }
            eprintln!("{step}: {}", part.title);
            let record = run(part, stage);
            match &record.outcome {
                Outcome::Done(finding) => {
                    eprintln!("{step}: {:.0} s", record.seconds);
                    finding.comparisons.iter().for_each(|one| println!("{one}"));
                }
                Outcome::Failed(reason) => {
                    eprintln!("{step}: failed: {reason}");
                    failed.push(part.name.to_owned());
                }
            }
            self.keep(part, &record, &pictures)?;
            self.write(about)?;
        }
        self.write(about)?;
        Ok(failed)
    }

    /// Path of the report.
    pub fn page(&self) -> PathBuf {
        self.output.join(PAGE)
    }

    fn file(&self, part: &Part) -> PathBuf {
        self.output.join(part.name).with_extension("json")
    }

    /// What is kept of a part.
    fn kept(&self, part: &Part) -> Option<Record> {
        let text = std::fs::read_to_string(self.file(part)).ok()?;
        serde_json::from_str(&text).ok()
    }

    fn is_done(&self, part: &Part, quick: bool) -> bool {
        let kept = self.kept(part);
        kept.is_some_and(|kept| kept.quick == quick && matches!(kept.outcome, Outcome::Done(_)))
    }

    fn keep(&self, part: &Part, record: &Record, pictures: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(record)? + "\n";
        put(&self.file(part), &text)?;
        let Outcome::Done(finding) = &record.outcome else {
            return Ok(());
        };
        for block in &finding.blocks {
            if let Block::Figure { name, svg, .. } = block {
                put(&pictures.join(name).with_extension("svg"), svg)?;
            }
        }
        Ok(())
    }

    fn write(&self, about: &str) -> Result<()> {
        let records: Vec<_> = { self.parts.iter() }
            .map(|part| (part, self.kept(part)))
            .collect();
        put(&self.page(), &page(about, &records))
    }
}

/// Runs a part; what goes wrong in it, and a panic too, is what came of it.
fn run(part: &Part, stage: &Stage) -> Record {
    let (at, start) = (SystemTime::now(), Instant::now());
    let ran = catch_unwind(AssertUnwindSafe(|| (part.run)(stage)));
    let outcome = match ran {
        Ok(Ok(finding)) => Outcome::Done(finding),
        Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
        Err(panic) => {
            let said = panic.downcast_ref::<&str>().map(ToString::to_string);
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
            Outcome::Failed(format!("a panic: {}", said.unwrap_or_default()))
        }
    };
    Record {
        name: part.name.to_owned(),
        at: humantime::format_rfc3339_seconds(at).to_string(),
        seconds: start.elapsed().as_secs_f64(),
        quick: stage.quick,
        outcome,
    }
}

fn put(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| file.display().to_string())
}

fn remove(file: &Path) -> Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| file.display().to_string())
        }
        _ => Ok(()),
    }
}
