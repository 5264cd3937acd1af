//! Project commands: `cargo xtask COMMAND`.

mod compare;
mod cross;
mod deb;
mod full;
mod fuzz;
mod kernels;
mod manual;
mod model;
mod packages;
mod run;
mod systemd;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};

/// Project commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every test: units, simulator, and real traffic in network namespaces.
    ///
    /// One that fails keeps no other from running. Up to three that fail run once more, alone; the last lines name those
    /// that failed twice, or only once. Installs missing system packages as root on Debian, and names them elsewhere.
    Test,
    /// Run random histories of two hosts in the simulator; has options of its own.
    #[command(disable_help_flag = true)]
    Sim {
        /// Options of the simulator: --rules, --seeds N, --seed S, --jobs J
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Show what dibs does: a text on its way between two hosts in network namespaces, on one
    /// connection that is scrambled and plain again while it runs, and what an eavesdropper sees.
    ///
    /// Installs missing system packages as root on Debian, and names them elsewhere.
    Demo,
    /// Compare dibs with plain TCP, kernel MPTCP and VPNs in user space; has options of its own.
    ///
    /// Installs missing system packages as root on Debian, and names them elsewhere. What
    /// is not there is left out, and named. With `--compare REV`, that revision's programs are built from a checkout of its own, and take turns with
    /// this tree's.
    #[command(disable_help_flag = true)]
    Bench {
        /// Options of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Write the manual pages of dibsd and dibsctl.
    Man {
        /// Where to; made if it is not there
        #[arg(value_name = "DIRECTORY", default_value = "target/man")]
        directory: PathBuf,
    },
    /// Make the Debian packages, into target/debian: dibs_VERSION_amd64.deb and dibs_VERSION_arm64.deb.
    ///
    /// Installs missing build tools, compilers for other processors included, as root on Debian, and names
    /// them elsewhere.
    Deb {
        /// Which; both if none is named, and with --try the one for this processor
        #[arg(long, value_name = "ARCH", value_enum)]
        arch: Vec<cross::Arch>,
        /// Try it in fresh root file systems of Debian 12 and 13: install, demo, upgrade under a connection on
        /// a bump, remove, purge. For root; touches no network of the machine but to fetch packages
        #[arg(long = "try")]
        is_tried: bool,
    },
    /// Run the unit tests and the simulator as programs for 64-bit ARM, by QEMU where this processor is another.
    ///
    /// Installs a compiler for it, and the emulator, as root on Debian, and names them elsewhere.
    Aarch64 {
        /// Histories of the simulator
        #[arg(long, value_name = "N", default_value_t = 200)]
        seeds: u32,
    },
    /// Try dibs on kernels of Debian, and on one without nf_tables, booted here without the machine's help.
    ///
    /// Fetches the kernels, and QEMU, as root on Debian. Those of Debian take a quarter of an hour each.
    Kernels {
        /// Which; all if none is named
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(kernels::names()))]
        names: Vec<String>,
    },
    /// Try the package under a running systemd, in a Debian 13 that is booted here: guard, watchdog, reload, crash, upgrade.
    ///
    /// For root; fetches the system, its kernel, and QEMU. Takes ten minutes.
    Systemd {
        /// Which package: the machine that boots has such a processor
        #[arg(long, value_name = "ARCH", value_enum, default_value = "amd64")]
        arch: cross::Arch,
    },
    /// Run all checks, and what takes longer than a change should wait for: the protocol's models, long simulations, fuzzers,
    /// 64-bit ARM, packages, other kernels, systemd. A table of the outcomes comes at the end.
    ///
    /// For root on Debian; takes an hour and a half.
    Full {
        /// Which parts; all if none is named
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(full::names()))]
        parts: Vec<String>,
    },
    /// Have Verifpal look for attacks on the models of the handshake in docs/model, and compare what it finds with what they
    /// say.
    ///
    /// Installs Verifpal into target/tools, and by rustup a nightly compiler to build it. Takes ten minutes.
    Model,
    /// Repeat one experiment: codec, captures, files, read, dibs, hint, sum or database.
    ///
    /// The same as `reproduce NAME`.
    #[command(disable_help_flag = true)]
    Experiment {
        /// The experiment, and options as of `reproduce`
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Repeat every table and figure of the papers, and write a report; has options of its own.
    ///
    /// Installs missing system packages as root on Debian, and names them elsewhere.
    #[command(disable_help_flag = true)]
    Reproduce {
        /// Parts, and --quick, --resume, --output DIR
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Run the fuzzers in turn, each on its corpus in fuzz/corpus and on what it found before.
    ///
    /// Needs a nightly compiler and cargo-fuzz, and installs them by rustup and cargo.
    Fuzz {
        /// How long each target runs
        #[arg(long, value_name = "N", default_value_t = 60)]
        seconds: u32,
        /// Which targets; all if none is named
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(fuzz::TARGETS))]
        targets: Vec<String>,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Test => test(),
        Command::Sim { options } => sim(&options),
        Command::Demo => demo(),
        Command::Bench { options } => bench(&options),
        Command::Man { directory } => man(&directory),
        Command::Deb { arch, is_tried } => deb::deb(&arch, is_tried),
        Command::Kernels { names } => kernels::kernels(&names),
        Command::Systemd { arch } => systemd::systemd(arch),
        Command::Full { parts } => full::full(&parts),
        Command::Model => model::model(),
        Command::Aarch64 { seeds } => cross::aarch64(seeds),
        Command::Experiment { options } | Command::Reproduce { options } => reproduce(&options),
        Command::Fuzz { seconds, targets } => fuzz::fuzz(seconds, &targets),
    }
}

/// Failed tests that are run once more. More that fail at once are no matter of a busy machine.
const MOST_RUN_AGAIN: usize = 3;

fn test() -> Result<()> {
    packages::ensure(&[&packages::LAB, &packages::TESTS])?;
    // The tests on real traffic wait as much as they compute: so many keep the two processors of a small machine busy.
    let failed = run::tests(&mut tests("6", &[]))?;
    let names: Vec<&str> = failed.iter().map(String::as_str).collect();
    if names.is_empty() {
        return Ok(());
    }
    ensure!(
        names.len() <= MOST_RUN_AGAIN,
        "failed: {}",
        names.join(", ")
    );
    eprintln!("failed, and run once more, alone: {}", names.join(", "));
    let still = run::tests(&mut tests("1", &names))?;
    let still = Vec::from_iter(still).join(", ");
    ensure!(still.is_empty(), "failed twice: {still}");
    eprintln!(
        "passed alone, after failing beside others: {}. The cause is to be found: what they said stands above",
        names.join(", ")
    );
    Ok(())
}

/// Command that runs so many tests at once: the ones of these names, or all.
fn tests(threads: &str, names: &[&str]) -> process::Command {
    let mut tests = run::cargo_command(&["test", "--workspace", "--no-fail-fast"]);
    if !names.is_empty() {
        tests.args(["--", "--exact"]).args(names);
    }
    // The tests on real traffic start dibsd and dibsctl: cargo builds them for their own tests, before
    // it runs any. A further build for them alone would choose other features, and compile all again.
    tests.envs([("RUST_TEST_THREADS", threads), ("DIBS_BUILT", "1")]);
    tests
}

fn sim(options: &[OsString]) -> Result<()> {
    run::cargo(&["build", "--release", "--package", "dibs-sim"])?;
    run::run(process::Command::new(release("dibs-sim")?).args(options))
}

fn demo() -> Result<()> {
    packages::ensure(&[&packages::LAB])?;
    build_release()?;
    run::run(process::Command::new(release("dibsctl")?).arg("demo"))
}

fn bench(options: &[OsString]) -> Result<()> {
    packages::ensure(&[&packages::LAB, &packages::EXPERIMENT, &packages::BENCH])?;
    let options = compare::built(options)?;
    build_release()?;
    run::run(process::Command::new(release("dibs-bench")?).args(options))
}

fn man(directory: &Path) -> Result<()> {
    run::cargo(&PROGRAMS)?;
    run::make_directory(directory)?;
    let mut daemon = process::Command::new(release("dibsd")?);
    run::run(daemon.arg("--man").arg(directory))?;
    let mut control = process::Command::new(release("dibsctl")?);
    run::run(control.arg("man").arg(directory))?;
    let page = manual::of_file(include_str!("../../../docs/dibsd.toml.md"));
    std::fs::write(directory.join("dibsd.toml.5"), page).context("cannot write dibsd.toml.5")
}

fn reproduce(options: &[OsString]) -> Result<()> {
    packages::ensure(&[&packages::LAB, &packages::EXPERIMENT])?;
    let named = |name: &str| options.iter().any(|option| option == name);
    if named("database") || !PARTS.iter().any(|name| named(name)) {
        packages::offer_database()?;
    }
    build_release()?;
    run::run(process::Command::new(release("dibs-reproduce")?).args(options))
}

/// The experiments that need no database.
const PARTS: [&str; 7] = ["codec", "captures", "files", "read", "dibs", "hint", "sum"];

/// The programs as they are installed.
pub(crate) const PROGRAMS: [&str; 4] = ["build", "--release", "-pdibsd", "-pdibsctl"];

/// Builds these, the benchmark and the experiments. All at once, for cargo chooses the features of what they share by what is built
/// together.
fn build_release() -> Result<()> {
    let lab = ["-pdibs-lab", "-pdibs-reproduce", "--bins"];
    run::cargo(&[&PROGRAMS[..], &lab].concat())
}

/// Where cargo puts a release program; this one is in `debug` beside it.
fn release(program: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("the running program's place")?;
    let target = own.ancestors().nth(2).context("cargo's target directory")?;
    Ok(target.join("release").join(program))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
