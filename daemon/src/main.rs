//! `dibsd --config FILE`, and `dibsd --guard --config FILE` at boot

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

/// Puts bumps into live TCP connections, and carries them over several paths.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The configuration file.
    #[arg(long, value_name = "FILE", default_value = "/etc/dibs/dibsd.toml")]
    config: PathBuf,
    /// Block what has to be on a bump until the daemon runs, and end: for boot, before the network.
    #[arg(long)]
    guard: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("DIBS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .init();
    let done = if args.guard {
        dibsd::guard::run(&args.config)
    } else {
        dibsd::run(&args.config)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One sentence; what led to it follows behind colons.
            eprintln!("dibsd: {error:#}");
            if let Some(dibs_config::Error::Invalid(fault)) = error.downcast_ref() {
                eprintln!("{}", fault.excerpt());
            }
            ExitCode::FAILURE
        }
    }
}
