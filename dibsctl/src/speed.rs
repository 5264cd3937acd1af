//! `speed`: what each path to a peer carries, and all of them together.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{IsTerminal as _, stderr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use dibs_control::{
    Client, ClientError, ErrorKind, Failure, Measure, Measured, PathInfo, PathState, PeerInfo,
};
use dibs_settings::Role;
use serde::Serialize;

use crate::output::show;
use crate::table::{Table, table};
use crate::units::{micros, printable, rate, seconds};

/// Between two looks. Load is asked for as often; it would end after 2 s.
const LOOK: Duration = Duration::from_millis(200);
/// Part of the time for one direction in which a path is to come up to its rate.
const RISE: f64 = 0.4;

/// Options of `speed`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Peer to measure against [default: the only one, or the exit]
    peer: Option<String>,
    /// Path to measure, even if it has a data cap or is a backup [default: all others]
    #[arg(long, value_name = "NAME")]
    path: Option<String>,
    /// Seconds for all measurements together
    #[arg(long, value_name = "SECONDS", default_value_t = 20.0, value_parser = |text: &str| seconds(text, 1.0..=600.0))]
    time: f64,
}

/// Paths to a peer. Rates are bytes of datagrams a second.
#[derive(Debug, Serialize)]
struct Speed {
    peer: String,
    paths: Vec<Row>,
    /// All paths that were measured, at once; none if that is one.
    all: Option<Row>,
}

/// Rates and round trips of a path, or of all at once.
#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    name: String,
    down_rate: Option<f64>,
    up_rate: Option<f64>,
    /// Round trip without load in microseconds: the least of the last seconds.
    idle_us: Option<u64>,
    /// Round trip under load from the peer.
    down_us: Option<u64>,
    /// Round trip under load to the peer.
    up_us: Option<u64>,
    /// Reason for which it was not measured.
    why: Option<String>,
}

/// Measures, and shows it.
pub(crate) fn run(options: &Options, socket: &Path, json: bool) -> Result<()> {
    let mut client = Client::connect(socket)?;
    let peer = choose(options.peer.as_deref(), &client.peers()?)?;
    let rows = rows(&client.paths()?, &peer, options.path.as_deref())?;
    let measured = rows.iter().filter(|row| row.why.is_none()).count();
    let several = measured > 1;
    let spans = 2 * (measured + usize::from(several)) as u32;
    let mut load = Load {
        client,
        peer,
        run: RandomState::new().hash_one(std::process::id()),
        named: options.path.is_some(),
        span: Duration::from_secs_f64(options.time) / spans,
        terminal: stderr().is_terminal(),
    };
    let speed = load.speed(rows, several);
    load.say("");
    let speed = speed?;
    // Or it would go on for a moment.
    load.ask(false, &[])?;
    show(json, &speed, || speed.table().to_string())
}

/// The peer that is named, or the one that is meant.
fn choose(name: Option<&str>, peers: &[PeerInfo]) -> Result<String> {
    let names = || peers.iter().map(|peer| &*peer.name);
    let mut exits = peers.iter().filter(|peer| peer.is_exit());
    let found = match (name, peers) {
        (Some(name), _) => peers.iter().find(|peer| peer.name == name),
        (None, [only]) => Some(only),
        (None, _) => exits.next().filter(|_| exits.next().is_none()),
    };
    match (found, name) {
        (Some(peer), _) => Ok(peer.name.clone()),
        (None, Some(name)) => bail!(Failure::unknown("peer", name, names())),
        (None, None) if peers.is_empty() => bail!("no peer to measure against: see dibsctl init"),
        (None, None) => {
            let names: Vec<_> = names().collect();
            bail!("there are several peers: name one of {}", names.join(", "))
        }
    }
}

/// The paths to a peer, one each, with the reasons why some are not measured.
fn rows(paths: &[PathInfo], peer: &str, named: Option<&str>) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for path in paths.iter().filter(|path| path.peer == peer) {
        let is_spared = named.is_none();
        let why = match path.state {
            PathState::Up if is_spared && path.volume.is_some() => {
                Some("it has a data cap: name it with --path".to_owned())
            }
            PathState::Up if is_spared && path.role == Role::Backup.name() => {
                Some("it is a backup: name it with --path".to_owned())
            }
            PathState::Up => None,
            _ => path.reason.clone().or(Some("it is down".to_owned())),
        };
        let row = Row {
            name: path.name.clone(),
            idle_us: path.min_rtt_us,
            why,
            ..Row::default()
        };
        // Several may lead to one peer from one interface, of which one answers.
        match rows.iter_mut().find(|known| known.name == row.name) {
            Some(known) if known.why.is_some() => *known = row,
            Some(_) => {}
            None => rows.push(row),
        }
    }
    if let Some(name) = named {
        if !rows.iter().any(|row| row.name == name) {
            let names = rows.iter().map(|row| &*row.name);
            bail!(Failure::unknown(&format!("path to {peer}"), name, names));
        }
        rows.retain(|row| row.name == name);
        if let Some(Row { why: Some(why), .. }) = rows.first() {
            bail!("path {name} cannot be measured: {why}");
        }
    }
    measurable(&rows, peer)?;
    Ok(rows)
}

/// Refuses if no path is left to be measured.
fn measurable(rows: &[Row], peer: &str) -> Result<()> {
    if rows.iter().any(|row| row.why.is_none()) {
        return Ok(());
    }
    let why = |row: &Row| format!(": {}, {}", row.name, row.why.as_deref().unwrap_or_default());
    let whys: String = rows.iter().map(why).collect();
    bail!("no path to {peer} can be measured{whys}: see dibsctl peer list")
}

/// A measurement under way.
struct Load {
    client: Client,
    peer: String,
    run: u64,
    named: bool,
    /// Time for one direction of a path.
    span: Duration,
    terminal: bool,
}

impl Load {
    fn speed(&mut self, mut rows: Vec<Row>, several: bool) -> Result<Speed> {
        for row in rows.iter_mut().filter(|row| row.why.is_none()) {
            match self.row(&row.name, std::slice::from_ref(&row.name)) {
                Ok(found) => {
                    let idle_us = row.idle_us;
                    *row = Row { idle_us, ..found };
                }
                Err(ClientError::Refused(failure))
                    if several && failure.kind == ErrorKind::Refused =>
                {
                    row.why = Some(failure.message);
                }
                Err(error) => return Err(error.into()),
            }
        }
        measurable(&rows, &self.peer)?;
        let measured = rows.iter().filter(|row| row.why.is_none());
        let names: Vec<String> = measured.map(|row| row.name.clone()).collect();
        let all = match &names[..] {
            [_] => None,
            _ => Some(self.row("all", &names)?),
        };
        Ok(Speed {
            peer: self.peer.clone(),
            paths: rows,
            all,
        })
    }

    /// Measures paths at once, in one direction after the other.
    fn row(&mut self, name: &str, paths: &[String]) -> Result<Row, ClientError> {
        let (down_rate, down_us) = self.direction(name, paths, true)?;
        let (up_rate, up_us) = self.direction(name, paths, false)?;
        Ok(Row {
            name: name.to_owned(),
            down_rate: Some(down_rate),
            up_rate: Some(up_rate),
            down_us: Some(down_us),
            up_us: Some(up_us),
            ..Row::default()
        })
    }

    /// The rate, and the mean of the longest round trip.
    fn direction(
        &mut self,
        name: &str,
        paths: &[String],
        down: bool,
    ) -> Result<(f64, u64), ClientError> {
        let direction = if down { "down" } else { "up" };
        let begin = Instant::now();
        let mut from: Option<Measured> = None;
        let (mut trips, mut looks) = (0, 0);
        loop {
            let seen = self.ask(down, paths)?;
            let passed = begin.elapsed();
            if let Some(from) = &from {
                let longest = seen.paths.iter().map(|path| path.srtt_us).max();
                trips += longest.unwrap_or_default();
                looks += 1;
                let carried = carried(from, &seen);
                self.say(&format!("{name} {direction}: {}", rate(carried as u64)));
                if passed >= self.span {
                    return Ok((carried, trips / looks));
                }
            } else if passed >= self.span.mul_f64(RISE) {
                from = Some(seen);
            } else {
                self.say(&format!("{name} {direction}"));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn ask(&mut self, down: bool, paths: &[String]) -> Result<Measured, ClientError> {
        self.client.measure(Measure {
            peer: self.peer.clone(),
            run: self.run,
            down,
            named: self.named,
            paths: paths.to_vec(),
        })
    }

    /// Says on a terminal how far it is.
    fn say(&self, text: &str) {
        if self.terminal {
            eprint!("\r\x1b[K{}", printable(text));
        }
    }
}

/// Bytes a second that paths have carried between two looks.
fn carried(from: &Measured, seen: &Measured) -> f64 {
    let bytes = seen.paths.iter().map(|path| {
        let known = from.paths.iter().find(|known| known.name == path.name);
        path.bytes
            .saturating_sub(known.map_or(path.bytes, |known| known.bytes))
    });
    bytes.sum::<u64>() as f64 / (seen.at - from.at).max(f64::EPSILON)
}

impl Speed {
    fn table(&self) -> Table {
        let rows: Vec<&Row> = self.paths.iter().chain(&self.all).collect();
        let trip = |us: Option<u64>| us.map(micros).unwrap_or_default();
        let speed = |bytes: Option<f64>| bytes.map(|bytes| rate(bytes as u64)).unwrap_or_default();
        table!(rows, row:
            "PATH", row.name.clone();
            ">DOWN", speed(row.down_rate);
            ">UP", speed(row.up_rate);
            ">RTT", trip(row.idle_us);
            ">RTT DOWN", trip(row.down_us);
            ">RTT UP", trip(row.up_us);
            "WHY NOT MEASURED", row.why.clone().unwrap_or_default();
        )
    }
}

#[cfg(test)]
mod tests {
    use dibs_control::PathCount;

    use super::*;

    #[test]
    fn the_peer_is_the_named_one_the_only_one_or_the_exit() {
        let peer = |(name, net): (&str, &str)| -> PeerInfo {
            let peer = serde_json::json!({
                "name": name, "state": "established", "public_key": "", "addresses": [net], "since": null,
                "bytes_sent": 0, "bytes_received": 0, "connections": 0, "reason": null,
            });
            serde_json::from_value(peer).expect("a peer")
        };
        let peers = [("b", "10.0.1.2/32"), ("server", "0.0.0.0/0"), ("c", "::/0")].map(peer);
        let chosen = |name, peers| choose(name, peers).map_err(|why| why.to_string());
        assert_eq!(chosen(Some("b"), &peers), Ok("b".to_owned()));
        assert_eq!(chosen(None, &peers[..1]), Ok("b".to_owned()));
        assert_eq!(chosen(None, &peers[..2]), Ok("server".to_owned()));
        let several = "there are several peers: name one of b, server, c";
        assert_eq!(chosen(None, &peers), Err(several.to_owned()));
        assert!(chosen(None, &[]).is_err());
    }

    #[test]
    fn a_path_that_comes_or_begins_anew_adds_nothing_that_was_before() {
        let measured = |at, paths: &[(&str, u64)]| Measured {
            at,
            paths: { paths.iter() }
                .map(|(name, bytes)| PathCount {
                    name: (*name).to_owned(),
                    bytes: *bytes,
                    srtt_us: 0,
                })
                .collect(),
        };
        let from = measured(1.0, &[("dsl", 100), ("lte", 9000)]);
        let seen = measured(3.0, &[("dsl", 700), ("lte", 5), ("wwan", 9000)]);
        assert_eq!(carried(&from, &seen), 300.0);
    }
}
