//! What a peer may open here (docs/threat-model.md, "The peer").
//!
//! What comes out of a TUN comes in by no interface that a firewall's rules may name, so the node itself keeps
//! peers from what listens on the host's other addresses. It judges what begins a connection, a SYN without ACK:
//! all else the kernel discards, or answers with RST, where it does not belong to a connection.

use core::fmt;
use std::net::{IpAddr, SocketAddr};

use dibs_wire::packet::{Opaque, Packet, TCP, flags};

use super::hosts::Hosts;
use super::{Shared, inner};
use crate::flow::conn::Conn;

/// Addresses of this host, or behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Those of the paths' interfaces, and of networks that the host forwards for.
    Paths,
    /// All.
    Any,
    /// This one.
    Address(IpAddr),
}

/// Where a peer may begin connections to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The addresses.
    pub place: Place,
    /// The lowest port.
    pub first: u16,
    /// The highest port.
    pub last: u16,
}

impl Opening {
    /// What a peer may open if nothing is said of it.
    pub const PATHS: Self = Self::all(Place::Paths);
    /// Everything.
    pub const ANY: Self = Self::all(Place::Any);

    const fn all(place: Place) -> Self {
        Self {
            place,
            first: 0,
            last: u16::MAX,
        }
    }

    pub(super) fn admits(&self, shared: &Shared, (addr, port): (IpAddr, u16)) -> bool {
        let there = match self.place {
            Place::Paths => shared.is_reachable(addr),
            Place::Any => true,
            Place::Address(only) => only == addr,
        };
        there && (self.first..=self.last).contains(&port)
    }
}

/// As the configuration has it.
impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            _ if *self == Self::PATHS => return f.write_str("paths"),
            Place::Any => return f.write_str("any"),
            Place::Paths => write!(f, "{}", self.first)?,
            Place::Address(addr) => write!(f, "{}", SocketAddr::new(addr, self.first))?,
        }
        match self.first == self.last {
            true => Ok(()),
            false => write!(f, "-{}", self.last),
        }
    }
}

impl Hosts {
    /// Whether a segment of this connection with these flags begins it, which the peer may not.
    pub(super) fn refuses(&self, shared: &Shared, conn: Option<&Conn>, flags: u16) -> bool {
        let conn = conn.filter(|_| begins(flags));
        let tuple = conn.and_then(|conn| Some(conn.inc.as_ref()?.template.tuple));
        tuple.is_some_and(|to| !self.may_open(shared, (to.dst, to.dport)))
    }

    /// Whether a packet that was not cut begins a connection that the peer may not, or may do so for all that can be
    /// seen of it.
    pub(super) fn refuses_whole(&self, shared: &Shared, packet: &Packet<'_>) -> bool {
        let refused = |to| !self.may_open(shared, to);
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
}

/// Bytes of a TCP header without options.
const TCP_HEADER: usize = 20;

const fn begins(tcp: u16) -> bool {
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
