//! Chunks and empty segments, and the flows that they belong to.

use dibs_wire::SeqNumber;
use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Chunk, EmptySegment, FlowId, Frame, Open, TcpFields};
use dibs_wire::packet::{FlowKey, flags};
use smallvec::SmallVec;

use super::sink::incoming;
use super::{ReceiveCx, Receiver};
use crate::counters::Counter;
use crate::flow::ack_floor::AckFloor;
use crate::flow::conn::{Conn, Incoming};
use crate::flow::echo_filter;
use crate::flow::numbers::Compared;
use crate::node::hosts::begins;
use crate::node::names;
use crate::node::notice::Event;
use crate::node::protection::Protection;
use crate::node::shared::{Journal, Shared};
use crate::node::solicit;
use crate::path_index::PathIndex;
use crate::slab::Key;
use crate::stream::rx::{ChunkOutcome, Piece, RxStream};
use crate::time::Time;

/// Bytes of notices that wait to be sent, at most.
const MAX_NOTICES: usize = 512;

impl Receiver {
    /// The connection that a frame belongs to, its flow opened if the frame does that.
    fn incoming_conn(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        (flow, incarnation): (FlowId, u16),
        open: Option<&Open>,
    ) -> Result<Key, bool> {
        let known = cx.flows.by_peers_number(flow);
        let current = known.and_then(|key| Some((key, cx.flows.get(key)?.inc.as_ref()?)));
        if let Some((key, inc)) = current {
            match incarnation.wrapping_sub(inc.incarnation) as i16 {
                0 => return Ok(key),
                older if older < 0 => {
                    cx.shared.count(Counter::FlowOld);
                    return Err(true);
                }
                _ => {}
            }
        }
        let Some(open) = open else {
            cx.shared.count(Counter::FlowUnknown);
            self.notice(
                &mut cx.shared.journal,
                &Frame::FlowUnknown { flow, incarnation },
            );
            return Err(false);
        };
        self.open_incoming(cx, (flow, incarnation), open)
    }

    fn open_incoming(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        (flow, incarnation): (FlowId, u16),
        open: &Open,
    ) -> Result<Key, bool> {
        let Some(bump) = { cx.shared.setup.bumps.named(open.bump) }.map(|bump| bump.number) else {
            cx.shared.count(Counter::BumpUnknown);
            return Err(true);
        };
        let theirs = open.tuple.reversed();
        let ours = match names::ours(cx, theirs) {
            Ok(ours) => ours,
            Err(reason) => {
                cx.shared.count(reason);
                names::remind(cx, bump, theirs);
                return Err(true);
            }
        };
        let Some(secrets) = cx.association.secrets(open.session).cloned() else {
            // Opened under a session that is gone: to be opened again under this one.
            cx.shared.count(Counter::FlowUnknown);
            self.notice(
                &mut cx.shared.journal,
                &Frame::FlowUnknown { flow, incarnation },
            );
            return Err(false);
        };
        let key = self.conn(cx, ours, bump);
        if ours != theirs {
            names::note(cx, key, theirs);
        }
        let incoming = Incoming {
            flow,
            incarnation,
            meta: open.meta,
            base: open.base_seq,
            secrets,
            stream: RxStream::default(),
            top: frame::BASE_OFFSET,
            ack_floor: AckFloor::default(),
        };
        let old = cx.flows.open_incoming(key, incoming);
        self.forget(old.into_iter().flatten());
        Ok(key)
    }

    /// Takes a chunk that came by the local path `path`; false if it counts as not received.
    pub(in crate::node) fn take_chunk(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        path: PathIndex,
        chunk: &Chunk<'_>,
        (bytes, protection): (&[u8], Protection),
    ) -> bool {
        let flow = (chunk.flow, chunk.incarnation);
        let key = match self.incoming_conn(cx, flow, chunk.open.as_ref()) {
            Ok(key) => key,
            Err(taken) => return taken && protection != Protection::None,
        };
        let (conn, tuple, floor) = cx.flows.with_ends(key).expect("it was just found");
        if cx.hosts.refuses(&cx.shared.setup, tuple, chunk.tcp.flags) {
            cx.shared.count(Counter::ConnectionRefused);
            return protection != Protection::None;
        }
        let possible = |inc: &Incoming| {
            inc.template(tuple, conn.bump).fits(&chunk.tcp, bytes.len())
                && chunk.offset.checked_add(bytes.len() as u64 + 1).is_some()
        };
        if !conn.inc.as_ref().is_some_and(possible) {
            cx.shared.count(Counter::PeerContradiction);
            return true;
        }
        if !protection.satisfies(cx.shared.setup.bumps.of(conn.bump)) {
            cx.shared.count(Counter::CoverMissing);
            return protection != Protection::None;
        }
        conn.last_seen = cx.now;
        conn.by_path.entry(path).received += bytes.len() as u64;
        if conn.refuses {
            cx.shared.count(Counter::SilenceBroken);
        }
        let base = conn.inc.as_ref().map(|inc| inc.seq(chunk.offset));
        if let Some(seq) = base {
            let segment = (seq, &chunk.tcp);
            compare(cx.now, cx.shared, (conn, tuple), segment, Some(bytes.len()));
        }
        let piece = Piece {
            solo: chunk.solo,
            ahead: match self.may_hold_start() {
                true => chunk.ahead,
                false => 0,
            },
            first: chunk.first,
            early: chunk.detached
                && self.may_hold_start()
                && base
                    .zip(conn.acked)
                    .is_some_and(|(base, acked)| base.is_after(acked)),
            withheld: chunk.withheld,
            epoch: chunk.epoch,
            offset: chunk.offset,
            crc: chunk.crc,
            tcp: &chunk.tcp,
            bytes,
        };
        let (stream, decoders, mut sink) = incoming(cx.now, cx.shared, key, (conn, tuple, floor))
            .expect("an incoming flow leads to its connection");
        let held_back = stream.holds_back();
        match stream.chunk(&piece, &decoders, &mut self.store, &mut sink) {
            ChunkOutcome::Restored => {}
            ChunkOutcome::Held => {
                if !held_back && stream.holds_back() {
                    self.hold_start(cx.now, key, chunk.solo);
                }
            }
            ChunkOutcome::Duplicate => cx.shared.count(Counter::ChunkDuplicate),
            ChunkOutcome::NoRoom => {
                cx.shared.count(Counter::StoreFull);
                return false;
            }
            ChunkOutcome::Broken => {
                cx.shared.count(Counter::EpochEnded);
                self.report_broken_epoch(cx, key, chunk.epoch);
            }
            ChunkOutcome::Corrupt => {
                cx.shared.count(Counter::CrcMismatch);
                self.report_broken_epoch(cx, key, chunk.epoch);
            }
            ChunkOutcome::Contradiction => cx.shared.count(Counter::PeerContradiction),
        }
        let abandoned = self.store.take_abandoned();
        cx.shared
            .journal
            .counters
            .add(Counter::EpochEnded, abandoned);
        true
    }

    /// Takes a segment without payload; false if it counts as not received.
    pub(super) fn take_empty(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        segment: &EmptySegment<'_>,
        protection: Protection,
    ) -> bool {
        let flow = (segment.flow, segment.incarnation);
        let before = { cx.flows.by_peers_number(segment.flow) }.and_then(|key| cx.flows.get(key));
        let before = before.and_then(|conn| Some(conn.inc.as_ref()?.incarnation));
        if let Some(open) = &segment.open
            && begins(segment.tcp.flags)
            && before != Some(segment.incarnation)
        {
            names::begin(cx.flows, &open.tuple.reversed());
        }
        let key = match self.incoming_conn(cx, flow, segment.open.as_ref()) {
            Ok(key) => key,
            Err(taken) => return taken,
        };
        let mut tcp = segment.tcp;
        let (conn, tuple, floor) = cx.flows.with_ends(key).expect("it was just found");
        if tcp.flags & flags::SYN != 0 && before != Some(segment.incarnation) {
            floor.begin(&tcp);
        }
        if cx.hosts.refuses(&cx.shared.setup, tuple, tcp.flags) {
            cx.shared.count(Counter::ConnectionRefused);
            return true;
        }
        if !protection.satisfies(cx.shared.setup.bumps.of(conn.bump)) {
            cx.shared.count(Counter::CoverMissing);
            return true;
        }
        conn.last_seen = cx.now;
        if tcp.flags & flags::SYN != 0 {
            conn.begin_comparison(tcp.flags);
        }
        let bump = conn.bump;
        compare(cx.now, cx.shared, (conn, tuple), (segment.seq, &tcp), None);
        let inc = conn
            .inc
            .as_mut()
            .expect("an incoming flow leads to its connection");
        let mut scratch = SmallVec::new();
        // An old one is handed on as it is: TCP counts repetitions of the latest.
        inc.ack_floor.hear(&tcp, conn.sent_end);
        echo_filter::adapt(&mut conn.echo_filter, cx.now, &mut tcp, &mut scratch);
        if let Some(clamp) = &mut conn.clamp {
            clamp.limit(&mut tcp);
        }
        let (injector, pool) = (&mut cx.shared.injector, &mut cx.shared.pool);
        let template = inc.template(tuple, conn.bump);
        injector.empty_segment(pool, template, segment.seq, &tcp, floor);
        if begins(tcp.flags) {
            self.on_call(cx, (key, tuple, bump), segment.seq);
        }
        true
    }

    /// Tells the peer that an epoch cannot be restored, now and then.
    pub(super) fn report_broken_epoch(&mut self, cx: &mut ReceiveCx<'_>, key: Key, epoch: u32) {
        let conn = cx.flows.get_mut(key).expect("the caller has it");
        if let Some(broken) = conn.report_broken(cx.now, epoch) {
            self.notice(&mut cx.shared.journal, &broken);
        }
    }

    fn notice(&mut self, journal: &mut Journal, frame: &Frame<'_>) {
        let mut bytes = [0; 32];
        let mut w = Writer::new(&mut bytes);
        frame::encode(frame, &mut w);
        let len = w.len();
        if self.notices.len() + len <= MAX_NOTICES {
            self.notices.extend_from_slice(&bytes[..len]);
        } else {
            journal.count(Counter::NoticeDropped);
        }
    }
}

/// Compares what a segment of the peer's kernel, with so many bytes of data or with a FIN, or without, says with what the local one
/// said, which is asked if it said nothing.
fn compare(
    now: Time,
    shared: &mut Shared,
    (conn, tuple): (&mut Conn, FlowKey),
    segment: (SeqNumber, &TcpFields<'_>),
    data: Option<usize>,
) {
    match conn.compare_with(now, segment, data) {
        Compared::Open => {}
        Compared::Differ => {
            let bump = conn.sent_by();
            { &mut shared.journal.events }.push(Event::Renumbered { bump, tuple });
        }
        Compared::Ask => solicit::solicit(shared, conn.bump, tuple, Some(conn)),
    }
}
