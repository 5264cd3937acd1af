//! dibs beside what else could be used: plain TCP, kernel MPTCP, and VPNs in user space.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::report::{Ratio, Table, Turns, figures};
use super::system::{Contestant, Place, System};
use super::{GIGABIT, Stage, plain_links};
use crate::link::LinkSpec;
use crate::load::Latency;
use crate::processor::Processor;

/// Streams at a time.
const STREAMS: [usize; 2] = [1, 10];
/// Messages take no longer: their figures are steady sooner than those of streams.
const MESSAGES: Duration = Duration::from_secs(3);
/// What dibs is compared with in ratios.
const OTHERS: [System; 3] = [System::Mptcp, System::WireguardGo, System::OpenVpn];
const BUMPS: [System; 3] = [System::Seal, System::Scramble, System::Share];

/// Streams of one system in one round, by [`STREAMS`].
#[derive(Clone, Debug, Serialize)]
struct Turn {
    bits_per_second: [f64; 2],
    /// Of the whole machine, for 10^9 bytes.
    processor_seconds: [f64; 2],
    retransmissions: [u64; 2],
}

/// All tables with this congestion control; messages with the first one only.
pub(super) fn run(stage: &Stage<'_>) -> Result<Vec<Table>> {
    let mut notes = Vec::new();
    let systems = [&[System::Plain][..], &OTHERS, &BUMPS].concat();
    let systems = stage.available(&systems, &mut notes);
    let mut tables = Vec::new();
    for (title, links) in [
        ("links without a limit (veth, MTU 1500)", None),
        ("two links of 1 Gbit/s", Some(GIGABIT)),
    ] {
        let links = |interface: &str, link: LinkSpec| match links {
            Some(rate) => link.shaped(rate),
            None => plain_links(interface, link),
        };
        let mut place = Place::new(stage)?;
        let contestants = place.contestants(&systems, links)?;
        let is_first =
            stage.options.congestion.first().map(String::as_str) == Some(stage.congestion);
        let title = stage.titled(&format!("One stream and ten, {title}"));
        tables.push(streams(stage, &title, &contestants, &notes)?);
        if is_first && tables.len() == 1 {
            tables.push(messages(stage, &contestants)?);
        }
    }
    Ok(tables)
}

fn streams(
    stage: &Stage<'_>,
    title: &str,
    contestants: &[Contestant],
    notes: &[String],
) -> Result<Table> {
    let said = |turn: &Turn| {
        let [one, ten] = turn.bits_per_second.map(|rate| rate / 1e9);
        format!("{one:.2} and {ten:.2} Gbit/s")
    };
    let all = stage.rounds(title, contestants, |of| turn(stage, of), said)?;
    let table = Table::of(
        title,
        "system",
        &all,
        figures!(turn:
            "1 stream, Gbit/s", 3, turn.bits_per_second[0] / 1e9;
            "processor s / GB", 2, turn.processor_seconds[0];
            "retransmissions", 0, turn.retransmissions[0] as f64;
            "10 streams, Gbit/s", 3, turn.bits_per_second[1] / 1e9;
            "processor s / GB", 2, turn.processor_seconds[1];
            "retransmissions", 0, turn.retransmissions[1] as f64;
        ),
    )?;
    Ok(Table {
        ratios: ratios(&all),
        notes: notes.to_vec(),
        ..table
    })
}

fn turn(stage: &Stage<'_>, contestant: &Contestant) -> Result<Turn> {
    let mut turn = Turn {
        bits_per_second: [0.0; 2],
        processor_seconds: [0.0; 2],
        retransmissions: [0; 2],
    };
    for (at, streams) in STREAMS.into_iter().enumerate() {
        let load = stage.load(contestant).streams(streams);
        let before = contestant.counts()?;
        let (mut processor, start) = (Processor::new()?, Instant::now());
        let report = load.run(&contestant.site.a, &contestant.site.b)?;
        let used = processor.used()? / 100.0 * start.elapsed().as_secs_f64();
        contestant.since(&before, report.bytes)?;
        turn.bits_per_second[at] = report.bits_per_second;
        turn.processor_seconds[at] = used / (report.bytes as f64 / 1e9);
        turn.retransmissions[at] = report.retransmissions;
    }
    Ok(turn)
}

fn messages(stage: &Stage<'_>, contestants: &[Contestant]) -> Result<Table> {
    let title = "Messages of 64 bytes, links without a limit";
    let said = |trip: &Latency| format!("p50 {:.0} us", 2.0 * trip.p50_us);
    let turn = |contestant: &Contestant| {
        Latency::measured(
            [&contestant.site.a, &contestant.site.b],
            contestant.to,
            contestant.transport,
            stage.options.duration.min(MESSAGES),
        )
    };
    let all = stage.rounds(title, contestants, turn, said)?;
    Table::of(
        title,
        "system",
        &all,
        // Of a round trip half is reported.
        figures!(trip:
            "round trip p50, us", 0, 2.0 * trip.p50_us;
            "p99, us", 0, 2.0 * trip.p99_us;
        ),
    )
}

/// Each bump's rate of one stream beside each other system's, within rounds.
fn ratios(turns: &Turns<Turn>) -> Vec<Ratio> {
    let names = BUMPS
        .into_iter()
        .flat_map(|bump| OTHERS.map(|other| (bump.label(), other.label())));
    let rate = |turn: &Turn| turn.bits_per_second[0];
    names
        .filter_map(|names| Ratio::beside(turns, "one stream", names, rate))
        .collect()
}
