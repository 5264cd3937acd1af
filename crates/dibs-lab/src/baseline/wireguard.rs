//! wireguard-go, configured over its UAPI socket.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, Host, Process, wait_for};
use x25519_dalek::{PublicKey, StaticSecret};

use super::Tunnel;

const DEVICE: &str = "wg0";
const PORT: u16 = 51820;

/// Private keys: what they protect is a measurement.
const KEYS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

/// A tunnel between hosts `a` and `b`, which reach each other at the given addresses. Inside, they
/// are 10.99.0.1 and 10.99.0.2; it also takes packets between the former, and between `a` and an address beyond `b`, if they are
/// routed into it.
///
/// # Errors
/// If the program does not start or refuses its configuration.
pub fn wireguard_go(
    a: (&Host, IpAddr),
    b: (&Host, IpAddr),
    beyond: Option<IpAddr>,
) -> Result<Tunnel> {
    let inside = [[10, 99, 0, 1], [10, 99, 0, 2]].map(IpAddr::from);
    let ends = [a, b];
    let [near, far] = [0, 1].map(|n| {
        let (peer, host) = (1 - n, ends[n].0);
        let mut command = host.command("wireguard-go");
        command.args(["-f", DEVICE]).env("LOG_LEVEL", "error");
        let process = host.spawn(command);
        let mut process = process.context("wireguard-go (Debian package wireguard-go)")?;
        let endpoint = SocketAddr::new(ends[peer].1, PORT);
        configure(
            host,
            &mut process,
            KEYS[n],
            KEYS[peer],
            endpoint,
            [Some(inside[peer]), beyond.filter(|_| n == 0)],
        )?;
        host.run(&format!("ip address add {}/24 dev {DEVICE}", inside[n]))?;
        host.run(&format!("ip link set {DEVICE} up"))?;
        Ok::<_, anyhow::Error>(process)
    });
    let (near, far) = (near?, far?);
    Ok(Tunnel {
        a: inside[0],
        b: inside[1],
        _processes: [near, far],
    })
}

/// Speaks the cross-platform user-space configuration protocol (wireguard.com/xplatform).
fn configure(
    host: &Host,
    process: &mut Process,
    private: [u8; 32],
    peer_private: [u8; 32],
    endpoint: SocketAddr,
    further: [Option<IpAddr>; 2],
) -> Result<()> {
    let path = host.run_dir().join(format!("wireguard/{DEVICE}.sock"));
    let connected = wait_for(HANG, "WireGuard's socket", || {
        let connection = UnixStream::connect(&path).ok();
        (connection.is_some() || !process.is_running()).then_some(connection)
    })?;
    let mut uapi =
        connected.with_context(|| format!("WireGuard's program ended: {}", process.stderr()))?;
    let peer = PublicKey::from(&StaticSecret::from(peer_private));
    let allowed = { further.into_iter().flatten() }.map(|ip| format!("allowed_ip={ip}/32\n"));
    write!(
        uapi,
        "set=1\nprivate_key={}\nlisten_port={PORT}\npublic_key={}\n\
         endpoint={endpoint}\n{}allowed_ip={}/32\n\n",
        hexadecimal(&private),
        hexadecimal(peer.as_bytes()),
        allowed.collect::<String>(),
        endpoint.ip()
    )
    .context("WireGuard's socket")?;
    uapi.set_read_timeout(Some(HANG))?;
    let mut answer = String::new();
    while !answer.ends_with("\n\n") {
        let mut bytes = [0; 256];
        let read = uapi.read(&mut bytes).context("WireGuard's answer")?;
        ensure!(
            read > 0,
            "WireGuard's program closed its socket after {answer:?}"
        );
        answer.push_str(&String::from_utf8_lossy(&bytes[..read]));
    }
    ensure!(
        answer.trim() == "errno=0",
        "WireGuard's program refuses its configuration: {answer:?}"
    );
    Ok(())
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
