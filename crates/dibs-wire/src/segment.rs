//! Cuts a TCP superpacket into segments in software, as the kernel would (RFC 9293, 3.1; `tcp_gso_segment`): for
//! kernels that refuse a superpacket, for devices without offload, and for who wants to see what goes on a wire.

use crate::checksum::{fold, pseudo_header, sum};
use crate::packet::{self, Packet, TCP, flags};
use crate::virtio::{self, VirtioHdr};

/// IPv6, and TCP with all options that fit.
const MAX_HEADERS: usize = 100;

/// The frame is no packet, or its virtio header does not fit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame and virtio header do not fit together")]
pub struct Malformed;

/// One packet with complete checksums: headers, then payload borrowed from the frame.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    headers: [u8; MAX_HEADERS],
    len: usize,
    payload: &'a [u8],
}

impl<'a> Piece<'a> {
    /// The packet's first part.
    pub fn headers(&self) -> &[u8] {
        &self.headers[..self.len]
    }

    /// The packet's second part.
    pub const fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

/// The packets that a frame stands for: the segments of a TCP superpacket, or the packet itself.
pub struct Segments<'a> {
    packet: &'a [u8],
    /// What is left to the kernel of it, if anything is: payload of each segment is to be so long.
    tcp: Option<(packet::Segment<'a>, usize)>,
    /// Where the next piece begins in the payload.
    at: Option<usize>,
}

impl<'a> Segments<'a> {
    /// Checks a frame (virtio header and packet); what follows cannot fail.
    ///
    /// # Errors
    /// If something is left to the kernel of what is no TCP segment, or not what it can do.
    pub fn parse(frame: &'a [u8]) -> Result<Self, Malformed> {
        let (header, packet) = frame
            .split_first_chunk::<{ virtio::LEN }>()
            .ok_or(Malformed)?;
        let header = VirtioHdr::decode(header).map_err(|_| Malformed)?;
        let tcp = match packet::parse(packet) {
            _ if header.gso_size == 0 && !header.needs_csum => None,
            Ok(Packet::Tcp(s)) if fits(&header, &s) => {
                let mss = match header.gso_size {
                    0 => s.payload.len(),
                    mss => mss.into(),
                };
                Some((s, mss))
            }
            _ => return Err(Malformed),
        };
        if packet.is_empty() {
            return Err(Malformed);
        }
        Ok(Self {
            packet,
            tcp,
            at: Some(0),
        })
    }
}

fn fits(header: &VirtioHdr, s: &packet::Segment<'_>) -> bool {
    let sum = (usize::from(header.csum_start), header.csum_offset);
    (!header.needs_csum || sum == (s.tcp_at(), 16))
        && (header.gso_size == 0 || !s.payload.is_empty())
}

impl<'a> Iterator for Segments<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        let from = self.at.take()?;
        let mut piece = Piece {
            headers: [0; MAX_HEADERS],
            len: 0,
            payload: self.packet,
        };
        if let Some((s, mss)) = &self.tcp {
            let to = s.payload.len().min(from + mss);
            self.at = (to < s.payload.len()).then_some(to);
            piece.len = s.payload_at;
            piece.payload = &s.payload[from..to];
            let headers = &mut piece.headers[..s.payload_at];
            headers.copy_from_slice(&self.packet[..s.payload_at]);
            finish(headers, s, piece.payload, from);
        }
        Some(piece)
    }
}

/// Makes copied headers those of the payload that begins `from` bytes behind the superpacket's. IPv4's
/// identification stays: that of a packet that may not be fragmented is free (RFC 6864).
fn finish(headers: &mut [u8], s: &packet::Segment<'_>, payload: &[u8], from: usize) {
    let total = headers.len() + payload.len();
    let (ip, tcp) = headers.split_at_mut(s.tcp_at());
    if s.tuple.src.is_ipv4() {
        ip[2..4].copy_from_slice(&(total as u16).to_be_bytes());
        ip[10..12].fill(0);
        let sum = !fold(sum(ip));
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        ip[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes());
    }
    tcp[4..8].copy_from_slice(&s.seq.add(from as u32).raw().to_be_bytes());
    if from > 0 {
        tcp[13] &= !(flags::CWR as u8);
    }
    if from + payload.len() < s.payload.len() {
        tcp[13] &= !((flags::FIN | flags::PSH) as u8);
    }
    tcp[16..18].fill(0);
    let pseudo = pseudo_header(s.tuple.src, s.tuple.dst, TCP, total - s.tcp_at());
    let sum = !fold(pseudo + sum(tcp) + sum(payload));
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
mod tests;
