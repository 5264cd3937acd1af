//! A stream that either host moves from bump to bump, at random.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netem::rng::Rng;
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, figures};
use super::system::{Contestant, PORT, Place, System};
use crate::link::LinkSpec;

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

/// Pauses are told by so long parts of a stream.
const PART: Duration = Duration::from_millis(50);

/// A stream.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    switches: Vec<Switch>,
    bits_per_second: f64,
    longest_gap_us: u64,
    retransmissions: u64,
}

/// One of its switches.
#[derive(Clone, Debug, Serialize)]
struct Switch {
    at_seconds: f64,
    /// By the host that sends.
    by_sender: bool,
    from: &'static str,
    to: &'static str,
    /// The longest time in which nothing arrived from then on until the next one.
    pause_us: u64,
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = match self.by_sender {
            true => "sender",
            false => "receiver",
        };
        let pause = self.pause_us as f64 / 1e3;
        let Self { from, to, .. } = self;
        write!(f, "{pause:.0} ms, {from} to {to} by the {by}")
    }
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let links = |_: &str, link: LinkSpec| link.shaped(RATE);
    let contestant = place.contestant(System::Idle, "random switches", links)?;
    let title = stage.titled("A stream moved from bump to bump at random, links of 500 Mbit/s");
    let said = |turn: &Turn| {
        let (count, pause) = (turn.switches.len(), turn.longest_gap_us as f64 / 1e3);
        format!("{count} switches, longest pause {pause:.0} ms")
    };
    let mut seed = 0;
    let turn = |of: &Contestant| {
        seed += 1;
        turn(stage, seed, of)
    };
    let turns = stage.turns(&title, &contestant, turn, said)?;
    let longest = turns.iter().map(|turn| turn.longest_gap_us).max();
    let longest = longest.unwrap_or(0) as f64 / 1e3;
    let most = MOST_PAUSE.as_secs_f64() * 1e3;
    let table = Table::of_one(
        &title,
        &turns,
        figures!(turn:
            "switches", 0, turn.switches.len() as f64;
            "Mbit/s", 0, turn.bits_per_second / 1e6;
            "longest pause, ms", 0, turn.longest_gap_us as f64 / 1e3;
            "TCP retransmissions", 0, turn.retransmissions as f64;
        ),
    )?;
    Ok(Table {
        ratios: vec![Ratio::new("longest pause of any round, ms", longest).most(most)],
        notes: worst(&turns),
        ..table
    })
}

fn turn(stage: &Stage<'_>, seed: u64, contestant: &Contestant) -> Result<Turn> {
    let daemons = contestant.daemons();
    let length = TURNS * stage.options.duration;
    let load = stage.load(contestant).interval(PART).endless();
    let mut rng = Rng::new(seed);
    let transfer = load.start(&contestant.site.a, &contestant.site.b)?;
    let start = Instant::now();
    let mut switches: Vec<Switch> = Vec::new();
    let mut at = LEAST_APART;
    while at < length {
        std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
        ensure!(transfer.is_running(), "the stream ended before a switch");
        let asked = start.elapsed();
        let (host, end) = match rng.below(2) {
            0 => (&daemons[0], "--dport"),
            _ => (&daemons[1], "--sport"),
        };
        let bump = rng.pick(&BUMPS);
        let switched = host.switch((end, PORT), bump);
        switched.with_context(|| format!("switch {}, to {bump}", switches.len()))?;
        switches.push(Switch {
            at_seconds: asked.as_secs_f64(),
            by_sender: end == "--dport",
            from: switches.last().map_or("plain", |last| last.to),
            to: bump,
            pause_us: 0,
        });
        let apart = (MOST_APART - LEAST_APART).as_millis() as u64;
        at = start.elapsed() + LEAST_APART + Duration::from_millis(rng.below(apart));
    }
    transfer.stop();
    let report = transfer.finish()?;
    for (part, gap) in report.gaps_us.iter().enumerate() {
        let end = (part + 1) as f64 * PART.as_secs_f64();
        let before = |switch: &&mut Switch| switch.at_seconds <= end;
        if let Some(switch) = switches.iter_mut().rev().find(before) {
            switch.pause_us = switch.pause_us.max(*gap);
        }
    }
    Ok(Turn {
        switches,
        bits_per_second: report.bits_per_second,
        longest_gap_us: report.longest_gap_us,
        retransmissions: report.retransmissions,
    })
}

/// The switches with the longest pauses.
fn worst(turns: &[Turn]) -> Vec<String> {
    let mut all: Vec<&Switch> = turns.iter().flat_map(|turn| &turn.switches).collect();
    all.sort_by_key(|switch| std::cmp::Reverse(switch.pause_us));
    all.truncate(5);
    all.into_iter().map(Switch::to_string).collect()
}
