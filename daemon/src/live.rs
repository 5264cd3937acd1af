//! The live TCP connections to peers: sockets, their marks, their numbers for the user.

use std::collections::{BTreeMap, HashMap, HashSet};

use dibs_control::{ConnId, ConnInfo, ConnPathInfo};
use dibs_core::node::ConnSnapshot;
use dibs_policy::conntrack::{Connection, LOOKUPS};
use dibs_policy::sockets::{self, TcpCounts, TcpSocket};

use crate::clock::wall;
use crate::daemon::Daemon;
use crate::terms::{marks, pair_of, tuple};
use dibs_switch::conns::{Meant, Pair, Socket};

/// The kernel's TCP states, include/net/tcp_states.h.
const TIME_WAIT: u8 = 6;
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;

/// A TCP connection of this host, or of a host behind it, to a host behind a peer.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Its ends.
    pub pair: Pair,
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
    known: HashMap<Pair, Known>,
    last: ConnId,
}

struct Known {
    id: ConnId,
    socket: Socket,
    bump: u8,
    since: f64,
}

impl Registry {
    /// The number of a connection and since when it is on `bump`.
    fn note(&mut self, live: &Live, bump: u8, now: f64) -> (ConnId, f64) {
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

impl Daemon {
    /// All connections to peers, those that are over included, with their marks.
    pub(crate) async fn connections(&self) -> anyhow::Result<Vec<Live>> {
        let mut lives = self.sockets().await?;
        let installed = !self.state.borrow().installed.is_empty();
        if installed && lives.len() <= LOOKUPS {
            let mut conntrack = self.conntrack()?;
            for live in &mut lives {
                let entry = conntrack.get(&tuple(&live.pair)).await?;
                live.mark = entry.map_or(0, |entry| entry.mark);
            }
        } else if installed {
            let mut tracked = HashMap::new();
            let marks = |entry: Connection| {
                let ends = self.ends_to_peers(&entry);
                tracked.extend(ends.map(|pair| (pair, entry.mark)));
                None::<()>
            };
            self.conntrack()?.list(marks).await?;
            for live in &mut lives {
                live.mark = tracked.get(&live.pair).copied().unwrap_or(0);
            }
        }
        Ok(lives)
    }

    /// As [`connections`](Self::connections), without looking at marks.
    pub(crate) async fn sockets(&self) -> anyhow::Result<Vec<Live>> {
        self.sockets_as(Some).await
    }

    /// What `pick` makes of [`sockets`](Self::sockets): there may be thousands.
    pub(crate) async fn sockets_as<U>(
        &self,
        pick: impl Fn(Live) -> Option<U>,
    ) -> anyhow::Result<Vec<U>> {
        let mut found = sockets::list(|socket| pick(self.live(socket)?)).await?;
        found.extend(self.all_passing().await?.into_iter().filter_map(pick));
        Ok(found)
    }

    /// Those of these connections that there are, without looking at marks.
    pub(crate) async fn sockets_of(
        &self,
        pairs: &[Pair],
    ) -> Result<HashMap<Pair, Live>, dibs_policy::Error> {
        let ends: Vec<_> = pairs
            .iter()
            .map(|pair| (pair.local.into(), pair.remote.into()))
            .collect();
        let found = sockets::find(&ends).await?.into_iter();
        let lives = found.filter_map(|socket| self.live(socket));
        let lives = lives.chain(self.passing_of(pairs).await?);
        Ok(lives.map(|live| (live.pair, live)).collect())
    }

    fn live(&self, socket: TcpSocket) -> Option<Live> {
        Some(Live {
            pair: Pair {
                local: socket.local.into(),
                remote: socket.remote.into(),
            },
            peer: self.peer_of(socket.remote.ip())?,
            socket: Socket(socket.cookie as u32),
            uid: Some(socket.uid),
            inode: socket.inode,
            bound: socket.bound_device != 0,
            over: socket.state == TIME_WAIT,
            established: socket.state == ESTABLISHED,
            opening: socket.state == SYN_SENT,
            counts: socket.counts.unwrap_or_default(),
            mark: 0,
        })
    }

    /// The bump that a connection is on; 0: plain.
    pub(crate) fn bump_of(&self, live: &Live) -> u8 {
        let state = self.state.borrow();
        if let Some(rule) = state.requirement(live) {
            return rule.bump_id().get();
        }
        let choice = state.conns.get(&live.pair).choice.of(live.socket);
        if let Some(choice) = choice.filter(|choice| !choice.pending) {
            return choice.bump;
        }
        if let Some(bump) = marks(&self.config).bump_of(live.mark) {
            return bump.get();
        }
        // The kernel applies a rule with the next packet.
        state.ruled_bump(live).unwrap_or(0)
    }

    /// What the user is shown of connections, in the same order.
    pub(crate) async fn describe(&self, lives: &[Live]) -> anyhow::Result<Vec<ConnInfo>> {
        let (_, conns) = self.driver.conns().await?;
        let mut carried: HashMap<Pair, Vec<ConnSnapshot>> = HashMap::new();
        for conn in conns {
            carried.entry(pair_of(&conn.tuple)).or_default().push(conn);
        }
        let inodes: HashSet<u64> = lives.iter().map(|live| live.inode).collect();
        // It reads all of /proc.
        let processes = tokio::task::spawn_blocking(move || sockets::processes(&inodes)).await?;
        let now = wall();
        let mut infos = Vec::with_capacity(lives.len());
        for live in lives {
            let bump = self.bump_of(live);
            let (id, since) = self.registry.borrow_mut().note(live, bump, now);
            let process = processes.get(&live.inode);
            let on_bumps = carried.get(&live.pair).map_or(&[][..], Vec::as_slice);
            infos.push(ConnInfo {
                id,
                peer: self.peer_name(live.peer).to_owned(),
                local: live.pair.local.into(),
                remote: live.pair.remote.into(),
                bump: self.bumps.name_of(bump).to_owned(),
                process: process.map(|process| process.name.clone()),
                pid: process.map(|process| process.pid),
                uid: live.uid,
                since,
                bytes_sent: on_bumps.iter().map(|conn| conn.stats.bytes_sent).sum(),
                bytes_received: on_bumps.iter().map(|conn| conn.stats.bytes_received).sum(),
                retransmissions: live.counts.retransmissions.into(),
                paths: self.by_path(on_bumps),
            });
        }
        Ok(infos)
    }

    /// The part that each path had in a connection's bytes.
    fn by_path(&self, conns: &[ConnSnapshot]) -> Vec<ConnPathInfo> {
        let mut infos: BTreeMap<usize, ConnPathInfo> = BTreeMap::new();
        for (path, bytes) in conns.iter().flat_map(|conn| conn.by_path.iter()) {
            let info = infos.entry(path).or_insert_with(|| ConnPathInfo {
                name: self.config.paths[path].name.clone(),
                bytes_sent: 0,
                bytes_received: 0,
            });
            info.bytes_sent += bytes.sent;
            info.bytes_received += bytes.received;
        }
        infos.into_values().collect()
    }

    /// Forgets the numbers of connections that are gone.
    pub(crate) fn forget_gone(&self, lives: &[Live]) {
        let alive: HashSet<Pair> = lives.iter().map(|live| live.pair).collect();
        self.registry
            .borrow_mut()
            .known
            .retain(|pair, _| alive.contains(pair));
    }
}
