//! The figures of Liyanage et al. 2021: the user's hint names the path to prefer. One stream over two emulated links,
//! and what each of them carried over time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netem::Conditions;
use serde::Serialize;

use crate::bench::{Environment, median};
use crate::dibs::{Dibsd, Programs, Settings};
use crate::lab::Lab;
use crate::load::Throughput;
use crate::plot::{BLUE, Curve, Mark, ORANGE, Panel, Plot, by_interval};
use crate::site::{INTERFACES, Sampler, Site, addresses};

const PORT: u16 = 7000;
/// Any path may carry what is on it, so that the hint alone decides.
const RULE: &str = "[[rule]]\nbump = \"seal\"\nprotocol = \"tcp\"\ndport = 7000\n";
/// Between two samples of what each link carried.
const EVERY: Duration = Duration::from_millis(250);
/// Left out of the means: the stream's start.
const SETTLING: Duration = Duration::from_secs(2);
/// The paths, in the order of the links.
const NAMES: [&str; 2] = ["eth", "wlan"];
/// A path carries data again when it has sent as many bytes since: more than what keeps it.
const CARRIES: u64 = 20_000;
/// How closely that is looked at.
const LOOK: Duration = Duration::from_millis(2);
/// How long it may take at most.
const PATIENCE: Duration = Duration::from_secs(10);
/// Of the figure with outages: the preferred link drops everything in the second half of each such time.
const PERIOD: Duration = Duration::from_secs(10);

/// What a figure shows.
struct Figure {
    name: &'static str,
    /// Bytes a second of both links.
    rate: u64,
    /// Round trips in ms.
    trips: [u64; 2],
    prefer: Option<usize>,
    outages: bool,
    paper: &'static str,
    /// What it takes to agree with the paper.
    agrees: fn(&Outcome) -> bool,
}

const MB: u64 = 1_000_000;
const FIGURES: [Figure; 6] = [
    Figure {
        name: "6/7: no hint",
        rate: MB,
        trips: [20, 20],
        prefer: None,
        outages: false,
        paper: "both paths about the same (500 kB/s each)",
        agrees: |outcome| (0.4..=0.6).contains(&outcome.share_of_first),
    },
    Figure {
        name: "8: the first preferred",
        rate: MB,
        trips: [20, 20],
        prefer: Some(0),
        outages: false,
        paper: "only the preferred path carries data",
        agrees: |outcome| outcome.share_of_first > 0.95,
    },
    Figure {
        name: "9: the other preferred",
        rate: MB,
        trips: [20, 20],
        prefer: Some(1),
        outages: false,
        paper: "only the preferred path carries data",
        agrees: |outcome| outcome.share_of_first < 0.05,
    },
    Figure {
        name: "10: the preferred drops everything, 5 s of each 10 s",
        rate: 512_000,
        trips: [40, 40],
        prefer: Some(1),
        outages: true,
        paper: "traffic moves away, and back",
        agrees: |outcome| {
            let [during, after] = outcome.shares_of_first_in_outages.unwrap_or_default();
            during > 0.95 && after < 0.1
        },
    },
    Figure {
        name: "11: the preferred has 60 ms, the other 40 ms",
        rate: 512_000,
        trips: [40, 60],
        prefer: Some(1),
        outages: false,
        paper: "stays on the preferred path (60 < delta = 80)",
        agrees: |outcome| outcome.share_of_first < 0.05,
    },
    Figure {
        name: "12: the preferred has 200 ms, the other 40 ms",
        rate: 512_000,
        trips: [40, 200],
        prefer: Some(1),
        outages: false,
        paper: "falls back to the default: more by the quicker path",
        agrees: |outcome| outcome.share_of_first > 0.5,
    },
];

/// Report of all outcomes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Place and time.
    pub environment: Environment,
    /// The congestion control of the sender.
    pub congestion: String,
    /// Fig. 6 to 12.
    pub figures: Vec<Outcome>,
    /// How soon a dropped path is back.
    pub recovery: Recovery,
}

/// Outcome of a figure.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Figure of the paper, and what is set up.
    pub figure: String,
    /// Result that the paper shows.
    pub paper: String,
    /// True if ours agrees with it.
    pub agrees: bool,
    /// The preferred path.
    pub preferred: Option<String>,
    /// Between the samples.
    pub every_seconds: f64,
    /// Bytes that each path carried in each interval, headers and all.
    pub bytes: Vec<Vec<u64>>,
    /// The first path's part of all, without the start.
    pub share_of_first: f64,
    /// The same while the preferred path is out, from a second after its end comes, and from a second after it is
    /// back.
    pub shares_of_first_in_outages: Option<[f64; 2]>,
    /// Application bytes a second that arrived.
    pub bytes_per_second: f64,
    /// The longest time in which nothing arrived.
    pub longest_gap_ms: f64,
}

/// How soon a path of 40 ms carries data again after it dropped everything for two seconds and a little more each
/// time, in ms: as published, from its return on.
#[derive(Clone, Debug, Serialize)]
pub struct Recovery {
    /// Preferred, by each turn.
    pub hinted_ms: Vec<f64>,
    /// Without a hint.
    pub standard_ms: Vec<f64>,
    /// The paper's: with the changed timeout, and standard.
    pub paper_ms: [f64; 2],
}

/// Runs all of it, each figure for so long. Call [`enter`](crate::enter) before.
///
/// # Errors
/// If what it needs is missing, or the connection breaks or delivers other bytes than those sent.
pub fn hint(programs: &Programs, congestion: &str, span: Duration, turns: u32) -> Result<Report> {
    let environment = Environment::of(std::time::SystemTime::now())?;
    let mut figures = Vec::new();
    for figure in &FIGURES {
        eprintln!("Fig. {}", figure.name);
        let outcome = run(programs, congestion, figure, span);
        figures.push(outcome.with_context(|| format!("Fig. {}", figure.name))?);
    }
    eprintln!("recovery");
    let recovery = recovery(programs, congestion, turns).context("recovery")?;
    Ok(Report {
        environment,
        congestion: congestion.to_owned(),
        figures,
        recovery,
    })
}

/// Two hosts, their daemons, and two links of a rate in bytes a second and with round trips in ms.
struct Stage {
    site: Site,
    daemons: [Dibsd; 2],
    _lab: Lab,
}

impl Stage {
    fn new(programs: &Programs, rate: u64, trips: [u64; 2]) -> Result<Self> {
        let mut lab = Lab::new()?;
        let site = Site::new(&mut lab, ["a", "b"], 2, |interface, link| {
            let number = usize::from(interface == INTERFACES[1]);
            let delay = Duration::from_millis(trips[number]) / 2;
            link.emulated(Conditions::new().rate(rate * 8).delay(delay))
        })?;
        let settings = [RULE, ""].map(|tables| Settings { daemon: "", tables });
        let daemons = programs.join([&site.a, &site.b], &Site::paths(2), settings)?;
        Ok(Self {
            site,
            daemons,
            _lab: lab,
        })
    }

    fn prefer(&self, path: Option<usize>) -> Result<()> {
        let words: &[&str] = match path {
            Some(path) => &["path", "prefer", NAMES[path]],
            None => &["path", "unprefer"],
        };
        for daemon in &self.daemons {
            daemon.ctl::<serde_json::Value>(words)?;
        }
        Ok(())
    }

    fn set_outage(&self, link: usize, outage: bool) -> Result<()> {
        self.site.links[link].set(|conditions| conditions.outage = outage)
    }

    fn load(&self, congestion: &str) -> Throughput {
        let [_, far] = addresses(0);
        Throughput::new(SocketAddr::new(far, PORT))
            .endless()
            .congestion(congestion)
    }
}

fn run(programs: &Programs, congestion: &str, figure: &Figure, span: Duration) -> Result<Outcome> {
    let stage = Stage::new(programs, figure.rate, figure.trips)?;
    if figure.prefer.is_some() {
        stage.prefer(figure.prefer)?;
    }
    let transfer = stage.load(congestion).start(&stage.site.a, &stage.site.b)?;
    let mut sampler = Sampler::new(&stage.site, EVERY)?;
    let mut out = false;
    sampler.until(span, |at| {
        let within = at.as_secs_f64() % PERIOD.as_secs_f64();
        let is_out = figure.outages && within >= PERIOD.as_secs_f64() / 2.0;
        if out != is_out {
            out = is_out;
            stage.set_outage(figure.prefer.unwrap_or(0), out)?;
        }
        Ok(())
    })?;
    let bytes = sampler.bytes;
    ensure!(transfer.is_running(), "the connection broke");
    transfer.stop();
    let report = transfer.finish()?;
    let share = |counts: &dyn Fn(f64) -> bool| {
        let every = EVERY.as_secs_f64();
        let of = |path: &Vec<u64>| -> u64 {
            let slots = path.iter().enumerate();
            let counted = slots.filter(|(slot, _)| counts(*slot as f64 * every));
            counted.map(|(_, bytes)| *bytes).sum()
        };
        let [first, other] = [of(&bytes[0]), of(&bytes[1])];
        first as f64 / (first + other).max(1) as f64
    };
    let half = PERIOD.as_secs_f64() / 2.0;
    let within = |time: f64| time % PERIOD.as_secs_f64();
    let in_outages = [
        share(&|time| within(time) >= half + 1.0),
        share(&|time| time >= PERIOD.as_secs_f64() && (1.0..half).contains(&within(time))),
    ];
    let mut outcome = Outcome {
        figure: figure.name.to_owned(),
        paper: figure.paper.to_owned(),
        agrees: false,
        preferred: figure.prefer.map(|path| NAMES[path].to_owned()),
        every_seconds: EVERY.as_secs_f64(),
        share_of_first: share(&|time| time >= SETTLING.as_secs_f64()),
        shares_of_first_in_outages: figure.outages.then_some(in_outages),
        bytes_per_second: report.bits_per_second / 8.0,
        longest_gap_ms: report.longest_gap_us as f64 / 1e3,
        bytes,
    };
    outcome.agrees = (figure.agrees)(&outcome);
    Ok(outcome)
}

fn recovery(programs: &Programs, congestion: &str, turns: u32) -> Result<Recovery> {
    let stage = Stage::new(programs, MB, [40, 40])?;
    let transfer = stage.load(congestion).start(&stage.site.a, &stage.site.b)?;
    std::thread::sleep(SETTLING);
    let [mut hinted_ms, mut standard_ms] = [Vec::new(), Vec::new()];
    for turn in 0..2 * turns {
        let hinted = turn % 2 == 0;
        stage.prefer(hinted.then_some(1))?;
        std::thread::sleep(SETTLING);
        stage.set_outage(1, true)?;
        // Not in step with any timer.
        std::thread::sleep(Duration::from_secs(2) + Duration::from_millis(u64::from(turn) * 17));
        stage.set_outage(1, false)?;
        let back = Instant::now();
        let before = stage.site.sent()?[1];
        while stage.site.sent()?[1] < before + CARRIES {
            ensure!(back.elapsed() < PATIENCE, "the path does not come back");
            std::thread::sleep(LOOK);
        }
        let took = back.elapsed().as_secs_f64() * 1e3;
        match hinted {
            true => hinted_ms.push(took),
            false => standard_ms.push(took),
        }
    }
    ensure!(transfer.is_running(), "the connection broke");
    transfer.stop();
    transfer.finish()?;
    Ok(Recovery {
        hinted_ms,
        standard_ms,
        paper_ms: [90.0, 140.0],
    })
}

impl Outcome {
    /// The rate of each path over time, as the paper draws it.
    pub fn svg(&self) -> String {
        let every = self.every_seconds;
        let curve = |path: usize, color| {
            let rates = self.bytes[path].iter();
            let rates = rates.map(|bytes| *bytes as f64 / every / 1e3);
            Curve::new(NAMES[path], color, by_interval(every, rates))
        };
        let seconds = self.bytes[0].len() as f64 * every;
        let label = match &self.preferred {
            Some(path) => format!("{path} is preferred"),
            None => "no hint".to_owned(),
        };
        let plot = Plot {
            along: "time, s",
            end: seconds,
            panels: vec![Panel {
                title: "rate, kB/s".to_owned(),
                curves: vec![curve(0, BLUE), curve(1, ORANGE)],
            }],
            marks: vec![Mark {
                at: 0.0,
                label,
                length: seconds,
            }],
        };
        plot.to_string()
    }
}

impl Recovery {
    /// The medians: with a hint, and without.
    pub fn medians(&self) -> [f64; 2] {
        [&self.hinted_ms, &self.standard_ms].map(|turns| median(turns.iter().copied()))
    }
}
