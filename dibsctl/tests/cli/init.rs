//! `init`, on hosts with interfaces of their own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dibs_config::setup::{Introduction, Way};
use dibs_config::{Config, PrivateKey, Trust};
use serde_json::Value;

use crate::Run;

/// A host: two interfaces, and a directory for what `init` writes.
struct Host {
    directory: tempfile::TempDir,
    number: u8,
}

impl Host {
    fn new(number: u8) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Host { directory, number }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("dibs/dibsd.toml")
    }

    fn key(&self) -> PathBuf {
        self.file().with_file_name("private.key")
    }

    fn config(&self) -> Config {
        dibs_config::load(&self.file()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// `dibsctl init` in a network of its own, where `eth0` and `wlan0` are; none where the machine lets nobody
    /// make one.
    fn try_init(&self, arguments: &[&str]) -> Option<Run> {
        let number = self.number;
        let script = format!(
            "ip link add eth0 type veth peer name wlan0 && \
             ip address add 10.0.1.{number}/24 dev eth0 && \
             ip -6 address add fd00:1::{number}/64 dev eth0 nodad && \
             ip address add 10.0.2.{number}/24 dev wlan0 && \
             ip link set eth0 up && ip link set wlan0 up && \
             ip route add 198.51.100.0/24 via 10.0.2.99 || exit 77\n\
             exec \"$0\" \"$@\""
        );
        let mut command = Command::new("unshare");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        if !nix::unistd::geteuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        command.args(["--net", "sh", "-c", &script]);
        command.arg(env!("CARGO_BIN_EXE_dibsctl"));
        command.args(["init", "--config"]).arg(self.file());
        command.args(arguments).stdin(Stdio::null());
        let output = command.output().ok().filter(|output| {
            let refused = String::from_utf8_lossy(&output.stderr).contains("unshare: ");
            !refused && output.status.code() != Some(77)
        });
        if output.is_none() {
            eprintln!("NOT TESTED: init; this takes a network namespace, veth, unshare and ip");
        }
        output.map(Run::of)
    }
}

/// Runs it, or leaves the test where that cannot be.
macro_rules! init {
    ($host:expr, $($argument:expr),*) => {
        match $host.try_init(&[$($argument),*]) {
            Some(run) => run,
            None => return,
        }
    };
}

fn line(run: Run) -> String {
    let answer: Value = serde_json::from_str(&run.good()).unwrap();
    answer["line"].as_str().unwrap().to_owned()
}

fn mode(file: &Path) -> u32 {
    fs::metadata(file).unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_laptop_and_a_server_take_nothing_but_a_line_each() {
    let (server, laptop) = (Host::new(1), Host::new(2));
    let several = init!(server, "--public", "203.0.113.7").failed();
    assert!(
        several.contains("--public INTERFACE=203.0.113.7"),
        "{several}"
    );
    let none = init!(server, "--public", "ppp0=203.0.113.7").failed();
    assert!(none.contains("ppp0, which is no path"), "{none}");
    assert!(!server.file().parent().unwrap().exists());
    let begun = init!(server, "--public", "wlan0=203.0.113.7", "--json");
    assert_eq!(begun.err, "");
    let of_server = line(begun);
    assert!(
        of_server.contains("untrusted=wlan0/203.0.113.7/10.0.2.1"),
        "{of_server}"
    );
    let config = server.config();
    assert!(
        config
            .paths
            .iter()
            .all(|path| path.trust == Trust::Untrusted)
    );

    // Behind a router, so no address of the laptop is in a network of the server.
    let key = PrivateKey::generate().public();
    let of_laptop = Introduction {
        name: "laptop".to_owned(),
        public_key: key,
        port: 5300,
        exit: false,
        token: None,
        ways: [("wlp2s0", "192.168.1.10"), ("lte0", "100.70.1.2")]
            .map(|(name, address)| Way {
                name: name.to_owned(),
                trust: Trust::Untrusted,
                addresses: vec![address.parse().unwrap()],
            })
            .to_vec(),
    };
    let joined = init!(server, "--peer", &of_laptop.to_string());
    assert_eq!(joined.err, "");
    assert!(
        joined
            .out
            .contains("its connections come from 10.77.0.2, fd77::2 here"),
        "{}",
        joined.out
    );
    let peer = server.config().peers.remove(0);
    assert_eq!((peer.public_key, peer.appears_as.len()), (key, 2));
    // Another laptop has the same addresses, and appears as another host.
    let other = Introduction {
        public_key: PrivateKey::generate().public(),
        ..of_laptop.clone()
    };
    init!(server, "--peer", &other.to_string()).good();
    let peers = server.config().peers;
    let lent: Vec<String> = { peers.iter() }
        .flat_map(|peer| peer.appears_as.iter().map(ToString::to_string))
        .collect();
    assert_eq!(lent, ["10.77.0.2", "fd77::2", "10.77.0.3", "fd77::3"]);
    let again = init!(server, "--peer", &of_laptop.to_string()).good();
    assert!(again.contains("is unchanged"), "{again}");

    // In one network with it, as the laptop of this test is.
    let met = init!(laptop, "--peer", &of_server).good();
    assert!(
        met.contains("contacted at") && met.contains("10.0.2.1:5300 over wlan0"),
        "{met}"
    );
}

#[test]
fn two_hosts_know_each_other_by_one_line_each() {
    let (a, b) = (Host::new(1), Host::new(2));
    let begun = init!(a, "--trusted", "eth0").good();
    assert_eq!((mode(&a.key()), mode(&a.file())), (0o600, 0o644));
    let written = fs::read_to_string(a.file()).unwrap();
    let secret = fs::read_to_string(a.key()).unwrap();
    assert!(!begun.contains(secret.trim()) && !written.contains(secret.trim()));
    let of_a = begun.lines().find_map(|line| line.split_once("--peer "));
    let (_, of_a) = of_a.expect("says what to paste");

    // What the other host needs is in the line.
    let joined = line(init!(b, "--peer", of_a, "--json"));
    let config = b.config();
    let labels: Vec<_> = { config.paths.iter() }
        .map(|path| (path.name.as_str(), path.trust))
        .collect();
    let expected = [("eth0", Trust::Trusted), ("wlan0", Trust::Untrusted)];
    let sorted = |mut labels: Vec<_>| {
        labels.sort_by_key(|(name, _)| *name);
        labels
    };
    assert_eq!(sorted(labels), expected);
    assert_eq!(config.peers.len(), 1);
    let key = dibs_config::read_private_key(&a.key()).unwrap().public();
    assert_eq!(config.peers[0].public_key, key);
    assert_eq!(config.daemon.private_key_file, b.key());

    let told = init!(a, "--peer", &joined).good();
    assert!(told.contains("has one more peer"), "{told}");
    let config = a.config();
    let mut endpoints: Vec<_> = { config.peers[0].endpoints.iter() }
        .map(|(path, to)| format!("{path} {to}"))
        .collect();
    endpoints.sort();
    assert_eq!(endpoints, ["eth0 10.0.1.2:5300", "wlan0 10.0.2.2:5300"]);
    let addresses = config.peers[0].addresses.iter().map(ToString::to_string);
    let mut addresses: Vec<_> = addresses.collect();
    addresses.sort();
    assert_eq!(addresses, ["10.0.1.2/32", "10.0.2.2/32", "fd00:1::2/128"]);
    let more = fs::read_to_string(a.file()).unwrap();
    assert!(more.starts_with(&written), "{more}");

    // Once more changes nothing, and the line can be had again.
    let again = init!(a, "--peer", &joined).good();
    assert!(again.contains("is unchanged"), "{again}");
    assert_eq!(line(init!(a, "--json")), of_a);
    assert_eq!(fs::read_to_string(a.file()).unwrap(), more);
}

#[test]
fn what_is_there_is_not_overwritten() {
    let host = Host::new(1);
    let first = line(init!(host, "--trusted", "eth0", "--json"));
    let mut edited = fs::read_to_string(host.file()).unwrap();
    edited += "# mine\n";
    fs::write(host.file(), &edited).unwrap();
    let key = fs::read(host.key()).unwrap();

    let sentence = init!(host, "--trusted", "wlan0").failed();
    assert!(sentence.contains("exists already"), "{sentence}");
    assert!(sentence.contains("--force"), "{sentence}");
    assert_eq!(fs::read_to_string(host.file()).unwrap(), edited);

    let forced = line(init!(
        host,
        "--trusted",
        "wlan0",
        "--untrusted",
        "none",
        "--force",
        "--json"
    ));
    assert_ne!(forced, first);
    let config = host.config();
    assert_eq!(config.paths.len(), 1);
    assert_eq!(config.paths[0].name, "wlan0");
    let old = host.file().with_extension("toml.old");
    assert_eq!(fs::read_to_string(old).unwrap(), edited);
    assert_eq!(fs::read(host.key()).unwrap(), key, "the key stays");
    // A key that was there before the configuration is taken.
    fs::remove_file(host.file()).unwrap();
    assert_eq!(line(init!(host, "--trusted", "eth0", "--json")), first);
}

#[test]
fn bad_input_is_named_and_changes_nothing() {
    let (a, b) = (Host::new(1), Host::new(2));
    let both = init!(a, "--trusted", "eth0", "--untrusted", "eth0,wlan0").failed();
    assert!(
        both.contains("eth0 is in both --trusted and --untrusted"),
        "{both}"
    );
    let unknown = init!(a, "--trusted", "eth7");
    assert_eq!(unknown.code, 1);
    assert!(
        unknown.err.contains("no interface \"eth7\""),
        "{}",
        unknown.err
    );
    for bad in ["", "dibs1", "dibs1,name=a,sum=00000000", "x\n\u{1b}[31m"] {
        let usage = init!(a, "--trusted", "eth0", "--peer", bad);
        assert_eq!((usage.code, usage.out.as_str()), (2, ""), "{}", usage.err);
        assert!(usage.err.contains("--peer <TOKEN>"), "{}", usage.err);
    }
    // It would be added here, and the exit would never hear of this host.
    let exit = line(init!(Host::new(2), "--exit", "--json"));
    let once = init!(a, "--peer", &exit).failed();
    assert!(
        once.contains("works with --join, not with --peer"),
        "{once}"
    );
    assert!(!a.file().exists() && !a.key().exists());

    let of_a = line(init!(a, "--trusted", "eth0", "--json"));
    let own = init!(a, "--peer", &of_a).failed();
    assert!(own.contains("join token of this host"), "{own}");

    // Whoever has the key file open to others hears of it before anything is written.
    fs::create_dir(b.key().parent().unwrap()).unwrap();
    fs::write(b.key(), "key").unwrap();
    fs::set_permissions(b.key(), fs::Permissions::from_mode(0o644)).unwrap();
    let exposed = init!(b, "--peer", &of_a).failed();
    assert!(exposed.contains("chmod 600"), "{exposed}");
    assert!(!b.file().exists());
    fs::remove_file(b.key()).unwrap();

    // A second host with the addresses of the first.
    let of_b = line(init!(b, "--peer", &of_a, "--json"));
    let twin = Host::new(2);
    let of_twin = line(init!(twin, "--trusted", "eth0", "--json"));
    init!(a, "--peer", &of_b).good();
    let before = fs::read(a.file()).unwrap();
    let twice = init!(a, "--peer", &of_twin).failed();
    assert!(
        twice.contains("cannot add peer") && twice.contains("which is peer"),
        "{twice}"
    );
    assert_eq!(fs::read(a.file()).unwrap(), before);

    // A file that is wrong is neither added to nor replaced.
    fs::write(a.file(), "[daemon]\nports = 1\n").unwrap();
    let wrong = init!(a, "--peer", &of_twin);
    assert_eq!(wrong.code, 1);
    assert!(
        wrong.err.contains("dibsd.toml:2:1: unknown key"),
        "{}",
        wrong.err
    );
}

/// A line of a host with these paths: name, label and addresses.
fn crafted(name: &str, ways: &[(&str, Trust, &[&str])]) -> String {
    let way = |(name, trust, addresses): &(&str, Trust, &[&str])| Way {
        name: (*name).to_owned(),
        trust: *trust,
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
    };
    let host = Introduction {
        name: name.to_owned(),
        public_key: PrivateKey::generate().public(),
        port: 5300,
        exit: false,
        token: None,
        ways: ways.iter().map(way).collect(),
    };
    host.to_string()
}

#[test]
fn all_that_a_line_decides_is_printed() {
    let host = Host::new(2);
    let foreign = ["10.0.1.1", "8.8.8.8", "10.0.2.2"];
    let ways: [(&str, Trust, &[&str]); 2] = [
        ("lan7", Trust::Trusted, &foreign),
        ("wlan7", Trust::Untrusted, &["10.0.2.1"]),
    ];
    let line = crafted("a", &ways);
    let said = init!(host, "--peer", &line).good();
    let key = &line.split("key=").nth(1).unwrap()[..44];
    for part in [
        &format!("public key {key}"),
        "10.0.1.1:5300 over eth0",
        "10.0.2.1:5300 over wlan0",
        "connections to 10.0.1.1 can be protected (in the network of path eth0)",
        "left out: 8.8.8.8 of lan7 (it is in no network of a path here that leads there)",
        "left out: 10.0.2.2 of lan7 (this host has it)",
        "eth0 is TRUSTED because the token says that lan7 of a is, which has 10.0.1.1 in its network",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let peer = &host.config().peers[0];
    let addresses = ["10.0.1.1/32", "10.0.2.1/32"].map(|net| net.parse().unwrap());
    assert_eq!(peer.addresses, addresses);
    // Who names what is trusted leaves nothing of it to the line.
    let args = ["--peer", &line, "--trusted", "wlan0", "--force", "--json"];
    let Some(run) = host.try_init(&args) else {
        return;
    };
    let answer: Value = serde_json::from_str(&run.good()).unwrap();
    assert_eq!(answer["trusted_by_line"], Value::Array(Vec::new()));
    let left = answer["peer"]["left_out"].as_array().unwrap();
    assert_eq!(left.len(), 2, "{answer:#}");
    let config = host.config();
    let trusted: Vec<_> = { config.paths.iter() }
        .filter(|path| path.trust == Trust::Trusted)
        .map(|path| &*path.name)
        .collect();
    assert_eq!(trusted, ["wlan0"]);
}

#[test]
fn a_path_without_an_endpoint_is_warned_of() {
    let host = Host::new(1);
    let ways: [(&str, Trust, &[&str]); 1] = [("ens3", Trust::Trusted, &["10.0.1.2"])];
    let line = crafted("b", &ways);
    let joined = init!(host, "--trusted", "eth0", "--peer", &line);
    let warned = "warning: path wlan0 gets no endpoint of b: it reaches no address of b; write wlan0 = \"ADDRESS:5300\" \
                  under [peer.endpoints], unless b has an endpoint of this host there";
    assert!(joined.err.contains(warned), "{}", joined.err);
    assert_eq!(joined.code, 0);
}

/// As the network of a household's devices: a socket bound to it takes the server for a neighbour.
#[test]
fn a_network_without_a_route_to_the_peer_gets_no_endpoint() {
    let host = Host::new(2);
    let line = crafted("b", &[("ens3", Trust::Untrusted, &["198.51.100.7"])]);
    let joined = init!(host, "--peer", &line);
    let missing = "path eth0 gets no endpoint of b";
    assert!(joined.err.contains(missing), "{}", joined.err);
    let endpoints = host.config().peers.remove(0).endpoints;
    assert_eq!(endpoints.len(), 1, "{}", joined.out);
    let met = "peer b: contacted at 198.51.100.7:5300 over wlan0\n";
    assert!(joined.out.contains(met), "{}", joined.out);
}

#[test]
fn addresses_of_another_peer_are_refused() {
    let host = Host::new(1);
    let first = crafted("b", &[("eth0", Trust::Trusted, &["10.0.1.2"])]);
    init!(
        host,
        "--trusted",
        "eth0",
        "--untrusted",
        "none",
        "--peer",
        &first
    )
    .good();
    // Behind the first peer there is a part of the network.
    let text = fs::read_to_string(host.file()).unwrap();
    let wider = text.replacen("\"10.0.1.2/32\"", "\"10.0.1.2/32\", \"10.0.1.128/25\"", 1);
    assert_ne!(text, wider);
    fs::write(host.file(), &wider).unwrap();
    for address in ["10.0.1.2", "10.0.1.200"] {
        let second = crafted("c", &[("eth0", Trust::Trusted, &[address])]);
        let refused = init!(host, "--peer", &second).failed();
        assert!(refused.contains("cannot add peer \"c\""), "{refused}");
        assert!(
            refused.contains(&format!("names {address}, in "))
                && refused.contains("which is peer \"b\"'s"),
            "{refused}"
        );
        assert_eq!(fs::read_to_string(host.file()).unwrap(), wider);
    }
    let beside = crafted("c", &[("eth0", Trust::Trusted, &["10.0.1.3"])]);
    init!(host, "--peer", &beside).good();
    assert_eq!(host.config().peers.len(), 2);
}

#[test]
fn a_network_behind_the_host_is_no_path() {
    let host = Host::new(1);
    let both = init!(host, "--gateway", "eth0", "--trusted", "eth0").failed();
    assert!(both.contains("eth0 leads to"), "{both}");
    let unknown = init!(host, "--gateway", "eth7").err;
    assert!(unknown.contains("no interface \"eth7\""), "{unknown}");
    assert!(!host.file().exists());

    let said = init!(host, "--gateway", "eth0").good();
    let config = host.config();
    let networks = ["10.0.1.0/24", "fd00:1::/64"].map(|net| net.parse().unwrap());
    assert_eq!(config.daemon.gateway, networks);
    let paths: Vec<_> = config.paths.iter().map(|path| &*path.name).collect();
    assert_eq!(paths, ["wlan0"]);
    for part in [
        "forwards for 10.0.1.0/24, fd00:1::/64",
        "net.ipv6.conf.all.forwarding=1",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let there = init!(host, "--gateway", "eth0").failed();
    assert!(there.contains("exists already"), "{there}");
}
