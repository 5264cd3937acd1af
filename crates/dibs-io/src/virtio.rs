//! The header that a TUN device with IFF_VNET_HDR puts before each packet (virtio 1.2, 5.1.6, in
//! its legacy form of 10 bytes and the host's byte order).

/// Length of the header in bytes.
pub const HDR_LEN: usize = 10;
/// Flag: the checksum at `csum_start + csum_offset` holds the pseudo header's sum only.
pub const NEEDS_CSUM: u8 = 1;
/// `gso_type`: a packet of its own.
pub const GSO_NONE: u8 = 0;
/// `gso_type`: a TCP superpacket over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// `gso_type`: a TCP superpacket over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// Bit of `gso_type`: CWR belongs to the first segment alone.
pub const GSO_ECN: u8 = 0x80;

/// A virtio network header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioHdr {
    /// [`NEEDS_CSUM`] or nothing; other bits are the kernel's hints.
    pub flags: u8,
    /// One of the `GSO_*` types, and perhaps [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers of a superpacket, in bytes; a hint.
    pub hdr_len: u16,
    /// Payload of each segment but the last, in bytes.
    pub gso_size: u16,
    /// Where the checksummed part begins, from the start of the packet.
    pub csum_start: u16,
    /// Where the checksum lies, from `csum_start`.
    pub csum_offset: u16,
}

impl VirtioHdr {
    /// Reads the header that begins `frame`; `None` if that is too short.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        let bytes: &[u8; HDR_LEN] = frame.first_chunk()?;
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Some(Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        })
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HDR_LEN] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = [
            self.hdr_len,
            self.gso_size,
            self.csum_start,
            self.csum_offset,
        ];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Whether the packet stands for several segments.
    pub fn is_superpacket(&self) -> bool {
        self.gso_type & !GSO_ECN != GSO_NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_it_encodes() {
        let header = VirtioHdr {
            flags: NEEDS_CSUM,
            gso_type: GSO_TCPV4 | GSO_ECN,
            hdr_len: 52,
            gso_size: 1448,
            csum_start: 20,
            csum_offset: 16,
        };
        assert_eq!(VirtioHdr::decode(&header.encode()), Some(header));
        assert!(header.is_superpacket());
        assert!(!VirtioHdr::default().is_superpacket());
        assert_eq!(VirtioHdr::decode(&[0; HDR_LEN - 1]), None);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn has_the_kernels_layout() {
        // As read from a TUN on Linux 6.18.
        let bytes = [1, 1, 52, 0, 0x44, 5, 20, 0, 16, 0];
        let header = VirtioHdr::decode(&bytes).expect("long enough");
        assert_eq!((header.hdr_len, header.gso_size), (52, 1348));
        assert_eq!((header.csum_start, header.csum_offset), (20, 16));
    }
}
