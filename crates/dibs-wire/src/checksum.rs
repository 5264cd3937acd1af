//! The Internet checksum (RFC 1071) and CRC-32C.

use core::net::IpAddr;

/// Folds a sum of 16-bit words into a checksum field (not complemented).
pub const fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Sum of `bytes` as big-endian 16-bit words; an odd last byte is padded with zero.
pub fn sum(bytes: &[u8]) -> u64 {
    // 32-bit words keep the carries of 2^32 additions within 64 bits.
    let (words, tail) = bytes.as_chunks::<4>();
    let mut sum: u64 = words
        .iter()
        .map(|w| u64::from(u32::from_be_bytes(*w)))
        .sum();
    let mut last = [0u8; 4];
    last[..tail.len()].copy_from_slice(tail);
    sum += u64::from(u32::from_be_bytes(last));
    // Fold once so that callers can add several sums.
    (sum & 0xffff_ffff) + (sum >> 32)
}

/// Sum of the pseudo header of an upper-layer packet (RFC 9293, 3.1; RFC 8200, 8.1).
pub fn pseudo_header(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> u64 {
    let addresses = match (src, dst) {
        (IpAddr::V4(s), IpAddr::V4(d)) => sum(&s.octets()) + sum(&d.octets()),
        (IpAddr::V6(s), IpAddr::V6(d)) => sum(&s.octets()) + sum(&d.octets()),
        _ => panic!("addresses of one packet are of one family"),
    };
    addresses + u64::from(protocol) + len as u64
}

/// CRC-32C (Castagnoli) of `bytes`: what a chunk says of its plaintext.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use super::{crc32c, fold, sum};

    #[test]
    fn equals_the_word_by_word_sum() {
        let bytes: Vec<u8> = (0..1021u32).map(|i| (i * 131 + 7) as u8).collect();
        for len in 0..bytes.len() {
            let mut naive = 0u64;
            for pair in bytes[..len].chunks(2) {
                naive += u64::from(pair[0]) << 8 | u64::from(*pair.get(1).unwrap_or(&0));
            }
            assert_eq!(fold(sum(&bytes[..len])), fold(naive), "length {len}");
        }
    }

    #[test]
    fn crc_of_the_check_string() {
        // The check value of CRC-32C (RFC 3720, B.4 uses the same polynomial).
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
