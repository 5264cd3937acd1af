//! The papers' experiments, shortened.

use std::time::Duration;

use anyhow::{Result, ensure};
use dibs_lab::experiment::{self, RUNS};
use netns_tests::{isolated, programs};

#[test]
fn one_stream_over_all_bumps() {
    isolated(|| -> Result<()> {
        programs::check()?;
        let programs = programs::find()?;
        let report = experiment::dibs(&programs, Duration::from_secs(2))?;
        for (run, bumps) in report.runs.iter().zip(RUNS) {
            let of_phases: Vec<&str> = run.phases.iter().map(|phase| &*phase.bump).collect();
            ensure!(of_phases == bumps, "{of_phases:?}");
            for phase in &run.phases {
                ensure!(phase.bytes_per_second > 0.0, "{phase:?}");
                ensure!(phase.processor_percent > 0.0, "{phase:?}");
                let is_first = phase.bump == "plain";
                ensure!(phase.stall_ms.is_some() != is_first, "{phase:?}");
            }
            let svg = run.svg();
            ensure!(svg.matches("<polyline").count() == 2, "{svg}");
            let all = bumps.iter().all(|bump| svg.contains(&format!(">{bump}<")));
            ensure!(all && !svg.contains("NaN"), "{svg}");
        }
        Ok(())
    });
}

#[test]
fn the_hint_moves_a_stream_as_the_paper_says() {
    isolated(|| -> Result<()> {
        programs::check()?;
        let programs = programs::find()?;
        // Long enough for the shares of the paths; what the figure with outages shows comes after five seconds.
        let report = experiment::hint(&programs, "cubic", Duration::from_secs(4), 1)?;
        ensure!(report.figures.len() == 6, "{report:?}");
        for outcome in &report.figures {
            let sent: u64 = outcome.bytes.iter().flatten().sum();
            ensure!(sent > 0, "{outcome:?}");
            let svg = outcome.svg();
            ensure!(svg.matches("<polyline").count() == 2, "{svg}");
            ensure!(!svg.contains("NaN"), "{svg}");
            // Which path is preferred decides; how much goes another way while the machine pauses for longer than a probe
            // timeout is the machine's.
            let first = outcome.share_of_first;
            match outcome.figure.split(':').next() {
                Some("8") => ensure!(first > 0.5, "{outcome:?}"),
                Some("9" | "11") => ensure!(first < 0.5, "{outcome:?}"),
                _ => {}
            }
        }
        let recovery = &report.recovery;
        let counts = (recovery.hinted_ms.len(), recovery.standard_ms.len());
        ensure!(counts == (1, 1), "{recovery:?}");
        Ok(())
    });
}
