//! Cuts a TCP superpacket into segments in software, as the kernel would (RFC 9293, 3.1;
//! `tcp_gso_segment`): for kernels that refuse a superpacket, and for devices without offload.

use crate::virtio::{HDR_LEN, NEEDS_CSUM, VirtioHdr};

/// Longest run of headers that is copied to each segment: IPv6 with extensions, TCP with options.
const HEADERS_MAX: usize = 256;

const TCP: u8 = 6;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// The frame is no IP packet, or its virtio header does not fit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame and virtio header do not fit together")]
pub struct Malformed;

/// One packet with complete checksums: headers, then payload borrowed from the frame.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    headers: [u8; HEADERS_MAX],
    len: usize,
    payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// The packet's first part.
    pub fn headers(&self) -> &[u8] {
        &self.headers[..self.len]
    }

    /// The packet's second part.
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

/// The packets that a frame stands for: the segments of a TCP superpacket, or the packet itself.
pub struct Segments<'a> {
    packet: &'a [u8],
    shape: Shape,
    /// Next byte to hand out, from the start of the packet; its length when all is done.
    at: usize,
}

#[derive(Clone, Copy)]
enum Shape {
    /// `tcp` and `payload` are offsets in the packet.
    Super {
        tcp: usize,
        payload: usize,
        mss: usize,
        ipv6: bool,
    },
    /// The sum over everything from `start` belongs to `start + offset`.
    Partial {
        start: usize,
        offset: usize,
    },
    Complete,
}

impl<'a> Segments<'a> {
    /// Checks a frame (virtio header and packet); what follows cannot fail.
    pub fn parse(frame: &'a [u8]) -> Result<Self, Malformed> {
        let header = VirtioHdr::decode(frame).ok_or(Malformed)?;
        let packet = &frame[HDR_LEN..];
        let shape = if header.is_superpacket() {
            superpacket(&header, packet)?
        } else if header.flags & NEEDS_CSUM != 0 {
            let (start, offset) = (header.csum_start.into(), usize::from(header.csum_offset));
            let end = start + offset + 2;
            if end > packet.len() || end > HEADERS_MAX || offset % 2 != 0 {
                return Err(Malformed);
            }
            Shape::Partial { start, offset }
        } else {
            Shape::Complete
        };
        if packet.is_empty() {
            return Err(Malformed);
        }
        Ok(Self {
            packet,
            shape,
            at: 0,
        })
    }
}

/// Where the headers of a TCP superpacket lie. The kind is taken from the packet itself: a kernel
/// may have refused the frame for what its `gso_type` says.
fn superpacket(header: &VirtioHdr, packet: &[u8]) -> Result<Shape, Malformed> {
    let (ipv6, network, protocol) = match packet.first().ok_or(Malformed)? >> 4 {
        4 => (false, usize::from(packet[0] & 15) * 4, packet.get(9)),
        6 => (true, 40, packet.get(6)),
        _ => return Err(Malformed),
    };
    let tcp = match header.flags & NEEDS_CSUM {
        0 if protocol == Some(&TCP) => network,
        0 => return Err(Malformed),
        _ => header.csum_start.into(),
    };
    let tcp_len = usize::from(packet.get(tcp + 12).ok_or(Malformed)? >> 4) * 4;
    let payload = tcp + tcp_len;
    let fits = network >= 20 && tcp >= network && tcp_len >= 20;
    if !fits || payload > HEADERS_MAX || payload >= packet.len() || header.gso_size == 0 {
        return Err(Malformed);
    }
    Ok(Shape::Super {
        tcp,
        payload,
        mss: header.gso_size.into(),
        ipv6,
    })
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        let packet = self.packet;
        if self.at == packet.len() {
            return None;
        }
        let cut = |headers: usize, from: usize, to: usize| {
            let mut copy = [0; HEADERS_MAX];
            copy[..headers].copy_from_slice(&packet[..headers]);
            Segment {
                headers: copy,
                len: headers,
                payload: &packet[from..to],
            }
        };
        match self.shape {
            Shape::Complete => {
                self.at = packet.len();
                Some(cut(0, 0, packet.len()))
            }
            Shape::Partial { start, offset } => {
                self.at = packet.len();
                let mut segment = cut(start + offset + 2, start + offset + 2, packet.len());
                let sum = sum(&segment.headers()[start..]) + sum(segment.payload);
                put_checksum(&mut segment.headers[start + offset..], sum);
                Some(segment)
            }
            Shape::Super {
                tcp,
                payload,
                mss,
                ipv6,
            } => {
                let from = self.at.max(payload);
                let to = packet.len().min(from + mss);
                self.at = to;
                let mut segment = cut(payload, from, to);
                let index = (from - payload) / mss;
                let position = Position {
                    index,
                    offset: from - payload,
                    last: to == packet.len(),
                };
                finish(&mut segment, tcp, ipv6, position);
                Some(segment)
            }
        }
    }
}

/// A segment's place in its superpacket.
struct Position {
    index: usize,
    offset: usize,
    last: bool,
}

/// Makes the copied headers those of this segment.
fn finish(segment: &mut Segment<'_>, tcp: usize, ipv6: bool, position: Position) {
    let total = segment.len + segment.payload.len();
    let headers = &mut segment.headers[..segment.len];
    let (network, transport) = headers.split_at_mut(tcp);
    let addresses = if ipv6 {
        network[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes());
        &network[8..40]
    } else {
        let id = u16::from_be_bytes([network[4], network[5]]).wrapping_add(position.index as u16);
        network[2..4].copy_from_slice(&(total as u16).to_be_bytes());
        network[4..6].copy_from_slice(&id.to_be_bytes());
        network[10..12].fill(0);
        let header = usize::from(network[0] & 15) * 4;
        let sum = sum(&network[..header]);
        put_checksum(&mut network[10..], sum);
        &network[12..20]
    };
    let first = u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
    let sequence = first.wrapping_add(position.offset as u32);
    transport[4..8].copy_from_slice(&sequence.to_be_bytes());
    if position.index > 0 {
        transport[13] &= !CWR;
    }
    if !position.last {
        transport[13] &= !(FIN | PSH);
    }
    transport[16..18].fill(0);
    let pseudo = sum(addresses) + u64::from(TCP) + (total - tcp) as u64;
    let sum = pseudo + sum(transport) + sum(segment.payload);
    put_checksum(&mut transport[16..], sum);
}

/// Sum of big-endian words, not folded (RFC 1071); an odd last byte is padded with zero.
fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(4);
    let mut tail = [0; 4];
    tail[..words.remainder().len()].copy_from_slice(words.remainder());
    let word =
        |bytes: &[u8]| u64::from(u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    words.map(word).sum::<u64>() + word(&tail)
}

/// Folds and complements; a zero is written as its other form, which UDP needs and TCP allows.
fn put_checksum(place: &mut [u8], mut sum: u64) {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let checksum = match !(sum as u16) {
        0 => 0xffff,
        other => other,
    };
    place[..2].copy_from_slice(&checksum.to_be_bytes());
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
