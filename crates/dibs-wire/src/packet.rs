//! Validated views of the IP packets that a TUN hands over.
//!
//! By hand, as this is on the way of each packet: 11 ns for a segment with time stamps, where etherparse 0.21 takes 30
//! (IPv4) and 42 (IPv6); 2026-11-25, `cargo bench --bench headers`.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::seq::SeqNumber;

/// IP protocol number of TCP.
pub const TCP: u8 = 6;
/// IP protocol number of ICMP.
pub const ICMP: u8 = 1;
/// IP protocol number of ICMPv6.
pub const ICMPV6: u8 = 58;

/// TCP flag bits as they stand in the 16-bit word with the data offset masked out.
pub mod flags {
    /// No more data from the sender.
    pub const FIN: u16 = 0x001;
    /// Synchronise sequence numbers.
    pub const SYN: u16 = 0x002;
    /// Reset the connection.
    pub const RST: u16 = 0x004;
    /// Push.
    pub const PSH: u16 = 0x008;
    /// The acknowledgement field counts.
    pub const ACK: u16 = 0x010;
    /// The urgent pointer counts.
    pub const URG: u16 = 0x020;
    /// ECN echo.
    pub const ECE: u16 = 0x040;
    /// Congestion window reduced.
    pub const CWR: u16 = 0x080;
}

/// Transport protocol of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
}

/// Addresses and ports of one direction of a flow. On a host of the flow the source is the local end.
///
/// Smaller than two [`SocketAddr`], of which tables have thousands: an address's scope is left out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    /// Transport protocol.
    pub protocol: Protocol,
    /// Source address.
    pub src: IpAddr,
    /// Source port.
    pub sport: u16,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    /// Destination port.
    pub dport: u16,
}

impl FlowKey {
    /// Flow of TCP from `source` to `destination`.
    pub fn tcp(source: impl Into<SocketAddr>, destination: impl Into<SocketAddr>) -> Self {
        let (source, destination) = (source.into(), destination.into());
        Self {
            protocol: Protocol::Tcp,
            src: source.ip(),
            sport: source.port(),
            dst: destination.ip(),
            dport: destination.port(),
        }
    }

    /// The other direction of the same flow.
    pub const fn reversed(self) -> Self {
        Self {
            protocol: self.protocol,
            src: self.dst,
            sport: self.dport,
            dst: self.src,
            dport: self.sport,
        }
    }

    /// Source address and port.
    pub const fn source(&self) -> SocketAddr {
        SocketAddr::new(self.src, self.sport)
    }

    /// Destination address and port.
    pub const fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.dst, self.dport)
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.source(), self.destination())
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The fields of an IP header that a flow keeps beside its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct IpMeta {
    /// DSCP and ECN (IPv4 TOS, IPv6 traffic class).
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// IPv6 flow label, 20 bits; zero for IPv4.
    pub flow_label: u32,
}

/// Why bytes are not an IP packet that may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Shorter than its headers or than its own length field says.
    #[error("truncated packet")]
    Truncated,
    /// Neither IPv4 nor IPv6.
    #[error("IP version {0}")]
    Version(u8),
    /// Header length or total length contradict each other.
    #[error("inconsistent lengths")]
    Lengths,
}

/// An IP packet of which every length has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    /// A TCP segment (or superpacket) that can be cut at will.
    Tcp(Segment<'a>),
    /// Anything else: another protocol, a fragment, IP options, TCP with MD5 or AO.
    Opaque(Opaque<'a>),
}

impl Packet<'_> {
    /// Bytes of the packet by its own length field: what lies behind them is none of it.
    pub const fn own_len(&self) -> usize {
        match self {
            Self::Tcp(segment) => segment.payload_at + segment.payload.len(),
            Self::Opaque(opaque) => opaque.bytes.len(),
        }
    }
}

/// An IP packet that is carried as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opaque<'a> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// IPv4 protocol, or the IPv6 next header of the fixed header.
    pub protocol: u8,
    /// Fragment of IPv4, one of several (IPv6 fragments have protocol 44).
    pub fragment: bool,
    /// Offset in `bytes` of the upper layer.
    pub upper: usize,
    /// The whole packet, cut to its own length.
    pub bytes: &'a [u8],
}

/// A TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Addresses and ports.
    pub tuple: FlowKey,
    /// The other IP fields that are kept.
    pub meta: IpMeta,
    /// Sequence number of the first payload byte (of SYN, if set).
    pub seq: SeqNumber,
    /// Acknowledgement number.
    pub ack: SeqNumber,
    /// All flag bits, see [`flags`].
    pub flags: u16,
    /// Window field, unscaled.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// TSval and TSecr, if the option is there.
    pub timestamps: Option<(u32, u32)>,
    /// The raw options, a multiple of four bytes.
    pub options: &'a [u8],
    /// Offset of the payload from the start of the packet.
    pub payload_at: usize,
    /// The payload.
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Offset of the TCP header from the start of the packet.
    pub const fn tcp_at(&self) -> usize {
        self.payload_at - self.options.len() - 20
    }

    /// True if a flag is set.
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// True if the options are exactly the time stamps in the usual layout (NOP NOP TS), or none: then they need not be
    /// carried raw.
    pub fn has_plain_options(&self) -> bool {
        match self.timestamps {
            None => self.options.is_empty(),
            Some(_) => self.options.len() == 12 && self.options[..4] == [1, 1, 8, 10],
        }
    }
}

/// Reads an IP packet. Trailing bytes beyond its own length are cut off.
pub fn parse(bytes: &[u8]) -> Result<Packet<'_>, ParseError> {
    match bytes.first().map(|b| b >> 4) {
        None => Err(ParseError::Truncated),
        Some(4) => parse_v4(bytes),
        Some(6) => parse_v6(bytes),
        Some(version) => Err(ParseError::Version(version)),
    }
}

fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn parse_v4(bytes: &[u8]) -> Result<Packet<'_>, ParseError> {
    if bytes.len() < 20 {
        return Err(ParseError::Truncated);
    }
    let header = usize::from(bytes[0] & 15) * 4;
    let total = usize::from(be16(bytes, 2));
    if header < 20 || total < header {
        return Err(ParseError::Lengths);
    }
    let bytes = bytes.get(..total).ok_or(ParseError::Truncated)?;
    let addr = |at: usize| IpAddr::V4(Ipv4Addr::from_bits(be32(bytes, at)));
    let opaque = Opaque {
        src: addr(12),
        dst: addr(16),
        protocol: bytes[9],
        // More fragments, or an offset.
        fragment: be16(bytes, 6) & 0x3fff != 0,
        upper: header,
        bytes,
    };
    let meta = IpMeta {
        tos: bytes[1],
        ttl: bytes[8],
        flow_label: 0,
    };
    if opaque.fragment || header != 20 || opaque.protocol != TCP {
        return Ok(Packet::Opaque(opaque));
    }
    parse_tcp(opaque, meta)
}

fn parse_v6(bytes: &[u8]) -> Result<Packet<'_>, ParseError> {
    if bytes.len() < 40 {
        return Err(ParseError::Truncated);
    }
    let total = 40 + usize::from(be16(bytes, 4));
    let bytes = bytes.get(..total).ok_or(ParseError::Truncated)?;
    let addr = |at: usize| {
        let octets: [u8; 16] = bytes[at..at + 16]
            .try_into()
            .expect("sixteen bytes were sliced");
        IpAddr::V6(Ipv6Addr::from(octets))
    };
    let first = be32(bytes, 0);
    let opaque = Opaque {
        src: addr(8),
        dst: addr(24),
        protocol: bytes[6],
        fragment: bytes[6] == 44,
        upper: 40,
        bytes,
    };
    let meta = IpMeta {
        tos: (first >> 20) as u8,
        ttl: bytes[7],
        flow_label: first & 0xf_ffff,
    };
    if opaque.protocol != TCP {
        return Ok(Packet::Opaque(opaque));
    }
    parse_tcp(opaque, meta)
}

fn parse_tcp(ip: Opaque<'_>, meta: IpMeta) -> Result<Packet<'_>, ParseError> {
    let tcp = &ip.bytes[ip.upper..];
    if tcp.len() < 20 {
        return Err(ParseError::Truncated);
    }
    let header = usize::from(tcp[12] >> 4) * 4;
    if header < 20 {
        return Err(ParseError::Lengths);
    }
    if tcp.len() < header {
        return Err(ParseError::Truncated);
    }
    let options = &tcp[20..header];
    let Some(timestamps) = read_options(options) else {
        return Ok(Packet::Opaque(ip));
    };
    Ok(Packet::Tcp(Segment {
        tuple: FlowKey {
            protocol: Protocol::Tcp,
            src: ip.src,
            sport: be16(tcp, 0),
            dst: ip.dst,
            dport: be16(tcp, 2),
        },
        meta,
        seq: SeqNumber::new(be32(tcp, 4)),
        ack: SeqNumber::new(be32(tcp, 8)),
        flags: be16(tcp, 12) & 0x0fff,
        window: be16(tcp, 14),
        urgent: be16(tcp, 18),
        timestamps,
        options,
        payload_at: ip.upper + header,
        payload: &tcp[header..],
    }))
}

/// The time stamps among the options; `None` if an option covers the segment as a whole (MD5, AO)
/// or the list is malformed, so that the segment must not be cut.
fn read_options(mut options: &[u8]) -> Option<Option<(u32, u32)>> {
    let mut timestamps = None;
    while let [kind, rest @ ..] = options {
        match kind {
            0 => break,
            1 => options = rest,
            19 | 29 => return None,
            _ => {
                let len = usize::from(*rest.first()?);
                if len < 2 {
                    return None;
                }
                let option = options.get(..len)?;
                if *kind == 8 && len == 10 {
                    timestamps = Some((be32(option, 2), be32(option, 6)));
                }
                options = &options[len..];
            }
        }
    }
    Some(timestamps)
}

#[cfg(test)]
mod tests;
