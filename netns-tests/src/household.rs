//! Households that have the same private network, each behind two uplinks that translate addresses; a server by which they
//! reach the Internet, and a host in that.
//!
//! | host       | interface    | addresses                               |
//! |------------|--------------|-----------------------------------------|
//! | `a`, `c`   | `lan0`       | `192.168.1.1`                           |
//! | `a`, `c`   | `dsl`        | `192.168.178.2`, `2001:db8:1::2` (`a`)  |
//! | `a`, `c`   | `lte`        | `100.64.9.2`                            |
//! | devices    | `eth0`       | `192.168.1.11`, `192.168.1.12`, ...     |
//! | uplinks    | `wan0`       | `198.51.100.2`, `198.51.100.6`, ...     |
//! | `b`        | `wan0`       | `203.0.113.7`, `2001:db8:7::7`          |
//! | `b`        | `priv0`      | `10.8.0.1`                              |
//! | `secret`   | `eth0`       | `10.8.0.10`                             |
//! | `web`      | `eth0`       | `192.0.2.80`, `2001:db8:80::80`         |
//!
//! `dsl` is trusted, `lte` is not, and the default bump is `seal`. On `b` the households appear as `10.77.0.2` and `10.77.0.3`.
//! They call every address the server's, and `10.8.0.0/24` too.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::dibs::PORT;
use dibs_lab::{Capture, Lab, LinkSpec};
use dibs_netns::Host;

use crate::daemon::{Node, wait};
use crate::eavesdropper::is_tcp;
use crate::programs;
use crate::traffic::{Talk, connect_from};

/// Bits per second of each uplink.
const RATE: u64 = 40_000_000;
/// Names of the uplinks.
const UPLINKS: [&str; 2] = ["dsl", "lte"];

/// A household.
#[derive(Debug)]
pub struct Household {
    /// The router that has the uplinks.
    pub node: Node,
    /// Devices in its network.
    pub devices: Vec<Host>,
    /// Hosts that its uplinks lead to, which translate its addresses.
    pub uplinks: Vec<Host>,
}

/// The hosts.
#[derive(Debug)]
pub struct Households {
    /// The households.
    pub homes: Vec<Household>,
    /// The server.
    pub b: Node,
    /// A host in a private network of the server's.
    pub secret: Host,
    /// A host in the Internet.
    pub web: Host,
    /// Router between the uplinks and the servers.
    pub internet: Host,
    // Holds what the links need.
    _lab: Lab,
}

/// An address of `web`.
pub fn web(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 80], port))
}

/// The same over IPv6.
pub fn web_v6(port: u16) -> SocketAddr {
    SocketAddr::from(([0x2001, 0xdb8, 0x80, 0, 0, 0, 0, 0x80], port))
}

/// Addresses of `b` in the Internet.
pub const SERVER: [[u16; 8]; 2] = [
    [0, 0, 0, 0, 0, 0xffff, 0xcb00, 0x7107],
    [0x2001, 0xdb8, 7, 0, 0, 0, 0, 7],
];

impl Households {
    /// Makes so many households, starts the daemons, runs the test, and prints what can be seen on the hosts if it fails.
    ///
    /// # Errors
    /// Failures of the test, and of the system.
    pub fn run(homes: u8, test: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        programs::check()?;
        let mut net = Self::new(homes)?;
        let result = catch_unwind(AssertUnwindSafe(|| {
            net.b.start()?;
            for home in &mut net.homes {
                home.node.start()?;
                home.node.wait_until_joined(UPLINKS.len())?;
            }
            test(&mut net)
        }));
        if !matches!(result, Ok(Ok(()))) {
            if let Ok(Err(error)) = &result {
                println!("===== {error:?}");
            }
            for home in &net.homes {
                println!("{}", home.node.describe());
            }
            println!("{}", net.b.describe());
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// A connection from a host to `web`, on which both talk without end, from this port; 0: any. It comes there in the
    /// server's name.
    ///
    /// # Errors
    /// If it does not come about, or comes in another's name.
    pub fn talk(&self, from: &Host, port: u16, to: SocketAddr) -> Result<Talk> {
        let conn = self.connect(from, port, to)?;
        let seen = conn.1.peer_addr()?.ip();
        let server = SERVER.map(|address| IpAddr::from(address).to_canonical());
        ensure!(server.contains(&seen), "{seen} is at web");
        Talk::over(from, &self.web, conn)
    }

    /// A connection from a host to `web`, from this port; 0: any.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn connect(
        &self,
        from: &Host,
        port: u16,
        to: SocketAddr,
    ) -> Result<(TcpStream, TcpStream)> {
        connect_from(port, from, &self.web, to)
    }

    fn new(homes: u8) -> Result<Self> {
        let mut lab = Lab::new()?;
        let internet = lab.host("internet")?;
        forward(&internet)?;
        let (server, secret, web) = (lab.host("b")?, lab.host("secret")?, lab.host("web")?);
        let mut out = |host: &Host, port: &str, interface: &str, net: [&str; 2], at: [&str; 2]| {
            let [gateway, own] = [["1", "1"], at].map(|host| {
                let both =
                    [(0, "24"), (1, "64")].map(|(v, len)| format!("{}{}/{len}", net[v], host[v]));
                both.join(" ")
            });
            lab.link(LinkSpec::new(
                &internet, port, &gateway, host, interface, &own,
            ))?;
            for (net, family) in net.into_iter().zip(["-4", "-6"]) {
                host.run(&format!("ip {family} route add default via {net}1"))?;
            }
            anyhow::Ok(())
        };
        out(
            &server,
            "b0",
            "wan0",
            ["203.0.113.", "2001:db8:7::"],
            ["7", "7"],
        )?;
        out(
            &web,
            "web0",
            "eth0",
            ["192.0.2.", "2001:db8:80::"],
            ["80", "80"],
        )?;
        forward(&server)?;
        lab.link(LinkSpec::new(
            &server,
            "priv0",
            "10.8.0.1/24",
            &secret,
            "eth0",
            "10.8.0.10/24",
        ))?;
        secret.run("ip route add default via 10.8.0.1")?;
        let (b, key_b) = Node::new(&server)?;
        let mut peers = String::new();
        let mut built = Vec::new();
        for number in 0..homes {
            let (home, key) = household(&mut lab, &internet, number)?;
            home.node.configure(&of_household(&key_b))?;
            let (name, at) = (home.node.host.name(), number + 2);
            peers += &format!(
                "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nappears_as = [\"10.77.0.{at}\", \"fd77::{at}\"]\n"
            );
            built.push(home);
        }
        b.configure(&format!(
            "{}exit = true\n[[path]]\nname = \"way\"\ninterface = \"wan0\"\ntrust = \"trusted\"\n{peers}",
            daemon()
        ))?;
        Ok(Self {
            homes: built,
            b,
            secret,
            web,
            internet,
            _lab: lab,
        })
    }
}

/// Ears on all uplinks of a household.
#[derive(Debug)]
pub struct Ears(Vec<Capture>);

impl Ears {
    /// Listens from now on.
    ///
    /// # Errors
    /// If the system does not let it.
    pub fn new(home: &Household) -> Result<Self> {
        let all = UPLINKS.map(|uplink| Capture::start_heads(&home.node.host, uplink));
        Ok(Self(Vec::from(all).into_iter().collect::<Result<_>>()?))
    }

    /// Ends the recordings, in which there may be no TCP at all, and on each uplink so many packets at least.
    ///
    /// # Errors
    /// If there was, or too little passed to tell.
    pub fn heard_no_tcp(self, least: usize) -> Result<()> {
        for (capture, uplink) in self.0.into_iter().zip(UPLINKS) {
            let packets = capture.finish()?.packets;
            let tcp = packets
                .iter()
                .filter(|packet| is_tcp(&packet.frame))
                .count();
            ensure!(tcp == 0, "{tcp} packets of TCP in plain by {uplink}");
            ensure!(
                packets.len() >= least,
                "{} packets by {uplink}",
                packets.len()
            );
        }
        Ok(())
    }
}

/// Connections that answer each other in rounds until they are stopped.
#[derive(Debug)]
pub struct Rounds {
    stop: Arc<AtomicBool>,
    number: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Rounds {
    const SAID: &[u8; 22] = b"a key that was pressed";

    /// Opens so many connections from a host to `web`, and begins.
    ///
    /// # Errors
    /// If one does not come about.
    pub fn start(net: &Households, from: &Host, connections: usize) -> Result<Self> {
        let ends = (0..connections).map(|_| net.connect(from, 0, web(80)));
        let mut ends = ends.collect::<Result<Vec<_>>>()?;
        let (stop, number) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&number));
        let thread = std::thread::spawn(move || {
            let mut heard = [0; Self::SAID.len()];
            while !stopped.load(Ordering::Relaxed) {
                for (near, _) in &mut ends {
                    near.write_all(Self::SAID)?;
                }
                for (_, far) in &mut ends {
                    far.read_exact(&mut heard)?;
                    far.write_all(&heard)?;
                }
                for (near, _) in &mut ends {
                    near.read_exact(&mut heard)?;
                    ensure!(&heard == Self::SAID);
                }
                counted.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(Self {
            stop,
            number,
            thread,
        })
    }

    /// Waits for two more rounds: the first may have begun before.
    ///
    /// # Errors
    /// If they do not come.
    pub fn go_on(&self) -> Result<()> {
        let from = self.number.load(Ordering::Relaxed);
        wait("each connection to go on", || {
            self.thread.is_finished() || self.number.load(Ordering::Relaxed) > from + 1
        })
    }

    /// Ends the rounds.
    ///
    /// # Errors
    /// If a connection broke, or brought other bytes.
    pub fn finish(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("it does not panic")
    }
}

fn forward(host: &Host) -> Result<()> {
    host.sysctl("net/ipv4/ip_forward", "1")?;
    host.sysctl("net/ipv6/conf/all/forwarding", "1")
}

fn household(lab: &mut Lab, internet: &Host, number: u8) -> Result<(Household, String)> {
    let name = ["a", "c"][usize::from(number)];
    let host = lab.host(name)?;
    forward(&host)?;
    let mut uplinks = Vec::new();
    let nets = [("192.168.178", "2001:db8:1::"), ("100.64.9", "")];
    for ((uplink, (net, net_v6)), metric) in UPLINKS.into_iter().zip(nets).zip([100, 200]) {
        let router = lab.host(&format!("{uplink}-{name}"))?;
        forward(&router)?;
        // One household alone has IPv6, by one uplink.
        let v6 = |host: u8| match (net_v6, number) {
            ("", _) | (_, 1..) => String::new(),
            (net, _) => format!(" {net}{host}/64"),
        };
        let addresses = |host: u8| format!("{net}.{host}/24{}", v6(host));
        let (near, far) = (addresses(2), addresses(1));
        let link = LinkSpec::new(&host, uplink, &near, &router, "lan0", &far);
        lab.link(link.shaped(RATE))?;
        let at = number * 8 + if uplink == "lte" { 4 } else { 0 };
        let [near, far] = [2, 1].map(|host| match v6(host).is_empty() {
            true => format!("198.51.100.{}/30", at + host),
            false => format!("198.51.100.{}/30 2001:db8:100::{host}/64", at + host),
        });
        let port = format!("{uplink}-{name}");
        lab.link(LinkSpec::new(&router, "wan0", &near, internet, &port, &far))?;
        router.run(&format!("ip route add default via 198.51.100.{}", at + 1))?;
        masquerade(&router, "wan0")?;
        host.run(&format!("ip route add default via {net}.1 metric {metric}"))?;
        if !v6(1).is_empty() {
            router.run("ip -6 route add default via 2001:db8:100::1")?;
            internet.run("ip -6 route add 2001:db8:1::/64 via 2001:db8:100::2")?;
            host.run("ip -6 route add default via 2001:db8:1::1")?;
        }
        uplinks.push(router);
    }
    host.run("ip link add lan0 type bridge")?;
    host.run("ip address add 192.168.1.1/24 dev lan0")?;
    let mut devices = Vec::new();
    for device in 1..=3 {
        let lan = lab.host(&format!("device{device}-{name}"))?;
        let (port, own) = (format!("port{device}"), format!("192.168.1.1{device}/24"));
        lab.link(LinkSpec::new(&host, &port, "", &lan, "eth0", &own))?;
        host.run(&format!("ip link set {port} master lan0"))?;
        devices.push(lan);
    }
    host.run("ip link set lan0 up")?;
    for device in &devices {
        device.run("ip route add default via 192.168.1.1")?;
    }
    // As its owner has it for all that dibs leaves alone.
    masquerade(&host, "{ dsl, lte }")?;
    let (node, key) = Node::new(&host).context("a household")?;
    let home = Household {
        node,
        devices,
        uplinks,
    };
    Ok((home, key))
}

fn masquerade(host: &Host, interfaces: &str) -> Result<()> {
    host.shell(&format!(
        "nft add table ip nat\n\
         nft 'add chain ip nat post {{ type nat hook postrouting priority 100; }}'\n\
         nft 'add rule ip nat post oifname {interfaces} masquerade'"
    ))
    .map(drop)
}

/// Lines of `[daemon]` that all have.
fn daemon() -> &'static str {
    "[daemon]\nprivate_key_file = \"/run/dibs/private.key\"\nstate_dir = \"/run/dibs/lib\"\ndefault_bump = \"seal\"\n"
}

fn of_household(key_of_server: &str) -> String {
    let path = |name: &str, trust: &str| {
        format!("[[path]]\nname = \"{name}\"\ninterface = \"{name}\"\ntrust = \"{trust}\"\n")
    };
    let paths = path("dsl", "trusted") + &path("lte", "untrusted");
    let endpoint = SocketAddr::new(IpAddr::from(SERVER[0]).to_canonical(), PORT);
    format!(
        "{}gateway = [\"192.168.1.0/24\"]\nrefuse_quic = true\n{paths}[[peer]]\nname = \"server\"\npublic_key = \"{key_of_server}\"\n\
         addresses = [\"{}/32\", \"0.0.0.0/0\", \"::/0\", \"10.8.0.0/24\"]\n[peer.endpoints]\n\
         dsl = \"{endpoint}\"\nlte = \"{endpoint}\"\n",
        daemon(),
        endpoint.ip()
    )
}
