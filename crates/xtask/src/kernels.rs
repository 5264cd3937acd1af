//! `cargo xtask kernels`: dibs on kernels of Debian, and on one without nf_tables, booted on this machine without its help.
//!
//! Debian's kernels run under QEMU, which translates every instruction; the machine's file system is theirs, by 9p. User-mode
//! Linux runs as a process. Each runs a few tests on real traffic, `dibsctl doctor`, and a short demonstration.

mod image;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::cross::Arch;
use crate::packages;
use crate::run::{cargo_command, printed, run, workspace};
pub(crate) use image::Image;

/// A kernel, and how it is run.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    name: &'static str,
    /// Debian's suite, and the package that is the kernel, or, its processor's name added, depends on it.
    suite: &'static str,
    package: &'static str,
    is_user_mode: bool,
}

const KERNELS: [Kernel; 3] = [
    Kernel {
        name: "debian-12",
        suite: "bookworm",
        package: "linux-image",
        is_user_mode: false,
    },
    Kernel {
        name: "debian-13",
        suite: "trixie",
        package: "linux-image",
        is_user_mode: false,
    },
    Kernel {
        name: "user-mode",
        suite: "bookworm",
        package: "user-mode-linux",
        is_user_mode: true,
    },
];

/// Tests on each: enable and disable, follow, rules, bumps, what is killed and restarted, cleanup, and routers that translate, whose
/// conntrack is the kernel's. None with a VPN: these programs are too slow there.
const TESTS: [&str; 12] = [
    "switching::in_and_out_again",
    "switching::a_class_rule_moves_an_established_connection",
    "bumps::sealed_data_is_read_nowhere",
    "bumps::shared_data_is_read_nowhere",
    "crash::the_called_daemon_is_killed",
    "crash::a_daemon_is_stopped_and_started",
    "crash::rules_outlive_a_crash",
    "crash::a_stopped_daemon_lets_go_if_so_configured",
    "natted::live_connections_move_through_two_translations",
    "natted::what_a_router_has_forgotten_stays_on_its_bump",
    "natted::what_a_router_would_forget_is_kept_in_its_mind",
    MASQUERADED,
];
/// A router that translates by iptables, which each of the kernels has.
const MASQUERADED: &str =
    "masqueraded::a_transfer_masqueraded_with_iptables_takes_each_bump_and_returns";
/// Those of them that need little memory: user-mode Linux maps each page of a process by itself, and the machine allows
/// 65,530 mappings (vm.max_map_count).
const IN_LITTLE_MEMORY: [&str; 5] = [
    "bumps::sealed_data_is_read_nowhere",
    "bumps::shared_data_is_read_nowhere",
    "crash::rules_outlive_a_crash",
    "crash::a_stopped_daemon_lets_go_if_so_configured",
    MASQUERADED,
];
/// MiB of the demonstration: emulated processors move some 50 Mbit/s on a bump.
const DEMONSTRATION: u32 = 256;
/// The same in user mode, where 300 Mbit/s were seen, and an `enable` that took 5 s.
const LONG_DEMONSTRATION: u32 = 1024;
/// How long all of it may take on a kernel.
const LIMIT: Duration = Duration::from_secs(1200);
/// Checks of `dibsctl doctor` that are the kernel's.
const CHECKS: [&str; 5] = ["kernel", "tun", "steering", "backstop", "conntrack"];

impl Kernel {
    fn demonstration(&self) -> u32 {
        match self.is_user_mode {
            true => LONG_DEMONSTRATION,
            false => DEMONSTRATION,
        }
    }

    fn tests(&self) -> &'static [&'static str] {
        match self.is_user_mode {
            true => &IN_LITTLE_MEMORY,
            false => &TESTS,
        }
    }
}

/// The names of all kernels.
pub(crate) fn names() -> [&'static str; KERNELS.len()] {
    KERNELS.map(|kernel| kernel.name)
}

/// What a kernel made of it.
struct Outcome {
    release: String,
    /// Each test, and whether it passed.
    tests: Vec<(&'static str, bool)>,
    demonstration: bool,
    /// What `dibsctl doctor` said of each of [`CHECKS`].
    checks: Vec<String>,
    took: Duration,
}

/// The kernel of this name for such a processor, fetched if it is not there.
pub(crate) fn image(name: &str, arch: Arch) -> Result<Image> {
    let kernel = KERNELS.iter().find(|kernel| kernel.name == name);
    let kernel = kernel.with_context(|| format!("there is no kernel {name}"))?;
    Image::get(kernel, arch, &workspace().join("target/kernels"))
}

/// What boots a kernel of Debian's on a root file system of this machine's, for so long at most; its command line says where
/// its console is, and `line`.
pub(crate) fn machine(image: &Image, root: &Path, line: &str, limit: Duration) -> Result<Command> {
    let (machine, processor, console) = match image.arch() {
        Arch::Amd64 => ("q35", "Haswell-noTSX", "ttyS0"),
        Arch::Arm64 => ("virt", "cortex-a72", "ttyAMA0"),
    };
    let (program, _) = image.arch().machine();
    let mut command = limited(limit);
    command.args([program, "-M", machine, "-cpu", processor]);
    // With a thread for each of its processors, one of them now and then runs code that the kernel has just replaced.
    command.args(["-accel", "tcg,thread=single", "-smp", "2", "-m", "4G"]);
    command.args(["-nographic", "-no-reboot", "-nic", "none"]);
    command.arg("-kernel").arg(image.kernel());
    command.arg("-initrd").arg(image.initramfs()?);
    let line = format!("console={console} panic=-1 {line}");
    command.args(["-append", &line, "-virtfs"]);
    let root = root.display();
    let options = "mount_tag=root,security_model=none,multidevs=remap";
    command.arg(format!("local,path={root},{options}"));
    Ok(command)
}

/// What is run behind it ends after so long.
fn limited(limit: Duration) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", &limit.as_secs().to_string()]);
    command
}

/// Runs it on these kernels, or on all.
pub(crate) fn kernels(names: &[String]) -> Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "the kernels are Debian's for amd64, and run on such a processor only"
    );
    let machine = [Arch::Amd64.machine()];
    packages::ensure(&[
        &packages::LAB,
        &packages::TESTS,
        &packages::KERNELS,
        &machine,
    ])?;
    let directory = workspace().join("target/kernels");
    let programs = Programs::build()?;
    let chosen =
        |kernel: &&Kernel| names.is_empty() || names.iter().any(|name| name == kernel.name);
    let mut all = Vec::new();
    for kernel in KERNELS.iter().filter(chosen) {
        let image = Image::get(kernel, Arch::Amd64, &directory)?;
        let outcome = boot(kernel, &image, &programs).with_context(|| kernel.name)?;
        all.push((kernel, outcome));
    }
    print!("{}", table(&all));
    let failed = |outcome: &Outcome| {
        !outcome.demonstration || outcome.tests.iter().any(|(_, passed)| !passed)
    };
    let failed: Vec<&str> = { all.iter() }
        .filter(|(_, outcome)| failed(outcome))
        .map(|(kernel, _)| kernel.name)
        .collect();
    if !failed.is_empty() {
        let logs = directory.join("NAME.log");
        bail!("failed on {}: see {}", failed.join(", "), logs.display());
    }
    Ok(())
}

/// What is run there, built here.
struct Programs {
    tests: PathBuf,
    dibsctl: PathBuf,
}

impl Programs {
    fn build() -> Result<Self> {
        let mut build = cargo_command(&["build", "--package", "dibsd", "--package", "dibsctl"]);
        run(&mut build)?;
        let mut build = cargo_command(&["test", "--no-run", "--package", "netns-tests"]);
        build.args(["--test", "traffic", "--message-format", "json"]);
        let text = printed(build.stderr(Stdio::inherit()))?;
        let text = String::from_utf8_lossy(&text);
        let messages = text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let executable = { messages }
            .filter(|message| message["target"]["name"] == "traffic")
            .find_map(|message| message["executable"].as_str().map(PathBuf::from));
        Ok(Self {
            tests: executable.context("cargo names no test program")?,
            dibsctl: workspace().join("target/debug/dibsctl"),
        })
    }

    /// What the kernel's first process runs.
    fn script(&self, kernel: &Kernel) -> String {
        let (tests, dibsctl) = (self.tests.display(), self.dibsctl.display());
        let names = kernel.tests().join(" ");
        let mebibytes = kernel.demonstration();
        format!(
            "echo dibs-doctor; {dibsctl} --json doctor; echo dibs-doctor-end\n\
             cd {}\n\
             export RUST_BACKTRACE=0 RUST_LIB_BACKTRACE=0\n\
             DIBS_BUILT=1 {tests} --test-threads=1 --color never --exact {names}\n\
             {dibsctl} demo --mebibytes {mebibytes} && echo dibs-demo: ok\n",
            workspace().join("netns-tests").display()
        )
    }
}

/// Boots a kernel, and waits until it powers off.
fn boot(kernel: &Kernel, image: &Image, programs: &Programs) -> Result<Outcome> {
    let directory = image.directory();
    let script = directory.join("tests.sh");
    fs::write(&script, programs.script(kernel)).with_context(|| script.display().to_string())?;
    let init = directory.join("run.sh");
    fs::write(&init, include_str!("kernels/run.sh")).with_context(|| init.display().to_string())?;
    run(Command::new("chmod").arg("755").arg(&init))?;
    let told = format!(
        "dibs.modules={} dibs.run={} {}",
        image.modules().display(),
        script.display(),
        match kernel.is_user_mode {
            true => "dibs.iptables=legacy",
            false => "",
        }
    );
    let mut command = if kernel.is_user_mode {
        let mut command = limited(LIMIT);
        command.arg(image.kernel());
        let line =
            "mem=3G root=/dev/root rootfstype=hostfs hostfs=/ rw con=null con0=fd:0,fd:1 quiet";
        command.args(line.split(' '));
        command
            .arg(format!("init={}", init.display()))
            .args(told.split(' '));
        command
    } else {
        let line = format!("quiet dibs.init={} {told}", init.display());
        machine(image, Path::new("/"), &line, LIMIT)?
    };
    let log = directory.with_extension("log");
    let shown = || log.display().to_string();
    let file = fs::File::create(&log).with_context(shown)?;
    eprintln!(
        "{}: boots, which takes minutes; its console is in {}",
        kernel.name,
        shown()
    );
    let start = Instant::now();
    command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file);
    command.status().context("cannot start the kernel")?;
    let said = fs::read(&log).with_context(shown)?;
    let said = String::from_utf8_lossy(&said).replace('\r', "");
    let outcome = Outcome::of(&said, kernel.tests(), start.elapsed());
    outcome.with_context(|| format!("it did not come so far: see {}", shown()))
}

impl Outcome {
    /// What was printed on the console.
    fn of(said: &str, tests: &[&'static str], took: Duration) -> Option<Self> {
        // The firmware leaves no end of a line.
        let (_, release) = said.split_once("dibs-kernel: ")?;
        let (release, _) = release.split_once('\n')?;
        let passed = |name: &str| {
            let line = format!("test {name} ... ok");
            said.lines().any(|one| one.starts_with(&line))
        };
        let (_, doctor) = said.split_once("dibs-doctor\n")?;
        let (doctor, _) = doctor.split_once("dibs-doctor-end")?;
        let doctor = serde_json::from_str(doctor).ok()?;
        Some(Self {
            release: release.trim().to_owned(),
            tests: tests.iter().map(|name| (*name, passed(name))).collect(),
            demonstration: said.contains("dibs-demo: ok"),
            checks: CHECKS.map(|name| result_of(&doctor, name)).to_vec(),
            took,
        })
    }
}

/// Of what `dibsctl doctor` prints: the result of a check, the worst where there are several.
fn result_of(doctor: &Value, check: &str) -> String {
    let checks = doctor["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let of_it = checks.iter().filter(|one| one["check"] == check);
    let results = of_it.filter_map(|one| one["result"].as_str());
    let worst = ["failed", "warning", "ok", "skipped"];
    let rank = |result: &&str| worst.iter().position(|one| one == result);
    results.min_by_key(rank).unwrap_or("-").to_owned()
}

/// In Markdown.
fn table(all: &[(&Kernel, Outcome)]) -> String {
    let mut out = format!(
        "| kernel | release | tests | demonstration | {} | took |\n",
        CHECKS.join(" | ")
    );
    out += &("|---".repeat(5 + CHECKS.len()) + "|\n");
    for (kernel, outcome) in all {
        let passed = outcome.tests.iter().filter(|(_, passed)| *passed).count();
        let failed = outcome.tests.iter().filter(|(_, passed)| !passed);
        let failed: Vec<&str> = failed.map(|(name, _)| *name).collect();
        out += &format!(
            "| {} | {} | {passed} of {}{} | {} | {} | {:.0} s |\n",
            kernel.name,
            outcome.release,
            outcome.tests.len(),
            match &failed[..] {
                [] => String::new(),
                failed => format!(", not {}", failed.join(", ")),
            },
            match outcome.demonstration {
                true => "ok",
                false => "failed",
            },
            outcome.checks.join(" | "),
            outcome.took.as_secs_f64()
        );
    }
    out
}

/// Where a kernel's things are kept.
fn place(kernel: &Kernel, arch: Arch, directory: &Path) -> PathBuf {
    match arch {
        Arch::Amd64 => directory.join(kernel.name),
        Arch::Arm64 => directory.join(format!("{}-{}", kernel.name, arch.debian())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_printed_is_understood() {
        let said = "noise\x1b[2Jdibs-kernel: 6.1.0-50-amd64\ndibs-doctor\n\
                    {\"checks\":[{\"check\":\"tun\",\"result\":\"ok\"},{\"check\":\"steering\",\"result\":\"ok\"},\
                    {\"check\":\"steering\",\"result\":\"failed\"}]}\ndibs-doctor-end\n\
                    test switching::in_and_out_again ... ok\ntest crash::the_called_daemon_is_killed ... FAILED\n\
                    dibs-demo: ok\n";
        let outcome = Outcome::of(said, &TESTS, Duration::from_secs(60)).unwrap();
        assert_eq!(outcome.release, "6.1.0-50-amd64");
        assert_eq!(
            outcome.tests.iter().filter(|(_, passed)| *passed).count(),
            1
        );
        assert!(outcome.demonstration);
        assert_eq!(outcome.checks, ["-", "ok", "failed", "-", "-"]);
        let table = table(&[(&KERNELS[0], outcome)]);
        let last = table.lines().last().unwrap();
        assert!(
            last.starts_with("| debian-12 | 6.1.0-50-amd64 | 1 of 12, not switching"),
            "{last}"
        );
        assert_eq!(
            Outcome::of("panic", &TESTS, Duration::ZERO).map(|one| one.release),
            None
        );
    }
}
