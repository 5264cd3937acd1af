//! `eavesdrop`: what someone on a path sees, and what he can read of it.

mod capture;
mod render;

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use dibs_control::Client;
use dibs_eavesdrop::{Attacker, Tap};
use dibs_lab::capture::overhear;

use crate::commands::{say, show, warn};

/// What was heard, and what to say of it.
pub(crate) struct Heard {
    tap: Tap,
    warnings: Vec<String>,
}

/// Takes a capture file; `port` is that of dibs' datagrams.
pub(crate) fn of_file(file: &Path, port: u16) -> Result<Heard> {
    let mut tap = Tap::new(port);
    let cut = capture::read(file, |at, link, frame| tap.frame(at, link, frame))?;
    Ok(Heard {
        tap,
        warnings: Vec::from_iter(cut),
    })
}

/// Listens for so many seconds where a path of the daemon's leaves this host.
pub(crate) fn of_path(client: &mut Client, name: &str, seconds: u32, port: u16) -> Result<Heard> {
    let paths = client.paths()?;
    let path = paths.iter().find(|path| path.name == name);
    let path = path.ok_or_else(|| {
        let names: Vec<_> = paths.iter().map(|path| path.name.as_str()).collect();
        anyhow!("there is no path {name}, but {}", names.join(", "))
    })?;
    let Some(interface) = &path.interface else {
        bail!(
            "path {name} is bound to no interface: capture with tcpdump -w, and give it as --pcap"
        );
    };
    // Of both ends' ports one is told.
    let port = path.remote.map_or(port, |remote| remote.port());
    note(&format!("listening on {interface} for {seconds} s"));
    let mut tap = Tap::new(port);
    let span = Duration::from_secs(seconds.into());
    let missed = overhear(interface, span, |at, link, frame| {
        tap.frame(at, link, frame)
    })?;
    let warnings = match missed {
        0 => Vec::new(),
        missed => vec![format!("{missed} packets passed too quickly to be heard")],
    };
    Ok(Heard { tap, warnings })
}

/// Says what can be read; `known` is a file that the eavesdropper knows to have passed.
pub(crate) fn show_what_is_read(heard: &Heard, known: Option<&Path>, json: bool) -> Result<()> {
    let known = match known {
        Some(known) => std::fs::read(known)
            .with_context(|| format!("cannot read what is known, {}", known.display()))?,
        None => Vec::new(),
    };
    note("reading what can be read; this takes up to a minute for each direction");
    let report = heard.tap.report(&Attacker::new(), &known);
    show(json, &report, || render::report(&report))?;
    if !json {
        warn(&heard.warnings);
    }
    Ok(())
}

/// For who waits at a terminal.
fn note(text: &str) {
    if std::io::stderr().is_terminal() {
        say(text);
    }
}
