//! The frames in the header block of a datagram (docs/protocol.md).
//!
//! A header block is a sequence of frames. At most one frame describes the datagram's payload: a
//! [`Chunk`] or a [`Share`]. Everything here arrives authenticated, yet is still checked in full: a peer may err.

mod flow;
mod read;
#[cfg(test)]
mod tests;
mod write;

use core::fmt;
use core::net::IpAddr;

use crate::bytes::Truncated;
use crate::packet::{FlowKey, IpMeta};
use crate::seq::SeqNumber;

pub use flow::{chunk_len, segment_len};
pub use read::Frames;
pub use write::encode;

const PADDING: u8 = 0x00;
/// Type of [`Frame::Ping`], which is nothing but its type.
pub const PING: u8 = 0x01;
/// Type of [`Frame::Ack`]; a 16-bit length and that many bytes follow.
pub const ACK: u8 = 0x02;
/// Type of [`Frame::PingSpent`], which is nothing but its type.
pub const PING_SPENT: u8 = 0x03;
const CHUNK: u8 = 0x10;
const SEGMENT: u8 = 0x11;
const OPAQUE: u8 = 0x12;
const FRAGMENT: u8 = 0x13;
const SHARE: u8 = 0x14;
const SHARE_OF_SEGMENTS: u8 = 0x15;
const CONTROL: u8 = 0x20;
const FLOW_UNKNOWN: u8 = 0x21;
const EPOCH_BROKEN: u8 = 0x22;
const PATH_JOIN: u8 = 0x30;
const PATH_ACCEPT: u8 = 0x31;
const PATH_CONFIRM: u8 = 0x32;
const PATH_CHALLENGE: u8 = 0x33;
const PATH_RESPONSE: u8 = 0x34;

/// Longest options of a TCP header.
pub const MAX_TCP_OPTIONS: usize = 40;

/// Why a header block is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// It ends within a frame.
    #[error("frame ends early")]
    Truncated,
    /// A frame type of another protocol version.
    #[error("unknown frame type {0:#04x}")]
    UnknownType(u8),
    /// A flag bit that this version does not define.
    #[error("unknown flag bits {0:#04x}")]
    UnknownFlags(u8),
    /// A field out of its range.
    #[error("{0} out of range")]
    Range(&'static str),
}

impl From<Truncated> for FrameError {
    fn from(Truncated: Truncated) -> Self {
        Self::Truncated
    }
}

/// A flow's number on the wire, given by its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(u32);

impl FlowId {
    /// The number as on the wire.
    pub const fn new(raw: u32) -> Self {
        Self(raw)
    }

    /// The number as on the wire.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names the flow and says how to write its packets again; rides on frames of a flow until the peer
/// has acknowledged one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The bump, as numbered by the protocol.
    pub bump: u8,
    /// Addresses and ports of the sender's direction.
    pub tuple: FlowKey,
    /// IP fields that hold unless a frame says otherwise.
    pub meta: IpMeta,
    /// The sequence number that stream offset [`BASE_OFFSET`] stands for.
    pub base_seq: SeqNumber,
    /// The session whose secret the epoch keys of this incarnation derive from.
    pub session: u64,
}

/// Stream offset of an incarnation's base sequence number. It leaves room below for what the kernel
/// may send again from before the base.
pub const BASE_OFFSET: u64 = 1 << 32;

/// The TCP header fields that change from segment to segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpFields<'a> {
    /// Flag bits, 12 of them.
    pub flags: u16,
    /// Window, unscaled.
    pub window: u16,
    /// Acknowledgement number.
    pub ack: SeqNumber,
    /// TSval, TSecr in the usual layout.
    pub timestamps: Option<(u32, u32)>,
    /// IP fields, where they differ from the flow's.
    pub meta: Option<IpMeta>,
    /// Raw options, where they are more than time stamps in the usual layout.
    pub options: Option<&'a [u8]>,
    /// Urgent pointer.
    pub urgent: Option<u16>,
}

/// A piece of a flow's stream; its bytes are the datagram's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// The flow, numbered by the sender.
    pub flow: FlowId,
    /// Counts the connections that used this flow number.
    pub incarnation: u16,
    /// Restored on its own (true) or in the order of its epoch.
    pub solo: bool,
    /// Bytes beyond the offset that the epoch had come when a solo chunk was cut. TCP sent all of them before.
    pub ahead: u32,
    /// The epoch begins with this chunk.
    pub first: bool,
    /// Bytes in front of the epoch go, or went, to the receiver by another way than this bump.
    pub detached: bool,
    /// The receiver takes it as part of its epoch and does not hand it to its kernel, to which it is lost: so that TCP
    /// slows down.
    pub withheld: bool,
    /// The epoch.
    pub epoch: u32,
    /// Stream offset of the first byte.
    pub offset: u64,
    /// CRC-32C of the plaintext.
    pub crc: u32,
    /// TCP header fields of this piece.
    pub tcp: TcpFields<'a>,
    /// Present until the peer knows the flow.
    pub open: Option<Open>,
}

/// A TCP segment without payload: it carries no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmptySegment<'a> {
    /// The flow.
    pub flow: FlowId,
    /// Its incarnation.
    pub incarnation: u16,
    /// Sequence number.
    pub seq: SeqNumber,
    /// TCP header fields.
    pub tcp: TcpFields<'a>,
    /// Present until the peer knows the flow.
    pub open: Option<Open>,
}

/// A share of a header block and its payload, which were split over paths; the share is the datagram's
/// payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Segments without payload are its only content: they are never sent again, and ask for no acknowledgement.
    pub fleeting: bool,
    /// The bump that split it.
    pub bump: u8,
    /// The low bits of the number of the set that the share belongs to.
    pub set: u32,
    /// Index of the share in the set.
    pub index: u8,
    /// How many give the whole.
    pub needed: u8,
    /// How many there are.
    pub shares: u8,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Asks for an acknowledgement.
    Ping,
    /// The same, and asks the peer to send nothing of connections by this path: its volume is used up here. That holds
    /// until a [`Ping`](Self::Ping) comes by it.
    PingSpent,
    /// Received ranges of this path, encoded by the path layer.
    Ack(&'a [u8]),
    /// The payload's description.
    Chunk(Chunk<'a>),
    /// A segment without payload.
    Segment(EmptySegment<'a>),
    /// A whole IP packet that is not cut.
    Opaque {
        /// The bump whose TUN it came from and goes to.
        bump: u8,
        /// The packet.
        packet: &'a [u8],
    },
    /// A piece of a header block (and payload) that does not fit one datagram.
    Fragment {
        /// Names the whole.
        id: u32,
        /// Where the piece stands in it.
        at: u32,
        /// Length of the whole.
        total: u32,
        /// Length of the header block at its front; the rest is payload.
        header: u16,
        /// The piece.
        bytes: &'a [u8],
    },
    /// The payload is a share.
    Share(Share),
    /// A reliable message between the two daemons.
    Control {
        /// Repeated messages keep their number.
        id: u32,
        /// The message.
        bytes: &'a [u8],
    },
    /// The receiver does not know this flow: open it again.
    FlowUnknown {
        /// The flow as numbered by the one who is told.
        flow: FlowId,
        /// The incarnation that was used.
        incarnation: u16,
    },
    /// The receiver cannot restore this epoch any further: open a new one.
    EpochBroken {
        /// The flow as numbered by the one who is told.
        flow: FlowId,
        /// Its incarnation.
        incarnation: u16,
        /// The epoch that ended.
        epoch: u32,
    },
    /// Opens the path that the datagram came by.
    PathJoin {
        /// Chosen by the joining side.
        nonce: [u8; 8],
        /// The joining side trusts this path.
        trusted: bool,
        /// The address that it sends this to.
        to: IpAddr,
    },
    /// Answers a join and challenges it.
    PathAccept {
        /// The join's nonce.
        nonce: [u8; 8],
        /// Chosen by the accepting side.
        challenge: [u8; 8],
        /// The accepting side trusts this path.
        trusted: bool,
    },
    /// Answers the challenge: the path may carry data.
    PathConfirm {
        /// The challenge.
        challenge: [u8; 8],
    },
    /// Is the peer really at the address that this goes to?
    PathChallenge {
        /// To be sent back.
        challenge: [u8; 8],
    },
    /// It is.
    PathResponse {
        /// As received.
        challenge: [u8; 8],
    },
}

impl Frame<'_> {
    /// True if the frame asks for an acknowledgement of its datagram.
    pub const fn is_ack_eliciting(&self) -> bool {
        match self {
            Self::Ack(_) => false,
            Self::Share(share) => !share.fleeting,
            // Repeated until the peer is known to have seen it.
            Self::Segment(segment) => segment.open.is_some(),
            _ => true,
        }
    }
}

impl TcpFields<'_> {
    /// No flag and no option: to be read into.
    pub const EMPTY: Self = Self {
        flags: 0,
        window: 0,
        ack: SeqNumber::new(0),
        timestamps: None,
        meta: None,
        options: None,
        urgent: None,
    };
}

impl Chunk<'_> {
    /// To be read into ([`Frames::chunk`]).
    pub const EMPTY: Self = Self {
        flow: FlowId::new(0),
        incarnation: 0,
        solo: false,
        ahead: 0,
        first: false,
        detached: false,
        withheld: false,
        epoch: 0,
        offset: 0,
        crc: 0,
        tcp: TcpFields::EMPTY,
        open: None,
    };
}

/// Bytes around the packet of an opaque frame.
pub const OPAQUE_OVERHEAD: usize = 4;
/// Bytes around the piece of a fragment frame.
pub const FRAGMENT_OVERHEAD: usize = 1 + 4 + 4 + 4 + 2 + 2;
/// Bytes of a share frame.
pub const SHARE_LEN: usize = 1 + 1 + 4 + 3;
/// Bytes around the message of a control frame.
pub const CONTROL_OVERHEAD: usize = 7;
/// Bytes around the ranges of an acknowledgement frame.
pub const ACK_OVERHEAD: usize = 3;
