//! What a kernel and a device with offloads do between them: superpackets made and taken apart.

use dibs_wire::SeqNumber;
use dibs_wire::checksum;
use dibs_wire::packet::{self, Packet, Segment, TCP, Tuple, flags};
use dibs_wire::virtio::{self, VirtioHdr};

use dibs_netem::rng::Rng;

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
    /// Payload of each segment but the last.
    mss: usize,
    segments: usize,
    closed: bool,
}

impl Super {
    fn new(packet: Vec<u8>) -> Self {
        let (mss, closed) = match tcp(&packet) {
            Some(s) => {
                let last = flags::PSH | flags::FIN | flags::SYN | flags::RST | flags::URG;
                (s.payload.len(), s.payload.is_empty() || s.flags & last != 0)
            }
            None => (0, true),
        };
        Self {
            packet,
            mss,
            segments: 1,
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
        let fits = a.tuple == b.tuple
            && a.meta == b.meta
            && a.seq.add(a.payload.len() as u32) == b.seq
            && a.ack == b.ack
            && a.window == b.window
            && a.options == b.options
            && a.flags == b.flags & !last
            && !b.payload.is_empty()
            && b.payload.len() <= self.mss
            && self.packet.len() + b.payload.len() <= 65_535;
        if !fits {
            return false;
        }
        self.closed = b.payload.len() < self.mss || b.flags & last != 0;
        let (merged, payload) = (b.flags, b.payload.to_vec());
        let at = a.payload_at - a.options.len() - 20;
        self.packet.extend_from_slice(&payload);
        self.packet[at + 13] = merged as u8;
        self.segments += 1;
        let ip_len = self.packet.len();
        set_length(&mut self.packet, ip_len);
        true
    }

    fn finish(mut self, rng: &mut Rng) -> Vec<u8> {
        let mut header = VirtioHdr::default();
        if let Some(s) = tcp(&self.packet) {
            let at = s.payload_at - s.options.len() - 20;
            let (tuple, headers) = (s.tuple, s.payload_at);
            if self.segments > 1 || rng.chance(0.5) {
                header = VirtioHdr {
                    needs_csum: true,
                    gso_size: if self.segments > 1 {
                        self.mss as u16
                    } else {
                        0
                    },
                    ipv6: tuple.src.is_ipv6(),
                    ecn: false,
                    hdr_len: headers as u16,
                    csum_start: at as u16,
                    csum_offset: CSUM as u16,
                };
                let len = self.packet.len() - at;
                let partial =
                    checksum::fold(checksum::pseudo_header(tuple.src, tuple.dst, TCP, len));
                self.packet[at + CSUM..at + CSUM + 2].copy_from_slice(&partial.to_be_bytes());
            }
        }
        frame(header, &self.packet)
    }
}

/// A TUN frame of one packet as it is.
pub fn plain_frame(packet: &[u8]) -> Vec<u8> {
    frame(VirtioHdr::default(), packet)
}

fn frame(header: VirtioHdr, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; virtio::LEN];
    header.encode(frame.first_chunk_mut().expect("the header's room was made"));
    frame.extend_from_slice(packet);
    frame
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
    let tcp_at = s.payload_at - s.options.len() - 20;
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
    if !header.needs_csum {
        // Complete: carried as it was, or it would have been left partial.
        return whole(packet, &s, tcp_at).map(|p| vec![p]);
    }
    if usize::from(header.csum_start) != tcp_at || usize::from(header.csum_offset) != CSUM {
        return Err(format!("checksum offsets {header:?}"));
    }
    let len = packet.len() - tcp_at;
    let want = checksum::fold(checksum::pseudo_header(s.tuple.src, s.tuple.dst, TCP, len));
    let have = u16::from_be_bytes([packet[tcp_at + CSUM], packet[tcp_at + CSUM + 1]]);
    if want != have {
        return Err(format!(
            "a partial checksum of {have:04x} instead of {want:04x}"
        ));
    }
    if header.gso_size == 0 {
        return Ok(vec![piece(packet, &s, tcp_at, 0, s.payload.len())]);
    }
    let mss = usize::from(header.gso_size);
    if usize::from(header.hdr_len) != s.payload_at
        || header.ipv6 != s.tuple.src.is_ipv6()
        || s.payload.len() <= mss
        || s.flags & (flags::SYN | flags::RST | flags::URG) != 0
        || (s.has(flags::CWR) && !header.ecn)
    {
        return Err(format!(
            "a superpacket of {} bytes with {header:?}",
            s.payload.len()
        ));
    }
    let starts = (0..s.payload.len()).step_by(mss);
    Ok(starts
        .map(|at| piece(packet, &s, tcp_at, at, mss.min(s.payload.len() - at)))
        .collect())
}

fn whole(packet: &[u8], s: &Segment<'_>, tcp_at: usize) -> Result<Vec<u8>, String> {
    let copy = piece(packet, s, tcp_at, 0, s.payload.len());
    if copy != packet {
        return Err("a wrong TCP checksum".into());
    }
    Ok(copy)
}

/// What a TCP packet says, to be changed.
#[derive(Clone, Debug)]
pub struct Edit {
    /// Sequence number.
    pub seq: SeqNumber,
    /// Acknowledgement number.
    pub ack: SeqNumber,
    /// Flags.
    pub flags: u16,
    /// Window field.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// Payload.
    pub payload: Vec<u8>,
}

/// A TCP packet with other contents, and the checksum of those.
///
/// # Panics
/// If it is not a TCP packet.
pub fn rewrite(packet: &[u8], change: impl FnOnce(&mut Edit)) -> Vec<u8> {
    let s = tcp(packet).expect("the caller has a TCP packet");
    let at = s.payload_at - s.options.len() - 20;
    let mut edit = Edit {
        seq: s.seq,
        ack: s.ack,
        flags: s.flags,
        window: s.window,
        urgent: s.urgent,
        payload: s.payload.to_vec(),
    };
    change(&mut edit);
    let mut out = packet[..s.payload_at].to_vec();
    out[at + 4..at + 8].copy_from_slice(&edit.seq.raw().to_be_bytes());
    out[at + 8..at + 12].copy_from_slice(&edit.ack.raw().to_be_bytes());
    out[at + 13] = edit.flags as u8;
    out[at + 14..at + 16].copy_from_slice(&edit.window.to_be_bytes());
    out[at + 18..at + 20].copy_from_slice(&edit.urgent.to_be_bytes());
    out.extend_from_slice(&edit.payload);
    seal(&mut out, s.tuple, at);
    out
}

/// The segment of `len` payload bytes at `at`: PSH and FIN on the last one only, CWR on the first.
fn piece(packet: &[u8], s: &Segment<'_>, tcp_at: usize, at: usize, len: usize) -> Vec<u8> {
    let mut out = packet[..s.payload_at].to_vec();
    out.extend_from_slice(&s.payload[at..at + len]);
    let seq = s.seq.add(at as u32).raw();
    out[tcp_at + 4..tcp_at + 8].copy_from_slice(&seq.to_be_bytes());
    if at + len < s.payload.len() {
        out[tcp_at + 13] &= !((flags::PSH | flags::FIN) as u8);
    }
    if at > 0 {
        out[tcp_at + 13] &= !(flags::CWR as u8);
    }
    seal(&mut out, s.tuple, tcp_at);
    out
}

/// Sets the lengths and checksums of a packet to what it is now.
fn seal(packet: &mut [u8], tuple: Tuple, tcp_at: usize) {
    let total = packet.len();
    set_length(packet, total);
    packet[tcp_at + CSUM..tcp_at + CSUM + 2].fill(0);
    let sum = checksum::pseudo_header(tuple.src, tuple.dst, TCP, total - tcp_at)
        + checksum::sum(&packet[tcp_at..]);
    let sum = !checksum::fold(sum);
    packet[tcp_at + CSUM..tcp_at + CSUM + 2].copy_from_slice(&sum.to_be_bytes());
}

fn set_length(packet: &mut [u8], total: usize) {
    if packet[0] >> 4 == 4 {
        packet[2..4].copy_from_slice(&(total as u16).to_be_bytes());
        packet[10..12].fill(0);
        let sum = !checksum::fold(checksum::sum(&packet[..20]));
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        packet[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes());
    }
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
    use dibs_wire::emit::Headers;
    use dibs_wire::packet::IpMeta;

    fn packet(seq: u32, len: usize, tcp_flags: u16, v6: bool) -> Vec<u8> {
        let (src, dst) = if v6 {
            ("fd01::1", "fd01::2")
        } else {
            ("10.0.0.1", "10.0.0.2")
        };
        let headers = Headers {
            tuple: Tuple {
                src: src.parse().unwrap(),
                dst: dst.parse().unwrap(),
                sport: 1,
                dport: 2,
            },
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
        let at = headers.encoded_len();
        let mut frame = vec![0; at];
        frame.extend((0..len).map(|i| (seq as usize + i) as u8));
        headers.write(&mut frame, len, 0);
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
