//! The system packages that tests need, and getting them.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::cross::Arch;
use crate::run::run;

/// A program, and the Debian package it comes in; further ones that it needs stand behind it.
pub(crate) type Need = (&'static str, &'static str);

/// What hosts in namespaces and dibsd on them need.
const LAB: [Need; 3] = [
    ("ethtool", "ethtool"),
    ("ip", "iproute2"),
    ("iptables", "iptables"),
];
/// What the tests need beside that.
const TESTS: [Need; 10] = [
    ("conntrack", "conntrack"),
    ("curl", "curl"),
    ("iperf3", "iperf3"),
    ("nft", "nftables"),
    // Only the program is used; on Debian its service starts when it is installed.
    ("nginx", "nginx-light"),
    ("openssl", "openssl"),
    ("openvpn", "openvpn"),
    ("socat", "socat"),
    ("sysctl", "procps"),
    ("wireguard-go", "wireguard-go"),
];
/// What the experiments need beside that of the lab.
const EXPERIMENT: [Need; 2] = [("openssl", "openssl"), ("openvpn", "openvpn")];
/// What the benchmark needs beside that: a server, and who asks it.
const BENCH: [Need; 2] = [("nginx", "nginx-light"), ("wrk", "wrk")];
/// Programs that an experiment has under load; it leaves out what is not there.
const PROGRAMS: [Need; 6] = [
    ("pgbench", "postgresql"),
    ("nginx", "nginx-light"),
    ("redis-server", "redis-server"),
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("rsync", "rsync"),
];
/// What building the fuzzers needs.
const FUZZ: [Need; 1] = [("c++", "g++")];
/// What booting other kernels takes, but for the machine.
const KERNELS: [Need; 4] = [
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("modprobe", "kmod"),
    ("xz", "xz-utils"),
];
/// What making a package takes beside a compiler.
const DEB: [Need; 3] = [
    ("dpkg-deb", "dpkg"),
    ("gzip", "gzip"),
    ("strip", "binutils"),
];
/// What trying one takes.
const TRIAL: [Need; 2] = [("mmdebstrap", "mmdebstrap"), ("unshare", "util-linux")];
/// Where system programs live; an ordinary user's PATH may lack it.
const SYSTEM_PATHS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin";

/// Sees to it that what the demo and the benchmark need is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_lab() -> Result<()> {
    ensure(&LAB)
}

/// Sees to it that what the experiments need is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_experiment() -> Result<()> {
    ensure(&[&LAB[..], &EXPERIMENT].concat())
}

/// Sees to it that what the benchmark needs is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_bench() -> Result<()> {
    ensure(&[&LAB[..], &EXPERIMENT, &BENCH].concat())
}

/// Installs the programs that an experiment has under load, where that can be done.
///
/// # Errors
/// If installing fails.
pub(crate) fn offer_programs() -> Result<()> {
    if is_root()? && exists("apt-get") {
        return ensure(&PROGRAMS);
    }
    Ok(())
}

/// Sees to it that what the tests need is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_tests() -> Result<()> {
    ensure(&[&LAB[..], &TESTS].concat())
}

/// Sees to it that what building the fuzzers needs is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_fuzz() -> Result<()> {
    ensure(&FUZZ)
}

/// Sees to it that what booting other kernels takes is there, a machine with such a processor included.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_machine(arch: Arch) -> Result<()> {
    let machine = match arch {
        Arch::Amd64 => ("qemu-system-x86_64", "qemu-system-x86"),
        Arch::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
    };
    ensure(&[&KERNELS[..], &[machine]].concat())
}

/// Sees to it that what making a Debian package needs is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_deb() -> Result<()> {
    ensure(&DEB)
}

/// Sees to it that these are there: a compiler for another processor, or what runs its programs.
///
/// # Errors
/// Where they cannot be installed: names what is missing.
pub(crate) fn ensure_cross(needed: &[Need]) -> Result<()> {
    ensure(needed)
}

/// Sees to it that what trying a package needs is there.
///
/// # Errors
/// Where it cannot be installed: names what is missing.
pub(crate) fn ensure_trial() -> Result<()> {
    ensure(&TRIAL)
}

fn ensure(needed: &[Need]) -> Result<()> {
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| !exists(program))
        .map(|&(_, package)| package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !is_root()? || !exists("apt-get") {
        bail!("these Debian packages are missing: {list}\nas root: apt-get install {list}");
    }
    let mut update = Command::new("apt-get");
    run(update.arg("update"))?;
    let mut install = Command::new("apt-get");
    install
        .args(["install", "--yes", "--no-install-recommends"])
        .args(list.split(' '));
    run(install.env("DEBIAN_FRONTEND", "noninteractive"))
}

fn is_root() -> Result<bool> {
    let own = std::fs::metadata("/proc/self").context("/proc/self")?;
    Ok(own.uid() == 0)
}

fn exists(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut directories = path.split(':').chain(SYSTEM_PATHS.split(':'));
    directories.any(|directory| Path::new(directory).join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_system_directories() {
        assert!(exists("sh"));
        assert!(!exists("no-such-program"));
    }
}
