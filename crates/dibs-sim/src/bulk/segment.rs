//! What a bulk sender and its receiver say to each other, apart from how it looks on a wire.

/// Payload bytes of a segment: Ethernet, IPv4, time stamps.
pub const MSS: u64 = 1448;
/// Bytes of IPv4 and TCP headers with time stamps, in front of each segment.
pub const HEADERS: usize = 52;
/// Blocks of a selective acknowledgement beside time stamps (RFC 2018, 3).
pub const BLOCKS: usize = 3;

/// Consecutive bytes that a sender hands to its device at once (TSO). Offsets count from the stream's
/// first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    /// Offset of the first byte.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// TSval, milliseconds.
    pub tsval: u32,
    /// TSecr.
    pub tsecr: u32,
}

/// An acknowledgement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// Everything below this offset has arrived.
    pub upto: u64,
    /// Bytes from there on that the receiver takes.
    pub window: u64,
    /// Selectively acknowledged, the latest first; one at or below `upto`, or within the second, came twice
    /// (RFC 2883).
    pub blocks: Vec<(u64, u64)>,
    /// TSval, milliseconds.
    pub tsval: u32,
    /// TSecr.
    pub tsecr: u32,
}

impl Ack {
    /// The block that names what came twice, if there is one (RFC 2883, 4).
    pub fn repeated(&self) -> Option<(u64, u64)> {
        let first = *self.blocks.first()?;
        let within = |block: &(u64, u64)| block.0 <= first.0 && first.1 <= block.1;
        (first.1 <= self.upto || self.blocks.get(1).is_some_and(within)).then_some(first)
    }
}
