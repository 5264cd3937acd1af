//! Metrics for Prometheus: over HTTP, at the loopback address that the configuration names.
//!
//! A scrape is told what `dibsctl status` is, in the format OpenMetrics 1.0. Whoever is on this host may
//! scrape, so nothing is told of single connections; labels are names out of the configuration and of counters,
//! and so bounded in number.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use dibs_control::{BackstopState, PathInfo, PathState, PeerState, Status};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::caller::Caller;
use crate::daemon::Daemon;

/// Who scrapes is served beside so many others at most; more wait.
const CLIENTS: usize = 4;
/// A client has as long for its request, and to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// More than any scraper sends.
const MAX_REQUEST: usize = 8 << 10;
/// Between two tries to accept while there are no descriptors.
const PAUSE: Duration = Duration::from_millis(100);

const CONTENT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

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

/// Serves scrapes without end. Runs inside a [`tokio::task::LocalSet`].
pub(crate) async fn serve(daemon: Rc<Daemon>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(CLIENTS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors, most likely: those in use have to end first.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let daemon = Rc::clone(&daemon);
        tokio::task::spawn_local(async move {
            let _place = place;
            if let Err(error) = client(&daemon, stream).await {
                tracing::debug!("metrics: {error}");
            }
        });
    }
}

async fn client(daemon: &Daemon, mut stream: TcpStream) -> io::Result<()> {
    let request = timeout(CLIENT_TIMEOUT, request(&mut stream)).await??;
    let (status, kind, body) = match asked(&request) {
        Asked::Metrics => match daemon.status(Caller { uid: 0 }).await {
            Ok(status) => match text(&status) {
                Ok(text) => ("200 OK", CONTENT, text),
                Err(error) => ("500 Internal Server Error", PLAIN, format!("{error}\n")),
            },
            Err(why) => ("503 Service Unavailable", PLAIN, format!("{why}\n")),
        },
        Asked::Elsewhere => ("404 Not Found", PLAIN, "metrics are at /metrics\n".into()),
        Asked::Otherwise => ("405 Method Not Allowed", PLAIN, "metrics are got\n".into()),
        Asked::Nonsense => ("400 Bad Request", PLAIN, "this is no request\n".into()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    );
    timeout(CLIENT_TIMEOUT, stream.write_all(answer.as_bytes())).await??;
    timeout(CLIENT_TIMEOUT, stream.shutdown()).await?
}

/// What came before the first empty line, as far as there is room for it.
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

/// What a request is for.
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
    let uptime = one(status.uptime as f64);
    metrics.state(
        "uptime",
        "Time since dibsd started",
        Some(Unit::Seconds),
        uptime,
    );
    let help = "Live connections to peers, plain ones too";
    metrics.state("connections", help, None, one(status.connections as f64));
    let bumps = { status.bumps.iter() }
        .map(|bump| (vec![("bump", bump.name.clone())], bump.connections as f64));
    metrics.state(
        "bump_connections",
        "Live connections on a bump",
        None,
        bumps,
    );
    let help = "Warnings that dibsctl status shows";
    metrics.state("warnings", help, None, one(status.warnings.len() as f64));
    let stands = !matches!(
        status.backstop.state,
        BackstopState::Missing | BackstopState::Failed
    );
    let help = "Whether the backstop stands, or is not needed";
    metrics.state("backstop_up", help, None, one(f64::from(u8::from(stands))));
    let counted =
        { status.counters.iter() }.map(|(name, value)| (vec![("event", name.clone())], *value));
    let help = "What was counted since the start, drops by reason among it";
    metrics.count("events", help, None, counted);
}

fn of_peers(metrics: &mut Metrics, status: &Status) {
    let peers = || status.peers.iter();
    let label = |name: &String| vec![("peer", name.clone())];
    let up = peers().map(|peer| {
        let up = peer.state == PeerState::Established;
        (label(&peer.name), f64::from(u8::from(up)))
    });
    metrics.state("peer_session_up", "Whether there is a session", None, up);
    let on = peers().map(|peer| (label(&peer.name), peer.connections as f64));
    let help = "Live connections to the peer that are on a bump";
    metrics.state("peer_connections", help, None, on);
}

#[expect(clippy::too_many_lines, reason = "a table of metrics")]
fn of_paths(metrics: &mut Metrics, all: &[PathInfo]) {
    let label = |path: &PathInfo| vec![("path", path.name.clone()), ("peer", path.peer.clone())];
    // While a path moves there are two of the name: the states are those of the one that carries data.
    let mut carrying: BTreeMap<_, &PathInfo> = BTreeMap::new();
    for path in all {
        let place = carrying.entry((&path.name, &path.peer)).or_insert(path);
        if place.state != PathState::Up {
            *place = path;
        }
    }
    let paths = || carrying.values().copied();
    let flag = |of: fn(&PathInfo) -> bool| {
        paths().map(move |path| (label(path), f64::from(u8::from(of(path)))))
    };
    let number = |of: fn(&PathInfo) -> Option<u64>, scale: f64| {
        paths().filter_map(move |path| Some((label(path), of(path)? as f64 / scale)))
    };
    let sum = |of: fn(&PathInfo) -> u64| all.iter().map(move |path| (label(path), of(path)));
    let (seconds, bytes) = (|| Some(Unit::Seconds), || Some(Unit::Bytes));

    let help = "Whether the path carries datagrams";
    metrics.state(
        "path_up",
        help,
        None,
        flag(|path| path.state == PathState::Up),
    );
    let help = "Whether the path may carry new data";
    metrics.state(
        "path_usable",
        help,
        None,
        flag(|path| path.unused.is_none()),
    );
    let help = "Smoothed round trip";
    metrics.state(
        "path_rtt",
        help,
        seconds(),
        number(|path| path.srtt_us, 1e6),
    );
    let help = "Least round trip";
    metrics.state(
        "path_min_rtt",
        help,
        seconds(),
        number(|path| path.min_rtt_us, 1e6),
    );
    let help = "Variation of the round trip";
    metrics.state(
        "path_rtt_variation",
        help,
        seconds(),
        number(|path| path.rttvar_us, 1e6),
    );
    let loss = paths().map(|path| (label(path), path.loss));
    let help = "Part of the datagrams that is lost lately";
    metrics.state(
        "path_loss",
        help,
        Some(Unit::Other("ratio".to_owned())),
        loss,
    );
    metrics.count(
        "path_lost_datagrams",
        "Datagrams lost",
        None,
        sum(|path| path.lost),
    );
    metrics.count(
        "path_marked_datagrams",
        "Datagrams sent that a router has marked for congestion (ECN)",
        None,
        sum(|path| path.marked),
    );
    metrics.count(
        "path_sent",
        "Datagrams sent",
        bytes(),
        sum(|path| path.bytes_sent),
    );
    let help = "Datagrams received";
    metrics.count(
        "path_received",
        help,
        bytes(),
        sum(|path| path.bytes_received),
    );
    let help = "Congestion window";
    metrics.state(
        "path_congestion_window",
        help,
        bytes(),
        number(|path| Some(path.cwnd), 1.0),
    );
    let help = "What waits for acknowledgement";
    metrics.state(
        "path_in_flight",
        help,
        bytes(),
        number(|path| Some(path.in_flight), 1.0),
    );
    let help = "Largest UDP payload";
    metrics.state(
        "path_mtu",
        help,
        bytes(),
        number(|path| Some(path.mtu.into()), 1.0),
    );
    let help = "What the path may carry in this month, both ways, to all peers";
    metrics.state(
        "path_volume_limit",
        help,
        bytes(),
        number(|path| path.volume, 1.0),
    );
    let help = "What the path has carried in this month of that";
    metrics.state(
        "path_volume_used",
        help,
        bytes(),
        number(|path| path.volume_used, 1.0),
    );
}

#[cfg(test)]
mod tests;
