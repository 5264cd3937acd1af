//! Frames that pass a path or stand in a capture, and the answer to what can be read of them.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use dibs_control::{Client, ConnId, ConnInfo, PathInfo};
use dibs_eavesdrop::{Attacker, Only, Report, Tap};
use dibs_lab::capture::overhear;
use serde::Serialize;

use crate::{capture, render};

use dibsctl::output::{say, show, warn};

/// What was heard, and what to say of it.
pub(super) struct Heard {
    tap: Tap,
    connection: Option<Connection>,
    warnings: Vec<String>,
}

/// The one connection that was asked for.
#[derive(Serialize)]
pub(super) struct Connection {
    pub(super) id: ConnId,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// At the end.
    pub(super) bump: String,
    /// Of its bytes on a bump those that went by this path in the time, both ways.
    pub(super) bytes_by_path: u64,
    /// By all paths.
    pub(super) bytes: u64,
}

#[derive(Serialize)]
struct Answer<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection: &'a Option<Connection>,
}

/// Takes a capture file; `port` is that of dibs' datagrams.
pub(super) fn of_file(file: &Path, port: u16) -> Result<Heard> {
    let mut tap = Tap::new(port);
    let cut = capture::read(file, |at, link, frame| tap.frame(at, link, frame))?;
    Ok(Heard {
        tap,
        connection: None,
        warnings: Vec::from_iter(cut),
    })
}

/// Listens for so many seconds where a path of the daemon's leaves this host; to all, or to one connection.
pub(super) fn of_path(
    client: &mut Client,
    (name, conn): (&str, Option<ConnId>),
    seconds: u32,
    port: u16,
) -> Result<Heard> {
    let before = conn.map(|id| conn_of(client, id)).transpose()?;
    let paths = client.paths()?;
    let leads = |path: &&PathInfo| before.as_ref().is_none_or(|conn| conn.peer == path.peer);
    let path = paths.iter().filter(leads).find(|path| path.name == name);
    let path = path.ok_or_else(|| {
        let names: Vec<_> = paths
            .iter()
            .filter(leads)
            .map(|path| path.name.as_str())
            .collect();
        let whose = before.as_ref().map(|conn| format!(" to {}", conn.peer));
        let whose = whose.unwrap_or_default();
        anyhow!(
            "there is no path {name}{whose}: choose one of {}",
            names.join(", ")
        )
    })?;
    let Some(interface) = &path.interface else {
        bail!("path {name} is not bound to an interface: capture with tcpdump -w, and use --pcap");
    };
    // Of both ends' ports one is told.
    let mut tap = Tap::new(path.remote.map_or(port, |remote| remote.port()));
    if let Some(conn) = &before {
        let host = path.remote.map_or(conn.remote, |remote| remote).ip();
        tap = tap.only(Only {
            ends: [conn.local, conn.remote],
            host,
        });
    }
    note(&format!("listening on {interface} for {seconds} s"));
    let span = Duration::from_secs(seconds.into());
    let missed = overhear(interface, span, |at, link, frame| {
        tap.frame(at, link, frame)
    })?;
    let mut warnings = Vec::new();
    if missed > 0 {
        warnings.push(format!("{missed} packets were too fast to be captured"));
    }
    let connection = match before {
        Some(before) => match conn_of(client, before.id) {
            Ok(after) => Some(Connection::between(&before, &after, name)),
            Err(error) => {
                warnings.push(format!("it has ended: {error:#}"));
                None
            }
        },
        None => None,
    };
    Ok(Heard {
        tap,
        connection,
        warnings,
    })
}

fn conn_of(client: &mut Client, id: ConnId) -> Result<ConnInfo> {
    let conns = client.conns()?;
    let found = conns.into_iter().find(|conn| conn.id == id);
    found.ok_or_else(|| anyhow!("there is no connection {id}: see dibsctl conn list"))
}

impl Connection {
    /// What it did between two looks at it.
    fn between(before: &ConnInfo, after: &ConnInfo, path: &str) -> Self {
        let bytes = |conn: &ConnInfo, only: Option<&str>| {
            let by = conn.paths.iter();
            let by = by.filter(|by| only.is_none_or(|name| by.name == name));
            by.map(|by| by.bytes_sent + by.bytes_received).sum::<u64>()
        };
        let since = |only| match bytes(after, only).checked_sub(bytes(before, only)) {
            Some(bytes) if after.since == before.since => bytes,
            // It counts anew on another bump.
            _ => bytes(after, only),
        };
        Self {
            id: after.id,
            local: after.local,
            remote: after.remote,
            bump: after.bump.clone(),
            bytes_by_path: since(Some(path)),
            bytes: since(None),
        }
    }
}

/// Says what can be read; `known` is a file that the eavesdropper knows to have passed.
pub(super) fn show_what_is_read(heard: &Heard, known: Option<&Path>, json: bool) -> Result<()> {
    let known = match known {
        Some(known) => std::fs::read(known)
            .with_context(|| format!("cannot read the known file, {}", known.display()))?,
        None => Vec::new(),
    };
    note("reading the text; this takes up to a minute for each direction");
    let report = heard.tap.report(&Attacker::new(), &known);
    let answer = Answer {
        report: &report,
        connection: &heard.connection,
    };
    let connection = heard.connection.as_ref();
    show(json, &answer, || {
        connection.map(render::connection).unwrap_or_default() + &render::report(&report)
    })?;
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
