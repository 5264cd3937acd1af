//! `dibsd --config FILE`, and `dibsd --guard --config FILE` at boot

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser};

/// Protect open TCP connections, and carry them over several networks.
///
/// SIGHUP applies changed rules of the configuration file; all other changes need a restart. SIGTERM ends the daemon. Connections on
/// a bump are then blocked until it runs again, or continue unprotected with `fail = "open"`; `dibsctl cleanup` returns
/// them to plain TCP first.
#[derive(Parser)]
#[command(
    version,
    after_help = "Examples:\n  dibsd --config /etc/dibs/dibsd.toml\n  DIBS_LOG=debug dibsd"
)]
struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/dibs/dibsd.toml")]
    config: PathBuf,
    /// Block what rules put on a bump until the daemon runs, and end (for boot, before the network)
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

/// Sections of the manual page behind those of the options.
const ENDING: &str = "\
.SH ENVIRONMENT
DIBS_LOG: what is logged, one of error, warn, info, debug and trace [default: info]
.SH FILES
/etc/dibs/dibsd.toml, /etc/dibs/private.key, /run/dibs/dibsd.sock, /var/lib/dibs
.SH \"EXIT STATUS\"
0 after SIGTERM, 1 if the daemon cannot start or go on, with one sentence on standard error, 2 for a wrong command line.
.SH \"SEE ALSO\"
dibsctl(1), dibsd.toml(5), /usr/share/doc/dibs
";

fn man(directory: &Path) -> anyhow::Result<()> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Args::command())
        .section("8")
        .render(&mut page)?;
    let text = String::from_utf8_lossy(&page).replacen(".SH EXTRA\nExamples:", ".SH EXAMPLES", 1);
    std::fs::write(directory.join("dibsd.8"), text + ENDING)
        .with_context(|| format!("cannot write the manual to {}", directory.display()))
}
