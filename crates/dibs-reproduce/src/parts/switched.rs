//! Pohly et al. 2015, Table I and Fig. 3.

use std::time::Duration;

use anyhow::Result;
use dibs_lab::experiment;

use super::Stage;
use crate::finding::{Finding, Verdict};

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    let phase = Duration::from_secs(stage.pick(10, 4));
    let report = experiment::dibs(&stage.programs()?, phase)?;
    let mut finding = Finding {
        setup: format!(
            "Three links of 1 Gbit/s; one TCP stream, {} s on each bump, moved by dibsctl while it runs. {}",
            phase.as_secs(),
            report.notes.join(" ")
        ),
        data: serde_json::to_value(&report)?,
        ..Finding::default()
    };
    let published = &report.runs[0];
    for phase in &published.phases {
        let Some((bytes, percent)) = experiment::table_one(&phase.bump) else {
            continue;
        };
        let rate = phase.bytes_per_second;
        let slower = match rate < 0.9 * bytes {
            true => Verdict::Differs("slower than the paper's".to_owned()),
            false => Verdict::Incomparable(
                "the processors are others, and both hosts are on one machine".to_owned(),
            ),
        };
        finding.compare(
            &format!("Table I, {}: rate, and use of the processor", phase.bump),
            [
                &format!("{:.0} MB/s, {percent:.0} %", bytes / 1e6),
                &format!("{:.0} MB/s, {:.0} %", rate / 1e6, phase.processor_percent),
            ],
            slower,
        );
    }
    let stalls = report.runs.iter().flat_map(|run| &run.phases);
    let longest = stalls
        .filter_map(|phase| phase.stall_ms)
        .fold(0.0, f64::max);
    let lost: u32 = report.runs.iter().map(|run| run.lost_connections).sum();
    finding.compare(
        "Fig. 3, one connection through all of them",
        [
            "not interrupted",
            &format!("{lost} connections lost; nothing arrived for {longest:.0} ms at most"),
        ],
        Verdict::agrees_if(lost == 0, "a connection was lost"),
    );
    for (number, run) in report.runs.iter().enumerate() {
        let name = format!("dibs-{}", number + 1);
        let caption = match number {
            0 => "As in Fig. 3: throughput each 0.25 s, use of the processors each 0.5 s",
            _ => "The same with all bumps that there are now",
        };
        finding.figure(&name, caption, run.svg());
        let row = |phase: &experiment::Phase| {
            let stall = phase.stall_ms.map(|ms| format!("{ms:.0}"));
            vec![
                phase.bump.clone(),
                format!("{:.1}", phase.bytes_per_second / 1e6),
                format!("{:.0}", phase.processor_percent),
                stall.unwrap_or_default(),
                phase.retransmissions.to_string(),
            ]
        };
        finding.table(
            "The phases",
            &[
                "bump",
                "MB/s",
                "processor, % of one",
                "longest stall at the switch, ms",
                "TCP retransmissions",
            ],
            run.phases.iter().map(row).collect(),
        );
    }
    Ok(finding)
}
