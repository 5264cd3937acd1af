//! A path that dies in the midst of a transfer, and comes back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dibs_netem::Conditions;
use serde::Serialize;

use super::Stage;
use super::report::{Ratio, Table, columns, median};
use super::system::{Contestant, Place, System};
use crate::link::LinkSpec;
use crate::load::Throughput;
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
    let mut table = Table {
        title: title.clone(),
        columns: columns([
            "the path that dies",
            "its probe timeout, ms",
            "longest gap at the receiver, ms",
            "gap / probe timeout",
            "Mbit/s in all",
            "TCP retransmissions",
            "carried again, MB",
        ]),
        rows: Vec::new(),
        ratios: Vec::new(),
        notes: vec!["Every byte arrived, in order, in all transfers.".to_owned()],
        turns: serde_json::Value::Null,
    };
    let mut turns: [Vec<Turn>; 2] = Default::default();
    for round in 1..=stage.options.rounds {
        for (dies, turns) in turns.iter_mut().enumerate() {
            let turn = turn(stage, &contestant, dies)?;
            eprintln!(
                "{title}, round {round}, {}: {:.0} ms without a byte, probe timeout {:.0} ms",
                INTERFACES[dies],
                turn.longest_gap_us as f64 / 1e3,
                turn.timeout_us as f64 / 1e3
            );
            turns.push(turn);
        }
    }
    for ((turns, name), interface) in turns.iter().zip(&names).zip(INTERFACES) {
        let of = |value: fn(&Turn) -> f64| median(turns.iter().map(value));
        let timeouts = of(|turn| turn.longest_gap_us as f64 / turn.timeout_us as f64);
        table.rows.push(vec![
            format!("{interface}, {name}"),
            format!("{:.1}", of(|turn| turn.timeout_us as f64 / 1e3)),
            format!("{:.1}", of(|turn| turn.longest_gap_us as f64 / 1e3)),
            format!("{timeouts:.2}"),
            format!("{:.1}", of(|turn| turn.bits_per_second / 1e6)),
            format!("{:.0}", of(|turn| turn.retransmissions as f64)),
            format!("{:.1}", of(|turn| turn.carried_again as f64 / 1e6)),
        ]);
        table.ratios.push(Ratio {
            what: format!("{interface} dies: longest gap / its probe timeout"),
            value: timeouts,
            least: None,
            most: Some(MOST_TIMEOUTS),
        });
    }
    table.turns = serde_json::to_value(&turns)?;
    Ok(table)
}

fn turn(stage: &Stage<'_>, contestant: &Contestant, dies: usize) -> Result<Turn> {
    let daemons = contestant.daemons.as_ref();
    let [daemon, _] = daemons.context("this contestant has daemons")?;
    let link = &contestant.site.links[dies];
    let third = stage.options.duration / 3;
    let start = Instant::now();
    let transfer = Throughput::new(contestant.to)
        .congestion(stage.congestion)
        .duration(stage.options.duration)
        .start(&contestant.site.a, &contestant.site.b)?;
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
    let before = contestant.site.a.counters(INTERFACES[dies])?.tx_bytes;
    let report = transfer.finish()?;
    let carried = contestant.site.a.counters(INTERFACES[dies])?.tx_bytes - before;
    Ok(Turn {
        timeout_us: timeout.as_micros() as u64,
        longest_gap_us: report.longest_gap_us,
        bits_per_second: report.bits_per_second,
        retransmissions: report.retransmissions,
        carried_again: carried,
    })
}
