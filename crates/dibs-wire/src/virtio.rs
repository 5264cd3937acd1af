//! The virtio network header in front of every frame of a TUN with offloads (virtio 1.2, 5.1.6).

/// Bytes of the header.
pub const LEN: usize = 10;

/// Flag: the checksum is partial.
pub const NEEDS_CSUM: u8 = 1;
/// Type: a packet of its own.
pub const GSO_NONE: u8 = 0;
/// Type: a TCP superpacket over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// Type: a TCP superpacket over IPv6. The rest are UDP's.
pub const GSO_TCPV6: u8 = 4;
/// Bit of the type: CWR belongs to the first segment alone.
pub const GSO_ECN: u8 = 0x80;

/// The header's fields, host byte order on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtioHdr {
    /// The transport checksum is partial: the sum from `csum_start` on goes to `csum_offset`.
    pub needs_csum: bool,
    /// TCP payload bytes of each segment of a superpacket; zero for a plain packet.
    pub gso_size: u16,
    /// The superpacket is IPv6.
    pub ipv6: bool,
    /// CWR stands on the first segment only (superpackets).
    pub ecn: bool,
    /// Bytes of all headers of a superpacket.
    pub hdr_len: u16,
    /// Offset at which the checksum begins.
    pub csum_start: u16,
    /// Offset of the checksum field, counted from `csum_start`.
    pub csum_offset: u16,
}

/// A header of a kind that was not asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("virtio header with GSO type {0:#x}")]
pub struct UnknownGso(pub u8);

impl VirtioHdr {
    /// Reads the header; `gso_type` must be none or TCP.
    pub fn decode(b: &[u8; LEN]) -> Result<Self, UnknownGso> {
        let gso_type = b[1];
        let (gso, ipv6) = match gso_type & !GSO_ECN {
            GSO_NONE => (false, false),
            GSO_TCPV4 => (true, false),
            GSO_TCPV6 => (true, true),
            other => return Err(UnknownGso(other)),
        };
        Ok(Self {
            needs_csum: b[0] & NEEDS_CSUM != 0,
            gso_size: if gso {
                u16::from_ne_bytes([b[4], b[5]])
            } else {
                0
            },
            ipv6,
            ecn: gso_type & GSO_ECN != 0,
            hdr_len: u16::from_ne_bytes([b[2], b[3]]),
            csum_start: u16::from_ne_bytes([b[6], b[7]]),
            csum_offset: u16::from_ne_bytes([b[8], b[9]]),
        })
    }

    /// Writes the header.
    pub fn encode(&self, b: &mut [u8; LEN]) {
        b[0] = if self.needs_csum { NEEDS_CSUM } else { 0 };
        b[1] = match (self.gso_size, self.ipv6) {
            (0, _) => GSO_NONE,
            (_, false) => GSO_TCPV4,
            (_, true) => GSO_TCPV6,
        } | if self.ecn { GSO_ECN } else { 0 };
        b[2..4].copy_from_slice(&self.hdr_len.to_ne_bytes());
        b[4..6].copy_from_slice(&self.gso_size.to_ne_bytes());
        b[6..8].copy_from_slice(&self.csum_start.to_ne_bytes());
        b[8..10].copy_from_slice(&self.csum_offset.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let header = VirtioHdr {
            needs_csum: true,
            gso_size: 1400,
            ipv6: true,
            ecn: true,
            hdr_len: 72,
            csum_start: 40,
            csum_offset: 16,
        };
        let mut bytes = [0; LEN];
        header.encode(&mut bytes);
        assert_eq!(VirtioHdr::decode(&bytes), Ok(header));
    }

    #[test]
    fn udp_superpackets_are_refused() {
        assert_eq!(
            VirtioHdr::decode(&[0, 5, 0, 0, 0, 0, 0, 0, 0, 0]),
            Err(UnknownGso(5))
        );
    }
}
