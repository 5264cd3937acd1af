//! What a kernel and a device with offloads do between them: superpackets made and taken apart.

use dibs_netem::rng::Rng;
use dibs_wire::checksum;
use dibs_wire::emit::Headers;
use dibs_wire::packet::{self, Packet, Segment, TCP, flags};
use dibs_wire::segment::{Piece, Segments};
use dibs_wire::virtio::{self, VirtioHdr};

/// Where the checksum stands in a TCP header.
const CSUM: usize = 16;

/// Frames of a TUN for packets in the order that a kernel sent them: neighbours of one connection
/// joined to superpackets as the dice say, checksums left partial or complete.
pub fn frames(packets: Vec<Vec<u8>>, rng: &mut Rng) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut open: Option<Super> = None;
    for packet in packets {
        if let Some(s) = &mut open
            && rng.chance(0.9)
            && s.join(&packet)
        {
            continue;
        }
        frames.extend(open.take().map(|s| s.finish(rng)));
        open = Some(Super::new(packet));
    }
    frames.extend(open.map(|s| s.finish(rng)));
    frames
}

struct Super {
    packet: Vec<u8>,
    /// What joined it.
    more: Vec<u8>,
    /// Flags of all of it.
    flags: u16,
    /// Payload of each segment but the last.
    mss: usize,
    closed: bool,
}

impl Super {
    fn new(packet: Vec<u8>) -> Self {
        let (mss, flags, closed) = match tcp(&packet) {
            Some(s) => {
                let last = flags::PSH | flags::FIN | flags::SYN | flags::RST | flags::URG;
                let closed = s.payload.is_empty() || s.flags & last != 0;
                (s.payload.len(), s.flags, closed)
            }
            None => (0, 0, true),
        };
        Self {
            packet,
            more: Vec::new(),
            flags,
            mss,
            closed,
        }
    }

    fn join(&mut self, next: &[u8]) -> bool {
        if self.closed {
            return false;
        }
        let (Some(a), Some(b)) = (tcp(&self.packet), tcp(next)) else {
            return false;
        };
        let last = flags::PSH | flags::FIN;
        let len = a.payload.len() + self.more.len();
        let fits = a.tuple == b.tuple
            && a.meta == b.meta
            && a.seq.add(len as u32) == b.seq
            && a.ack == b.ack
            && a.window == b.window
            && a.options == b.options
            && a.flags == b.flags & !last
            && !b.payload.is_empty()
            && b.payload.len() <= self.mss
            && a.payload_at + len + b.payload.len() <= 65_535;
        if fits {
            self.closed = b.payload.len() < self.mss || b.flags & last != 0;
            self.flags = b.flags;
            self.more.extend_from_slice(b.payload);
        }
        fits
    }

    fn finish(self, rng: &mut Rng) -> Vec<u8> {
        let gso_size = if self.more.is_empty() { 0 } else { self.mss };
        match tcp(&self.packet) {
            Some(s) if gso_size > 0 || rng.chance(0.5) => {
                let headers = Headers {
                    flags: self.flags,
                    ..Headers::from(&s)
                };
                written(&headers, &[s.payload, &self.more].concat(), gso_size)
            }
            _ => plain_frame(&self.packet),
        }
    }
}

fn written(headers: &Headers<'_>, payload: &[u8], gso_size: usize) -> Vec<u8> {
    let mut frame = vec![0; headers.encoded_len()];
    headers.write(&mut frame, payload.len(), gso_size as u16);
    frame.extend_from_slice(payload);
    frame
}

/// A TUN frame of one packet as it is.
pub fn plain_frame(packet: &[u8]) -> Vec<u8> {
    [&[0; virtio::LEN], packet].concat()
}

/// The packets that a frame from the node stands for, each as it would be on a wire.
///
/// # Errors
/// What a kernel would not accept: the sentence names it.
pub fn segments(frame: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let (header, packet) = frame
        .split_first_chunk::<{ virtio::LEN }>()
        .ok_or("a frame shorter than its virtio header")?;
    let header = VirtioHdr::decode(header).map_err(|e| e.to_string())?;
    let parsed = packet::parse(packet).map_err(|e| format!("an injected packet: {e}"))?;
    let Packet::Tcp(s) = parsed else {
        if header != VirtioHdr::default() {
            return Err("an opaque packet with offloads".into());
        }
        return Ok(vec![packet.to_vec()]);
    };
    let tcp_at = s.tcp_at();
    let end = s.payload_at + s.payload.len();
    if end != packet.len() {
        return Err(format!(
            "{} bytes behind a packet of {end}",
            packet.len() - end
        ));
    }
    if tcp_at == 20 && checksum::fold(checksum::sum(&packet[..20])) != 0xffff {
        return Err("a wrong IPv4 header checksum".into());
    }
    let pseudo = checksum::pseudo_header(s.tuple.src, s.tuple.dst, TCP, packet.len() - tcp_at);
    if !header.needs_csum {
        // Complete: carried as it was, or it would have been left partial.
        if checksum::fold(pseudo + checksum::sum(&packet[tcp_at..])) != 0xffff {
            return Err("a wrong TCP checksum".into());
        }
        return Ok(vec![packet.to_vec()]);
    }
    if usize::from(header.csum_start) != tcp_at || usize::from(header.csum_offset) != CSUM {
        return Err(format!("checksum offsets {header:?}"));
    }
    let want = checksum::fold(pseudo);
    let have = u16::from_be_bytes([packet[tcp_at + CSUM], packet[tcp_at + CSUM + 1]]);
    if want != have {
        return Err(format!(
            "a partial checksum of {have:04x} instead of {want:04x}"
        ));
    }
    let mss = usize::from(header.gso_size);
    if mss > 0
        && (usize::from(header.hdr_len) != s.payload_at
            || header.ipv6 != s.tuple.src.is_ipv6()
            || s.payload.len() <= mss
            || s.flags & (flags::SYN | flags::RST | flags::URG) != 0
            || (s.has(flags::CWR) && !header.ecn))
    {
        return Err(format!(
            "a superpacket of {} bytes with {header:?}",
            s.payload.len()
        ));
    }
    Ok(cut(frame))
}

fn cut(frame: &[u8]) -> Vec<Vec<u8>> {
    let pieces = Segments::parse(frame).expect("it was looked at");
    let whole = |piece: Piece<'_>| [piece.headers(), piece.payload()].concat();
    pieces.map(whole).collect()
}

/// A TCP packet with other contents, and the checksum of those.
///
/// # Panics
/// If it is not a TCP packet.
pub fn rewrite(packet: &[u8], change: impl FnOnce(&mut Headers<'_>, &mut Vec<u8>)) -> Vec<u8> {
    let s = tcp(packet).expect("the caller has a TCP packet");
    let (mut headers, mut payload) = (Headers::from(&s), s.payload.to_vec());
    change(&mut headers, &mut payload);
    cut(&written(&headers, &payload, 0)).remove(0)
}

/// The TCP segment in a packet, if it is one.
pub fn tcp(packet: &[u8]) -> Option<Segment<'_>> {
    match packet::parse(packet) {
        Ok(Packet::Tcp(s)) => Some(s),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dibs_wire::SeqNumber;
    use dibs_wire::packet::{FlowKey, IpMeta};
    use std::net::SocketAddr;

    fn packet(seq: u32, len: usize, tcp_flags: u16, v6: bool) -> Vec<u8> {
        let (src, dst) = if v6 {
            ("[fd01::1]:1", "[fd01::2]:2")
        } else {
            ("10.0.0.1:1", "10.0.0.2:2")
        };
        let end = |text: &str| text.parse::<SocketAddr>().unwrap();
        let headers = Headers {
            tuple: FlowKey::tcp(end(src), end(dst)),
            meta: IpMeta {
                ttl: 64,
                ..IpMeta::default()
            },
            seq: SeqNumber::new(seq),
            ack: SeqNumber::new(7),
            flags: tcp_flags,
            window: 100,
            urgent: 0,
            timestamps: Some((3, 4)),
            options: None,
        };
        let payload: Vec<u8> = (0..len).map(|i| (seq as usize + i) as u8).collect();
        let frame = written(&headers, &payload, 0);
        let mut whole = segments(&frame).unwrap();
        assert_eq!(whole.len(), 1);
        whole.remove(0)
    }

    #[test]
    fn joined_segments_come_apart_as_they_were() {
        for v6 in [false, true] {
            let last = flags::ACK | flags::PSH | flags::FIN;
            let packets = vec![
                packet(0, 100, flags::ACK, v6),
                packet(100, 100, flags::ACK, v6),
                packet(200, 60, last, v6),
                packet(260, 100, flags::ACK, v6),
                packet(500, 100, flags::ACK, v6),
            ];
            let mut joined = 0;
            for seed in 0..50 {
                let frames = frames(packets.clone(), &mut Rng::new(seed));
                joined += packets.len() - frames.len();
                let back: Vec<_> = frames.iter().flat_map(|f| segments(f).unwrap()).collect();
                assert_eq!(back, packets);
            }
            assert!(joined > 50, "superpackets are made: {joined}");
        }
    }

    #[test]
    fn what_a_kernel_would_not_take_is_named() {
        let good = frames(
            vec![
                packet(0, 100, flags::ACK, false),
                packet(100, 50, flags::ACK, false),
            ],
            &mut Rng::new(0),
        );
        let good = good.into_iter().find(|f| f[1] != 0).expect("a superpacket");
        assert!(segments(&good).is_ok());
        let broken = |at: usize| {
            let mut frame = good.clone();
            frame[at] ^= 1;
            segments(&frame)
        };
        // hdr_len, gso_size, csum_start, csum_offset, IP length, checksums of IP and TCP.
        for at in [2, 5, 6, 8, 13, 20, 46] {
            assert!(broken(at).is_err(), "byte {at}");
        }
    }
}
