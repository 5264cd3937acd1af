//! One peer: what is known of it, and what the local kernel has for it.

use std::collections::VecDeque;
use std::time::Duration;

use super::association::{Association, News};
use super::flows::FlowTable;
use super::fq::FairQueue;
use super::handover::Handover;
use super::hosts::Hosts;
use super::messages::Messages;
use super::notice::Event;
use super::opaque::{OpaqueQueues, Reassembly};
use super::paths::{Link, PathSet};
use super::receive::incoming;
use super::send::{self, RetransmitQueue, Shares};
use super::sets::Sets;
use super::shared::Shared;
use crate::counters::Counter;
use crate::flow::conn::Conn;
use crate::flow::echo_filter::EchoFilter;
use crate::in_flight::InFlight;
use crate::session::{Established, PeerId, SessionId};
use crate::slab::Key;
use crate::stream::rx::{STORE_LIMIT, Store};
use crate::time::Time;

pub(super) mod conns;

pub(super) use conns::EmptyOut;
pub(super) use conns::Taken;

/// A connection that was silent as long is forgotten; it opens again when it speaks.
const CONN_IDLE: Duration = Duration::from_secs(15 * 60);
/// Nothing is held longer for a gap, nor by a silent connection; looked at every [`SWEEP`].
const GAP_PATIENCE: Duration = Duration::from_secs(60);
/// How often idle connections are looked for.
const SWEEP: Duration = Duration::from_secs(30);

/// What the node knows of a peer.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(super) hosts: Hosts,
    pub(super) association: Association,
    pub(super) paths: PathSet,
    pub(super) flows: FlowTable,
    pub(crate) in_flight: InFlight,
    pub(super) retransmit: RetransmitQueue,
    pub(super) shares: Shares,
    /// Those of the peer's, until enough are there.
    pub(super) sets: Sets,
    pub(super) fq: FairQueue,
    pub(super) segments: VecDeque<EmptyOut>,
    pub(super) opaque: OpaqueQueues,
    pub(super) reassembly: Reassembly,
    pub(super) handover: Handover,
    pub(super) messages: Messages,
    /// Frames that tell the peer of flows and epochs; they may be lost.
    pub(super) notices: Vec<u8>,
    pub(super) store: Store,
    /// Trust keeps data waiting that an untrusted path could carry.
    pub(super) held_by_trust: bool,
    sweep_at: Time,
}

impl Peer {
    pub(crate) fn new(
        now: Time,
        id: PeerId,
        hosts: Hosts,
        paths: PathSet,
        shared: &mut Shared,
    ) -> Self {
        Self {
            id,
            hosts,
            association: Association::new(now),
            paths,
            flows: FlowTable::new(shared.hash_keys),
            in_flight: InFlight::default(),
            retransmit: RetransmitQueue::default(),
            shares: Shares::default(),
            sets: Sets::default(),
            fq: FairQueue::default(),
            segments: VecDeque::new(),
            opaque: OpaqueQueues::default(),
            reassembly: Reassembly::default(),
            handover: Handover::default(),
            messages: Messages::new(),
            notices: Vec::new(),
            store: Store::new(STORE_LIMIT),
            held_by_trust: false,
            sweep_at: now + SWEEP,
        }
    }

    /// Whether a datagram of path `id` may come by this local path.
    pub(super) fn expects(&self, id: u8, local: usize) -> bool {
        let known = self.paths.iter().find(|l| l.id == id);
        // Somebody may have brought the first question here by another interface. And who has
        // restarted numbers its paths anew; that it has, only what it sends now proves.
        known.is_none_or(|l| l.local == local || l.is_accepting())
            || self.association.may_have_restarted()
    }

    /// A session came about.
    pub(crate) fn on_established(
        &mut self,
        now: Time,
        shared: &mut Shared,
        established: Established,
    ) {
        if let Some(news) = self.association.on_established(shared, established) {
            self.take_news(now, shared, news);
        }
    }

    /// The peer used a session that we answered.
    pub(super) fn on_used(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: SessionId,
        confirmed: bool,
    ) {
        if let Some(news) = self.association.on_used(shared, session, confirmed) {
            self.take_news(now, shared, news);
        }
    }

    fn take_news(&mut self, now: Time, shared: &mut Shared, news: News) {
        let News { restarted, is_up } = news;
        if restarted {
            self.forget(shared);
        }
        if is_up {
            let peer = self.id.index();
            shared.events.push(Event::PeerUp { peer, restarted });
        }
        self.paths.dial_at_once(now);
        let given_up = self.paths.use_session(now, shared);
        self.abandon(shared, given_up);
    }

    /// The session has expired.
    pub(crate) fn on_down(&mut self, shared: &mut Shared) {
        if self.association.on_down() {
            let peer = self.id.index();
            shared.events.push(Event::PeerDown { peer });
        }
    }

    /// The peer restarted: it knows nothing of what we had with it.
    fn forget(&mut self, shared: &mut Shared) {
        self.paths.clear();
        self.segments.clear();
        self.retransmit.clear();
        self.shares = Shares::default();
        self.sets = Sets::default();
        self.messages
            .restart(self.in_flight.drain(&mut shared.pool));
        self.flows.forget_incoming();
        self.reassembly = Reassembly::default();
        self.notices.clear();
        for (_, conn) in self.flows.iter_mut() {
            conn.out.stream.reincarnate();
            conn.out.secrets = None;
            conn.out.unconfirm();
            conn.echo_filter = conn.tsval.map(|tsval| Box::new(EchoFilter::after(tsval)));
            if let Some(mut inc) = conn.inc.take() {
                inc.stream.clear(&mut self.store);
            }
        }
    }

    /// A local interface came or went.
    pub(crate) fn on_local_change(&mut self, now: Time, shared: &mut Shared, local: usize) {
        self.paths.dial_at_once(now);
        let peer = self.id.index();
        let up = shared.local[local].is_usable();
        let mut lost = std::mem::take(&mut shared.scratch.lost);
        for at in 0..self.paths.len() {
            let link = &mut self.paths[at];
            if link.local != local {
                continue;
            }
            if up {
                link.on_up(now);
            } else {
                // What is on its way there goes by the others at once.
                link.path.abandon(&mut lost);
            }
            let id = link.id;
            link.note_state(shared, peer);
            self.take_lost(shared, id, &mut lost);
        }
        shared.scratch.lost = lost;
    }

    /// What paths carried that were given up goes by the others.
    pub(super) fn abandon(
        &mut self,
        shared: &mut Shared,
        given_up: impl IntoIterator<Item = Link>,
    ) {
        for mut link in given_up {
            let mut lost = std::mem::take(&mut shared.scratch.lost);
            link.path.abandon(&mut lost);
            self.take_lost(shared, link.id, &mut lost);
            shared.scratch.lost = lost;
            // What it had lost before can go nowhere now.
            for share in link.shares {
                let parts = (&mut self.paths, &mut self.flows, &mut self.in_flight);
                send::lose_share(shared, parts, link.id, share);
            }
        }
    }

    /// Deals with what a path declared lost.
    pub(super) fn take_lost(&mut self, shared: &mut Shared, path: u8, lost: &mut Vec<u64>) {
        let parts = (&mut self.paths, &mut self.flows, &mut self.in_flight);
        self.retransmit.on_lost(shared, parts, path, lost);
    }

    /// Whether anything can be sent by this local path.
    fn may_use(&self, shared: &Shared, local: usize) -> bool {
        self.association.is_up() && shared.local[local].is_usable()
    }

    pub(crate) fn poll_timeout(&self, shared: &Shared) -> Option<Time> {
        let due = [
            self.paths.poll_timeout(shared, self.association.is_up()),
            Some(self.sweep_at),
            self.association.poll_timeout(),
            self.reassembly.expires_at(),
            self.sets.expires_at(),
            self.handover_due(shared),
            self.fq.poll_timeout(),
            self.retransmit.poll_timeout(),
        ];
        due.into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time, shared: &mut Shared) {
        self.paths.release(now);
        let peer = self.id.index();
        for at in 0..self.paths.len() {
            if !self.may_use(shared, self.paths[at].local) {
                continue;
            }
            let mut lost = std::mem::take(&mut shared.scratch.lost);
            self.paths.handle_timeout(now, shared, at, &mut lost);
            let id = self.paths[at].id;
            self.take_lost(shared, id, &mut lost);
            shared.scratch.lost = lost;
            self.paths[at].note_state(shared, peer);
        }
        if now >= self.paths.dials_at() && !self.paths.endpoints().is_empty() {
            if self.association.is_up() {
                let given_up = self.paths.dial(now, shared);
                self.abandon(shared, given_up);
            } else {
                self.paths.put_off_dialling(now);
            }
        }
        self.retransmit
            .handle_timeout(now, &mut shared.pool, &self.flows, &mut self.in_flight);
        let quantum = self.paths.quantum();
        self.fq
            .handle_timeout(now, shared, &mut self.flows, quantum);
        self.reassembly.expire(now, shared);
        self.sets.expire(now, shared);
        self.handle_handover(now, shared);
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep(now, shared);
        }
    }

    /// Forgets connections that have long been silent, and what others hold for a gap that nobody
    /// closes any more, as when the connection left the bump or its bytes were lost here.
    fn sweep(&mut self, now: Time, shared: &mut Shared) {
        let idle: Vec<Key> = self
            .flows
            .iter()
            // A kernel whose connection lives says so more often, also where all that it says has to wait here.
            .filter(|(_, c)| now.since(c.last_seen) > CONN_IDLE)
            .map(|(key, _)| key)
            .collect();
        for key in idle {
            self.remove_conn(shared, key);
        }
        for (_, conn) in self.flows.iter_mut() {
            let silent = now.since(conn.last_seen);
            if silent > GAP_PATIENCE
                && let Some(inc) = &mut conn.inc
            {
                inc.stream.give_up(&mut self.store);
            }
            if silent > SWEEP {
                conn.shrink();
            }
        }
        let waits = |conn: &Conn| conn.inc.as_ref().is_some_and(|i| i.stream.is_waiting());
        let waiting = self.flows.iter().filter(|(_, c)| waits(c));
        let waiting: Vec<Key> = waiting.map(|(key, _)| key).collect();
        for key in waiting {
            self.give_up_gaps(now, shared, key);
        }
        let abandoned = self.store.take_abandoned();
        shared.counters.add(Counter::EpochEnded, abandoned);
    }

    /// Gives up the old gaps of a connection whose kernel says by another way, if at all, what it has.
    fn give_up_gaps(&mut self, now: Time, shared: &mut Shared, key: Key) {
        self.flows.meet_floor(key);
        while let Some(conn) = self.flows.get_mut(key)
            && let Some((stream, _, mut sink)) = incoming(now, shared, key, conn)
            && let Some(epoch) = stream.give_up_gaps(now, GAP_PATIENCE, &mut self.store, &mut sink)
        {
            self.report_broken_epoch(now, shared, key, epoch);
        }
    }
}
