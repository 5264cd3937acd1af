//! As much of IP and TCP as it takes to see what a TUN takes and to give it something.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    IpHeaders, LaxNetSlice, LaxSlicedPacket, PacketBuilder, PacketBuilderStep, TcpHeader,
    TransportSlice,
};

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;

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
    /// Reads an IP packet; `None` for anything else.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let sliced = LaxSlicedPacket::from_ip(bytes).ok()?;
        let (source, destination): (IpAddr, IpAddr) = match sliced.net? {
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
        let unreachable = |kind: &u8| UNREACHABLE.contains(kind);
        let (protocol, [from, to], flags, payload) = match sliced.transport? {
            TransportSlice::Tcp(tcp) => {
                let ports = [tcp.source_port(), tcp.destination_port()];
                (6, ports, tcp.slice()[13], tcp.payload())
            }
            TransportSlice::Udp(udp) => {
                let ports = [udp.source_port(), udp.destination_port()];
                (17, ports, 0, udp.payload())
            }
            TransportSlice::Icmpv4(icmp) => {
                let kind = Some(icmp.type_u8()).filter(unreachable)?;
                (1, [0; 2], kind, icmp.payload())
            }
            TransportSlice::Icmpv6(icmp) => {
                let kind = Some(icmp.type_u8()).filter(unreachable)?;
                (58, [0; 2], kind, icmp.payload())
            }
            _ => return None,
        };
        Some(Self {
            protocol,
            source: SocketAddr::new(source, from),
            destination: SocketAddr::new(destination, to),
            flags,
            payload: payload.to_vec(),
        })
    }
}

/// A SYN.
pub(crate) fn syn(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    segment(source, destination, SYN)
}

/// A TCP segment without payload.
pub(crate) fn segment(source: SocketAddr, destination: SocketAddr, flags: u8) -> Vec<u8> {
    let mut tcp = TcpHeader::new(source.port(), destination.port(), 1, 0xffff);
    let is = |bit: u8| flags & bit != 0;
    (tcp.fin, tcp.syn, tcp.rst) = (is(FIN), is(SYN), is(RST));
    (tcp.ack, tcp.urg) = (is(ACK), is(URG));
    let mut packet = Vec::new();
    let built = ip(source.ip(), destination.ip()).tcp_header(tcp);
    built.write(&mut packet, &[]).expect("a short packet");
    packet
}

/// A UDP datagram without payload.
pub(crate) fn datagram(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let mut packet = Vec::new();
    let built = ip(source.ip(), destination.ip()).udp(source.port(), destination.port());
    built.write(&mut packet, &[]).expect("a short packet");
    packet
}

/// An echo request.
pub(crate) fn echo(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let (mut packet, ip) = (Vec::new(), ip(source, destination));
    let written = match source {
        IpAddr::V4(_) => ip.icmpv4_echo_request(1, 1).write(&mut packet, &[]),
        IpAddr::V6(_) => ip.icmpv6_echo_request(1, 1).write(&mut packet, &[]),
    };
    written.expect("a short packet");
    packet
}

/// A packet of 64 hops between two addresses.
fn ip(from: IpAddr, to: IpAddr) -> PacketBuilderStep<IpHeaders> {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => panic!("one family"),
    }
}
