//! One datagram: how it is laid out, padded, numbered and sealed.

use dibs_wire::packet::flags;

use crate::node::paths::Link;
use crate::session::{OVERHEAD, PathId, Session};
use crate::slab::Key;
use crate::time::Time;

/// Flags whose segments begin or end something, and go authenticated whatever `integrity` says.
pub(in crate::node) const NOT_BARE: u16 = flags::SYN | flags::FIN | flags::RST;
/// Segments of one GSO send, at most (the kernel's UDP_MAX_SEGMENTS of old).
pub(super) const MAX_SEGMENTS: usize = 64;
/// Bytes of one GSO send, at most: an IPv6 payload with its UDP header.
pub(super) const MAX_BATCH: usize = 65_000;
/// A datagram that falls short of the others of its send by no more than this part of them is padded:
/// the send goes on behind it, with the next segment.
pub(super) const MAX_SHORTFALL: usize = 32;
/// Lengths of padded datagrams: powers of two between these, or the path's.
const MIN_BUCKET: usize = 128;
const MAX_BUCKET: usize = 1024;

/// Lengths of the parts of a datagram, or of what is split, in their order.
pub(super) struct Shape {
    pub(super) front: usize,
    pub(super) payload: usize,
    pub(super) header: usize,
    pub(super) tag: usize,
}

impl Shape {
    pub(super) const fn len(&self) -> usize {
        self.front + self.payload + self.header + self.tag
    }
}

/// Bytes that bring a datagram of `len` to the next of the lengths that an observer may see.
pub(super) fn padding(len: usize, mtu: usize) -> usize {
    let bucket = len.next_power_of_two().max(MIN_BUCKET);
    let bucket = if bucket > MAX_BUCKET {
        mtu
    } else {
        bucket.min(mtu)
    };
    bucket.saturating_sub(len)
}

/// Brings a header block that is sent alone to one of those lengths.
pub(super) fn pad(block: &mut Vec<u8>, room: usize) {
    let len = block.len() + OVERHEAD;
    block.resize(block.len() + padding(len, room + OVERHEAD), 0);
}

/// Question of a datagram to its receiver.
#[derive(Clone, Copy)]
pub(super) enum Asks {
    Nothing,
    /// An acknowledgement.
    Ack,
    /// One of what is in flight under this key.
    AckOf(Key),
}

impl Asks {
    /// The token that the path layer has it under: zero is nobody's.
    fn token(self) -> u64 {
        match self {
            Self::Nothing | Self::Ack => 0,
            Self::AckOf(key) => key.to_u64() + 1,
        }
    }
}

/// The key of a token that a path gave back.
pub(in crate::node) fn key_of(token: u64) -> Option<Key> {
    token.checked_sub(1).map(Key::from_u64)
}

/// Protection of a datagram beside that of the number of its path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Seal {
    /// Nothing.
    Bare,
    /// All is authenticated, and the header block encrypted.
    Headers,
    /// All is encrypted.
    All,
}

/// Numbers datagrams and protects them.
pub(in crate::node) struct Sealer<'a> {
    pub(in crate::node) now: Time,
    pub(in crate::node) session: &'a mut Session,
    /// Datagrams that there were no keys for.
    pub(in crate::node) refused: u64,
}

impl Sealer<'_> {
    /// Makes a datagram of what was written behind the room for its clear header: the last `header` bytes in front of
    /// its tag are the header block. False if there are no keys: nothing leaves without protection.
    pub(super) fn seal(
        &mut self,
        link: &mut Link,
        datagram: &mut [u8],
        header: usize,
        asks: Asks,
        seal: Seal,
    ) -> bool {
        let eliciting = !matches!(asks, Asks::Nothing);
        let len = datagram.len() as u16;
        let seq = link.path.on_sent(self.now, len, asks.token(), eliciting);
        self.seal_numbered((link.id, seq), datagram, header, seal)
    }

    /// The same for what has its number.
    pub(super) fn seal_numbered(
        &mut self,
        (path, seq): (PathId, u64),
        datagram: &mut [u8],
        header: usize,
        seal: Seal,
    ) -> bool {
        let sealed = match seal {
            Seal::Bare => self.session.seal_bare(datagram, path, seq, header),
            Seal::Headers => self.session.seal(datagram, path, seq, header, false),
            Seal::All => self.session.seal(datagram, path, seq, header, true),
        };
        self.refused += u64::from(sealed.is_err());
        sealed.is_ok()
    }
}
