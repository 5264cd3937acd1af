//! Moving a live connection without reordering it.
//!
//! The plain way and the bump's paths are not equally long, so at a switch new bytes overtake older
//! ones, and TCP takes those for lost. Into the bump: the receiver holds the start of the chain back
//! until its kernel has what went before in plain. Out of it: the sender's kernel gets no
//! acknowledgements, so that it falls silent, until all it sent by the bump has arrived; then its
//! packets leave in plain and the acknowledgements are handed on. Both are bounded by time.

use std::time::Duration;

use dibs_wire::Tuple;
use dibs_wire::packet::flags;

use super::notice::Event;
use super::peer::{EmptyOut, Peer};
use super::{Node, Shared, route};
use crate::counters::Counter;
use crate::flow::conn::Conn;
use crate::slab::Key;
use crate::time::Time;

/// The start of a chain is held back no longer: what went in plain may be lost.
const GATE_PATIENCE: Duration = Duration::from_millis(80);
/// Nor are acknowledgements.
const DRAIN_PATIENCE: Duration = Duration::from_millis(150);
/// Beside a round trip of the paths, the time after which a kernel that hears nothing would try again
/// (the least tail loss probe of Linux): one acknowledgement is let through before.
const PROBE_MARGIN: Duration = Duration::from_millis(2);
/// A kernel that has sent nothing for so long is silent, not only between two paced bursts.
const SILENCE: Duration = Duration::from_millis(2);
/// Acknowledgements held back, at most; the oldest ones say nothing that a later one does not.
const HELD_ACKS: usize = 64;

/// A connection that is about to leave its bump.
pub(super) struct Drain {
    key: Key,
    until: Time,
    told: bool,
    /// When either end's kernel was last heard, or the begin.
    heard: Time,
    /// When one of `acks` goes on so that the kernel does not think the rest lost.
    next_ack: Time,
    acks: std::collections::VecDeque<EmptyOut>,
}

impl Drain {
    /// Whether it is this connection's.
    pub(super) fn is_of(&self, key: Key) -> bool {
        self.key == key
    }

    /// A byte of the connection came, from either end: as long as the far kernel speaks, it needs our
    /// acknowledgements by the bump, or it would not fall silent.
    pub(super) fn hear(&mut self, now: Time) {
        self.heard = now;
    }
}

impl Node {
    /// Prepares a connection to leave its bump: its kernel is kept from sending more, and
    /// [`Event::Drained`] tells when all that it sent has arrived. Then the packets may be steered
    /// elsewhere, and [`end_drain`](Self::end_drain) lets the connection go on; after a moment it
    /// goes on anyhow.
    pub fn drain(&mut self, now: Time, bump: u8, tuple: Tuple) {
        let Self { shared, peers, .. } = self;
        let Some(peer) = route(peers, tuple.dst) else {
            return;
        };
        match peer.by_tuple.get(&(tuple, bump)) {
            Some(&key) => {
                let until = now + DRAIN_PATIENCE;
                if let Some(known) = peer.drains.iter_mut().find(|d| d.key == key) {
                    // It may have been silent before; now it is asked again.
                    known.told = false;
                    known.until = until;
                    return;
                }
                let acks = std::collections::VecDeque::new();
                let next_ack = now + peer.ack_spacing(shared);
                peer.drains.push(Drain {
                    key,
                    until,
                    told: false,
                    heard: now,
                    next_ack,
                    acks,
                });
            }
            None => {
                let peer = peer.id.index();
                shared
                    .events
                    .push_back(Event::Drained { peer, bump, tuple });
            }
        }
    }

    /// Lets a connection go on after [`drain`](Self::drain).
    pub fn end_drain(&mut self, bump: u8, tuple: Tuple) {
        let Self { shared, peers, .. } = self;
        if let Some(peer) = route(peers, tuple.dst)
            && let Some(&key) = peer.by_tuple.get(&(tuple, bump))
            && let Some(at) = peer.drains.iter().position(|d| d.key == key)
        {
            peer.let_go(shared, at);
        }
    }
}

impl Peer {
    /// Whether anything of a connection is under way.
    fn is_busy(&self, key: Key) -> bool {
        let conn = self.conns.get(key);
        conn.is_some_and(|c| !c.out.queue.is_empty()) || self.waiting.has(key)
    }

    /// Tells of connections of which nothing is under way any more.
    fn check_drains(&mut self, now: Time, shared: &mut Shared) {
        for at in 0..self.drains.len() {
            let drain = &self.drains[at];
            if drain.told || now < drain.heard + SILENCE || self.is_busy(drain.key) {
                continue;
            }
            if let Some(Conn { bump, tuple, .. }) = self.conns.get(drain.key) {
                let (peer, bump, tuple) = (self.id.index(), *bump, *tuple);
                shared
                    .events
                    .push_back(Event::Drained { peer, bump, tuple });
            }
            self.drains[at].told = true;
        }
    }

    /// Keeps an acknowledgement for a kernel that is to fall silent; gives back any other segment.
    pub(super) fn hold_ack(&mut self, ack: EmptyOut) -> Option<EmptyOut> {
        let drain = self.drains.iter_mut().find(|d| d.key == ack.conn);
        match drain {
            Some(drain) if ack.tcp.flags() & (flags::SYN | flags::FIN | flags::RST) == 0 => {
                if drain.acks.len() == HELD_ACKS {
                    drain.acks.pop_front();
                }
                drain.acks.push_back(ack);
                None
            }
            _ => Some(ack),
        }
    }

    /// Hands the acknowledgements on that were held back.
    fn let_go(&mut self, shared: &mut Shared, at: usize) {
        for ack in self.drains.swap_remove(at).acks {
            self.hand_on(shared, &ack);
        }
    }

    fn hand_on(&mut self, shared: &mut Shared, ack: &EmptyOut) {
        if let Some(conn) = self.conns.get_mut(ack.conn)
            && let Some(inc) = &conn.inc
        {
            let (tcp, floor) = (ack.tcp.get(), &mut conn.tsval_floor);
            let (injector, pool) = (&mut shared.injector, &mut shared.pool);
            injector.empty_segment(pool, inc.template, ack.seq, &tcp, floor);
        }
    }

    /// How long a kernel may hear nothing.
    fn ack_spacing(&self, shared: &Shared) -> Duration {
        let active = self.links.iter().filter(|l| l.is_active(shared));
        let longest = active.map(|l| l.path.stats().srtt).max();
        longest.unwrap_or_default() + PROBE_MARGIN
    }

    /// A chain's start is held back; it is looked at again then.
    pub(super) fn note_gate(&mut self, now: Time, key: Key) {
        if self.gates.iter().all(|(gated, _)| *gated != key) {
            self.gates.push((key, now + GATE_PATIENCE));
        }
    }

    /// Lets a chain go on whose start was held back.
    pub(super) fn open_gate(&mut self, now: Time, shared: &mut Shared, key: Key) {
        self.gates.retain(|(gated, _)| *gated != key);
        while let Some(conn) = self.conns.get_mut(key)
            && let Some((stream, _, mut sink)) = super::receive::incoming(shared, key, conn)
            && stream.gate().is_some()
        {
            if let Some(epoch) = stream.open_gate(&mut self.store, &mut sink) {
                shared.count(Counter::CrcMismatch);
                self.complain(now, key, epoch);
            }
        }
    }

    /// When something that is held back goes on anyhow.
    pub(super) fn handover_due(&self) -> Option<Time> {
        let drains = self.drains.iter().flat_map(|d| {
            let silent = (!d.told && !self.is_busy(d.key)).then_some(d.heard + SILENCE);
            let ack = (!d.acks.is_empty()).then_some(d.next_ack);
            [Some(d.until), silent, ack].into_iter().flatten()
        });
        self.gates.iter().map(|(_, t)| *t).chain(drains).min()
    }

    /// Lets go on what was held back for long enough.
    pub(super) fn handle_handover(&mut self, now: Time, shared: &mut Shared) {
        while let Some((key, _)) = self.gates.iter().find(|(_, t)| *t <= now).copied() {
            self.open_gate(now, shared, key);
        }
        self.check_drains(now, shared);
        let spacing = self.ack_spacing(shared);
        for at in 0..self.drains.len() {
            let drain = &mut self.drains[at];
            if drain.next_ack <= now
                && let Some(ack) = drain.acks.pop_front()
            {
                drain.next_ack = now + spacing;
                self.hand_on(shared, &ack);
            }
        }
        while let Some(at) = self.drains.iter().position(|d| d.until <= now) {
            self.let_go(shared, at);
        }
    }
}
