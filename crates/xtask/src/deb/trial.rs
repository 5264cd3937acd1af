//! Trying a package on systems that have nothing of dibs yet, nor a running systemd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::cross::{Arch, Emulation};
use crate::packages;
use crate::run::{is_root, make_directory, run};

/// Debian 12 and 13.
const SUITES: [&str; 2] = ["bookworm", "trixie"];
/// What the trial itself uses there: mounts, and both ends of a connection.
const TOOLS: &str = "mount,socat";

/// Enters a root file system, with namespaces of its own for all that the trial does: $1 is the root, what
/// follows is run there. Not chroot, in which the demonstration could make no namespaces.
const ENTER: &str = r#"
set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
shift
pivot_root . mnt
cd /
umount --lazy mnt
exec "$@"
"#;

/// The stages of the trial, to be run in a fresh system.
const SCRIPT: &str = include_str!("../../../../packaging/deb/try.sh");
/// What trials have in common.
pub(crate) const COMMON: &str = include_str!("../../../../packaging/common.sh");

/// Installs a package on each system, tries it, upgrades it to the later one, removes and purges it.
pub(super) fn run_all(arch: Arch, package: &Path, later: &Path) -> Result<()> {
    ensure!(
        is_root()?,
        "only root can set up other systems: sudo cargo xtask deb --try"
    );
    packages::ensure(&[&packages::TRIAL])?;
    for suite in SUITES {
        let system = fresh(&package.with_file_name("try"), suite, arch, TOOLS)?;
        make_directory(&system.join("try"))?;
        fs::write(system.join("try/try.sh"), SCRIPT)?;
        fs::write(system.join("try/common.sh"), COMMON)?;
        for (file, name) in [(package, "dibs.deb"), (later, "later.deb")] {
            fs::copy(file, system.join("try").join(name)).context("the package")?;
        }
        // Only to install it takes the machine's network, for what it depends on.
        for (stage, namespaces) in [
            ("install", &["--mount", "--pid"][..]),
            ("use", &["--mount", "--pid", "--net"]),
        ] {
            let mut command = Command::new("unshare");
            command.args(namespaces).args(["--fork", "--kill-child"]);
            command.args(["sh", "-c", ENTER, "sh"]).arg(&system);
            command.args(["bash", "/try/try.sh", stage]);
            command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
            run(&mut command).with_context(|| format!("Debian {suite}, stage {stage}"))?;
        }
        println!("Debian {suite}: all as it should be");
        remove(&system)?;
    }
    Ok(())
}

/// A root file system in a directory, as the suite has it, with these packages of it; unpacked anew.
pub(crate) fn fresh(directory: &Path, suite: &str, arch: Arch, tools: &str) -> Result<PathBuf> {
    make_directory(directory)?;
    let archive = directory.join(format!("{suite}-{}.tar", arch.debian()));
    if !archive.exists() {
        let begun = archive.with_extension("new.tar");
        let _emulation = Emulation::of(arch)?;
        run(Command::new("mmdebstrap")
            .arg(format!("--architectures={}", arch.debian()))
            .args(["--variant=apt", &format!("--include={tools}"), suite])
            .arg(&begun))?;
        fs::rename(&begun, &archive).context("the new system's archive")?;
    }
    let system = directory.join(suite);
    remove(&system)?;
    fs::create_dir(&system).with_context(|| format!("cannot make {}", system.display()))?;
    run(Command::new("tar")
        .args(["--extract", "--exclude=./dev/*", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(&system))?;
    // As it is now, for names to be found.
    fs::copy("/etc/resolv.conf", system.join("etc/resolv.conf")).context("resolv.conf")?;
    Ok(system)
}

fn remove(system: &Path) -> Result<()> {
    if system.exists() {
        fs::remove_dir_all(system)
            .with_context(|| format!("cannot remove {}", system.display()))?;
    }
    Ok(())
}
