//! The benchmark: dibs beside plain TCP, kernel MPTCP and VPNs in user space, on the same kernel in the
//! same minutes.
//!
//! Each system has hosts and links of its own, so that the idle ones do not weigh on the one that
//! runs. They take turns, round by round; what is compared within a round is compared under the
//! same conditions, and medians are over the rounds.

mod clients;
mod compare;
mod exit;
mod paths;
mod peers;
mod report;
mod requests;
mod switch;
mod switches;
mod system;

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use clap::ValueEnum;

pub use self::compare::Other;
pub(crate) use self::report::median;
pub use self::report::{Environment, Ratio, Report, Table};
use self::system::{Contestant, System};
use crate::dibs::Programs;
use crate::link::LinkSpec;
use crate::load::Throughput;

const GIGABIT: u64 = 1_000_000_000;

/// Experiment that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
    /// One stream over pairs of links that differ in rate, round trip, jitter and loss.
    Paths,
    /// Switching live at 1 Gbit/s.
    Switch,
    /// A stream that either host moves from bump to bump at random, over links of 500 Mbit/s.
    SwitchRandom,
    /// Streams and small messages beside all peers that can be had.
    Peers,
    /// The Internet behind a server, by two uplinks: streams and a page, beside each uplink, wireguard-go, and MPTCP between proxies.
    Exit,
    /// 5,000 connections of 50 clients at once through one server, beside wireguard-go: memory, processor time, and waiting.
    Clients,
    /// nginx asked by wrk, 64 connections, kept and a new one each, over links of 1 Gbit/s.
    Requests,
}

/// How to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Each system's turns.
    pub rounds: usize,
    /// The length of a turn.
    pub duration: Duration,
    /// Experiments, in this order.
    pub experiments: Vec<Experiment>,
    /// TCP's congestion controls, in turn; requests and clients are measured with the first.
    pub congestion: Vec<String>,
    /// Part of the names of those pairs of links that are taken; all if there is nothing.
    pub links: Option<String>,
    /// The scheduler of `seal`; the usual one if there is nothing.
    pub scheduler: Option<String>,
    /// Whose programs take turns with this tree's, if any.
    pub compare: Option<Other>,
}

/// Runs the experiments, with a word on standard error for each turn. Call
/// [`enter`](crate::enter) before.
///
/// # Errors
/// If a system does not come up, or one of its connections breaks.
pub fn run(options: &Options) -> Result<Report> {
    let programs = Programs::find()?;
    let other = match &options.compare {
        Some(other) => Some((other.name.as_str(), other.programs()?)),
        None => None,
    };
    let environment = Environment::of(SystemTime::now())?;
    let mut tables = Vec::new();
    for (&experiment, congestion) in turns(options) {
        let name = experiment.to_possible_value();
        let name = name.expect("no experiment is hidden").get_name().to_owned();
        let made = match &other {
            None => {
                let stage = Stage {
                    programs: &programs,
                    options,
                    congestion,
                };
                measure(experiment, &stage)
            }
            Some((name, other)) => beside(experiment, options, congestion, (&programs, other))
                .and_then(|rounds| compare::merged(name, &rounds)),
        };
        tables.extend(made.with_context(|| format!("experiment {name}"))?);
    }
    Ok(Report {
        environment,
        rounds: options.rounds,
        seconds: options.duration.as_secs_f64(),
        tables,
    })
}

/// Both revisions' tables, round by round; now this one begins, now the other.
fn beside(
    experiment: Experiment,
    options: &Options,
    congestion: &str,
    (ours, theirs): (&Programs, &Programs),
) -> Result<Vec<[Vec<Table>; 2]>> {
    let single = Options {
        rounds: 1,
        ..options.clone()
    };
    let measure = |programs| {
        let stage = Stage {
            programs,
            options: &single,
            congestion,
        };
        measure(experiment, &stage)
    };
    let round = |round: usize| {
        Ok(match round % 2 {
            0 => [measure(ours)?, measure(theirs)?],
            _ => {
                let theirs = measure(theirs)?;
                [measure(ours)?, theirs]
            }
        })
    };
    (0..options.rounds).map(round).collect()
}

fn measure(experiment: Experiment, stage: &Stage<'_>) -> Result<Vec<Table>> {
    let table = match experiment {
        Experiment::Paths => paths::run(stage),
        Experiment::Switch => switch::run(stage),
        Experiment::SwitchRandom => switches::run(stage),
        Experiment::Exit => exit::run(stage),
        Experiment::Clients => clients::run(stage),
        Experiment::Peers => return peers::run(stage),
        Experiment::Requests => requests::run(stage),
    };
    Ok(vec![table?])
}

/// What every experiment needs.
struct Stage<'a> {
    programs: &'a Programs,
    options: &'a Options,
    /// TCP's congestion control on all hosts.
    congestion: &'a str,
}

impl Stage<'_> {
    /// The title of what depends on the congestion control.
    fn titled(&self, title: &str) -> String {
        match &self.options.scheduler {
            Some(scheduler) => format!("{title}; {}, {scheduler}", self.congestion),
            None => format!("{title}; {}", self.congestion),
        }
    }

    /// A contestant's turns by itself, each of which `said` tells of.
    fn turns<T>(
        &self,
        title: &str,
        contestant: &Contestant,
        turn: impl FnMut(&Contestant) -> Result<T>,
        said: impl Fn(&T) -> String,
    ) -> Result<Vec<T>> {
        let mut all = self.rounds(title, std::slice::from_ref(contestant), turn, said)?;
        Ok(all.remove(0).1)
    }

    /// A stream to a contestant's server.
    fn load(&self, contestant: &Contestant) -> Throughput {
        Throughput::new(contestant.to)
            .transport(contestant.transport)
            .congestion(self.congestion)
            .duration(self.options.duration)
    }

    /// Those of the systems that can be had; why others cannot is noted.
    fn available(&self, systems: &[System], notes: &mut Vec<String>) -> Vec<System> {
        let mut available = Vec::new();
        for system in systems {
            match system {
                System::WireguardGo if is_missing("wireguard-go") => {
                    notes.push("no wireguard-go: install its Debian package".to_owned());
                }
                System::OpenVpn if is_missing("openvpn") => {
                    notes.push("no OpenVPN: install its Debian package".to_owned());
                }
                _ => available.push(*system),
            }
        }
        available
    }

    /// Has each take a turn in each round, and says what it came to; the turns of each.
    fn rounds<T>(
        &self,
        title: &str,
        contestants: &[Contestant],
        mut turn: impl FnMut(&Contestant) -> Result<T>,
        said: impl Fn(&T) -> String,
    ) -> Result<Vec<(String, Vec<T>)>> {
        let begun = contestants
            .iter()
            .map(|one| (one.label.clone(), Vec::new()));
        let mut all: Vec<(String, Vec<T>)> = begun.collect();
        for round in 1..=self.options.rounds {
            for (contestant, (label, turns)) in contestants.iter().zip(&mut all) {
                let turn = turn(contestant).with_context(|| label.clone())?;
                eprintln!("{title}, round {round}, {label}: {}", said(&turn));
                turns.push(turn);
            }
        }
        Ok(all)
    }
}

fn is_missing(program: &str) -> bool {
    let places = ["/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin"];
    let mut places = places.iter().map(std::path::Path::new);
    !places.any(|place| place.join(program).exists())
}

/// Which experiment runs with which congestion control.
fn turns(options: &Options) -> impl Iterator<Item = (&Experiment, &str)> {
    options.experiments.iter().flat_map(|experiment| {
        let most = match experiment {
            Experiment::Requests | Experiment::Clients => 1,
            _ => options.congestion.len(),
        };
        let controls = options.congestion.iter().take(most);
        controls.map(move |control| (experiment, control.as_str()))
    })
}

fn plain_links(_: &str, link: LinkSpec) -> LinkSpec {
    link
}
