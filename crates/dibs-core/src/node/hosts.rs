//! Whose hosts a peer speaks for, where it may begin connections to, and which packets may pass between it and here.
//!
//! What comes out of a TUN comes in by no interface that a firewall's rules may name, so the node itself keeps
//! peers from what listens on the host's other addresses. It judges what begins a connection, a SYN without ACK:
//! all else the kernel discards, or answers with RST, where it does not belong to a connection.

use std::net::{IpAddr, Ipv4Addr};

use dibs_settings::{Opening, left_out};
use dibs_wire::packet::{FlowKey, Opaque, Packet, TCP, flags};
use ipnet::IpNet;

use super::inner;
use super::shared::Setup;
use crate::counters::Counter;

/// See the module.
pub(super) struct Hosts {
    prefixes: Vec<IpNet>,
    /// Networks that these leave out.
    left_out: Vec<IpNet>,
    /// Prefixes of the other peers: what a longer one of these holds is not this peer's.
    foreign: Vec<IpNet>,
    accept: Vec<Opening>,
    /// Addresses that stand for others of the peer.
    lent: Vec<IpAddr>,
}

impl Hosts {
    pub(super) fn new(prefixes: Vec<IpNet>, accept: Vec<Opening>, lent: Vec<IpAddr>) -> Self {
        Self {
            left_out: left_out(&prefixes),
            prefixes,
            foreign: Vec::new(),
            accept,
            lent,
        }
    }

    /// Address that stands here for one of the peer's.
    pub(super) fn lent(&self, addr: IpAddr) -> Option<IpAddr> {
        let lent = { self.lent.iter() }.find(|lent| lent.is_ipv4() == addr.is_ipv4());
        lent.copied()
    }

    pub(super) fn prefixes(&self) -> &[IpNet] {
        &self.prefixes
    }

    #[cfg(test)]
    pub(super) fn set_prefixes(&mut self, prefixes: Vec<IpNet>) {
        self.prefixes = prefixes;
    }

    pub(super) fn set_foreign(&mut self, prefixes: Vec<IpNet>) {
        self.foreign = prefixes;
    }

    /// Length of the longest prefix of this peer that `addr` lies in.
    pub(super) fn matches(&self, addr: IpAddr) -> Option<u8> {
        let matching = self.prefixes.iter().filter(|p| p.contains(&addr));
        matching.map(IpNet::prefix_len).max()
    }

    /// True if an inner address is one of this peer's hosts: by the longest prefix of all peers, so that none speaks
    /// for another (docs/threat-model.md, "The peer").
    pub(super) fn owns(&self, addr: IpAddr) -> bool {
        let Some(len) = self.matches(addr) else {
            return false;
        };
        let longer = |p: &IpNet| p.prefix_len() > len && p.contains(&addr);
        !self.leaves_out(addr) && !self.foreign.iter().any(longer)
    }

    /// True if an address is a local one that a wide prefix of this peer does not mean.
    pub(super) fn leaves_out(&self, addr: IpAddr) -> bool {
        self.left_out.iter().any(|net| net.contains(&addr))
    }

    /// True if what one of this peer's hosts sends, whatever wide prefix it has, may be for here: an address of this
    /// host, or of one that it forwards to, and nothing else (docs/threat-model.md, "The peer").
    pub(super) fn may_reach(&self, setup: &Setup, from: IpAddr, to: IpAddr) -> bool {
        let speaks_for = is_unicast(from) && !setup.is_ours(from) && self.owns(from);
        speaks_for && is_unicast(to) && setup.is_ours(to)
    }

    /// True if the peer may begin a connection to there.
    fn may_open(&self, setup: &Setup, to: (IpAddr, u16)) -> bool {
        let mut openings = self.accept.iter();
        setup.is_beyond(to.0)
            || openings.any(|opening| opening.admits(|addr| setup.is_reachable(addr), to))
    }

    /// True if a segment of the peer with these flags begins a connection with these addresses, as the local host
    /// sends, which the peer may not.
    pub(super) fn refuses(&self, setup: &Setup, tuple: FlowKey, flags: u16) -> bool {
        begins(flags) && !self.may_open(setup, (tuple.src, tuple.sport))
    }

    /// True if a packet that was not cut begins a connection that the peer may not, or may do so for all that can be
    /// seen of it.
    pub(super) fn refuses_whole(&self, setup: &Setup, packet: &Packet<'_>) -> bool {
        let refused = |to| !self.may_open(setup, to);
        match packet {
            Packet::Tcp(s) => begins(s.flags) && refused((s.tuple.dst, s.tuple.dport)),
            Packet::Opaque(opaque) => match piece_of_tcp(opaque) {
                None => false,
                // A piece of the header alone (RFC 3128).
                Some((_, at)) if at != 0 => at < TCP_HEADER,
                Some((tcp, _)) => match tcp.first_chunk::<TCP_HEADER>() {
                    None => true,
                    Some(header) => {
                        let port = u16::from_be_bytes([header[2], header[3]]);
                        begins(header[13].into()) && refused((opaque.dst, port))
                    }
                },
            },
        }
    }

    /// Objection to a packet that is not cut and is to come out here from this peer; none if its addresses are good.
    pub(super) fn may_come(&self, setup: &Setup, packet: &Opaque<'_>) -> Result<(), Counter> {
        inner::may_pass(packet, |a| self.owns(a), |a| setup.is_ours(a))
    }

    /// True if such a packet of the local kernel may go to this peer, which would refuse any other.
    pub(super) fn may_go(&self, setup: &Setup, packet: &Opaque<'_>) -> bool {
        inner::may_pass(packet, |a| setup.is_ours(a), |a| self.owns(a)).is_ok()
    }
}

/// True if an address can be a single host's in a network.
pub(super) fn is_unicast(addr: IpAddr) -> bool {
    let broadcast = addr == IpAddr::V4(Ipv4Addr::BROADCAST);
    !(addr.is_loopback() || addr.is_multicast() || addr.is_unspecified() || broadcast)
}

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

/// True if a segment with these flags begins a connection.
pub(super) const fn begins(tcp: u16) -> bool {
    tcp & (flags::SYN | flags::ACK) == flags::SYN
}

/// What a packet has of a TCP segment, and where in the segment that is, if it has any of one.
fn piece_of_tcp<'a>(packet: &Opaque<'a>) -> Option<(&'a [u8], usize)> {
    let bytes = &packet.bytes[packet.upper..];
    if packet.dst.is_ipv4() {
        let at = usize::from(u16::from_be_bytes([packet.bytes[6], packet.bytes[7]]) & 0x1fff) * 8;
        return (packet.protocol == TCP).then_some((bytes, at));
    }
    // What hides its protocol better than that is refused before.
    let upper = inner::behind_extensions(packet.protocol, bytes).ok()?;
    (upper.protocol == TCP).then_some((upper.bytes, upper.fragment.unwrap_or(0)))
}
