//! `dibsd --config FILE`, and `dibsd --guard --config FILE` at boot

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser};

/// Puts bumps into live TCP connections, and carries them over several paths.
///
/// SIGHUP has it take the rules of the file as they are now; the rest of the file is read at the start. SIGTERM ends it: what
/// is on a bump is blocked then until it is back, or goes on in plain with `fail = "open"`.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/dibs/dibsd.toml")]
    config: PathBuf,
    /// Block what has to be on a bump until the daemon runs, and end: for boot, before the network.
    #[arg(long)]
    guard: bool,
    /// Write the manual page to a directory, and end.
    #[arg(long, value_name = "DIRECTORY", hide = true)]
    man: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    dibsd::host::process::start_log();
    let done = match &args.man {
        Some(directory) => man(directory),
        None if args.guard => dibsd::switch::startup::run_guard(&args.config),
        None => dibsd::switch::run::run(&args.config),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut stderr = std::io::stderr();
            // One sentence; what led to it follows behind colons. Nobody may be there to read it.
            let _ = writeln!(stderr, "dibsd: {error:#}");
            if let Some(dibs_config::Error::Invalid(fault)) = error.downcast_ref() {
                let _ = writeln!(stderr, "{}", fault.excerpt());
            }
            ExitCode::FAILURE
        }
    }
}

fn man(directory: &Path) -> anyhow::Result<()> {
    let page = clap_mangen::Man::new(Args::command()).section("8");
    let written = page.generate_to(directory).map(drop);
    written.with_context(|| format!("cannot write the manual to {}", directory.display()))
}
