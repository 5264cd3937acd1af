//! PostgreSQL under pgbench, while its connections go to another bump each second.

mod postgres;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_lab::dibs::{Dibsd, Settings};
use dibs_lab::plot::{BLUE, Mark, Panel, Plot, RED, by_interval};
use dibs_lab::site::{Site, addresses};
use dibs_lab::{Conditions, Lab, load};
use dibs_netem::rng::Rng;
use dibs_netns::Host;
use serde_json::json;

use super::Stage;
use crate::finding::{Finding, Verdict};

const PORT: u16 = 7000;
/// Of both links: bits a second, and half of a round trip.
const RATE: u64 = 200_000_000;
const DELAY: Duration = Duration::from_millis(1);
const EVERY: Duration = Duration::from_secs(1);
const BUMPS: [&str; 4] = ["plain", "scramble", "share", "seal"];

/// A transaction that was done, or that failed.
#[derive(Clone, Copy, Debug)]
struct Transaction {
    /// When it ended, since the load began.
    at: Duration,
    took: Duration,
    failed: bool,
}

/// Where server and clients run, and for how long.
struct Place<'a> {
    client: &'a Host,
    server: &'a Host,
    /// Where the server listens.
    to: SocketAddr,
    /// For files of both.
    directory: &'a Path,
    span: Duration,
}

/// What came of it.
struct Outcome {
    transactions: Vec<Transaction>,
    /// When connections went to which bump.
    switches: Vec<(Duration, &'static str)>,
    span: Duration,
}

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let span = Duration::from_secs(stage.pick(30, 10));
    let mut finding = Finding {
        setup: format!(
            "Emulated links of 200 Mbit/s and 2 ms, the server on host b and its clients on host a, {} s. Each second all \
             of its connections go to another bump, drawn at random.",
            span.as_secs()
        ),
        ..Finding::default()
    };
    ensure!(is_root()?, "only root can run PostgreSQL as its own user");
    for program in [postgres::SERVER, "/usr/bin/pgbench"] {
        let missing = "install the Debian package postgresql";
        postgres::found(program).with_context(|| format!("no {program}: {missing}"))?;
    }
    finding.data = outcome(stage, span)?.tell(&mut finding);
    Ok(finding)
}

fn outcome(stage: &Stage, span: Duration) -> Result<Outcome> {
    let mut lab = Lab::new()?;
    let conditions = Conditions::new().rate(RATE).delay(DELAY);
    let site = Site::new(&mut lab, ["a", "b"], 2, |_, link| {
        link.emulated(conditions.clone())
    })?;
    let settings = [Settings::default(); 2];
    let daemons = { stage.programs()? }.join([&site.a, &site.b], &Site::paths(2), settings)?;
    let directory = tempfile::Builder::new().prefix("dibs-program").tempdir()?;
    let address: IpAddr = addresses(0)[1];
    let place = Place {
        client: &site.a,
        server: &site.b,
        to: SocketAddr::new(address, PORT),
        directory: directory.path(),
        span,
    };
    let (transactions, switches) = std::thread::scope(|scope| {
        let load = scope.spawn(|| postgres::run(&place));
        let switches = switch(&daemons[0], || load.is_finished());
        let transactions = load.join();
        let transactions = transactions.map_err(|_| anyhow::anyhow!("its load panicked"))??;
        anyhow::Ok((transactions, switches?))
    })?;
    Ok(Outcome {
        transactions,
        switches,
        span,
    })
}

/// Moves all connections each second, until there is an end; returns when they went where.
fn switch(daemon: &Dibsd, is_over: impl Fn() -> bool) -> Result<Vec<(Duration, &'static str)>> {
    let start = Instant::now();
    let mut switches = Vec::new();
    // The same in each run.
    let (mut now, mut rng) = ("plain", Rng::new(1));
    while !is_over() {
        std::thread::sleep(EVERY);
        let others: Vec<&str> = BUMPS.into_iter().filter(|bump| *bump != now).collect();
        let next = rng.pick(&others);
        match daemon.move_to(("--dport", PORT), next) {
            Ok(changed) if !changed.connections.is_empty() => {
                switches.push((start.elapsed(), next));
                now = next;
            }
            // Nothing is connected: before the load begins, and when it has ended.
            Ok(_) => {}
            Err(_) if is_over() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(switches)
}

impl Outcome {
    fn tell(&self, finding: &mut Finding) -> serde_json::Value {
        let failed = self.transactions.iter().filter(|one| one.failed).count();
        let seconds = self.seconds();
        let done = self.transactions.len() - failed;
        let all: Vec<Duration> = self.transactions.iter().map(|one| one.took).collect();
        let ours = format!(
            "{failed} of {done} transactions failed in {} switches; {:.0} a second, p99 {:.0} ms, the longest {:.0} ms",
            self.switches.len(),
            done as f64 / self.span.as_secs_f64(),
            percentile(&all, 0.99),
            percentile(&all, 1.0),
        );
        finding.compare(
            "PostgreSQL, pgbench by 16 connections: no transaction fails",
            ["not measured", &ours],
            match failed {
                0 => Verdict::New,
                _ => Verdict::Differs("transactions failed".to_owned()),
            },
        );
        finding.figure(
            "database",
            "PostgreSQL, pgbench by 16 connections: each second, and what its connections were on",
            self.plot(&seconds).to_string(),
        );
        json!({"failed": failed, "done": done, "seconds": seconds,
               "switches": self.switches.iter().map(|(at, bump)| (at.as_secs_f64(), bump)).collect::<Vec<_>>()})
    }

    /// Transactions, and the 99th percentile of what they took in ms, of each second.
    fn seconds(&self) -> Vec<(usize, f64)> {
        let of = |second: u64| {
            let within = |one: &&Transaction| one.at.as_secs() == second && !one.failed;
            let took: Vec<_> = { self.transactions.iter() }
                .filter(within)
                .map(|one| one.took)
                .collect();
            (took.len(), percentile(&took, 0.99))
        };
        (0..self.span.as_secs()).map(of).collect()
    }

    fn plot(&self, seconds: &[(usize, f64)]) -> Plot {
        let end = self.span.as_secs_f64();
        let ends = self.switches.iter().skip(1).map(|(at, _)| at.as_secs_f64());
        let ends = ends.chain([end]);
        let marks = self
            .switches
            .iter()
            .zip(ends)
            .filter(|((at, _), _)| at.as_secs_f64() < end);
        let rates = seconds.iter().map(|(count, _)| *count as f64);
        let tails = seconds.iter().map(|(_, tail)| *tail);
        Plot {
            along: "time, s",
            end,
            panels: vec![
                Panel::of("transactions a second", BLUE, by_interval(1.0, rates)),
                Panel::of("p99, ms", RED, by_interval(1.0, tails)),
            ],
            marks: marks
                .map(|((at, bump), to)| Mark {
                    at: at.as_secs_f64(),
                    // Short, as a second is narrow.
                    label: bump.chars().take(2).collect(),
                    length: to.min(end) - at.as_secs_f64(),
                })
                .collect(),
        }
    }
}

/// In ms, of times in any order.
fn percentile(took: &[Duration], share: f64) -> f64 {
    let mut took = took.to_vec();
    took.sort_unstable();
    match took.is_empty() {
        true => 0.0,
        false => load::percentile(&took, share) / 1e3,
    }
}

/// Whether root is root of the machine, and not of a user namespace that the lab has made for somebody else.
fn is_root() -> Result<bool> {
    let map = std::fs::read_to_string("/proc/self/uid_map").context("/proc/self/uid_map")?;
    Ok(map.split_whitespace().last() == Some("4294967295"))
}
