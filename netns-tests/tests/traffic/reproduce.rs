//! The report of all experiments: what came of each part is in it, also of one that failed.

use anyhow::{Context as _, Result, bail, ensure};
use dibs_reproduce::{Outcome, PARTS, Part, Plan, Record, Stage, Verdict};
use netns_tests::{isolated, programs};

/// One that runs, on real traffic; one that cannot.
fn parts() -> Result<[Part; 2]> {
    let captures = PARTS.iter().find(|part| part.name == "captures");
    let broken = Part {
        name: "broken",
        title: "What cannot be had",
        source: "No paper",
        run: |_| bail!("there is no such link"),
    };
    Ok([broken, *captures.context("there is such a part")?])
}

fn kept(plan: &Plan<'_>, name: &str) -> Result<Record> {
    let text = std::fs::read_to_string(plan.output.join(name).with_extension("json"))?;
    Ok(serde_json::from_str(&text)?)
}

#[test]
fn a_failed_part_shows_in_the_report_and_the_rest_goes_on() {
    isolated(|| -> Result<()> {
        programs::check()?;
        let built = programs::built("dibsd");
        let stage = Stage {
            programs: built.parent().context("a directory")?.to_owned(),
            quick: true,
        };
        let parts = parts()?;
        let directory = tempfile::tempdir()?;
        let mut plan = Plan {
            parts: &parts,
            only: Vec::new(),
            resume: false,
            output: directory.path().to_owned(),
        };
        let failed = plan.run(&stage, "a test")?;
        ensure!(failed == ["broken"], "{failed:?}");
        let page = std::fs::read_to_string(plan.page())?;
        ensure!(page.contains("failed: there is no such link"), "{page}");
        let first = kept(&plan, "captures")?;
        let Outcome::Done(finding) = &first.outcome else {
            bail!("{first:?}");
        };
        for figure in ["Fig. 13", "Fig. 14", "Fig. 16"] {
            let of = |one: &&dibs_reproduce::Comparison| one.of.starts_with(figure);
            let one = finding.comparisons.iter().find(of).context(figure)?;
            ensure!(one.verdict == Verdict::Agrees, "{one:?}");
            ensure!(page.contains(&one.of), "{figure}");
        }

        // What was done is not done again, what failed is.
        plan.resume = true;
        let failed = plan.run(&stage, "a test")?;
        ensure!(failed == ["broken"], "{failed:?}");
        ensure!(kept(&plan, "captures")?.at == first.at);

        plan.only = vec!["nothing".to_owned()];
        let refused = plan.run(&stage, "a test");
        let said = refused.map_err(|error| error.to_string());
        ensure!(
            said == Err("no part nothing, but broken, captures".to_owned()),
            "{said:?}"
        );
        Ok(())
    });
}
