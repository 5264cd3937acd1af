//! Packets that are given other ends, because two hosts call one connection by different names.

use core::net::IpAddr;

use crate::checksum;
use crate::packet::{FlowKey, ICMPV6, TCP};

/// Gives a TCP segment that is no fragment these ends. Its TCP header stands at `tcp_at`, and its checksums are made anew.
///
/// # Panics
/// If the packet is shorter than its headers, or of another IP version.
pub fn segment(packet: &mut [u8], tcp_at: usize, ends: &FlowKey) {
    set_addresses(packet, ends.src, ends.dst);
    let (_, tcp) = packet.split_at_mut(tcp_at);
    set_ports(tcp, ends);
    tcp[16..18].fill(0);
    let pseudo = checksum::pseudo_header(ends.src, ends.dst, TCP, tcp.len());
    let sum = !checksum::fold(pseudo + checksum::sum(tcp));
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
}

/// Gives an ICMP error, whose message stands at `icmp_at`, these addresses, and the segment that it quotes these ends; the TCP
/// header of that stands at `tcp_at`. What is quoted is cut short, so its own TCP checksum stays as it is.
///
/// # Panics
/// As [`segment`].
pub fn error(
    packet: &mut [u8],
    (icmp_at, tcp_at): (usize, usize),
    (src, dst): (IpAddr, IpAddr),
    quoted: &FlowKey,
) {
    set_addresses(packet, src, dst);
    set_ports(&mut packet[tcp_at..], quoted);
    let (_, message) = packet.split_at_mut(icmp_at);
    set_addresses(&mut message[8..], quoted.src, quoted.dst);
    message[2..4].fill(0);
    let pseudo = match src {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) => checksum::pseudo_header(src, dst, ICMPV6, message.len()),
    };
    let sum = !checksum::fold(pseudo + checksum::sum(message));
    message[2..4].copy_from_slice(&sum.to_be_bytes());
}

fn set_ports(tcp: &mut [u8], ends: &FlowKey) {
    tcp[..2].copy_from_slice(&ends.sport.to_be_bytes());
    tcp[2..4].copy_from_slice(&ends.dport.to_be_bytes());
}

fn set_addresses(packet: &mut [u8], src: IpAddr, dst: IpAddr) {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            packet[12..16].copy_from_slice(&src.octets());
            packet[16..20].copy_from_slice(&dst.octets());
            packet[10..12].fill(0);
            let header = usize::from(packet[0] & 15) * 4;
            let sum = !checksum::fold(checksum::sum(&packet[..header]));
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            packet[8..24].copy_from_slice(&src.octets());
            packet[24..40].copy_from_slice(&dst.octets());
        }
        _ => panic!("addresses of one packet are of one family"),
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;
    use crate::packet::{self, Packet};

    fn key(last: u8, v6: bool) -> FlowKey {
        let host = |host: u8| match v6 {
            false => IpAddr::from([10, 0, last, host]),
            true => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, last.into(), host.into()]),
        };
        let port = u16::from(last) * 100;
        FlowKey::tcp((host(1), port + 1), (host(2), port + 2))
    }

    fn written(key: &FlowKey, payload: &[u8]) -> Vec<u8> {
        let ip = match (key.src, key.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                PacketBuilder::ipv4(src.octets(), dst.octets(), 64)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                PacketBuilder::ipv6(src.octets(), dst.octets(), 64)
            }
            _ => panic!("addresses of one packet are of one family"),
        };
        let tcp = ip.tcp(key.sport, key.dport, 7, 1000).ack(9);
        let mut bytes = Vec::new();
        tcp.write(&mut bytes, payload).unwrap();
        bytes
    }

    #[test]
    fn a_segment_is_as_if_it_had_been_sent_between_the_other_ends() {
        for (v6, payload) in [(false, &b"odd"[..]), (true, b"even"), (false, b"")] {
            let mut packet = written(&key(1, v6), payload);
            let Ok(Packet::Tcp(parsed)) = packet::parse(&packet) else {
                panic!("not a segment");
            };
            let tcp_at = parsed.tcp_at();
            segment(&mut packet, tcp_at, &key(2, v6));
            assert_eq!(packet, written(&key(2, v6), payload));
        }
    }

    #[test]
    fn an_error_is_as_if_it_quoted_the_other_ends() {
        let write = |key: &FlowKey, v6: bool| {
            // Of the quoted segment's checksum nobody asks, so it has none here.
            let mut quoted = written(key, b"quoted");
            let tcp_at = quoted.len() - 26;
            quoted[tcp_at + 16..tcp_at + 18].fill(0);
            let mut bytes = Vec::new();
            match (key.dst, key.src) {
                (IpAddr::V4(src), IpAddr::V4(dst)) => {
                    let ip = PacketBuilder::ipv4(src.octets(), dst.octets(), 64);
                    let error = ip.icmpv4_raw(3, 3, [0; 4]);
                    error.write(&mut bytes, &quoted).unwrap();
                }
                (IpAddr::V6(src), IpAddr::V6(dst)) => {
                    let ip = PacketBuilder::ipv6(src.octets(), dst.octets(), 64);
                    let error = ip.icmpv6_raw(1, 4, [0; 4]);
                    error.write(&mut bytes, &quoted).unwrap();
                }
                _ => panic!("addresses of one packet are of one family"),
            }
            let icmp_at = if v6 { 40 } else { 20 };
            let quoted_tcp_at = icmp_at + 8 + tcp_at;
            (bytes, icmp_at, quoted_tcp_at)
        };
        for v6 in [false, true] {
            let (mut packet, icmp_at, tcp_at) = write(&key(1, v6), v6);
            let to = key(2, v6);
            error(&mut packet, (icmp_at, tcp_at), (to.dst, to.src), &to);
            assert_eq!(packet, write(&to, v6).0);
        }
    }
}
