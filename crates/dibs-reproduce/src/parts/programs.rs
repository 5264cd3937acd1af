//! Real programs under load, while their connections go to another bump each second.

mod asking;
mod postgres;
mod rsync;

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

/// A server on one host, and clients on the other.
struct Program {
    name: &'static str,
    /// What its clients do.
    load: &'static str,
    /// What counts as an operation.
    operation: &'static str,
    /// Programs, and Debian's packages.
    needs: &'static [(&'static str, &'static str)],
    /// Whether it takes other users than the one who runs this, or root's own rights.
    for_root: bool,
    run: fn(&Place<'_>) -> Result<Vec<Operation>>,
}

const PROGRAMS: [Program; 4] = [
    Program {
        name: "PostgreSQL",
        load: "pgbench, 16 connections",
        operation: "transactions",
        needs: &[(postgres::SERVER, "postgresql"), ("pgbench", "postgresql")],
        for_root: true,
        run: postgres::run,
    },
    Program {
        name: "nginx",
        load: "64 connections, a page of 4 kB each time",
        operation: "requests",
        needs: &[("nginx", "nginx-light")],
        for_root: false,
        run: asking::nginx,
    },
    Program {
        name: "Redis",
        load: "16 connections, a value of 1 kB set and read",
        operation: "requests",
        needs: &[("redis-server", "redis-server")],
        for_root: false,
        run: asking::redis,
    },
    Program {
        name: "rsync over ssh",
        load: "a file of 4 MB again and again",
        operation: "files",
        needs: &[
            ("sshd", "openssh-server"),
            ("ssh", "openssh-client"),
            ("rsync", "rsync"),
        ],
        for_root: true,
        run: rsync::run,
    },
];

/// One that was done, or that failed.
#[derive(Clone, Copy, Debug)]
struct Operation {
    /// When it ended, since the load began.
    at: Duration,
    took: Duration,
    failed: bool,
}

/// Where a program runs, and for how long.
struct Place<'a> {
    client: &'a Host,
    server: &'a Host,
    /// Where the server listens.
    to: SocketAddr,
    /// For files of both.
    directory: &'a Path,
    span: Duration,
}

/// What came of one.
struct Outcome {
    program: &'static Program,
    operations: Vec<Operation>,
    /// When connections went to which bump.
    switches: Vec<(Duration, &'static str)>,
    span: Duration,
}

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let span = Duration::from_secs(stage.pick(30, 10));
    let mut finding = Finding {
        setup: format!(
            "Emulated links of 200 Mbit/s and 2 ms, the server on host b and its clients on host a, {} s each. Each second all \
             of its connections go to another bump, drawn at random.",
            span.as_secs()
        ),
        ..Finding::default()
    };
    let mut data = Vec::new();
    let by_root = is_root()?;
    for program in &PROGRAMS {
        if program.for_root && !by_root {
            finding.say(&format!(
                "{}: left out; only root can run it.",
                program.name
            ));
            continue;
        }
        let missing = program
            .needs
            .iter()
            .filter(|(name, _)| found(name).is_none());
        let missing: Vec<&str> = missing.map(|(_, package)| *package).collect();
        if !missing.is_empty() {
            finding.say(&format!(
                "{}: left out; install the Debian packages {}.",
                program.name,
                missing.join(", ")
            ));
            continue;
        }
        let outcome = outcome(stage, program, span).with_context(|| program.name)?;
        data.push(outcome.tell(&mut finding));
    }
    finding.data = data.into();
    Ok(finding)
}

fn outcome(stage: &Stage, program: &'static Program, span: Duration) -> Result<Outcome> {
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
    let (operations, switches) = std::thread::scope(|scope| {
        let load = scope.spawn(|| (program.run)(&place));
        let switches = switch(&daemons[0], || load.is_finished());
        let operations = load.join();
        let operations = operations.map_err(|_| anyhow::anyhow!("its load panicked"))??;
        anyhow::Ok((operations, switches?))
    })?;
    ensure!(!operations.is_empty(), "nothing was done");
    Ok(Outcome {
        program,
        operations,
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
        let Program {
            name,
            load,
            operation,
            ..
        } = self.program;
        let failed = self.operations.iter().filter(|one| one.failed).count();
        let seconds = self.seconds();
        let done = self.operations.len() - failed;
        let all: Vec<Duration> = self.operations.iter().map(|one| one.took).collect();
        let ours = format!(
            "{failed} of {done} {operation} failed in {} switches; {:.0} a second, p99 {:.0} ms, the longest {:.0} ms",
            self.switches.len(),
            done as f64 / self.span.as_secs_f64(),
            percentile(&all, 0.99),
            percentile(&all, 1.0),
        );
        finding.compare(
            &format!("{name}, {load}: none fails"),
            ["not measured", &ours],
            match failed {
                0 => Verdict::New,
                _ => Verdict::Differs("operations failed".to_owned()),
            },
        );
        let file = name.split(' ').next().unwrap_or(name).to_lowercase();
        let caption = format!("{name}, {load}: each second, and what its connections were on");
        finding.figure(
            &format!("program-{file}"),
            &caption,
            self.plot(&seconds).to_string(),
        );
        json!({"program": name, "failed": failed, "done": done, "seconds": seconds,
               "switches": self.switches.iter().map(|(at, bump)| (at.as_secs_f64(), bump)).collect::<Vec<_>>()})
    }

    /// Operations, and the 99th percentile of what they took in ms, of each second.
    fn seconds(&self) -> Vec<(usize, f64)> {
        let of = |second: u64| {
            let within = |one: &&Operation| one.at.as_secs() == second && !one.failed;
            let took: Vec<_> = { self.operations.iter() }
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
        let title = format!("{} a second", self.program.operation);
        let rates = seconds.iter().map(|(count, _)| *count as f64);
        let tails = seconds.iter().map(|(_, tail)| *tail);
        Plot {
            along: "time, s",
            end,
            panels: vec![
                Panel::of(&title, BLUE, by_interval(1.0, rates)),
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

/// Where a program is: on the usual places, or where a path with `*` in it leads.
fn found(program: &str) -> Option<std::path::PathBuf> {
    const PLACES: [&str; 5] = ["/usr/sbin", "/usr/bin", "/usr/local/bin", "/sbin", "/bin"];
    if let Some((front, rest)) = program.split_once("/*/") {
        // The latest version.
        let mut versions: Vec<_> = { std::fs::read_dir(front).ok()? }
            .filter_map(|entry| Some(entry.ok()?.path().join(rest)))
            .filter(|place| place.is_file())
            .collect();
        versions.sort();
        return versions.pop();
    }
    let places = PLACES.iter().map(|place| Path::new(place).join(program));
    { places }.find(|place| place.is_file())
}
