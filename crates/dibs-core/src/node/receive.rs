//! What the peer sent for the local kernel.
//!
//! In go frames ([`take`](Receiver::take), [`take_chunk`](Receiver::take_chunk)), what the local kernel acknowledges
//! ([`on_local_ack`](Receiver::on_local_ack)), and times. Out come packets, by the injector, and
//! [notices](Receiver::notices) for the peer of what it has to begin anew. What came before its time is held here.

mod packets;
mod sink;
mod streams;
#[cfg(test)]
mod tests;

use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::packet::{Segment, flags};
use dibs_wire::{FlowKey, SeqNumber};

use self::sink::incoming;
use super::association::Association;
use super::flows::FlowTable;
use super::fq::FairQueue;
use super::hosts::Hosts;
use super::notice::Event;
use super::opaque::Reassembly;
use super::paths::PathSet;
use super::share_collector::ShareCollector;
use super::shared::Shared;
use super::silence::{Heard, SilentPorts};
use crate::counters::Counter;
use crate::flow::conn::{Conn, Incoming};
use crate::slab::Key;
use crate::stream::rx::{STORE_LIMIT, Store};
use crate::time::Time;

/// A connection that was silent as long is forgotten; it opens again when it speaks.
const CONN_IDLE: Duration = Duration::from_secs(15 * 60);
/// Nothing is held longer for a gap, nor by a silent connection; looked at every [`SWEEP`].
const GAP_PATIENCE: Duration = Duration::from_secs(60);
/// How often idle connections are looked for.
const SWEEP: Duration = Duration::from_secs(30);
/// Chains whose start is held back at once, at most: more begin at once, and the kernel sorts it out.
pub(super) const MAX_HELD_STARTS: usize = 256;
/// The start of a chain is held back no longer unless its numbers may be strange: what went in plain may be lost.
const HELD_START_PATIENCE: Duration = Duration::from_millis(80);
/// What TCP sent again waits no longer for what it had sent before: a path may have died with that.
const OVERTAKING_PATIENCE: Duration = Duration::from_millis(200);

/// What a receiver works on beside what it holds.
pub(super) struct ReceiveCx<'a> {
    pub(super) now: Time,
    /// Index of the peer.
    pub(super) peer: usize,
    pub(super) shared: &'a mut Shared,
    pub(super) hosts: &'a Hosts,
    pub(super) paths: &'a PathSet,
    pub(super) association: &'a Association,
    pub(super) flows: &'a mut FlowTable,
    pub(super) fq: &'a mut FairQueue,
}

/// See the module.
pub(super) struct Receiver {
    /// Memory for pieces out of order.
    store: Store,
    /// Shares of what was split, until enough are there.
    shares: ShareCollector,
    reassembly: Reassembly,
    /// Connections of which something is held back that could go on, and until when.
    pub(super) held_starts: Vec<(Key, Time)>,
    /// Ports where the local kernel does not answer the peer.
    pub(super) silent: SilentPorts,
    /// Frames that tell the peer of flows and epochs; they may be lost.
    pub(super) notices: Vec<u8>,
    sweep_at: Time,
}

impl Receiver {
    pub(super) fn new(now: Time) -> Self {
        Self {
            store: Store::new(STORE_LIMIT),
            shares: ShareCollector::default(),
            reassembly: Reassembly::default(),
            held_starts: Vec::new(),
            silent: SilentPorts::default(),
            notices: Vec::new(),
            sweep_at: now + SWEEP,
        }
    }

    /// Bytes held out of order.
    pub(super) const fn held(&self) -> usize {
        self.store.held()
    }

    /// Sets of shares that are not complete, and their bytes.
    pub(super) fn sets(&self) -> (usize, usize) {
        self.shares.held()
    }

    /// Wholes of which not all pieces are there, their bytes, and the pieces.
    #[cfg(test)]
    pub(super) fn in_pieces(&self) -> (usize, usize, usize) {
        self.reassembly.held()
    }

    /// The peer restarted: it knows nothing of what it sent, nor of what it was sent.
    pub(super) fn restart(&mut self, flows: &mut FlowTable) {
        self.shares = ShareCollector::default();
        self.reassembly = Reassembly::default();
        self.notices.clear();
        flows.forget_incoming();
        self.forget(flows.iter_mut().filter_map(|(_, conn)| conn.restart()));
    }

    /// Forgets what the peer had opened.
    pub(super) fn forget(&mut self, opened: impl IntoIterator<Item = Incoming>) {
        for mut inc in opened {
            inc.stream.clear(&mut self.store);
        }
    }

    /// The connection of this tuple in this bump, made if it is new.
    pub(super) fn conn(&mut self, cx: &mut ReceiveCx<'_>, tuple: FlowKey, bump: BumpId) -> Key {
        if let Some(key) = cx.flows.find(tuple, bump) {
            return key;
        }
        if let Some(oldest) = cx.flows.surplus(|| cx.shared.dice.random_u64()) {
            self.remove_conn(cx, oldest);
            cx.shared.count(Counter::FlowEvicted);
        }
        let key = cx.flows.add(cx.now, tuple, bump);
        let conn = cx.flows.get_mut(key).expect("it was just added");
        conn.out.schedule.own = cx.shared.setup.policy.scheduler_of(&tuple);
        key
    }

    fn remove_conn(&mut self, cx: &mut ReceiveCx<'_>, key: Key) {
        let Some(mut conn) = cx.flows.remove(key) else {
            return;
        };
        cx.fq.forget(&mut cx.shared.pool, key, &mut conn.out);
        self.forget(conn.inc);
    }

    /// What the local kernel acknowledges may prove that a gap was filled past us.
    pub(super) fn on_local_ack(&mut self, cx: &mut ReceiveCx<'_>, key: Key, ack: SeqNumber) {
        let (conn, tuple, floor) = cx.flows.with_ends(key).expect("the caller has it");
        conn.note_acked(ack);
        let Some(inc) = conn.inc.as_ref().filter(|inc| inc.stream.is_waiting()) else {
            return;
        };
        let offset = inc.offset_of(ack);
        let (stream, _, mut sink) = incoming(cx.now, cx.shared, key, (conn, tuple, floor))
            .expect("the connection has an incoming flow");
        if let Some(epoch) = stream.local_ack(offset, &mut self.store, &mut sink) {
            self.report_broken_epoch(cx, key, epoch);
        } else if stream.held_start().is_some_and(|start| offset >= start) {
            self.release_start(cx, key);
        }
    }

    /// The local kernel is given a SYN of the peer for the connection `tuple`, as the local host sends. What answers
    /// behind a gateway is another host.
    fn on_call(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        (key, tuple, bump): (Key, FlowKey, BumpId),
        seq: SeqNumber,
    ) {
        if cx.shared.setup.own.addresses.contains(&tuple.src) {
            let heard = cx.flows.call(cx.now, key, bump, seq);
            self.note_call(cx, (bump, tuple.sport), heard);
        }
    }

    /// The local kernel sends a segment of a connection.
    pub(super) fn on_local_answer(
        &mut self,
        cx: &mut ReceiveCx<'_>,
        key: Key,
        segment: &Segment<'_>,
    ) {
        let Some(bump) = cx.flows.answer(key) else {
            return;
        };
        let port = segment.tuple.sport;
        match segment.has(flags::RST) {
            true => self.silent.refused(cx.now, (bump, port)),
            false => self.silent.answered(bump, port),
        }
        self.tell_silence(cx);
    }

    /// The local host says that it does not take what the peer sent for the connection `tuple`, as the local host
    /// sends: a kernel that nobody keeps from answering says so with RST.
    pub(super) fn on_local_rejection(&mut self, cx: &mut ReceiveCx<'_>, tuple: &FlowKey) {
        if let Some((bump, heard)) = cx.flows.reject(tuple) {
            self.note_call(cx, (bump, tuple.sport), heard);
        }
    }

    fn note_call(&mut self, cx: &mut ReceiveCx<'_>, place: (BumpId, u16), heard: Heard) {
        let Heard::Unanswered { first } = heard else {
            return;
        };
        if first {
            cx.shared.count(Counter::CallUnanswered);
        }
        if !self.silent.note(cx.now, place, first) {
            cx.shared.count(Counter::SilentPortUnnamed);
        }
        self.tell_silence(cx);
    }

    fn tell_silence(&mut self, cx: &mut ReceiveCx<'_>) {
        if let Some(ports) = self.silent.poll_change() {
            let peer = cx.peer;
            cx.shared
                .journal
                .events
                .push(Event::SilentPorts { peer, ports });
        }
    }

    /// True if one more may be held back.
    fn may_hold_start(&self) -> bool {
        self.held_starts.len() < MAX_HELD_STARTS
    }

    /// A chain's start is held back, or what is `solo`: not for ever.
    fn hold_start(&mut self, now: Time, key: Key, solo: bool) {
        self.held_starts.retain(|(held, _)| *held != key);
        let patience = match solo {
            true => OVERTAKING_PATIENCE,
            false => HELD_START_PATIENCE,
        };
        self.held_starts.push((key, now + patience));
    }

    /// Lets go on what of a connection was held back.
    fn release_start(&mut self, cx: &mut ReceiveCx<'_>, key: Key) {
        self.held_starts.retain(|(held, _)| *held != key);
        while let Some(conn) = cx.flows.with_ends(key)
            && let Some((stream, _, mut sink)) = incoming(cx.now, cx.shared, key, conn)
            && stream.holds_back()
        {
            if let Some(epoch) = stream.release_start(&mut self.store, &mut sink) {
                cx.shared.count(Counter::CrcMismatch);
                self.report_broken_epoch(cx, key, epoch);
            }
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        let expiring = [self.reassembly.expires_at(), self.shares.expires_at()];
        let held_starts = self.held_starts.iter().map(|(_, until)| *until);
        let due = expiring.into_iter().flatten().chain(held_starts);
        due.chain([self.sweep_at]).min()
    }

    /// Lets go on what was held back for long enough, and gives up what was held too long.
    pub(super) fn handle_timeout(&mut self, cx: &mut ReceiveCx<'_>) {
        self.reassembly.expire(cx.now, &mut cx.shared.journal);
        self.shares.expire(cx.now, &mut cx.shared.journal);
        while let Some(&(key, _)) = { self.held_starts.iter() }.find(|(_, t)| *t <= cx.now) {
            let conn = cx.flows.get(key);
            match conn.is_some_and(|conn| conn.may_be_strange(cx.now)) {
                true => self.hold_start(cx.now, key, false),
                false => self.release_start(cx, key),
            }
        }
        if cx.now >= self.sweep_at {
            self.silent.expire(cx.now);
            self.tell_silence(cx);
            self.sweep_at = cx.now + SWEEP;
            self.sweep(cx);
        }
    }

    /// Forgets connections that have long been silent, and what others hold for a gap that nobody
    /// closes any more, as when the connection left the bump or its bytes were lost here.
    fn sweep(&mut self, cx: &mut ReceiveCx<'_>) {
        // A kernel whose connection lives says so more often, also where all that it says has to wait here.
        let is_idle = |conn: &Conn| cx.now.since(conn.last_seen) > CONN_IDLE;
        for key in cx.flows.which(is_idle) {
            self.remove_conn(cx, key);
        }
        for (_, conn) in cx.flows.iter_mut() {
            let silent = cx.now.since(conn.last_seen);
            if silent > GAP_PATIENCE
                && let Some(inc) = &mut conn.inc
            {
                inc.stream.give_up(&mut self.store);
            }
            if silent > SWEEP {
                conn.shrink(cx.now);
            }
        }
        for key in cx.flows.which(Conn::is_waiting) {
            self.give_up_gaps(cx, key);
        }
        let abandoned = self.store.take_abandoned();
        cx.shared
            .journal
            .counters
            .add(Counter::EpochEnded, abandoned);
    }

    /// Gives up the old gaps of a connection whose kernel says by another way, if at all, what it has.
    fn give_up_gaps(&mut self, cx: &mut ReceiveCx<'_>, key: Key) {
        while let Some(conn) = cx.flows.with_ends(key)
            && let Some((stream, _, mut sink)) = incoming(cx.now, cx.shared, key, conn)
            && let Some(epoch) =
                stream.give_up_gaps(cx.now, GAP_PATIENCE, &mut self.store, &mut sink)
        {
            self.report_broken_epoch(cx, key, epoch);
        }
    }
}
