//! The live TCP connections to peers: sockets, their marks, where they are.

use std::collections::HashMap;

use dibs_policy::conntrack::{Connection, LOOKUPS};
use dibs_policy::sockets::{self, TcpSocket};
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::host::Host;
use crate::host::live::Live;
use crate::kernel::{Kernel, gateway};

/// The kernel's TCP states, include/net/tcp_states.h.
const TIME_WAIT: u8 = 6;
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;

/// All connections to peers, those that are over included, with their marks if there are such.
pub(crate) async fn all(kernel: &Kernel, are_marked: bool) -> anyhow::Result<Vec<Live>> {
    let mut lives = sockets(kernel).await?;
    if are_marked && lives.len() <= LOOKUPS {
        let mut conntrack = kernel.conntrack()?;
        for live in &mut lives {
            let entry = conntrack.get(&live.pair).await?;
            live.mark = entry.map_or(0, |entry| entry.mark);
        }
    } else if are_marked {
        let mut tracked = HashMap::new();
        let marks = |entry: Connection| {
            let ends = ends_to_peers(kernel.host(), &entry);
            tracked.extend(ends.map(|pair| (pair, entry.mark)));
            None::<()>
        };
        kernel.conntrack()?.list(marks).await?;
        for live in &mut lives {
            live.mark = tracked.get(&live.pair).copied().unwrap_or(0);
        }
    }
    Ok(lives)
}

/// As [`connections`](all), without looking at marks.
pub(crate) async fn sockets(kernel: &Kernel) -> anyhow::Result<Vec<Live>> {
    sockets_as(kernel, Some).await
}

/// What `pick` makes of [`sockets()`]: there may be thousands.
pub(crate) async fn sockets_as<U>(
    kernel: &Kernel,
    pick: impl Fn(Live) -> Option<U>,
) -> anyhow::Result<Vec<U>> {
    let mut found = sockets::list(|socket| pick(live(kernel.host(), socket)?)).await?;
    found.extend(
        gateway::all_passing(kernel)
            .await?
            .into_iter()
            .filter_map(pick),
    );
    Ok(found)
}

/// Those of these connections that there are, without looking at marks.
pub(crate) async fn sockets_of(
    kernel: &Kernel,
    pairs: &[FlowKey],
) -> Result<HashMap<FlowKey, Live>, dibs_policy::Error> {
    let found = sockets::find(pairs).await?.into_iter();
    let lives = found.filter_map(|socket| live(kernel.host(), socket));
    let lives = lives.chain(gateway::passing_of(kernel, pairs).await?);
    Ok(lives.map(|live| (live.pair, live)).collect())
}

fn live(host: &Host, socket: TcpSocket) -> Option<Live> {
    Some(Live {
        pair: socket.key,
        peer: host.peer_of(socket.key.dst)?,
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

/// A tracked connection as either end may have begun it, if the other is behind a peer.
pub(crate) fn ends_to_peers(host: &Host, entry: &Connection) -> impl Iterator<Item = FlowKey> {
    let to_peer = |pair: &FlowKey| host.peer_of(pair.dst).is_some();
    entry.ends().into_iter().filter(to_peer)
}
