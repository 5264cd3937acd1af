//! `cargo xtask full`: what takes longer than a change should wait for, one part after the other.

use std::fmt::Write as _;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::run::{cargo_command, workspace};

/// A part by its name, and the words that `cargo xtask` is told for it; none: it is another command.
type Part = (&'static str, &'static [&'static str]);

const CHECK: &str = "check";
const LONG: &str = "long";
/// First seed of the simulator's histories with routers between the hosts (`dibs_sim::history::BETWEEN`).
const ROUTERS: &str = "1099511627776";
const PARTS: [Part; 11] = [
    (CHECK, &[]),
    ("model", &["model"]),
    ("sim", &["sim", "--seeds", "20000"]),
    (
        "sim-routers",
        &["sim", "--seed", ROUTERS, "--seeds", "50000"],
    ),
    (LONG, &[]),
    ("fuzz", &["fuzz", "--seconds", "60"]),
    ("aarch64", &["aarch64"]),
    ("deb", &["deb", "--try"]),
    ("systemd", &["systemd"]),
    ("systemd-arm64", &["systemd", "--arch", "arm64"]),
    ("kernels", &["kernels"]),
];

/// The names of all parts.
pub(crate) fn names() -> [&'static str; PARTS.len()] {
    PARTS.map(|(name, _)| name)
}

/// Runs these parts, or all. One that fails keeps no other from running.
pub(crate) fn full(names: &[String]) -> Result<()> {
    let chosen = |part: &&Part| names.is_empty() || names.iter().any(|name| name == part.0);
    let mut outcomes = Vec::new();
    for part in PARTS.iter().filter(chosen) {
        let start = Instant::now();
        let mut command = command(part)?;
        eprintln!("== {}", part.0);
        let status = command
            .current_dir(workspace())
            .status()
            .with_context(|| format!("cannot start {command:?}"))?;
        outcomes.push((part.0, status, start.elapsed()));
    }
    print!("{}", table(&outcomes));
    let failed = outcomes.iter().filter(|(_, status, _)| !status.success());
    let failed: Vec<&str> = failed.map(|(name, ..)| *name).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn command((name, words): &Part) -> Result<Command> {
    Ok(match *name {
        CHECK => {
            let mut check = Command::new("bash");
            check.arg(workspace().join(".ci/run"));
            check
        }
        // Tests on real traffic that take minutes: a thousand live switches between all bumps, and others.
        LONG => {
            let mut test = cargo_command(&["test", "--package", "netns-tests"]);
            test.args(["--test", "traffic", "--", "--ignored"]);
            test
        }
        _ => {
            let mut own = Command::new(std::env::current_exe().context("this program's place")?);
            own.args(*words);
            own
        }
    })
}

/// In Markdown.
fn table(outcomes: &[(&str, ExitStatus, Duration)]) -> String {
    let mut out = "| part | outcome | took, s |\n|---|---|---|\n".to_owned();
    for (name, status, took) in outcomes {
        let outcome = match status.success() {
            true => "passed".to_owned(),
            false => status.to_string(),
        };
        let took = took.as_secs_f64();
        writeln!(out, "| {name} | {outcome} | {took:.0} |").expect("a string takes all");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;

    #[test]
    fn outcomes_stand_in_a_table() {
        let outcomes = [
            ("sim", ExitStatus::from_raw(0), Duration::from_secs(27)),
            ("deb", ExitStatus::from_raw(256), Duration::from_secs(90)),
        ];
        let expected = "| part | outcome | took, s |\n|---|---|---|\n| sim | passed | 27 |\n\
                        | deb | exit status: 1 | 90 |\n";
        assert_eq!(table(&outcomes), expected);
    }
}
