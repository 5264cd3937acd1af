//! Messages of 64 bytes to and fro.

use anyhow::Result;

use super::report::{Ratio, Table, columns, median};
use super::system::{Contestant, Place, System};
use super::{Stage, labelled, plain_links};
use crate::load::{Latency, LatencyReport};

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let mut systems = vec![System::Plain, System::Idle, System::Rules, System::Scramble];
    if stage.options.wireguard_go.is_ok() {
        systems.push(System::WireguardGo);
    }
    let contestants = place.contestants(&systems, plain_links)?;
    let title = "64-byte messages to and fro, half of the round trip";
    let turn = |contestant: &Contestant| {
        let load = Latency::new(contestant.to).duration(stage.options.duration);
        load.run(&contestant.site.a, &contestant.site.b)
    };
    let said = |turn: &LatencyReport| format!("p50 {:.1} us", turn.p50_us);
    let all = stage.rounds(title, &contestants, turn, said)?;
    let half_trip = |turns: &[LatencyReport], of: fn(&LatencyReport) -> f64| {
        format!("{:.1}", median(turns.iter().map(of)))
    };
    let rows = contestants.iter().zip(&all).map(|(contestant, turns)| {
        vec![
            contestant.label.clone(),
            half_trip(turns, |turn| turn.p50_us),
            half_trip(turns, |turn| turn.p90_us),
            half_trip(turns, |turn| turn.p99_us),
            half_trip(turns, |turn| turn.max_us),
        ]
    });
    let rows = rows.collect();
    let above_plain = |index: usize, most: Option<f64>| {
        let pairs = all[index].iter().zip(&all[0]);
        Ratio {
            what: format!("p50 above plain TCP, us: {}", contestants[index].label),
            value: median(pairs.map(|(turn, plain)| turn.p50_us - plain.p50_us)),
            least: None,
            most,
        }
    };
    let ratios = vec![
        above_plain(1, None),
        above_plain(2, Some(3.0)),
        above_plain(3, Some(25.0)),
    ];
    let turns = labelled(&contestants, &all);
    Ok(Table {
        title: title.to_owned(),
        columns: columns(["system", "p50, us", "p90, us", "p99, us", "highest, us"]),
        rows,
        ratios,
        notes: Vec::new(),
        turns: serde_json::to_value(&turns)?,
    })
}
