//! Messages of 64 bytes to and fro.

use anyhow::Result;

use super::report::{Ratio, Table, figures, median};
use super::system::{Contestant, Place, System};
use super::{Stage, plain_links};
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
    let mut table = Table::of(
        title,
        "system",
        &all,
        figures!(turn:
            "p50, us", 1, turn.p50_us;
            "p90, us", 1, turn.p90_us;
            "p99, us", 1, turn.p99_us;
            "highest, us", 1, turn.max_us;
        ),
    )?;
    for (system, most) in [(1, None), (2, Some(3.0)), (3, Some(25.0))] {
        let ((label, turns), (_, plain)) = (&all[system], &all[0]);
        let above = turns.iter().zip(plain);
        let above = median(above.map(|(turn, plain)| turn.p50_us - plain.p50_us));
        let what = format!("p50 above plain TCP, us: {label}");
        table.ratios.push(Ratio::new(what, above).most(most));
    }
    Ok(table)
}
