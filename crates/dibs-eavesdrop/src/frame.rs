//! What a frame of a capture carries.

use std::net::{IpAddr, SocketAddr};

use etherparse::{LaxNetSlice, LaxSlicedPacket, TransportSlice};

/// Header in front of the IP packets of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Ethernet.
    Ethernet,
    /// Nothing.
    Ip,
    /// Linux's header for captures of all interfaces, first version.
    Cooked,
    /// The same, second version.
    Cooked2,
}

impl Link {
    /// By the number that capture files have (LINKTYPE in the registry of libpcap); none for other links.
    pub fn by_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Ethernet),
            12 | 101 | 228 | 229 => Some(Self::Ip),
            113 => Some(Self::Cooked),
            276 => Some(Self::Cooked2),
            _ => None,
        }
    }
}

/// Packet of TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Sender.
    pub from: SocketAddr,
    /// To whom.
    pub to: SocketAddr,
    /// Payload.
    pub payload: Payload<'a>,
}

/// The bytes of an application, or of dibs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// What stands behind TCP's header.
    Tcp(&'a [u8]),
    /// What stands behind UDP's.
    Udp(&'a [u8]),
}

impl<'a> Payload<'a> {
    /// By whatever it is carried.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::Tcp(bytes) | Self::Udp(bytes) => bytes,
        }
    }
}

impl<'a> Packet<'a> {
    /// Packet of a frame, which may be cut at its end; none if it carries neither TCP nor UDP, or is broken.
    pub fn of(link: Link, frame: &'a [u8]) -> Option<Self> {
        let sliced = match link {
            Link::Ethernet => LaxSlicedPacket::from_ethernet(frame).ok()?,
            Link::Ip => LaxSlicedPacket::from_ip(frame).ok()?,
            Link::Cooked => LaxSlicedPacket::from_ip(frame.get(16..)?).ok()?,
            Link::Cooked2 => LaxSlicedPacket::from_ip(frame.get(20..)?).ok()?,
        };
        let (from, to): (IpAddr, IpAddr) = match sliced.net? {
            LaxNetSlice::Ipv4(ip) => {
                let ip = ip.header();
                (ip.source_addr().into(), ip.destination_addr().into())
            }
            LaxNetSlice::Ipv6(ip) => {
                let ip = ip.header();
                (ip.source_addr().into(), ip.destination_addr().into())
            }
            LaxNetSlice::Arp(_) => return None,
        };
        let (ports, payload) = match sliced.transport? {
            TransportSlice::Tcp(tcp) => (
                (tcp.source_port(), tcp.destination_port()),
                Payload::Tcp(tcp.payload()),
            ),
            TransportSlice::Udp(udp) => (
                (udp.source_port(), udp.destination_port()),
                Payload::Udp(udp.payload()),
            ),
            _ => return None,
        };
        Some(Self {
            from: SocketAddr::new(from, ports.0),
            to: SocketAddr::new(to, ports.1),
            payload,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(payload: &[u8]) -> Vec<u8> {
        let length = 28 + payload.len() as u8;
        let ip = [
            0x45, 0, 0, length, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 2, 1, 10, 0, 2, 2,
        ];
        let udp = [0x14, 0xb4, 0x14, 0xb5, 0, 0, 0, 0];
        [&[0; 12], &[8, 0][..], &ip, &udp, payload].concat()
    }

    #[test]
    fn payloads_stand_behind_their_headers_and_before_padding() {
        let mut frame = udp(b"data");
        let packet = Packet {
            from: "10.0.2.1:5300".parse().unwrap(),
            to: "10.0.2.2:5301".parse().unwrap(),
            payload: Payload::Udp(b"data"),
        };
        frame.extend([0; 14]);
        assert_eq!(Packet::of(Link::Ethernet, &frame), Some(packet));
        assert_eq!(Packet::of(Link::Ip, &frame[14..]), Some(packet));
        let tagged = [&frame[..12], &[0x81, 0, 0, 7], &frame[12..]].concat();
        assert_eq!(Packet::of(Link::Ethernet, &tagged), Some(packet));
        let cooked = [&[0; 16], &frame[14..]].concat();
        assert_eq!(Packet::of(Link::Cooked, &cooked), Some(packet));
        let mut v6 = vec![0x60, 0, 0, 0, 0, 12, 17, 64];
        v6.extend([0xfd; 32]);
        v6.extend(&frame[34..46]);
        let read = Packet::of(Link::Ip, &v6).unwrap();
        assert_eq!(read.payload, Payload::Udp(b"data"));
        assert!(read.from.is_ipv6());
    }

    #[test]
    fn frames_that_are_cut_or_something_else_carry_nothing() {
        let frame = udp(b"data");
        for length in 0..42 {
            let cut = &frame[..length];
            for link in [Link::Ethernet, Link::Ip, Link::Cooked, Link::Cooked2] {
                assert_eq!(Packet::of(link, cut), None, "{length} bytes, {link:?}");
            }
        }
        let mut fragment = frame.clone();
        fragment[21] = 1;
        assert_eq!(Packet::of(Link::Ethernet, &fragment), None);
    }
}
