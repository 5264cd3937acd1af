//! nginx asked by wrk, by many clients at a time: over connections that are kept, and by a new one for each request.

use std::time::Duration;

use anyhow::{Context as _, Result};
use dibs_netns::HANG;
use serde::Serialize;

use super::report::{Ratio, Table, Turns, figures};
use super::system::{Contestant, PORT, Place, System};
use super::{GIGABIT, Stage};
use crate::link::LinkSpec;
use crate::load::nginx;

/// Clients at a time.
const CLIENTS: usize = 64;
/// What each is answered: 64 bytes, and a head of some 170.
const BODY: &str = "dibs: as many small answers as there are questions, and no more.";
const SYSTEMS: [System; 5] = [
    System::Plain,
    System::WireguardGo,
    System::Seal,
    System::Scramble,
    System::Share,
];
/// Of bumps: how many times wireguard-go's 99th percentile theirs may be.
const BUMPS: [(System, f64); 3] = [
    (System::Seal, 2.0),
    (System::Scramble, 2.0),
    (System::Share, 5.0),
];

/// What wrk says.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Asked {
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// Requests that were not answered.
    failed: u64,
}

/// A system in one round.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    kept: Asked,
    connecting: Asked,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut notes = Vec::new();
    let systems = stage.available(&SYSTEMS, &mut notes);
    let mut place = Place::new(stage)?;
    let links = |_: &str, link: LinkSpec| link.shaped(GIGABIT);
    let contestants = place.contestants(&systems, links)?;
    let answer = format!("default_type text/plain; return 200 \"{BODY}\";");
    let servers = contestants.iter();
    let servers = servers.map(|contestant| nginx(&contestant.site.b, PORT, &answer));
    let _servers = servers.collect::<Result<Vec<_>>>()?;
    let title = format!("nginx asked by wrk, {CLIENTS} connections, links of 1 Gbit/s");
    let turn = |contestant: &Contestant| -> Result<Turn> {
        Ok(Turn {
            kept: ask(stage, contestant, None)?,
            connecting: ask(stage, contestant, Some("Connection: close"))?,
        })
    };
    let said = |turn: &Turn| {
        let (kept, connecting) = (turn.kept.per_second, turn.connecting.per_second);
        format!("{kept:.0} and {connecting:.0} requests/s")
    };
    let all = stage.rounds(&title, &contestants, turn, said)?;
    for (label, turns) in &all {
        let failed = turns
            .iter()
            .map(|turn| turn.kept.failed + turn.connecting.failed);
        let failed: u64 = failed.sum();
        if failed > 0 {
            notes.push(format!("{label}: {failed} requests failed in all rounds"));
        }
    }
    let table = Table::of(
        &title,
        "system",
        &all,
        figures!(turn:
            "kept, requests/s", 0, turn.kept.per_second;
            "p50, ms", 1, turn.kept.p50_ms;
            "p99, ms", 1, turn.kept.p99_ms;
            "a new one each, requests/s", 0, turn.connecting.per_second;
            "p99, ms", 1, turn.connecting.p99_ms;
        ),
    )?;
    Ok(Table {
        ratios: ratios(&all),
        notes,
        ..table
    })
}

fn ask(stage: &Stage<'_>, contestant: &Contestant, header: Option<&str>) -> Result<Asked> {
    let host = &contestant.site.a;
    let seconds = stage.options.duration.as_secs().max(1);
    let mut command = host.command("wrk");
    command.args(["--threads", "2", "--latency", "--timeout", "10s"]);
    command.args(["--connections", &CLIENTS.to_string()]);
    command.args(["--duration", &format!("{seconds}s")]);
    if let Some(header) = header {
        command.args(["--header", header]);
    }
    command.arg(format!("http://{}/", contestant.to));
    let before = contestant.counts()?;
    let output = host
        .run_within(Duration::from_secs(seconds) + HANG, command)
        .context("wrk is of the Debian package wrk")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let asked = parse(&said).with_context(|| format!("wrk said\n{said}"))?;
    // All went by its bump: a request is longer than this.
    contestant.since(&before, (asked.per_second * seconds as f64) as u64 * 32)?;
    Ok(asked)
}

/// What wrk prints.
fn parse(said: &str) -> Option<Asked> {
    let of = |begin: &str| {
        said.lines()
            .find_map(|line| line.trim().strip_prefix(begin))
    };
    let errors = |line: &str| -> u64 {
        let words = line.split([' ', ',']);
        words.filter_map(|word| word.parse::<u64>().ok()).sum()
    };
    let failed = ["Socket errors:", "Non-2xx or 3xx responses:"].map(of);
    Some(Asked {
        per_second: of("Requests/sec:")?.trim().parse().ok()?,
        p50_ms: milliseconds(of("50%")?)?,
        p99_ms: milliseconds(of("99%")?)?,
        failed: failed.into_iter().flatten().map(errors).sum(),
    })
}

/// A time as wrk writes it: "635.00us", "9.03ms", "1.20s".
fn milliseconds(text: &str) -> Option<f64> {
    let text = text.trim();
    let digits = text.trim_end_matches(char::is_alphabetic);
    let factor = match &text[digits.len()..] {
        "us" => 1e-3,
        "ms" => 1.0,
        "s" => 1e3,
        "m" => 60e3,
        _ => return None,
    };
    Some(digits.parse::<f64>().ok()? * factor)
}

/// Each bump beside wireguard-go and, for new connections, plain TCP, within rounds.
fn ratios(turns: &Turns<Turn>) -> Vec<Ratio> {
    let mut ratios = Vec::new();
    for (bump, most) in BUMPS {
        let mut add = |other: System, what, value: fn(&Turn) -> f64, least, most| {
            let ratio = Ratio::beside(turns, what, (bump.label(), other.label()), value);
            ratios.extend(ratio.map(|ratio| ratio.least(least).most(most)));
        };
        let wireguard = System::WireguardGo;
        add(
            wireguard,
            "kept",
            |turn| turn.kept.per_second,
            Some(1.0),
            None,
        );
        add(
            wireguard,
            "kept, p99",
            |turn| turn.kept.p99_ms,
            None,
            Some(most),
        );
        let connecting: fn(&Turn) -> f64 = |turn| turn.connecting.per_second;
        add(wireguard, "a new one each", connecting, Some(1.0), None);
        add(System::Plain, "a new one each", connecting, None, None);
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_wrk_prints_is_understood() {
        let said = "Running 5s test @ http://10.0.1.2:7000/\n  2 threads and 64 connections\n  Thread Stats   Avg  \
                    Stdev     Max   +/- Stdev\n    Latency     1.60ms    1.10ms  19.10ms   82.00%\n  Latency Distribution\
                    \n     50%  635.00us\n     75%    1.20ms\n     90%    2.02ms\n     99%    9.03ms\n  100 requests in \
                    5.00s, 60.1MB read\n  Socket errors: connect 1, read 2, write 0, timeout 4\nRequests/sec:  76000.50\n\
                    Transfer/sec:     12.02MB\n";
        let asked = Asked {
            per_second: 76000.5,
            p50_ms: 0.635,
            p99_ms: 9.03,
            failed: 7,
        };
        assert_eq!(parse(said), Some(asked));
        assert_eq!(parse("unable to connect to 10.0.1.2:7000"), None);
        assert_eq!(milliseconds(" 1.20s"), Some(1200.0));
    }
}
