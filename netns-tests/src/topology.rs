//! Two hosts, `a` and `b`, joined by a trusted and an untrusted link.
//!
//! |        | interface | trust     | `a`                     | `b`                     |
//! |--------|-----------|-----------|-------------------------|-------------------------|
//! | `eth`  | `eth0`    | trusted   | `10.0.1.1`, `fd00:1::1` | `10.0.1.2`, `fd00:1::2` |
//! | `wlan` | `wlan0`   | untrusted | `10.0.2.1`, `fd00:2::1` | `10.0.2.2`, `fd00:2::2` |
//!
//! `a` calls `b` on both links; `b` knows `a`'s key, and an endpoint on the trusted link.
//!
//! A third host can stand in the midst of one of the links ([`Setup::attacked`]).
//!
//! Behind each host there can be a network ([`Setup::gateways`]), with one host in it: `192.168.7.10` and
//! `fd00:7::10` behind `a`, `192.168.8.10` and `fd00:8::10` behind `b`, joined by the untrusted link.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::Result;
use dibs_lab::dibs::{PORT, Peer, Settings, configuration};
use dibs_lab::site::Site;
use dibs_lab::{Lab, Link, LinkSpec};
use dibs_netns::Host;

use crate::daemon::Node;
use crate::docker;
use crate::eavesdropper::Eavesdropper;
use crate::programs;
use crate::traffic::{SETTLED, Talk};

/// What both directions of both links carry, in bits per second: enough that a transfer is no
/// matter of seconds, little enough that switches happen in its midst.
const RATE: u64 = 40_000_000;

/// The two hosts and what joins them.
#[derive(Debug)]
pub struct Net {
    /// Calls.
    pub a: Node,
    /// Is called.
    pub b: Node,
    /// The trusted link.
    pub eth: Link,
    /// The untrusted link.
    pub wlan: Link,
    /// Attacker in the midst of a link, who hears all that passes there.
    pub attacker: Option<Host>,
    /// Hosts of the networks behind `a` and `b`, if there are such.
    pub behind: Vec<Host>,
    // Holds what the links need.
    lab: Lab,
}

/// How a net differs from the usual one.
#[derive(Clone, Debug)]
pub struct Setup {
    keys: String,
    rules: String,
    bumps: [String; 2],
    ipv6: bool,
    attacked: Option<&'static str>,
    gateways: bool,
    daemons: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self::new()
    }
}

impl Setup {
    /// No rules, the endpoints IPv4, the session established before the test starts.
    pub fn new() -> Self {
        Self {
            keys: String::new(),
            rules: String::new(),
            bumps: Default::default(),
            ipv6: false,
            attacked: None,
            gateways: false,
            daemons: true,
        }
    }

    /// Adds a line to both hosts' `[daemon]`.
    pub fn key(mut self, line: &str) -> Self {
        self.keys.push_str(line);
        self.keys.push('\n');
        self
    }

    /// Adds a `[[rule]]` to host `a`.
    pub fn rule(mut self, lines: &str) -> Self {
        self.rules.push_str(&format!("\n[[rule]]\n{lines}\n"));
        self
    }

    /// Adds bumps to `a` and to `b`, each a name and a device.
    pub fn devices(mut self, of_a: &[(&str, &str)], of_b: &[(&str, &str)]) -> Self {
        let bump = |(name, device): &(&str, &str)| {
            format!("\n[[bump]]\nname = \"{name}\"\nkind = \"device\"\ndevice = \"{device}\"\n")
        };
        self.bumps = [of_a, of_b].map(|bumps| bumps.iter().map(bump).collect());
        self
    }

    /// The daemons speak IPv6 to each other.
    pub fn ipv6(mut self) -> Self {
        self.ipv6 = true;
        self
    }

    /// Puts a third host into the link of this interface, as its switch: `mitm0` there has the
    /// address 77 of its network. What it sends to `b` is not limited.
    pub fn attacked(mut self, interface: &'static str) -> Self {
        self.attacked = Some(interface);
        self
    }

    /// Both hosts forward for networks behind them.
    pub fn gateways(mut self) -> Self {
        self.gateways = true;
        self
    }

    /// The daemons are configured, and not started.
    pub fn without_daemons(mut self) -> Self {
        self.daemons = false;
        self
    }

    /// Makes the net, runs the test on it, and prints what can be seen on the hosts if it fails.
    ///
    /// # Errors
    /// Those of the test, and of making the net.
    pub fn run(self, test: impl FnOnce(&mut Net) -> Result<()>) -> Result<()> {
        programs::check()?;
        let mut net = Net::new(&self)?;
        let result = catch_unwind(AssertUnwindSafe(|| {
            if self.daemons {
                net.start()?;
            }
            test(&mut net)
        }));
        if !matches!(result, Ok(Ok(()))) {
            // First what is wrong: whoever keeps only the beginning of the output has it.
            if let Ok(Err(error)) = &result {
                println!("===== {error:?}");
            }
            for host in &net.behind {
                let sockets = host
                    .run("ss -tnoi")
                    .unwrap_or_else(|error| format!("{error:#}"));
                println!("===== host {}: ss -tnoi\n{sockets}", host.name());
            }
            println!("{}\n{}", net.a.describe(), net.b.describe());
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// The configuration of host 1 or 2, which calls its peer by so many paths.
    fn config(&self, own: u8, peer: &str, peer_key: &str, calls: usize, tables: &str) -> String {
        let far = 3 - own;
        let mut daemon = format!("default_bump = \"scramble\"\n{}", self.keys);
        let mut addresses = vec![
            format!("\"10.0.1.{far}/32\""),
            format!("\"fd00:1::{far}/128\""),
        ];
        if self.gateways {
            daemon += &format!("gateway = [{}]\n", networks(own));
            // The gateway's other addresses, for its ICMP errors come from there. And what a host
            // says of its peer may be more than the peer says of itself.
            addresses.extend([
                format!("\"10.0.2.{far}/32\", \"fd00:2::{far}/128\""),
                networks(far),
                format!("\"192.168.{}.0/24\"", far + 16),
            ]);
        }
        let endpoints = [
            ("eth", self.endpoint(1, far)),
            ("wlan", self.endpoint(2, far)),
        ];
        let peer = Peer {
            name: peer,
            public_key: peer_key,
            addresses: &addresses,
            endpoints: &endpoints[..calls],
        };
        let settings = Settings {
            daemon: &daemon,
            tables,
        };
        configuration(&Site::paths(2), &peer, settings)
    }

    fn endpoint(&self, net: u8, host: u8) -> SocketAddr {
        let ip = if self.ipv6 {
            format!("fd00:{net}::{host}").parse()
        } else {
            format!("10.0.{net}.{host}").parse()
        };
        SocketAddr::new(ip.expect("an address"), PORT)
    }
}

impl Net {
    fn new(setup: &Setup) -> Result<Self> {
        let mut lab = Lab::new()?;
        let (host_a, host_b) = (lab.host("a")?, lab.host("b")?);
        let attacker = setup.attacked.map(|_| lab.host("mitm")).transpose()?;
        let mut link = |interface: &str, net: u8| {
            let addresses = |host: u8| format!("10.0.{net}.{host}/24 fd00:{net}::{host}/64");
            let (of_a, of_b) = (addresses(1), addresses(2));
            let Some(middle) = attacker
                .as_ref()
                .filter(|_| setup.attacked == Some(interface))
            else {
                let spec = LinkSpec::new(&host_a, interface, &of_a, &host_b, interface, &of_b);
                return lab.link(spec.shaped(RATE));
            };
            let near = LinkSpec::new(&host_a, interface, &of_a, middle, "near0", "");
            let near = lab.link(near.shaped(RATE))?;
            lab.link(LinkSpec::new(middle, "far0", "", &host_b, interface, &of_b))?;
            middle.run("ip link add mitm0 type bridge")?;
            for port in ["near0", "far0"] {
                middle.run(&format!("ip link set {port} master mitm0"))?;
            }
            middle.run(&format!("ip address add 10.0.{net}.77/24 dev mitm0"))?;
            middle.run("ip link set mitm0 up")?;
            Ok(near)
        };
        let (eth, wlan) = (link("eth0", 1)?, link("wlan0", 2)?);
        let behind = match setup.gateways {
            true => networks_behind(&mut lab, [&host_a, &host_b])?,
            false => Vec::new(),
        };
        let (a, key_a) = Node::new(&host_a)?;
        let (b, key_b) = Node::new(&host_b)?;
        let of_a = format!("{}{}", setup.bumps[0], setup.rules);
        a.configure(&setup.config(1, "server", &key_b, 2, &of_a))?;
        b.configure(&setup.config(2, "laptop", &key_a, 1, &setup.bumps[1]))?;
        Ok(Self {
            a,
            b,
            eth,
            wlan,
            attacker,
            behind,
            lab,
        })
    }

    /// Starts both daemons and waits for the session.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn start(&mut self) -> Result<()> {
        self.a.start()?;
        self.b.start()?;
        self.wait_established()
    }

    /// Waits until both hosts have the session and both paths.
    ///
    /// # Errors
    /// If they do not.
    pub fn wait_established(&mut self) -> Result<()> {
        self.a.wait_established()?;
        self.b.wait_established()
    }

    /// A connection from `a` to this port of `b`, on which both talk without end.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn talk(&self, port: u16) -> Result<Talk> {
        Talk::start(&self.a.host, &self.b.host, server(port))
    }

    /// A connection from the network behind `a` to this port of the one behind `b`, on which both talk
    /// without end.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn talk_behind(&self, port: u16) -> Result<Talk> {
        Talk::start(&self.behind[0], &self.behind[1], behind(port))
    }

    /// A connection to port 7000 of `b` that was put on `scramble`, well under way.
    ///
    /// # Errors
    /// If that does not come about.
    pub fn bumped(&self) -> Result<Talk> {
        let talk = self.talk(7000)?;
        talk.advance(256 << 10)?;
        self.a.enable(7000)?;
        self.wait_bump(7000, "scramble")?;
        talk.advance(SETTLED)?;
        Ok(talk)
    }

    /// A third host, on a link of its own to `a`, which sends `a` what it likes.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn intruder(&mut self) -> Result<Host> {
        let host = self.lab.host("c")?;
        let (of_a, of_c) = ("10.0.3.1/24 fd00:3::1/64", "10.0.3.3/24 fd00:3::3/64");
        let spec = LinkSpec::new(&self.a.host, "lan0", of_a, &host, "lan0", of_c);
        self.lab.link(spec)?;
        host.run("ip route add 10.0.1.1 via 10.0.3.1")?;
        host.run("ip route add fd00:1::1 via fd00:3::1")?;
        Ok(host)
    }

    /// A container on `b`, as Docker publishes it.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn container(&mut self) -> Result<Host> {
        docker::publish(&mut self.lab, &self.b.host)
    }

    /// Listens on both links from now on.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn eavesdrop(&self) -> Result<Eavesdropper> {
        Eavesdropper::new(&self.b.host)
    }

    /// Waits until the connections of a port are LOCKED on both hosts.
    ///
    /// # Errors
    /// If they are not.
    pub fn wait_locked(&self, port: u16) -> Result<()> {
        self.a.wait_locked(port)?;
        self.b.wait_locked(port)
    }

    /// Waits until the connections of a port have this bump on both hosts.
    ///
    /// # Errors
    /// If they do not.
    pub fn wait_bump(&self, port: u16, bump: &str) -> Result<()> {
        self.a.wait_bump(port, bump)?;
        self.b.wait_bump(port, bump)
    }
}

/// The networks behind a host, as the configuration has them.
fn networks(host: u8) -> String {
    let net = host + 6;
    format!("\"192.168.{net}.0/24\", \"fd00:{net}::/64\"")
}

/// Makes the network behind each gateway, with a host in it.
fn networks_behind(lab: &mut Lab, gateways: [&Host; 2]) -> Result<Vec<Host>> {
    let mut behind = Vec::new();
    for ((name, gateway), number) in ["near", "far"].into_iter().zip(gateways).zip(1..) {
        let host = lab.host(name)?;
        let (own, other, peer) = (number + 6, 9 - number, 3 - number);
        let of_gateway = format!("192.168.{own}.1/24 fd00:{own}::1/64");
        let of_host = format!("192.168.{own}.10/24 fd00:{own}::10/64");
        let spec = LinkSpec::new(gateway, "in0", &of_gateway, &host, "eth0", &of_host);
        lab.link(spec)?;
        host.run(&format!("ip route add default via 192.168.{own}.1"))?;
        host.run(&format!("ip -6 route add default via fd00:{own}::1"))?;
        gateway.run(&format!(
            "ip route add 192.168.{other}.0/24 via 10.0.2.{peer}"
        ))?;
        gateway.run(&format!(
            "ip -6 route add fd00:{other}::/64 via fd00:2::{peer}"
        ))?;
        gateway.sysctl("net.ipv4.ip_forward", "1")?;
        gateway.sysctl("net.ipv6.conf.all.forwarding", "1")?;
        behind.push(host);
    }
    Ok(behind)
}

/// The address of the host behind `b`.
pub fn behind(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 168, 8, 10], port))
}

/// The same over IPv6.
pub fn behind_v6(port: u16) -> SocketAddr {
    SocketAddr::from(([0xfd00, 8, 0, 0, 0, 0, 0, 0x10], port))
}

/// The address of `b` on the trusted link.
pub fn server(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 1, 2], port))
}

/// The same over IPv6.
pub fn server_v6(port: u16) -> SocketAddr {
    SocketAddr::from(([0xfd00, 1, 0, 0, 0, 0, 0, 2], port))
}
