//! The programs under test, and those that make the traffic.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Once;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::dibs::Programs;
use dibs_netns::require_programs;

/// Programs that the tests start, and the Debian packages they come in.
const NEEDED: [(&str, &str); 13] = [
    ("conntrack", "conntrack"),
    ("curl", "curl"),
    ("ip", "iproute2"),
    ("iperf3", "iperf3"),
    ("iptables", "iptables"),
    ("nft", "nftables"),
    ("nginx", "nginx"),
    ("openssl", "openssl"),
    ("openvpn", "openvpn"),
    ("socat", "socat"),
    ("ssh", "openssh-client"),
    ("sshd", "openssh-server"),
    ("wireguard-go", "wireguard-go"),
];

/// Builds `dibsd` and `dibsctl` with the profile and into the directory of the running test, once,
/// unless `cargo xtask test` says by `DIBS_BUILT` that they have been built. Inside the namespaces, where cargo
/// would not find its caches, that was done before.
///
/// # Panics
/// If they do not build.
pub fn build() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        if dibs_netns::is_inside() || std::env::var_os("DIBS_BUILT").is_some() {
            return;
        }
        let directory = directory();
        let release = directory.ends_with("release");
        let target = directory.parent().expect("a profile's directory is in one");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let status = Command::new(cargo)
            .args([
                "build",
                "--quiet",
                "--package",
                "dibsd",
                "--package",
                "dibsctl",
            ])
            .args(release.then_some("--release"))
            .arg("--target-dir")
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("cargo is there: it built this test");
        assert!(status.success(), "dibsd and dibsctl do not build: {status}");
    });
}

/// Path of the program that cargo built.
pub fn built(name: &str) -> PathBuf {
    directory().join(name)
}

/// The programs under test.
///
/// # Errors
/// If they were not built.
pub fn find() -> Result<Programs> {
    Programs::beside(&directory())
}

/// The directory of the profile: the test's own executable is in its `deps`.
fn directory() -> PathBuf {
    let test = std::env::current_exe().expect("/proc/self/exe");
    let directory = test.ancestors().nth(2);
    directory
        .expect("a test is built into target/PROFILE/deps")
        .to_owned()
}

/// Makes sure that everything the tests need of the machine is there.
///
/// # Errors
/// Names what is missing, and what to do.
pub fn check() -> Result<()> {
    require_programs(&NEEDED)?;
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("/dev/net/tun has to be open to everyone (0666), as udev makes it, or be root")?;
    for name in ["dibsd", "dibsctl"] {
        let program = built(name);
        ensure!(program.exists(), "{} was not built", program.display());
    }
    Ok(())
}
