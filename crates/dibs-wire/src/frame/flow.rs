//! Frames that belong to a flow: chunks and segments, what they say of their TCP header, and what opens a flow.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{
    CHUNK, Chunk, EmptySegment, FlowId, FrameError, MAX_TCP_OPTIONS, Open, SEGMENT, TcpFields,
};
use crate::bytes::{Reader, Writer};
use crate::packet::{FlowKey, IpMeta};
use crate::seq::SeqNumber;

const HAS_TIMESTAMPS: u8 = 0x01;
const HAS_META: u8 = 0x02;
const HAS_OPTIONS: u8 = 0x04;
const HAS_URGENT: u8 = 0x08;
const HAS_OPEN: u8 = 0x10;
const IS_SOLO: u8 = 0x20;
const IS_FIRST: u8 = 0x40;
const IS_DETACHED: u8 = 0x80;
/// In the chain, behind the first.
const IS_WITHHELD: u8 = IS_DETACHED;

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

/// How far the epoch of a solo chunk had come.
const AHEAD_LEN: usize = 4;

/// Bytes of a chunk frame with these parts, solo or not.
pub fn chunk_len(tcp: &TcpFields<'_>, solo: bool, open: Option<&Open>) -> usize {
    let ahead = if solo { AHEAD_LEN } else { 0 };
    CHUNK_HEAD + fields_len(tcp) + open.map_or(0, |o| open_len(o.tuple.src.is_ipv4())) + ahead
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
    let tuple = FlowKey::tcp((src, r.u16()?), (dst, r.u16()?));
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

#[inline]
pub(super) fn get_chunk<'a>(r: &mut Reader<'a>, chunk: &mut Chunk<'a>) -> Result<(), FrameError> {
    let mut head = r.part::<{ CHUNK_HEAD - 1 }>()?;
    let bits = head.u8()?;
    chunk.solo = bits & IS_SOLO != 0;
    chunk.first = bits & IS_FIRST != 0;
    let inside = !chunk.solo && !chunk.first;
    chunk.detached = !inside && bits & IS_DETACHED != 0;
    chunk.withheld = inside && bits & IS_WITHHELD != 0;
    chunk.flow = FlowId::new(head.u32()?);
    chunk.incarnation = head.u16()?;
    chunk.epoch = head.u32()?;
    chunk.offset = head.u64()?;
    chunk.crc = head.u32()?;
    get_fields(r, bits, &mut chunk.tcp)?;
    chunk.open = None;
    if bits & HAS_OPEN != 0 {
        chunk.open = Some(get_open(r)?);
    }
    chunk.ahead = if chunk.solo { r.u32()? } else { 0 };
    Ok(())
}

#[inline]
pub(super) fn get_segment<'a>(r: &mut Reader<'a>) -> Result<EmptySegment<'a>, FrameError> {
    let bits = r.u8()?;
    if bits & !0x1f != 0 {
        return Err(FrameError::UnknownFlags(bits));
    }
    let mut segment = EmptySegment {
        flow: FlowId::new(r.u32()?),
        incarnation: r.u16()?,
        seq: SeqNumber::new(r.u32()?),
        tcp: TcpFields::EMPTY,
        open: None,
    };
    get_fields(r, bits, &mut segment.tcp)?;
    if bits & HAS_OPEN != 0 {
        segment.open = Some(get_open(r)?);
    }
    Ok(segment)
}

impl Chunk<'_> {
    /// Writes the frame; it takes [`chunk_len`] bytes.
    #[inline]
    pub fn encode(&self, w: &mut Writer<'_>) {
        let mut head = w.part::<CHUNK_HEAD>();
        head.u8(CHUNK);
        head.u8(flag_bits(&self.tcp, self.open.is_some())
            | if self.solo { IS_SOLO } else { 0 }
            | if self.first { IS_FIRST } else { 0 }
            | if self.detached { IS_DETACHED } else { 0 }
            | if self.withheld { IS_WITHHELD } else { 0 });
        head.u32(self.flow.get());
        head.u16(self.incarnation);
        head.u32(self.epoch);
        head.u64(self.offset);
        head.u32(self.crc);
        put_fields(w, &self.tcp);
        if let Some(open) = &self.open {
            put_open(w, open);
        }
        if self.solo {
            w.u32(self.ahead);
        }
    }
}

impl EmptySegment<'_> {
    /// Writes the frame; it takes [`segment_len`] bytes.
    pub fn encode(&self, w: &mut Writer<'_>) {
        w.u8(SEGMENT);
        w.u8(flag_bits(&self.tcp, self.open.is_some()));
        w.u32(self.flow.get());
        w.u16(self.incarnation);
        w.u32(self.seq.raw());
        put_fields(w, &self.tcp);
        if let Some(open) = &self.open {
            put_open(w, open);
        }
    }
}
