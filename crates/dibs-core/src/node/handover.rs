//! Moving a live connection without reordering it.
//!
//! The plain way and the bump's paths are not equally long, so at a switch new bytes overtake older
//! ones, and TCP takes those for lost. Into the bump: the receiver holds the start of the chain back
//! until its kernel has what went before in plain ([`Receiver`](super::receive::Receiver)). Out of it: the acknowledgements that the sender's
//! kernel gets close its window just behind what it has sent ([`WindowClamp`]), so that it falls silent with
//! nothing missing; a kernel that has nothing under way is given its latest one again. Once all that it sent is acknowledged its
//! packets may leave in plain, and the window opens. Both are bounded by time.

use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::FlowKey;
use dibs_wire::frame::TcpFields;

use super::flows::FlowTable;
use super::notice::Event;
use super::paths::PathSet;
use super::shared::{Journal, Setup, Shared};
use crate::flow::conn::Conn;
use crate::flow::window_clamp::WindowClamp;
use crate::in_flight::InFlight;
use crate::session::PeerId;
use crate::slab::Key;
use crate::time::Time;

/// Silence is waited for no longer, beside two round trips.
const DRAIN_PATIENCE: Duration = Duration::from_millis(100);
/// The window opens by itself when that has passed so often again. Both ends are to be silent at once, and each waits as long for that,
/// and thrice as long for routers to hear of all that went by the bump.
const HELD: u32 = 8;
/// Bytes of a kernel whose window has closed have come here after so long.
const SILENCE: Duration = Duration::from_millis(2);
/// What was sent as long ago, beside the paths' difference, is not overtaken, acknowledged or not.
const SETTLED: Duration = Duration::from_millis(10);

/// A connection that is about to leave its bump.
struct Drain {
    key: Key,
    /// Somebody waits for word of it, even once the connection is gone.
    bump: BumpId,
    tuple: FlowKey,
    /// Silent or not, it is told of then.
    tell_by: Time,
    until: Time,
    told: bool,
    /// When its kernel was last heard, or the begin.
    heard: Time,
}

impl Drain {
    fn tell(&mut self, journal: &mut Journal, peer: PeerId) {
        self.told = true;
        let Self { bump, tuple, .. } = *self;
        let peer = peer.index();
        journal.events.push(Event::Drained { peer, bump, tuple });
    }

    /// When nothing that the connection sent can be overtaken any more, as far as is known now; none
    /// while something waits to be sent, or is not acknowledged: until then its window is open.
    fn settles(
        &self,
        setup: &Setup,
        flows: &FlowTable,
        paths: &PathSet,
        in_flight: &InFlight,
    ) -> Option<Time> {
        let conn = flows.get(self.key);
        if conn.is_some_and(|c| !c.out.queue.is_empty() || c.under_way() > 0) {
            return None;
        }
        if !in_flight.has(self.key) {
            return Some(self.heard + SILENCE);
        }
        let (shortest, longest) = paths.trips(setup);
        Some(self.heard + SETTLED + longest.saturating_sub(shortest))
    }

    /// When it is told that the connection is silent.
    fn tells(
        &self,
        setup: &Setup,
        flows: &FlowTable,
        paths: &PathSet,
        in_flight: &InFlight,
    ) -> Time {
        let settles = self.settles(setup, flows, paths, in_flight);
        settles.map_or(self.tell_by, |t| t.min(self.tell_by))
    }
}

/// Connections that leave their bump.
#[derive(Default)]
pub(super) struct Handover {
    drains: Vec<Drain>,
}

impl Handover {
    /// A byte of this connection came from the local kernel.
    pub(super) fn hear(&mut self, now: Time, key: Key) {
        if let Some(drain) = self.drains.iter_mut().find(|drain| drain.key == key) {
            drain.heard = now;
        }
    }

    /// See [`Node::drain`](super::Node::drain). Returns false if nothing is waited for: the connection left this bump for another one
    /// so long ago that nothing is under way by this one, acknowledged or not.
    pub(super) fn begin(
        &mut self,
        now: Time,
        shared: &mut Shared,
        paths: &PathSet,
        flows: &mut FlowTable,
        (key, window_scale): (Key, u8),
    ) -> bool {
        let (_, longest) = paths.trips(&shared.setup);
        let patience = DRAIN_PATIENCE + 2 * longest;
        let left = flows.left_at(key);
        if left.is_some_and(|at| now.since(at) > patience) {
            return false;
        }
        let tell_by = now + patience;
        let until = tell_by + HELD * patience;
        if let Some(known) = self.drains.iter_mut().find(|d| d.key == key) {
            // It may have been silent before; now it is asked again.
            known.told = false;
            known.tell_by = tell_by;
            known.until = until;
            return true;
        }
        let known = flows.with_ends(key);
        let (conn, tuple, _) = known.expect("a tuple leads to its connection");
        let clamp = conn.sent_end.map(|end| WindowClamp::new(end, window_scale));
        conn.clamp = clamp.map(Box::new);
        conn.is_leaving = true;
        self.drains.push(Drain {
            key,
            bump: conn.bump,
            tuple,
            tell_by,
            until,
            told: false,
            heard: now,
        });
        acknowledge(shared, flows, key, |conn| {
            let mut tcp = { conn.inc.as_ref() }.and_then(|inc| inc.ack_floor.again())?;
            let is_level = conn.given().is_some() && conn.under_way() == 0;
            conn.clamp.as_mut().filter(|_| is_level)?.limit(&mut tcp);
            Some(tcp)
        });
        true
    }

    /// See [`Node::end_drain`](super::Node::end_drain).
    pub(super) fn end(
        &mut self,
        shared: &mut Shared,
        peer: PeerId,
        flows: &mut FlowTable,
        key: Key,
    ) {
        if let Some(at) = self.drains.iter().position(|d| d.key == key) {
            self.let_go(shared, peer, flows, at);
        }
    }

    /// Opens the window that was closed.
    fn let_go(&mut self, shared: &mut Shared, peer: PeerId, flows: &mut FlowTable, at: usize) {
        let mut drain = self.drains.swap_remove(at);
        if !drain.told {
            // Another one asked for it since; nobody is to wait for ever.
            drain.tell(&mut shared.journal, peer);
        }
        if let Some(conn) = flows.get_mut(drain.key) {
            conn.is_leaving = false;
        }
        acknowledge(shared, flows, drain.key, |conn| conn.clamp.take()?.open());
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(super) fn poll_timeout(
        &self,
        setup: &Setup,
        flows: &FlowTable,
        paths: &PathSet,
        in_flight: &InFlight,
    ) -> Option<Time> {
        let due = self.drains.iter().flat_map(|d| {
            let tells = (!d.told).then(|| d.tells(setup, flows, paths, in_flight));
            [Some(d.until), tells].into_iter().flatten()
        });
        due.min()
    }

    /// Tells of connections that have fallen silent, and lets go on what was kept from sending for long enough.
    pub(super) fn handle_timeout(
        &mut self,
        now: Time,
        shared: &mut Shared,
        peer: PeerId,
        flows: &mut FlowTable,
        paths: &PathSet,
        in_flight: &InFlight,
    ) {
        for drain in &mut self.drains {
            if drain.told || now < drain.tells(&shared.setup, flows, paths, in_flight) {
                continue;
            }
            drain.tell(&mut shared.journal, peer);
            let conn = flows.get_mut(drain.key);
            if let Some(clamp) = conn.and_then(|conn| conn.clamp.as_mut()) {
                clamp.shut();
            }
        }
        while let Some(at) = self.drains.iter().position(|d| d.until <= now) {
            self.let_go(shared, peer, flows, at);
        }
    }
}

/// Gives the local kernel this acknowledgement, behind what it was given of the connection.
fn acknowledge(
    shared: &mut Shared,
    flows: &mut FlowTable,
    key: Key,
    word: impl FnOnce(&mut Conn) -> Option<TcpFields<'static>>,
) {
    if let Some((conn, tuple, floor)) = flows.with_ends(key)
        && let Some(tcp) = word(conn)
        && let Some(inc) = &conn.inc
    {
        let injected = inc.seq(inc.top);
        let seq = match conn.acked {
            Some(acked) if acked.is_after(injected) => acked,
            _ => injected,
        };
        let (injector, pool) = (&mut shared.injector, &mut shared.pool);
        injector.empty_segment(pool, inc.template(tuple, conn.bump), seq, &tcp, floor);
    }
}
