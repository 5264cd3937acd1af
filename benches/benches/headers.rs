//! Headers of a superpacket read and written by our views and by etherparse's: why `dibs_wire::packet` and
//! `dibs_wire::emit` are by hand. Nanoseconds a packet, the least of rounds.

use std::hint::black_box;
use std::net::IpAddr;
use std::time::Instant;

use dibs_benches::{PAYLOAD, headers};
use dibs_wire::emit::{Headers, MAX_HEADERS};
use dibs_wire::packet::{self, Packet};
use dibs_wire::virtio;
use etherparse::checksum::Sum16BitWords;
use etherparse::{
    IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, NetSlice, SlicedPacket, TcpHeader,
    TcpOptionElement, TransportSlice,
};

const CALLS: u32 = 20_000;
const ROUNDS: usize = 200;

/// What a flow takes of a segment: ends, numbers, window, time stamps, where its payload is.
type Read = (
    IpAddr,
    IpAddr,
    [u16; 3],
    [u32; 2],
    Option<(u32, u32)>,
    usize,
);

fn by_views(bytes: &[u8]) -> Option<Read> {
    let Ok(Packet::Tcp(s)) = packet::parse(bytes) else {
        return None;
    };
    let ports = [s.tuple.sport, s.tuple.dport, s.window];
    let numbers = [s.seq.raw(), s.ack.raw()];
    let (src, dst) = (s.tuple.src, s.tuple.dst);
    Some((src, dst, ports, numbers, s.timestamps, s.payload.len()))
}

fn by_etherparse(bytes: &[u8]) -> Option<Read> {
    let sliced = SlicedPacket::from_ip(bytes).ok()?;
    let (src, dst) = match sliced.net? {
        NetSlice::Ipv4(ip) => {
            let ip = ip.header();
            (ip.source_addr().into(), ip.destination_addr().into())
        }
        NetSlice::Ipv6(ip) => {
            let ip = ip.header();
            (ip.source_addr().into(), ip.destination_addr().into())
        }
        NetSlice::Arp(_) => return None,
    };
    let Some(TransportSlice::Tcp(tcp)) = sliced.transport else {
        return None;
    };
    let mut timestamps = None;
    for option in tcp.options_iterator() {
        if let Ok(TcpOptionElement::Timestamp(val, ecr)) = option {
            timestamps = Some((val, ecr));
        }
    }
    let ports = [tcp.source_port(), tcp.destination_port(), tcp.window_size()];
    let numbers = [tcp.sequence_number(), tcp.acknowledgment_number()];
    Some((src, dst, ports, numbers, timestamps, tcp.payload().len()))
}

/// As [`Headers::write`], the checksum left partial.
fn write_by_etherparse(h: &Headers<'_>, buf: &mut [u8], payload_len: usize) {
    let mut tcp = TcpHeader::new(h.tuple.sport, h.tuple.dport, h.seq.raw(), h.window);
    tcp.ack = true;
    tcp.acknowledgment_number = h.ack.raw();
    if let Some((val, ecr)) = h.timestamps {
        use TcpOptionElement::{Noop, Timestamp};
        let set = tcp.set_options(&[Noop, Noop, Timestamp(val, ecr)]);
        set.expect("they fit");
    }
    let len = tcp.header_len() + payload_len;
    let mut sum = Sum16BitWords::new()
        .add_2bytes([0, 6])
        .add_2bytes((len as u16).to_be_bytes());
    let (ip, sum) = match (h.tuple.src, h.tuple.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let (src, dst) = (src.octets(), dst.octets());
            let ip = Ipv4Header::new(len as u16, h.meta.ttl, IpNumber::TCP, src, dst);
            let mut ip = ip.expect("it fits");
            ip.header_checksum = ip.calc_header_checksum();
            buf[virtio::LEN..virtio::LEN + 20].copy_from_slice(&ip.to_bytes());
            (20, sum.add_4bytes(src).add_4bytes(dst))
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let ip = Ipv6Header {
                traffic_class: h.meta.tos,
                flow_label: Ipv6FlowLabel::ZERO,
                payload_length: len as u16,
                next_header: IpNumber::TCP,
                hop_limit: h.meta.ttl,
                source: src.octets(),
                destination: dst.octets(),
            };
            buf[virtio::LEN..virtio::LEN + 40].copy_from_slice(&ip.to_bytes());
            (40, sum.add_16bytes(src.octets()).add_16bytes(dst.octets()))
        }
        _ => unreachable!("addresses of one packet are of one family"),
    };
    tcp.checksum = !sum.ones_complement().to_be();
    let bytes = tcp.to_bytes();
    buf[virtio::LEN + ip..][..bytes.len()].copy_from_slice(&bytes);
}

fn least(mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        (0..CALLS).for_each(|_| call());
        start.elapsed().as_nanos() as f64 / f64::from(CALLS)
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn main() {
    for addresses in [["10.0.1.1", "10.0.1.2"], ["fd00::1", "fd00::2"]] {
        let h = headers(addresses.map(|text| text.parse().expect("an address")));
        let len = h.encoded_len();
        let mut frame = vec![0; MAX_HEADERS + PAYLOAD];
        let mut other = vec![0; MAX_HEADERS];
        h.write(&mut frame, PAYLOAD, 0);
        write_by_etherparse(&h, &mut other, PAYLOAD);
        assert_eq!(frame[virtio::LEN..len], other[virtio::LEN..len]);
        let packet = frame[virtio::LEN..len + PAYLOAD].to_vec();
        assert!(by_views(&packet).is_some());
        assert_eq!(by_views(&packet), by_etherparse(&packet));
        println!(
            "{}: read {:.1} ns, etherparse {:.1} ns; write {:.1} ns, etherparse {:.1} ns",
            addresses[0],
            least(|| {
                black_box(by_views(black_box(&packet)));
            }),
            least(|| {
                black_box(by_etherparse(black_box(&packet)));
            }),
            least(|| h.write(black_box(&mut frame), PAYLOAD, 0)),
            least(|| write_by_etherparse(black_box(&h), black_box(&mut other), PAYLOAD)),
        );
    }
}
