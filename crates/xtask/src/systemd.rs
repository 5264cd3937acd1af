//! `cargo xtask systemd`: the package under a running systemd, in a Debian that is booted here twice.
//!
//! The machine is QEMU's, as for [`kernels`]; its root file system is a fresh one, by 9p, so that what the trial writes can
//! be read here.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::cross::Arch;
use crate::run::{make_directory, run, workspace};
use crate::{deb, kernels, packages};

/// Whose system and kernel it is.
const KERNEL: &str = "debian-13";
const SUITE: &str = "trixie";
/// What the trial needs beside what the package depends on.
const TOOLS: &str = "systemd-sysv,dbus,udev,kmod,iproute2,iptables,passwd,procps,socat";
const INIT: &str = "/usr/lib/systemd/systemd";
/// Runs the trial once the system is up.
const UNIT: &str = "[Unit]\nDescription=the trial of dibs\nAfter=multi-user.target\n\n\
                    [Service]\nType=oneshot\nExecStart=/bin/bash /try/try.sh\nTimeoutStartSec=infinity\n";
const SCRIPT: &str = include_str!("../../../packaging/systemd/try.sh");
/// The boots, by what the script is told.
const STAGES: [&str; 2] = ["first", "second"];
/// How long one may take.
const LIMIT: Duration = Duration::from_secs(1200);

/// Makes the package for such a processor, and tries it on a machine that has one.
pub(crate) fn systemd(arch: Arch) -> Result<()> {
    packages::ensure(&[&packages::KERNELS, &[arch.machine()], &packages::TRIAL])?;
    let image = kernels::image(KERNEL, arch)?;
    let (package, later) = deb::to_try(arch)?;
    let directory = workspace().join("target/systemd");
    let system = deb::fresh(&directory, SUITE, arch, TOOLS)?;
    let place = system.join("try");
    make_directory(&place)?;
    fs::copy(&package, place.join("dibs.deb")).context("the package")?;
    fs::copy(&later, place.join("later.deb")).context("the later package")?;
    fs::write(place.join("try.sh"), SCRIPT)?;
    fs::write(place.join("common.sh"), deb::COMMON)?;
    // Hard links: they are hundreds of megabytes.
    run(Command::new("cp")
        .args(["--archive", "--link"])
        .arg(image.modules())
        .arg(system.join("usr/lib/modules")))?;
    let units = system.join("etc/systemd/system");
    fs::write(units.join("trial.service"), UNIT)?;
    // Not pulled in by the target that it waits for, which would then wait for it.
    let timer = "[Timer]\nOnBootSec=1\n[Install]\nWantedBy=timers.target\n";
    fs::write(units.join("trial.timer"), timer)?;
    let wanted = units.join("timers.target.wants");
    make_directory(&wanted)?;
    std::os::unix::fs::symlink("../trial.timer", wanted.join("trial.timer"))?;
    for stage in STAGES {
        let start = Instant::now();
        boot(&image, &system, stage)?;
        println!(
            "{stage} boot: all as it should be, {:.0} s",
            start.elapsed().as_secs_f64()
        );
    }
    fs::remove_dir_all(&system).with_context(|| format!("cannot remove {}", system.display()))
}

/// Boots it, and waits until it powers off.
fn boot(image: &kernels::Image, system: &Path, stage: &str) -> Result<()> {
    let place = system.join("try");
    let result = place.join("result");
    fs::write(place.join("stage"), stage)?;
    fs::write(&result, "it did not come so far\n")?;
    let console = system.with_file_name("console.log");
    let file = fs::File::create(&console).with_context(|| console.display().to_string())?;
    eprintln!(
        "{stage} boot, which takes minutes; its console is in {}",
        console.display()
    );
    let line = format!("dibs.init={INIT} systemd.journald.forward_to_console=0");
    let mut machine = kernels::machine(image, system, &line, LIMIT)?;
    machine
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file);
    machine.status().context("cannot start the machine")?;
    let log = place.join(format!("{stage}.log"));
    let said = fs::read_to_string(&log).unwrap_or_default();
    let said_result = fs::read_to_string(&result).with_context(|| result.display().to_string())?;
    let is_ok = said_result.trim() == "ok";
    let said_of_it = said
        .lines()
        .filter(|line| !is_ok || line.starts_with("== "));
    said_of_it.for_each(|line| println!("{line}"));
    ensure!(
        is_ok,
        "{stage} boot: {}; see {} and {}",
        said_result.trim(),
        log.display(),
        console.display()
    );
    Ok(())
}
