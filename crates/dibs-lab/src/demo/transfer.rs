//! The text over one TCP connection.

use std::io::Read as _;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use dibs_netns::Host;
use sha2::{Digest as _, Sha256};

use super::text::{self, Sum};
use crate::load::Transport;
use crate::load::sockets::{accept, retransmissions};

/// A transfer under way.
pub(super) struct Transfer {
    /// The sender's end.
    pub(super) from: SocketAddr,
    near: TcpStream,
    received: Arc<AtomicU64>,
    sender: JoinHandle<Result<Sum>>,
    receiver: JoinHandle<Result<Received>>,
}

/// What came.
pub(super) struct Received {
    /// The sums of what was sent, and of what came.
    pub(super) sums: [Sum; 2],
    /// The longest time in which the receiver waited for data.
    pub(super) longest_stall: Duration,
    /// From the first byte to the last.
    pub(super) duration: Duration,
    /// Segments that the sender's kernel sent again.
    pub(super) retransmissions: u64,
}

impl Transfer {
    /// Sends a text of so many bytes from one host to another.
    pub(super) fn start(from: &Host, to: &Host, address: SocketAddr, len: u64) -> Result<Self> {
        let listener = Transport::Tcp.listen(to, address)?;
        let near = Transport::Tcp.connect(from, address)?;
        let far = accept(&listener)?;
        let received = Arc::<AtomicU64>::default();
        let total = Arc::clone(&received);
        let receiver = to.thread("receiver", move || receive(far, &total))?;
        let stream = near.try_clone()?;
        let sender = from.thread("sender", move || send(stream, len))?;
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
        received.sums[0] = sent.map_err(panicked)??;
        received.retransmissions = retransmissions(&self.near)?;
        Ok(received)
    }
}

fn send(stream: TcpStream, len: u64) -> Result<Sum> {
    let sum = text::write(&stream, len).context("send")?;
    stream.shutdown(Shutdown::Write).context("shutdown")?;
    Ok(sum)
}

fn receive(mut stream: TcpStream, total: &AtomicU64) -> Result<Received> {
    let mut buffer = vec![0; 256 << 10];
    let mut begun = None;
    let (mut longest_stall, mut sum) = (Duration::ZERO, Sha256::new());
    loop {
        let asked = Instant::now();
        let read = stream.read(&mut buffer).context("receive")?;
        let now = Instant::now();
        // What passes before the first byte is no stall.
        let stall = if begun.is_some() {
            now - asked
        } else {
            Duration::ZERO
        };
        longest_stall = longest_stall.max(stall);
        let begun = *begun.get_or_insert(now);
        if read == 0 {
            return Ok(Received {
                sums: [Sum::default(), sum.finalize().into()],
                longest_stall,
                duration: now - begun,
                retransmissions: 0,
            });
        }
        sum.update(&buffer[..read]);
        total.fetch_add(read as u64, Ordering::Relaxed);
    }
}
