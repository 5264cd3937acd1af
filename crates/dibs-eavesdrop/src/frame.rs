//! What a frame of a capture carries.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// What stands in front of the IP packets of a capture.
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

/// What a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Who sends.
    pub from: SocketAddr,
    /// To whom.
    pub to: SocketAddr,
    /// What.
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
    /// Of a frame, which may be cut at its end; none if it carries neither TCP nor UDP, or is broken.
    pub fn of(link: Link, frame: &'a [u8]) -> Option<Self> {
        let packet = match link {
            Link::Ip => frame,
            Link::Ethernet => behind_ethernet(frame)?,
            Link::Cooked => frame.get(16..)?,
            Link::Cooked2 => frame.get(20..)?,
        };
        match packet.first()? >> 4 {
            4 => Self::v4(packet),
            6 => Self::v6(packet),
            _ => None,
        }
    }

    fn v4(packet: &'a [u8]) -> Option<Self> {
        let header = usize::from(packet[0] & 15) * 4;
        let fixed: &[u8; 20] = packet.first_chunk()?;
        let fragment = u16::from_be_bytes([fixed[6], fixed[7]]) & 0x3fff;
        if fragment != 0 || header < 20 {
            return None;
        }
        let [.., a, b, c, d, e, f, g, h] = *fixed;
        let (from, to) = (Ipv4Addr::new(a, b, c, d), Ipv4Addr::new(e, f, g, h));
        let length = usize::from(u16::from_be_bytes([fixed[2], fixed[3]]));
        let segment = cut(packet, length).get(header..)?;
        Self::transport(from.into(), to.into(), fixed[9], segment)
    }

    fn v6(packet: &'a [u8]) -> Option<Self> {
        let fixed: &[u8; 40] = packet.first_chunk()?;
        let address = |at: usize| -> Option<Ipv6Addr> {
            let bytes: [u8; 16] = fixed[at..at + 16].try_into().ok()?;
            Some(bytes.into())
        };
        let (from, to) = (address(8)?, address(24)?);
        let length = usize::from(u16::from_be_bytes([fixed[4], fixed[5]]));
        let length = if length == 0 { 0 } else { length + 40 };
        let segment = cut(packet, length).get(40..)?;
        Self::transport(from.into(), to.into(), fixed[6], segment)
    }

    fn transport(from: IpAddr, to: IpAddr, protocol: u8, segment: &'a [u8]) -> Option<Self> {
        let [a, b, c, d, ..] = *segment else {
            return None;
        };
        let from = SocketAddr::new(from, u16::from_be_bytes([a, b]));
        let to = SocketAddr::new(to, u16::from_be_bytes([c, d]));
        let payload = match protocol {
            6 => {
                let header = usize::from(segment.get(12)? >> 4) * 4;
                Payload::Tcp(segment.get(header.max(20)..)?)
            }
            17 => Payload::Udp(segment.get(8..)?),
            _ => return None,
        };
        Some(Self { from, to, payload })
    }
}

/// A packet of this length without what pads its frame; of none, as superpackets have, all of it.
fn cut(packet: &[u8], length: usize) -> &[u8] {
    match length {
        0 => packet,
        length => &packet[..length.min(packet.len())],
    }
}

fn behind_ethernet(frame: &[u8]) -> Option<&[u8]> {
    let mut at = 12;
    loop {
        let kind = u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?);
        match kind {
            0x8100 | 0x88a8 => at += 4,
            0x0800 | 0x86dd => return frame.get(at + 2..),
            _ => return None,
        }
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
