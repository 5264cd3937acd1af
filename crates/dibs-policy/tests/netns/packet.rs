//! As much of IP and TCP as it takes to see what a TUN takes and to give it something.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

/// ICMP's and ICMPv6's "destination unreachable".
pub(crate) const UNREACHABLE: [u8; 2] = [3, 1];

/// A TCP segment, UDP datagram or ICMP error; of the last `flags` is the type.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) protocol: u8,
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) flags: u8,
    pub(crate) payload: Vec<u8>,
}

impl Packet {
    /// Reads an IP packet without extension headers; `None` for anything else.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (protocol, source, destination, body): (_, IpAddr, IpAddr, _) =
            match bytes.first()? >> 4 {
                4 => {
                    let address = |at: usize| -> Option<Ipv4Addr> {
                        Some(<[u8; 4]>::try_from(bytes.get(at..at + 4)?).ok()?.into())
                    };
                    let header = usize::from(bytes[0] & 0xf) * 4;
                    (
                        *bytes.get(9)?,
                        address(12)?.into(),
                        address(16)?.into(),
                        bytes.get(header..)?,
                    )
                }
                6 => {
                    let address = |at: usize| -> Option<Ipv6Addr> {
                        Some(<[u8; 16]>::try_from(bytes.get(at..at + 16)?).ok()?.into())
                    };
                    (
                        *bytes.get(6)?,
                        address(8)?.into(),
                        address(24)?.into(),
                        bytes.get(40..)?,
                    )
                }
                _ => return None,
            };
        let (flags, header) = match protocol {
            6 => (*body.get(13)?, usize::from(body.get(12)? >> 4) * 4),
            17 => (0, 8),
            1 | 58 if UNREACHABLE.contains(body.first()?) => (body[0], 8),
            _ => return None,
        };
        let port = |at: usize| {
            let ports = if header == 8 && flags > 0 {
                &[0; 4]
            } else {
                body.get(..4)?
            };
            Some(u16::from_be_bytes([ports[at], ports[at + 1]]))
        };
        Some(Self {
            protocol,
            source: SocketAddr::new(source, port(0)?),
            destination: SocketAddr::new(destination, port(2)?),
            flags,
            payload: body.get(header..)?.to_vec(),
        })
    }
}

/// A SYN.
pub(crate) fn syn(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    segment(source, destination, SYN)
}

/// A TCP segment without payload.
pub(crate) fn segment(source: SocketAddr, destination: SocketAddr, flags: u8) -> Vec<u8> {
    let rest = [0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0xff, 0xff, 0, 0, 0, 0];
    packet(6, source, destination, &rest, 16)
}

/// A UDP datagram without payload.
pub(crate) fn datagram(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    packet(17, source, destination, &[0, 8, 0, 0], 6)
}

/// An echo request.
pub(crate) fn echo(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let mut body = vec![0, 0, 0, 0, 0, 1, 0, 1];
    let (protocol, sum) = match (source, destination) {
        (IpAddr::V4(_), _) => {
            body[0] = 8;
            (1, checksum(&body))
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            body[0] = 128;
            let addresses = [from.octets(), to.octets()].concat();
            (
                58,
                checksum(&[&addresses[..], &[0, 58, 0, 8], &body].concat()),
            )
        }
        _ => panic!("one family"),
    };
    body[2..4].copy_from_slice(&sum);
    around(protocol, source, destination, &body)
}

/// A packet whose transport header is both ports, then `rest`, with its checksum at `at`.
fn packet(
    protocol: u8,
    source: SocketAddr,
    destination: SocketAddr,
    rest: &[u8],
    at: usize,
) -> Vec<u8> {
    let mut body = [
        source.port().to_be_bytes(),
        destination.port().to_be_bytes(),
    ]
    .concat();
    body.extend(rest);
    let length = (body.len() as u16).to_be_bytes();
    let addresses = match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => [from.octets(), to.octets()].concat(),
        (IpAddr::V6(from), IpAddr::V6(to)) => [from.octets(), to.octets()].concat(),
        _ => panic!("one family"),
    };
    let sum = checksum(&[&addresses[..], &[0, protocol], &length, &body].concat());
    body[at..at + 2].copy_from_slice(&sum);
    around(protocol, source.ip(), destination.ip(), &body)
}

/// The IP packet of a body.
fn around(protocol: u8, source: IpAddr, destination: IpAddr, body: &[u8]) -> Vec<u8> {
    let mut packet = match (source, destination) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let total = (20 + body.len() as u16).to_be_bytes();
            let mut ip = vec![0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, protocol, 0, 0];
            ip.extend([from.octets(), to.octets()].concat());
            let sum = checksum(&ip);
            ip[10..12].copy_from_slice(&sum);
            ip
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let length = (body.len() as u16).to_be_bytes();
            let mut ip = vec![0x60, 0, 0, 0, length[0], length[1], protocol, 64];
            ip.extend([from.octets(), to.octets()].concat());
            ip
        }
        _ => panic!("one family"),
    };
    packet.extend(body);
    packet
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}
