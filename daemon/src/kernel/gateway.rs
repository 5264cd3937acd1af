//! Connections of others that this host forwards: between the networks behind it and hosts behind peers.
//! Their sockets are elsewhere, so what conntrack has of them stands for these.

use std::hash::Hasher as _;
use std::net::IpAddr;

use dibs_config::Config;
use dibs_policy::Error;
use dibs_policy::conntrack::Connection;
use dibs_policy::sockets::TcpCounts;
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::host::Host;
use crate::host::live::Live;
use crate::kernel::Kernel;

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
pub(crate) fn note_passing(config: &Config) {
    if config.daemon.gateway.is_empty() {
        return;
    }
    for note in NOTES {
        if let Err(error) = std::fs::write(note, "1") {
            tracing::warn!("{note}: {error}: forwarded connections are told apart less well");
        }
    }
}

/// Whether a connection is not this host's own, but passes it.
pub(crate) fn passes(host: &Host, pair: &FlowKey) -> bool {
    let local = pair.src;
    is_behind(host.config(), local) && !host.has(local) && host.peer_of(pair.dst).is_some()
}

/// A tracked connection that passes this host.
pub(crate) fn passing(host: &Host, entry: &Connection) -> Option<Live> {
    let pair = entry.ends().into_iter().find(|pair| passes(host, pair))?;
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
        peer: host.peer_of(pair.dst)?,
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
pub(crate) async fn all_passing(kernel: &Kernel) -> Result<Vec<Live>, Error> {
    let host = kernel.host();
    if host.config().daemon.gateway.is_empty() {
        return Ok(Vec::new());
    }
    let listed = |entry| passing(host, &entry);
    kernel.conntrack()?.list(listed).await
}

/// Those of these connections that pass this host.
pub(crate) async fn passing_of(kernel: &Kernel, pairs: &[FlowKey]) -> Result<Vec<Live>, Error> {
    let mut found = Vec::new();
    let host = kernel.host();
    for pair in pairs.iter().filter(|pair| passes(host, pair)) {
        let entry = kernel.conntrack()?.get(pair).await?;
        found.extend(entry.and_then(|entry| passing(host, &entry)));
    }
    Ok(found)
}

/// Whether an entry that is gone was that of a connection which passes, and goes on as far as anybody
/// knows: somebody flushed the table.
pub(crate) fn was_passing(host: &Host, entry: &Connection) -> bool {
    let went_on = |state| (ESTABLISHED..=CLOSE_WAIT).contains(&state);
    entry.tcp_state.is_some_and(went_on) && passing(host, entry).is_some()
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
