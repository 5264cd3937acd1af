//! Small messages where it is not quiet: beside a stream, and over links that lose.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use dibs_netem::Conditions;

use super::Stage;
use super::report::{Ratio, Table, columns, median};
use super::system::{Contestant, MESSAGES, Place, System};
use crate::link::LinkSpec;
use crate::load::{Latency, LatencyReport, Throughput};
use crate::site::UNTRUSTED;

/// Of messages beside a stream, 99 % arrive within so many times what they take without it, and this.
const MOST_TIMES: f64 = 3.0;
const MOST_MORE: Duration = Duration::from_millis(10);

/// How a turn went, without a stream and with one.
type Pair = [LatencyReport; 2];

const COLUMNS: [&str; 4] = ["", "p50, ms", "p99, ms", "highest, ms"];

/// Messages on seal over 50 Mbit/s of 20 and of 70 ms, without and with a stream beside them.
pub(super) fn beside(stage: &Stage<'_>) -> Result<Table> {
    let link = |interface: &str, link: LinkSpec| {
        let trip = if interface == UNTRUSTED { 70 } else { 20 };
        let delay = Duration::from_millis(trip) / 2;
        link.emulated(Conditions::new().rate(50_000_000).delay(delay))
    };
    let mut place = Place::new(stage)?;
    let contestant = place.contestant(System::Seal, System::Seal.label(), link)?;
    let title = stage.titled("64-byte messages on seal, links of 50 Mbit/s, 20 and 70 ms");
    let mut turns: Vec<Pair> = Vec::new();
    for round in 1..=stage.options.rounds {
        let alone = messages(stage, &contestant)?;
        let load = Throughput::new(contestant.to)
            .congestion(stage.congestion)
            .endless();
        let stream = load.start(&contestant.site.a, &contestant.site.b)?;
        let beside = messages(stage, &contestant);
        stream.stop();
        stream.finish()?;
        let beside = beside?;
        eprintln!(
            "{title}, round {round}: p99 {:.1} ms alone, {:.1} ms beside a stream",
            trip(alone.p99_us),
            trip(beside.p99_us)
        );
        turns.push([alone, beside]);
    }
    let of = |at: usize, value: fn(&LatencyReport) -> f64| {
        median(turns.iter().map(|pair| trip(value(&pair[at]))))
    };
    let row = |name: &str, at: usize| {
        let values = [
            of(at, |r| r.p50_us),
            of(at, |r| r.p99_us),
            of(at, |r| r.max_us),
        ];
        let values = values.map(|ms| format!("{ms:.1}"));
        std::iter::once(name.to_owned()).chain(values).collect()
    };
    let most = MOST_TIMES * of(0, |r| r.p99_us) + MOST_MORE.as_secs_f64() * 1e3;
    Ok(Table {
        title,
        columns: columns(COLUMNS),
        rows: vec![row("alone", 0), row("beside a stream", 1)],
        ratios: vec![Ratio {
            what: "p99 beside a stream / (3 times p99 alone and 10 ms)".to_owned(),
            value: of(1, |r| r.p99_us) / most,
            least: None,
            most: Some(1.0),
        }],
        notes: Vec::new(),
        turns: serde_json::to_value(&turns)?,
    })
}

/// Messages on seal over two links that lose 5 % each, by one path at a time and by both.
pub(super) fn redundant(stage: &Stage<'_>) -> Result<Table> {
    let link = |_: &str, link: LinkSpec| {
        let delay = Duration::from_millis(10);
        link.emulated(Conditions::new().rate(100_000_000).delay(delay).loss(0.05))
    };
    let mut place = Place::new(stage)?;
    let contestants = place.contestants(&[System::Seal, System::Redundant], link)?;
    let title = "64-byte messages, two links of 20 ms that lose 5 % each".to_owned();
    let said = |turn: &LatencyReport| {
        let (p50, p99) = (trip(turn.p50_us), trip(turn.p99_us));
        format!("p50 {p50:.1}, p99 {p99:.1} ms")
    };
    let turns = stage.rounds(&title, &contestants, |of| messages(stage, of), said)?;
    let of = |turns: &[LatencyReport], value: fn(&LatencyReport) -> f64| {
        median(turns.iter().map(|turn| trip(value(turn))))
    };
    let rows = contestants.iter().zip(&turns).map(|(contestant, turns)| {
        let values = [
            of(turns, |r| r.p50_us),
            of(turns, |r| r.p99_us),
            of(turns, |r| r.max_us),
        ];
        let values = values.map(|ms| format!("{ms:.1}"));
        std::iter::once(contestant.label.clone())
            .chain(values)
            .collect()
    });
    let rows = rows.collect();
    let tail = turns[1].iter().map(|turn| turn.p99_us / turn.p50_us);
    Ok(Table {
        title,
        columns: columns(COLUMNS),
        rows,
        ratios: vec![Ratio {
            what: "redundant: p99 / p50".to_owned(),
            value: median(tail),
            least: None,
            most: Some(1.3),
        }],
        notes: Vec::new(),
        turns: serde_json::to_value(&turns)?,
    })
}

/// The whole round trip in ms of what is reported as half of it in us.
fn trip(half_us: f64) -> f64 {
    2.0 * half_us / 1e3
}

fn messages(stage: &Stage<'_>, contestant: &Contestant) -> Result<LatencyReport> {
    let to = SocketAddr::new(contestant.to.ip(), MESSAGES);
    let load = Latency::new(to).duration(stage.options.duration);
    load.run(&contestant.site.a, &contestant.site.b)
}
