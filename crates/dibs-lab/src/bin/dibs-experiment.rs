//! The papers' experiments, as `cargo xtask experiment` runs them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use dibs_lab::dibs::Programs;
use dibs_lab::experiment;
use serde::Serialize;

/// Repeats an experiment of a paper, in network namespaces.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask experiment")]
struct Arguments {
    #[command(subcommand)]
    name: Name,
    /// Where the figures and plots go; target/experiments/NAME if not said
    #[arg(long, value_name = "DIR", global = true)]
    output: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Name {
    /// One stream over three links of 1 Gbit/s, moved from bump to bump (Pohly et al. 2015)
    Dibs {
        /// Length of each phase
        #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
        seconds: u16,
    },
    /// One stream over two links of which the user prefers one (Liyanage et al. 2021, Fig. 6 to 12)
    Hint {
        /// Length of each figure
        #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u16).range(5..=600))]
        seconds: u16,
        /// Times that the preferred path drops everything, and as often without a hint
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
        turns: u32,
        /// Congestion control of the sender
        #[arg(long, value_name = "NAME", default_value = "cubic")]
        congestion: String,
    },
}

fn main() -> Result<()> {
    let Arguments { name, output } = Arguments::parse();
    dibs_lab::enter()?;
    let programs = Programs::find()?;
    match name {
        Name::Dibs { seconds } => {
            let report = experiment::dibs(&programs, Duration::from_secs(seconds.into()))?;
            print!("{report}");
            let plots = report.runs.iter().enumerate();
            let plots = plots.map(|(at, run)| (format!("run-{}.svg", at + 1), run.svg()));
            write_all(output, "dibs", &report, plots)
        }
        Name::Hint {
            seconds,
            turns,
            congestion,
        } => {
            let span = Duration::from_secs(seconds.into());
            let report = experiment::hint(&programs, &congestion, span, turns)?;
            print!("{report}");
            let file = |figure: &str| {
                let number = figure.split(':').next().unwrap_or(figure);
                format!("fig-{}.svg", number.replace('/', "-"))
            };
            let plots = report.figures.iter();
            let plots = plots.map(|outcome| (file(&outcome.figure), outcome.svg()));
            write_all(output, "hint", &report, plots)
        }
    }
}

/// Writes the figures as JSON, and the plots beside them.
fn write_all(
    output: Option<PathBuf>,
    name: &str,
    report: &impl Serialize,
    plots: impl Iterator<Item = (String, String)>,
) -> Result<()> {
    let directory = output.unwrap_or_else(|| PathBuf::from("target/experiments").join(name));
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let json = serde_json::to_string_pretty(report)? + "\n";
    for (name, text) in std::iter::once((format!("{name}.json"), json)).chain(plots) {
        let file = directory.join(name);
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
        println!("written: {}", file.display());
    }
    Ok(())
}
