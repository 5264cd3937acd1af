//! Two hosts with a daemon each, over a trusted and an untrusted link, and a transfer through the
//! bump: `cargo run -p dibsd --example two_daemons [DIBSD [SECONDS]]`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_config::PrivateKey;
use dibs_lab::{Host, Lab, LinkSpec, Process, wait_until};

const RULE: &str = "[[rule]]\nbump = \"scramble\"\nprotocol = \"tcp\"\ndport = 5201\n";

fn main() -> Result<()> {
    dibs_lab::enter()?;
    let mut args = std::env::args().skip(1);
    let dibsd = PathBuf::from(args.next().unwrap_or("target/debug/dibsd".to_owned()));
    let seconds = args.next().unwrap_or("3".to_owned());
    let dibsd = dibsd.canonicalize().context("the daemon's binary")?;

    let mut lab = Lab::new()?;
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    let _trusted = lab.link(LinkSpec::new(
        &a,
        "eth0",
        "10.0.1.1/24",
        &b,
        "eth0",
        "10.0.1.2/24",
    ))?;
    let _other = lab.link(LinkSpec::new(
        &a,
        "eth1",
        "10.0.2.1/24",
        &b,
        "eth1",
        "10.0.2.2/24",
    ))?;
    let (key_a, key_b) = (PrivateKey::generate(), PrivateKey::generate());
    let mut at_b = start(&b, &dibsd, &key_b, &key_a, 1, "")?;
    let mut at_a = start(&a, &dibsd, &key_a, &key_b, 2, RULE)?;
    at_b.wait_for_output("ready", Duration::from_secs(10))?;
    at_a.wait_for_output("ready", Duration::from_secs(10))?;
    at_a.wait_for_output("is established", Duration::from_secs(10))?;

    let mut server = b.command("iperf3");
    server.args(["-s", "-1"]);
    let _server = b.spawn(server)?;
    wait_until(Duration::from_secs(5), "iperf3 to listen", || {
        b.is_listening(5201).unwrap_or(false)
    })?;
    let before = [a.counters("dibs1")?, b.counters("dibs1")?];
    print!("{}", a.run(&format!("iperf3 -c 10.0.1.2 -t {seconds}"))?);
    let after = [a.counters("dibs1")?, b.counters("dibs1")?];
    for (host, before, after) in [("a", before[0], after[0]), ("b", before[1], after[1])] {
        let (tx, rx) = (
            after.tx_bytes - before.tx_bytes,
            after.rx_bytes - before.rx_bytes,
        );
        println!("{host}: {tx} bytes into the bump, {rx} bytes out of it");
        ensure!(tx > 0 && rx > 0, "the bump was not used both ways");
    }
    println!("--- a\n{}--- b\n{}", at_a.stderr(), at_b.stderr());
    Ok(())
}

/// Starts the daemon of a host whose addresses end in 3 - `far`; the other's end in `far`.
fn start(
    host: &Host,
    dibsd: &std::path::Path,
    own: &PrivateKey,
    peer: &PrivateKey,
    far: u8,
    more: &str,
) -> Result<Process> {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = host.run_dir();
    let key = dir.join("key");
    std::fs::write(&key, own.to_base64().as_bytes())?;
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
    let config = format!(
        "[daemon]\nprivate_key_file = \"/run/key\"\ncontrol_socket = \"/run/dibsd.sock\"\n\
         default_bump = \"scramble\"\n\
         [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
         [[path]]\nname = \"wlan\"\ninterface = \"eth1\"\ntrust = \"untrusted\"\n\
         [[peer]]\nname = \"peer\"\npublic_key = \"{}\"\naddresses = [\"10.0.1.{far}/32\"]\n\
         [peer.endpoints]\neth = \"10.0.1.{far}:5300\"\nwlan = \"10.0.2.{far}:5300\"\n{more}",
        peer.public()
    );
    std::fs::write(dir.join("dibsd.toml"), config)?;
    let mut command = host.command(dibsd);
    command.args(["--config", "/run/dibsd.toml"]);
    host.spawn(command)
}
