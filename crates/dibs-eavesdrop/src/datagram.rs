//! Datagrams of dibs, told by their clear header (docs/protocol.md, 4).

use std::net::SocketAddr;
use std::time::Duration;

/// Bytes of a datagram's clear header.
pub const CLEAR: usize = 16;
/// Bytes of its tag.
pub(crate) const TAG: usize = 16;

/// What a way of a path is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) path: u8,
    pub(crate) index: u32,
}

/// A datagram, and when it passed.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) at: Duration,
    pub(crate) bytes: Vec<u8>,
}

/// What stands behind the clear header of a datagram, without its tag.
pub(crate) fn body(datagram: &[u8]) -> &[u8] {
    match datagram[0] {
        6 => &datagram[CLEAR..],
        _ => &datagram[CLEAR..datagram.len() - TAG],
    }
}

/// The datagrams of a superpacket: all but the last one are of one length, and each has the number behind that of the
/// one before it.
pub(crate) fn apart(bytes: &[u8]) -> Vec<&[u8]> {
    let mut next: [u8; CLEAR] = bytes[..CLEAR].try_into().expect("it has a clear header");
    let number = u64::from_be_bytes(next[8..].try_into().expect("8 bytes"));
    next[8..].copy_from_slice(&number.wrapping_add(1).to_be_bytes());
    let follows = |at: &usize| {
        let header = &bytes[*at..*at + CLEAR];
        header[1] == next[1] && header[4..] == next[4..]
    };
    let last = bytes.len().saturating_sub(CLEAR + TAG);
    match (CLEAR + TAG..=last).find(follows) {
        Some(length) => {
            let all = bytes.chunks(length);
            all.filter(|datagram| datagram.len() >= CLEAR + TAG)
                .collect()
        }
        None => vec![bytes],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(number: u8, length: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; length];
        bytes[..CLEAR].copy_from_slice(&[4, 1, 9, 9, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, number]);
        bytes
    }

    #[test]
    fn superpackets_are_taken_apart() {
        let three = [datagram(7, 100), datagram(8, 100), datagram(9, 40)];
        let one = three.concat();
        let parts: Vec<Vec<u8>> = apart(&one).into_iter().map(<[u8]>::to_vec).collect();
        assert_eq!(parts, three);
        assert_eq!(apart(&three[0]), [&three[0][..]]);
        let stranger = [datagram(7, 100), datagram(3, 100)].concat();
        assert_eq!(apart(&stranger).len(), 1);
    }
}
