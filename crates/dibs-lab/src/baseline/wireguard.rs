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
    let near = start(a.0, 1, &peer(2, Some(b.1), &[Some(b.1), beyond]))?;
    let far = start(b.0, 2, &peer(1, Some(a.1), &[Some(a.1)]))?;
    Ok(Tunnel {
        a: inside(1),
        b: inside(2),
        _processes: [near, far],
    })
}

/// Tunnels from clients to a server at this address, by which they reach one beyond it; the server's program stands first.
///
/// # Errors
/// As [`wireguard_go`]; at most 253 clients have numbers.
pub fn wireguard_go_hub(
    (server, address): (&Host, IpAddr),
    clients: &[Host],
    beyond: IpAddr,
) -> Result<Vec<Process>> {
    let numbers = 2..=u8::MAX - 1;
    let peers = numbers.clone().take(clients.len());
    let peers: String = peers.map(|number| peer(number, None, &[])).collect();
    let mut all = vec![start(server, 1, &peers)?];
    let to_server = peer(1, Some(address), &[Some(beyond)]);
    for (number, client) in numbers.zip(clients) {
        all.push(start(client, number, &to_server)?);
        client.run(&format!("ip route add {beyond} dev {DEVICE}"))?;
    }
    Ok(all)
}

/// Lines of the configuration for the peer of this number, the endpoint of which is known or learned.
fn peer(number: u8, endpoint: Option<IpAddr>, further: &[Option<IpAddr>]) -> String {
    let key = hexadecimal(PublicKey::from(&private(number)).as_bytes());
    let endpoint = endpoint.map(|ip| format!("endpoint={}\n", SocketAddr::new(ip, PORT)));
    let allowed = [Some(inside(number))]
        .into_iter()
        .chain(further.iter().copied());
    let allowed = allowed.flatten().map(|ip| format!("allowed_ip={ip}/32\n"));
    let allowed: String = allowed.collect();
    format!(
        "public_key={key}\n{}{allowed}",
        endpoint.unwrap_or_default()
    )
}

/// Address in the tunnel.
fn inside(number: u8) -> IpAddr {
    [10, 99, 0, number].into()
}

/// Key of a host: what it protects is a measurement.
fn private(number: u8) -> StaticSecret {
    StaticSecret::from([number; 32])
}

/// Starts the program on the host of this number, and has it know these peers.
fn start(host: &Host, number: u8, peers: &str) -> Result<Process> {
    let mut command = host.command("wireguard-go");
    command.args(["-f", DEVICE]).env("LOG_LEVEL", "error");
    let process = host.spawn(command);
    let mut process = process.context("wireguard-go (Debian package wireguard-go)")?;
    configure(host, &mut process, &private(number), peers)?;
    host.run(&format!(
        "ip address add {}/24 dev {DEVICE}",
        inside(number)
    ))?;
    host.run(&format!("ip link set {DEVICE} up"))?;
    Ok(process)
}

/// Speaks the cross-platform user-space configuration protocol (wireguard.com/xplatform).
fn configure(
    host: &Host,
    process: &mut Process,
    private: &StaticSecret,
    peers: &str,
) -> Result<()> {
    let path = host.run_dir().join(format!("wireguard/{DEVICE}.sock"));
    let connected = wait_for(HANG, "WireGuard's socket", || {
        let connection = UnixStream::connect(&path).ok();
        (connection.is_some() || !process.is_running()).then_some(connection)
    })?;
    let mut uapi =
        connected.with_context(|| format!("WireGuard's program ended: {}", process.stderr()))?;
    let private = hexadecimal(&private.to_bytes());
    write!(
        uapi,
        "set=1\nprivate_key={private}\nlisten_port={PORT}\n{peers}\n"
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
