//! Ping-pong of small messages.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dibs_netns::Host;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

use super::sockets::{Transport, accept};
use super::{join, percentile};

/// Bytes of a message.
const SIZE: usize = 64;
/// Messages before the measurement, for caches and congestion windows.
const WARM_UP: usize = 200;

/// Latency of ping-pong over one connection: half of each round trip, as sockperf reports it, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Round trips.
    pub count: usize,
    /// The least.
    pub min_us: f64,
    /// The median.
    pub p50_us: f64,
    /// 99 % are quicker.
    pub p99_us: f64,
}

impl Latency {
    /// Plays between two hosts for so long, to a listener at `address`: the next message of 64 bytes leaves when the answer to
    /// the last is there. The two ends run on different processors, as they would on two machines.
    ///
    /// # Errors
    /// If the connection does not come about or breaks.
    pub fn measured(
        [from, to]: [&Host; 2],
        address: SocketAddr,
        transport: Transport,
        duration: Duration,
    ) -> Result<Self> {
        let listener = transport.listen(to, address)?;
        let near = transport.connect(from, address)?;
        let far = accept(&listener)?;
        let echo = to.thread("echo", move || {
            pin(1)?;
            answer(far)
        })?;
        let player = from.thread("ping", move || {
            pin(0)?;
            play(near, duration)
        })?;
        let (trips, answered) = (join(vec![player]), join(vec![echo]));
        let mut trips = trips?.concat();
        answered?;
        trips.sort_unstable();
        let at = |share: f64| percentile(&trips, share) / 2.0;
        Ok(Self {
            count: trips.len(),
            min_us: at(0.0),
            p50_us: at(0.5),
            p99_us: at(0.99),
        })
    }
}

fn play(mut stream: TcpStream, duration: Duration) -> Result<Vec<Duration>> {
    stream.set_nodelay(true)?;
    let mut message = [0x5a; SIZE];
    let mut trips = Vec::new();
    let mut end = None;
    for n in 0.. {
        let sent = Instant::now();
        stream.write_all(&message).context("ping")?;
        stream.read_exact(&mut message).context("pong")?;
        let now = Instant::now();
        if n < WARM_UP {
            continue;
        }
        trips.push(now - sent);
        if now > *end.get_or_insert(sent + duration) {
            break;
        }
    }
    Ok(trips)
}

/// Keeps the calling thread on the processor with this place among those allowed, as far as there are
/// as many.
fn pin(place: usize) -> Result<()> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this).context("sched_getaffinity")?;
    let processors: Vec<usize> = (0..CpuSet::count())
        .filter(|&processor| allowed.is_set(processor) == Ok(true))
        .collect();
    let mut one = CpuSet::new();
    one.set(processors[place % processors.len()])?;
    sched_setaffinity(this, &one).context("sched_setaffinity")
}

/// Returns each message until the connection ends.
fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; SIZE];
    loop {
        match stream.read_exact(&mut message) {
            Ok(()) => stream.write_all(&message).context("pong")?,
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error).context("ping"),
        }
    }
}
