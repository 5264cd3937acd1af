//! What is sent until it is acknowledged: chunks, and what else goes the same way.

use dibs_wire::frame::{self, FlowId, Open, TcpFields};

use crate::session::PathId;
use crate::slab::Key;
use crate::tcp_fields::OwnedFields;
use crate::time::Time;

/// Something that waits to be sent, other than as new data.
#[derive(Clone, Copy)]
pub struct Delayed {
    /// Key of the entry in flight.
    pub key: Key,
    /// The path that lost it; none if it has not been sent.
    pub lost_by: Option<PathId>,
}

/// Paths that may carry a chunk; fixed when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Only trusted paths.
    TrustedOnly,
    /// Any path.
    Any,
    /// Only the path of this id: a share (docs/threat-model.md).
    Only(PathId),
}

impl Placement {
    /// True if the path of this id and label may carry it.
    pub fn allows(self, id: PathId, trusted: bool) -> bool {
        match self {
            Self::TrustedOnly => trusted,
            Self::Any => true,
            Self::Only(only) => only == id,
        }
    }
}

/// Fields that chunks have in common that were cut from one segment.
#[derive(Clone, Debug)]
pub struct SegmentMeta {
    /// The connection.
    pub conn: Key,
    /// Position of its stream.
    pub chain: ChainId,
    /// TCP header fields but for the flags.
    pub tcp: OwnedFields,
}

/// Name of a chain of a stream.
#[derive(Clone, Copy, Debug)]
pub struct ChainId {
    /// The flow number.
    pub flow: FlowId,
    /// The flow's incarnation.
    pub incarnation: u16,
    /// The epoch.
    pub epoch: u32,
}

/// A piece of a stream as it was sent: what its frame says beside its [`SegmentMeta`], and where its bytes
/// lie. There are thousands of them: they are kept small.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Stream offset.
    pub offset: u64,
    /// Batch that holds the transformed bytes.
    pub batch: Key,
    /// Offset in the batch.
    pub at: u32,
    /// CRC-32C of the plaintext.
    pub crc: u32,
    /// Number of bytes.
    pub len: u16,
    /// Its segment among those of the batch.
    pub segment: u16,
    /// TCP flags.
    pub flags: u16,
    /// Bytes beyond the offset that the chain had come when a solo chunk was cut.
    pub ahead: u32,
    /// Not part of the chain.
    pub solo: bool,
    /// First of its epoch.
    pub first: bool,
    /// Bytes in front of its epoch go another way.
    pub detached: bool,
    /// Lost to the receiver's kernel.
    pub withheld: bool,
}

impl Chunk {
    /// The frame that says so to the peer.
    #[inline]
    pub fn frame<'a>(
        &self,
        chain: ChainId,
        tcp: TcpFields<'a>,
        open: Option<Open>,
    ) -> frame::Chunk<'a> {
        frame::Chunk {
            flow: chain.flow,
            incarnation: chain.incarnation,
            solo: self.solo,
            ahead: self.ahead,
            first: self.first,
            detached: self.detached,
            withheld: self.withheld,
            epoch: chain.epoch,
            offset: self.offset,
            crc: self.crc,
            tcp: TcpFields {
                flags: self.flags,
                ..tcp
            },
            open,
        }
    }

    /// Origin: the chain that it is a piece of.
    pub const fn origin(&self, segment: &SegmentMeta) -> Origin {
        Origin {
            conn: segment.conn,
            incarnation: segment.chain.incarnation,
            epoch: if self.solo {
                None
            } else {
                Some(segment.chain.epoch)
            },
        }
    }
}

/// The chain that breaks if this is never delivered.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// The connection.
    pub conn: Key,
    /// Its incarnation.
    pub incarnation: u16,
    /// The epoch; none for a solo chunk.
    pub epoch: Option<u32>,
}

/// A share of a piece of a stream and its frame, as it was sent.
#[derive(Clone, Copy, Debug)]
pub struct ShareOf {
    /// Batch that holds its bytes.
    pub batch: Key,
    /// Offset in the batch.
    pub at: u32,
    /// The set that it belongs to.
    pub set: u32,
    /// Number of bytes.
    pub len: u16,
    /// The segment of its piece among those of the batch.
    pub segment: u16,
    /// Index of the share in its set.
    pub index: u8,
    /// The piece opens its flow.
    pub opens: bool,
}

/// A piece of a whole that was encoded once: header block and payload of a chunk.
#[derive(Clone, Copy, Debug)]
pub struct Fragment {
    /// Origin of the whole.
    pub origin: Origin,
    /// Names the whole.
    pub id: u32,
    /// Length of the whole.
    pub total: u32,
    /// Length of the header block at its front.
    pub header: u16,
    /// Batch that holds the whole, from its first byte on.
    pub batch: Key,
    /// Offset of the piece in the whole.
    pub at: u32,
    /// Number of bytes.
    pub len: u16,
}

/// A message between the daemons.
#[derive(Debug)]
pub struct Message {
    /// Its number.
    pub id: u32,
    /// Its bytes.
    pub bytes: Box<[u8]>,
    /// Time from which on nobody waits for what comes of it.
    pub until: Option<Time>,
}

impl Message {
    /// True if it is not to be sent any more.
    pub fn is_late(&self, now: Time) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

/// The content of something that is sent until it is acknowledged. What is rare is kept elsewhere: this
/// owns nothing, so that it is written where it stays.
#[derive(Clone, Copy, Debug)]
pub enum Content {
    /// A piece of a stream.
    Chunk(Chunk),
    /// A [`Message`], by its key among them.
    Control(Key),
    /// A piece of a chunk that is too large for the path that it is sent again by: a [`Fragment`].
    Fragment {
        /// Its key among them.
        key: Key,
        /// Where its bytes lie.
        batch: Key,
        /// Number of bytes.
        len: u16,
    },
    /// A share of a piece of a stream.
    Share(ShareOf),
    /// Segments without payload that opened flows: not sent again, but their acknowledgement says
    /// that the peer knows the flow.
    Opened {
        /// The connection.
        conn: Key,
        /// The incarnation that was opened.
        incarnation: u16,
        /// They were split, and this is a share of that set.
        set: Option<u32>,
    },
}

impl Content {
    /// Payload bytes of a datagram with it.
    pub fn payload_len(&self) -> usize {
        match self {
            Self::Chunk(chunk) => usize::from(chunk.len),
            Self::Fragment { len, .. } => usize::from(*len),
            Self::Share(share) => usize::from(share.len),
            Self::Control(_) | Self::Opened { .. } => 0,
        }
    }

    /// Where its bytes lie.
    pub(crate) const fn batch(&self) -> Option<Key> {
        match self {
            Self::Chunk(chunk) => Some(chunk.batch),
            Self::Fragment { batch, .. } => Some(*batch),
            Self::Share(share) => Some(share.batch),
            Self::Control(_) | Self::Opened { .. } => None,
        }
    }
}
