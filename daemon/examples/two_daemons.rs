//! Two hosts with a daemon each, over a trusted and an untrusted link, and what a user does with them:
//! `cargo run -p dibsd --example two_daemons -- speed|live|restart|trouble|manners|idle [BINARIES]`.
//!
//! `speed`: iperf3 through the bump by a rule. `live`: a transfer is moved in and out of the bump from
//! both ends. `restart`: daemons are killed under it. `trouble`: other programs interfere, links fail,
//! over IPv6. `manners`: ends of the daemon, other users, wrong starts. `idle`: an
//! idle connection on which the far side speaks next, and many at once. Each ends with a look at what is left behind.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use dibs_config::PrivateKey;
use dibs_lab::{Capture, Host, Lab, Link, LinkSpec, Process, wait_until};

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
    if scenario == "trouble" {
        a.start()?;
        no_session(&a, &b)?;
    } else {
        a.start()?;
    }
    b.start()?;
    wait_until(PATIENCE, "a session", || {
        a.ctl("peer list")
            .is_ok_and(|peers| peers.contains("established"))
    })?;
    match scenario.as_str() {
        "speed" => speed(&a, &b)?,
        "live" => live(&mut a, &mut b, &links, false)?,
        "restart" => live(&mut a, &mut b, &links, true)?,
        "trouble" => trouble(&a, &b, &links)?,
        "idle" => idle(&a, &b)?,
        "manners" => manners(&mut a, &mut b, &links)?,
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
            "10.0.1.1/24 fd01::1/64",
            &b,
            "eth0",
            "10.0.1.2/24 fd01::2/64",
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
             [[peer]]\nname = \"peer\"\npublic_key = \"{}\"\naddresses = [\"10.0.1.{far}/32\", \"fd01::{far}/128\"]\n\
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

/// A transfer from a to b.
struct Transfer {
    server: Process,
    client: Process,
    out: PathBuf,
    start: Instant,
}

const MIB: u64 = 1 << 20;

impl Transfer {
    fn start(a: &Site, b: &Site, to: &str, mib: u32) -> Result<Self> {
        a.host
            .run(&format!("dd if=/dev/urandom of=/run/in bs=1M count={mib}"))?;
        let mut server = b.host.command("socat");
        let family = if to.starts_with("TCP6") {
            "TCP6"
        } else {
            "TCP4"
        };
        server.args(["-u", &format!("{family}-LISTEN:7000,reuseaddr")]);
        server.arg("OPEN:/run/out,creat,trunc");
        let server = b.host.spawn(server)?;
        wait_until(PATIENCE, "socat", || {
            b.host.is_listening(7000).unwrap_or(false)
        })?;
        let mut client = a.host.command("socat");
        client.args(["-u", "OPEN:/run/in,rdonly", to]);
        Ok(Self {
            server,
            client: a.host.spawn(client)?,
            out: b.host.run_dir().join("out"),
            start: Instant::now(),
        })
    }

    fn received(&self) -> u64 {
        std::fs::metadata(&self.out).map_or(0, |file| file.len())
    }

    /// Waits until some more has arrived.
    fn flows(&self, mib: u64, what: &str) -> Result<()> {
        let aim = self.received() + mib * MIB;
        wait_until(2 * PATIENCE, what, || self.received() > aim).with_context(|| {
            let (sender, receiver) = (self.client.stderr(), self.server.stderr());
            format!("sender: {sender}, receiver: {receiver}")
        })?;
        println!(
            "{what}: {} MiB after {:?}",
            self.received() / MIB,
            self.start.elapsed()
        );
        Ok(())
    }

    fn end(mut self, a: &Site, b: &Site) -> Result<()> {
        let ended = self.client.wait(4 * PATIENCE)?;
        ensure!(
            ended.success(),
            "the sender failed: {}",
            self.client.stderr()
        );
        ensure!(self.server.wait(PATIENCE)?.success(), "the receiver failed");
        println!("transfer took {:?}", self.start.elapsed());
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
        })
    }
}

fn live(a: &mut Site, b: &mut Site, links: &[Link; 2], restart: bool) -> Result<()> {
    for link in links {
        link.shape(100_000_000)?;
    }
    let transfer = Transfer::start(a, b, "TCP:10.0.1.2:7000", 128)?;
    transfer.flows(2, "in plain")?;
    for site in [&*a, &*b] {
        site.expect_clean()?;
    }
    a.show("conn list")?;
    a.show("enable --dport 7000")?;
    transfer.flows(12, "enabled")?;
    a.show("conn list")?;
    a.show("path list")?;
    b.show("conn list")?;
    if restart {
        let captures = watch([a, b])?;
        a.crash();
        a.start()?;
        transfer.flows(12, "after a's crash")?;
        a.show("conn list")?;
        b.crash();
        b.start()?;
        transfer.flows(12, "after b's crash")?;
        expect_no_plain(captures)?;
    } else {
        a.show("disable --dport 7000")?;
        transfer.flows(8, "disabled")?;
        b.show("enable --sport 7000")?;
        transfer.flows(12, "enabled from the other end")?;
        a.show("disable --all")?;
        transfer.flows(8, "disabled")?;
        crossed(a, b)?;
        transfer.flows(4, "after crossed commands")?;
        a.show("rule add --dport 7000 --bump scramble")?;
        a.show("rule list")?;
        a.show("enable --all")?;
        transfer.flows(12, "enabled")?;
        a.show("rule del 1000")?;
    }
    a.show("conn list")?;
    b.show("--json conn list")?;
    b.show("status")?;
    transfer.end(a, b)
}

/// Records what leaves both hosts by the trusted link, where the transfer went in plain.
fn watch(sites: [&Site; 2]) -> Result<[Capture; 2]> {
    for site in sites {
        // The rule of a single connection comes a moment after the mark.
        wait_until(PATIENCE, "the pin", || {
            let saved = |family| site.host.run(&format!("{family}tables-save -t mangle"));
            [saved("ip"), saved("ip6")]
                .iter()
                .flatten()
                .any(|rules| rules.contains("dibs-rule-0"))
        })?;
    }
    Ok([
        sites[0].host.capture("eth0")?,
        sites[1].host.capture("eth0")?,
    ])
}

/// Nothing of the transfer may have left in plain since.
fn expect_no_plain(captures: [Capture; 2]) -> Result<()> {
    for capture in captures {
        let seen = capture.finish()?;
        let plain = seen
            .packets
            .iter()
            .filter(|packet| packet.outgoing && is_plain(&packet.frame));
        println!(
            "{} packets seen, {} in plain",
            seen.packets.len(),
            plain.clone().count()
        );
        ensure!(plain.count() == 0, "packets left in plain");
    }
    Ok(())
}

/// Whether it is a TCP packet of the transfer.
fn is_plain(frame: &[u8]) -> bool {
    let upper = match (frame.get(12..14), frame.get(14 + 9), frame.get(14 + 6)) {
        (Some([0x08, 0x00]), Some(6), _) => 14 + 20,
        (Some([0x86, 0xdd]), _, Some(6)) => 14 + 40,
        _ => return false,
    };
    let port = 7000u16.to_be_bytes();
    [upper, upper + 2]
        .iter()
        .any(|at| frame.get(*at..at + 2) == Some(&port[..]))
}

/// Both ends choose at once, and come to the same.
fn crossed(a: &Site, b: &Site) -> Result<()> {
    for round in 0..10 {
        let (here, there) = if round % 2 == 0 { (a, b) } else { (b, a) };
        let told = std::thread::scope(|scope| {
            let enabling = scope.spawn(|| here.ctl("enable --all"));
            let disabling = scope.spawn(|| there.ctl("disable --all"));
            [enabling.join(), disabling.join()].map(|told| told.expect("no panic").is_ok())
        });
        let mut agreed = String::new();
        wait_until(PATIENCE, "both ends to agree", || {
            let bump = |site: &Site| {
                let conns = site.ctl("conn list").unwrap_or_default();
                ["plain", "scramble"]
                    .into_iter()
                    .find(|bump| conns.contains(bump))
            };
            agreed = format!("{:?}", bump(a));
            bump(a).is_some() && bump(a) == bump(b)
        })?;
        println!("crossed: {told:?}, both on {agreed}");
    }
    Ok(())
}

/// Nobody is at the other end.
fn no_session(a: &Site, b: &Site) -> Result<()> {
    let mut server = b.host.command("socat");
    server.args(["-u", "TCP-LISTEN:7001", "-"]);
    let _server = b.host.spawn(server)?;
    wait_until(PATIENCE, "socat", || {
        b.host.is_listening(7001).unwrap_or(false)
    })?;
    let mut client = a.host.command("socat");
    client.args(["-u", "PIPE", "TCP:10.0.1.2:7001"]);
    let _client = a.host.spawn(client)?;
    wait_until(PATIENCE, "the connection", || {
        a.ctl("conn list").is_ok_and(|conns| conns.contains("7001"))
    })?;
    for words in [
        "enable --dport 7001",
        "rule add --dport 7001 --bump scramble",
        "enable --dport 9",
    ] {
        match a.ctl(words) {
            Ok(_) => bail!("{words} was done without a session"),
            Err(error) => println!("{error}"),
        }
    }
    a.show("peer list")?;
    a.show("path list")?;
    a.expect_clean()
}

/// Bytes that went by the bump's device.
fn bumped(site: &Site) -> Result<u64> {
    Ok(site.host.counters("dibs1")?.tx_bytes)
}

fn trouble(a: &Site, b: &Site, links: &[Link; 2]) -> Result<()> {
    for link in links {
        link.shape(100_000_000)?;
    }
    let transfer = Transfer::start(a, b, "TCP6:[fd01::2]:7000", 176)?;
    transfer.flows(2, "in plain")?;
    a.show("enable --dport 7000")?;
    transfer.flows(8, "enabled")?;

    let captures = watch([a, b])?;
    a.host.run("conntrack -F")?;
    b.host.run("conntrack -F")?;
    let before = bumped(a)?;
    transfer.flows(8, "after a flush of conntrack")?;
    ensure!(bumped(a)? - before > 7 * MIB, "it left the bump");
    expect_no_plain(captures)?;

    a.host.run("ip6tables -t mangle -F")?;
    a.host.run("ip -6 rule del priority 5200")?;
    let before = bumped(a)?;
    transfer.flows(8, "after a flush of rules")?;
    ensure!(bumped(a)? - before > 6 * MIB, "it left the bump");

    b.host.run("ip link del dibs1")?;
    transfer.flows(8, "after the loss of b's device")?;

    links[1].down(dibs_lab::End::A)?;
    transfer.flows(8, "with the untrusted link down")?;
    a.show("path list")?;
    links[1].up(dibs_lab::End::A)?;
    links[0].down(dibs_lab::End::A)?;
    a.show("path list")?;
    std::thread::sleep(Duration::from_secs(1));
    let held = transfer.received();
    std::thread::sleep(Duration::from_secs(1));
    ensure!(
        transfer.received() == held,
        "chained data went without a trusted path"
    );
    links[0].up(dibs_lab::End::A)?;
    // The kernel took it with the link; on the bump it was not missed.
    a.host.run("ip address add fd01::1/64 dev eth0")?;
    transfer.flows(8, "with all links up again")?;
    a.show("path list")?;

    // Somebody takes it out with iptables alone.
    let mark = "-p tcp --dport 7000 -j CONNMARK --set-xmark 0x10000000/0x1f000000";
    a.host
        .run(&format!("ip6tables -t mangle -A OUTPUT {mark}"))?;
    wait_until(PATIENCE, "the mark to be noticed", || {
        b.ctl("conn list")
            .is_ok_and(|conns| conns.contains("plain"))
    })?;
    a.host
        .run(&format!("ip6tables -t mangle -D OUTPUT {mark}"))?;
    let before = bumped(b)?;
    transfer.flows(8, "taken out by iptables")?;
    ensure!(bumped(b)? - before < MIB, "it is still on the bump");
    a.show("conn list")?;
    b.show("conn list")?;
    transfer.end(a, b)
}

fn manners(a: &mut Site, b: &mut Site, links: &[Link; 2]) -> Result<()> {
    for link in links {
        link.shape(100_000_000)?;
    }
    let mut events = a.host.command(a.binaries.join("dibsctl"));
    events.args(["--socket", "/run/dibsd.sock", "events"]);
    let events = a.host.spawn(events)?;
    let transfer = Transfer::start(a, b, "TCP:10.0.1.2:7000", 64)?;
    transfer.flows(2, "in plain")?;

    // Another user, in the socket's group.
    let own = |words: &str| {
        a.host.run(&format!(
            "setpriv --reuid 1234 --regid 0 --clear-groups {}/dibsctl --socket /run/dibsd.sock {words}",
            a.binaries.display()
        ))
    };
    println!("{}", own("conn list")?);
    for words in [
        "enable --all",
        "rule add --dport 7000 --bump scramble",
        "cleanup",
        "rule del 77",
        "enable --dport 7000 --bump seal",
        "enable --dport 7000 --bump nonsense",
        "enable --peer nobody",
    ] {
        match own(words) {
            Ok(_) => bail!("{words} was done"),
            Err(error) => println!("{error}"),
        }
    }

    a.show("enable --dport 7000")?;
    transfer.flows(4, "enabled")?;
    println!("{}", events.stdout());
    // An orderly end blocks what was carried.
    let mut daemon = a.daemon.take().context("it runs")?;
    daemon.signal(nix::sys::signal::Signal::SIGTERM)?;
    let ended = daemon.wait(PATIENCE)?;
    println!("SIGTERM: {ended}\n{}", daemon.stderr());
    ensure!(ended.success(), "not an orderly end");
    let kept = a.host.run("iptables-save -t mangle")?;
    ensure!(kept.contains("DIBS-POSTROUTING"), "the guard is gone");
    let held = transfer.received();
    std::thread::sleep(Duration::from_secs(1));
    ensure!(transfer.received() - held < MIB, "it goes on in plain");
    a.start()?;
    transfer.flows(4, "started again")?;

    // With fail = "open" it goes on in plain.
    let mut daemon = a.daemon.take().context("it runs")?;
    daemon.signal(nix::sys::signal::Signal::SIGTERM)?;
    daemon.wait(PATIENCE)?;
    let file = a.host.run_dir().join("dibsd.toml");
    let text = std::fs::read_to_string(&file)?;
    for (change, to) in [
        ("dibsd.sock", "nowhere/dibsd.sock"),
        ("eth0", "eth0\"\naddress = \"10.9.9.9"),
        ("[[path]]", "shceduler = \"x\"\n[[path]]"),
        ("[[path]]", "scheduler = \"redundant\"\n[[path]]"),
        ("/run/key", "/run/none"),
        ("/run/key", "/run/dibsd.toml"),
    ] {
        std::fs::write(&file, text.replacen(change, to, 1))?;
        let mut command = a.host.command("timeout");
        command
            .arg("1")
            .arg(a.binaries.join("dibsd"))
            .args(["--config", "/run/dibsd.toml"]);
        let output = a.host.spawn(command)?.output(PATIENCE)?;
        println!(
            "{to}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    std::fs::write(&file, text.replace("[daemon]", "[daemon]\nfail = \"open\""))?;
    let mut command = a.host.command(a.binaries.join("dibsd"));
    command.args(["--config", "/run/dibsd.toml"]);
    let mut daemon = a.host.spawn(command)?;
    daemon.wait_for_output("ready", PATIENCE)?;
    let mut second = a.host.command(a.binaries.join("dibsd"));
    second.args(["--config", "/run/dibsd.toml"]);
    let second = a.host.spawn(second)?.output(PATIENCE)?;
    println!("{}", String::from_utf8_lossy(&second.stderr));
    transfer.flows(2, "started once more")?;
    daemon.signal(nix::sys::signal::Signal::SIGTERM)?;
    daemon.wait(PATIENCE)?;
    a.expect_clean()?;
    a.start()?;
    transfer.end(a, b)
}

fn idle(a: &Site, b: &Site) -> Result<()> {
    // The far side sends what comes by its pipe.
    b.host.run("mkfifo /run/pipe")?;
    let mut server = b.host.command("sh");
    server.args(["-c", "exec socat -u - TCP-LISTEN:7000 <>/run/pipe"]);
    let _server = b.host.spawn(server)?;
    wait_until(PATIENCE, "socat", || {
        b.host.is_listening(7000).unwrap_or(false)
    })?;
    let mut client = a.host.command("socat");
    client.args(["-u", "TCP:10.0.1.2:7000", "OPEN:/run/out,creat,trunc"]);
    let _client = a.host.spawn(client)?;
    wait_until(PATIENCE, "the connection", || {
        a.ctl("conn list").is_ok_and(|conns| conns.contains("7000"))
    })?;
    let captures = [a.host.capture("eth0")?, b.host.capture("eth0")?];
    a.show("enable --dport 7000")?;
    b.host
        .run("dd if=/dev/urandom of=/run/pipe bs=1000 count=100")?;
    let out = a.host.run_dir().join("out");
    wait_until(PATIENCE, "the far side's data", || {
        std::fs::metadata(&out).is_ok_and(|file| file.len() == 100_000)
    })?;
    expect_no_plain(captures)?;

    let mut server = b.host.command("iperf3");
    server.args(["-s", "-p", "7000", "-1"]);
    drop(_client);
    drop(_server);
    let _server = b.host.spawn(server)?;
    wait_until(PATIENCE, "iperf3", || {
        b.host.is_listening(7000).unwrap_or(false)
    })?;
    let mut client = a.host.command("iperf3");
    client.args([
        "-c", "10.0.1.2", "-p", "7000", "-P", "60", "-t", "4", "-b", "2M",
    ]);
    let mut client = a.host.spawn(client)?;
    let many = || {
        a.ctl("conn list")
            .is_ok_and(|conns| conns.lines().count() > 61)
    };
    wait_until(PATIENCE, "60 connections", many)?;
    for words in [
        "enable --dport 7000",
        "disable --dport 7000",
        "enable --all",
    ] {
        let start = Instant::now();
        let shown = a.ctl(words)?;
        println!(
            "{} in {:?}",
            shown.lines().next().unwrap_or_default(),
            start.elapsed()
        );
    }
    ensure!(client.wait(PATIENCE)?.success(), "iperf3 failed");
    Ok(())
}
