//! What a kernel sends into its TUN. Its payload is a function of connection and sequence number, so
//! that every byte can be told right from wrong wherever, and however often, it comes out.

use std::net::IpAddr;

use dibs_wire::emit::Headers;
use dibs_wire::packet::{self, IpMeta, Packet, Segment, flags};
use dibs_wire::virtio;
use dibs_wire::{FlowKey, SeqNumber};
use etherparse::{IpNumber, PacketBuilder};

use crate::host::tuple;
use crate::input::Input;

/// Connections of a kernel.
pub(crate) const CONNS: usize = 4;
/// A TUN hands over no more: a virtio header and the longest IP packet.
pub(crate) const MAX_FRAME: usize = virtio::LEN + 65_535;
/// The extension header of IPv6 fragments.
const FRAGMENT: u8 = 44;
/// Payload of a superpacket, at most.
const MAX_PAYLOAD: usize = 65_535 - 100;

/// The byte that stands at `seq` of a direction of a connection.
pub(crate) fn content(tuple: &FlowKey, seq: u32) -> u8 {
    let ports = u64::from(tuple.sport) << 32 | u64::from(tuple.dport) << 48;
    ((ports + u64::from(seq)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

pub(crate) fn fill(tuple: &FlowKey, seq: u32, payload: &mut [u8]) {
    for (at, byte) in payload.iter_mut().enumerate() {
        *byte = content(tuple, seq.wrapping_add(at as u32));
    }
}

/// One host's end of all connections.
pub(crate) struct Kernel {
    host: usize,
    /// The next sequence number of each connection.
    next: [u32; CONNS],
    /// What the other end is known to have sent.
    seen: [u32; CONNS],
    clock: u32,
}

impl Kernel {
    pub(crate) fn new(host: usize) -> Self {
        Self {
            host,
            next: [1000; CONNS],
            seen: [1000; CONNS],
            clock: 1,
        }
    }

    /// Takes what was injected.
    pub(crate) fn take(&mut self, segment: &Segment<'_>) {
        let far = 1 - self.host;
        if let Some(conn) = (0..CONNS).find(|&conn| tuple(far, conn) == segment.tuple) {
            let len = segment.payload.len() as u32;
            self.seen[conn] = segment.seq.raw().wrapping_add(len);
        }
    }

    /// A frame with a segment.
    pub(crate) fn segment(&mut self, input: &mut Input<'_>) -> Vec<u8> {
        let conn = input.below(CONNS);
        let tuple = tuple(self.host, conn);
        let next = self.next[conn];
        let seq = match input.u8() {
            0..=159 => next,
            160..=199 => next.wrapping_sub(u32::from(input.u16())),
            200..=219 => next.wrapping_add(u32::from(input.u16())),
            220..=249 => next.wrapping_sub(u32::from(input.u8())),
            _ => input.u32(),
        };
        let len = match input.u8() {
            0..=79 => 0,
            80..=149 => usize::from(input.u8()),
            _ => usize::from(input.u16()) % (MAX_PAYLOAD + 1),
        };
        let mss = 1 + input.u16() % 9000;
        let flags = match input.u8() {
            0..=99 => flags::ACK,
            100..=179 => flags::ACK | flags::PSH,
            180..=199 => flags::ACK | flags::FIN,
            200..=209 => flags::SYN,
            _ => input.u16() & 0x0fff,
        };
        let ack = match input.u8() {
            0..=199 => self.seen[conn],
            200..=239 => self.seen[conn].wrapping_sub(u32::from(input.u8())),
            _ => input.u32(),
        };
        self.clock = match input.u8() {
            0..=239 => self.clock.wrapping_add(1),
            240..=249 => self.clock.wrapping_sub(5),
            _ => input.u32(),
        };
        let kind = input.below(8);
        let raw = if kind == 7 { input.block() } else { &[] };
        let raw = &raw[..raw.len().min(40) / 4 * 4];
        let other = input.flag();
        let headers = Headers {
            tuple,
            meta: IpMeta {
                tos: if other { input.u8() } else { 0 },
                ttl: if other { input.u8() } else { 64 },
                flow_label: if other && conn % 2 == 1 {
                    input.u32() & 0xf_ffff
                } else {
                    0
                },
            },
            seq: SeqNumber::new(seq),
            ack: SeqNumber::new(ack),
            flags,
            window: input.u16(),
            urgent: if flags & flags::URG != 0 {
                input.u16()
            } else {
                0
            },
            timestamps: (kind < 6).then_some((self.clock, self.clock.wrapping_sub(3))),
            options: (kind == 7).then_some(raw),
        };
        let gso = if len > usize::from(mss) { mss } else { 0 };
        let at = headers.encoded_len();
        let mut frame = vec![0; at];
        headers.write(&mut frame, len, gso);
        frame.resize(at + len, 0);
        fill(&tuple, seq, &mut frame[at..]);
        let extra = flags & (flags::FIN | flags::SYN) != 0;
        let end = seq.wrapping_add(len as u32 + u32::from(extra));
        if (end.wrapping_sub(next) as i32) > 0 || flags & flags::SYN != 0 {
            self.next[conn] = end;
        }
        frame
    }
}

/// Any bytes as a frame of the TUN; if they are a segment, with the payload that stands there.
pub(crate) fn raw_frame(input: &mut Input<'_>) -> Vec<u8> {
    let len = usize::from(input.u16()) % 1024;
    let mut frame = input.bytes(len).to_vec();
    // Longer ones without longer inputs.
    let more = match input.u8() {
        n @ 240.. => usize::from(n - 239) * 4000,
        _ => 0,
    };
    frame.resize((frame.len() + more).min(MAX_FRAME), more as u8);
    with_content(frame)
}

/// The same frame; if it is a segment, with the payload that stands there.
fn with_content(mut frame: Vec<u8>) -> Vec<u8> {
    let packet = frame.get(virtio::LEN..).unwrap_or(&[]);
    if let Ok(Packet::Tcp(segment)) = packet::parse(packet) {
        let at = virtio::LEN + segment.payload_at;
        let (tuple, seq, end) = (segment.tuple, segment.seq.raw(), at + segment.payload.len());
        fill(&tuple, seq, &mut frame[at..end]);
    }
    frame
}

/// A packet between the two hosts of any length and protocol: mostly a fragment of TCP, or an ICMP error about
/// TCP.
pub(crate) fn opaque_frame(host: usize, input: &mut Input<'_>) -> Vec<u8> {
    let tuple = tuple(host, input.below(2));
    let ipv6 = tuple.src.is_ipv6();
    let len = usize::from(input.u16()) % 65_400;
    let kind = input.u8();
    let body = input.block();
    let fragment = [packet::TCP, 0, 0, 1, 0, 0, 0, 9];
    let quoted = ip_packet(&tuple.reversed(), packet::TCP, &[0; 20]);
    let (quoted, _) = quoted.split_at(quoted.len() - 20);
    let about_tcp = [&[1 + 2 * u8::from(!ipv6), 0, 0, 0, 0, 0, 0, 0], quoted].concat();
    let (protocol, front) = match (kind, ipv6) {
        (0..=127, true) => (FRAGMENT, &fragment[..]),
        (0..=127, false) => (packet::TCP, &[][..]),
        (128..=159, true) => (packet::ICMPV6, &about_tcp[..]),
        (128..=159, false) => (packet::ICMP, &about_tcp[..]),
        (160..=175, _) => (packet::ICMP, &[][..]),
        (176..=191, _) => (packet::ICMPV6, &[][..]),
        (other, _) => (other, &[][..]),
    };
    let len = len.max(front.len());
    let mut carried = front.to_vec();
    carried.resize(len, 0x55);
    let body = &body[..body.len().min(len - front.len())];
    carried[front.len()..][..body.len()].copy_from_slice(body);
    let mut frame = vec![0; virtio::LEN];
    frame.extend(ip_packet(&tuple, protocol, &carried));
    if kind < 128 && !ipv6 {
        // More fragments follow.
        frame[virtio::LEN + 6] = 0x20;
    }
    // It may be TCP after all.
    with_content(frame)
}

/// An IP packet that carries this.
fn ip_packet(tuple: &FlowKey, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let ip = match (tuple.src, tuple.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => PacketBuilder::ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => PacketBuilder::ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!("both ends are of one family"),
    };
    let mut packet = Vec::new();
    let written = ip.write(&mut packet, IpNumber(protocol), payload);
    written.expect("it is shorter than a packet may be");
    packet
}
