//! Two hosts with a daemon each, over a trusted and an untrusted link, and what a user does with them:
//! `cargo run -p dibsd --example two_daemons -- speed|live|restart [BINARIES]`.
//!
//! `speed`: iperf3 through the bump by a rule. `live`: a transfer is moved in and out of the bump from
//! both ends. `restart`: daemons are killed under it. Each ends with a look at what is left behind.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dibs_config::PrivateKey;
use dibs_lab::{Host, Lab, Link, LinkSpec, Process, wait_until};

const RULE: &str = "[[rule]]\nbump = \"scramble\"\nprotocol = \"tcp\"\ndport = 5201\n";
const PATIENCE: Duration = Duration::from_secs(15);

struct Site {
    host: Host,
    /// The last byte of the other end's addresses.
    far: u8,
    key: PrivateKey,
    peer: PrivateKey,
    rules: &'static str,
    binaries: PathBuf,
    daemon: Option<Process>,
}

fn main() -> Result<()> {
    dibs_lab::enter()?;
    let mut args = std::env::args().skip(1);
    let scenario = args.next().unwrap_or("speed".to_owned());
    let binaries = PathBuf::from(args.next().unwrap_or("target/debug".to_owned()));
    let binaries = binaries
        .canonicalize()
        .context("the directory of the binaries")?;
    let mut lab = Lab::new()?;
    let rules = if scenario == "speed" { RULE } else { "" };
    let (mut a, mut b, links) = sites(&mut lab, &binaries, rules)?;
    b.start()?;
    a.start()?;
    wait_until(PATIENCE, "a session", || {
        a.ctl("peer list")
            .is_ok_and(|peers| peers.contains("established"))
    })?;
    match scenario.as_str() {
        "speed" => speed(&a, &b)?,
        "live" => live(&mut a, &mut b, &links, false)?,
        "restart" => live(&mut a, &mut b, &links, true)?,
        other => bail!("no scenario {other}"),
    }
    for site in [&a, &b] {
        site.ctl("cleanup")?;
        site.expect_clean()?;
    }
    for site in [&mut a, &mut b] {
        println!("--- {}\n{}", site.host.name(), site.log());
    }
    Ok(())
}

fn sites(lab: &mut Lab, binaries: &Path, rules: &'static str) -> Result<(Site, Site, [Link; 2])> {
    let (a, b) = (lab.host("a")?, lab.host("b")?);
    let links = [
        lab.link(LinkSpec::new(
            &a,
            "eth0",
            "10.0.1.1/24",
            &b,
            "eth0",
            "10.0.1.2/24",
        ))?,
        lab.link(LinkSpec::new(
            &a,
            "eth1",
            "10.0.2.1/24",
            &b,
            "eth1",
            "10.0.2.2/24",
        ))?,
    ];
    let (key_a, key_b) = (PrivateKey::generate(), PrivateKey::generate());
    let site = |host: Host, far, key: &PrivateKey, peer: &PrivateKey, rules| Site {
        host,
        far,
        key: key.clone(),
        peer: peer.clone(),
        rules,
        binaries: binaries.to_owned(),
        daemon: None,
    };
    Ok((
        site(a, 2, &key_a, &key_b, rules),
        site(b, 1, &key_b, &key_a, ""),
        links,
    ))
}

impl Site {
    fn start(&mut self) -> Result<()> {
        let dir = self.host.run_dir();
        let key = dir.join("key");
        std::fs::write(&key, self.key.to_base64().as_bytes())?;
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600))?;
        let far = self.far;
        let config = format!(
            "[daemon]\nprivate_key_file = \"/run/key\"\ncontrol_socket = \"/run/dibsd.sock\"\n\
             default_bump = \"scramble\"\n\
             [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
             [[path]]\nname = \"wlan\"\ninterface = \"eth1\"\ntrust = \"untrusted\"\n\
             [[peer]]\nname = \"peer\"\npublic_key = \"{}\"\naddresses = [\"10.0.1.{far}/32\"]\n\
             [peer.endpoints]\neth = \"10.0.1.{far}:5300\"\nwlan = \"10.0.2.{far}:5300\"\n{}",
            self.peer.public(),
            self.rules
        );
        std::fs::write(dir.join("dibsd.toml"), config)?;
        let mut command = self.host.command(self.binaries.join("dibsd"));
        command.args(["--config", "/run/dibsd.toml"]);
        let mut daemon = self.host.spawn(command)?;
        daemon.wait_for_output("ready", PATIENCE)?;
        self.daemon = Some(daemon);
        Ok(())
    }

    fn ctl(&self, words: &str) -> Result<String> {
        let ctl = self.binaries.join("dibsctl");
        self.host.run(&format!(
            "{} --socket /run/dibsd.sock {words}",
            ctl.display()
        ))
    }

    fn show(&self, words: &str) -> Result<()> {
        let start = Instant::now();
        let shown = self.ctl(words)?;
        println!(
            "{}$ dibsctl {words}   ({:?})\n{shown}",
            self.host.name(),
            start.elapsed()
        );
        Ok(())
    }

    fn log(&self) -> String {
        self.daemon
            .as_ref()
            .map(Process::stderr)
            .unwrap_or_default()
    }

    fn crash(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            println!(
                "--- {} until its death\n{}",
                self.host.name(),
                daemon.stderr()
            );
            daemon.kill();
        }
    }

    fn expect_clean(&self) -> Result<()> {
        for command in [
            "iptables-save",
            "ip6tables-save",
            "ip rule",
            "ip -6 rule",
            "ip route show table all",
            "ip link",
        ] {
            let shown = self.host.run(command)?;
            let ours = |line: &&str| {
                let line = line.to_lowercase();
                line.contains("dibs") || line.contains("proto 219") || line.contains("520")
            };
            let left: Vec<&str> = shown.lines().filter(ours).collect();
            ensure!(left.is_empty(), "{} has left: {left:#?}", self.host.name());
        }
        Ok(())
    }
}

fn speed(a: &Site, b: &Site) -> Result<()> {
    let mut server = b.host.command("iperf3");
    server.args(["-s"]);
    let _server = b.host.spawn(server)?;
    wait_until(PATIENCE, "iperf3", || {
        b.host.is_listening(5201).unwrap_or(false)
    })?;
    print!("{}", a.host.run("iperf3 -c 10.0.1.2 -t 4")?);
    print!("{}", a.host.run("iperf3 -c 10.0.1.2 -t 4 -R")?);
    for site in [a, b] {
        let seen = site.host.counters("dibs1")?;
        ensure!(
            seen.tx_bytes > 0 && seen.rx_bytes > 0,
            "the bump was not used"
        );
        site.show("status")?;
    }
    Ok(())
}

fn live(a: &mut Site, b: &mut Site, links: &[Link; 2], restart: bool) -> Result<()> {
    for link in links {
        link.shape(100_000_000)?;
    }
    a.host.run("dd if=/dev/urandom of=/run/in bs=1M count=96")?;
    let mut server = b.host.command("socat");
    server.args([
        "-u",
        "TCP-LISTEN:7000,reuseaddr",
        "OPEN:/run/out,creat,trunc",
    ]);
    let mut server = b.host.spawn(server)?;
    wait_until(PATIENCE, "socat", || {
        b.host.is_listening(7000).unwrap_or(false)
    })?;
    let mut client = a.host.command("socat");
    client.args(["-u", "OPEN:/run/in,rdonly", "TCP:10.0.1.2:7000"]);
    let start = Instant::now();
    let mut client = a.host.spawn(client)?;
    let out = b.host.run_dir().join("out");
    let received = |bytes: u64| {
        let out = out.clone();
        move || std::fs::metadata(&out).is_ok_and(|file| file.len() > bytes)
    };
    let mib = 1 << 20;
    wait_until(PATIENCE, "data", received(2 * mib))?;
    if !restart {
        for site in [&*a, &*b] {
            site.expect_clean()?;
        }
    }
    a.show("conn list")?;
    a.show("enable --dport 7000")?;
    wait_until(PATIENCE, "data", received(16 * mib))?;
    a.show("conn list")?;
    a.show("path list")?;
    b.show("conn list")?;
    if restart {
        a.crash();
        a.start()?;
        let far = a.host.run_dir().join("dibsd.state");
        println!("{}", std::fs::read_to_string(far)?);
        wait_until(2 * PATIENCE, "data after a's crash", received(32 * mib))?;
        println!("a's crash survived after {:?}", start.elapsed());
        a.show("conn list")?;
        b.crash();
        b.start()?;
        wait_until(2 * PATIENCE, "data after b's crash", received(48 * mib))?;
        println!("b's crash survived after {:?}", start.elapsed());
    } else {
        a.show("disable --dport 7000")?;
        wait_until(PATIENCE, "data", received(32 * mib))?;
        b.show("enable --sport 7000")?;
        wait_until(PATIENCE, "data", received(48 * mib))?;
        a.show("disable --all")?;
        wait_until(PATIENCE, "data", received(56 * mib))?;
        a.show("rule add --dport 7000 --bump scramble")?;
        a.show("rule list")?;
        a.show("enable --all")?;
        wait_until(PATIENCE, "data", received(64 * mib))?;
        a.show("rule del 1000")?;
    }
    a.show("conn list")?;
    b.show("status")?;
    let ended = client.wait(4 * PATIENCE)?;
    ensure!(ended.success(), "the sender failed: {}", client.stderr());
    ensure!(server.wait(PATIENCE)?.success(), "the receiver failed");
    println!("transfer took {:?}", start.elapsed());
    let sums = [
        a.host.run("sha256sum /run/in")?,
        b.host.run("sha256sum /run/out")?,
    ];
    ensure!(
        sums[0][..64] == sums[1][..64],
        "the data is not intact: {sums:?}"
    );
    println!("the data is intact: {}", &sums[0][..64]);
    // Nobody uses the bump any more: it goes by itself.
    wait_until(PATIENCE, "the bump to go", || {
        a.expect_clean().is_ok() && b.expect_clean().is_ok()
    })?;
    Ok(())
}
