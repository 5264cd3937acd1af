//! What the user may see.

use std::net::{IpAddr, SocketAddr};

use dibs_settings::BumpId;
use dibs_wire::{FlowKey, SeqNumber};

use super::association::CarriedBump;
use super::dispatch::{Node, route_conn};
use super::names;
use super::silence::SilentPort;
use crate::counters::Counters;
use crate::flow::conn::{ByPath, ConnStats};
use crate::path::PathStats;
use crate::preference::Unused;
use crate::session::{KeyOrigin, PeerState};
use crate::time::Time;

/// A peer.
#[derive(Clone, Debug)]
pub struct PeerSnapshot {
    /// Its session.
    pub state: PeerState,
    /// Origin of the session's keys, if there is a session to send by.
    pub keys: Option<KeyOrigin>,
    /// Keys can be agreed with it by untrusted paths, too, as things are.
    pub by_untrusted: bool,
    /// Paths to it are usable, and it has not been silent for seconds on all of them: a pause of a busy link is no absence.
    pub reachable: bool,
    /// Connections known.
    pub conns: usize,
    /// Bytes held out of order for it.
    pub held: usize,
    /// Sets of shares that are not complete, and their bytes.
    pub sets: (usize, usize),
    /// Bytes sent and not acknowledged.
    pub unacknowledged: usize,
    /// The bumps that it carries, as it said at the last handshake.
    pub bumps: Vec<CarriedBump>,
    /// Ports of this host that do not answer it.
    pub silent: Vec<SilentPort>,
    /// Trusted local paths, by index, that did not come about, and the address of this host at which it asked for each last.
    pub misdirected: Vec<(usize, IpAddr)>,
}

/// A path to a peer.
#[derive(Clone, Debug)]
pub struct PathSnapshot {
    /// The peer's index.
    pub peer: usize,
    /// Its number on the wire.
    pub id: u8,
    /// The local path's index.
    pub local: usize,
    /// The peer's end.
    pub remote: SocketAddr,
    /// The lower of both labels.
    pub trusted: bool,
    /// "active", "suspect", "down", "joining".
    pub state: &'static str,
    /// Why it carries no new data; none if it may.
    pub unused: Option<Unused>,
    /// Bytes received by it.
    pub bytes_received: u64,
    /// Measurements of it.
    pub stats: PathStats,
    /// Trust keeps data waiting that another path could carry.
    pub held_by_trust: bool,
    /// There are fewer paths than what should be split needs, so it waits.
    pub short_of_paths: bool,
}

/// A connection.
#[derive(Clone, Debug)]
pub struct ConnSnapshot {
    /// The peer's index.
    pub peer: usize,
    /// Addresses and ports as the local host sends.
    pub tuple: FlowKey,
    /// The same as the peer calls it, where addresses are translated between the two hosts.
    pub theirs: FlowKey,
    /// The bump.
    pub bump: BumpId,
    /// Time at which it came to the bump, or of its first packet there.
    pub since: Time,
    /// Last packet.
    pub last_seen: Time,
    /// The peer opened its direction.
    pub opened: bool,
    /// Behind what the local kernel has sent by the bump, and what it has acknowledged, if it has done both.
    pub stands: Option<(SeqNumber, SeqNumber)>,
    /// Window that the local kernel last advertised, as it stands in the header.
    pub window: u16,
    /// Numbers as in [`stands`](Self::stands), of the time when it left plain.
    pub entered: Option<(SeqNumber, SeqNumber)>,
    /// Number behind the bytes of the local kernel that it knows to be acknowledged, if the connection has time stamps.
    pub given: Option<SeqNumber>,
    /// The two kernels do not count the same bytes alike, since something on the ordinary route changes TCP's numbers.
    pub renumbered: bool,
    /// Their numbers do not fit although the connection is at rest, as far as that is known.
    pub apart: bool,
    /// Counters.
    pub stats: ConnStats,
    /// Payload bytes by local path.
    pub by_path: ByPath,
}

impl Node {
    /// Bytes of UDP payload by local path that sessions sent, or opened: neither handshakes nor what strangers send.
    pub fn carried(&self) -> &[u64] {
        &self.shared.journal.carried
    }

    /// All peers, by index.
    pub fn peers(&self, now: Time) -> Vec<PeerSnapshot> {
        self.peers
            .iter()
            .map(|p| PeerSnapshot {
                state: self.sessions.state(now, p.id),
                reachable: p.paths.iter().any(|l| l.is_answering(&self.shared.setup)),
                keys: self.sessions.origin(now, p.id),
                by_untrusted: self.sessions.may_go_by_untrusted(p.id),
                conns: p.flows.len(),
                held: p.receiver.held(),
                sets: p.receiver.sets(),
                unacknowledged: p.in_flight.span(),
                bumps: p.association.carried().to_vec(),
                silent: p.receiver.silent.ports(),
                misdirected: { p.paths.misdirected().iter() }
                    .map(|(path, to)| (path.get(), *to))
                    .collect(),
            })
            .collect()
    }

    /// All paths.
    pub fn paths(&self) -> Vec<PathSnapshot> {
        let of_peer = |(index, peer): (usize, &super::peer::Peer)| {
            let held_by_trust = peer.queues.held_by_trust;
            peer.paths
                .iter()
                .enumerate()
                .map(|(at, link)| PathSnapshot {
                    peer: index,
                    id: link.id.get(),
                    local: link.local.get(),
                    remote: link.remote,
                    trusted: link.trusted,
                    state: link.state_name(&self.shared.setup),
                    unused: peer.paths.unused(&self.shared.setup, at),
                    bytes_received: link.bytes_received,
                    stats: link.path.stats(),
                    held_by_trust: held_by_trust && link.trusted,
                    short_of_paths: peer.queues.shares.short_of_paths,
                })
                .collect::<Vec<_>>()
        };
        self.peers.iter().enumerate().flat_map(of_peer).collect()
    }

    /// All connections.
    pub fn conns(&self) -> Vec<ConnSnapshot> {
        let of_peer = |(index, peer): (usize, &super::peer::Peer)| {
            peer.flows
                .iter()
                .map(|(_, conn)| (conn, peer.flows.tuple_of(conn)))
                .map(|(conn, tuple)| ConnSnapshot {
                    peer: index,
                    tuple,
                    theirs: peer.flows.theirs_of(&tuple).unwrap_or(tuple),
                    bump: conn.bump,
                    since: conn.since,
                    last_seen: conn.last_seen,
                    opened: conn.inc.is_some(),
                    stands: conn.sent_end.zip(conn.acked),
                    window: conn.window,
                    entered: peer.flows.entered(conn),
                    given: conn.given(),
                    renumbered: conn.is_renumbered(),
                    apart: conn.is_apart(),
                    stats: conn.stats,
                    by_path: conn.by_path.clone(),
                })
                .collect::<Vec<_>>()
        };
        self.peers.iter().enumerate().flat_map(of_peer).collect()
    }

    /// True if the peer has opened its direction of a connection on `bump`, and both kernels' numbers were compared where they have to be;
    /// `tuple` is as the local host sends.
    pub fn is_seen(&mut self, bump: BumpId, tuple: FlowKey) -> bool {
        let Some(peer) = route_conn(&mut self.peers, &tuple) else {
            return false;
        };
        let conn = peer.flows.find(tuple, bump);
        conn.and_then(|key| peer.flows.get(key))
            .is_some_and(|conn| conn.inc.is_some() && conn.is_compared())
    }

    /// Name here of a connection that a peer calls `theirs`; both as the local host sends.
    pub fn ours(&self, peer: usize, theirs: FlowKey) -> FlowKey {
        names::known(&self.peers[peer], &self.shared.setup, theirs)
    }

    /// Name at the peer of a connection that is called `ours` here; both as the local host sends.
    pub fn theirs(&self, peer: usize, ours: FlowKey) -> FlowKey {
        let theirs = self.peers[peer].flows.theirs_of(&ours);
        theirs.unwrap_or(ours)
    }

    /// All counters.
    pub fn counters(&self) -> &Counters {
        &self.shared.journal.counters
    }
}
