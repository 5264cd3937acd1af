//! The socket of a path, and what it did not take yet.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_io::{Endpoint, Family, PathSocket, SendOutcome, Stop};

use crate::data::SocketSnapshot;

/// Bytes that wait for a full socket, at most. The path's congestion window is the usual bound;
/// beyond this one datagrams are dropped, and the path layer finds them lost.
const BACKLOG: usize = 8 << 20;
/// The same trouble is logged once in this time.
const LOG_SPACING: Duration = Duration::from_secs(60);

/// A send, or the rest of one, that found the socket full.
struct Pending {
    to: Endpoint,
    segment: usize,
    bytes: Vec<u8>,
}

/// A local path's side of the system.
#[derive(Default)]
pub(super) struct PathIo {
    name: String,
    /// None while its interface is missing.
    pub(super) socket: Option<PathSocket>,
    backlog: VecDeque<Pending>,
    backlog_bytes: usize,
    /// Buffers of sends that went out meanwhile.
    free: Vec<Vec<u8>>,
    logged: Option<Time>,
    errors: u64,
    dropped: u64,
}

impl PathIo {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }

    pub(super) fn replace(&mut self, socket: PathSocket) {
        self.socket = Some(socket);
        self.free
            .extend(self.backlog.drain(..).map(|pending| pending.bytes));
        self.backlog_bytes = 0;
    }

    /// Whether sends wait for room in the socket.
    pub(super) fn is_blocked(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Sends datagrams of `segment` bytes each; what a full socket does not take is kept. Returns the
    /// size of a datagram that was too big for the interface, if any was.
    pub(super) fn send(
        &mut self,
        now: Time,
        to: Endpoint,
        mut bytes: &[u8],
        segment: usize,
    ) -> Option<usize> {
        let mut too_big = None;
        if self.is_blocked() {
            self.keep(to, bytes, segment);
            return None;
        }
        while !bytes.is_empty() {
            let Some(socket) = &mut self.socket else {
                self.dropped += 1;
                break;
            };
            let SendOutcome { sent, stop } = socket.send(to, bytes, segment);
            bytes = &bytes[sent..];
            match stop {
                None => break,
                Some(Stop::Blocked) => {
                    self.keep(to, bytes, segment);
                    break;
                }
                // Those behind it may be smaller.
                Some(Stop::TooBig { size }) => {
                    too_big = Some(size);
                    bytes = &bytes[segment.min(bytes.len())..];
                }
                Some(Stop::Path(error)) => {
                    self.note_error("send", &error, now);
                    break;
                }
            }
        }
        too_big
    }

    fn keep(&mut self, to: Endpoint, bytes: &[u8], segment: usize) {
        if self.backlog_bytes + bytes.len() > BACKLOG {
            self.dropped += 1;
            return;
        }
        let mut kept = self.free.pop().unwrap_or_default();
        kept.clear();
        kept.extend_from_slice(bytes);
        self.backlog_bytes += bytes.len();
        self.backlog.push_back(Pending {
            to,
            segment,
            bytes: kept,
        });
    }

    /// Sends what was kept, as far as there is room.
    pub(super) fn drain(&mut self) {
        while let Some(mut pending) = self.backlog.pop_front() {
            let Some(socket) = &mut self.socket else {
                self.dropped += 1;
                continue;
            };
            let before = pending.bytes.len();
            let SendOutcome { sent, stop } =
                socket.send(pending.to, &pending.bytes, pending.segment);
            match stop {
                Some(Stop::Blocked) => {
                    pending.bytes.drain(..sent);
                    self.backlog_bytes -= sent;
                    self.backlog.push_front(pending);
                    return;
                }
                // Its probes will tell the path layer; only the rest of this send is lost.
                Some(Stop::TooBig { .. } | Stop::Path(_)) => self.dropped += 1,
                None => {}
            }
            self.backlog_bytes -= before;
            self.free.push(pending.bytes);
        }
    }

    /// Counts an error of the system, and logs it now and then.
    pub(super) fn note_error(&mut self, what: &str, error: &io::Error, now: Time) {
        self.errors += 1;
        let due = self
            .logged
            .is_none_or(|logged| now.since(logged) >= LOG_SPACING);
        if due {
            self.logged = Some(now);
            let (name, errors) = (&self.name, self.errors);
            tracing::warn!(
                dibs.path = name,
                "path {name}: cannot {what}: {error} ({errors} such errors so far)"
            );
        }
    }

    pub(super) fn snapshot(&self) -> SocketSnapshot {
        let socket = self.socket.as_ref();
        SocketSnapshot {
            open: socket.is_some(),
            gso_v4: socket.is_some_and(|socket| socket.offloads(Family::V4)),
            gso_v6: socket.is_some_and(|socket| socket.offloads(Family::V6)),
            errors: self.errors,
            dropped: self.dropped,
            overflowed: socket.map_or(0, |socket| socket.counters().overflowed),
        }
    }
}

/// Endpoint without the number of its interface, which a link-local one may have: the path says that, and one endpoint
/// would be two.
pub(crate) fn unscoped(to: SocketAddr) -> SocketAddr {
    SocketAddr::new(to.ip(), to.port())
}
