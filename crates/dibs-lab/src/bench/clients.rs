//! Fifty clients of one server, each with a hundred connections to a host in the Internet: the server's memory and processor time.
//!
//! | host     | interface | addresses                        |
//! |----------|-----------|----------------------------------|
//! | client N | `eth0`    | `10.1.N.1`                       |
//! | carrier  | `cN`      | `10.1.N.2`; translates addresses |
//! | server   | `wan0`    | `203.0.113.7`                    |
//! | web      | `eth0`    | `192.0.2.80`                     |

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{Host, Process};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use super::exit::{RULE, SERVER, WEB, masquerade, of_server};
use super::report::{Ratio, Table, figures};
use super::system::PORT;
use super::{Stage, is_missing};
use crate::baseline;
use crate::dibs::{self, Dibsd, PathSpec, Peer, Settings, Trust, configuration};
use crate::lab::Lab;
use crate::link::LinkSpec;
use crate::load::{Transport, join, nginx, percentile};
use crate::processor::{Processor, memory_of, time_of};

const CLIENTS: usize = 50;
/// Connections of a client.
const EACH: usize = 100;
/// Time between two requests of a connection.
const PERIOD: Duration = Duration::from_secs(2);
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: web\r\n\r\n";
/// Bytes of an answer beside its head, the last of which are these.
const ANSWER: usize = 1000;
const END: &str = "end.";

/// Way from the clients to the Internet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Road {
    Direct,
    WireguardGo,
    Exit,
}

/// Figures of a turn. Times of the processor are in percent of one processor.
#[derive(Clone, Debug, Serialize)]
struct Turn {
    /// Seconds until all connections are there.
    opening_s: f64,
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    server_processor: f64,
    /// All clients' daemons.
    clients_processor: f64,
    machine_processor: f64,
    server_bytes_before: u64,
    server_bytes: u64,
    /// The mean of the clients' daemons.
    client_bytes: u64,
}

/// Hosts, and what runs on them.
struct World {
    clients: Vec<Host>,
    /// Processes of wireguard-go, the server's first.
    tunnels: Vec<Process>,
    /// Daemons of dibs, the server's first.
    daemons: Vec<Dibsd>,
    _others: [Host; 3],
    _nginx: Process,
}

impl Road {
    fn label(self) -> &'static str {
        match self {
            Self::Direct => "no tunnel",
            Self::WireguardGo => "wireguard-go",
            Self::Exit => "dibs, seal",
        }
    }
}

/// Each road in turn, in a new world.
pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut notes = Vec::new();
    let mut roads = vec![Road::Direct];
    match is_missing("wireguard-go") {
        true => notes.push("no wireguard-go: install its Debian package".to_owned()),
        false => roads.push(Road::WireguardGo),
    }
    roads.push(Road::Exit);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let title = format!(
        "{CLIENTS} clients of one server, {EACH} connections each, a request every two seconds on each"
    );
    let begun = roads
        .iter()
        .map(|road| (road.label().to_owned(), Vec::new()));
    let mut all: Vec<(String, Vec<Turn>)> = begun.collect();
    for round in 1..=stage.options.rounds {
        for (road, (label, turns)) in roads.iter().zip(&mut all) {
            let turn = World::new(stage, *road).and_then(|world| world.turn(stage));
            let turn = turn.with_context(|| label.clone())?;
            eprintln!("{title}, round {round}, {label}: {turn:?}");
            turns.push(turn);
        }
    }
    let table = Table::of(
        &title,
        "road",
        &all,
        figures!(turn:
            "all open after, s", 1, turn.opening_s;
            "answers/s", 0, turn.per_second;
            "p50, ms", 1, turn.p50_ms;
            "p99, ms", 1, turn.p99_ms;
            "processor of the server's daemon, %", 0, turn.server_processor;
            "of all clients'", 0, turn.clients_processor;
            "of the machine", 0, turn.machine_processor;
            "memory of the server's daemon before, MB", 1, turn.server_bytes_before as f64 / 1e6;
            "with the connections", 1, turn.server_bytes as f64 / 1e6;
            "of a client's", 1, turn.client_bytes as f64 / 1e6;
        ),
    )?;
    let names = (Road::Exit.label(), Road::WireguardGo.label());
    let beside = |what, value| Ratio::beside(&all, what, names, value);
    let ratios = [
        beside("processor of the server's daemon", |turn| {
            turn.server_processor
        }),
        beside("memory of the server's daemon", |turn| {
            turn.server_bytes as f64
        }),
    ];
    Ok(Table {
        ratios: ratios.into_iter().flatten().collect(),
        notes,
        ..table
    })
}

impl World {
    fn new(stage: &Stage<'_>, road: Road) -> Result<Self> {
        let mut lab = Lab::new()?;
        let (carrier, server, web) = (lab.host("carrier")?, lab.host("server")?, lab.host("web")?);
        let mut link = |port: &str, gateway: &str, host: &Host, interface, at: &str| {
            let [near, far] = [gateway, at].map(|address| format!("{address}/24"));
            lab.link(LinkSpec::new(&carrier, port, &near, host, interface, &far))?;
            host.run(&format!("ip route add default via {gateway}"))
        };
        link("srv0", "203.0.113.1", &server, "wan0", &SERVER.to_string())?;
        link("web0", "192.0.2.1", &web, "eth0", &WEB.to_string())?;
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let client = Host::new(&format!("client{number}"))?;
            let [gateway, own] = [2, 1].map(|end| format!("10.1.{number}.{end}"));
            link(&format!("c{number}"), &gateway, &client, "eth0", &own)?;
            clients.push(client);
        }
        masquerade(&carrier, "{ srv0, web0 }")?;
        masquerade(&server, "wan0")?;
        let body = "-".repeat(ANSWER - END.len()) + END;
        let answer =
            format!("default_type text/plain; keepalive_timeout 1h; return 200 \"{body}\";");
        let nginx = nginx(&web, PORT, &answer)?;
        let (mut tunnels, mut daemons) = (Vec::new(), Vec::new());
        match road {
            Road::Direct => {}
            Road::WireguardGo => {
                let at = (&server, SERVER.into());
                tunnels = baseline::wireguard_go_hub(at, &clients, WEB.into())?;
            }
            Road::Exit => daemons = exit(stage, &server, &clients)?,
        }
        Ok(Self {
            clients,
            tunnels,
            daemons,
            _others: [carrier, server, web],
            _nginx: nginx,
        })
    }

    fn turn(&self, stage: &Stage<'_>) -> Result<Turn> {
        let tunnels = self.tunnels.iter().map(Process::id);
        let daemons = self.daemons.iter().filter_map(Dibsd::pid);
        let all: Vec<u32> = tunnels.chain(daemons).collect();
        let (server, clients) = (&all[..all.len().min(1)], &all[all.len().min(1)..]);
        let memory = |of: &[u32]| of.iter().map(|pid| memory_of(*pid)).sum::<Result<u64>>();
        let time = |of: &[u32]| of.iter().map(|pid| time_of(*pid)).sum::<Result<Duration>>();
        let server_bytes_before = memory(server)?;
        let start = Instant::now();
        let opening = self.each("open", self.clients.iter().map(|_| open))?;
        let opening_s = start.elapsed().as_secs_f64();
        let length = stage.options.duration;
        let times = [time(server)?, time(clients)?];
        let (mut machine, start) = (Processor::new()?, Instant::now());
        let ask = opening.into_iter().map(|streams| {
            move || {
                let waited = ask(&streams, length)?;
                anyhow::Ok((waited, streams))
            }
        });
        let (waited, _open): (Vec<_>, Vec<_>) = self.each("ask", ask)?.into_iter().unzip();
        let mut waited = waited.concat();
        let elapsed = start.elapsed().as_secs_f64();
        let machine_processor = machine.used()?;
        let [server_processor, clients_processor] =
            [time(server)? - times[0], time(clients)? - times[1]]
                .map(|used| used.as_secs_f64() / elapsed * 100.0);
        waited.sort_unstable();
        let at = |share| percentile(&waited, share) / 1e3;
        if let Some(daemon) = self.daemons.first() {
            let listed: Vec<serde_json::Value> = daemon.ctl(&["conn", "list"])?;
            let on_bump = listed.iter().filter(|conn| conn["bump"] == "seal").count();
            ensure!(on_bump >= CLIENTS * EACH, "{on_bump} are on the bump");
        }
        Ok(Turn {
            opening_s,
            per_second: waited.len() as f64 / elapsed,
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            server_processor,
            clients_processor,
            machine_processor,
            server_bytes_before,
            server_bytes: memory(server)?,
            client_bytes: memory(clients)? / CLIENTS as u64,
        })
    }

    /// Has each client do something at the same time.
    fn each<T: Send + 'static, W: FnOnce() -> Result<T> + Send + 'static>(
        &self,
        name: &str,
        work: impl Iterator<Item = W>,
    ) -> Result<Vec<T>> {
        let threads = self.clients.iter().zip(work);
        let threads = threads.map(|(client, work)| client.thread(name, work));
        join(threads.collect::<Result<_>>()?)
    }
}

/// The connections of a client.
fn open() -> Result<Vec<TcpStream>> {
    let to = SocketAddr::from((WEB, PORT));
    let one = |_| Transport::Tcp.connect_here(to);
    let opened = (0..EACH).map(one).collect::<std::io::Result<_>>();
    opened.context("connect")
}

/// Asks on each of the connections in turn; the time from when each request was due to the end of its answer.
fn ask(streams: &[TcpStream], length: Duration) -> Result<Vec<Duration>> {
    let mut waited = Vec::new();
    let mut answer = [0; 4096];
    let start = Instant::now();
    for (number, mut stream) in (0..).zip(streams.iter().cycle()) {
        let due = PERIOD / EACH as u32 * number;
        if due >= length {
            break;
        }
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        stream.write_all(REQUEST).context("request")?;
        let mut read = 0;
        while !answer[..read].ends_with(END.as_bytes()) {
            let more = stream.read(&mut answer[read..]).context("answer")?;
            ensure!(more > 0, "an answer ended after {read} bytes");
            read += more;
        }
        waited.push(start.elapsed() - due);
    }
    Ok(waited)
}

/// dibsd on the server, which stands first, and on the clients.
fn exit(stage: &Stage<'_>, server: &Host, clients: &[Host]) -> Result<Vec<Dibsd>> {
    let (mut far, far_key) = stage.programs.on(server)?;
    let made = clients.iter().map(|client| stage.programs.on(client));
    let (mut all, keys): (Vec<Dibsd>, Vec<String>) =
        made.collect::<Result<Vec<_>>>()?.into_iter().unzip();
    far.configure(&of_server("", &keys))?;
    far.spawn()?;
    let path = PathSpec {
        name: "eth",
        interface: "eth0",
        trust: Trust::Trusted,
        ends: [SERVER.into(); 2],
    };
    let peer = Peer {
        name: "server",
        public_key: &far_key,
        addresses: &[format!("\"{SERVER}/32\""), "\"0.0.0.0/0\"".to_owned()],
        endpoints: &[(path.name, SocketAddr::from((SERVER, dibs::PORT)))],
    };
    let settings = Settings {
        daemon: "",
        tables: RULE,
    };
    for daemon in &mut all {
        daemon.configure(&configuration(std::slice::from_ref(&path), &peer, settings))?;
        daemon.spawn()?;
    }
    for daemon in &mut all {
        daemon.wait_until_joined(1)?;
    }
    all.insert(0, far);
    Ok(all)
}
