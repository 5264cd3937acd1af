//! The Internet behind a server: a home with two uplinks, which translate its addresses, and a host that it knows nothing of.
//!
//! | host     | interface       | addresses                  |
//! |----------|-----------------|----------------------------|
//! | home     | `eth0`, `wlan0` | `10.0.1.1`, `10.0.2.1`     |
//! | carrier  | `eth0`, `wlan0` | `10.0.1.2`, `10.0.2.2`     |
//! | server   | `wan0`          | `203.0.113.7`              |
//! | web      | `eth0`          | `192.0.2.80`               |

use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dibs_netem::Conditions;
use dibs_netns::{HANG, Host, Process};
use serde::Serialize;

use super::report::{Ratio, Table, Turns, figures};
use super::system::{Contestant, PORT};
use super::{Stage, is_missing};
use crate::baseline;
use crate::dibs::{self, PathSpec, Peer, Settings, configuration};
use crate::lab::Lab;
use crate::link::LinkSpec;
use crate::load::{Throughput, Transport, nginx, set_congestion};
use crate::site::{INTERFACES, Site, UNTRUSTED};

/// Uplinks: Mbit/s, and round trip in ms.
const UPLINKS: [(u64, u64); 2] = [(40, 20), (20, 60)];
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
pub(super) const WEB: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 80);
/// Port of nginx, which has the objects of a page.
const PAGE: u16 = 8080;
/// Objects of a page, their size in bytes, and how many a browser fetches at a time.
const OBJECTS: usize = 50;
const SIZE: usize = 20_000;
const AT_A_TIME: usize = 6;
/// Streams beside each other.
const MANY: usize = 10;
pub(super) const RULE: &str = "[[rule]]\nbump = \"seal\"\nall = true\n";

/// Way from a home to the Internet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Road {
    /// One of the uplinks.
    Uplink(usize),
    /// A tunnel to the server, by the better uplink.
    WireguardGo,
    /// A proxy at home and one on the server, with kernel MPTCP between them.
    Proxies,
    /// dibs with the server as its exit.
    Exit,
}

/// Rates in bit/s, and the time that a page takes.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    down: f64,
    up: f64,
    many_down: f64,
    many_up: f64,
    page_ms: f64,
}

/// A home, its way to the Internet, and what lives as long as they.
struct Home {
    contestant: Contestant,
    _server: Host,
    _nginx: Process,
}

impl Road {
    fn label(self) -> &'static str {
        match self {
            Self::Uplink(0) => "first uplink alone",
            Self::Uplink(_) => "second uplink alone",
            Self::WireguardGo => "wireguard-go, first uplink",
            Self::Proxies => "kernel MPTCP between two proxies",
            Self::Exit => "dibs, seal",
        }
    }
}

/// Each road: one stream and ten, down and up, and a page.
pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut notes = Vec::new();
    let mut roads = vec![Road::Uplink(0), Road::Uplink(1)];
    match is_missing("wireguard-go") {
        true => notes.push("no wireguard-go: install its Debian package".to_owned()),
        false => roads.push(Road::WireguardGo),
    }
    roads.extend([Road::Proxies, Road::Exit]);
    let mut lab = Lab::new()?;
    let homes = roads.iter().enumerate().map(|(number, &road)| {
        let home = home(stage, &mut lab, number, road);
        home.with_context(|| road.label())
    });
    let (contestants, _held): (Vec<_>, Vec<_>) = homes
        .collect::<Result<Vec<Home>>>()?
        .into_iter()
        .map(|home| (home.contestant, (home._server, home._nginx)))
        .unzip();
    let [first, second] = UPLINKS.map(|(rate, trip)| format!("{rate} Mbit/s, {trip} ms"));
    let title = stage.titled(&format!(
        "The Internet behind a server, by two uplinks: {first}; {second}"
    ));
    let said = |turn: &Turn| {
        let rates = [turn.down, turn.up, turn.many_down, turn.many_up]
            .map(|rate| format!("{:.1}", rate / 1e6));
        format!(
            "{} Mbit/s, a page in {:.0} ms",
            rates.join(", "),
            turn.page_ms
        )
    };
    let all = stage.rounds(&title, &contestants, |of| turn(stage, of), said)?;
    let table = Table::of(
        &title,
        "road",
        &all,
        figures!(turn:
            "one stream down, Mbit/s", 1, turn.down / 1e6;
            "up", 1, turn.up / 1e6;
            "ten streams down", 1, turn.many_down / 1e6;
            "up", 1, turn.many_up / 1e6;
            "page of 50 objects, ms", 0, turn.page_ms;
        ),
    )?;
    Ok(Table {
        ratios: ratios(&all),
        notes,
        ..table
    })
}

/// dibs beside the sum of what each uplink makes alone, and beside the others; the medians of the rounds' ratios.
fn ratios(all: &Turns<Turn>) -> Vec<Ratio> {
    let dibs = Road::Exit.label();
    let of = |road: Road| {
        let found = all.iter().find(|(label, _)| *label == road.label());
        found.map_or(&[][..], |(_, turns)| turns)
    };
    let of_sum = |what: &str, rate: fn(&Turn) -> f64| {
        let alone = of(Road::Uplink(0)).iter().zip(of(Road::Uplink(1)));
        let both = of(Road::Exit).iter().zip(alone);
        let ratio = both.map(|(dibs, (first, second))| rate(dibs) / (rate(first) + rate(second)));
        let what = format!("{what}: {dibs} / the sum of both uplinks alone");
        Ratio::new(what, super::median(ratio)).least(0.93)
    };
    let mut ratios = vec![
        of_sum("one stream down", |turn| turn.down),
        of_sum("one stream up", |turn| turn.up),
        of_sum("ten streams down", |turn| turn.many_down),
        of_sum("ten streams up", |turn| turn.many_up),
    ];
    for other in [Road::Uplink(0), Road::WireguardGo, Road::Proxies] {
        let beside = |what, value| Ratio::beside(all, what, (dibs, other.label()), value);
        ratios.extend(beside("one stream down", |turn| turn.down));
        let most = (other == Road::Uplink(0)).then_some(1.0);
        let page = beside("page", |turn| turn.page_ms);
        ratios.extend(page.map(|ratio| ratio.most(most)));
    }
    ratios
}

fn turn(stage: &Stage<'_>, of: &Contestant) -> Result<Turn> {
    let rate = |load: Throughput| -> Result<f64> {
        let report = load.run(&of.site.a, &of.site.b)?;
        Ok(report.bits_per_second)
    };
    let load = || stage.load(of);
    let turn = Turn {
        down: rate(load().down())?,
        up: rate(load())?,
        many_down: rate(load().down().streams(MANY))?,
        many_up: rate(load().streams(MANY))?,
        page_ms: page(of)?,
    };
    Ok(turn)
}

/// Milliseconds in which a page is there, with all its objects.
fn page(of: &Contestant) -> Result<f64> {
    let mut command = of.site.a.command("curl");
    command.args([
        "--silent",
        "--show-error",
        "--fail",
        "--parallel",
        "--output",
        "/dev/null",
    ]);
    command.args(["--parallel-max", &AT_A_TIME.to_string()]);
    command.arg(format!("http://{}:{PAGE}/[1-{OBJECTS}]", of.to.ip()));
    let start = Instant::now();
    of.site
        .a
        .run_within(HANG, command)
        .context("curl is of the Debian package curl")?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// A home of this number, and everything on its road.
fn home(stage: &Stage<'_>, lab: &mut Lab, number: usize, road: Road) -> Result<Home> {
    let names = ["home", "carrier", "server", "web"].map(|name| format!("{name}{number}"));
    let [name, carrier, server, web] = names.each_ref().map(String::as_str);
    let swapped = road == Road::Uplink(1);
    let site = Site::new(lab, [name, carrier], UPLINKS.len(), |interface, link| {
        let (rate, trip) = UPLINKS[usize::from((interface == UNTRUSTED) != swapped)];
        let trip = Duration::from_millis(trip);
        link.emulated(Conditions::new().rate(rate * 1_000_000).delay(trip / 2))
    })?;
    let (server, web) = (lab.host(server)?, lab.host(web)?);
    let Site {
        a: home,
        b: carrier,
        ..
    } = &site;
    for (port, gateway, host, interface, at) in [
        ("srv0", "203.0.113.1", &server, "wan0", SERVER),
        ("web0", "192.0.2.1", &web, "eth0", WEB),
    ] {
        let (near, far) = (format!("{gateway}/24"), format!("{at}/24"));
        lab.link(LinkSpec::new(carrier, port, &near, host, interface, &far))?;
        host.run(&format!("ip route add default via {gateway}"))?;
    }
    masquerade(carrier, "{ srv0, web0 }")?;
    masquerade(&server, "wan0")?;
    for (metric, uplink) in INTERFACES[..UPLINKS.len()].iter().enumerate() {
        let via = crate::site::addresses(metric)[1];
        home.run(&format!(
            "ip route add default via {via} dev {uplink} metric {}",
            metric + 1
        ))?;
    }
    std::fs::create_dir(web.run_dir().join("page")).context("a page")?;
    std::fs::write(web.run_dir().join("page/object"), vec![0; SIZE]).context("an object")?;
    let nginx = nginx(
        &web,
        PAGE,
        "root /run/page; location / { try_files /object =404; }",
    )?;
    let mut contestant = Contestant {
        label: road.label().to_owned(),
        to: SocketAddr::from((WEB, PORT)),
        transport: Transport::Tcp,
        daemons: None,
        on_bump: false,
        tunnel: None,
        site: Site { b: web, ..site },
    };
    match road {
        Road::Uplink(_) => {}
        Road::WireguardGo => {
            let near = crate::site::addresses(0)[0];
            let [home, server] = [(&contestant.site.a, near), (&server, SERVER.into())];
            contestant.tunnel = Some(baseline::wireguard_go(home, server, Some(WEB.into()))?);
            home.0.run(&format!("ip route add {WEB} dev wg0"))?;
        }
        Road::Proxies => {
            proxies(stage.congestion, &contestant.site.a, &server)?;
            contestant.to.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        Road::Exit => contestant.daemons = Some(exit(stage, &contestant.site.a, &server)?),
    }
    Ok(Home {
        contestant,
        _server: server,
        _nginx: nginx,
    })
}

/// Forwards, and translates what leaves by these interfaces.
pub(super) fn masquerade(host: &Host, interfaces: &str) -> Result<()> {
    host.sysctl("net.ipv4.ip_forward", "1")?;
    let rule = "type nat hook postrouting priority srcnat;";
    host.shell(&format!(
        "nft add table ip home\nnft 'add chain ip home out {{ {rule} }}'\n\
         nft 'add rule ip home out oifname {interfaces} masquerade'"
    ))?;
    Ok(())
}

/// dibsd at home and on the server.
fn exit(stage: &Stage<'_>, home: &Host, server: &Host) -> Result<[dibs::Dibsd; 2]> {
    let [(mut near, near_key), (mut far, far_key)] =
        [stage.programs.on(home)?, stage.programs.on(server)?];
    let here: IpAddr = SERVER.into();
    let paths: Vec<PathSpec> = Site::paths(UPLINKS.len());
    let endpoint = SocketAddr::new(here, dibs::PORT);
    let endpoints: Vec<_> = paths.iter().map(|path| (path.name, endpoint)).collect();
    let peer = Peer {
        name: "server",
        public_key: &far_key,
        addresses: &[format!("\"{SERVER}/32\""), "\"0.0.0.0/0\"".to_owned()],
        endpoints: &endpoints,
    };
    let scheduler = stage.options.scheduler.as_ref();
    let scheduler = scheduler.map(|name| format!("scheduler = \"{name}\""));
    let settings = Settings {
        daemon: &scheduler.clone().unwrap_or_default(),
        tables: RULE,
    };
    near.configure(&configuration(&paths, &peer, settings))?;
    far.configure(&of_server(&scheduler.unwrap_or_default(), &[near_key]))?;
    far.spawn()?;
    near.spawn()?;
    near.wait_until_joined(paths.len())?;
    Ok([near, far])
}

/// The server's configuration, with further lines of `[daemon]`, for peers of these keys.
pub(super) fn of_server(daemon: &str, keys: &[String]) -> String {
    let peers = keys.iter().zip(2..).map(|(key, number): (_, u8)| {
        format!("[[peer]]\nname = \"home{number}\"\npublic_key = \"{key}\"\nappears_as = [\"10.77.0.{number}\"]\n")
    });
    format!(
        "[daemon]\nprivate_key_file = \"/run/dibs/private.key\"\nstate_dir = \"/run/dibs/lib\"\nexit = true\n{daemon}\n\
         [[path]]\nname = \"wan\"\ninterface = \"wan0\"\ntrust = \"trusted\"\n{}",
        peers.collect::<String>()
    )
}

/// A proxy at home, which leads to one on the server by MPTCP, which leads to the web: as a household would have it that wants
/// the sum of its uplinks from the kernel alone.
fn proxies(congestion: &str, home: &Host, server: &Host) -> Result<()> {
    baseline::mptcp(home, server, &[])?;
    let second = crate::site::addresses(1)[0];
    home.run(&format!(
        "ip mptcp endpoint add {second} dev {UNTRUSTED} subflow"
    ))?;
    for port in [PORT, PAGE] {
        let at = |ip: Ipv4Addr| SocketAddr::from((ip, port));
        let between = (Transport::Mptcp, at(SERVER));
        let far = (Transport::Tcp, at(WEB));
        relay(server, between, far, congestion)?;
        let local = (Transport::Tcp, at(Ipv4Addr::LOCALHOST));
        relay(home, local, between, congestion)?;
    }
    Ok(())
}

/// Leads each connection to a host on to another, until the program ends.
fn relay(
    host: &Host,
    (transport, at): (Transport, SocketAddr),
    (onward, to): (Transport, SocketAddr),
    congestion: &str,
) -> Result<()> {
    let listener = transport.listen(host, at)?;
    listener.set_nonblocking(false)?;
    let congestion = congestion.to_owned();
    host.thread("relay", move || -> Result<()> {
        for near in listener.incoming() {
            let (near, far) = (near?, onward.connect_here(to)?);
            for (from, to) in [(&near, &far), (&far, &near)] {
                set_congestion(to, &congestion)?;
                let (from, to) = (from.try_clone()?, to.try_clone()?);
                std::thread::Builder::new().spawn(move || copy(&from, &to))?;
            }
        }
        Ok(())
    })
    .map(drop)
}

/// Copies a direction to its end. One that breaks shows at both ends of the load.
fn copy(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
