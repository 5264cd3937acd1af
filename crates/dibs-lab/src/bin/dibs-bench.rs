//! The benchmark, as `cargo xtask bench` runs it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum as _};
use dibs_lab::bench::{self, Experiment, Options, Other, Report};

/// Compares dibs with plain TCP, kernel MPTCP and VPNs in user space, in network namespaces.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask bench")]
struct Arguments {
    /// Write all turns of all rounds to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure nothing: print the tables of a file that --json wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "only"])]
    show: Option<PathBuf>,
    /// Draw the first of these tables as SVG into this file
    #[arg(long, value_name = "SVG", requires = "show")]
    picture: Option<PathBuf>,
    /// Only these experiments
    #[arg(value_name = "EXPERIMENT", value_enum)]
    only: Vec<Experiment>,
    /// TCP's congestion control on all hosts; may be given several times
    #[arg(long, value_name = "NAME", default_values = ["cubic", "bbr"])]
    congestion: Vec<String>,
    /// Of `paths`, only the pairs of links whose names contain this
    #[arg(long, value_name = "WORDS")]
    links: Option<String>,
    /// The scheduler of `seal`
    #[arg(long, value_name = "NAME")]
    scheduler: Option<String>,
    /// Turns of each system
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Let the programs of another revision take turns with this tree's, and show the ratios
    #[arg(long, value_name = "REV")]
    compare: Option<Other>,
    /// Length of a turn
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(file) = arguments.show {
        let shown = || file.display().to_string();
        let text = std::fs::read_to_string(&file).with_context(shown)?;
        let report: Report = serde_json::from_str(&text).with_context(shown)?;
        if let Some((file, table)) = arguments.picture.zip(report.tables.first()) {
            std::fs::write(&file, table.picture()).with_context(|| file.display().to_string())?;
        }
        print!("{report}");
        return Ok(());
    }
    let experiments = match arguments.only {
        only if only.is_empty() => Experiment::value_variants().to_vec(),
        only => only,
    };
    let options = Options {
        rounds: arguments.rounds.into(),
        duration: Duration::from_secs(arguments.seconds.into()),
        experiments,
        congestion: arguments.congestion,
        links: arguments.links,
        scheduler: arguments.scheduler,
        compare: arguments.compare,
    };
    dibs_netns::enter()?;
    let report = bench::run(&options)?;
    print!("{report}");
    if let Some(file) = arguments.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(&file, text).with_context(|| file.display().to_string())?;
    }
    Ok(())
}
