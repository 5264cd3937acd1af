//! One stream over two links that are unlike each other.

use std::time::Duration;

use anyhow::{Result, ensure};
use dibs_netem::Conditions;
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, median};
use super::system::{Contestant, Place, System};
use crate::link::LinkSpec;
use crate::load::Transport;
use crate::site::UNTRUSTED;

/// A link: Mbit/s, round trip in ms, jitter of each way in ms, the share of packets that is lost.
#[derive(Clone, Copy)]
struct Way(u64, u64, u64, f64);

/// Pairs of links, the trusted one first.
const PAIRS: [[Way; 2]; 16] = [
    [Way(300, 10, 0, 0.0), Way(80, 30, 0, 0.0)],
    [Way(50, 20, 0, 0.0), Way(50, 20, 0, 0.0)],
    [Way(50, 20, 0, 0.0), Way(50, 40, 0, 0.0)],
    [Way(50, 20, 0, 0.0), Way(50, 70, 0, 0.0)],
    [Way(50, 20, 0, 0.0), Way(50, 120, 0, 0.0)],
    [Way(50, 20, 0, 0.0), Way(50, 320, 0, 0.0)],
    [Way(50, 40, 0, 0.0), Way(50, 120, 0, 0.0)],
    [Way(20, 60, 0, 0.0), Way(100, 10, 0, 0.0)],
    [Way(100, 10, 0, 0.0), Way(20, 60, 0, 0.0)],
    [Way(40, 30, 0, 0.0), Way(10, 60, 0, 0.0)],
    [Way(10, 60, 0, 0.0), Way(40, 30, 0, 0.0)],
    [Way(100, 10, 0, 0.0), Way(25, 40, 0, 0.005)],
    [Way(50, 40, 10, 0.0), Way(20, 80, 20, 0.0)],
    [Way(100, 10, 0, 0.0), Way(100, 10, 0, 0.01)],
    [Way(100, 10, 0, 0.0), Way(100, 10, 0, 0.05)],
    [Way(200, 4, 0, 0.0), Way(200, 4, 0, 0.0)],
];

/// A turn.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    bits_per_second: f64,
    retransmissions: u64,
    resent: u64,
    longest_gap_us: u64,
    link_bytes: Vec<u64>,
    /// Bytes received in each interval.
    intervals: Vec<u64>,
}

/// A system's turns.
type Series = (String, Vec<Turn>);

impl Way {
    fn conditions(self) -> Conditions {
        let Self(rate, trip, jitter, loss) = self;
        Conditions::new()
            .rate(rate * 1_000_000)
            .delay(Duration::from_millis(trip) / 2)
            .jitter(Duration::from_millis(jitter))
            .loss(loss)
    }

    fn name(self) -> String {
        let Self(rate, trip, jitter, loss) = self;
        let jitter = match jitter {
            0 => String::new(),
            ms => format!(" +-{ms}"),
        };
        let loss = match loss {
            0.0 => String::new(),
            loss => format!(" {}%", loss * 100.0),
        };
        format!("{rate}/{trip}{jitter}{loss}")
    }
}

/// Each pair: TCP by each of the links, kernel MPTCP and seal by both.
pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut table = Table::new(
        &stage.titled("One stream over two emulated links, Mbit/s / round trip in ms"),
        &[
            "links",
            "best alone",
            "sum",
            "kernel MPTCP",
            "seal",
            "lowest to highest",
            "seal / best alone",
            "seal / MPTCP",
            "seal / sum",
            "retransmissions",
            "longest gap, ms",
        ],
    );
    let mut turns = serde_json::Map::new();
    for pair in PAIRS {
        let name = pair.map(Way::name).join(" + ");
        let wanted = stage.options.links.as_ref();
        if !wanted.is_none_or(|wanted| name.contains(wanted)) {
            continue;
        }
        let all = measured(stage, &stage.titled(&name), pair)?;
        table.rows.push(row(&name, &all));
        let [best, mptcp, sum] = ratios(&all);
        let ratio = |what: &str, value| Ratio::new(format!("{name}: {what}"), value).least(1.0);
        table.ratios.push(ratio("seal / best alone", best));
        let more = mptcp.max(sum / 0.95);
        table
            .ratios
            .push(ratio("seal / MPTCP, or / 0.95 of the sum", more));
        turns.insert(name, serde_json::to_value(&all)?);
    }
    ensure!(!table.rows.is_empty(), "no pair of links has such a name");
    table.turns = turns.into();
    Ok(table)
}

/// The turns of plain TCP by the first link and by the second, of MPTCP, and of seal.
fn measured(stage: &Stage<'_>, title: &str, pair: [Way; 2]) -> Result<[Series; 4]> {
    let mut place = Place::new(stage)?;
    let by = |pair: [Way; 2]| {
        move |interface: &str, link: LinkSpec| {
            link.emulated(pair[usize::from(interface == UNTRUSTED)].conditions())
        }
    };
    let [first, second] = pair;
    let contestants = [
        place.contestant(System::Plain, "plain TCP by the first", by(pair))?,
        place.contestant(
            System::Plain,
            "plain TCP by the second",
            by([second, first]),
        )?,
        place.contestant(System::Mptcp, System::Mptcp.label(), by(pair))?,
        place.contestant(System::Seal, System::Seal.label(), by(pair))?,
    ];
    let said = |turn: &Turn| format!("{:.1} Mbit/s", turn.bits_per_second / 1e6);
    let all = stage.rounds(title, &contestants, |of| turn(stage, of), said)?;
    Ok(all.try_into().expect("a series for each contestant"))
}

fn turn(stage: &Stage<'_>, contestant: &Contestant) -> Result<Turn> {
    let before = contestant.counts()?;
    let report = { stage.load(contestant) }.run(&contestant.site.a, &contestant.site.b)?;
    let counts = contestant.since(&before, report.bytes)?;
    if contestant.transport == Transport::Mptcp {
        ensure!(report.subflows == 2, "{} subflows", report.subflows);
    }
    Ok(Turn {
        bits_per_second: report.bits_per_second,
        retransmissions: report.retransmissions,
        resent: counts.resent,
        longest_gap_us: report.longest_gap_us,
        link_bytes: counts.links,
        intervals: report.intervals,
    })
}

fn row(name: &str, all: &[Series; 4]) -> Vec<String> {
    let of = |at: usize, value: fn(&Turn) -> f64| median(all[at].1.iter().map(value));
    let rate = |at| of(at, |turn| turn.bits_per_second / 1e6);
    let rates = || all[3].1.iter().map(|turn| turn.bits_per_second / 1e6);
    let (lowest, highest) = (
        rates().fold(f64::INFINITY, f64::min),
        rates().fold(0.0, f64::max),
    );
    let ratios = ratios(all).map(|ratio| format!("{ratio:.2}"));
    let mut row = vec![
        name.to_owned(),
        format!("{:.1}", rate(0).max(rate(1))),
        format!("{:.1}", rate(0) + rate(1)),
        format!("{:.1}", rate(2)),
        format!("{:.1}", rate(3)),
        format!("{lowest:.1} to {highest:.1}"),
    ];
    row.extend(ratios);
    row.push(format!("{:.0}", of(3, |turn| turn.retransmissions as f64)));
    row.push(format!(
        "{:.1}",
        of(3, |turn| turn.longest_gap_us as f64 / 1e3)
    ));
    row
}

/// Seal beside the best link alone, MPTCP, and the sum of both links; the medians of the rounds' ratios.
fn ratios(all: &[Series; 4]) -> [f64; 3] {
    let rate = |at: usize, round: usize| all[at].1[round].bits_per_second;
    let rounds = || 0..all[3].1.len();
    let beside =
        |other: &dyn Fn(usize) -> f64| median(rounds().map(|round| rate(3, round) / other(round)));
    [
        beside(&|round| rate(0, round).max(rate(1, round))),
        beside(&|round| rate(2, round)),
        beside(&|round| rate(0, round) + rate(1, round)),
    ]
}
