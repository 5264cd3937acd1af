//! The experiment of the DIBS paper (Pohly et al. 2015): one TCP stream over three links of 1 Gbit/s, moved from
//! bump to bump while it runs; throughput, processor time, and how long nothing arrived at each switch.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;

use crate::baseline::openvpn;
use crate::bench::Environment;
use crate::dibs::{Programs, Settings};
use crate::lab::Lab;
use crate::load::sockets::host_retransmissions;
use crate::load::{Throughput, ThroughputReport};
use crate::plot::{BLUE, Mark, Panel, Plot, RED, by_interval};
use crate::processor::Processor;
use crate::site::{Site, addresses};

/// Of each link, both ways.
const RATE: u64 = 1_000_000_000;
const LINKS: usize = 3;
const PORT: u16 = 7000;
/// Between two samples of what arrived, and of the processors.
const THROUGHPUT_EVERY: Duration = Duration::from_millis(250);
const PROCESSOR_EVERY: Duration = Duration::from_millis(500);
/// What a switch may hold up shows within it.
const AFTER_SWITCH: Duration = Duration::from_secs(2);
/// Left out of a phase's means: what the switch itself does.
const SETTLING: Duration = Duration::from_millis(500);
/// The bump that is OpenVPN's device.
const VPN: &str = "openvpn";
const DEVICE: &str = "[[bump]]\nname = \"openvpn\"\nkind = \"device\"\ndevice = \"tun99\"\n";

/// Bumps of the stream, one after the other: as in the paper's Fig. 3, and with all that there is now.
pub const RUNS: [&[&str]; 2] = [
    &["plain", "share", VPN],
    &["plain", "scramble", "seal", "share", VPN],
];

/// The paper's Table I: bytes per second, and percent of one processor.
const TABLE_I: [(&str, f64, f64); 3] = [
    ("plain", 117e6, 10.0),
    ("share", 6e6, 108.0),
    (VPN, 50e6, 91.0),
];

/// Figures of the paper's Table I for a bump: bytes per second, and percent of one processor.
pub fn table_one(bump: &str) -> Option<(f64, f64)> {
    let row = TABLE_I.iter().find(|(name, ..)| *name == bump);
    row.map(|(_, bytes, used)| (*bytes, *used))
}

/// All runs.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Place and time.
    pub environment: Environment,
    /// Notes on what the figures count.
    pub notes: Vec<String>,
    /// In order.
    pub runs: Vec<Run>,
}

/// A stream with its switches.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// One after the other, equally long but for what the commands take.
    pub phases: Vec<Phase>,
    /// Length of a phase.
    pub phase_seconds: f64,
    /// Between the samples of `bytes`.
    pub throughput_every_seconds: f64,
    /// Application bytes that arrived in each interval.
    pub bytes: Vec<u64>,
    /// Each time and what was used since the one before, in percent of one processor.
    pub processor: Vec<(f64, f64)>,
    /// Retransmissions of the whole stream.
    pub retransmissions: u64,
    /// Connections that broke; a run that loses one fails.
    pub lost_connections: u32,
}

/// A time on one bump.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    /// Its name; "plain" for none.
    pub bump: String,
    /// When it was asked for, since the start.
    pub at_seconds: f64,
    /// How long the command took.
    pub command_ms: f64,
    /// Application data, mean.
    pub bytes_per_second: f64,
    /// Mean, of one processor.
    pub processor_percent: f64,
    /// TCP segments that the sending host sent again.
    pub retransmissions: u64,
    /// The longest time without data that ended in the two seconds after the switch; none at the start.
    pub stall_ms: Option<f64>,
}

/// Runs the experiment with phases of this length. Call [`enter`](crate::enter) before.
///
/// # Errors
/// If what it needs is missing, or the connection breaks or delivers other bytes than those sent.
pub fn dibs(programs: &Programs, phase: Duration) -> Result<Report> {
    let environment = Environment::of(std::time::SystemTime::now())?;
    let runs = RUNS.map(|bumps| {
        let named = || format!("{} in one connection", bumps.join(", "));
        run(programs, bumps, phase).with_context(named)
    });
    Ok(Report {
        environment,
        notes: vec![
            "Both hosts are on this machine: processor time is the whole machine's (both daemons, both \
             OpenVPNs, the kernel, sender and receiver, and whatever else runs), in percent of one \
             processor. The paper's is one host's."
                .to_owned(),
            "Plain TCP and OpenVPN use one of the links; share sends a share by each of the three."
                .to_owned(),
        ],
        runs: runs.into_iter().collect::<Result<_>>()?,
    })
}

fn run(programs: &Programs, bumps: &[&str], phase: Duration) -> Result<Run> {
    let mut lab = Lab::new()?;
    let site = Site::new(&mut lab, ["a", "b"], LINKS, |_, link| link.shaped(RATE))?;
    let [near, far] = addresses(0);
    let _vpn = openvpn((&site.a, near), (&site.b, far))?;
    let settings = Settings {
        daemon: "",
        tables: DEVICE,
    };
    let hosts = [&site.a, &site.b];
    let daemons = programs.join(hosts, &Site::paths(LINKS), [settings; 2])?;
    let load = Throughput::new(SocketAddr::new(far, PORT))
        .endless()
        .interval(THROUGHPUT_EVERY);
    let mut processor = Processor::new()?;
    let start = Instant::now();
    let transfer = load.start(&site.a, &site.b)?;
    let mut switches = vec![Switch {
        at: Duration::ZERO,
        took: Duration::ZERO,
        resent: host_retransmissions(&site.a)?,
    }];
    let mut samples = Vec::new();
    for number in 1..=bumps.len() {
        // From when the stream is on the bump, however long that took.
        let end = Instant::now() + phase;
        let mut sampled = Instant::now();
        while Instant::now() < end {
            let wake = end.min(sampled + PROCESSOR_EVERY);
            std::thread::sleep(wake.saturating_duration_since(Instant::now()));
            if sampled.elapsed() >= PROCESSOR_EVERY {
                sampled = Instant::now();
                samples.push((start.elapsed().as_secs_f64(), processor.used()?));
            }
        }
        let resent = host_retransmissions(&site.a)?;
        let asked = Instant::now();
        let at = asked - start;
        let Some(bump) = bumps.get(number) else {
            let took = Duration::ZERO;
            switches.push(Switch { at, took, resent });
            break;
        };
        ensure!(transfer.is_running(), "the connection broke");
        daemons[0].switch(("--dport", PORT), bump)?;
        let took = asked.elapsed();
        switches.push(Switch { at, took, resent });
        eprintln!("{bump} since {:.1} s", at.as_secs_f64());
    }
    transfer.stop();
    let report = transfer.finish()?;
    let phases = bumps.iter().zip(switches.windows(2));
    let phases = phases.map(|(bump, ends)| made(bump, &ends[0], &ends[1], &report, &samples));
    Ok(Run {
        phases: phases.collect(),
        phase_seconds: phase.as_secs_f64(),
        throughput_every_seconds: THROUGHPUT_EVERY.as_secs_f64(),
        bytes: report.intervals.clone(),
        processor: samples,
        retransmissions: report.retransmissions,
        lost_connections: 0,
    })
}

/// When a stream was moved, or its end.
struct Switch {
    at: Duration,
    /// The command.
    took: Duration,
    /// Segments that the sending host had sent again by then.
    resent: u64,
}

/// What a phase came to.
fn made(
    bump: &str,
    switch: &Switch,
    next: &Switch,
    report: &ThroughputReport,
    samples: &[(f64, f64)],
) -> Phase {
    let (at, end) = (switch.at, next.at);
    let every = THROUGHPUT_EVERY.as_secs_f64();
    let settled = (at + switch.took + SETTLING).as_secs_f64();
    let whole = |slot: usize| {
        let begins = slot as f64 * every;
        begins >= settled && begins + every <= end.as_secs_f64()
    };
    let bytes = report.intervals.iter().enumerate();
    let bytes: Vec<u64> = { bytes.filter(|(slot, _)| whole(*slot)) }
        .map(|(_, bytes)| *bytes)
        .collect();
    let used: Vec<f64> = { samples.iter() }
        .filter(|(time, _)| *time > settled && *time <= end.as_secs_f64() + every)
        .map(|(_, used)| *used)
        .collect();
    let slot = |time: Duration| (time.as_secs_f64() / every) as usize;
    let after = slot(at)..=slot(end.min(at + AFTER_SWITCH));
    let gaps = report.gaps_us.iter().enumerate();
    let stall = { gaps.filter(|(slot, _)| after.contains(slot)) }
        .map(|(_, gap)| *gap)
        .max();
    Phase {
        bump: bump.to_owned(),
        at_seconds: at.as_secs_f64(),
        command_ms: switch.took.as_secs_f64() * 1e3,
        bytes_per_second: bytes.iter().sum::<u64>() as f64 / (bytes.len().max(1) as f64 * every),
        processor_percent: used.iter().sum::<f64>() / used.len().max(1) as f64,
        retransmissions: next.resent - switch.resent,
        stall_ms: stall.filter(|_| !at.is_zero()).map(|us| us as f64 / 1e3),
    }
}

impl Run {
    /// As a plot of throughput and processor time, like the paper's Fig. 3.
    pub fn svg(&self) -> String {
        let last = self.phases.last();
        let last = last.map_or(0.0, |phase| phase.at_seconds + phase.command_ms / 1e3);
        let seconds = last + self.phase_seconds;
        let every = self.throughput_every_seconds;
        let rates = self.bytes.iter().map(|bytes| *bytes as f64 / every / 1e6);
        let arrived = by_interval(every, rates).filter(|(time, _)| *time <= seconds);
        let mark = |phase: &Phase| Mark {
            at: phase.at_seconds,
            label: phase.bump.clone(),
            length: self.phase_seconds,
        };
        let plot = Plot {
            along: "time, s",
            end: seconds,
            panels: vec![
                Panel::of("throughput, MB/s", BLUE, arrived),
                Panel::of("processor, % of one", RED, self.processor.iter().copied()),
            ],
            marks: self.phases.iter().map(mark).collect(),
        };
        plot.to_string()
    }
}
