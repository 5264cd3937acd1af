//! Small messages where it is not quiet: beside a stream, and over links that lose.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use dibs_netem::Conditions;
use serde_json::json;

use super::Stage;
use super::report::{Figure, Ratio, Table, figures, median};
use super::system::{Contestant, MESSAGES, Place, System};
use crate::link::LinkSpec;
use crate::load::{Latency, LatencyReport};
use crate::site::UNTRUSTED;

/// Of messages beside a stream, 99 % arrive within so many times what they take without it, and this.
const MOST_TIMES: f64 = 3.0;
const MOST_MORE: Duration = Duration::from_millis(10);

/// What is told of messages.
const TRIPS: &[Figure<'_, LatencyReport>] = figures!(turn:
    "p50, ms", 1, trip(turn.p50_us);
    "p99, ms", 1, trip(turn.p99_us);
    "highest, ms", 1, trip(turn.max_us);
);

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
    let turn = |of: &Contestant| {
        let alone = messages(stage, of)?;
        let stream = stage.load(of).endless().start(&of.site.a, &of.site.b)?;
        let beside = messages(stage, of);
        stream.stop();
        stream.finish()?;
        Ok([alone, beside?])
    };
    let said = |[alone, beside]: &[LatencyReport; 2]| {
        let (alone, beside) = (trip(alone.p99_us), trip(beside.p99_us));
        format!("p99 {alone:.1} ms alone, {beside:.1} ms beside a stream")
    };
    let turns = stage.turns(&title, &contestant, turn, said)?;
    let of = |name: &str, at: usize| {
        let turns = turns.iter().map(|both| both[at].clone());
        (name.to_owned(), turns.collect())
    };
    let both = [of("alone", 0), of("beside a stream", 1)];
    let [alone, beside] = [&both[0].1, &both[1].1]
        .map(|turns: &Vec<LatencyReport>| median(turns.iter().map(|turn| trip(turn.p99_us))));
    let most = MOST_TIMES * alone + MOST_MORE.as_secs_f64() * 1e3;
    let what = "p99 beside a stream / (3 times p99 alone and 10 ms)";
    Ok(Table {
        ratios: vec![Ratio::new(what, beside / most).most(1.0)],
        turns: serde_json::to_value(&turns)?,
        ..Table::of(&title, "", &both, TRIPS)?
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
    let tail = turns[1].1.iter().map(|turn| turn.p99_us / turn.p50_us);
    Ok(Table {
        ratios: vec![Ratio::new("redundant: p99 / p50", median(tail)).most(1.3)],
        turns: turns.iter().map(|(_, turns)| json!(turns)).collect(),
        ..Table::of(&title, "", &turns, TRIPS)?
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
