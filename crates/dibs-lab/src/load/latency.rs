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
use super::{join, micros, percentile};

/// Bytes of a message.
const SIZE: usize = 64;
/// Messages before the measurement, for caches and congestion windows.
const WARM_UP: usize = 200;

/// Ping-pong over one connection: the next message leaves when the answer to the last is there. The
/// two ends run on different processors, as they would on two machines.
#[derive(Clone, Debug)]
pub struct Latency {
    to: SocketAddr,
    transport: Transport,
    duration: Duration,
}

/// Half of each round trip, as sockperf reports it, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct LatencyReport {
    /// The transport.
    pub transport: Transport,
    /// Round trips.
    pub count: usize,
    /// The mean.
    pub mean_us: f64,
    /// The least.
    pub min_us: f64,
    /// The median.
    pub p50_us: f64,
    /// 90 % are quicker.
    pub p90_us: f64,
    /// 99 % are quicker.
    pub p99_us: f64,
    /// 99.9 % are quicker.
    pub p999_us: f64,
    /// The most.
    pub max_us: f64,
}

impl Latency {
    /// Messages of 64 bytes over TCP for 2 seconds, to a listener at `to`.
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            transport: Transport::Tcp,
            duration: Duration::from_secs(2),
        }
    }

    /// The transport.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// How long to play.
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = duration;
        self
    }

    /// Plays between two hosts.
    ///
    /// # Errors
    /// If the connection does not come about or breaks.
    pub fn run(&self, from: &Host, to: &Host) -> Result<LatencyReport> {
        let listener = self.transport.listen(to, self.to)?;
        let near = self.transport.connect(from, self.to)?;
        let far = accept(&listener)?;
        let echo = to.thread("echo", move || {
            pin(1)?;
            answer(far)
        })?;
        let plan = self.clone();
        let player = from.thread("ping", move || {
            pin(0)?;
            plan.play(near)
        })?;
        let (trips, answered) = (join(vec![player]), join(vec![echo]));
        let trips = trips?.concat();
        answered?;
        Ok(self.report(trips))
    }

    fn play(&self, mut stream: TcpStream) -> Result<Vec<Duration>> {
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
            if now > *end.get_or_insert(sent + self.duration) {
                break;
            }
        }
        Ok(trips)
    }

    fn report(&self, mut trips: Vec<Duration>) -> LatencyReport {
        trips.sort_unstable();
        let at = |share: f64| percentile(&trips, share) / 2.0;
        LatencyReport {
            transport: self.transport,
            count: trips.len(),
            mean_us: micros(trips.iter().sum()) / 2.0 / trips.len() as f64,
            min_us: at(0.0),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_half_the_round_trip() {
        let trips = (1..=1001)
            .rev()
            .map(|n| Duration::from_micros(2 * n))
            .collect();
        let report = Latency::new("10.0.0.1:1".parse().unwrap()).report(trips);
        let found = [
            report.min_us,
            report.p50_us,
            report.p99_us,
            report.max_us,
            report.mean_us,
        ];
        let expected = [1.0, 501.0, 991.0, 1001.0, 501.0];
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }
}
