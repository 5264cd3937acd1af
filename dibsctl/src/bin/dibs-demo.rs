//! `dibs-demo`: two hosts on this machine, a text between them, an eavesdropper. `dibsctl demo` runs it.

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use dibs_lab::dibs::Programs;
use dibsctl::options::Demo;

/// Shows what dibs does: two hosts on this machine, a text between them, an eavesdropper
#[derive(Parser)]
#[command(bin_name = "dibsctl demo", version)]
struct Args {
    #[command(flatten)]
    options: Demo,
}

fn main() -> ExitCode {
    dibsctl::output::ended(run(&Args::parse().options))
}

fn run(options: &Demo) -> Result<()> {
    // In another mount namespace our own place may have another name.
    let programs = Programs::find()?;
    // Before anything starts a thread.
    dibs_netns::enter()?;
    dibs_lab::demo::run(&programs, options.mebibytes)
}
