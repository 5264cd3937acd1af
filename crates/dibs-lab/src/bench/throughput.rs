//! One stream, as fast as it goes.

use anyhow::{Result, ensure};
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, median};
use super::system::Contestant;
use crate::load::Transport;

/// A turn.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Turn {
    pub(super) bits_per_second: f64,
    pub(super) retransmissions: u64,
    resent: u64,
    pub(super) longest_gap_us: u64,
    link_bytes: Vec<u64>,
    /// Bytes received in each interval.
    intervals: Vec<u64>,
}

/// A system's turns.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Series {
    pub(super) system: String,
    pub(super) turns: Vec<Turn>,
}

/// A system and one, or the sum of several joined by " + ", that it is compared with, and what it
/// should reach of them.
type Comparison = (&'static str, &'static str, Option<f64>);

/// To be compared with nothing: megabytes of the application's data each second.
pub(super) const MEGABYTES: &str = "MB/s of application data";

/// Runs the contestants in turn and compares them.
pub(super) fn table(
    stage: &Stage<'_>,
    title: &str,
    contestants: &[Contestant],
    comparisons: &[Comparison],
) -> Result<Table> {
    let title = &stage.titled(title);
    let all = rounds(stage, title, contestants)?;
    let ratios = comparisons
        .iter()
        .filter_map(|&(one, other, least)| compare(&all, one, other, least))
        .collect();
    let mut table = Table::new(
        title,
        &[
            "system",
            "Gbit/s",
            "lowest to highest",
            "TCP retransmissions",
            "resent by the path layer",
            "longest gap, ms",
            "MB by link",
        ],
    );
    table.rows = all.iter().map(row).collect();
    table.ratios = ratios;
    table.turns = serde_json::to_value(&all)?;
    Ok(table)
}

/// Runs the contestants in turn, round by round.
pub(super) fn rounds(
    stage: &Stage<'_>,
    title: &str,
    contestants: &[Contestant],
) -> Result<Vec<Series>> {
    let said = |turn: &Turn| format!("{:.1} Mbit/s", turn.bits_per_second / 1e6);
    let all = stage.rounds(title, contestants, |of| turn(stage, of), said)?;
    let series = all
        .into_iter()
        .map(|(system, turns)| Series { system, turns });
    Ok(series.collect())
}

fn turn(stage: &Stage<'_>, contestant: &Contestant) -> Result<Turn> {
    let before = contestant.counts()?;
    let report = stage
        .load(contestant)
        .run(&contestant.site.a, &contestant.site.b)?;
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

impl Series {
    /// The lowest rate of all turns and the highest, in such units.
    pub(super) fn range(&self, unit: f64) -> (f64, f64) {
        let rates = || self.turns.iter().map(|turn| turn.bits_per_second / unit);
        (
            rates().fold(f64::INFINITY, f64::min),
            rates().fold(0.0, f64::max),
        )
    }
}

fn row(series: &Series) -> Vec<String> {
    let of = |value: fn(&Turn) -> f64| median(series.turns.iter().map(value));
    let (lowest, highest) = series.range(1e9);
    vec![
        series.system.clone(),
        format!("{:.3}", of(|turn| turn.bits_per_second / 1e9)),
        format!("{lowest:.3} to {highest:.3}"),
        format!("{:.0}", of(|turn| turn.retransmissions as f64)),
        format!("{:.0}", of(|turn| turn.resent as f64)),
        format!("{:.1}", of(|turn| turn.longest_gap_us as f64 / 1e3)),
        by_link(series),
    ]
}

/// What each link carried, the medians of the rounds.
fn by_link(series: &Series) -> String {
    let links = series.turns.first().map_or(0, |turn| turn.link_bytes.len());
    let megabytes = (0..links).map(|link| {
        let turns = series.turns.iter();
        let median = median(turns.map(|turn| turn.link_bytes[link] as f64 / 1e6));
        format!("{median:.0}")
    });
    megabytes.collect::<Vec<_>>().join(" / ")
}

/// The median of the rounds' ratios; nothing if one of the two did not run.
fn compare(all: &[Series], one: &str, other: &str, least: Option<f64>) -> Option<Ratio> {
    let find = |name: &str| all.iter().find(|series| series.system == name);
    if other == MEGABYTES {
        let turns = find(one)?.turns.iter();
        let rate = median(turns.map(|turn| turn.bits_per_second / 8e6));
        return Some(Ratio::new(format!("{one}, {MEGABYTES}"), rate).least(least));
    }
    let others = other.split(" + ").map(find).collect::<Option<Vec<_>>>()?;
    let ratios = find(one)?.turns.iter().enumerate().map(|(round, turn)| {
        let others = others.iter().map(|series| &series.turns[round]);
        turn.bits_per_second / others.map(|turn| turn.bits_per_second).sum::<f64>()
    });
    let what = match other.contains(" + ") {
        true => format!("{one} / ({other})"),
        false => format!("{one} / {other}"),
    };
    Some(Ratio::new(what, median(ratios)).least(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(system: &str, rates: &[f64]) -> Series {
        let turn = |&bits_per_second: &f64| Turn {
            bits_per_second,
            retransmissions: 0,
            resent: 0,
            longest_gap_us: 0,
            link_bytes: vec![0; 2],
            intervals: Vec::new(),
        };
        Series {
            system: system.to_owned(),
            turns: rates.iter().map(turn).collect(),
        }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        // In the second round, the machine was slow for both.
        let all = [series("x", &[8.0, 2.0, 9.0]), series("y", &[4.0, 1.0, 3.0])];
        assert_eq!(compare(&all, "x", "y", None).unwrap().value, 2.0);
        let sum = compare(&all, "y", "x + y", None).unwrap();
        assert_eq!((sum.what.as_str(), sum.value), ("y / (x + y)", 1.0 / 3.0));
        assert!(compare(&all, "x", "z", None).is_none());
    }
}
