//! The fuzzers: what they need, running them in turn, and what came of it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::packages;
use crate::run::{make_directory, run, succeeds, workspace};

/// Every target, as in `fuzz/Cargo.toml` and `dibs_fuzz::TARGETS`.
pub(crate) const TARGETS: [&str; 6] = [
    "config",
    "control",
    "datagrams",
    "handshake",
    "messages",
    "packets",
];
/// What an input may cost, and how long one may be.
const LIMITS: [&str; 5] = [
    // Seconds by the clock: on a busy machine an input of a tenth of one takes several.
    "-timeout=60",
    "-rss_limit_mb=2048",
    "-malloc_limit_mb=128",
    "-max_len=4096",
    "-print_final_stats=1",
];

/// What came of a target.
struct Outcome {
    target: String,
    executions: u64,
    coverage: u64,
    failed: bool,
    log: PathBuf,
}

/// Runs the targets, all if none is named, for so many seconds each.
pub(crate) fn fuzz(seconds: u32, targets: &[String]) -> Result<()> {
    ensure_tools()?;
    let all = TARGETS.map(String::from);
    let targets = if targets.is_empty() { &all } else { targets };
    for target in targets {
        run(cargo_fuzz("build").arg(target))?;
    }
    let outcomes = targets.iter().map(|target| run_one(target, seconds));
    let outcomes: Vec<Outcome> = outcomes.collect::<Result<_>>()?;
    let line = |target: &str, executions: &str, coverage: &str, result: &str| {
        println!("{target:<10} {executions:>12} {coverage:>9}  {result}");
    };
    line("target", "executions", "coverage", "result");
    for outcome in &outcomes {
        let [executions, coverage] = [outcome.executions, outcome.coverage].map(|n| n.to_string());
        let result = match outcome.failed {
            true => format!("FAILED, see {}", outcome.log.display()),
            false => "clean".to_owned(),
        };
        line(&outcome.target, &executions, &coverage, &result);
    }
    ensure!(
        outcomes.iter().all(|o| !o.failed),
        "a failing input is in fuzz/artifacts; once it is mended, it belongs in fuzz/corpus"
    );
    Ok(())
}

/// A nightly compiler, cargo-fuzz, and a C++ compiler for libFuzzer.
fn ensure_tools() -> Result<()> {
    packages::ensure(&[&packages::FUZZ])?;
    ensure_nightly()?;
    if !succeeds(Command::new("cargo").args(["fuzz", "--version"])) {
        run(Command::new("cargo").args(["install", "--locked", "cargo-fuzz"]))?;
    }
    Ok(())
}

/// A nightly compiler, by rustup.
///
/// # Errors
/// If it cannot be installed.
pub(crate) fn ensure_nightly() -> Result<()> {
    if !succeeds(Command::new("rustup").args(["run", "nightly", "rustc", "--version"])) {
        if !succeeds(Command::new("rustup").arg("--version")) {
            bail!("a nightly compiler is needed, and rustup to find it: https://rustup.rs");
        }
        let install = "toolchain install nightly --profile minimal";
        run(Command::new("rustup").args(install.split(' ')))?;
    }
    Ok(())
}

fn cargo_fuzz(subcommand: &str) -> Command {
    let mut command = Command::new("rustup");
    command.current_dir(workspace());
    command.args(["run", "nightly", "cargo", "fuzz", subcommand]);
    command
}

/// Runs one target on a corpus of its own, which grows from run to run, and on the one that is kept.
fn run_one(target: &str, seconds: u32) -> Result<Outcome> {
    let fuzz = workspace().join("fuzz");
    let grown = fuzz.join("target/corpus").join(target);
    let log = fuzz.join("target").join(format!("{target}.log"));
    make_directory(&grown)?;
    let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;

    let mut command = cargo_fuzz("run");
    command.arg(target).arg(&grown);
    command.arg(fuzz.join("corpus").join(target));
    command.arg("--").args(LIMITS);
    command.arg(format!("-max_total_time={seconds}"));
    let dictionary = fuzz.join("dict").join(target);
    if dictionary.exists() {
        let mut argument = OsString::from("-dict=");
        argument.push(dictionary);
        command.arg(argument);
    }
    eprintln!("{target}: {seconds} s, {}", log.display());
    let status = command
        .stdout(file.try_clone().context("cannot share the log")?)
        .stderr(file)
        .status()
        .context("cannot start rustup")?;
    let (executions, coverage) = figures(&log)?;
    Ok(Outcome {
        target: target.to_owned(),
        executions,
        coverage,
        failed: !status.success(),
        log,
    })
}

/// Executions and edges covered, as libFuzzer says at the end.
fn figures(log: &Path) -> Result<(u64, u64)> {
    let text = fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    let text = String::from_utf8_lossy(&text);
    let words: Vec<&str> = text.split_whitespace().collect();
    let last = |name: &str| {
        let at = words.iter().rposition(|word| *word == name);
        let value = at.and_then(|at| words.get(at + 1)?.parse().ok());
        value.unwrap_or(0)
    };
    Ok((last("stat::number_of_executed_units:"), last("cov:")))
}
