//! Requests and answers, by connections that are kept or by a new one for each.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use dibs_netns::Host;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::sockets::{PATIENCE, Transport};
use super::{join, percentile};

/// Bytes of a request, and of its answer.
const SIZE: usize = 64;
/// How often one who waits for a connection looks whether there will be none, in ms.
const LOOK: u8 = 50;

/// So many clients at a time, each of which asks again when it has its answer.
#[derive(Clone, Debug)]
pub struct Requests {
    to: SocketAddr,
    transport: Transport,
    duration: Duration,
    clients: usize,
    kept: bool,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct RequestsReport {
    /// Requests that were answered.
    pub count: usize,
    /// Each second.
    pub per_second: f64,
    /// The median time from a request to its answer, setting up a connection included where each has its own.
    pub p50_us: f64,
    /// 99 % are quicker.
    pub p99_us: f64,
}

impl Requests {
    /// 16 clients for 2 seconds, to a listener at `to`, over connections that are kept.
    pub fn new(to: SocketAddr) -> Self {
        Self {
            to,
            transport: Transport::Tcp,
            duration: Duration::from_secs(2),
            clients: 16,
            kept: true,
        }
    }

    /// The transport.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// How long to ask.
    pub fn duration(mut self, duration: Duration) -> Self {
        self.duration = duration;
        self
    }

    /// Each request by a connection of its own.
    pub fn connecting(mut self) -> Self {
        self.kept = false;
        self
    }

    /// Asks from one host at another.
    ///
    /// # Errors
    /// If a connection does not come about or breaks.
    pub fn run(&self, from: &Host, to: &Host) -> Result<RequestsReport> {
        let listener = self.transport.listen(to, self.to)?;
        let (listener, over) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let serve = |_| {
            let (listener, over) = (Arc::clone(&listener), Arc::clone(&over));
            let plan = self.clone();
            to.thread("server", move || plan.serve(&listener, &over))
        };
        let servers = (0..self.clients).map(serve).collect::<Result<Vec<_>>>()?;
        let start = Instant::now();
        let ask = |_| {
            let plan = self.clone();
            from.thread("client", move || plan.ask(start))
        };
        let clients = (0..self.clients).map(ask).collect::<Result<Vec<_>>>()?;
        let asked = join(clients);
        let took = start.elapsed();
        over.store(true, Ordering::Relaxed);
        let served = join(servers);
        let times = asked?.concat();
        served?;
        Ok(report(times, took))
    }

    fn serve(&self, listener: &TcpListener, over: &AtomicBool) -> Result<()> {
        while !over.load(Ordering::Relaxed) {
            // MPTCP's listeners know no timeout of their own.
            let mut waits = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            poll(&mut waits, PollTimeout::from(LOOK)).context("poll")?;
            let mut stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error).context("accept"),
            };
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_nodelay(true)?;
            let mut message = [0; SIZE];
            loop {
                match stream.read_exact(&mut message) {
                    Ok(()) => stream.write_all(&message).context("answer")?,
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                    Err(error) => return Err(error).context("request"),
                }
                // Who closes first keeps the port for a minute, and a server has but one.
                if !self.kept {
                    break;
                }
            }
        }
        Ok(())
    }

    fn ask(&self, start: Instant) -> Result<Vec<Duration>> {
        let mut times = Vec::new();
        let mut stream: Option<TcpStream> = None;
        let mut message = [0x5a; SIZE];
        while start.elapsed() < self.duration {
            let asked = Instant::now();
            let mut connection = match stream.take() {
                Some(connection) => connection,
                None => self.transport.connect_here(self.to).context("connect")?,
            };
            connection.set_nodelay(true)?;
            connection.write_all(&message).context("request")?;
            connection.read_exact(&mut message).context("answer")?;
            times.push(asked.elapsed());
            if self.kept {
                stream = Some(connection);
            } else {
                // The server closes, then this end.
                connection.read_to_end(&mut Vec::new()).context("the end")?;
            }
        }
        Ok(times)
    }
}

fn report(mut times: Vec<Duration>, took: Duration) -> RequestsReport {
    times.sort_unstable();
    RequestsReport {
        count: times.len(),
        per_second: times.len() as f64 / took.as_secs_f64(),
        p50_us: percentile(&times, 0.5),
        p99_us: percentile(&times, 0.99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_percentiles() {
        let times = (0..=100).rev().map(Duration::from_micros).collect();
        let report = report(times, Duration::from_millis(500));
        let found = (
            report.count,
            report.per_second,
            report.p50_us,
            report.p99_us,
        );
        assert_eq!(found, (101, 202.0, 50.0, 99.0));
    }
}
