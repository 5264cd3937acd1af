//! Socket addresses and ancillary data as the kernel lays them out: cmsg(3), ip(7), ipv6(7).

use super::Endpoint;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Room for a sockaddr_in or a sockaddr_in6.
pub(super) const NAME_LEN: usize = 28;
/// Room for what we send and ask for: packet info (at most 20 bytes), a segment size, the traffic class, the
/// overflow counter, each behind a header of 16.
pub(super) const CONTROL_LEN: usize = 128;

/// Codepoints of ECN, the lower two bits of the traffic class (RFC 3168).
const ECT_0: i32 = 0b10;
const CE: u8 = 0b11;

const WORD: usize = size_of::<usize>();
const CMSG_HDR: usize = (WORD + 8).next_multiple_of(WORD);

/// A socket address in the kernel's form.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Name {
    bytes: [u8; NAME_LEN],
    len: usize,
}

impl Name {
    pub(super) const EMPTY: Self = Self {
        bytes: [0; NAME_LEN],
        len: NAME_LEN,
    };

    pub(super) fn new(address: SocketAddr) -> Self {
        let mut name = Self::EMPTY;
        let bytes = &mut name.bytes;
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address {
            SocketAddr::V4(address) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                bytes[4..8].copy_from_slice(&address.ip().octets());
                name.len = 16;
            }
            SocketAddr::V6(address) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                bytes[8..24].copy_from_slice(&address.ip().octets());
                bytes[24..].copy_from_slice(&address.scope_id().to_ne_bytes());
            }
        }
        name
    }

    /// The address, without flow label, so that equal means the same peer.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        let bytes = &self.bytes;
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        match i32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
            libc::AF_INET => {
                let ip: [u8; 4] = bytes[4..8].try_into().ok()?;
                Some(SocketAddrV4::new(Ipv4Addr::from(ip), port).into())
            }
            libc::AF_INET6 => {
                let ip: [u8; 16] = bytes[8..24].try_into().ok()?;
                let scope = u32::from_ne_bytes(bytes[24..].try_into().ok()?);
                Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
            }
            _ => None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.bytes.as_mut_ptr().cast()
    }
}

/// A buffer of control messages.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Control {
    bytes: [u8; CONTROL_LEN],
    len: usize,
}

impl Control {
    pub(super) const EMPTY: Self = Self {
        bytes: [0; CONTROL_LEN],
        len: 0,
    };

    /// What a send carries: our address, whether it is capable of ECN, and the size of a run's segments.
    pub(super) fn to_send(to: &Endpoint, segment: Option<u16>) -> Self {
        let mut control = Self::EMPTY;
        if to.ect {
            let (level, kind) = match to.remote {
                SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            control.push(level, kind, &ECT_0.to_ne_bytes());
        }
        match to.local {
            Some(IpAddr::V4(local)) => {
                // in_pktinfo: index (any), the source, and a destination that is not read.
                let mut info = [0; 12];
                info[4..8].copy_from_slice(&local.octets());
                control.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &info);
            }
            Some(IpAddr::V6(local)) => {
                // in6_pktinfo: the source, index (any).
                let mut info = [0; 20];
                info[..16].copy_from_slice(&local.octets());
                control.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &info);
            }
            None => {}
        }
        if let Some(segment) = segment {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, &segment.to_ne_bytes());
        }
        control
    }

    fn push(&mut self, level: i32, kind: i32, data: &[u8]) {
        let room = &mut self.bytes[self.len..];
        room[..WORD].copy_from_slice(&(CMSG_HDR + data.len()).to_ne_bytes());
        room[WORD..WORD + 4].copy_from_slice(&level.to_ne_bytes());
        room[WORD + 4..WORD + 8].copy_from_slice(&kind.to_ne_bytes());
        room[CMSG_HDR..CMSG_HDR + data.len()].copy_from_slice(data);
        self.len += (CMSG_HDR + data.len()).next_multiple_of(WORD);
    }

    /// What a receive brought, in the first `len` bytes.
    pub(super) fn received(&self, len: usize) -> Ancillary {
        let mut ancillary = Ancillary::default();
        let mut rest = &self.bytes[..len.min(CONTROL_LEN)];
        while let Some((length, header)) = rest.split_first_chunk::<WORD>() {
            let length = usize::from_ne_bytes(*length);
            if length < CMSG_HDR || length > rest.len() || header.len() < 8 {
                break;
            }
            let number = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|i| header[at + i]));
            ancillary.take(number(0), number(4), &rest[CMSG_HDR..length]);
            rest = rest
                .get(length.next_multiple_of(WORD)..)
                .unwrap_or_default();
        }
        ancillary
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut libc::c_void {
        self.bytes.as_mut_ptr().cast()
    }
}

/// The control messages of a receive that we know.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ancillary {
    /// The address that was written to.
    pub(super) local: Option<IpAddr>,
    /// Length of all datagrams but the last in a coalesced run (UDP_GRO).
    pub(super) stride: Option<usize>,
    /// A router has marked it for congestion (CE).
    pub(super) marked: bool,
    /// Datagrams dropped so far by a full receive buffer (SO_RXQ_OVFL; wraps at 32 bits).
    pub(super) overflowed: Option<u32>,
}

impl Ancillary {
    fn take(&mut self, level: i32, kind: i32, data: &[u8]) {
        match (level, kind) {
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // ipi_spec_dst: the address to answer from, also for a broadcast.
                let address = data.get(4..8).and_then(|ip| <[u8; 4]>::try_from(ip).ok());
                self.local = address.map(IpAddr::from);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                self.local = data.first_chunk::<16>().copied().map(IpAddr::from);
            }
            // One byte in the one, an int in the other.
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                self.marked = data.first().is_some_and(|class| class & CE == CE);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                let class = data.first_chunk().copied().map(i32::from_ne_bytes);
                self.marked = class.is_some_and(|class| class as u8 & CE == CE);
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                let stride = data.first_chunk().copied().map(i32::from_ne_bytes);
                self.stride = stride.and_then(|stride| usize::try_from(stride).ok());
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                self.overflowed = data.first_chunk().copied().map(u32::from_ne_bytes);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        for address in ["10.1.2.3:5300", "[2001:db8::1]:5300", "[fe80::1%3]:1"] {
            let address: SocketAddr = address.parse().expect("address");
            let name = Name::new(address);
            let known = socket2::SockAddr::from(address);
            assert_eq!(name.len(), known.len() as usize);
            assert_eq!(name.address(), Some(address));
            // SAFETY: a SockAddr holds at least `len` initialised bytes.
            #[allow(unsafe_code)]
            let bytes =
                unsafe { std::slice::from_raw_parts(known.as_ptr().cast::<u8>(), name.len()) };
            assert_eq!(&name.bytes[..name.len()], bytes);
        }
        assert_eq!(Name::EMPTY.address(), None);
    }

    #[test]
    fn control_messages_are_read_back() {
        let remote = "10.0.0.2:1".parse().expect("address");
        for local in ["10.0.0.1", "2001:db8::5"] {
            let local: IpAddr = local.parse().expect("address");
            let to = Endpoint {
                remote,
                local: Some(local),
                ect: true,
            };
            // What says ECT is not marked.
            let sent = Control::to_send(&to, Some(1400));
            assert!(!sent.received(sent.len()).marked);
            assert_eq!(sent.received(sent.len()).local, Some(local));
            let mut control = Control::to_send(&Endpoint { ect: false, ..to }, None);
            control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &3i32.to_ne_bytes());
            control.push(libc::SOL_UDP, libc::UDP_GRO, &1400i32.to_ne_bytes());
            control.push(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, &9u32.to_ne_bytes());
            let ancillary = control.received(control.len());
            assert_eq!(ancillary.local, Some(local));
            assert_eq!(ancillary.stride, Some(1400));
            assert!(ancillary.marked);
            assert_eq!(ancillary.overflowed, Some(9));
            // Cut before the last one's end (it is padded by 4), it is not read.
            for len in 0..control.len() - 4 {
                assert!(control.received(len).overflowed.is_none());
            }
        }
    }
}
