//! What dibsd needs for connections that are idle, and for many busy ones.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use super::report::{Ratio, Table};
use super::system::{Contestant, Place, System};
use super::{Stage, plain_links};
use crate::load::Beats;

/// Connections that say a word and fall silent.
const IDLE: usize = 5_000;
/// Connections that are never silent.
const BUSY: usize = 1_000;
/// The daemons look at all connections every two seconds, and hold more meanwhile: this is long enough for that.
const LOOKS: Duration = Duration::from_secs(5);
/// What the daemons hold is sampled so often: nothing tells of its maximum.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// What was seen, of the daemon that held more.
#[derive(Clone, Debug, Serialize)]
struct Seen {
    idle_connections: usize,
    bytes_before: u64,
    bytes_idle_most: u64,
    busy_connections: usize,
    bytes_busy_most: u64,
    busy_bits_per_second: f64,
    /// That one of them got no byte.
    busy_longest_gap_us: u64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let contestant = place.contestant(System::Scramble, System::Scramble.label(), plain_links)?;
    let seen = measure(stage, &contestant)?;
    let each = (seen.bytes_idle_most.saturating_sub(seen.bytes_before)) as f64 / IDLE as f64;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let title = "Resident memory of dibsd, of the end that holds more";
    let mut table = Table::new(title, &["", "connections", "MiB"]);
    for (what, connections, bytes) in [
        ("none", 0, seen.bytes_before),
        ("idle, the most", IDLE, seen.bytes_idle_most),
        ("busy, the most", BUSY, seen.bytes_busy_most),
    ] {
        let mib = format!("{:.1}", mib(bytes));
        table
            .rows
            .push(vec![what.to_owned(), connections.to_string(), mib]);
    }
    let busy = format!("MiB with {BUSY} busy connections");
    table.ratios = vec![
        Ratio::new("KiB an idle connection", each / 1024.0).most(1.6),
        Ratio::new(busy, mib(seen.bytes_busy_most)).most(200.0),
    ];
    table.notes = vec![format!(
        "The busy ones moved {:.2} Gbit/s together; the longest that one of them got nothing was {:.1} s.",
        seen.busy_bits_per_second / 1e9,
        seen.busy_longest_gap_us as f64 / 1e6
    )];
    table.turns = serde_json::to_value(&seen)?;
    Ok(table)
}

fn measure(stage: &Stage<'_>, contestant: &Contestant) -> Result<Seen> {
    let (a, b) = (&contestant.site.a, &contestant.site.b);
    let bytes_before = contestant.resident()?;
    let idle = Beats::open(a, b, contestant.to, IDLE)?;
    let bytes_idle_most = resident_most(contestant, LOOKS)?;
    idle.close()?;
    let busy = stage.load(contestant).streams(BUSY).endless().start(a, b)?;
    let bytes_busy_most = resident_most(contestant, stage.options.duration)?;
    busy.stop();
    let report = busy.finish()?;
    Ok(Seen {
        idle_connections: IDLE,
        bytes_before,
        bytes_idle_most,
        busy_connections: BUSY,
        bytes_busy_most,
        busy_bits_per_second: report.bits_per_second,
        busy_longest_gap_us: report.longest_gap_us,
    })
}

/// The most of [`resident`](Contestant::resident) in this time.
fn resident_most(contestant: &Contestant, time: Duration) -> Result<u64> {
    let start = Instant::now();
    let mut most = 0;
    while start.elapsed() < time {
        most = most.max(contestant.resident()?);
        std::thread::sleep(SAMPLE_EVERY);
    }
    Ok(most)
}
