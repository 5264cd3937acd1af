//! Metrics for Prometheus: over HTTP, at the loopback address that the configuration names.
//!
//! A scrape is told what `dibsctl status` is, in the format OpenMetrics 1.0. Whoever is on this host may
//! scrape, so nothing is told of single connections; labels are names out of the configuration and of counters,
//! and so bounded in number. However many scrape, the daemon is asked once a second at most.
//!
//! Anybody on this host may connect, so nobody can keep others out or the daemon busy: there are few clients at once, and the
//! oldest that has sent no request yet, or does not read its answer, goes for one more.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use std::{fmt, io};

use dibs_control::{BackstopState, PathInfo, PathState, PeerState, Status};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Notify};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep, timeout};

/// Listens there; where that cannot be, says so in the log: steering does not depend on it.
pub(crate) async fn bind(address: SocketAddr) -> Option<TcpListener> {
    match TcpListener::bind(address).await {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::warn!(
                "metrics: cannot listen at {address}: {error}; name another address as metrics in \
                 [daemon], and start again"
            );
            None
        }
    }
}

/// Serves scrapes without end, of the status that `ask` brings. Runs inside a [`tokio::task::LocalSet`].
pub(crate) async fn serve<A>(ask: A, listener: TcpListener)
where
    A: AsyncFn() -> anyhow::Result<Status> + 'static,
{
    Rc::new(Server::new(Asking(ask), Limits::USUAL))
        .serve(listener)
        .await;
}

/// The source of the status.
struct Asking<A>(A);

impl<A: AsyncFn() -> anyhow::Result<Status>> Collects for Asking<A> {
    async fn collect(&self) -> Answer {
        match self.0().await {
            Ok(status) => match text(&status) {
                Ok(text) => Answer::metrics(text),
                Err(error) => Answer::plain("500 Internal Server Error", format!("{error}\n")),
            },
            Err(why) => Answer::plain("503 Service Unavailable", format!("{why:#}\n")),
        }
    }
}

type Labels = Vec<(&'static str, String)>;
type Number = Gauge<f64, AtomicU64>;

/// Metrics as they are registered: by name, help and unit.
struct Metrics(Registry);

impl Metrics {
    fn count<N: Into<String>>(
        &mut self,
        name: N,
        help: &str,
        unit: Option<Unit>,
        values: impl IntoIterator<Item = (Labels, u64)>,
    ) {
        let family = Family::<Labels, Counter>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).inc_by(value);
        }
        self.add(name, help, unit, family);
    }

    fn state<N: Into<String>>(
        &mut self,
        name: N,
        help: &str,
        unit: Option<Unit>,
        values: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        let family = Family::<Labels, Number>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(value);
        }
        self.add(name, help, unit, family);
    }

    fn add(
        &mut self,
        name: impl Into<String>,
        help: &str,
        unit: Option<Unit>,
        metric: impl Metric,
    ) {
        match unit {
            Some(unit) => self.0.register_with_unit(name, help, unit, metric),
            None => self.0.register(name, help, metric),
        }
    }
}

/// The metrics of a status, in the text format of OpenMetrics.
fn text(status: &Status) -> Result<String, fmt::Error> {
    let mut metrics = Metrics(Registry::with_prefix("dibs"));
    // A gauge: many readers do not know the type `info`.
    let version = vec![("version", status.version.clone())];
    metrics.state("build_info", "Version of dibsd", None, [(version, 1.0)]);
    of_daemon(&mut metrics, status);
    of_peers(&mut metrics, status);
    of_paths(&mut metrics, &status.paths);
    let mut text = String::new();
    encode(&mut text, &metrics.0)?;
    Ok(text)
}

fn of_daemon(metrics: &mut Metrics, status: &Status) {
    let one = |value: f64| [(Labels::new(), value)];
    let help = "Time since dibsd started";
    let uptime = one(status.uptime as f64);
    metrics.state("uptime", help, Some(Unit::Seconds), uptime);
    let help = "Open connections to peers, with and without a bump";
    metrics.state("connections", help, None, one(status.connections as f64));
    let bumps = { status.bumps.iter() }
        .map(|bump| (vec![("bump", bump.name.clone())], bump.connections as f64));
    let help = "Open connections on a bump";
    metrics.state("bump_connections", help, None, bumps);
    let help = "Warnings that dibsctl status shows";
    metrics.state("warnings", help, None, one(status.warnings.len() as f64));
    let stands = !matches!(
        status.backstop.state,
        BackstopState::Missing | BackstopState::Failed
    );
    let help = "1 if the kill switch in nftables works or is not needed";
    metrics.state("backstop_up", help, None, one(f64::from(u8::from(stands))));
    let counted =
        { status.counters.iter() }.map(|(name, value)| (vec![("event", name.clone())], *value));
    let help = "Events and drops since the start, by name";
    metrics.count("events", help, None, counted);
}

fn of_peers(metrics: &mut Metrics, status: &Status) {
    let peers = || status.peers.iter();
    let label = |name: &String| vec![("peer", name.clone())];
    let up = peers().map(|peer| {
        let up = peer.state == PeerState::Established;
        (label(&peer.name), f64::from(u8::from(up)))
    });
    metrics.state("peer_session_up", "1 if there is a session", None, up);
    let on = peers().map(|peer| (label(&peer.name), peer.connections as f64));
    let help = "Open connections to the peer on a bump";
    metrics.state("peer_connections", help, None, on);
}

fn of_paths(metrics: &mut Metrics, all: &[PathInfo]) {
    type State = fn(&PathInfo) -> Option<f64>;
    type Count = fn(&PathInfo) -> u64;
    let label = |path: &PathInfo| vec![("path", path.name.clone()), ("peer", path.peer.clone())];
    // While a path moves there are two of the name: the states are those of the one that carries data.
    let mut carrying: BTreeMap<_, &PathInfo> = BTreeMap::new();
    for path in all {
        let place = carrying.entry((&path.name, &path.peer)).or_insert(path);
        if place.state != PathState::Up {
            *place = path;
        }
    }
    let (seconds, bytes) = (|| Some(Unit::Seconds), || Some(Unit::Bytes));
    let ratio = Some(Unit::Other("ratio".to_owned()));
    let limit = "Data cap of the path for this month, both directions, all peers";
    let used = "Data of the data cap that is used";
    let states: [(_, _, _, State); 11] = [
        ("up", "1 if the path carries datagrams", None, |path| {
            flag(path.state == PathState::Up)
        }),
        ("usable", "1 if the path may carry new data", None, |path| {
            flag(path.unused.is_none())
        }),
        ("rtt", "Smoothed round trip", seconds(), |path| {
            micros(path.srtt_us)
        }),
        ("min_rtt", "Shortest round trip", seconds(), |path| {
            micros(path.min_rtt_us)
        }),
        (
            "rtt_variation",
            "Variation of the round trip",
            seconds(),
            |path| micros(path.rttvar_us),
        ),
        (
            "loss",
            "Part of recent datagrams that was lost",
            ratio,
            |path| Some(path.loss),
        ),
        ("congestion_window", "Congestion window", bytes(), |path| {
            Some(path.cwnd as f64)
        }),
        (
            "in_flight",
            "Data that waits for acknowledgement",
            bytes(),
            |path| Some(path.in_flight as f64),
        ),
        ("mtu", "Largest UDP payload", bytes(), |path| {
            Some(path.mtu.into())
        }),
        ("volume_limit", limit, bytes(), |path| {
            Some(path.volume? as f64)
        }),
        ("volume_used", used, bytes(), |path| {
            Some(path.volume_used? as f64)
        }),
    ];
    for (name, help, unit, of) in states {
        let values = carrying.values();
        let values = values.filter_map(|path| Some((label(path), of(path)?)));
        metrics.state(format!("path_{name}"), help, unit, values);
    }
    let marked = "Datagrams sent that a router has marked for congestion (ECN)";
    let counts: [(_, _, _, Count); 4] = [
        ("lost_datagrams", "Datagrams lost", None, |path| path.lost),
        ("marked_datagrams", marked, None, |path| path.marked),
        ("sent", "Datagrams sent", bytes(), |path| path.bytes_sent),
        ("received", "Datagrams received", bytes(), |path| {
            path.bytes_received
        }),
    ];
    for (name, help, unit, of) in counts {
        let values = all.iter().map(|path| (label(path), of(path)));
        metrics.count(format!("path_{name}"), help, unit, values);
    }
}

fn flag(is: bool) -> Option<f64> {
    Some(f64::from(u8::from(is)))
}

fn micros(time: Option<u64>) -> Option<f64> {
    Some(time? as f64 / 1e6)
}

/// Clients at once.
const CLIENTS: usize = 8;
/// More than any scraper sends.
const MAX_REQUEST: usize = 8 << 10;
/// Between two tries to accept while there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// An answer to a client.
struct Answer {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl Answer {
    /// With metrics.
    fn metrics(body: String) -> Self {
        Self {
            status: "200 OK",
            kind: CONTENT,
            body,
        }
    }

    /// With a sentence.
    fn plain(status: &'static str, body: impl Into<String>) -> Self {
        Self {
            status,
            kind: PLAIN,
            body: body.into(),
        }
    }
}

/// The source of metrics.
trait Collects {
    /// All of them, as they are now.
    async fn collect(&self) -> Answer;
}

/// How long things take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Metrics are not collected again before.
    fresh: Duration,
    /// A client's time for its request: it sends that as soon as it is connected.
    request: Duration,
    /// A client's time to read the answer.
    answer: Duration,
}

impl Limits {
    /// Metrics of the daemon.
    const USUAL: Self = Self {
        fresh: Duration::from_secs(1),
        request: Duration::from_secs(2),
        answer: Duration::from_secs(10),
    };
}

/// See the module.
struct Server<C> {
    source: C,
    limits: Limits,
    /// Metrics that were collected last, and when. Whoever comes while that is done waits for it.
    collected: Mutex<Option<(Instant, Rc<Answer>)>>,
    clients: RefCell<VecDeque<Rc<Client>>>,
    left: Notify,
}

/// A connected client.
#[derive(Default)]
struct Client {
    /// The client waits for metrics.
    waits: Cell<bool>,
    evicted: Notify,
}

impl<C: Collects + 'static> Server<C> {
    fn new(source: C, limits: Limits) -> Self {
        Self {
            source,
            limits,
            collected: Mutex::default(),
            clients: RefCell::default(),
            left: Notify::new(),
        }
    }

    /// Serves without end. Runs inside a [`tokio::task::LocalSet`].
    async fn serve(self: Rc<Self>, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                // Out of descriptors, most likely: those in use have to end first.
                sleep(PAUSE).await;
                continue;
            };
            self.make_room().await;
            let client = Rc::new(Client::default());
            self.clients.borrow_mut().push_back(Rc::clone(&client));
            tokio::task::spawn_local(Rc::clone(&self).attend(client, stream));
            // A request that is there already is read before another client comes.
            yield_now().await;
        }
    }

    async fn make_room(&self) {
        while self.clients.borrow().len() >= CLIENTS {
            let idle = {
                let mut clients = self.clients.borrow_mut();
                let oldest = clients.iter().position(|client| !client.waits.get());
                oldest.and_then(|at| clients.remove(at))
            };
            match idle {
                Some(client) => client.evicted.notify_one(),
                // They all wait for the same, and will have it.
                None => self.left.notified().await,
            }
        }
    }

    async fn attend(self: Rc<Self>, client: Rc<Client>, stream: TcpStream) {
        let served = tokio::select! {
            served = self.serve_client(&client, stream) => served,
            () = client.evicted.notified() => Err(io::Error::other("it gave way to others")),
        };
        if let Err(error) = served {
            tracing::debug!("metrics: {error}");
        }
        let mut clients = self.clients.borrow_mut();
        clients.retain(|other| !Rc::ptr_eq(other, &client));
        self.left.notify_one();
    }

    async fn serve_client(&self, client: &Client, mut stream: TcpStream) -> io::Result<()> {
        let request = timeout(self.limits.request, request(&mut stream)).await??;
        let answer = match asked(&request) {
            Asked::Metrics => {
                client.waits.set(true);
                let answer = self.metrics().await;
                client.waits.set(false);
                answer
            }
            Asked::Elsewhere => {
                Rc::new(Answer::plain("404 Not Found", "metrics are at /metrics\n"))
            }
            Asked::Otherwise => {
                Rc::new(Answer::plain("405 Method Not Allowed", "metrics are got\n"))
            }
            Asked::Nonsense => Rc::new(Answer::plain("400 Bad Request", "this is no request\n")),
        };
        let Answer { status, kind, body } = &*answer;
        let length = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{body}"
        );
        let answered = async {
            stream.write_all(text.as_bytes()).await?;
            stream.shutdown().await
        };
        timeout(self.limits.answer, answered).await?
    }

    async fn metrics(&self) -> Rc<Answer> {
        let mut collected = self.collected.lock().await;
        if let Some((at, answer)) = &*collected
            && at.elapsed() < self.limits.fresh
        {
            return Rc::clone(answer);
        }
        let answer = Rc::new(self.source.collect().await);
        *collected = Some((Instant::now(), Rc::clone(&answer)));
        answer
    }
}

/// Request up to the first empty line, as far as there is room for it.
async fn request(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while request.len() < MAX_REQUEST && !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut piece).await? {
            0 => break,
            len => request.extend_from_slice(&piece[..len]),
        }
    }
    Ok(request)
}

/// The aim of a request.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Metrics,
    Elsewhere,
    Otherwise,
    Nonsense,
}

fn asked(request: &[u8]) -> Asked {
    let line = request.split(|byte| *byte == b'\r').next();
    let line = line.and_then(|line| std::str::from_utf8(line).ok());
    let words: Vec<&str> = line.unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else {
        return Asked::Nonsense;
    };
    let path = target.split('?').next();
    match method {
        _ if !version.starts_with("HTTP/1.") => Asked::Nonsense,
        "GET" if path == Some("/metrics") => Asked::Metrics,
        "GET" => Asked::Elsewhere,
        _ => Asked::Otherwise,
    }
}

#[cfg(test)]
mod tests;
