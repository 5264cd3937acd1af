//! The scrambler put into a running transfer and taken out again.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use super::report::{Ratio, Table, figures, median};
use super::system::{Contestant, PORT, Place, System};
use super::{GIGABIT, Stage};
use crate::link::LinkSpec;

/// A quarter of a second.
const QUARTER: Duration = Duration::from_millis(250);
/// TCP retransmissions that a transfer with two switches may have.
const MOST_RETRANSMISSIONS: f64 = 5.0;

/// A transfer with both switches.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    /// Of the later half of the time before the first switch.
    plain_bits_per_second: f64,
    /// Of the time between the switches.
    scramble_bits_per_second: f64,
    /// The lowest quarter second from then on, against that.
    lowest_quarter: f64,
    /// The same of a transfer that is not switched.
    lowest_quarter_unswitched: f64,
    longest_gap_us: u64,
    retransmissions: u64,
    retransmissions_unswitched: u64,
    resent: u64,
    /// Bytes in each quarter second of the whole transfer.
    quarters: Vec<u64>,
    /// How long the commands took.
    enable_us: u64,
    disable_us: u64,
}

/// What the lowest quarter second should reach of the mean before the switches.
const LEAST_QUARTER: f64 = 0.9;
/// Over links of 1 Gbit/s.
pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let links = |_: &str, link: LinkSpec| link.shaped(GIGABIT);
    let contestant = place.contestant(System::Idle, "live switch", links)?;
    let title = stage.titled("Plain, scramble, plain in one connection, two links of 1 Gbit/s");
    let said = |turn: &Turn| {
        let rates = [turn.plain_bits_per_second, turn.scramble_bits_per_second];
        let ([plain, bumped], again) = (rates.map(|rate| rate / 1e9), turn.retransmissions);
        format!("{plain:.2}, then {bumped:.2} Gbit/s, {again} retransmissions")
    };
    let turns = stage.turns(&title, &contestant, |of| turn(stage, of), said)?;
    let mut table = Table::of_one(
        &title,
        &turns,
        figures!(t:
            "plain, Gbit/s", 3, t.plain_bits_per_second / 1e9;
            "scramble, Gbit/s", 3, t.scramble_bits_per_second / 1e9;
            "longest gap at the receiver, ms", 1, t.longest_gap_us as f64 / 1e3;
            "lowest quarter second / mean, not switched", 2, t.lowest_quarter_unswitched;
            "TCP retransmissions, not switched", 0, t.retransmissions_unswitched as f64;
            "TCP retransmissions", 0, t.retransmissions as f64;
            "resent by the path layer", 0, t.resent as f64;
            "enable took, ms", 1, t.enable_us as f64 / 1e3;
            "disable took, ms", 1, t.disable_us as f64 / 1e3;
        ),
    )?;
    let worst = turns.iter().map(|turn| turn.retransmissions).max();
    let worst = worst.unwrap_or(0) as f64;
    let quarter = median(turns.iter().map(|turn| turn.lowest_quarter));
    table.ratios = vec![
        Ratio::new("TCP retransmissions, the most of any round", worst).most(MOST_RETRANSMISSIONS),
        Ratio::new("lowest quarter second / plain mean", quarter).least(LEAST_QUARTER),
    ];
    let count = turns.len();
    table.notes = vec![format!(
        "No connection was lost and every byte was right in {count} transfers."
    )];
    Ok(table)
}

/// Two transfers of three thirds: one as it is, one with a switch after each third.
fn turn(stage: &Stage<'_>, contestant: &Contestant) -> Result<Turn> {
    let third = stage.options.duration;
    let [daemon, _] = contestant.daemons();
    let load = stage.load(contestant).duration(3 * third).interval(QUARTER);
    let (from, to) = (&contestant.site.a, &contestant.site.b);
    let unswitched = load.start(from, to)?.finish()?;
    let (_, lowest_quarter_unswitched) = lowest_quarter(third, &unswitched.intervals)?;

    let before = contestant.counts()?;
    let start = Instant::now();
    let transfer = load.start(from, to)?;
    let switch = |at: Duration, bump: &str| -> Result<(f64, Duration)> {
        std::thread::sleep((start + at).saturating_duration_since(Instant::now()));
        ensure!(
            transfer.is_running(),
            "the transfer ended before the switch"
        );
        let asked = Instant::now();
        let received = transfer.received() as f64;
        daemon.switch(("--dport", PORT), bump)?;
        Ok((received, asked.elapsed()))
    };
    let (at_enable, enable) = switch(third, "scramble")?;
    let (at_disable, disable) = switch(2 * third, "plain")?;
    let report = transfer.finish()?;
    let counts = contestant.since(&before, report.bytes)?;
    let (plain, lowest_quarter) = lowest_quarter(third, &report.intervals)?;
    Ok(Turn {
        plain_bits_per_second: plain * 8.0,
        scramble_bits_per_second: (at_disable - at_enable) * 8.0 / third.as_secs_f64(),
        lowest_quarter,
        lowest_quarter_unswitched,
        longest_gap_us: report.longest_gap_us,
        retransmissions: report.retransmissions,
        retransmissions_unswitched: unswitched.retransmissions,
        resent: counts.resent,
        quarters: report.intervals,
        enable_us: enable.as_micros() as u64,
        disable_us: disable.as_micros() as u64,
    })
}

/// From the quarter seconds of a transfer: bytes per second in the later half of the first third, and
/// the lowest quarter from then on against that. TCP's own start takes a while over far paths.
fn lowest_quarter(third: Duration, quarters: &[u64]) -> Result<(f64, f64)> {
    let count = |time: Duration| (time.as_secs_f64() / QUARTER.as_secs_f64()) as usize;
    // The last one is only a part.
    let whole = quarters.len().saturating_sub(1);
    let started = quarters.get(count(third / 2)..whole).unwrap_or_default();
    let before = started.get(..count(third - third / 2));
    let before = before.context("the transfer was too short")?;
    let mean = before.iter().sum::<u64>() as f64 / before.len() as f64;
    let lowest = started.iter().min().context("the transfer was too short")?;
    Ok((mean / QUARTER.as_secs_f64(), *lowest as f64 / mean))
}
