//! Moving a live connection without reordering it.
//!
//! The plain way and the bump's paths are not equally long, so at a switch new bytes overtake older
//! ones, and TCP takes those for lost. Into the bump: the receiver holds the start of the chain back
//! until its kernel has what went before in plain. Out of it: the acknowledgements that the sender's
//! kernel gets close its window just behind what it has sent ([`WindowClamp`]), so that it falls silent with
//! nothing missing; once all of it is under way long enough not to be overtaken its packets may leave
//! in plain, and the window opens. Both are bounded by time.

use std::time::Duration;

use dibs_wire::Tuple;

use super::notice::Event;
use super::peer::Peer;
use super::shared::Shared;
use crate::counters::Counter;
use crate::flow::window_clamp::WindowClamp;
use crate::slab::Key;
use crate::time::Time;

/// Chains whose start is held back at once, at most: more begin at once, and the kernel sorts it out.
pub(super) const MAX_HELD_STARTS: usize = 256;
/// The start of a chain is held back no longer: what went in plain may be lost.
const HELD_START_PATIENCE: Duration = Duration::from_millis(80);
/// What TCP sent again waits no longer for what it had sent before: a path may have died with that.
const OVERTAKING_PATIENCE: Duration = Duration::from_millis(200);
/// Nor is silence waited for, beside two round trips; after that again the window opens by itself.
const DRAIN_PATIENCE: Duration = Duration::from_millis(100);
/// A kernel that has sent nothing for so long is silent, not only between two paced bursts.
const SILENCE: Duration = Duration::from_millis(2);
/// What was sent as long ago, beside the paths' difference, is not overtaken, acknowledged or not.
const SETTLED: Duration = Duration::from_millis(10);

/// Connections that leave their bump, and those whose start is held back.
#[derive(Default)]
pub(super) struct Handover {
    drains: Vec<Drain>,
    pub(super) held_starts: Vec<(Key, Time)>,
}

impl Handover {
    /// Whether one more may be held back.
    pub(super) fn has_room(&self) -> bool {
        self.held_starts.len() < MAX_HELD_STARTS
    }

    /// A byte of this connection came from the local kernel.
    pub(super) fn hear(&mut self, now: Time, key: Key) {
        if let Some(drain) = self.drains.iter_mut().find(|drain| drain.key == key) {
            drain.heard = now;
        }
    }
}

/// A connection that is about to leave its bump.
struct Drain {
    key: Key,
    /// Somebody waits for word of it, even once the connection is gone.
    bump: u8,
    tuple: Tuple,
    /// Silent or not, it is told of then.
    tell_by: Time,
    until: Time,
    told: bool,
    /// When its kernel was last heard, or the begin.
    heard: Time,
}

impl Peer {
    /// See [`Node::drain`](super::Node::drain).
    pub(super) fn begin_drain(&mut self, now: Time, shared: &Shared, key: Key, window_scale: u8) {
        let (_, longest) = self.trips(shared);
        let patience = DRAIN_PATIENCE + 2 * longest;
        let tell_by = now + patience;
        let until = tell_by + patience;
        if let Some(known) = self.handover.drains.iter_mut().find(|d| d.key == key) {
            // It may have been silent before; now it is asked again.
            known.told = false;
            known.tell_by = tell_by;
            known.until = until;
            return;
        }
        let conn = self
            .flows
            .get_mut(key)
            .expect("a tuple leads to its connection");
        let (bump, tuple) = (conn.bump, conn.tuple);
        let clamp = conn.sent_end.map(|end| WindowClamp::new(end, window_scale));
        conn.clamp = clamp.map(Box::new);
        self.handover.drains.push(Drain {
            key,
            bump,
            tuple,
            tell_by,
            until,
            told: false,
            heard: now,
        });
    }

    /// See [`Node::end_drain`](super::Node::end_drain).
    pub(super) fn end_drain(&mut self, shared: &mut Shared, key: Key) {
        if let Some(at) = self.handover.drains.iter().position(|d| d.key == key) {
            self.let_go(shared, at);
        }
    }

    /// When nothing that a connection sent can be overtaken any more, as far as is known now; none
    /// while something waits to be sent.
    fn settles(&self, shared: &Shared, drain: &Drain) -> Option<Time> {
        let conn = self.flows.get(drain.key);
        if conn.is_some_and(|c| !c.out.queue.is_empty()) {
            return None;
        }
        if !self.in_flight.has(drain.key) {
            return Some(drain.heard + SILENCE);
        }
        let (shortest, longest) = self.trips(shared);
        Some(drain.heard + SETTLED + longest.saturating_sub(shortest))
    }

    /// When it is told that a connection is silent.
    fn tells(&self, shared: &Shared, drain: &Drain) -> Time {
        let settles = self.settles(shared, drain);
        settles.map_or(drain.tell_by, |t| t.min(drain.tell_by))
    }

    /// The round trips of the shortest and the longest active path.
    fn trips(&self, shared: &Shared) -> (Duration, Duration) {
        let active = self.paths.active(shared);
        let trips = active.map(|l| l.path.stats().srtt);
        trips.fold((Duration::MAX, Duration::ZERO), |(low, high), trip| {
            (low.min(trip), high.max(trip))
        })
    }

    /// Tells of connections that have fallen silent.
    fn check_drains(&mut self, now: Time, shared: &mut Shared) {
        for at in 0..self.handover.drains.len() {
            let drain = &self.handover.drains[at];
            if !drain.told && now >= self.tells(shared, drain) {
                self.tell_drained(shared, at);
            }
        }
    }

    fn tell_drained(&mut self, shared: &mut Shared, at: usize) {
        let peer = self.id.index();
        let drain = &mut self.handover.drains[at];
        drain.told = true;
        let (bump, tuple) = (drain.bump, drain.tuple);
        shared.events.push(Event::Drained { peer, bump, tuple });
    }

    /// Opens the window that was closed.
    fn let_go(&mut self, shared: &mut Shared, at: usize) {
        if !self.handover.drains[at].told {
            // Another one asked for it since; nobody is to wait for ever.
            self.tell_drained(shared, at);
        }
        let drain = self.handover.drains.swap_remove(at);
        self.flows.meet_floor(drain.key);
        if let Some(conn) = self.flows.get_mut(drain.key)
            && let Some(tcp) = conn.clamp.take().and_then(|clamp| clamp.open())
            && let Some(inc) = &conn.inc
        {
            let injected = inc.seq(inc.top);
            let seq = match conn.acked {
                Some(acked) if acked.is_after(injected) => acked,
                _ => injected,
            };
            let (injector, pool) = (&mut shared.injector, &mut shared.pool);
            injector.empty_segment(pool, inc.template, seq, &tcp, &mut conn.tsval_floor);
        }
    }

    /// A chain's start is held back, or what is `solo`: not for ever.
    pub(super) fn hold_start(&mut self, now: Time, key: Key, solo: bool) {
        self.handover.held_starts.retain(|(held, _)| *held != key);
        let patience = match solo {
            true => OVERTAKING_PATIENCE,
            false => HELD_START_PATIENCE,
        };
        self.handover.held_starts.push((key, now + patience));
    }

    /// Lets go on what of a connection was held back.
    pub(super) fn release_start(&mut self, now: Time, shared: &mut Shared, key: Key) {
        self.handover.held_starts.retain(|(held, _)| *held != key);
        self.flows.meet_floor(key);
        while let Some(conn) = self.flows.get_mut(key)
            && let Some((stream, _, mut sink)) = super::receive::incoming(now, shared, key, conn)
            && stream.holds_back()
        {
            if let Some(epoch) = stream.release_start(&mut self.store, &mut sink) {
                shared.count(Counter::CrcMismatch);
                self.report_broken_epoch(now, shared, key, epoch);
            }
        }
    }

    /// When something that is held back goes on anyhow.
    pub(super) fn handover_due(&self, shared: &Shared) -> Option<Time> {
        let drains = self.handover.drains.iter().flat_map(|d| {
            let tells = (!d.told).then(|| self.tells(shared, d));
            [Some(d.until), tells].into_iter().flatten()
        });
        self.handover
            .held_starts
            .iter()
            .map(|(_, t)| *t)
            .chain(drains)
            .min()
    }

    /// Lets go on what was held back for long enough.
    pub(super) fn handle_handover(&mut self, now: Time, shared: &mut Shared) {
        while let Some((key, _)) = self
            .handover
            .held_starts
            .iter()
            .find(|(_, t)| *t <= now)
            .copied()
        {
            self.release_start(now, shared, key);
        }
        self.check_drains(now, shared);
        while let Some(at) = self.handover.drains.iter().position(|d| d.until <= now) {
            self.let_go(shared, at);
        }
    }
}
