//! The log: lines on standard error; under systemd, entries of the journal with fields.

use std::io::IsTerminal as _;

use nix::sys::stat::fstat;
use tracing_subscriber::fmt::format;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Fields whose names begin with it are for the journal: the sentence says the same. There `dibs.peer` is `DIBS_PEER`.
const FOR_THE_JOURNAL: &str = "dibs.";

/// Has what is logged from now on go where it belongs. `DIBS_LOG` says how much that is.
pub fn start() {
    let filter = EnvFilter::try_from_env("DIBS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let journal = leads_to_journal().then(tracing_journald::layer);
    let layer = match journal {
        Some(Ok(journal)) => journal.with_field_prefix(None).boxed(),
        // Without it, or where it cannot be reached, whoever reads standard error has all.
        _ => tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .fmt_fields(format::debug_fn(|writer, field, value| {
                match field.name() {
                    "message" => write!(writer, "{value:?}"),
                    name if name.starts_with(FOR_THE_JOURNAL) => Ok(()),
                    name => write!(writer, " {name}={value:?}"),
                }
            }))
            // It would print them, and whoever prints where nobody reads panics.
            .log_internal_errors(false)
            .boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .init();
}

/// Whether standard error leads to the journal: systemd says which file that is (systemd.exec(5), `JOURNAL_STREAM`).
fn leads_to_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    fstat(std::io::stderr()).is_ok_and(|file| stream == format!("{}:{}", file.st_dev, file.st_ino))
}

/// An event: its sentence, and for the journal its kind and what it is about.
pub(crate) fn event(kind: &str, text: &str, fields: &[(&str, String)]) {
    let of = |key: &str| {
        let field = fields.iter().find(|(name, _)| *name == key);
        field.map(|(_, value)| value.as_str())
    };
    tracing::info!(
        dibs.event = kind,
        dibs.peer = of("peer"),
        dibs.path = of("path"),
        dibs.bump = of("bump"),
        dibs.rule = of("rule"),
        dibs.connections = of("count"),
        "{text}"
    );
}

/// What was done; an error goes to the log.
pub(crate) fn or_warn<T>(done: Result<T, impl std::fmt::Display>) -> Option<T> {
    let warn = |error| tracing::warn!("{error:#}");
    done.map_err(warn).ok()
}
