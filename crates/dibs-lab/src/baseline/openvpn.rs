//! OpenVPN over UDP, point to point, AES-256-GCM, in its user-space process.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context as _, Result};
use dibs_netns::{HANG, Host, Process};

use super::Tunnel;

const DEVICE: &str = "tun99";
/// What both ends have in common.
const OPTIONS: &str = "--dev-type tun --proto udp --disable-dco --dh none --data-ciphers AES-256-GCM \
                       --cert /run/openvpn.crt --key /run/openvpn.key";

/// A tunnel between hosts `a` and `b`, which reach each other at the given addresses. Inside, they
/// are 10.98.0.1 and 10.98.0.2.
///
/// # Errors
/// If openvpn (2.6 or later) or openssl is missing, or the two do not get along.
pub fn openvpn(a: (&Host, IpAddr), b: (&Host, IpAddr)) -> Result<Tunnel> {
    // As a bump it is given packets to its own far end.
    connected(a, b, &["--allow-recursive-routing"])
}

/// As [`openvpn`], as it comes: it drops packets to its own far end.
///
/// # Errors
/// As [`openvpn`].
pub fn openvpn_as_it_comes(a: (&Host, IpAddr), b: (&Host, IpAddr)) -> Result<Tunnel> {
    connected(a, b, &[])
}

fn connected(a: (&Host, IpAddr), b: (&Host, IpAddr), options: &[&str]) -> Result<Tunnel> {
    let inside = [[10, 98, 0, 1], [10, 98, 0, 2]].map(IpAddr::from);
    let [of_a, of_b] = [certify(a.0)?, certify(b.0)?];
    let back = [inside[1], inside[0]];
    let mut far = start(b.0, "--tls-server", back, None, &of_a, options)?;
    let mut near = start(a.0, "--tls-client", inside, Some(b.1), &of_b, options)?;
    for process in [&mut far, &mut near] {
        process.wait_for_output("Initialization Sequence Completed", HANG)?;
    }
    Ok(Tunnel {
        a: inside[0],
        b: inside[1],
        _processes: [near, far],
    })
}

/// Makes the host a key and a certificate, and returns the latter's fingerprint.
fn certify(host: &Host) -> Result<String> {
    host.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 \
         -subj /CN=lab -keyout /run/openvpn.key -out /run/openvpn.crt",
    )
    .context("a certificate for openvpn (Debian package openssl)")?;
    let line = host.run("openssl x509 -noout -fingerprint -sha256 -in /run/openvpn.crt")?;
    let fingerprint = line
        .trim()
        .split_once('=')
        .context("openssl's fingerprint")?
        .1;
    Ok(fingerprint.to_owned())
}

fn start(
    host: &Host,
    role: &str,
    [own, peer]: [IpAddr; 2],
    server: Option<IpAddr>,
    fingerprint: &str,
    options: &[&str],
) -> Result<Process> {
    let mut command = host.command("openvpn");
    command.current_dir(Path::new("/"));
    command.args(["--dev", DEVICE, "--ifconfig"]);
    command.args([&own.to_string(), &peer.to_string(), role]);
    command.args(OPTIONS.split(' ')).args(options);
    command.args(["--peer-fingerprint", fingerprint]);
    if let Some(server) = server {
        command.args(["--remote", &server.to_string(), "1194"]);
    } else {
        command.args(["--port", "1194"]);
    }
    host.spawn(command)
        .context("openvpn (Debian package openvpn)")
}
