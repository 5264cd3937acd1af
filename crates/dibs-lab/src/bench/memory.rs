//! What dibsd needs for connections that are idle, and for many busy ones.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;

use super::report::{Ratio, Table};
use super::system::{Contestant, PORT, Place, System};
use super::{Stage, plain_links};
use crate::dibs::Dibsd;
use crate::load::Transport;
use crate::load::sockets::PATIENCE;

/// Connections that say a word and fall silent.
const IDLE: usize = 5_000;
/// Connections that are never silent.
const BUSY: usize = 1_000;
/// Threads that keep them busy.
const THREADS: usize = 4;
/// Bytes that each writes at a time.
const PIECE: usize = 16 << 10;
/// The daemons look at all connections every two seconds, and hold more meanwhile: this is long enough for that.
const LOOKS: Duration = Duration::from_secs(5);
/// What the daemons hold is sampled so often: nothing tells of its maximum.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);
/// Of connections that stand, so many are described.
const TOLD: usize = 8;

/// What was seen, of the daemon that held more.
#[derive(Clone, Debug, Serialize)]
struct Seen {
    idle_connections: usize,
    bytes_before: u64,
    bytes_idle_most: u64,
    busy_connections: usize,
    bytes_busy_most: u64,
    busy_bits_per_second: f64,
    /// That one of them got no byte.
    busy_longest_gap_us: u64,
}

pub(super) fn run(stage: &Stage<'_>) -> Result<Table> {
    let mut place = Place::new(stage)?;
    let contestant = place.contestant(System::Scramble, System::Scramble.label(), plain_links)?;
    let seen = measure(stage, &contestant)?;
    let each = (seen.bytes_idle_most.saturating_sub(seen.bytes_before)) as f64 / IDLE as f64;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok(Table {
        title: "Resident memory of dibsd, of the end that holds more".to_owned(),
        columns: ["", "connections", "MiB"].map(str::to_owned).to_vec(),
        rows: vec![
            vec![
                "none".into(),
                "0".into(),
                format!("{:.1}", mib(seen.bytes_before)),
            ],
            vec![
                "idle, the most".into(),
                IDLE.to_string(),
                format!("{:.1}", mib(seen.bytes_idle_most)),
            ],
            vec![
                "busy, the most".into(),
                BUSY.to_string(),
                format!("{:.1}", mib(seen.bytes_busy_most)),
            ],
        ],
        ratios: vec![
            Ratio {
                what: "KiB an idle connection".to_owned(),
                value: each / 1024.0,
                least: None,
                most: Some(2.0),
            },
            Ratio {
                what: format!("MiB with {BUSY} busy connections"),
                value: mib(seen.bytes_busy_most),
                least: None,
                most: Some(200.0),
            },
        ],
        notes: vec![format!(
            "The busy ones moved {:.2} Gbit/s together; the longest that one of them got nothing was {:.1} s.",
            seen.busy_bits_per_second / 1e9,
            seen.busy_longest_gap_us as f64 / 1e6
        )],
        turns: serde_json::to_value(&seen)?,
    })
}

fn measure(stage: &Stage<'_>, contestant: &Contestant) -> Result<Seen> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let most = hard.min(4 * IDLE as u64).max(soft);
    setrlimit(Resource::RLIMIT_NOFILE, most, hard)?;
    let bytes_before = contestant.resident()?;
    let idle = connections(contestant, IDLE)?;
    let bytes_idle_most = resident_most(contestant, LOOKS)?;
    drop(idle);

    let busy = connections(contestant, BUSY)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut shares: Vec<(Vec<TcpStream>, Vec<TcpStream>)> = Vec::new();
    shares.resize_with(THREADS, Default::default);
    for (index, (near, far)) in busy.into_iter().enumerate() {
        let share = &mut shares[index % THREADS];
        share.0.push(near);
        share.1.push(far);
    }
    let (sender_ends, senders) = mpsc::channel();
    let (receiver_ends, receivers) = mpsc::channel();
    for (near, far) in shares {
        let stop = Arc::clone(&stop);
        let ends = sender_ends.clone();
        let sends = move || ends.send(send(near, &stop));
        contestant.site.a.thread("many send", sends)?;
        let ends = receiver_ends.clone();
        let receives = move || ends.send(receive(far));
        contestant.site.b.thread("many receive", receives)?;
    }
    drop((sender_ends, receiver_ends));
    let start = Instant::now();
    let bytes_busy_most = resident_most(contestant, stage.options.duration)?;
    stop.store(true, Relaxed);
    let (sent, _) = total(contestant, senders)?;
    let took = start.elapsed();
    let (received, longest_gap) = total(contestant, receivers)?;
    ensure!(sent == received, "{received} of {sent} bytes arrived");
    Ok(Seen {
        idle_connections: IDLE,
        bytes_before,
        bytes_idle_most,
        busy_connections: BUSY,
        bytes_busy_most,
        busy_bits_per_second: sent as f64 * 8.0 / took.as_secs_f64(),
        busy_longest_gap_us: longest_gap.as_micros() as u64,
    })
}

/// What a thread has moved, and the connections that it had left when nothing moved any more.
struct Ended {
    bytes: u64,
    /// That one of them got no byte.
    longest_gap: Duration,
    standing: Vec<TcpStream>,
}

impl Ended {
    const fn sender(bytes: u64, standing: Vec<TcpStream>) -> Self {
        Self {
            bytes,
            longest_gap: Duration::ZERO,
            standing,
        }
    }
}

/// What all threads of a side have moved, and the longest gap.
fn total(contestant: &Contestant, ends: mpsc::Receiver<Result<Ended>>) -> Result<(u64, Duration)> {
    let (mut bytes, mut longest_gap) = (0, Duration::ZERO);
    for _ in 0..THREADS {
        let ended = ends.recv().context("a thread panicked")??;
        // At once, as long as they stand.
        if !ended.standing.is_empty() {
            let what = describe(contestant, &ended.standing);
            bail!("no connection moved for {PATIENCE:?}\n{what}");
        }
        bytes += ended.bytes;
        longest_gap = longest_gap.max(ended.longest_gap);
    }
    Ok((bytes, longest_gap))
}

/// What both kernels and daemons say of connections that stand, and count.
fn describe(contestant: &Contestant, standing: &[TcpStream]) -> String {
    let mut text = format!("{} connections stand\n", standing.len());
    let ends = |stream: &TcpStream| Some((stream.local_addr().ok()?, stream.peer_addr().ok()?));
    let ends: Vec<_> = standing.iter().filter_map(ends).take(TOLD).collect();
    let of_them = |line: &&str| {
        let has = |end: &SocketAddr| line.contains(&end.to_string());
        ends.iter().any(|(local, remote)| has(local) && has(remote))
    };
    let hosts = [&contestant.site.a, &contestant.site.b];
    let daemons = contestant.daemons.iter().flatten();
    for (host, daemon) in hosts.into_iter().zip(daemons) {
        let mut tell = |what: &str, said: Result<String>| {
            let said = said.unwrap_or_else(|error| format!("{error:#}"));
            text += &format!("{}, {what}:\n{said}\n", host.name());
        };
        // One line each.
        let sockets = host.run("ss --tcp --numeric --all --info --extended --options --oneline");
        let sockets = sockets.map(|all| all.lines().filter(of_them).collect::<Vec<_>>().join("\n"));
        tell("ss", sockets);
        let tracked = host.run("conntrack --dump --proto tcp");
        let port = |line: &&str| {
            let mut ports = ends.iter().flat_map(|(a, b)| [a.port(), b.port()]);
            ports.any(|port| port != PORT && line.contains(&format!("sport={port} ")))
        };
        let tracked = tracked.map(|all| all.lines().filter(port).collect::<Vec<_>>().join("\n"));
        tell("conntrack", tracked);
        let listed = |daemon: &Dibsd| {
            let conns: Vec<serde_json::Value> = daemon.ctl(&["conn", "list"])?;
            let lines = conns.iter().map(ToString::to_string);
            let lines: Vec<_> = lines.filter(|line| of_them(&line.as_str())).collect();
            Ok(lines.join("\n"))
        };
        tell("dibsctl conn list", listed(daemon));
        let said = |words: &[&str]| {
            daemon
                .ctl(words)
                .map(|said: serde_json::Value| said.to_string())
        };
        tell("dibsctl status", said(&["status"]));
        tell("dibsctl path list", said(&["path", "list"]));
        tell("nstat", host.run("nstat --ignore --noupdate"));
    }
    text
}

/// Connections through the bump over each of which a byte went to and fro.
fn connections(contestant: &Contestant, count: usize) -> Result<Vec<(TcpStream, TcpStream)>> {
    let to = SocketAddr::new(contestant.to.ip(), PORT);
    let listener = Transport::Tcp.listen(&contestant.site.b, to)?;
    listener.set_nonblocking(false)?;
    socket2::SockRef::from(&listener).set_read_timeout(Some(PATIENCE))?;
    let mut pairs = Vec::with_capacity(count);
    for _ in 0..count {
        let mut near = Transport::Tcp.connect(&contestant.site.a, to)?;
        let (mut far, _) = listener.accept().context("accept")?;
        let mut byte = [7];
        near.write_all(&byte).context("ping")?;
        far.read_exact(&mut byte).context("ping")?;
        far.write_all(&byte).context("pong")?;
        near.read_exact(&mut byte).context("pong")?;
        pairs.push((near, far));
    }
    Ok(pairs)
}

/// Writes as much as goes to all of them in turn.
fn send(mut streams: Vec<TcpStream>, stop: &AtomicBool) -> Result<Ended> {
    let piece = [0x5a; PIECE];
    let mut sent = 0;
    for stream in &streams {
        stream.set_nonblocking(true)?;
    }
    while !stop.load(Relaxed) {
        let mut idle = true;
        for stream in &mut streams {
            match stream.write(&piece) {
                Ok(len) => {
                    sent += len as u64;
                    idle = false;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("write"),
            }
        }
        if idle && !wait(&streams, PollFlags::POLLOUT)? {
            return Ok(Ended::sender(sent, streams));
        }
    }
    Ok(Ended::sender(sent, Vec::new()))
}

/// Reads all of them in turn until they end.
fn receive(mut streams: Vec<TcpStream>) -> Result<Ended> {
    let mut room = [0; PIECE];
    let mut received = 0;
    let mut longest_gap = Duration::ZERO;
    for stream in &streams {
        stream.set_nonblocking(true)?;
    }
    let mut heard: HashMap<RawFd, Instant> = HashMap::new();
    let start = Instant::now();
    while !streams.is_empty() {
        let mut idle = true;
        let mut broken = None;
        streams.retain_mut(|stream| match stream.read(&mut room) {
            Ok(0) => false,
            Ok(len) => {
                received += len as u64;
                idle = false;
                let now = Instant::now();
                let last = heard.insert(stream.as_raw_fd(), now).unwrap_or(start);
                longest_gap = longest_gap.max(now - last);
                true
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => true,
            Err(error) => {
                broken = Some(error);
                false
            }
        });
        if let Some(error) = broken {
            return Err(error).context("read");
        }
        if idle && !streams.is_empty() && !wait(&streams, PollFlags::POLLIN)? {
            break;
        }
    }
    Ok(Ended {
        bytes: received,
        longest_gap,
        standing: streams,
    })
}

/// Waits until one of them is ready; false if none is for so long that nothing moves any more.
fn wait(streams: &[TcpStream], ready: PollFlags) -> Result<bool> {
    let mut polled: Vec<PollFd<'_>> = streams
        .iter()
        .map(|stream| PollFd::new(stream.as_fd(), ready))
        .collect();
    let patience = PollTimeout::try_from(PATIENCE).context("patience")?;
    Ok(poll(&mut polled, patience).context("poll")? > 0)
}

/// The most of [`resident`] in this time.
fn resident_most(contestant: &Contestant, time: Duration) -> Result<u64> {
    let start = Instant::now();
    let mut most = 0;
    while start.elapsed() < time {
        most = most.max(contestant.resident()?);
        std::thread::sleep(SAMPLE_EVERY);
    }
    Ok(most)
}
