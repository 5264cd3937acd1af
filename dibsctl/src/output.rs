//! What commands print: a value as JSON or for people, and sentences beside it.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::units;

/// Prints `value`, or what `human` makes of it.
///
/// # Errors
/// If standard output takes no more.
pub fn show(json: bool, value: &impl Serialize, human: impl FnOnce() -> String) -> Result<()> {
    let text = if json {
        serde_json::to_string_pretty(value)? + "\n"
    } else {
        human()
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Says sentences on stderr.
pub fn warn(warnings: &[String]) {
    for warning in warnings {
        say(&format!("warning: {}", units::printable(warning)));
    }
}

/// Says it on stderr, or to nobody when that is closed.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// The exit status of a command; a fault is said on stderr.
pub fn ended(outcome: Result<()>) -> ExitCode {
    let is_broken_pipe = |error: &anyhow::Error| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let text = units::printable(&format!("{error:#}"));
            say(&format!("dibsctl: {text}"));
            ExitCode::FAILURE
        }
    }
}

/// Seconds since the epoch.
pub fn unix_now() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// The runtime of a command's one asynchronous part.
///
/// # Errors
/// If the system gives it nothing to wait on.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().context("start a runtime")
}
