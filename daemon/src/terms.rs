//! What one crate calls a thing that another knows by another name: TUNs, marks, prefixes, the ends of connections.

use std::net::SocketAddr;

use dibs_config::Config;
use dibs_policy::conntrack::{self, Connection};
use dibs_policy::{Ends, MarkLayout};
use dibs_settings::BumpId;
use dibs_switch::conns::Pair;
use ipnet::IpNet;

/// Whether a device is one of our TUNs.
pub fn is_our_tun(name: &str) -> bool {
    BumpId::all().any(|id| id.tun_name() == name)
}

/// The field in the marks: the lowest six bits of the configured run.
pub fn marks(config: &Config) -> MarkLayout {
    let mask = config.daemon.mark_mask;
    MarkLayout::new(0x3f << mask.trailing_zeros()).expect("the run has six bits at least")
}

/// A prefix for the node.
pub(crate) fn core_prefix(net: &IpNet) -> dibs_core::Prefix {
    dibs_core::Prefix::new(net.network(), net.prefix_len())
        .expect("an IpNet's length fits its family")
}

/// The same prefix for steering.
pub fn policy_prefix(net: &IpNet) -> dibs_policy::Prefix {
    dibs_policy::Prefix::new(net.network(), net.prefix_len())
        .expect("an IpNet's length fits its family")
}

/// A connection as conntrack is asked for it.
pub(crate) fn tuple(pair: &Pair) -> conntrack::Tuple {
    conntrack::Tuple::tcp(pair.local.into(), pair.remote.into())
}

/// A tracked connection as either end may have begun it.
pub(crate) fn ends(entry: &Connection) -> [Pair; 2] {
    let pair = Pair {
        local: entry.original.source.into(),
        remote: entry.original.destination.into(),
    };
    [pair, pair.reversed()]
}

/// A connection as the backstop and the list of sockets have it.
pub(crate) fn policy_ends(pair: &Pair) -> Ends {
    (pair.local.into(), pair.remote.into())
}

/// A connection as the core has it.
pub(crate) fn flow_tuple(pair: &Pair) -> dibs_wire::Tuple {
    dibs_wire::Tuple {
        src: pair.local.ip(),
        dst: pair.remote.ip(),
        sport: pair.local.port(),
        dport: pair.remote.port(),
    }
}

/// The connection that the core has as this.
pub(crate) fn pair_of(tuple: &dibs_wire::Tuple) -> Pair {
    Pair {
        local: (tuple.src, tuple.sport).into(),
        remote: (tuple.dst, tuple.dport).into(),
    }
}

/// Without the number of its interface, which a link-local one may have: the path says that, and one endpoint
/// would be two.
pub(crate) fn unscoped(to: SocketAddr) -> SocketAddr {
    SocketAddr::new(to.ip(), to.port())
}

/// What names a host in versions, the first bytes of its public key: another number than any other host's, but for
/// one chance in 2^64.
pub(crate) fn host_id(key: &dibs_config::PublicKey) -> u64 {
    let (first, _) = key.as_bytes().split_first_chunk().expect("32 bytes");
    u64::from_be_bytes(*first)
}
