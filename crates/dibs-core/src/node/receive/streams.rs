//! Chunks, and the flows and streams that they belong to.

use std::net::IpAddr;

use dibs_wire::bytes::Writer;
use dibs_wire::frame::{self, Chunk, Frame, Open, TcpFields};
use smallvec::SmallVec;

use super::packets::Protection;
use crate::buffer::Pool;
use crate::counters::Counter;
use crate::flow::ack_floor::AckFloor;
use crate::flow::conn::{Conn, Incoming, IncomingDecoders};
use crate::flow::echo_filter::{self, EchoFilter};
use crate::flow::inject::{Injector, Template};
use crate::flow::window_clamp::WindowClamp;
use crate::node::hosts::is_unicast;
use crate::node::peer::Peer;
use crate::node::shared::Shared;
use crate::slab::Key;
use crate::stream::rx::{Outcome, Piece, RxStream, Sink};
use crate::time::Time;

/// How often a peer is told of the same broken epoch.
const COMPLAINT_SPACING: std::time::Duration = std::time::Duration::from_millis(20);
/// Bytes of notices that wait to be sent, at most.
const MAX_NOTICES: usize = 512;

impl Peer {
    /// The connection that a frame belongs to, its flow opened if the frame does that.
    pub(super) fn incoming_conn(
        &mut self,
        now: Time,
        shared: &mut Shared,
        flow: u32,
        incarnation: u16,
        open: Option<&Open>,
    ) -> Result<Key, bool> {
        let known = self.flows.by_peers_number(flow);
        let current = known.and_then(|key| Some((key, self.flows.get(key)?.inc.as_ref()?)));
        if let Some((key, inc)) = current {
            match incarnation.wrapping_sub(inc.incarnation) as i16 {
                0 => {
                    self.flows.meet_floor(key);
                    return Ok(key);
                }
                older if older < 0 => {
                    shared.count(Counter::FlowOld);
                    return Err(true);
                }
                _ => {}
            }
        }
        let Some(open) = open else {
            shared.count(Counter::FlowUnknown);
            self.notice(shared, &Frame::FlowUnknown { flow, incarnation });
            return Err(false);
        };
        self.open_incoming(now, shared, flow, incarnation, open)
    }

    fn open_incoming(
        &mut self,
        now: Time,
        shared: &mut Shared,
        flow: u32,
        incarnation: u16,
        open: &Open,
    ) -> Result<Key, bool> {
        if shared.bumps.get(open.bump).is_none() {
            shared.count(Counter::BumpUnknown);
            return Err(true);
        }
        let may_pass =
            self.hosts.speaks_for(shared, open.tuple.src) && is_for_us(shared, open.tuple.dst);
        if !may_pass {
            shared.count(Counter::InnerAddress);
            return Err(true);
        }
        let Some(secrets) = self.association.secrets(open.session).cloned() else {
            // Opened under a session that is gone: to be opened again under this one.
            shared.count(Counter::FlowUnknown);
            self.notice(shared, &Frame::FlowUnknown { flow, incarnation });
            return Err(false);
        };
        let key = self.conn(now, shared, open.tuple.reversed(), open.bump);
        let incoming = Incoming {
            flow,
            incarnation,
            template: Template {
                bump: open.bump,
                tuple: open.tuple,
                meta: open.meta,
            },
            base: open.base_seq,
            secrets,
            stream: RxStream::default(),
            top: frame::BASE_OFFSET,
            ack_floor: AckFloor::default(),
        };
        if let Some(mut old) = self.flows.open_incoming(key, incoming) {
            old.stream.clear(&mut self.store);
        }
        self.flows.meet_floor(key);
        Ok(key)
    }

    /// Takes a chunk; false if it counts as not received.
    pub(super) fn take_chunk(
        &mut self,
        now: Time,
        shared: &mut Shared,
        path: usize,
        chunk: &Chunk<'_>,
        (bytes, protection): (&[u8], Protection),
    ) -> bool {
        let key = match self.incoming_conn(
            now,
            shared,
            chunk.flow,
            chunk.incarnation,
            chunk.open.as_ref(),
        ) {
            Ok(key) => key,
            Err(taken) => return taken && protection != Protection::None,
        };
        if self
            .hosts
            .refuses(shared, self.flows.get(key), chunk.tcp.flags)
        {
            shared.count(Counter::ConnectionRefused);
            return protection != Protection::None;
        }
        let conn = self.flows.get_mut(key).expect("it was just found");
        let possible = |inc: &Incoming| {
            inc.template.fits(&chunk.tcp, bytes.len())
                && chunk.offset.checked_add(bytes.len() as u64 + 1).is_some()
        };
        if !conn.inc.as_ref().is_some_and(possible) {
            shared.count(Counter::PeerContradiction);
            return true;
        }
        if !protection.satisfies(shared.bumps.of(conn.bump)) {
            shared.count(Counter::CoverMissing);
            return protection != Protection::None;
        }
        conn.last_seen = now;
        conn.by_path.entry(path).received += bytes.len() as u64;
        let base = conn.inc.as_ref().map(|inc| inc.seq(chunk.offset));
        let piece = Piece {
            solo: chunk.solo,
            ahead: match self.handover.has_room() {
                true => chunk.ahead,
                false => 0,
            },
            first: chunk.first,
            early: chunk.detached
                && self.handover.has_room()
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
        let (stream, decoders, mut sink) =
            incoming(now, shared, key, conn).expect("an incoming flow leads to its connection");
        let held_back = stream.holds_back();
        match stream.chunk(&piece, &decoders, &mut self.store, &mut sink) {
            Outcome::Restored => {}
            Outcome::Held => {
                if !held_back && stream.holds_back() {
                    self.hold_start(now, key, chunk.solo);
                }
            }
            Outcome::Duplicate => shared.count(Counter::ChunkDuplicate),
            Outcome::NoRoom => {
                shared.count(Counter::StoreFull);
                return false;
            }
            Outcome::Broken => {
                shared.count(Counter::EpochEnded);
                self.report_broken_epoch(now, shared, key, chunk.epoch);
            }
            Outcome::Corrupt => {
                shared.count(Counter::CrcMismatch);
                self.report_broken_epoch(now, shared, key, chunk.epoch);
            }
            Outcome::Contradiction => shared.count(Counter::PeerContradiction),
        }
        let abandoned = self.store.take_abandoned();
        shared.counters.add(Counter::EpochEnded, abandoned);
        true
    }

    /// Tells the peer that an epoch cannot be restored, now and then.
    pub(in crate::node) fn report_broken_epoch(
        &mut self,
        now: Time,
        shared: &mut Shared,
        key: Key,
        epoch: u32,
    ) {
        let conn = self.flows.get_mut(key).expect("the caller has it");
        let Some(inc) = &conn.inc else { return };
        if conn
            .reported
            .is_some_and(|(e, t)| e == epoch && now.since(t) < COMPLAINT_SPACING)
        {
            return;
        }
        conn.reported = Some((epoch, now));
        let (flow, incarnation) = (inc.flow, inc.incarnation);
        self.notice(
            shared,
            &Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            },
        );
    }

    fn notice(&mut self, shared: &mut Shared, frame: &Frame<'_>) {
        let mut bytes = [0; 32];
        let mut w = Writer::new(&mut bytes);
        frame::encode(frame, &mut w);
        let len = w.len();
        if self.notices.len() + len <= MAX_NOTICES {
            self.notices.extend_from_slice(&bytes[..len]);
        } else {
            shared.count(Counter::NoticeDropped);
        }
    }
}

/// An inner destination must be an address of this host, or of one that it forwards for, and nothing
/// else (docs/threat-model.md, "The peer").
pub(super) fn is_for_us(shared: &Shared, addr: IpAddr) -> bool {
    is_unicast(addr) && shared.is_ours(addr)
}

/// The incoming stream of a connection, how it is restored, and where its bytes go.
pub(in crate::node) fn incoming<'a>(
    now: Time,
    shared: &'a mut Shared,
    key: Key,
    conn: &'a mut Conn,
) -> Option<(&'a mut RxStream, IncomingDecoders<'a>, ConnSink<'a>)> {
    let Incoming {
        flow,
        incarnation,
        template,
        base,
        secrets,
        stream,
        top,
        ack_floor,
    } = conn.inc.as_mut()?;
    let sink = ConnSink {
        injector: &mut shared.injector,
        pool: &mut shared.pool,
        owner: key.to_u64(),
        template: *template,
        now,
        echo_filter: &mut conn.echo_filter,
        ack_floor,
        sent_end: conn.sent_end,
        base: *base,
        floor: &mut conn.tsval_floor,
        clamp: conn.clamp.as_deref_mut(),
        top,
        received: &mut conn.stats.bytes_received,
        last: 0,
    };
    let bump = shared.bumps.of(conn.bump);
    let decoders = IncomingDecoders::new(bump, secrets, *flow, *incarnation);
    Some((stream, decoders, sink))
}

/// Hands restored bytes of one connection to the injector.
pub(in crate::node) struct ConnSink<'a> {
    injector: &'a mut Injector,
    pool: &'a mut Pool,
    owner: u64,
    template: Template,
    now: Time,
    echo_filter: &'a mut Option<Box<EchoFilter>>,
    ack_floor: &'a mut AckFloor,
    sent_end: Option<dibs_wire::SeqNumber>,
    base: dibs_wire::SeqNumber,
    floor: &'a mut Option<u32>,
    clamp: Option<&'a mut WindowClamp>,
    top: &'a mut u64,
    received: &'a mut u64,
    last: u64,
}

impl Sink for ConnSink<'_> {
    fn room(&mut self, offset: u64, tcp: &TcpFields<'_>, len: usize) -> &mut [u8] {
        self.last = len as u64;
        *self.top = (*self.top).max(offset + len as u64);
        let seq = self
            .base
            .add(offset.wrapping_sub(frame::BASE_OFFSET) as u32);
        let (mut raised, mut scratch) = (SmallVec::new(), SmallVec::new());
        let mut changed;
        let late = self.ack_floor.hear(tcp, self.sent_end);
        let tcp = match (late || self.echo_filter.is_some(), &mut self.clamp) {
            // As nearly always: nothing to copy.
            (false, None) => tcp,
            (_, clamp) => {
                changed = *tcp;
                if late {
                    self.ack_floor.raise(&mut changed, &mut raised);
                }
                echo_filter::adapt(self.echo_filter, self.now, &mut changed, &mut scratch);
                if let Some(clamp) = clamp {
                    clamp.limit(&mut changed);
                }
                &changed
            }
        };
        self.injector.room(
            self.pool,
            self.owner,
            self.template,
            seq,
            tcp,
            self.floor,
            len,
        )
    }

    fn commit(&mut self) {
        *self.received += self.last;
    }

    fn retract(&mut self) {
        self.injector.retract(self.pool);
    }
}
