//! The papers' experiments, as `cargo xtask experiment` runs them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use dibs_lab::dibs::Programs;
use dibs_lab::experiment;

/// Repeats an experiment of a paper, in network namespaces.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask experiment")]
struct Arguments {
    /// Which
    #[arg(value_enum)]
    name: Name,
    /// Length of each phase
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// Where the figures and plots go
    #[arg(long, value_name = "DIR", default_value = "target/experiments/dibs")]
    output: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Name {
    /// One stream over three links of 1 Gbit/s, moved from bump to bump (Pohly et al. 2015)
    Dibs,
}

fn main() -> Result<()> {
    let Arguments {
        name: Name::Dibs,
        seconds,
        output,
    } = Arguments::parse();
    dibs_lab::enter()?;
    let phase = Duration::from_secs(seconds.into());
    let report = experiment::dibs(&Programs::find()?, phase)?;
    print!("{report}");
    std::fs::create_dir_all(&output).with_context(|| output.display().to_string())?;
    let write = |name: &str, text: &str| {
        let file = output.join(name);
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
        println!("written: {}", file.display());
        anyhow::Ok(())
    };
    write(
        "dibs.json",
        &(serde_json::to_string_pretty(&report)? + "\n"),
    )?;
    for (number, run) in report.runs.iter().enumerate() {
        write(&format!("run-{}.svg", number + 1), &run.svg())?;
    }
    Ok(())
}
