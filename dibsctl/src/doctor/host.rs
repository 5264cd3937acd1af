//! Reading this host. Nothing here judges, and nothing changes the host.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use dibs_config::{Config, Endpoint, KeyFileError};
use dibs_control::{Client, ClientError, Status};
use dibs_policy::sockets::{self, Process};
use dibs_policy::{Command, CommandRunner as _, System, translation};
use serde_json::Value;
use socket2::{Domain, Socket, Type};
use tokio::net::lookup_host;

/// A resolver that takes longer over a name does not serve.
const RESOLVED_WITHIN: Duration = Duration::from_secs(5);
/// Who does not say within this time that nobody is at home may be there.
const REFUSED_WITHIN: Duration = Duration::from_millis(300);

/// What does not depend on the configuration.
pub(crate) struct Host {
    /// Whether everything may be looked at.
    pub(crate) root: bool,
    /// Of the kernel.
    pub(crate) release: String,
    /// Of iptables.
    pub(crate) tables: Tables,
    /// Of nftables; none: it cannot be read.
    pub(crate) nft: Option<Value>,
    /// None: there is no iproute2.
    pub(crate) network: Option<Network>,
    /// Programs that manage networks.
    pub(crate) managers: Managers,
    /// Seconds since 1970.
    pub(crate) now: f64,
    /// Whether something keeps the clock right.
    pub(crate) synchronized: bool,
    /// What TCP uses.
    pub(crate) congestion: Option<String>,
}

/// What each kind of iptables says; none: it is not there, or may not be read.
#[derive(Default)]
pub(crate) struct Tables {
    /// What `iptables --version` says.
    pub(crate) version: Option<String>,
    /// Saved rules of nftables' kind, IPv4 and IPv6.
    pub(crate) nft: [Option<String>; 2],
    /// Of the legacy kind.
    pub(crate) legacy: [Option<String>; 2],
    /// Whether only root could have read them.
    pub(crate) forbidden: bool,
}

impl Tables {
    /// All that could be read, of one IP version.
    pub(crate) fn of(&self, v6: bool) -> impl Iterator<Item = &str> {
        let which = usize::from(v6);
        [&self.nft[which], &self.legacy[which]]
            .into_iter()
            .filter_map(|saved| saved.as_deref())
    }
}

/// What `ip` says, as JSON.
#[derive(Default)]
pub(crate) struct Network {
    /// Interfaces.
    pub(crate) links: Value,
    /// Rules of routing, IPv4 and IPv6.
    pub(crate) rules: [Value; 2],
    /// Routes of all tables, of both.
    pub(crate) routes: [Value; 2],
}

/// Which run, and what they are told about what is not theirs.
#[derive(Default)]
pub(crate) struct Managers {
    /// Names of running processes, as the kernel keeps them: 15 bytes at most.
    pub(crate) running: Vec<String>,
    /// The files of NetworkManager, one after the other.
    pub(crate) network_manager: String,
    /// Those of systemd-networkd.
    pub(crate) networkd: String,
}

/// A path of the configuration, to one endpoint.
#[derive(Clone, Debug, Default)]
pub(crate) struct Way {
    /// Of the path.
    pub(crate) path: String,
    /// Of the path, if it has one.
    pub(crate) interface: Option<String>,
    /// As `ip link` has it; none: it is not there.
    pub(crate) link: Option<Link>,
    /// Whether interfaces could be read at all.
    pub(crate) known: bool,
    /// Address at which the peer listens; none: the peer calls, or nobody knows.
    pub(crate) remote: Option<SocketAddr>,
    /// Reason why the name of the endpoint has no address.
    pub(crate) unresolved: Option<String>,
    /// How it is reached by this path, or why not.
    pub(crate) bound: Option<Result<Hop, String>>,
    /// How it is reached by who does not care.
    pub(crate) unbound: Option<Result<Hop, String>>,
    /// Of the interface, with that of all: the higher counts.
    pub(crate) rp_filter: Option<u8>,
    /// What a datagram to the endpoint brought; none: not asked, for a daemon runs.
    pub(crate) answer: Option<Answer>,
}

/// An interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Whether it is switched on.
    pub(crate) up: bool,
    /// Whether there is somebody at the other end of it.
    pub(crate) carrier: bool,
    /// In bytes.
    pub(crate) mtu: u32,
}

/// A route's next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    /// By this interface.
    pub(crate) device: String,
    /// From this address of ours.
    pub(crate) source: Option<IpAddr>,
    /// The route's own, in bytes.
    pub(crate) mtu: Option<u32>,
}

/// What a datagram brought that only a handshake would be answered to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The host is there, and no dibsd.
    Refused,
    /// Nothing, which may be good or bad.
    Nothing,
    /// This host does not let it out, or a router says that it goes no further.
    Failed(String),
}

impl Host {
    /// Looks around.
    pub(crate) async fn read() -> Self {
        let root = nix::unistd::geteuid().is_root();
        let nft = run("nft", &["--json", "list", "ruleset"]).await.ok();
        let congestion = sysctl("net/ipv4/tcp_congestion_control");
        Host {
            root,
            release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            tables: tables(root).await,
            nft: nft.and_then(|text| serde_json::from_str(&text).ok()),
            network: network().await,
            managers: managers(),
            now: crate::output::unix_now(),
            synchronized: dibs_io::is_clock_synchronized(),
            congestion,
        }
    }

    /// Each path to each endpoint; one that has none, once.
    pub(crate) async fn ways(&self, config: &Config, running: bool) -> Vec<Way> {
        let mut ways = Vec::new();
        for path in &config.paths {
            let endpoints = config.peers.iter().flat_map(|peer| &peer.endpoints);
            let mut endpoints = endpoints.filter(|(name, _)| *name == path.name).peekable();
            if endpoints.peek().is_none() {
                ways.push(self.way(path, None, running).await);
            }
            for (_, endpoint) in endpoints {
                match endpoint {
                    Endpoint::Address(to) => ways.push(self.way(path, Some(*to), running).await),
                    Endpoint::Name { host, port } => {
                        ways.extend(self.named(path, (host, *port), running).await);
                    }
                }
            }
        }
        ways
    }

    /// A path to an endpoint that is a name: to those of its addresses to which it leads, or to the first.
    async fn named(
        &self,
        path: &dibs_config::PathConfig,
        (name, port): (&str, u16),
        running: bool,
    ) -> Vec<Way> {
        let found = match tokio::time::timeout(RESOLVED_WITHIN, lookup_host((name, port))).await {
            Ok(Ok(found)) => found.collect(),
            failed => {
                let why = match failed {
                    Ok(Err(error)) => error.to_string(),
                    _ => format!("no answer within {} s", RESOLVED_WITHIN.as_secs()),
                };
                let mut way = self.way(path, None, running).await;
                way.unresolved = Some(format!("the name {name} cannot be resolved: {why}"));
                return vec![way];
            }
        };
        let mut ways = Vec::new();
        let found: Vec<SocketAddr> = found;
        for to in found {
            ways.push(self.way(path, Some(to), running).await);
        }
        let leads = |way: &Way| matches!(way.bound, Some(Ok(_)));
        match ways.iter().any(leads) {
            true => ways.retain(leads),
            false => ways.truncate(1),
        }
        ways
    }

    async fn way(
        &self,
        path: &dibs_config::PathConfig,
        remote: Option<SocketAddr>,
        running: bool,
    ) -> Way {
        let links = self.network.as_ref().map(|network| &network.links);
        let interface = path.interface.as_deref();
        let found = links.and_then(|links| link_named(links, interface?));
        // The file may have another name of it, and /proc its own alone.
        let own_name = found.and_then(|link| link["ifname"].as_str());
        let interface = own_name.or(interface);
        let mut way = Way {
            path: path.name.clone(),
            interface: interface.map(str::to_owned),
            link: found.and_then(link),
            known: links.is_some(),
            remote,
            rp_filter: interface.and_then(rp_filter),
            ..Way::default()
        };
        if let Some(remote) = remote
            && way.known
        {
            way.bound = Some(hop(remote.ip(), interface).await);
            way.unbound = Some(hop(remote.ip(), None).await);
            way.answer = (!running).then(|| ask(remote, interface));
        }
        way
    }

    /// Rules that lead what is sent to this host elsewhere.
    pub(crate) async fn leading(&self) -> Vec<String> {
        match self.root {
            true => translation::leading().await.unwrap_or_default(),
            false => Vec::new(),
        }
    }

    /// Rules that change the source of what this host sends the peers, by peer.
    pub(crate) async fn translated(&self, config: &Config) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for peer in config.peers.iter().filter(|_| self.root) {
            for net in &peer.addresses {
                let Ok(Hop {
                    source: Some(source),
                    ..
                }) = hop(net.addr(), None).await
                else {
                    continue;
                };
                let ends = [source, net.addr()].map(|address| SocketAddr::new(address, 0));
                if let Ok(Some(rule)) = translation::rule_for(ends[0], ends[1]).await {
                    found.push((peer.name.clone(), rule));
                }
            }
        }
        found
    }
}

/// What a sysctl is set to, by its path below `/proc/sys`.
pub(crate) fn sysctl(name: &str) -> Option<String> {
    let text = fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?;
    Some(text.trim().to_owned())
}

/// Whether the private key is one.
pub(crate) fn key(loaded: &Result<Config, dibs_config::Error>) -> Option<Result<(), KeyFileError>> {
    let file = &loaded.as_ref().ok()?.daemon.private_key_file;
    Some(dibs_config::read_private_key(file).map(drop))
}

/// What a running daemon says of itself.
pub(crate) fn status(socket: &Path) -> Result<Status, ClientError> {
    Client::connect(socket)?.status()
}

/// Whether TUNs can be made, as far as opening tells.
pub(crate) fn open_tun() -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open("/dev/net/tun")
}

/// Processes that have the daemon's port, as far as they can be seen; none: the port is free.
pub(crate) fn port_holders(config: &Config) -> Option<Vec<Process>> {
    let port = config.daemon.port;
    for any in [
        IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Ipv6Addr::UNSPECIFIED.into(),
    ] {
        match std::net::UdpSocket::bind((any, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Some(sockets::of_udp_port(port));
            }
            // Without one of the two IP versions there is nobody else in it either.
            _ => {}
        }
    }
    None
}

/// How much later than asked for this process was woken, several times.
pub(crate) fn wakes() -> Vec<Duration> {
    const TIMES: usize = 100;
    const ASKED: Duration = Duration::from_millis(1);
    let wake = |_| {
        let begun = Instant::now();
        std::thread::sleep(ASKED);
        begun.elapsed().saturating_sub(ASKED)
    };
    (0..TIMES).map(wake).collect()
}

async fn tables(root: bool) -> Tables {
    let mut tables = Tables {
        version: run("iptables", &["--version"]).await.ok(),
        forbidden: !root,
        ..Tables::default()
    };
    if root {
        for (which, name) in ["iptables", "ip6tables"].into_iter().enumerate() {
            tables.nft[which] = run(&format!("{name}-nft-save"), &[]).await.ok();
            tables.legacy[which] = run(&format!("{name}-legacy-save"), &[]).await.ok();
        }
    }
    tables
}

async fn network() -> Option<Network> {
    Some(Network {
        links: ip(&["link"]).await.ok()?,
        rules: [
            ip(&["-4", "rule"]).await.unwrap_or_default(),
            ip(&["-6", "rule"]).await.unwrap_or_default(),
        ],
        routes: [
            ip(&["-4", "route", "show", "table", "all"])
                .await
                .unwrap_or_default(),
            ip(&["-6", "route", "show", "table", "all"])
                .await
                .unwrap_or_default(),
        ],
    })
}

fn managers() -> Managers {
    let mut running: Vec<String> = { fs::read_dir("/proc").into_iter().flatten().flatten() }
        .filter_map(|entry| fs::read_to_string(entry.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    running.sort();
    running.dedup();
    let places = ["/usr/lib", "/run", "/etc"];
    let below = |directory: &str| -> String {
        let files = places.iter().flat_map(|place| {
            let directory = fs::read_dir(Path::new(place).join(directory));
            directory.into_iter().flatten().flatten()
        });
        { files.filter_map(|file| fs::read_to_string(file.path()).ok()) }
            .map(|text| text + "\n")
            .collect()
    };
    Managers {
        running,
        network_manager: below("NetworkManager/conf.d"),
        networkd: read("/etc/systemd/networkd.conf") + &below("systemd/networkd.conf.d"),
    }
}

/// What is in a file; nothing where it cannot be read.
fn read(file: &str) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

async fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let command = Command::new(program, arguments, "");
    System.run(&command).await.map_err(|error| match error {
        dibs_policy::Error::Command { stderr, .. } => stderr,
        error => error.to_string(),
    })
}

async fn ip(arguments: &[&str]) -> Result<Value, String> {
    let text = run("ip", &[&["-json", "-details"], arguments].concat()).await?;
    if text.trim().is_empty() {
        return Ok(Value::Array(Vec::new()));
    }
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

/// The interface of this name, its own or an alternative one.
fn link_named<'a>(links: &'a Value, name: &str) -> Option<&'a Value> {
    let is_called = |link: &&Value| {
        let others = link["altnames"].as_array().into_iter().flatten();
        link["ifname"] == name || others.into_iter().any(|other| other == name)
    };
    links.as_array()?.iter().find(is_called)
}

fn link(link: &Value) -> Option<Link> {
    let flag = |name: &str| {
        let flags = link["flags"].as_array();
        flags.is_some_and(|flags| flags.iter().any(|flag| flag == name))
    };
    Some(Link {
        up: flag("UP"),
        carrier: flag("LOWER_UP"),
        mtu: link["mtu"].as_u64()?.try_into().ok()?,
    })
}

/// The next step to an address, by an interface or by whichever.
async fn hop(to: IpAddr, interface: Option<&str>) -> Result<Hop, String> {
    let to = to.to_string();
    let mut arguments = vec!["route", "get", &to];
    arguments.extend(interface.iter().flat_map(|interface| ["oif", *interface]));
    let answer = ip(&arguments).await.map_err(|error| {
        let said = error.strip_prefix("RTNETLINK answers: ");
        said.unwrap_or(&error).to_owned()
    })?;
    let route = &answer[0];
    Ok(Hop {
        device: route["dev"].as_str().unwrap_or_default().to_owned(),
        source: { route["prefsrc"].as_str() }.and_then(|text| text.parse().ok()),
        mtu: { route["metrics"][0]["mtu"].as_u64() }.and_then(|mtu| mtu.try_into().ok()),
    })
}

fn rp_filter(interface: &str) -> Option<u8> {
    let one = |name: &str| {
        sysctl(&format!("net/ipv4/conf/{name}/rp_filter"))?
            .parse()
            .ok()
    };
    one("all").max(one(interface))
}

/// Sends what every dibsd ignores, and waits a moment for word that nobody is there.
fn ask(to: SocketAddr, interface: Option<&str>) -> Answer {
    let asked = || -> io::Result<()> {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None)?;
        if let Some(interface) = interface {
            socket.bind_device(Some(interface.as_bytes()))?;
        }
        socket.connect(&to.into())?;
        socket.set_read_timeout(Some(REFUSED_WITHIN))?;
        socket.send(&[0])?;
        let socket = std::net::UdpSocket::from(socket);
        socket.recv(&mut [0]).map(drop)
    };
    match asked() {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Answer::Refused,
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
            Answer::Failed(error.to_string())
        }
        _ => Answer::Nothing,
    }
}
