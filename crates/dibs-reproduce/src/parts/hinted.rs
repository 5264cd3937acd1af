//! Liyanage et al. 2021, Fig. 6 to 12 and the recovery times.

use std::time::Duration;

use anyhow::Result;
use dibs_lab::experiment;

use super::Stage;
use crate::finding::{Finding, Verdict};

const CONGESTION: &str = "cubic";

pub(super) fn run(stage: &Stage) -> Result<Finding> {
    // The figure with outages shows one in its second half of ten seconds, and what comes after it.
    let span = Duration::from_secs(stage.pick(30, 16));
    let turns = stage.pick(5, 2);
    let report = experiment::hint(&stage.programs()?, CONGESTION, span, turns)?;
    let mut finding = Finding {
        setup: format!(
            "Two emulated links of 1 MB/s each, or of 512 kB/s; one TCP stream on seal, {CONGESTION}, {} s each figure.",
            span.as_secs()
        ),
        data: serde_json::to_value(&report)?,
        ..Finding::default()
    };
    for outcome in &report.figures {
        let ours = match outcome.shares_of_first_in_outages {
            Some([during, after]) => format!(
                "{:.0} % by the other path in outages, {:.0} % between them",
                during * 100.0,
                after * 100.0
            ),
            None => format!(
                "{:.0} % by eth, {:.0} % by wlan",
                outcome.share_of_first * 100.0,
                (1.0 - outcome.share_of_first) * 100.0
            ),
        };
        finding.compare(
            &format!("Fig. {}", outcome.figure),
            [&outcome.paper, &ours],
            Verdict::agrees_if(outcome.agrees, "the paths are used otherwise"),
        );
        let number = outcome.figure.split(':').next().unwrap_or_default();
        finding.figure(
            &format!("hint-{}", number.replace('/', "-")),
            &format!("Fig. {}", outcome.figure),
            outcome.svg(),
        );
    }
    let [hinted, standard] = report.recovery.medians();
    let [paper_hinted, paper_standard] = report.recovery.paper_ms;
    finding.compare(
        "A dropped preferred path of 40 ms carries data again after",
        [
            &format!(
                "about {paper_hinted:.0} ms; with the standard timeout about {paper_standard:.0} ms"
            ),
            &format!("{hinted:.0} ms; without a hint {standard:.0} ms (medians of {turns})"),
        ],
        Verdict::agrees_if(hinted <= paper_hinted, "later than the paper's"),
    );
    Ok(finding)
}
