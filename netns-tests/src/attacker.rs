//! Who sends datagrams with any source address, and heard those of others.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};

use anyhow::{Context as _, Result};
use dibs_eavesdrop::{Link, Packet, Payload};
use dibs_lab::Recording;
use dibs_netns::Host;
use etherparse::{
    Icmpv4Type, Icmpv6Type, IpHeaders, LaxSlicedPacket, PacketBuilder, PacketBuilderStep,
    TcpHeader, TransportSlice, icmpv4::DestUnreachableHeader,
};
use socket2::{Domain, Protocol, Socket, Type};

/// What an IPv4 header and a UDP header take.
const HEADERS: usize = 28;
/// The longest UDP payload of one packet on a link of 1500 bytes.
const LONGEST: usize = 1500 - HEADERS;

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
        let (from, to) = (SocketAddr::from(from), SocketAddr::from(to));
        let mut packet = Vec::new();
        let udp = ip(from, to).udp(from.port(), to.port());
        udp.write(&mut packet, payload).map_err(io::Error::other)?;
        self.send_packet(to, &packet)
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
    /// Payload.
    pub payload: &'a [u8],
}

impl Segment<'_> {
    /// The IP packet with the segment, with options of whole words.
    fn packet(&self, options: &[u8]) -> Vec<u8> {
        let (from, to) = (self.from.port(), self.to.port());
        let mut tcp = TcpHeader::new(from, to, self.seq, 0xffff);
        tcp.acknowledgment_number = self.ack;
        let is = |bit: u8| self.flags & bit != 0;
        (tcp.fin, tcp.syn, tcp.rst) = (is(1), is(2), is(4));
        (tcp.psh, tcp.ack, tcp.urg) = (is(8), is(16), is(32));
        tcp.set_options_raw(options).expect("whole words");
        let mut packet = Vec::new();
        let built = ip(self.from, self.to).tcp_header(tcp);
        let written = built.write(&mut packet, self.payload);
        written.expect("a segment of a test fits a packet");
        packet
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
    segment.packet(&[&[1, 1, 19, 18][..], &[7; 16]].concat())
}

impl Attacker {
    /// Sends a segment as if its sender did.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send_segment(&self, segment: &Segment<'_>) -> io::Result<()> {
        self.send_packet(segment.to, &segment.packet(&[]))
    }

    /// Sends the sender of a segment the ICMP error that the segment is too long for the way.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn send_too_long(&self, about: &Segment<'_>, by: SocketAddr) -> io::Result<()> {
        let inner = about.packet(&[]);
        let (mut packet, to) = (Vec::new(), about.from);
        let written = if to.is_ipv4() {
            // 600 bytes would do (RFC 1191).
            let next_hop_mtu = 600;
            let too_long = DestUnreachableHeader::FragmentationNeeded { next_hop_mtu };
            let icmp = ip(by, to).icmpv4(Icmpv4Type::DestinationUnreachable(too_long));
            icmp.write(&mut packet, &inner[..HEADERS])
        } else {
            // RFC 4443, 3.2.
            let icmp = ip(by, to).icmpv6(Icmpv6Type::PacketTooBig { mtu: 1300 });
            icmp.write(&mut packet, &inner)
        };
        written.map_err(io::Error::other)?;
        self.send_packet(to, &packet)
    }

    fn send_packet(&self, to: SocketAddr, packet: &[u8]) -> io::Result<()> {
        let socket = if to.is_ipv4() {
            &self.socket
        } else {
            &self.ipv6
        };
        let to = SocketAddr::new(to.ip(), 0);
        socket.send_to(packet, &to.into()).map(drop)
    }
}

/// A packet of 64 hops between two addresses.
fn ip(from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<IpHeaders> {
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => panic!("one family"),
    }
}

/// Numbers of the sender of the last segment with this payload: that of its next byte, and
/// of the byte that it expects.
pub fn numbers(recording: &Recording, payload: &[u8]) -> Option<(u32, u32)> {
    let mut packets = recording.packets.iter().rev();
    packets.find_map(|packet| {
        let sliced = LaxSlicedPacket::from_ethernet(&packet.frame).ok()?;
        let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
            return None;
        };
        let next = tcp.sequence_number().wrapping_add(payload.len() as u32);
        (tcp.payload() == payload).then_some((next, tcp.acknowledgment_number()))
    })
}

/// The payloads of the IPv4 UDP datagrams to this address that were recorded, as far as they are
/// single packets.
pub fn datagrams(recording: &Recording, to: SocketAddrV4) -> Vec<Vec<u8>> {
    let payloads = recording.packets.iter().filter_map(|packet| {
        let heard = Packet::of(Link::Ethernet, &packet.frame)?;
        let Payload::Udp(payload) = heard.payload else {
            return None;
        };
        // An offload hands over more than one datagram in a larger packet.
        (heard.to == to.into() && payload.len() <= LONGEST).then(|| payload.to_vec())
    });
    payloads.collect()
}
