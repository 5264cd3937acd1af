//! What commands print: a value as JSON or for people, and sentences beside it.

use std::io::{self, Write as _};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::units;

/// Prints `value`, or what `human` makes of it.
pub(crate) fn show(
    json: bool,
    value: &impl Serialize,
    human: impl FnOnce() -> String,
) -> Result<()> {
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
pub(crate) fn warn(warnings: &[String]) {
    for warning in warnings {
        say(&format!("warning: {}", units::printable(warning)));
    }
}

/// Says it on stderr, or to nobody when that is closed.
pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Seconds since the epoch.
pub(crate) fn unix_now() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// What runs the one asynchronous part of a command.
pub(crate) fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().context("start a runtime")
}
