//! A stream that either host moves from bump to bump, at random.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_control::Changed;
use dibs_sim::rng::Rng;
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, median};
use super::system::{Contestant, PORT, Place, System};
use crate::link::LinkSpec;
use crate::load::Throughput;

const RATE: u64 = 500_000_000;
/// A round is so many turns of other experiments long.
const TURNS: u32 = 4;
/// Between two switches.
const LEAST_APART: Duration = Duration::from_millis(200);
const MOST_APART: Duration = Duration::from_millis(700);
/// Nothing arrives for so long at most.
const MOST_PAUSE: Duration = Duration::from_millis(150);
/// What the stream is put on; plain too.
const BUMPS: [&str; 4] = ["plain", "scramble", "share", "seal"];

/// A stream.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    switches: usize,
    bits_per_second: f64,
    longest_gap_us: u64,
    retransmissions: u64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let links = |_: &str, link: LinkSpec| link.shaped(RATE);
    let contestant = place.contestant(System::Idle, "random switches", links)?;
    let title = stage.titled("A stream moved from bump to bump at random, links of 500 Mbit/s");
    let mut turns = Vec::new();
    for round in 1..=stage.options.rounds {
        let turn = turn(stage, round as u64, &contestant)?;
        eprintln!(
            "{title}, round {round}: {} switches, longest pause {:.0} ms",
            turn.switches,
            turn.longest_gap_us as f64 / 1e3
        );
        turns.push(turn);
    }
    let of = |value: fn(&Turn) -> f64| median(turns.iter().map(value));
    let longest = turns.iter().map(|turn| turn.longest_gap_us).max();
    let longest = longest.unwrap_or(0) as f64 / 1e3;
    let row = |name: &str, value: f64| vec![name.to_owned(), format!("{value:.0}")];
    Ok(Table {
        title,
        columns: vec![String::new(), "median".to_owned()],
        rows: vec![
            row("switches", of(|turn| turn.switches as f64)),
            row("Mbit/s", of(|turn| turn.bits_per_second / 1e6)),
            row(
                "longest pause, ms",
                of(|turn| turn.longest_gap_us as f64 / 1e3),
            ),
            row(
                "TCP retransmissions",
                of(|turn| turn.retransmissions as f64),
            ),
        ],
        ratios: vec![Ratio {
            what: "longest pause of any round, ms".to_owned(),
            value: longest,
            least: None,
            most: Some(MOST_PAUSE.as_secs_f64() * 1e3),
        }],
        notes: Vec::new(),
        turns: serde_json::to_value(&turns)?,
    })
}

fn turn(stage: &Stage<'_>, seed: u64, contestant: &Contestant) -> Result<Turn> {
    let daemons = contestant.daemons.as_ref();
    let daemons = daemons.expect("this contestant has daemons");
    let length = TURNS * stage.options.duration;
    let load = Throughput::new(contestant.to)
        .congestion(stage.congestion)
        .endless();
    let mut rng = Rng::new(seed);
    let transfer = load.start(&contestant.site.a, &contestant.site.b)?;
    let start = Instant::now();
    let mut switches = 0;
    let port = PORT.to_string();
    let mut at = LEAST_APART;
    while at < length {
        std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
        ensure!(transfer.is_running(), "the stream ended before a switch");
        let (host, end) = match rng.below(2) {
            0 => (&daemons[0], "--dport"),
            _ => (&daemons[1], "--sport"),
        };
        let bump = rng.pick(&BUMPS);
        let words: &[&str] = match bump {
            "plain" => &["disable", end, &port],
            bump => &["enable", end, &port, "--bump", bump],
        };
        let changed: Changed = host
            .ctl(words)
            .with_context(|| format!("switch {switches}, to {bump}"))?;
        let moved = changed.connections.len();
        ensure!(moved == 1, "switch {switches} moved {moved} connections");
        switches += 1;
        let apart = (MOST_APART - LEAST_APART).as_millis() as u64;
        at = start.elapsed() + LEAST_APART + Duration::from_millis(rng.below(apart));
    }
    transfer.stop();
    let report = transfer.finish()?;
    Ok(Turn {
        switches,
        bits_per_second: report.bits_per_second,
        longest_gap_us: report.longest_gap_us,
        retransmissions: report.retransmissions,
    })
}
