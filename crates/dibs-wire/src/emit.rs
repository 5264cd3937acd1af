//! Writes the headers of packets that go into a TUN.
//!
//! Lengths, offsets and the virtio header are made here from typed values, never copied from a
//! peer's bytes (docs/threat-model.md, "The peer"). By hand, as this is on the way of each packet: 12 ns (IPv4) and 8
//! (IPv6), where etherparse 0.21 takes 37 and 27; 2026-11-25, `cargo bench --bench headers`.

use core::net::IpAddr;

use crate::checksum;
use crate::packet::{FlowKey, IpMeta, Segment, TCP, flags};
use crate::seq::SeqNumber;
use crate::virtio::{self, VirtioHdr};

/// Most bytes that [`Headers::write`] puts in front of a payload: virtio, IPv6 and the longest TCP
/// header.
pub const MAX_HEADERS: usize = virtio::LEN + 40 + 60;

/// The headers of one TCP segment or superpacket.
#[derive(Clone, Copy, Debug)]
pub struct Headers<'a> {
    /// Addresses and ports.
    pub tuple: FlowKey,
    /// Remaining IP fields.
    pub meta: IpMeta,
    /// Sequence number.
    pub seq: SeqNumber,
    /// Acknowledgement number.
    pub ack: SeqNumber,
    /// Flag bits.
    pub flags: u16,
    /// Window field.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// Time stamps in the usual layout; ignored if `options` are given.
    pub timestamps: Option<(u32, u32)>,
    /// Raw options, a multiple of four and at most 40 bytes.
    pub options: Option<&'a [u8]>,
}

impl<'a> From<&Segment<'a>> for Headers<'a> {
    /// The headers that say the same.
    fn from(segment: &Segment<'a>) -> Self {
        Self {
            tuple: segment.tuple,
            meta: segment.meta,
            seq: segment.seq,
            ack: segment.ack,
            flags: segment.flags,
            window: segment.window,
            urgent: segment.urgent,
            timestamps: segment.timestamps,
            options: (!segment.has_plain_options()).then_some(segment.options),
        }
    }
}

impl Headers<'_> {
    /// Bytes that [`write`](Self::write) fills in.
    pub fn encoded_len(&self) -> usize {
        let ip = if self.tuple.src.is_ipv4() { 20 } else { 40 };
        virtio::LEN + ip + 20 + self.options_len()
    }

    fn options_len(&self) -> usize {
        match (self.options, self.timestamps) {
            (Some(raw), _) => raw.len(),
            (None, Some(_)) => 12,
            (None, None) => 0,
        }
    }

    /// Writes virtio, IP and TCP header to the front of `buf` for `payload_len` bytes that follow;
    /// `gso_size` is the payload of each segment of a superpacket, or zero. The TCP checksum is left
    /// partial: the kernel takes it as verified and completes it should the packet ever leave.
    ///
    /// # Panics
    /// If `buf` is shorter than [`encoded_len`](Self::encoded_len) or the packet would exceed 65535 bytes.
    pub fn write(&self, buf: &mut [u8], payload_len: usize, gso_size: u16) {
        let header_len = self.encoded_len() - virtio::LEN;
        let (virtio_bytes, packet) = buf.split_at_mut(virtio::LEN);
        let ipv6 = self.tuple.src.is_ipv6();
        let ip_len = if ipv6 { 40 } else { 20 };
        let tcp_len = header_len - ip_len + payload_len;
        VirtioHdr {
            needs_csum: true,
            gso_size,
            ipv6,
            ecn: gso_size != 0 && self.flags & flags::CWR != 0,
            hdr_len: header_len as u16,
            csum_start: ip_len as u16,
            csum_offset: 16,
        }
        .encode(
            virtio_bytes
                .first_chunk_mut()
                .expect("ten bytes were split off"),
        );
        write_ip(packet, self.tuple, self.meta, tcp_len);
        let tcp = &mut packet[ip_len..header_len];
        tcp[0..2].copy_from_slice(&self.tuple.sport.to_be_bytes());
        tcp[2..4].copy_from_slice(&self.tuple.dport.to_be_bytes());
        tcp[4..8].copy_from_slice(&self.seq.raw().to_be_bytes());
        tcp[8..12].copy_from_slice(&self.ack.raw().to_be_bytes());
        let offset_and_flags = ((tcp.len() / 4) as u16) << 12 | (self.flags & 0x0fff);
        tcp[12..14].copy_from_slice(&offset_and_flags.to_be_bytes());
        tcp[14..16].copy_from_slice(&self.window.to_be_bytes());
        let partial = checksum::fold(checksum::pseudo_header(
            self.tuple.src,
            self.tuple.dst,
            TCP,
            tcp_len,
        ));
        tcp[16..18].copy_from_slice(&partial.to_be_bytes());
        tcp[18..20].copy_from_slice(&self.urgent.to_be_bytes());
        if let Some(raw) = self.options {
            tcp[20..].copy_from_slice(raw);
        } else if let Some((val, ecr)) = self.timestamps {
            tcp[20..24].copy_from_slice(&[1, 1, 8, 10]);
            tcp[24..28].copy_from_slice(&val.to_be_bytes());
            tcp[28..32].copy_from_slice(&ecr.to_be_bytes());
        }
    }
}

/// Writes a 20-byte IPv4 or a 40-byte IPv6 header for `upper_len` bytes of TCP.
fn write_ip(buf: &mut [u8], tuple: FlowKey, meta: IpMeta, upper_len: usize) {
    match (tuple.src, tuple.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let total = u16::try_from(20 + upper_len).expect("an IPv4 packet fits 65535 bytes");
            buf[0] = 0x45;
            buf[1] = meta.tos;
            buf[2..4].copy_from_slice(&total.to_be_bytes());
            // Don't fragment; the identification of an atomic datagram is free (RFC 6864).
            buf[4..8].copy_from_slice(&[0, 0, 0x40, 0]);
            buf[8] = meta.ttl;
            buf[9] = TCP;
            buf[10..12].fill(0);
            buf[12..16].copy_from_slice(&src.octets());
            buf[16..20].copy_from_slice(&dst.octets());
            let sum = !checksum::fold(checksum::sum(&buf[..20]));
            buf[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let len = u16::try_from(upper_len).expect("an IPv6 payload fits 65535 bytes");
            let first = 6 << 28 | u32::from(meta.tos) << 20 | (meta.flow_label & 0xf_ffff);
            buf[0..4].copy_from_slice(&first.to_be_bytes());
            buf[4..6].copy_from_slice(&len.to_be_bytes());
            buf[6] = TCP;
            buf[7] = meta.ttl;
            buf[8..24].copy_from_slice(&src.octets());
            buf[24..40].copy_from_slice(&dst.octets());
        }
        _ => panic!("addresses of one packet are of one family"),
    }
}

/// Completes the partial transport checksum of a packet that leaves the host as it is.
///
/// Returns false, and changes nothing, if the offsets do not lie within the packet.
#[must_use]
pub fn complete_checksum(header: &VirtioHdr, packet: &mut [u8]) -> bool {
    let start = usize::from(header.csum_start);
    let field = start + usize::from(header.csum_offset);
    // It would be written into the IP header, which has a checksum of its own.
    let network = match packet.first() {
        Some(first) if first >> 4 == 4 => usize::from(first & 15) * 4,
        Some(first) if first >> 4 == 6 => 40,
        _ => return false,
    };
    if start < network || field + 2 > packet.len() {
        return false;
    }
    let mut sum = !checksum::fold(checksum::sum(&packet[start..]));
    // UDP: zero would mean "no checksum" (RFC 768).
    if sum == 0 && header.csum_offset == 6 {
        sum = 0xffff;
    }
    packet[field..field + 2].copy_from_slice(&sum.to_be_bytes());
    true
}
