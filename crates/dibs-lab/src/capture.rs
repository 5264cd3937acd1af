//! Recording what passes an interface: the eavesdropper of the tests.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use dibs_eavesdrop::Link;
use dibs_netns::Host;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::pipe2;

use crate::packet_socket::{Blocks, Listen, PacketSocket};

/// Bytes that a recording may hold; what comes then is missed.
const MOST_BYTES: usize = 1 << 30;

/// Gives each frame that passes an interface of this host to `take`, for so long: with the time since the epoch at which
/// it passed, and what stands in front of its packet. Superpackets come as they are. Returns how many frames were missed.
///
/// # Errors
/// If there is no such interface, or it may not be listened on.
pub fn overhear(
    interface: &str,
    span: Duration,
    mut take: impl FnMut(Duration, Link, &[u8]),
) -> Result<u64> {
    let (socket, mut blocks) = PacketSocket::listen(interface, Listen::ToAll)?;
    let link = match socket.is_ethernet().context("getsockname")? {
        true => Link::Ethernet,
        false => Link::Ip,
    };
    let end = Instant::now() + span;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let patience = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, patience) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        while blocks.receive(|frame| take(frame.at, link, frame.bytes)) > 0 {}
    }
    let offered = socket.offered().context("what the socket missed")?;
    Ok(offered.missed)
}

/// A recording in progress. Dropping it ends and discards it.
#[derive(Debug)]
pub struct Capture {
    shared: Arc<Shared>,
    /// Closed to stop the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    socket: PacketSocket,
    recording: Mutex<Recording>,
}

/// Recording of what passed an interface.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The packets, in the order seen.
    pub packets: Vec<Packet>,
    bytes: usize,
    missed: u64,
}

/// One packet; where an offload hands over a larger one than the wire's, that one.
#[derive(Clone, Debug)]
pub struct Packet {
    /// When it passed.
    pub at: SystemTime,
    /// True if the host sent it, rather than received it.
    pub outgoing: bool,
    /// The frame, from the Ethernet header on; all of it, unless only heads are recorded. Checksums
    /// of outgoing ones may be unfinished.
    pub frame: Vec<u8>,
}

impl Capture {
    /// Records what passes an interface of a host, both directions, from now on.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn start(host: &Host, interface: &str) -> Result<Self> {
        Self::hear(host, interface, Listen::ToAll)
    }

    /// Records the beginnings, 256 bytes at least, of what passes: enough to tell what they are, and little to keep.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn start_heads(host: &Host, interface: &str) -> Result<Self> {
        Self::hear(host, interface, Listen::ToHeads)
    }

    fn hear(host: &Host, interface: &str, what: Listen) -> Result<Self> {
        let (socket, blocks) = host.in_ns(|| PacketSocket::listen(interface, what))?;
        let shared = Arc::new(Shared {
            socket,
            recording: Mutex::default(),
        });
        let (stopped, stop) = pipe2(OFlag::O_CLOEXEC).context("pipe")?;
        let reader = Arc::clone(&shared);
        let thread = host.thread("capture", move || {
            // What it misses a test cannot do without. Users other than root have it run as others do.
            let _ = dibs_io::set_niceness(0, -20);
            reader.record(blocks, &stopped)
        })?;
        Ok(Self {
            shared,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// How many packets have been seen so far.
    pub fn seen(&self) -> usize {
        self.shared.recording().packets.len()
    }

    /// True if the bytes have been seen so far, within one packet.
    pub fn has_seen(&self, needle: &[u8]) -> bool {
        self.shared.recording().contains(needle)
    }

    /// Ends the recording, with everything that passed before the call.
    ///
    /// # Errors
    /// If packets were missed: nothing can be concluded from what an incomplete recording lacks.
    pub fn finish(mut self) -> Result<Recording> {
        self.end();
        let recording = std::mem::take(&mut *self.shared.recording());
        ensure!(
            recording.missed == 0,
            "the recording missed {} packets",
            recording.missed
        );
        Ok(recording)
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn recording(&self) -> MutexGuard<'_, Recording> {
        self.recording
            .lock()
            .expect("no holder of this lock panics")
    }

    fn record(&self, mut blocks: Blocks, stop: &OwnedFd) {
        let mut fds =
            [self.socket.as_fd(), stop.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let (mut read, mut wanted) = (0, u64::MAX);
        while read < wanted {
            let watched = if wanted == u64::MAX { 2 } else { 1 };
            match poll(&mut fds[..watched], PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => panic!("poll on descriptors of our own: {error}"),
            }
            let stopped = fds[1].revents().is_some_and(|events| !events.is_empty());
            if stopped && wanted == u64::MAX {
                // What passed before the stop is handed over, full block or not.
                let offered = self.socket.offered();
                let offered = offered.expect("a packet socket counts what it is offered");
                self.recording().missed += offered.missed;
                wanted = offered.taken;
            }
            loop {
                let mut recording = self.recording();
                let count = blocks.receive(|frame| {
                    let (at, outgoing) = (UNIX_EPOCH + frame.at, frame.outgoing);
                    recording.add(Packet {
                        at,
                        outgoing,
                        frame: frame.bytes.to_vec(),
                    });
                });
                read += count as u64;
                if count == 0 {
                    break;
                }
            }
        }
    }
}

impl Recording {
    fn add(&mut self, packet: Packet) {
        if self.bytes + packet.frame.len() > MOST_BYTES {
            self.missed += 1;
            return;
        }
        self.bytes += packet.frame.len();
        self.packets.push(packet);
    }

    /// True if the bytes occur within one packet.
    pub fn contains(&self, needle: &[u8]) -> bool {
        assert!(!needle.is_empty(), "nothing to look for");
        self.packets.iter().any(|packet| {
            packet
                .frame
                .windows(needle.len())
                .any(|window| window == needle)
        })
    }
}
