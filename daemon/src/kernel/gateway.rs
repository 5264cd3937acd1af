//! Connections of others that this host forwards: between the networks behind it and hosts behind peers.
//! Their sockets are elsewhere, so what conntrack has of them stands for these.

use std::collections::BTreeSet;
use std::hash::Hasher as _;
use std::net::IpAddr;

use dibs_config::Config;
use dibs_policy::Error;
use dibs_policy::conntrack::Connection;
use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::{Choice, Socket};
use dibs_wire::FlowKey;

use crate::host::live::Live;
use crate::switch::Daemon;

/// conntrack's TCP states, include/uapi/linux/netfilter/nf_conntrack_tcp.h.
const SYN_SENT: u8 = 1;
const ESTABLISHED: u8 = 3;
const CLOSE_WAIT: u8 = 5;
const TIME_WAIT: u8 = 7;
const CLOSE: u8 = 8;

/// What conntrack is to note of each connection: when it began, which tells two of the same ends apart,
/// and its bytes.
const NOTES: [&str; 2] = [
    "/proc/sys/net/netfilter/nf_conntrack_timestamp",
    "/proc/sys/net/netfilter/nf_conntrack_acct",
];

/// Whether an address is behind this host, by its configuration.
pub(crate) fn is_behind(config: &Config, address: IpAddr) -> bool {
    config
        .daemon
        .gateway
        .iter()
        .any(|net| net.contains(&address))
}

/// Why this host does not forward what its configuration says it forwards, one sentence each.
pub(crate) fn faults(config: &Config) -> Vec<String> {
    let families = [
        ("net.ipv4.ip_forward", false),
        ("net.ipv6.conf.all.forwarding", true),
    ];
    let off = |(key, v6): &(&str, bool)| {
        let mut networks = config.daemon.gateway.iter();
        let meant = networks.any(|net| net.addr().is_ipv6() == *v6);
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        meant && std::fs::read_to_string(path).is_ok_and(|text| text.trim() == "0")
    };
    let say = |(key, _): (&str, bool)| {
        format!("gateway: this host forwards nothing, for {key} is 0: run `sysctl -w {key}=1`")
    };
    families.into_iter().filter(off).map(say).collect()
}

/// Has the kernel note what there is no socket to ask for. To be called once rules stand, for only
/// then it tracks anything.
pub(crate) fn note_passing(daemon: &Daemon) {
    if daemon.config.daemon.gateway.is_empty() {
        return;
    }
    for note in NOTES {
        if let Err(error) = std::fs::write(note, "1") {
            tracing::warn!("{note}: {error}: forwarded connections are told apart less well");
        }
    }
}

/// Whether a connection is not this host's own, but passes it.
pub(crate) fn passes(daemon: &Daemon, pair: &FlowKey) -> bool {
    let local = pair.src;
    is_behind(&daemon.config, local)
        && !daemon.host.has(local)
        && daemon.peer_of(pair.dst).is_some()
}

/// A tracked connection that passes this host.
pub(crate) fn passing(daemon: &Daemon, entry: &Connection) -> Option<Live> {
    let pair = entry.ends().into_iter().find(|pair| passes(daemon, pair))?;
    let began = entry.original.source() == pair.source();
    let in_order = |[first, second]: [u64; 2]| match began {
        true => (first, second),
        false => (second, first),
    };
    let (sent, received) = in_order(entry.bytes.unwrap_or_default());
    // It shifts the windows that the far end gives.
    let (_, scale) = in_order(entry.window_scales.map(u64::from));
    let state = entry.tcp_state.unwrap_or(ESTABLISHED);
    Some(Live {
        pair,
        peer: daemon.peer_of(pair.dst)?,
        socket: name(entry),
        uid: None,
        inode: 0,
        bound: false,
        mptcp: None,
        over: matches!(state, TIME_WAIT | CLOSE),
        established: state == ESTABLISHED,
        opening: state == SYN_SENT,
        counts: TcpCounts {
            window_scale: u8::try_from(scale).expect("it was a byte"),
            bytes_acked: sent,
            bytes_received: received,
            ..TcpCounts::default()
        },
        mark: entry.mark,
    })
}

/// All connections that pass this host.
pub(crate) async fn all_passing(daemon: &Daemon) -> Result<Vec<Live>, Error> {
    if daemon.config.daemon.gateway.is_empty() {
        return Ok(Vec::new());
    }
    daemon
        .kernel
        .conntrack()?
        .list(|entry| passing(daemon, &entry))
        .await
}

/// Those of these connections that pass this host.
pub(crate) async fn passing_of(daemon: &Daemon, pairs: &[FlowKey]) -> Result<Vec<Live>, Error> {
    let mut found = Vec::new();
    for pair in pairs.iter().filter(|pair| passes(daemon, pair)) {
        let entry = daemon.kernel.conntrack()?.get(pair).await?;
        found.extend(entry.and_then(|entry| passing(daemon, &entry)));
    }
    Ok(found)
}

/// True if the connection of an entry that is gone goes on as far as anybody knows: somebody flushed the table.
pub(crate) fn was_passing(entry: &Connection) -> bool {
    let went_on = |state| (ESTABLISHED..=CLOSE_WAIT).contains(&state);
    entry.tcp_state.is_some_and(went_on)
}

/// Whether a connection that has no entry may live all the same.
pub(crate) fn may_live(daemon: &Daemon, pair: &FlowKey) -> bool {
    passes(daemon, pair) && !daemon.state.borrow().conns.get(pair).ended
}

/// Whether a choice for the connection `live` was made for an earlier one. What passes and has a new
/// entry, by our hand or its next packet, is named anew.
pub(crate) fn has_taken(daemon: &Daemon, live: &Live, choice: Choice) -> bool {
    if live.uid.is_none() && live.established && choice.socket == Socket::UNKNOWN {
        daemon.update(&live.pair, |conn| conn.choice.rename(live.socket));
        return false;
    }
    live.socket != choice.socket
}

/// A connection that passes has a new entry, by our hand: what was chosen for it stands, and if its
/// host does not know it any more it says so.
pub(crate) async fn rename(daemon: &Daemon, pair: &FlowKey, bump: BumpId) -> Result<(), Error> {
    for live in passing_of(daemon, std::slice::from_ref(pair)).await? {
        daemon.update(pair, |conn| conn.choice.rename(live.socket));
        if !daemon.bumps.is_outside(bump) {
            // Without the data path nobody can be asked.
            let _ = daemon.driver.solicit(bump, *pair);
        }
    }
    Ok(())
}

/// The connections that pass and are locked.
pub(crate) fn locked_passing(daemon: &Daemon) -> BTreeSet<FlowKey> {
    let locked: Vec<FlowKey> = daemon.state.borrow().conns.locked().collect();
    { locked.into_iter() }
        .filter(|pair| passes(daemon, pair))
        .collect()
}

/// What tells a tracked connection from others of the same ends, before and after it.
fn name(entry: &Connection) -> Socket {
    // The kernel makes its number of the entry's place in memory and its ends, which may both come again.
    let mut hash = std::hash::DefaultHasher::new();
    hash.write_u32(entry.id);
    hash.write_u64(entry.since.unwrap_or(0));
    // 0 is nobody's name.
    Socket((hash.finish() as u32).max(1))
}
