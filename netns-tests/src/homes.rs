//! Two laptops at two homes that have the same addresses, and a server in a cloud, whose address is translated.
//!
//! | host       | interface | address         |
//! |------------|-----------|-----------------|
//! | `a`, `c`   | `lan0`    | `192.168.1.10`  |
//! | `home-a`, `home-c` | `lan0` | `192.168.1.1` |
//! | `home-a`   | `wan0`    | `198.51.100.2`  |
//! | `home-c`   | `wan0`    | `198.51.100.6`  |
//! | `internet` | `a0`, `c0`, `b0` | `198.51.100.1`, `198.51.100.5`, `10.0.9.1` |
//! | `b`        | `wan0`    | `10.0.9.2`      |
//!
//! Each home masquerades, the first by nftables and the second by iptables. `internet` gives `b` the address `203.0.113.7` and no other: the laptops do not reach `10.0.9.2`. The
//! one path of each host is untrusted, and the default bump is `seal`. On `b` the laptops appear as `10.77.0.2` and `10.77.0.3`.

use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use anyhow::Result;
use dibs_lab::dibs::PORT;
use dibs_lab::{Conditions, Lab, Link, LinkSpec};
use dibs_netns::Host;
use nix::unistd::geteuid;

use crate::daemon::Node;
use crate::traffic::connect_translated;
use crate::{docker, programs};

/// The hosts.
#[derive(Debug)]
pub struct Homes {
    /// The laptops.
    pub laptops: [Node; 2],
    /// The server.
    pub b: Node,
    /// Their homes' routers.
    pub homes: [Host; 2],
    /// Router between the homes and the server.
    pub internet: Host,
    lab: Lab,
    /// Links of the homes to `internet`.
    _uplinks: Vec<Link>,
}

/// An address of `b`, as the laptops know it.
pub fn server(port: u16) -> SocketAddr {
    SocketAddr::from(([203, 0, 113, 7], port))
}

impl Homes {
    /// Makes the hosts, starts the daemons, runs the test, and prints what can be seen on the hosts if it fails.
    ///
    /// # Errors
    /// Failures of the test, and of the system.
    pub fn run(test: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        Self::run_far(Duration::ZERO, test)
    }

    /// The same where the way from each home to the server takes so long.
    ///
    /// # Errors
    /// As of [`run`](Self::run).
    pub fn run_far(delay: Duration, test: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        programs::check()?;
        let mut net = Self::new(delay)?;
        let result = catch_unwind(AssertUnwindSafe(|| {
            net.b.start()?;
            for laptop in &mut net.laptops {
                laptop.start()?;
                laptop.wait_until_joined(1)?;
            }
            test(&mut net)
        }));
        if !matches!(result, Ok(Ok(()))) {
            if let Ok(Err(error)) = &result {
                println!("===== {error:?}");
            }
            let [a, c] = &net.laptops;
            println!("{}\n{}\n{}", a.describe(), c.describe(), net.b.describe());
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// A connection of a laptop from one port to another of `b`.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn connect(&self, laptop: usize, from: u16, to: u16) -> Result<(TcpStream, TcpStream)> {
        let host = &self.laptops[laptop].host;
        let listens = SocketAddr::from(([10, 0, 9, 2], to));
        connect_translated(geteuid(), from, host, &self.b.host, [listens, server(to)])
    }

    /// A container of the server, which its nat table leads [`docker::PORT`] to.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn container(&mut self) -> Result<Host> {
        docker::publish(&mut self.lab, &self.b.host)
    }

    fn new(delay: Duration) -> Result<Self> {
        let (mut lab, mut uplinks) = (Lab::new()?, Vec::new());
        let (internet, b) = (lab.host("internet")?, lab.host("b")?);
        internet.sysctl("net/ipv4/ip_forward", "1")?;
        lab.link(LinkSpec::new(
            &internet,
            "b0",
            "10.0.9.1/24",
            &b,
            "wan0",
            "10.0.9.2/24",
        ))?;
        b.run("ip route add default via 10.0.9.1")?;
        internet.shell(
            "nft add table ip cloud\n\
             nft 'add chain ip cloud to { type nat hook prerouting priority -100; }'\n\
             nft add rule ip cloud to ip daddr 203.0.113.7 dnat to 10.0.9.2\n\
             nft 'add chain ip cloud from { type nat hook postrouting priority 100; }'\n\
             nft add rule ip cloud from ip saddr 10.0.9.2 snat to 203.0.113.7\n\
             nft 'add chain ip cloud forward { type filter hook forward priority 0; }'\n\
             nft add rule ip cloud forward iifname != b0 ct original daddr 10.0.9.2 drop",
        )?;
        let homes = [("a", "a0", 0), ("c", "c0", 4)];
        let homes = homes.map(|(name, uplink, at)| -> Result<(Node, String, Host)> {
            let (laptop, home) = (lab.host(name)?, lab.host(&format!("home-{name}"))?);
            let (near, far) = ("192.168.1.10/24", "192.168.1.1/24");
            lab.link(LinkSpec::new(&laptop, "lan0", near, &home, "lan0", far))?;
            let address = |host: u8| format!("198.51.100.{host}/30");
            let (near, far) = (address(at + 2), address(at + 1));
            let spec = LinkSpec::new(&home, "wan0", &near, &internet, uplink, &far);
            uplinks.push(lab.link(match delay {
                Duration::ZERO => spec,
                delay => spec.emulated(Conditions::new().delay(delay)),
            })?);
            laptop.run("ip route add default via 192.168.1.1")?;
            home.run(&format!("ip route add default via 198.51.100.{}", at + 1))?;
            home.sysctl("net/ipv4/ip_forward", "1")?;
            home.shell(match name {
                "a" => {
                    "nft add table ip nat\n\
                     nft 'add chain ip nat post { type nat hook postrouting priority 100; }'\n\
                     nft add rule ip nat post oifname wan0 masquerade"
                }
                _ => "iptables-legacy -t nat -A POSTROUTING -o wan0 -j MASQUERADE",
            })?;
            let (node, key) = Node::new(&laptop)?;
            Ok((node, key, home))
        });
        let (b, key_b) = Node::new(&b)?;
        let [a, c] = homes;
        let ((a, key_a, home_a), (c, key_c, home_c)) = (a?, c?);
        let peer = |name: &str, key: &str, rest: &str| {
            format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n{rest}\n")
        };
        let at_b = format!(
            "addresses = [\"{}\"]\n[peer.endpoints]\nway = \"{}\"",
            server(0).ip(),
            server(PORT)
        );
        for laptop in [&a, &c] {
            laptop.configure(&configuration("lan0", &peer("server", &key_b, &at_b)))?;
        }
        let laptops = peer("a", &key_a, "appears_as = [\"10.77.0.2\"]")
            + &peer("c", &key_c, "appears_as = [\"10.77.0.3\"]");
        b.configure(&configuration("wan0", &laptops))?;
        Ok(Self {
            laptops: [a, c],
            homes: [home_a, home_c],
            b,
            internet,
            lab,
            _uplinks: uplinks,
        })
    }
}

fn configuration(interface: &str, peers: &str) -> String {
    format!(
        "[daemon]\nprivate_key_file = \"/run/dibs/private.key\"\nstate_dir = \"/run/dibs/lib\"\n\
         default_bump = \"seal\"\n\
         [[path]]\nname = \"way\"\ninterface = \"{interface}\"\ntrust = \"untrusted\"\n{peers}"
    )
}
