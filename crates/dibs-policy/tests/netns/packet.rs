//! As much of IP and TCP as it takes to see what a TUN takes and to give it something.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(crate) const SYN: u8 = 0x02;
pub(crate) const ACK: u8 = 0x10;

/// A TCP segment or UDP datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) protocol: u8,
    pub(crate) source: SocketAddr,
    pub(crate) destination: SocketAddr,
    pub(crate) flags: u8,
    pub(crate) payload: Vec<u8>,
}

impl Packet {
    /// Reads an IP packet without extension headers; `None` for anything but TCP and UDP.
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
            _ => return None,
        };
        let port = |at: usize| Some(u16::from_be_bytes(body.get(at..at + 2)?.try_into().ok()?));
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
    let mut tcp = Vec::new();
    tcp.extend(source.port().to_be_bytes());
    tcp.extend(destination.port().to_be_bytes());
    tcp.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, SYN, 0xff, 0xff, 0, 0, 0, 0]);
    let length = (tcp.len() as u16).to_be_bytes();
    let mut pseudo = match (source.ip(), destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => [from.octets(), to.octets()].concat(),
        (IpAddr::V6(from), IpAddr::V6(to)) => [from.octets(), to.octets()].concat(),
        _ => panic!("one family"),
    };
    let addresses = pseudo.clone();
    pseudo.extend([0, 6]);
    pseudo.extend(length);
    pseudo.extend(&tcp);
    let checksum = checksum(&pseudo);
    tcp[16..18].copy_from_slice(&checksum);
    let mut packet = match source {
        SocketAddr::V4(_) => {
            let total = (20 + tcp.len() as u16).to_be_bytes();
            let mut ip = vec![0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 6, 0, 0];
            ip.extend(&addresses);
            let checksum = self::checksum(&ip);
            ip[10..12].copy_from_slice(&checksum);
            ip
        }
        SocketAddr::V6(_) => {
            let mut ip = vec![0x60, 0, 0, 0, length[0], length[1], 6, 64];
            ip.extend(&addresses);
            ip
        }
    };
    packet.extend(tcp);
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
