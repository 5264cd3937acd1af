//! Bulk transfers: what arrives, when, and whether it is what was sent.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use dibs_netns::Host;
use serde::Serialize;

use super::join;
use super::sockets::{
    Transport, accept, host_retransmissions, retransmissions, set_congestion, subflows,
};

/// Bytes per read and write.
const CHUNK: usize = 128 << 10;
/// A prime, so that the pattern does not repeat in step with anybody's blocks.
const PERIOD: usize = 65_521;

/// A bulk transfer from one host to another.
#[derive(Clone, Debug)]
pub struct Throughput {
    to: SocketAddr,
    transport: Transport,
    congestion: Option<String>,
    duration: Duration,
    bytes: u64,
    interval: Duration,
    streams: usize,
    down: bool,
}

/// Report of a bulk transfer, as its receiver saw it.
#[derive(Clone, Debug, Serialize)]
pub struct ThroughputReport {
    /// The transport.
    pub transport: Transport,
    /// Connections.
    pub streams: usize,
    /// Bytes received, each as it was sent.
    pub bytes: u64,
    /// Time from the start to the last byte.
    pub seconds: f64,
    /// The mean over that time.
    pub bits_per_second: f64,
    /// Length of an interval.
    pub interval_seconds: f64,
    /// Bytes received in each interval since the start.
    pub intervals: Vec<u64>,
    /// The longest time in which a connection received nothing, in microseconds.
    pub longest_gap_us: u64,
    /// The same of the times that ended in each interval.
    pub gaps_us: Vec<u64>,
    /// Segments that the sender retransmitted.
    pub retransmissions: u64,
    /// Subflows of all MPTCP connections; 0 for TCP.
    pub subflows: u32,
}

/// A bulk transfer under way.
#[derive(Debug)]
pub struct Transfer {
    plan: Throughput,
    from: Host,
    addresses: Vec<SocketAddr>,
    received: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    retransmissions_before: u64,
    /// Further subflows of an MPTCP connection come to it, too.
    _listener: TcpListener,
    senders: Vec<JoinHandle<Result<Sent>>>,
    receivers: Vec<JoinHandle<Result<Received>>>,
}

#[derive(Debug)]
struct Sent {
    bytes: u64,
    retransmissions: u64,
    subflows: u32,
}

#[derive(Debug)]
struct Received {
    bytes: u64,
    last: Duration,
    longest_gap: Duration,
    intervals: Vec<u64>,
    gaps_us: Vec<u64>,
}

impl Throughput {
    /// One TCP connection for 5 seconds to a listener at `to`, in intervals of 100 ms.
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            transport: Transport::Tcp,
            congestion: None,
            duration: Duration::from_secs(5),
            bytes: u64::MAX,
            interval: Duration::from_millis(100),
            streams: 1,
            down: false,
        }
    }

    /// The transport of all connections.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// The congestion control of the senders, as `net.ipv4.tcp_available_congestion_control` names it; the host's
    /// if not set. As an option of the sockets, for a namespace may set only what all users may.
    pub fn congestion(mut self, name: &str) -> Self {
        self.congestion = Some(name.to_owned());
        self
    }

    /// How long to send.
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = duration;
        self
    }

    /// How much to send by each connection, however long that takes.
    pub fn bytes(mut self, bytes: u64) -> Self {
        (self.duration, self.bytes) = (Duration::MAX, bytes);
        self
    }

    /// To send until the transfer is [stopped](Transfer::stop).
    pub fn endless(self) -> Self {
        self.bytes(u64::MAX)
    }

    /// The length of the report's intervals.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Connections at a time.
    pub fn streams(mut self, streams: usize) -> Self {
        self.streams = streams;
        self
    }

    /// To send from the listener to the host that connects.
    pub fn down(mut self) -> Self {
        self.down = true;
        self
    }

    /// Sends `from` one host `to` another, to the end.
    ///
    /// # Errors
    /// As [`start`](Self::start) and [`Transfer::finish`].
    pub fn run(&self, from: &Host, to: &Host) -> Result<ThroughputReport> {
        self.start(from, to)?.finish()
    }

    /// Starts sending, and returns once all connections stand.
    ///
    /// # Errors
    /// If they do not come about.
    pub fn start(&self, from: &Host, to: &Host) -> Result<Transfer> {
        let listener = self.transport.listen(to, self.to)?;
        let pairs = (0..self.streams)
            .map(|_| self.pair(from, &listener))
            .collect::<Result<Vec<_>>>()?;
        let (from, to) = if self.down { (to, from) } else { (from, to) };
        let mut transfer = Transfer {
            plan: self.clone(),
            from: from.clone(),
            addresses: Vec::new(),
            received: Arc::default(),
            stop: Arc::default(),
            retransmissions_before: host_retransmissions(from)?,
            _listener: listener,
            senders: Vec::new(),
            receivers: Vec::new(),
        };
        let start = Instant::now();
        for (near, far) in pairs {
            transfer.addresses.push(near.local_addr()?);
            let (plan, total) = (self.clone(), Arc::clone(&transfer.received));
            let interval = self.interval;
            let receiver = to.thread("receiver", move || receive(far, start, interval, &total))?;
            transfer.receivers.push(receiver);
            let stop = Arc::clone(&transfer.stop);
            let sender = from.thread("sender", move || plan.send(near, start, &stop))?;
            transfer.senders.push(sender);
        }
        Ok(transfer)
    }

    /// A connection: the end that sends, and the other one.
    fn pair(&self, from: &Host, listener: &TcpListener) -> Result<(TcpStream, TcpStream)> {
        let near = self.transport.connect(from, self.to)?;
        let mut ends = (near, accept(listener)?);
        if self.down {
            std::mem::swap(&mut ends.0, &mut ends.1);
        }
        if let Some(name) = &self.congestion {
            set_congestion(&ends.0, name)?;
        }
        Ok(ends)
    }

    fn send(&self, mut stream: TcpStream, start: Instant, stop: &AtomicBool) -> Result<Sent> {
        let mut bytes = 0;
        while start.elapsed() < self.duration && bytes < self.bytes && !stop.load(Ordering::Relaxed)
        {
            let offset = (bytes % PERIOD as u64) as usize;
            let most = usize::try_from(self.bytes - bytes).map_or(CHUNK, |left| left.min(CHUNK));
            bytes += stream.write(&PATTERN[offset..][..most]).context("send")? as u64;
        }
        let (retransmissions, subflows) = match self.transport {
            Transport::Tcp => (retransmissions(&stream)?, 0),
            Transport::Mptcp => (0, subflows(&stream)?),
        };
        stream.shutdown(Shutdown::Write).context("shutdown")?;
        // The far end closes when it has read everything.
        ensure!(
            stream.read(&mut [0]).context("wait for the far end")? == 0,
            "unexpected data"
        );
        Ok(Sent {
            bytes,
            retransmissions,
            subflows,
        })
    }
}

impl Transfer {
    /// The sender's own address of each connection.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Bytes received so far, over all connections.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Has the senders end.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// True if sending or receiving is still going on.
    pub fn is_running(&self) -> bool {
        !self.receivers.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// If a connection broke, stood still for [`HANG`](crate::HANG), or delivered other bytes than those
    /// sent.
    pub fn finish(self) -> Result<ThroughputReport> {
        let sent = join(self.senders);
        let received = join(self.receivers);
        // What went wrong at the receiver is the cause of what the sender complains of.
        let (received, sent) = (received?, sent?);
        for (sent, received) in sent.iter().zip(&received) {
            let (sent, received) = (sent.bytes, received.bytes);
            ensure!(
                sent == received,
                "{sent} bytes were sent, {received} received"
            );
        }
        let bytes = received.iter().map(|stream| stream.bytes).sum();
        let last = received
            .iter()
            .map(|stream| stream.last)
            .max()
            .unwrap_or_default();
        let mut intervals = Vec::new();
        for stream in &received {
            intervals.resize(intervals.len().max(stream.intervals.len()), 0);
            intervals
                .iter_mut()
                .zip(&stream.intervals)
                .for_each(|(sum, bytes)| *sum += bytes);
        }
        let mut gaps_us = vec![0; intervals.len()];
        for stream in &received {
            let both = gaps_us.iter_mut().zip(&stream.gaps_us);
            both.for_each(|(longest, gap)| *longest = *gap.max(longest));
        }
        let retransmissions = match self.plan.transport {
            Transport::Tcp => sent.iter().map(|stream| stream.retransmissions).sum(),
            // The kernel tells only the first subflow's.
            Transport::Mptcp => host_retransmissions(&self.from)? - self.retransmissions_before,
        };
        Ok(ThroughputReport {
            transport: self.plan.transport,
            streams: self.plan.streams,
            bytes,
            seconds: last.as_secs_f64(),
            bits_per_second: bytes as f64 * 8.0 / last.as_secs_f64().max(f64::MIN_POSITIVE),
            interval_seconds: self.plan.interval.as_secs_f64(),
            intervals,
            longest_gap_us: received
                .iter()
                .map(|stream| stream.longest_gap.as_micros() as u64)
                .max()
                .unwrap_or(0),
            gaps_us,
            retransmissions,
            subflows: sent.iter().map(|stream| stream.subflows).sum(),
        })
    }
}

fn receive(
    mut stream: TcpStream,
    start: Instant,
    interval: Duration,
    total: &AtomicU64,
) -> Result<Received> {
    let mut buffer = vec![0; CHUNK];
    let mut seen = Received {
        bytes: 0,
        last: Duration::ZERO,
        longest_gap: Duration::ZERO,
        intervals: Vec::new(),
        gaps_us: Vec::new(),
    };
    loop {
        let read = stream.read(&mut buffer).context("receive")?;
        if read == 0 {
            return Ok(seen);
        }
        let now = start.elapsed();
        let offset = (seen.bytes % PERIOD as u64) as usize;
        ensure!(
            buffer[..read] == PATTERN[offset..][..read],
            "the {read} bytes from {} on are not those sent",
            seen.bytes
        );
        seen.bytes += read as u64;
        total.fetch_add(read as u64, Ordering::Relaxed);
        let gap = now - seen.last;
        seen.longest_gap = seen.longest_gap.max(gap);
        seen.last = now;
        let slot = (now.as_nanos() / interval.as_nanos().max(1)) as usize;
        seen.intervals.resize(seen.intervals.len().max(slot + 1), 0);
        seen.intervals[slot] += read as u64;
        seen.gaps_us.resize(seen.intervals.len(), 0);
        seen.gaps_us[slot] = seen.gaps_us[slot].max(gap.as_micros() as u64);
    }
}

/// The stream's first period and a chunk: any chunk of the stream is a slice of it.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let byte = |n: usize| ((n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..PERIOD + CHUNK).map(|n| byte(n % PERIOD)).collect()
});
