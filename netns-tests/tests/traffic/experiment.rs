//! The papers' experiments, shortened.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::dibs::Programs;
use dibs_lab::experiment::{self, RUNS};
use netns_tests::{isolated, programs};

#[test]
fn one_stream_over_all_bumps() {
    isolated(|| -> Result<()> {
        programs::check()?;
        let built = programs::built("dibsd");
        let programs = Programs::beside(built.parent().context("a directory")?)?;
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
        let table = report.to_string();
        ensure!(table.contains("| 6 | 108 |"), "{table}");
        Ok(())
    });
}
