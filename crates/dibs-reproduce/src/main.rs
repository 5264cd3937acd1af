//! Every table and figure of the papers, as `cargo xtask reproduce` runs them.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use clap::builder::PossibleValuesParser;
use dibs_lab::bench::Environment;
use dibs_reproduce::{PARTS, Plan, Stage};

/// Repeats every table and figure of the papers in network namespaces, and writes a report.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask reproduce")]
struct Arguments {
    /// Only these parts, beside what the report has of the others
    #[arg(value_name = "PART", value_parser = names())]
    parts: Vec<String>,
    /// Shorter runs, of less steady figures
    #[arg(long)]
    quick: bool,
    /// Do not run again what ran to its end before
    #[arg(long)]
    resume: bool,
    /// Where the report goes, with what was measured as JSON and the pictures as SVG
    #[arg(long, value_name = "DIR", default_value = "target/reproduce")]
    output: PathBuf,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(PARTS.iter().map(|part| part.name))
}

fn main() -> Result<()> {
    let Arguments {
        parts,
        quick,
        resume,
        output,
    } = Arguments::parse();
    dibs_netns::enter()?;
    let own = std::env::current_exe().context("the running program's place")?;
    let stage = Stage {
        programs: own.parent().unwrap_or(Path::new("/")).to_owned(),
        quick,
    };
    let plan = Plan {
        parts: &PARTS,
        only: parts,
        resume,
        output,
    };
    let environment = Environment::of(SystemTime::now())?;
    let failed = plan.run(&stage, &environment.to_string())?;
    println!("written: {}", plan.page().display());
    if !failed.is_empty() {
        bail!("failed: {}; the report says why", failed.join(", "));
    }
    Ok(())
}
