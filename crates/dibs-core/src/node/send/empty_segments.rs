//! TCP segments without payload, as many as may go in one datagram.

use std::collections::VecDeque;

use dibs_settings::BumpId;
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, EmptySegment};

use super::context::SendCx;
use super::datagram::{Asks, pad};
use super::path_frames::{MAX_ACK, put_ack};
use crate::chunk::{Content, Placement};
use crate::flow::conn::Conn;
use crate::node::empty::EmptyOut;
use crate::node::flows::FlowTable;
use crate::node::out::Out;
use crate::node::paths::Kind;
use crate::session::{OVERHEAD, Session};
use crate::slab::Key;

/// A header block of them, at most: as long as any path takes. Nobody hears whether it arrives, so nothing would show
/// that a path takes less than it did.
pub(super) const MAX_PACK: usize = 1024 - OVERHEAD;

/// The path that they go by.
pub(super) fn carrier(cx: &SendCx<'_>, segments: &VecDeque<EmptyOut>) -> Option<usize> {
    // A connection begins by another path than the preferred one.
    let first = segments.front().and_then(|empty| cx.flows.get(empty.conn));
    let kind = match first.is_some_and(Conn::is_opening) {
        true => Kind::First,
        false => Kind::New,
    };
    cx.paths.quickest(&cx.shared.setup, Placement::Any, kind)
}

/// Sends them, and notices.
pub(super) fn send(
    cx: &mut SendCx<'_>,
    segments: &mut VecDeque<EmptyOut>,
    notices: &mut Vec<u8>,
) -> Option<Out> {
    if segments.is_empty() && notices.is_empty() {
        return None;
    }
    let at = carrier(cx, segments)?;
    let mut block = std::mem::take(notices);
    let mut padded = false;
    let bumps = &cx.shared.setup.bumps;
    let session = &*cx.sealer.session;
    let opened = pack(cx.flows, segments, session, MAX_PACK, &mut block, |bump| {
        padded |= bumps.of(bump).is_padded();
        true
    });
    if block.is_empty() {
        return None;
    }
    // An opening asks for an acknowledgement, so that it need not be repeated for ever.
    let mut asks = opened.map_or(Asks::Nothing, |(conn, incarnation)| {
        let opened = Content::Opened {
            conn,
            incarnation,
            set: None,
        };
        Asks::AckOf(cx.in_flight.add(opened, Placement::Any))
    });
    if block.len() + MAX_ACK <= MAX_PACK {
        put_ack(cx.now, &mut cx.paths[at], &mut block);
    }
    if matches!(asks, Asks::Nothing)
        && block.len() < MAX_PACK
        && cx.paths[at].path.wants_proof(cx.now)
    {
        block.push(cx.paths[at].ping(&cx.shared.setup));
        asks = Asks::Ack;
    }
    if padded {
        pad(&mut block, MAX_PACK);
    }
    let out = cx.send_block(at, &block, asks);
    block.clear();
    *notices = block;
    out
}

/// Moves segments from a queue into a header block of at most `room` bytes, as long as `fits` says so of their bumps.
/// One that opens its flow goes alone: that connection and incarnation.
pub(super) fn pack(
    flows: &mut FlowTable,
    segments: &mut VecDeque<EmptyOut>,
    session: &Session,
    room: usize,
    block: &mut Vec<u8>,
    mut fits: impl FnMut(BumpId) -> bool,
) -> Option<(Key, u16)> {
    while let Some(head) = segments.front() {
        let Some(conn) = flows.get_mut(head.conn) else {
            segments.pop_front();
            continue;
        };
        if conn.out.secrets.is_none() {
            // The peer forgot the flow since this was queued.
            conn.open(session.epoch_secrets().clone(), conn.out.meta);
            conn.out.stream.begin_at(head.seq);
        }
        let tcp = head.tcp.get();
        let open = flows.open_frame(head.conn);
        let conn = flows.get(head.conn).expect("it was just seen");
        let len = frame::segment_len(&tcp, open.as_ref());
        let alone = open.is_some() && !block.is_empty();
        if block.len() + len > room || alone || !fits(conn.bump) {
            break;
        }
        let frame = EmptySegment {
            flow: conn.out.flow,
            incarnation: conn.out.stream.incarnation(),
            seq: head.seq,
            tcp,
            open,
        };
        let start = block.len();
        block.resize(start + len, 0);
        frame.encode(&mut Writer::new(&mut block[start..]));
        let opened = open.map(|_| (head.conn, frame.incarnation));
        segments.pop_front();
        if opened.is_some() {
            return opened;
        }
    }
    None
}
