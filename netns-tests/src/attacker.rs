//! Who sends datagrams with any source address, and heard those of others.

use std::io;
use std::net::{SocketAddr, SocketAddrV4};

use anyhow::{Context as _, Result};
use dibs_lab::{Host, Recording};
use socket2::{Domain, Protocol, Socket, Type};

/// What an Ethernet header takes.
const ETHERNET: usize = 14;
/// What an IPv4 header without options takes.
const IPV4: usize = 20;
/// What a UDP header takes.
const UDP: usize = 8;
/// The longest UDP payload of one packet on a link of 1500 bytes.
const LONGEST: usize = 1500 - IPV4 - UDP;

/// An IPv4 address of another's choice on the datagrams that a host sends.
#[derive(Debug)]
pub struct Attacker {
    socket: Socket,
}

impl Attacker {
    /// Sends from this host's network.
    ///
    /// # Errors
    /// If the system lets nobody send raw packets.
    pub fn on(host: &Host) -> Result<Self> {
        // With this protocol the packet brings its own IPv4 header (raw(7)).
        let raw = Protocol::from(nix::libc::IPPROTO_RAW);
        let socket = host.in_ns(|| Socket::new(Domain::IPV4, Type::RAW, Some(raw)));
        Ok(Self {
            socket: socket.context("raw socket")?,
        })
    }

    /// Sends a UDP datagram as if it came from another.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send(&self, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let len = |rest: usize| u16::try_from(rest + payload.len()).map_err(io::Error::other);
        let mut packet = vec![0x45, 0];
        packet.extend(len(IPV4 + UDP)?.to_be_bytes());
        // No identification and no fragments; 64 hops, UDP; the kernel adds the checksum.
        packet.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        packet.extend(from.ip().octets());
        packet.extend(to.ip().octets());
        packet.extend(from.port().to_be_bytes());
        packet.extend(to.port().to_be_bytes());
        packet.extend(len(UDP)?.to_be_bytes());
        // No UDP checksum (RFC 768).
        packet.extend([0, 0]);
        packet.extend(payload);
        let to = SocketAddr::from(SocketAddrV4::new(*to.ip(), 0));
        self.socket.send_to(&packet, &to.into()).map(drop)
    }
}

/// The payloads of the IPv4 UDP datagrams to this address that were recorded, as far as they are
/// single packets.
pub fn datagrams(recording: &Recording, to: SocketAddrV4) -> Vec<Vec<u8>> {
    let packets = recording.packets.iter();
    let payloads = packets.filter_map(|packet| payload(&packet.frame, to));
    payloads.map(<[u8]>::to_vec).collect()
}

fn payload(frame: &[u8], to: SocketAddrV4) -> Option<&[u8]> {
    let (ethernet, packet) = frame.split_at_checked(ETHERNET)?;
    let (ip, segment) = packet.split_at_checked(IPV4)?;
    let (udp, payload) = segment.split_at_checked(UDP)?;
    let is_ours = ethernet[12..] == [8, 0]
        && ip[0] == 0x45
        && ip[9] == 17
        && ip[16..] == to.ip().octets()
        && udp[2..4] == to.port().to_be_bytes();
    let len = usize::from(u16::from_be_bytes([udp[4], udp[5]])).checked_sub(UDP)?;
    // An offload hands over more than one datagram in a larger packet.
    (is_ours && len == payload.len() && len <= LONGEST).then_some(payload)
}
