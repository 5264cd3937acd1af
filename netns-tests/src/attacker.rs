//! Who sends datagrams with any source address, and heard those of others.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use anyhow::{Context as _, Result};
use dibs_lab::Recording;
use dibs_netns::Host;
use dibs_wire::{checksum, packet};
use socket2::{Domain, Protocol, Socket, Type};

/// What an Ethernet header takes.
const ETHERNET: usize = 14;
/// What an IPv4 header without options takes.
const IPV4: usize = 20;
/// What an IPv6 header takes.
const IPV6: usize = 40;
/// What a UDP header takes.
const UDP: usize = 8;
/// Its number as a protocol of IP.
const UDP_PROTOCOL: u8 = 17;
/// What a TCP header without options takes.
const TCP: usize = 20;
/// The longest UDP payload of one packet on a link of 1500 bytes.
const LONGEST: usize = 1500 - IPV4 - UDP;

/// An address of another's choice on the datagrams that a host sends.
#[derive(Debug)]
pub struct Attacker {
    socket: Socket,
    ipv6: Socket,
}

impl Attacker {
    /// Sends from this host's network.
    ///
    /// # Errors
    /// If the system lets nobody send raw packets.
    pub fn on(host: &Host) -> Result<Self> {
        // With this protocol the packet brings its own IP header (raw(7)).
        let raw = Protocol::from(nix::libc::IPPROTO_RAW);
        let open = |domain| host.in_ns(|| Socket::new(domain, Type::RAW, Some(raw)));
        Ok(Self {
            socket: open(Domain::IPV4).context("raw socket")?,
            ipv6: open(Domain::IPV6).context("raw socket")?,
        })
    }

    /// Sends a UDP datagram as if it came from another.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send(&self, from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) -> io::Result<()> {
        let length = u16::try_from(UDP + payload.len()).map_err(io::Error::other)?;
        let mut udp = from.port().to_be_bytes().to_vec();
        udp.extend(to.port().to_be_bytes());
        udp.extend(length.to_be_bytes());
        // No UDP checksum (RFC 768).
        udp.extend([0, 0]);
        udp.extend(payload);
        self.send_ip(UDP_PROTOCOL, from.into(), to.into(), &udp)
    }
}

/// A TCP segment without options, as its sender would make it.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Its sender.
    pub from: SocketAddr,
    /// Its receiver.
    pub to: SocketAddr,
    /// The number of its first byte.
    pub seq: u32,
    /// The number of the byte expected next.
    pub ack: u32,
    /// FIN 1, SYN 2, RST 4, PSH 8, ACK 16, URG 32.
    pub flags: u8,
    /// What it carries.
    pub payload: &'a [u8],
}

impl Segment<'_> {
    fn bytes(&self) -> Vec<u8> {
        self.with_options(&[])
    }

    /// The segment, with options of whole words.
    fn with_options(&self, options: &[u8]) -> Vec<u8> {
        let mut tcp = Vec::new();
        tcp.extend(self.from.port().to_be_bytes());
        tcp.extend(self.to.port().to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        let words = (TCP + options.len()) as u8 / 4;
        // A window, no checksum yet, no urgent data.
        tcp.extend([words << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
        tcp.extend(options);
        tcp.extend(self.payload);
        finish(packet::TCP, self.from, self.to, &mut tcp, 16);
        tcp
    }
}

/// An IP packet with a TCP segment as it is inside a bump: signed (RFC 2385), so that nobody may cut it.
pub fn signed_segment(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let (seq, ack, flags) = (1, 1, 16);
    let segment = Segment {
        from,
        to,
        seq,
        ack,
        flags,
        payload,
    };
    // The option behind two NOPs.
    let options = [&[1, 1, 19, 18][..], &[7; 16]].concat();
    let tcp = segment.with_options(&options);
    ip(packet::TCP, from, to, &tcp).expect("a segment of a test fits a packet")
}

impl Attacker {
    /// Sends a segment as if its sender did.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send_segment(&self, segment: &Segment<'_>) -> io::Result<()> {
        self.send_ip(packet::TCP, segment.from, segment.to, &segment.bytes())
    }

    /// Sends the sender of a segment the ICMP error that the segment is too long for the way.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send_too_long(&self, about: &Segment<'_>, by: SocketAddr) -> io::Result<()> {
        let inner =
            ip(packet::TCP, about.from, about.to, &about.bytes()).map_err(io::Error::other)?;
        if about.from.is_ipv4() {
            // Destination unreachable, fragmentation needed; 600 bytes would do (RFC 1191).
            let mut icmp = vec![3, 4, 0, 0, 0, 0, 2, 88];
            icmp.extend(&inner[..IPV4 + 8]);
            let sum = !checksum::fold(checksum::sum(&icmp));
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            return self.send_ip(packet::ICMP, by, about.from, &icmp);
        }
        // Packet too big; 1300 bytes would do (RFC 4443, 3.2).
        let mut icmp = vec![2, 0, 0, 0, 0, 0, 5, 20];
        icmp.extend(&inner);
        finish(packet::ICMPV6, by, about.from, &mut icmp, 2);
        self.send_ip(packet::ICMPV6, by, about.from, &icmp)
    }

    fn send_ip(
        &self,
        protocol: u8,
        from: SocketAddr,
        to: SocketAddr,
        payload: &[u8],
    ) -> io::Result<()> {
        let packet = ip(protocol, from, to, payload).map_err(io::Error::other)?;
        let socket = if to.is_ipv4() {
            &self.socket
        } else {
            &self.ipv6
        };
        let to = SocketAddr::new(to.ip(), 0);
        socket.send_to(&packet, &to.into()).map(drop)
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Writes the checksum of what an IP packet carries, pseudo header and all.
fn finish(protocol: u8, from: SocketAddr, to: SocketAddr, body: &mut [u8], at: usize) {
    let pseudo = checksum::pseudo_header(from.ip(), to.ip(), protocol, body.len());
    let sum = !checksum::fold(pseudo + checksum::sum(body));
    body[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

/// An IP packet of 64 hops without options.
fn ip(protocol: u8, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Result<Vec<u8>> {
    let mut packet = if from.is_ipv4() {
        let length = u16::try_from(IPV4 + payload.len())?.to_be_bytes();
        vec![
            0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, protocol, 0, 0,
        ]
    } else {
        let length = u16::try_from(payload.len())?.to_be_bytes();
        vec![0x60, 0, 0, 0, length[0], length[1], protocol, 64]
    };
    packet.extend(octets(from.ip()));
    packet.extend(octets(to.ip()));
    if from.is_ipv4() {
        let sum = !checksum::fold(checksum::sum(&packet));
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    packet.extend(payload);
    Ok(packet)
}

/// Where the sender of the last segment with this payload stands: the numbers of its next byte, and
/// of the byte that it expects.
pub fn numbers(recording: &Recording, payload: &[u8]) -> Option<(u32, u32)> {
    let segments = recording.packets.iter().rev().filter_map(|packet| {
        let header = if packet.frame.get(12..14)? == [0x86, 0xdd] {
            IPV6
        } else {
            IPV4
        };
        let segment = packet.frame.get(ETHERNET + header..)?;
        let at = |at: usize| Some(u32::from_be_bytes(*segment.get(at..at + 4)?.first_chunk()?));
        let header = usize::from(segment.get(12)? >> 4) * 4;
        let carried = segment.get(header.max(TCP)..)?;
        let next = at(4)?.wrapping_add(carried.len() as u32);
        (carried == payload).then_some((next, at(8)?))
    });
    segments.into_iter().next()
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
