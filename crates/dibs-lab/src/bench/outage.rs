//! A path that dies in the midst of a transfer, and comes back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dibs_netem::Conditions;
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, figures, median};
use super::system::{Contestant, Place, System};
use crate::link::LinkSpec;
use crate::site::{INTERFACES, UNTRUSTED};

/// Each link's rate in Mbit/s and round trip in ms, the trusted one first.
const LINKS: [(u64, u64); 2] = [(50, 20), (50, 40)];
/// Probe timeouts that nothing may arrive for.
const MOST_TIMEOUTS: f64 = 2.0;
/// What a peer waits at most before it acknowledges.
const ACK_DELAY: Duration = Duration::from_millis(1);

/// A transfer in which one path dies after a third, and lives again after another one.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    /// The path's probe timeout as it died (RFC 9002, 6.2.1).
    timeout_us: u64,
    longest_gap_us: u64,
    bits_per_second: f64,
    retransmissions: u64,
    /// Bytes that its link carried in the last third.
    carried_again: u64,
}

/// Each of two paths in turn.
pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let links = |interface: &str, link: LinkSpec| {
        let (rate, trip) = LINKS[usize::from(interface == UNTRUSTED)];
        let delay = Duration::from_millis(trip) / 2;
        link.emulated(Conditions::new().rate(rate * 1_000_000).delay(delay))
    };
    let contestant = place.contestant(System::Seal, System::Seal.label(), links)?;
    let names = LINKS.map(|(rate, trip)| format!("{rate}/{trip}"));
    let title = stage.titled(&format!(
        "Seal over links of {}, Mbit/s / ms; one dies for a third of a stream",
        names.join(" + ")
    ));
    let turn = |of: &Contestant| Ok([turn(stage, of, 0)?, turn(stage, of, 1)?]);
    let said = |both: &[Turn; 2]| {
        let told = both.iter().zip(INTERFACES).map(|(turn, interface)| {
            let [gap, timeout] = [turn.longest_gap_us, turn.timeout_us].map(|us| us as f64 / 1e3);
            format!("{interface} {gap:.0} ms without a byte, probe timeout {timeout:.0} ms")
        });
        told.collect::<Vec<_>>().join("; ")
    };
    let all = stage.turns(&title, &contestant, turn, said)?;
    let by_path = [0, 1].map(|dies| {
        let turns: Vec<Turn> = all.iter().map(|both| both[dies].clone()).collect();
        (format!("{}, {}", INTERFACES[dies], names[dies]), turns)
    });
    let mut table = Table::of(
        &title,
        "the path that dies",
        &by_path,
        figures!(turn:
            "its probe timeout, ms", 1, turn.timeout_us as f64 / 1e3;
            "longest gap at the receiver, ms", 1, turn.longest_gap_us as f64 / 1e3;
            "gap / probe timeout", 2, timeouts(turn);
            "Mbit/s in all", 1, turn.bits_per_second / 1e6;
            "TCP retransmissions", 0, turn.retransmissions as f64;
            "carried again, MB", 1, turn.carried_again as f64 / 1e6;
        ),
    )?;
    for ((_, turns), interface) in by_path.iter().zip(INTERFACES) {
        let what = format!("{interface} dies: longest gap / its probe timeout");
        let ratio = Ratio::new(what, median(turns.iter().map(timeouts)));
        table.ratios.push(ratio.most(MOST_TIMEOUTS));
    }
    table.notes = vec!["Every byte arrived, in order, in all transfers.".to_owned()];
    table.turns = serde_json::to_value(by_path.map(|(_, turns)| turns))?;
    Ok(table)
}

/// Probe timeouts that the longest gap took.
fn timeouts(turn: &Turn) -> f64 {
    turn.longest_gap_us as f64 / turn.timeout_us as f64
}

fn turn(stage: &Stage<'_>, contestant: &Contestant, dies: usize) -> Result<Turn> {
    let [daemon, _] = contestant.daemons();
    let link = &contestant.site.links[dies];
    let third = stage.options.duration / 3;
    let start = Instant::now();
    let load = stage.load(contestant);
    let transfer = load.start(&contestant.site.a, &contestant.site.b)?;
    let until = |at: Duration| {
        std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
    };
    until(third);
    let path = daemon.paths()?.into_iter().nth(dies);
    let path = path.context("each link is a path")?;
    let measured = path.srtt_us.zip(path.rttvar_us);
    let (srtt, variation) = measured.context("the path's round trip was not measured")?;
    let timeout = Duration::from_micros(srtt + (4 * variation).max(1000)) + ACK_DELAY;
    link.set(|conditions| *conditions = conditions.clone().loss(1.0))?;
    until(2 * third);
    link.set(|conditions| *conditions = conditions.clone().loss(0.0))?;
    let before = contestant.site.sent()?[dies];
    let report = transfer.finish()?;
    let carried = contestant.site.sent()?[dies] - before;
    Ok(Turn {
        timeout_us: timeout.as_micros() as u64,
        longest_gap_us: report.longest_gap_us,
        bits_per_second: report.bits_per_second,
        retransmissions: report.retransmissions,
        carried_again: carried,
    })
}
