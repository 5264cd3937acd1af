//! Live TCP connections to peers: their numbers for the user, and whether anything comes back of what they send by another
//! program's device.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use dibs_control::ConnId;
use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::{Meant, Socket};
use dibs_wire::FlowKey;

/// A TCP connection of this host, or of a host behind it, to a host behind a peer.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Its ends, as the peer knows them.
    pub pair: FlowKey,
    /// This end of it, if a host behind this one has another.
    pub behind: Option<SocketAddr>,
    /// The peer's index.
    pub peer: usize,
    /// The socket, as peers know it: of the kernel's number, the lower half. Of a connection that
    /// passes, a name of its entry in conntrack.
    pub socket: Socket,
    /// The socket's owner; none of a connection that only passes this host.
    pub uid: Option<u32>,
    /// The socket's inode; 0: there is no process that has it.
    pub inode: u64,
    /// The socket is bound to a device.
    pub bound: bool,
    /// The connection of MPTCP that it is a subflow of.
    pub mptcp: Option<u32>,
    /// Only waits for stray packets.
    pub over: bool,
    /// Neither end has begun to end it.
    pub established: bool,
    /// The far end has not answered yet.
    pub opening: bool,
    /// Counts of TCP.
    pub counts: TcpCounts,
    /// Its ctmark; 0 if it is not tracked, or was not looked at.
    pub mark: u32,
}

impl Live {
    /// This end of it, as the user knows it.
    pub(crate) fn local(&self) -> SocketAddr {
        self.behind.unwrap_or(self.pair.source())
    }
}

impl From<&Live> for Meant {
    fn from(live: &Live) -> Self {
        Self {
            pair: live.pair,
            socket: live.socket,
        }
    }
}

/// Numbers of connections, and when what was seen of them.
#[derive(Default)]
pub(crate) struct Registry {
    known: HashMap<FlowKey, Known>,
    last: ConnId,
}

struct Known {
    id: ConnId,
    socket: Socket,
    bump: Option<BumpId>,
    since: f64,
}

impl Registry {
    /// Forgets all but these.
    pub(crate) fn retain(&mut self, alive: &HashSet<FlowKey>) {
        self.known.retain(|pair, _| alive.contains(pair));
    }

    /// The number of a connection and since when it is on `bump`.
    pub(crate) fn note(&mut self, live: &Live, bump: Option<BumpId>, now: f64) -> (ConnId, f64) {
        // A socket has no process any more, and another number, once it only waits.
        let same = |known: &Known| known.socket == live.socket || live.over;
        match self.known.get_mut(&live.pair) {
            Some(known) if same(known) => {
                if known.bump != bump {
                    known.bump = bump;
                    known.since = now;
                }
                (known.id, known.since)
            }
            _ => {
                self.last += 1;
                let known = Known {
                    id: self.last,
                    socket: live.socket,
                    bump,
                    since: now,
                };
                self.known.insert(live.pair, known);
                (self.last, now)
            }
        }
    }
}

/// Attempts in vain behind which there is no mere loss.
const ATTEMPTS: u8 = 3;

/// What a user's connection had sent and received when it came to a device.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    bump: BumpId,
    socket: Socket,
    /// Acknowledged or not.
    sent: u64,
    received: u64,
}

impl Arrived {
    /// Whether TCP has got anything by the device.
    fn is_answered(&self, counts: &TcpCounts) -> bool {
        counts.bytes_acked > self.sent || counts.bytes_received > self.received
    }
}

/// What is known of devices that users chose for connections.
#[derive(Default)]
pub(crate) struct Answers {
    /// The connections of the last `enable` for each bump, as far as they live.
    arrived: HashMap<FlowKey, Arrived>,
    /// Bumps that the last connections were taken back from, for nothing came back.
    silent: HashSet<BumpId>,
}

/// What came of waiting for an answer by a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Something came back.
    Something,
    /// Much was sent, and nothing came back.
    Nothing,
    /// None of them has sent anything: nobody knows.
    Unasked,
}

impl Answers {
    /// Notes what these connections had sent when they came to `bump`, if they are the last that did.
    pub(crate) fn note_arrived(
        &mut self,
        bump: BumpId,
        meant: &HashMap<FlowKey, Socket>,
        counts: &HashMap<FlowKey, TcpCounts>,
    ) {
        let arrived = &mut self.arrived;
        arrived.retain(|pair, known| known.bump != bump || meant.contains_key(pair));
        for (pair, socket) in meant {
            let Some(counts) = counts.get(pair) else {
                continue;
            };
            let known = Arrived {
                bump,
                socket: *socket,
                sent: counts.bytes_acked + u64::from(counts.outstanding),
                received: counts.bytes_received,
            };
            arrived.insert(*pair, known);
        }
    }

    /// Whether a connection has got anything by the device that it came to last.
    pub(crate) fn is_answered(&self, pair: &FlowKey, counts: &TcpCounts) -> bool {
        let arrived = self.arrived.get(pair);
        arrived.is_some_and(|arrived| arrived.is_answered(counts))
    }

    /// Notes what came of waiting for an answer by the device of `bump`.
    pub(crate) fn note_heard(&mut self, bump: BumpId, heard: Heard) {
        match heard {
            Heard::Nothing => self.silent.insert(bump),
            Heard::Something | Heard::Unasked => self.silent.remove(&bump),
        };
    }

    /// Whether anything comes back by the device of `bump`, as far as the connections on it (`lives`) show; none:
    /// nobody knows.
    pub(crate) fn of<'a>(
        &self,
        bump: BumpId,
        lives: impl Iterator<Item = &'a Live> + Clone,
    ) -> Option<bool> {
        let silent = |live: &Live| {
            let waits = live.counts.outstanding > 0 || live.opening;
            waits && live.counts.attempts >= ATTEMPTS
        };
        let answered = |live: &Live| {
            let arrived = self.arrived.get(&live.pair);
            let arrived = arrived.filter(|a| a.bump == bump && a.socket == live.socket);
            arrived.is_some_and(|arrived| arrived.is_answered(&live.counts))
        };
        if lives.clone().any(|live| answered(live) && !silent(live)) {
            return Some(true);
        }
        let is_silent = lives.clone().any(silent) || self.silent.contains(&bump);
        is_silent.then_some(false)
    }
}
