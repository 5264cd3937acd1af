//! `eavesdrop`: what someone on a path sees, and what he can read of it.

mod capture;
mod render;

use std::io::IsTerminal as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use dibs_eavesdrop::{Attacker, Tap};

use crate::commands::{show, warn};

/// Studies a capture file. `port` is that of dibs' datagrams, `known` a file that the eavesdropper knows to have passed.
pub(crate) fn run(file: &Path, port: u16, known: Option<&Path>, json: bool) -> Result<()> {
    let known = match known {
        Some(known) => std::fs::read(known)
            .with_context(|| format!("cannot read what is known, {}", known.display()))?,
        None => Vec::new(),
    };
    let mut tap = Tap::new(port);
    let cut = capture::read(file, |at, link, frame| tap.frame(at, link, frame))?;
    if std::io::stderr().is_terminal() {
        eprintln!("reading what can be read; this takes up to a minute for each direction");
    }
    let report = tap.report(&Attacker::new(), &known);
    show(json, &report, || render::report(&report))?;
    if !json {
        warn(&Vec::from_iter(cut));
    }
    Ok(())
}
