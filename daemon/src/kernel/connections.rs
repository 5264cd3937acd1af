//! The live TCP connections to peers: sockets, their marks, where they are.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;

use dibs_control::{ConnInfo, ConnPathInfo};
use dibs_core::node::ConnSnapshot;
use dibs_policy::conntrack::{Connection, LOOKUPS};
use dibs_policy::sockets::{self, TcpSocket};
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::host::clock::wall;
use crate::host::live::Live;
use crate::kernel::gateway;
use crate::kernel::steering::marks;
use crate::switch::Daemon;
use crate::switch::silence;

/// The kernel's TCP states, include/net/tcp_states.h.
const TIME_WAIT: u8 = 6;
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;

/// All connections to peers, those that are over included, with their marks.
pub(crate) async fn all(daemon: &Daemon) -> anyhow::Result<Vec<Live>> {
    let mut lives = sockets(daemon).await?;
    let installed = !daemon.state.borrow().installed.is_empty();
    if installed && lives.len() <= LOOKUPS {
        let mut conntrack = daemon.kernel.conntrack()?;
        for live in &mut lives {
            let entry = conntrack.get(&live.pair).await?;
            live.mark = entry.map_or(0, |entry| entry.mark);
        }
    } else if installed {
        let mut tracked = HashMap::new();
        let marks = |entry: Connection| {
            let ends = ends_to_peers(daemon, &entry);
            tracked.extend(ends.map(|pair| (pair, entry.mark)));
            None::<()>
        };
        daemon.kernel.conntrack()?.list(marks).await?;
        for live in &mut lives {
            live.mark = tracked.get(&live.pair).copied().unwrap_or(0);
        }
    }
    Ok(lives)
}

/// As [`connections`](all), without looking at marks.
pub(crate) async fn sockets(daemon: &Daemon) -> anyhow::Result<Vec<Live>> {
    sockets_as(daemon, Some).await
}

/// What `pick` makes of [`sockets()`]: there may be thousands.
pub(crate) async fn sockets_as<U>(
    daemon: &Daemon,
    pick: impl Fn(Live) -> Option<U>,
) -> anyhow::Result<Vec<U>> {
    let mut found = sockets::list(|socket| pick(live(daemon, socket)?)).await?;
    found.extend(
        gateway::all_passing(daemon)
            .await?
            .into_iter()
            .filter_map(pick),
    );
    Ok(found)
}

/// Those of these connections that there are, without looking at marks.
pub(crate) async fn sockets_of(
    daemon: &Daemon,
    pairs: &[FlowKey],
) -> Result<HashMap<FlowKey, Live>, dibs_policy::Error> {
    let found = sockets::find(pairs).await?.into_iter();
    let lives = found.filter_map(|socket| live(daemon, socket));
    let lives = lives.chain(gateway::passing_of(daemon, pairs).await?);
    Ok(lives.map(|live| (live.pair, live)).collect())
}

fn live(daemon: &Daemon, socket: TcpSocket) -> Option<Live> {
    Some(Live {
        pair: socket.key,
        peer: daemon.peer_of(socket.key.dst)?,
        socket: Socket(socket.cookie as u32),
        uid: Some(socket.uid),
        inode: socket.inode,
        bound: socket.bound_device != 0,
        mptcp: socket.mptcp,
        over: socket.state == TIME_WAIT,
        established: socket.state == ESTABLISHED,
        opening: socket.state == SYN_SENT,
        counts: socket.counts.unwrap_or_default(),
        mark: 0,
    })
}

/// The bump that a connection is on, if it is on one.
pub(crate) fn bump_of(daemon: &Daemon, live: &Live) -> Option<BumpId> {
    let state = daemon.state.borrow();
    state.ruling(live).is_on(marked(daemon, live))
}

fn marked(daemon: &Daemon, live: &Live) -> Option<BumpId> {
    marks(&daemon.config).bump_of(live.mark)
}

/// What the user is shown of connections, in the same order.
pub(crate) async fn describe(daemon: &Daemon, lives: &[Live]) -> anyhow::Result<Vec<ConnInfo>> {
    let (_, conns) = daemon.driver.conns().await?;
    let mut carried: HashMap<FlowKey, Vec<ConnSnapshot>> = HashMap::new();
    for conn in conns {
        carried.entry(conn.tuple).or_default().push(conn);
    }
    let inodes: HashSet<u64> = lives.iter().map(|live| live.inode).collect();
    // It reads all of /proc.
    let processes = tokio::task::spawn_blocking(move || sockets::processes(&inodes)).await?;
    let now = wall();
    let mut infos = Vec::with_capacity(lives.len());
    for live in lives {
        let bump = bump_of(daemon, live);
        let (id, since) = daemon.registry.borrow_mut().note(live, bump, now);
        let process = processes.get(&live.inode);
        let on_bumps = carried.get(&live.pair).map_or(&[][..], Vec::as_slice);
        let theirs = on_bumps.first().map_or(live.pair, |conn| conn.theirs);
        let other = |there: SocketAddr, here: SocketAddr| (there != here).then_some(there);
        infos.push(ConnInfo {
            id,
            peer: daemon.peer_name(live.peer).to_owned(),
            local: live.pair.source(),
            remote: live.pair.destination(),
            local_there: other(theirs.source(), live.pair.source()),
            remote_there: other(theirs.destination(), live.pair.destination()),
            bump: daemon.bumps.name_of(bump).to_owned(),
            process: process.map(|process| process.name.clone()),
            pid: process.map(|process| process.pid),
            uid: live.uid,
            mptcp: live.mptcp,
            since,
            bytes_sent: on_bumps.iter().map(|conn| conn.stats.bytes_sent).sum(),
            bytes_received: on_bumps.iter().map(|conn| conn.stats.bytes_received).sum(),
            retransmissions: live.counts.retransmissions.into(),
            paths: by_path(daemon, on_bumps),
            reason: silence::reason(daemon, live, bump),
        });
    }
    Ok(infos)
}

/// The part that each path had in a connection's bytes.
fn by_path(daemon: &Daemon, conns: &[ConnSnapshot]) -> Vec<ConnPathInfo> {
    let mut infos: BTreeMap<usize, ConnPathInfo> = BTreeMap::new();
    for (path, bytes) in conns.iter().flat_map(|conn| conn.by_path.iter()) {
        let info = infos.entry(path).or_insert_with(|| ConnPathInfo {
            name: daemon.config.paths[path].name.clone(),
            bytes_sent: 0,
            bytes_received: 0,
        });
        info.bytes_sent += bytes.sent;
        info.bytes_received += bytes.received;
    }
    infos.into_values().collect()
}

/// Forgets the numbers of connections that are gone.
pub(crate) fn forget_gone(daemon: &Daemon, lives: &[Live]) {
    let alive: HashSet<FlowKey> = lives.iter().map(|live| live.pair).collect();
    daemon.registry.borrow_mut().retain(&alive);
}

/// A tracked connection as either end may have begun it, if the other is behind a peer.
pub(crate) fn ends_to_peers(daemon: &Daemon, entry: &Connection) -> impl Iterator<Item = FlowKey> {
    let to_peer = |pair: &FlowKey| daemon.peer_of(pair.dst).is_some();
    entry.ends().into_iter().filter(to_peer)
}

/// All connections to peers.
pub(crate) async fn lives(daemon: &Daemon) -> anyhow::Result<Vec<Live>> {
    let all = all(daemon).await?;
    forget_gone(daemon, &all);
    Ok(all)
}
