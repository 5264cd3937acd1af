//! What the lines of work give together: a stream that runs gets a bump, and with it a second, unlike path.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use dibs_lab::dibs::Settings;
use dibs_lab::load::Throughput;
use dibs_lab::plot::{BLUE, Curve, Mark, ORANGE, Panel, Plot, by_interval};
use dibs_lab::site::{Sampler, Site, UNTRUSTED, addresses};
use dibs_lab::{Conditions, Lab};
use serde_json::json;

use super::Stage;
use crate::finding::{Finding, Verdict};

const RATES: [u64; 2] = [50_000_000, 30_000_000];
const DELAYS: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(25)];
const PORT: u16 = 7000;
const EVERY: Duration = Duration::from_millis(250);
/// Left out of a phase's mean: the stream grows.
const SETTLING: usize = 8;

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let phases = stage.pick([8, 14, 6], [5, 8, 4]).map(Duration::from_secs);
    let mut lab = Lab::new()?;
    let site = Site::new(&mut lab, ["a", "b"], 2, |interface, link| {
        let number = usize::from(interface == UNTRUSTED);
        link.emulated(Conditions::new().rate(RATES[number]).delay(DELAYS[number]))
    })?;
    let settings = [Settings::default(); 2];
    let daemons = { stage.programs()? }.join([&site.a, &site.b], &Site::paths(2), settings)?;
    let to = SocketAddr::new(addresses(0)[1], PORT);
    let load = Throughput::new(to)
        .endless()
        .congestion("cubic")
        .interval(EVERY);
    let transfer = load.start(&site.a, &site.b)?;
    let mut switched = Vec::new();
    let mut sampler = Sampler::new(&site, EVERY)?;
    for (bump, phase) in ["plain", "seal", "plain"].into_iter().zip(phases) {
        if !switched.is_empty() {
            daemons[0].switch(("--dport", PORT), bump)?;
        }
        switched.push(sampler.count());
        sampler.until(sampler.elapsed() + phase, |_| Ok(()))?;
    }
    let bytes = sampler.bytes;
    ensure!(transfer.is_running(), "the connection broke");
    transfer.stop();
    let report = transfer.finish()?;
    let slots = bytes[0].len();
    let ends = switched.iter().skip(1).copied().chain([slots]);
    let means: Vec<f64> = { switched.iter().zip(ends) }
        .map(|(&from, to)| {
            let arrived =
                &report.intervals[(from + SETTLING).min(to)..to.min(report.intervals.len())];
            let seconds = arrived.len().max(1) as f64 * EVERY.as_secs_f64();
            arrived.iter().sum::<u64>() as f64 * 8.0 / seconds / 1e6
        })
        .collect();
    let mut finding = Finding {
        setup: "Emulated links of 50 Mbit/s and 20 ms, trusted, and of 30 Mbit/s and 50 ms; one TCP stream, CUBIC, that seal \
                is put into and taken out of while it runs."
            .to_owned(),
        data: json!({"bytes_by_link": bytes, "every_seconds": EVERY.as_secs_f64(), "mbit_per_s": means,
                     "longest_gap_ms": report.longest_gap_us as f64 / 1e3}),
        ..Finding::default()
    };
    finding.compare(
        "Plain, then seal over both links, then plain",
        [
            "not measured",
            &format!(
                "{:.0}, {:.0} and {:.0} Mbit/s; nothing arrived for {:.0} ms at most",
                means[0],
                means[1],
                means[2],
                report.longest_gap_us as f64 / 1e3
            ),
        ],
        Verdict::New,
    );
    finding.figure(
        "sum",
        "What each link carried, each 0.25 s, headers included",
        plot(&bytes, &switched).to_string(),
    );
    Ok(finding)
}

fn plot(bytes: &[Vec<u64>], switched: &[usize]) -> Plot {
    let every = EVERY.as_secs_f64();
    let at = |slot: usize| slot as f64 * every;
    let megabits = |bytes: u64| bytes as f64 * 8.0 / every / 1e6;
    let slots = bytes[0].len();
    let curve = |name: &str, color, of: &dyn Fn(usize) -> u64| {
        let rates = (0..slots).map(|slot| megabits(of(slot)));
        Curve::new(name, color, by_interval(every, rates))
    };
    let names = ["plain", "seal", "plain"];
    let ends = switched.iter().skip(1).copied().chain([slots]);
    let marks = names.iter().zip(switched.iter().zip(ends));
    Plot {
        along: "time, s",
        end: at(slots),
        panels: vec![Panel {
            title: "rate, Mbit/s".to_owned(),
            curves: vec![
                curve("both together", "#7a7a7a", &|slot| {
                    bytes[0][slot] + bytes[1][slot]
                }),
                curve("eth0, 50 Mbit/s, 20 ms, trusted", BLUE, &|slot| {
                    bytes[0][slot]
                }),
                curve("wlan0, 30 Mbit/s, 50 ms", ORANGE, &|slot| bytes[1][slot]),
            ],
        }],
        marks: marks
            .map(|(name, (&from, to))| Mark {
                at: at(from),
                label: (*name).to_owned(),
                length: at(to - from),
            })
            .collect(),
    }
}
