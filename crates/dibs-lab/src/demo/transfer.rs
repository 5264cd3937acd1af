//! One file over one TCP connection.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use dibs_netns::Host;

use crate::load::Transport;
use crate::load::sockets::{accept, retransmissions};

/// A transfer under way.
pub(super) struct Transfer {
    /// The sender's end.
    pub(super) from: SocketAddr,
    near: TcpStream,
    received: Arc<AtomicU64>,
    sender: JoinHandle<Result<()>>,
    receiver: JoinHandle<Result<Received>>,
}

/// What came.
pub(super) struct Received {
    /// What it was written to.
    pub(super) file: File,
    /// The longest time in which the receiver waited for data.
    pub(super) longest_stall: Duration,
    /// From the first byte to the last.
    pub(super) duration: Duration,
    /// Segments that the sender's kernel sent again.
    pub(super) retransmissions: u64,
}

impl Transfer {
    /// Sends `source` from one host to another, which writes it to `target`.
    pub(super) fn start(
        from: &Host,
        source: File,
        to: &Host,
        target: File,
        address: SocketAddr,
    ) -> Result<Self> {
        let listener = Transport::Tcp.listen(to, address)?;
        let near = Transport::Tcp.connect(from, address)?;
        let far = accept(&listener)?;
        let received = Arc::<AtomicU64>::default();
        let total = Arc::clone(&received);
        let receiver = to.thread("receiver", move || receive(far, target, &total))?;
        let stream = near.try_clone()?;
        let sender = from.thread("sender", move || send(source, stream))?;
        Ok(Self {
            from: near.local_addr()?,
            near,
            received,
            sender,
            receiver,
        })
    }

    /// Bytes received so far.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Segments that the sender's kernel sent again so far.
    pub(super) fn retransmissions(&self) -> Result<u64> {
        retransmissions(&self.near)
    }

    /// Whether it goes on, well or not.
    pub(super) fn is_running(&self) -> bool {
        !self.receiver.is_finished()
    }

    /// Waits for the end.
    pub(super) fn finish(self) -> Result<Received> {
        let sent = self.sender.join();
        let received = self.receiver.join();
        let panicked = |_| anyhow!("a thread panicked");
        // What went wrong at the receiver is the cause of what the sender complains of.
        let mut received = received.map_err(panicked)??;
        sent.map_err(panicked)??;
        received.retransmissions = retransmissions(&self.near)?;
        Ok(received)
    }
}

fn send(mut source: File, mut stream: TcpStream) -> Result<()> {
    io::copy(&mut source, &mut stream).context("send")?;
    stream.shutdown(Shutdown::Write).context("shutdown")
}

fn receive(mut stream: TcpStream, mut target: File, total: &AtomicU64) -> Result<Received> {
    let mut buffer = vec![0; 256 << 10];
    let mut begun = None;
    let mut longest_stall = Duration::ZERO;
    loop {
        let asked = Instant::now();
        let read = stream.read(&mut buffer).context("receive")?;
        let now = Instant::now();
        // What passes before the first byte is no stall.
        let begun = match begun {
            None => *begun.insert(now),
            Some(begun) => {
                longest_stall = longest_stall.max(now - asked);
                begun
            }
        };
        if read == 0 {
            return Ok(Received {
                file: target,
                longest_stall,
                duration: now - begun,
                retransmissions: 0,
            });
        }
        target.write_all(&buffer[..read]).context("received file")?;
        total.fetch_add(read as u64, Ordering::Relaxed);
    }
}
