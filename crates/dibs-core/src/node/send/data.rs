//! New data: fair rounds over the flows, and for each run the path that the scheduler chooses.

use std::sync::Arc;

use dibs_settings::Scheduler;

use super::super::fq::{List, parsed};
use super::super::out::Out;
use super::super::paths::{Avoid, Choice, Kind, Wanted};
use super::super::peer::Peer;
use super::super::shared::Shared;
use super::SendCx;
use super::run::{MAX_DELAYED, MOST_BESIDE};
use crate::chunk::Placement;
use crate::flow::conn::Conn;
use crate::slab::Key;

/// Bytes of buffers that may wait for acknowledgement.
const HELD_LIMIT: usize = 96 << 20;
/// A flow that has its turn has something to send.
const HEAD: &str = "a flow that is scheduled has a head";
/// What a flow may send in one round, at most.
const MAX_QUANTUM: usize = 16 * 1024;

/// What new data of a connection is.
pub(super) fn kind(conn: &Conn) -> Kind {
    match conn.open_frame() {
        Some(_) => Kind::First,
        None => Kind::New,
    }
}

/// How new data of a connection is shared out over the paths.
pub(super) fn scheduler(conn: &Conn, shared: &Shared) -> Scheduler {
    conn.out.scheduler.unwrap_or(shared.policy.scheduler)
}

/// Why a flow's turn ends with nothing sent.
enum Unsent {
    /// Nothing of it may go now: it is the next one's.
    Over,
    /// Nothing of any flow: it is the first when something may. Otherwise the ones with short segments, for
    /// which there is credit first, would leave none to the others.
    Blocked,
    /// What only a trusted path may carry: it keeps its turn until there is room on one. Those who take any path
    /// would leave none to it, for they take it in small pieces as soon as it is there.
    Strict,
}

impl Peer {
    /// New data, one run of datagrams: of one flow, or of several where each has little.
    ///
    /// Flows take turns by deficit round robin; those that had nothing to send come first, once (RFC 8290).
    pub(super) fn send_data(&mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        self.held_by_trust = false;
        self.shares.short_of_paths = false;
        if !self.has_room(cx.shared) || self.in_flight.held() >= HELD_LIMIT {
            return None;
        }
        let mut sent = self.send_strict(cx);
        for list in [List::New, List::Old] {
            if matches!(sent, Err(Unsent::Over)) {
                sent = self.send_flows(cx, list);
            }
        }
        sent.ok()
    }

    /// The same for those who keep their turn for a trusted path.
    fn send_strict(&mut self, cx: &mut SendCx<'_>) -> Result<Out, Unsent> {
        while let Some((key, may)) = self.fq.trusted_only(&self.flows) {
            let sent = match may {
                true => self.send_run(cx, key, List::TrustedOnly),
                false => Err(Unsent::Over),
            };
            match sent {
                Err(Unsent::Over) => self.fq.end_turn(List::TrustedOnly),
                Err(Unsent::Strict) => {
                    cx.trusted_awaited = true;
                    break;
                }
                sent => return sent,
            }
        }
        Err(Unsent::Over)
    }

    /// The same for new flows, or for the others.
    fn send_flows(&mut self, cx: &mut SendCx<'_>, list: List) -> Result<Out, Unsent> {
        // Of those in front, that nothing of them may go now.
        let mut passed = 0;
        while let Some(key) = self.next_flow(cx, list, &mut passed) {
            match self.send_run(cx, key, list) {
                Err(Unsent::Over) => {
                    self.fq.pass(list);
                    passed += 1;
                }
                Err(Unsent::Strict) => {
                    self.fq.await_trusted(list);
                    cx.trusted_awaited = true;
                }
                sent => return sent,
            }
        }
        Err(Unsent::Over)
    }

    /// The flow whose turn it is; see [`FairQueue::next_flow`](super::super::fq::FairQueue::next_flow).
    pub(super) fn next_flow(
        &mut self,
        cx: &SendCx<'_>,
        list: List,
        passed: &mut usize,
    ) -> Option<Key> {
        let of_turn = (cx.patience.turn, cx.shared.more_comes);
        self.fq
            .next_flow(cx.now, &mut self.flows, of_turn, list, passed)
    }

    /// What a flow may send in one round: a burst of the fastest path, so that no turn takes long.
    pub(in crate::node) fn flow_quantum(&self) -> usize {
        let bursts = self.paths.iter().map(|link| link.path.quantum());
        bursts.max().unwrap_or(MAX_QUANTUM).min(MAX_QUANTUM)
    }

    /// Asks CoDel about the head of a flow's queue; true if that dropped a segment.
    pub(super) fn judge(&mut self, cx: &mut SendCx<'_>, key: Key) -> bool {
        let active = { self.paths.iter() }.filter(|link| link.is_active(cx.shared));
        let slowest = active.map(|link| link.path.srtt()).max();
        let of_turn = (cx.patience, slowest.unwrap_or_default());
        self.fq
            .judge(cx.now, cx.shared, &mut self.flows, key, of_turn)
    }

    /// Sends a run of chunks from the head of a flow's queue.
    fn send_run(&mut self, cx: &mut SendCx<'_>, key: Key, list: List) -> Result<Out, Unsent> {
        let bumps = Arc::clone(&cx.shared.bumps);
        let bump = self.flows.get(key).expect("the caller has it").bump;
        if let Some(split) = bumps.of(bump).split() {
            return self.send_split(cx, key, split).ok_or(Unsent::Over);
        }
        let mut place = self.place(cx, key)?;
        // Only what can go is judged: waiting for a path is no congestion.
        if self.judge(cx, key) {
            // A segment is missing now, so what follows stands elsewhere.
            let conn = self.flows.get(key).expect("the caller has it");
            if conn.out.queue.is_empty() {
                return Err(Unsent::Over);
            }
            place = self.place(cx, key)?;
        }
        self.fill_run(cx, key, list, place).ok_or(Unsent::Over)
    }

    /// The path, and its budget, for what stands at the head of a flow's queue.
    fn place(&mut self, cx: &mut SendCx<'_>, key: Key) -> Result<(usize, usize), Unsent> {
        let conn = self.flows.get_mut(key).expect("the caller has it");
        if conn.out.secrets.is_none() {
            // The peer restarted since this was queued.
            let head = conn.out.queue.head().expect(HEAD);
            let meta = parsed(&head.buffer).meta;
            conn.open(cx.session.epoch_secrets().clone(), meta);
        }
        let (strict, left) = self.is_strict(cx, key);
        let conn = self.flows.get(key).expect("the caller has it");
        let chained = cx.shared.bumps.of(conn.bump).chain().is_some();
        let placement = if strict {
            Placement::TrustedOnly
        } else {
            Placement::Any
        };
        let under_way = conn.under_way() * self.fq.flows().max(1);
        let wanted = Wanted {
            placement,
            kind: kind(conn),
            scheduler: scheduler(conn, cx.shared),
            bytes: left + MOST_BESIDE,
            backlog: self.fq.backlog(),
            avoid: Avoid::Nothing,
            under_way,
        };
        match self.choose(cx, wanted, chained) {
            Choice::Send { link, budget } => Ok((link, budget)),
            Choice::Wait(at) => {
                self.held_by_trust |= strict;
                self.paths.wait_until(at);
                // What any path may carry waits for all of them.
                Err(match strict {
                    true => Unsent::Strict,
                    false => Unsent::Blocked,
                })
            }
            Choice::Nobody if cx.trusted_awaited => Err(Unsent::Blocked),
            Choice::Nobody => {
                self.held_by_trust |= chained;
                Err(Unsent::Over)
            }
        }
    }

    /// Whether only a trusted path may carry what stands at the head of a flow's queue, and how many bytes that is.
    pub(super) fn is_strict(&mut self, cx: &SendCx<'_>, key: Key) -> (bool, usize) {
        let conn = self.flows.get_mut(key).expect("the caller has it");
        let head = conn.out.queue.head().expect(HEAD);
        let segment = parsed(&head.buffer);
        let left = head.left();
        let consumed = segment.payload.len() - left;
        let stream = &mut conn.out.stream;
        let offset = stream.offset_of(segment.seq) + consumed as u64;
        let before = stream.epoch();
        let position = stream.position(offset, left.max(1));
        if stream.epoch() != before {
            conn.stats.epochs += 1;
        }
        // A chunk that is due for a trusted path can wait for it while others go on, up to a bound:
        // beyond it trust wins over speed.
        let chain = cx.shared.bumps.of(conn.bump).chain();
        let strict = chain.is_some_and(|chain| {
            let due = conn.out.until_trusted <= 0 && self.retransmit.trusted.len() >= MAX_DELAYED;
            position.solo || stream.is_guarded(offset, chain.guarded()) || due
        });
        (strict, left)
    }

    /// The scheduler under the rules of trust.
    fn choose(&mut self, cx: &SendCx<'_>, mut wanted: Wanted, chained: bool) -> Choice {
        let (now, shared) = (cx.now, &*cx.shared);
        let ruled = !chained || self.paths.has_trusted(shared);
        // With no trusted path alive, chained flows wait, unless the user would rather not.
        if !ruled && shared.policy.hold_without_trusted {
            return Choice::Nobody;
        }
        if !ruled {
            wanted.placement = Placement::Any;
        }
        if cx.trusted_awaited && wanted.placement == Placement::Any {
            wanted.avoid = Avoid::Trusted;
        }
        self.paths.choose(shared, now, &wanted)
    }

    /// Untrusted paths may carry everything: `on_trusted_down = "untrusted"`, and it is down.
    pub(super) fn is_lax(&self, shared: &Shared) -> bool {
        !shared.policy.hold_without_trusted && !self.paths.has_trusted(shared)
    }
}
