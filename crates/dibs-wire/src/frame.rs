//! The frames in the header block of a datagram (docs/protocol.md).
//!
//! A header block is a sequence of frames. At most one frame describes the datagram's payload: a
//! [`Chunk`] or a [`Share`]. Everything here arrives authenticated, yet is still checked in full: a peer may err.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::bytes::{Reader, Truncated, Writer};
use crate::packet::{IpMeta, Tuple};
use crate::seq::SeqNumber;

const PADDING: u8 = 0x00;
/// Type of [`Frame::Ping`], which is nothing but its type.
pub const PING: u8 = 0x01;
/// Type of [`Frame::Ack`]; a 16-bit length and that many bytes follow.
pub const ACK: u8 = 0x02;
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

const HAS_TIMESTAMPS: u8 = 0x01;
const HAS_META: u8 = 0x02;
const HAS_OPTIONS: u8 = 0x04;
const HAS_URGENT: u8 = 0x08;
const HAS_OPEN: u8 = 0x10;
const IS_SOLO: u8 = 0x20;
const IS_FIRST: u8 = 0x40;
const IS_DETACHED: u8 = 0x80;

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

/// Names the flow and says how to write its packets again; rides on frames of a flow until the peer
/// has acknowledged one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// The bump, as numbered by the protocol.
    pub bump: u8,
    /// Addresses and ports of the sender's direction.
    pub tuple: Tuple,
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
    pub flow: u32,
    /// Counts the connections that used this flow number.
    pub incarnation: u16,
    /// Restored on its own (true) or in the order of its epoch.
    pub solo: bool,
    /// The epoch begins with this chunk.
    pub first: bool,
    /// What lies in front of the epoch goes, or went, to the receiver by another way than this bump.
    pub detached: bool,
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
    pub flow: u32,
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
    /// It was split only because it has segments without payload: those are never sent again, and ask
    /// for no acknowledgement.
    pub fleeting: bool,
    /// The bump that split it.
    pub bump: u8,
    /// The low bits of the number of the set that the share belongs to.
    pub set: u32,
    /// Which share of the set it is.
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
        flow: u32,
        /// The incarnation that was used.
        incarnation: u16,
    },
    /// The receiver cannot restore this epoch any further: open a new one.
    EpochBroken {
        /// The flow as numbered by the one who is told.
        flow: u32,
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
    /// Whether the frame asks for an acknowledgement of its datagram.
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

/// Bytes of an [`Open`] for IPv4 and IPv6 flows.
const fn open_len(v4: bool) -> usize {
    1 + 1 + (if v4 { 8 } else { 32 }) + 4 + META_LEN + 4 + 8
}

const META_LEN: usize = 5;
/// A chunk frame up to its TCP fields: kind, bits, flow, incarnation, epoch, offset and CRC.
const CHUNK_HEAD: usize = 1 + 1 + 4 + 2 + 4 + 8 + 4;
/// The TCP fields that are always there: flags, window and acknowledgement number.
const FIELDS_HEAD: usize = 2 + 2 + 4;
const TIMESTAMPS_LEN: usize = 4 + 4;

/// Bytes of a chunk frame with these parts.
pub fn chunk_len(tcp: &TcpFields<'_>, open: Option<&Open>) -> usize {
    CHUNK_HEAD + fields_len(tcp) + open.map_or(0, |o| open_len(o.tuple.src.is_ipv4()))
}

/// Bytes of a segment frame with these parts.
pub fn segment_len(tcp: &TcpFields<'_>, open: Option<&Open>) -> usize {
    2 + 4 + 2 + 4 + fields_len(tcp) + open.map_or(0, |o| open_len(o.tuple.src.is_ipv4()))
}

fn fields_len(tcp: &TcpFields<'_>) -> usize {
    let timestamps = tcp.timestamps.map_or(0, |_| TIMESTAMPS_LEN);
    FIELDS_HEAD
        + timestamps
        + if tcp.meta.is_some() { META_LEN } else { 0 }
        + tcp.options.map_or(0, |o| 1 + o.len())
        + if tcp.urgent.is_some() { 2 } else { 0 }
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

#[inline]
fn flag_bits(tcp: &TcpFields<'_>, open: bool) -> u8 {
    let mut bits = 0;
    for (present, bit) in [
        (tcp.timestamps.is_some(), HAS_TIMESTAMPS),
        (tcp.meta.is_some(), HAS_META),
        (tcp.options.is_some(), HAS_OPTIONS),
        (tcp.urgent.is_some(), HAS_URGENT),
        (open, HAS_OPEN),
    ] {
        if present {
            bits |= bit;
        }
    }
    bits
}

fn put_meta(w: &mut Writer<'_>, meta: IpMeta) {
    w.u8(meta.tos);
    w.u8(meta.ttl);
    w.put(&meta.flow_label.to_be_bytes()[1..]);
}

fn get_meta(r: &mut Reader<'_>) -> Result<IpMeta, FrameError> {
    let tos = r.u8()?;
    let ttl = r.u8()?;
    let [a, b, c] = r.array()?;
    let flow_label = u32::from_be_bytes([0, a, b, c]);
    if flow_label > 0xf_ffff {
        return Err(FrameError::Range("flow label"));
    }
    Ok(IpMeta {
        tos,
        ttl,
        flow_label,
    })
}

#[inline]
fn put_fields(w: &mut Writer<'_>, tcp: &TcpFields<'_>) {
    let mut head = w.part::<FIELDS_HEAD>();
    head.u16(tcp.flags);
    head.u16(tcp.window);
    head.u32(tcp.ack.raw());
    if let Some((val, ecr)) = tcp.timestamps {
        let mut timestamps = w.part::<TIMESTAMPS_LEN>();
        timestamps.u32(val);
        timestamps.u32(ecr);
    }
    if let Some(meta) = tcp.meta {
        put_meta(w, meta);
    }
    if let Some(options) = tcp.options {
        w.u8(options.len() as u8);
        w.put(options);
    }
    if let Some(urgent) = tcp.urgent {
        w.u16(urgent);
    }
}

/// Reads into a place that the caller has: what is returned is copied whole, and a copy of what was just
/// written in parts has to wait for the writes.
#[inline]
fn get_fields<'a>(r: &mut Reader<'a>, bits: u8, tcp: &mut TcpFields<'a>) -> Result<(), FrameError> {
    let mut head = r.part::<FIELDS_HEAD>()?;
    tcp.flags = head.u16()?;
    if tcp.flags > 0x0fff {
        return Err(FrameError::Range("TCP flags"));
    }
    tcp.window = head.u16()?;
    tcp.ack = SeqNumber::new(head.u32()?);
    tcp.timestamps = None;
    if bits & HAS_TIMESTAMPS != 0 {
        let mut timestamps = r.part::<TIMESTAMPS_LEN>()?;
        tcp.timestamps = Some((timestamps.u32()?, timestamps.u32()?));
    }
    tcp.meta = None;
    if bits & HAS_META != 0 {
        tcp.meta = Some(get_meta(r)?);
    }
    tcp.options = None;
    if bits & HAS_OPTIONS != 0 {
        let len = usize::from(r.u8()?);
        if len > MAX_TCP_OPTIONS || !len.is_multiple_of(4) {
            return Err(FrameError::Range("length of TCP options"));
        }
        tcp.options = Some(r.take(len)?);
    }
    tcp.urgent = None;
    if bits & HAS_URGENT != 0 {
        tcp.urgent = Some(r.u16()?);
    }
    Ok(())
}

fn put_open(w: &mut Writer<'_>, open: &Open) {
    w.u8(open.bump);
    match (open.tuple.src, open.tuple.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            w.u8(4);
            w.put(&src.octets());
            w.put(&dst.octets());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            w.u8(6);
            w.put(&src.octets());
            w.put(&dst.octets());
        }
        _ => panic!("addresses of one flow are of one family"),
    }
    w.u16(open.tuple.sport);
    w.u16(open.tuple.dport);
    put_meta(w, open.meta);
    w.u32(open.base_seq.raw());
    w.u64(open.session);
}

fn get_open(r: &mut Reader<'_>) -> Result<Open, FrameError> {
    let bump = r.u8()?;
    let (src, dst) = match r.u8()? {
        4 => (
            IpAddr::V4(Ipv4Addr::from(r.array::<4>()?)),
            IpAddr::V4(Ipv4Addr::from(r.array::<4>()?)),
        ),
        6 => (
            IpAddr::V6(Ipv6Addr::from(r.array::<16>()?)),
            IpAddr::V6(Ipv6Addr::from(r.array::<16>()?)),
        ),
        _ => return Err(FrameError::Range("IP version")),
    };
    let tuple = Tuple {
        src,
        dst,
        sport: r.u16()?,
        dport: r.u16()?,
    };
    let meta = get_meta(r)?;
    let base_seq = SeqNumber::new(r.u32()?);
    Ok(Open {
        bump,
        tuple,
        meta,
        base_seq,
        session: r.u64()?,
    })
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

#[inline]
fn get_chunk<'a>(r: &mut Reader<'a>, chunk: &mut Chunk<'a>) -> Result<(), FrameError> {
    let mut head = r.part::<{ CHUNK_HEAD - 1 }>()?;
    let bits = head.u8()?;
    chunk.solo = bits & IS_SOLO != 0;
    chunk.first = bits & IS_FIRST != 0;
    chunk.detached = bits & IS_DETACHED != 0;
    chunk.flow = head.u32()?;
    chunk.incarnation = head.u16()?;
    chunk.epoch = head.u32()?;
    chunk.offset = head.u64()?;
    chunk.crc = head.u32()?;
    get_fields(r, bits, &mut chunk.tcp)?;
    chunk.open = None;
    if bits & HAS_OPEN != 0 {
        chunk.open = Some(get_open(r)?);
    }
    Ok(())
}

impl Chunk<'_> {
    /// To be read into ([`Frames::chunk`]).
    pub const EMPTY: Self = Self {
        flow: 0,
        incarnation: 0,
        solo: false,
        first: false,
        detached: false,
        epoch: 0,
        offset: 0,
        crc: 0,
        tcp: TcpFields::EMPTY,
        open: None,
    };

    /// Writes the frame; it takes [`chunk_len`] bytes.
    #[inline]
    pub fn encode(&self, w: &mut Writer<'_>) {
        let mut head = w.part::<CHUNK_HEAD>();
        head.u8(CHUNK);
        head.u8(flag_bits(&self.tcp, self.open.is_some())
            | if self.solo { IS_SOLO } else { 0 }
            | if self.first { IS_FIRST } else { 0 }
            | if self.detached { IS_DETACHED } else { 0 });
        head.u32(self.flow);
        head.u16(self.incarnation);
        head.u32(self.epoch);
        head.u64(self.offset);
        head.u32(self.crc);
        put_fields(w, &self.tcp);
        if let Some(open) = &self.open {
            put_open(w, open);
        }
    }
}

impl EmptySegment<'_> {
    /// Writes the frame; it takes [`segment_len`] bytes.
    pub fn encode(&self, w: &mut Writer<'_>) {
        w.u8(SEGMENT);
        w.u8(flag_bits(&self.tcp, self.open.is_some()));
        w.u32(self.flow);
        w.u16(self.incarnation);
        w.u32(self.seq.raw());
        put_fields(w, &self.tcp);
        if let Some(open) = &self.open {
            put_open(w, open);
        }
    }
}

/// Appends a frame.
///
/// # Panics
/// If it does not fit `w`, or a byte string exceeds 65535 bytes.
pub fn encode(frame: &Frame<'_>, w: &mut Writer<'_>) {
    let put_bytes = |w: &mut Writer<'_>, bytes: &[u8]| {
        w.u16(u16::try_from(bytes.len()).expect("a frame fits a datagram"));
        w.put(bytes);
    };
    match *frame {
        Frame::Ping => w.u8(PING),
        Frame::Ack(ranges) => {
            w.u8(ACK);
            put_bytes(w, ranges);
        }
        Frame::Chunk(ref chunk) => chunk.encode(w),
        Frame::Segment(ref segment) => segment.encode(w),
        Frame::Opaque { bump, packet } => {
            w.u8(OPAQUE);
            w.u8(bump);
            put_bytes(w, packet);
        }
        Frame::Fragment {
            id,
            at,
            total,
            header,
            bytes,
        } => {
            w.u8(FRAGMENT);
            w.u32(id);
            w.u32(at);
            w.u32(total);
            w.u16(header);
            put_bytes(w, bytes);
        }
        Frame::Share(share) => {
            w.u8(match share.fleeting {
                true => SHARE_OF_SEGMENTS,
                false => SHARE,
            });
            w.u8(share.bump);
            w.u32(share.set);
            w.put(&[share.index, share.needed, share.shares]);
        }
        Frame::Control { id, bytes } => {
            w.u8(CONTROL);
            w.u32(id);
            put_bytes(w, bytes);
        }
        Frame::FlowUnknown { flow, incarnation } => {
            w.u8(FLOW_UNKNOWN);
            w.u32(flow);
            w.u16(incarnation);
        }
        Frame::EpochBroken {
            flow,
            incarnation,
            epoch,
        } => {
            w.u8(EPOCH_BROKEN);
            w.u32(flow);
            w.u16(incarnation);
            w.u32(epoch);
        }
        Frame::PathJoin { nonce, trusted, to } => {
            w.u8(PATH_JOIN);
            w.put(&nonce);
            w.u8(u8::from(trusted));
            let to = match to {
                IpAddr::V4(to) => to.to_ipv6_mapped(),
                IpAddr::V6(to) => to,
            };
            w.put(&to.octets());
        }
        Frame::PathAccept {
            nonce,
            challenge,
            trusted,
        } => {
            w.u8(PATH_ACCEPT);
            w.put(&nonce);
            w.put(&challenge);
            w.u8(u8::from(trusted));
        }
        Frame::PathConfirm { challenge } => {
            w.u8(PATH_CONFIRM);
            w.put(&challenge);
        }
        Frame::PathChallenge { challenge } => {
            w.u8(PATH_CHALLENGE);
            w.put(&challenge);
        }
        Frame::PathResponse { challenge } => {
            w.u8(PATH_RESPONSE);
            w.put(&challenge);
        }
    }
}

/// The frames of a header block, one by one; padding is skipped. After an error it ends.
#[derive(Clone, Debug)]
pub struct Frames<'a> {
    reader: Reader<'a>,
}

impl<'a> Frames<'a> {
    /// Reads `block` from its start.
    pub const fn new(block: &'a [u8]) -> Self {
        Self {
            reader: Reader::new(block),
        }
    }

    /// Reads the next frame into `chunk` if it is one, as nearly all are: without the copies that a [`Frame`]
    /// goes through. `None` if it is another, or there is none.
    #[inline]
    pub fn chunk(&mut self, chunk: &mut Chunk<'a>) -> Option<Result<(), FrameError>> {
        let rest = self.reader.rest();
        let padding = rest.iter().take_while(|kind| **kind == PADDING).count();
        if rest.get(padding) != Some(&CHUNK) {
            return None;
        }
        self.reader = Reader::new(&rest[padding + 1..]);
        let read = get_chunk(&mut self.reader, chunk);
        if read.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(read)
    }

    #[inline(always)]
    fn read(&mut self, kind: u8) -> Result<Frame<'a>, FrameError> {
        let r = &mut self.reader;
        let flag = |r: &mut Reader<'_>| match r.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(FrameError::Range("trust label")),
        };
        fn block<'a>(r: &mut Reader<'a>) -> Result<&'a [u8], FrameError> {
            let len = usize::from(r.u16()?);
            Ok(r.take(len)?)
        }
        Ok(match kind {
            PING => Frame::Ping,
            ACK => Frame::Ack(block(r)?),
            CHUNK => {
                let mut chunk = Chunk::EMPTY;
                get_chunk(r, &mut chunk)?;
                Frame::Chunk(chunk)
            }
            SEGMENT => {
                let bits = r.u8()?;
                if bits & !0x1f != 0 {
                    return Err(FrameError::UnknownFlags(bits));
                }
                let mut segment = EmptySegment {
                    flow: r.u32()?,
                    incarnation: r.u16()?,
                    seq: SeqNumber::new(r.u32()?),
                    tcp: TcpFields::EMPTY,
                    open: None,
                };
                get_fields(r, bits, &mut segment.tcp)?;
                if bits & HAS_OPEN != 0 {
                    segment.open = Some(get_open(r)?);
                }
                Frame::Segment(segment)
            }
            OPAQUE => Frame::Opaque {
                bump: r.u8()?,
                packet: block(r)?,
            },
            FRAGMENT => Frame::Fragment {
                id: r.u32()?,
                at: r.u32()?,
                total: r.u32()?,
                header: r.u16()?,
                bytes: block(r)?,
            },
            SHARE | SHARE_OF_SEGMENTS => {
                let share = Share {
                    fleeting: kind == SHARE_OF_SEGMENTS,
                    bump: r.u8()?,
                    set: r.u32()?,
                    index: r.u8()?,
                    needed: r.u8()?,
                    shares: r.u8()?,
                };
                let possible = 0 < share.needed && share.needed <= share.shares;
                if !possible || share.index >= share.shares {
                    return Err(FrameError::Range("share"));
                }
                Frame::Share(share)
            }
            CONTROL => Frame::Control {
                id: r.u32()?,
                bytes: block(r)?,
            },
            FLOW_UNKNOWN => Frame::FlowUnknown {
                flow: r.u32()?,
                incarnation: r.u16()?,
            },
            EPOCH_BROKEN => Frame::EpochBroken {
                flow: r.u32()?,
                incarnation: r.u16()?,
                epoch: r.u32()?,
            },
            PATH_JOIN => Frame::PathJoin {
                nonce: r.array()?,
                trusted: flag(r)?,
                to: Ipv6Addr::from(r.array::<16>()?).to_canonical(),
            },
            PATH_ACCEPT => Frame::PathAccept {
                nonce: r.array()?,
                challenge: r.array()?,
                trusted: flag(r)?,
            },
            PATH_CONFIRM => Frame::PathConfirm {
                challenge: r.array()?,
            },
            PATH_CHALLENGE => Frame::PathChallenge {
                challenge: r.array()?,
            },
            PATH_RESPONSE => Frame::PathResponse {
                challenge: r.array()?,
            },
            other => return Err(FrameError::UnknownType(other)),
        })
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, FrameError>;

    // Inlined, or what was just written in parts is copied whole, which has to wait for the writes.
    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        let kind = loop {
            match self.reader.u8().ok()? {
                PADDING => {}
                kind => break kind,
            }
        };
        let frame = self.read(kind);
        if frame.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(frame)
    }
}

#[cfg(test)]
mod tests;
