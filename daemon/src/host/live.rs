//! A live TCP connection to a peer, and its number for the user.

use std::collections::{HashMap, HashSet};

use dibs_control::ConnId;
use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::{Meant, Socket};
use dibs_wire::FlowKey;

/// A TCP connection of this host, or of a host behind it, to a host behind a peer.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Its ends.
    pub pair: FlowKey,
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
    /// What TCP counts.
    pub counts: TcpCounts,
    /// Its ctmark; 0 if it is not tracked, or was not looked at.
    pub mark: u32,
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
