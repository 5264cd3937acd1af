//! wireguard-go and boringtun, built from their sources and configured over their UAPI socket.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, Host, Process, wait_for};
use x25519_dalek::{PublicKey, StaticSecret};

use super::Tunnel;

/// The Go module and its version.
pub const WIREGUARD_GO: &str = "golang.zx2c4.com/wireguard@v0.0.0-20260522210424-ecfc5a8d5446";
/// The version of boringtun's command in the registry.
const BORINGTUN: &str = "0.7.1";
const DEVICE: &str = "wg0";
const PORT: u16 = 51820;

/// Private keys: what they protect is a measurement.
const KEYS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

/// Builds wireguard-go into `directory`, unless it is there, and returns the program. Call it
/// before the lab is entered, where there is no way to the module proxy.
///
/// # Errors
/// If there is no Go toolchain, or the build fails.
pub fn build_wireguard_go(directory: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let directory = directory.canonicalize()?;
    let version = WIREGUARD_GO.rsplit('-').next().unwrap_or(WIREGUARD_GO);
    let program = directory.join(format!("wireguard-go-{version}"));
    if program.exists() {
        return Ok(program);
    }
    let mut go = Command::new("go");
    let built = run(go.args(["install", WIREGUARD_GO]).env("GOBIN", &directory));
    built.context("wireguard-go needs go (Debian package golang-go)")?;
    std::fs::rename(directory.join("wireguard"), &program)
        .with_context(|| program.display().to_string())?;
    Ok(program)
}

/// Builds boringtun into `directory`, unless it is there, and returns the program. Call it before the lab is entered,
/// where there is no way to the registry.
///
/// # Errors
/// If there is no cargo, or the build fails.
pub fn build_boringtun(directory: &Path) -> Result<PathBuf> {
    let root = directory.join(format!("boringtun-{BORINGTUN}"));
    let program = root.join("bin/boringtun-cli");
    if program.exists() {
        return Ok(program);
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["install", "boringtun-cli", "--locked"]);
    cargo.args(["--version", BORINGTUN, "--root"]).arg(&root);
    run(&mut cargo).context("boringtun needs cargo")?;
    Ok(program)
}

/// Runs a build, of which the last line says what is wrong.
fn run(build: &mut Command) -> Result<()> {
    let output = build.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    ensure!(output.status.success(), "{last}");
    Ok(())
}

/// A tunnel between hosts `a` and `b`, which reach each other at the given addresses. Inside, they
/// are 10.99.0.1 and 10.99.0.2; it also takes packets between the former, if they are routed into it.
///
/// # Errors
/// If the program does not start or refuses its configuration.
pub fn wireguard_go(program: &Path, a: (&Host, IpAddr), b: (&Host, IpAddr)) -> Result<Tunnel> {
    tunnel(program, &["-f"], a, b)
}

/// The same by boringtun.
///
/// # Errors
/// As [`wireguard_go`].
pub fn boringtun(program: &Path, a: (&Host, IpAddr), b: (&Host, IpAddr)) -> Result<Tunnel> {
    tunnel(
        program,
        &["--foreground", "--disable-drop-privileges"],
        a,
        b,
    )
}

fn tunnel(
    program: &Path,
    options: &[&str],
    a: (&Host, IpAddr),
    b: (&Host, IpAddr),
) -> Result<Tunnel> {
    let inside = [[10, 99, 0, 1], [10, 99, 0, 2]].map(IpAddr::from);
    let ends = [a, b];
    let [near, far] = [0, 1].map(|n| {
        let (peer, host) = (1 - n, ends[n].0);
        let mut process = launch(program, options, host)?;
        let endpoint = SocketAddr::new(ends[peer].1, PORT);
        configure(
            host,
            &mut process,
            KEYS[n],
            KEYS[peer],
            endpoint,
            inside[peer],
        )?;
        host.run(&format!("ip address add {}/24 dev {DEVICE}", inside[n]))?;
        host.run(&format!("ip link set {DEVICE} up"))?;
        Ok::<_, anyhow::Error>(process)
    });
    let (near, far) = (near?, far?);
    Ok(Tunnel {
        a: inside[0],
        b: inside[1],
        processes: [near, far],
    })
}

fn launch(program: &Path, options: &[&str], host: &Host) -> Result<Process> {
    let mut command = host.command(program);
    command.args(options).arg(DEVICE).env("LOG_LEVEL", "error");
    host.spawn(command)
}

/// Speaks the cross-platform user-space configuration protocol (wireguard.com/xplatform).
fn configure(
    host: &Host,
    process: &mut Process,
    private: [u8; 32],
    peer_private: [u8; 32],
    endpoint: SocketAddr,
    peer_inside: IpAddr,
) -> Result<()> {
    let path = host.run_dir().join(format!("wireguard/{DEVICE}.sock"));
    let connected = wait_for(HANG, "WireGuard's socket", || {
        let connection = UnixStream::connect(&path).ok();
        (connection.is_some() || !process.is_running()).then_some(connection)
    })?;
    let mut uapi =
        connected.with_context(|| format!("WireGuard's program ended: {}", process.stderr()))?;
    let peer = PublicKey::from(&StaticSecret::from(peer_private));
    write!(
        uapi,
        "set=1\nprivate_key={}\nlisten_port={PORT}\npublic_key={}\n\
         endpoint={endpoint}\nallowed_ip={peer_inside}/32\nallowed_ip={}/32\n\n",
        hexadecimal(&private),
        hexadecimal(peer.as_bytes()),
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
