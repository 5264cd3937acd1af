//! The system packages that tests need, and getting them.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::run::{is_root, run};

/// A program, and the Debian package it comes in; further ones that it needs stand behind it.
pub(crate) type Need = (&'static str, &'static str);

/// What hosts in namespaces and dibsd on them need.
pub(crate) const LAB: [Need; 3] = [
    ("ethtool", "ethtool"),
    ("ip", "iproute2"),
    ("iptables", "iptables"),
];
/// What the tests need beside that.
pub(crate) const TESTS: [Need; 13] = [
    ("chromium-headless-shell", "chromium-headless-shell"),
    ("conntrack", "conntrack"),
    ("curl", "curl"),
    ("iperf3", "iperf3"),
    ("nft", "nftables"),
    // Only the program is used of this and of sshd; on Debian their services start when they are installed.
    ("nginx", "nginx-light"),
    ("openssl", "openssl"),
    ("openvpn", "openvpn"),
    ("socat", "socat"),
    ("ssh", "openssh-client"),
    ("sshd", "openssh-server"),
    ("sysctl", "procps"),
    ("wireguard-go", "wireguard-go"),
];
/// What the experiments need beside that of the lab.
pub(crate) const EXPERIMENT: [Need; 2] = [("openssl", "openssl"), ("openvpn", "openvpn")];
/// What the benchmark needs beside that: a VPN, a server, and who asks it.
pub(crate) const BENCH: [Need; 5] = [
    ("curl", "curl"),
    ("nft", "nftables"),
    ("nginx", "nginx-light"),
    ("wireguard-go", "wireguard-go"),
    ("wrk", "wrk"),
];
/// What an experiment has under load.
const DATABASE: [Need; 1] = [("pgbench", "postgresql")];
/// What building the fuzzers needs.
pub(crate) const FUZZ: [Need; 1] = [("c++", "g++")];
/// What booting other kernels takes, but for the machine.
pub(crate) const KERNELS: [Need; 4] = [
    ("busybox", "busybox-static"),
    ("cpio", "cpio"),
    ("modprobe", "kmod"),
    ("xz", "xz-utils"),
];
/// What making a package takes beside a compiler.
pub(crate) const DEB: [Need; 2] = [("dpkg-shlibdeps", "dpkg-dev"), ("strip", "binutils")];
/// What trying one takes.
pub(crate) const TRIAL: [Need; 2] = [("mmdebstrap", "mmdebstrap"), ("unshare", "util-linux")];
/// Where system programs live; an ordinary user's PATH may lack it.
const SYSTEM_PATHS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin";

/// Installs the database that an experiment has under load, where that can be done.
///
/// # Errors
/// If installing fails.
pub(crate) fn offer_database() -> Result<()> {
    if is_root()? && exists("apt-get") {
        return ensure(&[&DATABASE]);
    }
    Ok(())
}

/// Sees to it that all of these are there.
///
/// # Errors
/// Where they cannot be installed: names what is missing.
pub(crate) fn ensure(needed: &[&[Need]]) -> Result<()> {
    let missing: Vec<&str> = { needed.iter().copied().flatten() }
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
