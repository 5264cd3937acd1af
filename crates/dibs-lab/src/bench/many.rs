//! Many open connections that each say something once a second.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::report::{Ratio, Table, figures};
use super::system::{Contestant, Place, System};
use super::{Stage, plain_links};
use crate::load::{Beats, BeatsReport};
use crate::processor::Processor;

const CONNECTIONS: usize = 10_000;
/// How often each speaks.
const INTERVAL: Duration = Duration::from_secs(1);
const SYSTEMS: [System; 5] = [
    System::Plain,
    System::WireguardGo,
    System::Seal,
    System::Scramble,
    System::Share,
];

/// A system in one round.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    messages: BeatsReport,
    /// Of the whole machine, in percent of one of its processors.
    machine_percent: f64,
    /// Of the two programs that carry the connections.
    programs_percent: f64,
    /// Of the one that has more.
    resident_bytes: u64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut notes = Vec::new();
    let systems = stage.available(&SYSTEMS, &mut notes);
    let mut place = Place::new(stage)?;
    let contestants = place.contestants(&systems, plain_links)?;
    let title =
        format!("{CONNECTIONS} open connections, 64 bytes to and fro once a second by each");
    let said = |turn: &Turn| {
        let (used, p99) = (turn.machine_percent, turn.messages.p99_us / 1e3);
        format!("{used:.0} % of a processor, p99 {p99:.1} ms")
    };
    let all = stage.rounds(&title, &contestants, |of| turn(stage, of), said)?;
    let mut table = Table::of(
        &title,
        "system",
        &all,
        figures!(turn:
            "% of a processor, machine", 0, turn.machine_percent;
            "both programs", 0, turn.programs_percent;
            "MiB of one", 1, mebibytes(turn);
            "round trip p50, ms", 2, turn.messages.p50_us / 1e3;
            "p99, ms", 2, turn.messages.p99_us / 1e3;
            "late", 0, turn.messages.late as f64;
        ),
    )?;
    for bump in [System::Seal, System::Scramble, System::Share] {
        let names = (bump.label(), System::WireguardGo.label());
        let machine = Ratio::beside(&all, "machine", names, |turn| turn.machine_percent);
        let memory = Ratio::beside(&all, "memory", names, mebibytes);
        table.ratios.extend(machine.into_iter().chain(memory));
    }
    table.notes = notes;
    Ok(table)
}

fn mebibytes(turn: &Turn) -> f64 {
    turn.resident_bytes as f64 / f64::from(1 << 20)
}

fn turn(stage: &Stage<'_>, contestant: &Contestant) -> Result<Turn> {
    let (a, b) = (&contestant.site.a, &contestant.site.b);
    let beats = Beats::open(a, b, contestant.to, CONNECTIONS)?;
    let opened = contestant.resident()?;
    let before = contestant.counts()?;
    let (mut processor, used, start) = (Processor::new()?, contestant.used()?, Instant::now());
    let messages = beats.run(INTERVAL, stage.options.duration)?;
    let took = start.elapsed();
    let machine_percent = processor.used()?;
    let used = contestant.used()?.saturating_sub(used);
    contestant.since(&before, 64 * messages.count as u64)?;
    Ok(Turn {
        messages,
        machine_percent,
        programs_percent: 100.0 * used.as_secs_f64() / took.as_secs_f64(),
        resident_bytes: contestant.resident()?.max(opened),
    })
}
