//! Two hosts with a router between them, which may translate addresses, or follow connections.
//!
//! | host     | interface | address       |
//! |----------|-----------|---------------|
//! | `a`      | `lan0`    | `10.0.5.1`    |
//! | `router` | `lan0`    | `10.0.5.254`  |
//! | `router` | `wan0`    | `10.0.9.254`  |
//! | `b`      | `wan0`    | `10.0.9.2`    |
//!
//! `a` calls `b`; the one path is trusted, and the default bump is `seal`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::{Context as _, Result};
use dibs_lab::dibs::{PORT, Peer, Settings};
use dibs_lab::{Lab, LinkSpec};
use dibs_netns::Host;

use crate::daemon::Node;
use crate::programs;
use crate::traffic::connect;

/// The router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// Masquerades what comes from `a`; `b` has no route to `a`.
    Nat,
    /// Translates nothing, and drops what belongs to no connection whose beginning it has seen.
    Firewall,
}

/// The hosts.
#[derive(Debug)]
pub struct Routed {
    /// Behind the router.
    pub a: Node,
    /// Beyond it.
    pub b: Node,
    /// Between them.
    pub router: Host,
    // Holds what the links need.
    _lab: Lab,
}

/// An address of `b`.
pub fn server(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 9, 2], port))
}

impl Routed {
    /// Makes the hosts, starts the daemons, runs the test, and prints what can be seen on the hosts if it fails.
    ///
    /// # Errors
    /// Failures of the test, and of the system.
    pub fn run(router: Router, test: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        programs::check()?;
        let mut net = Self::new(router)?;
        let result = catch_unwind(AssertUnwindSafe(|| {
            net.b.start()?;
            net.a.start()?;
            net.a.wait_until_joined(1)?;
            net.b.wait_until_joined(1)?;
            test(&mut net)
        }));
        if !matches!(result, Ok(Ok(()))) {
            if let Ok(Err(error)) = &result {
                println!("===== {error:?}");
            }
            println!("{}\n{}", net.a.describe(), net.b.describe());
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    fn new(kind: Router) -> Result<Self> {
        let mut lab = Lab::new()?;
        let (a, router, b) = (lab.host("a")?, lab.host("router")?, lab.host("b")?);
        let near = LinkSpec::new(&a, "lan0", "10.0.5.1/24", &router, "lan0", "10.0.5.254/24");
        lab.link(near)?;
        let far = LinkSpec::new(&router, "wan0", "10.0.9.254/24", &b, "wan0", "10.0.9.2/24");
        lab.link(far)?;
        a.run("ip route add default via 10.0.5.254")?;
        router.sysctl("net/ipv4/ip_forward", "1")?;
        match kind {
            Router::Nat => {
                router.shell(
                    "nft add table ip nat\n\
                     nft 'add chain ip nat post { type nat hook postrouting priority 100; }'\n\
                     nft add rule ip nat post oifname wan0 masquerade",
                )?;
            }
            Router::Firewall => {
                b.run("ip route add default via 10.0.9.254")?;
                router.shell(
                    "nft add table ip fw\n\
                     nft 'add chain ip fw forward { type filter hook forward priority 0; }'\n\
                     nft add rule ip fw forward ct state invalid drop\n\
                     nft 'add rule ip fw forward tcp flags & (fin|syn|rst|ack) != syn ct state new drop'",
                )?;
                router.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0")?;
            }
        }
        let (node_a, key_a) = Node::new(&a)?;
        let (node_b, key_b) = Node::new(&b)?;
        let endpoint = ("way", SocketAddr::new(server(0).ip(), PORT));
        node_a.configure(&configuration(
            "lan0",
            "server",
            &key_b,
            "10.0.9.2",
            &[endpoint],
        ))?;
        node_b.configure(&configuration("wan0", "laptop", &key_a, "10.0.5.1", &[]))?;
        Ok(Self {
            a: node_a,
            b: node_b,
            router,
            _lab: lab,
        })
    }

    /// A connection from `a` to this port of `b`.
    ///
    /// # Errors
    /// If it does not come about.
    pub fn connect(&self, port: u16) -> Result<(TcpStream, TcpStream)> {
        connect(&self.a.host, &self.b.host, server(port))
    }
}

fn configuration(
    interface: &str,
    peer: &str,
    public_key: &str,
    address: &str,
    endpoints: &[(&str, SocketAddr)],
) -> String {
    let peer = Peer {
        name: peer,
        public_key,
        addresses: &[format!("\"{address}/32\"")],
        endpoints,
    };
    let tables =
        format!("\n[[path]]\nname = \"way\"\ninterface = \"{interface}\"\ntrust = \"trusted\"\n");
    let settings = Settings {
        daemon: "default_bump = \"seal\"",
        tables: &tables,
    };
    dibs_lab::dibs::configuration(&[], &peer, settings)
}

/// Sends so many bytes both ways over a connection.
///
/// # Errors
/// If they do not arrive.
pub fn exchange((near, far): &mut (TcpStream, TcpStream), bytes: usize) -> Result<()> {
    let (sent, mut received) = (vec![7; bytes], vec![0; bytes]);
    near.write_all(&sent).context("to b")?;
    far.read_exact(&mut received).context("at b")?;
    far.write_all(&sent).context("to a")?;
    near.read_exact(&mut received).context("at a")
}
