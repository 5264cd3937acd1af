//! New data: fair rounds over the flows, and for each run the path that the scheduler chooses.

use std::sync::Arc;

use dibs_settings::Scheduler;
use dibs_wire::packet::Segment;

use super::Queues;
use super::carrier::{Carrier, MAX_OVERHEAD};
use super::context::SendCx;
use super::copies;
use super::cutter::{Cutter, To};
use super::datagram::MAX_SEGMENTS;
use super::plan::Plan;
use super::run::Run;
use crate::bump::Bump;
use crate::chunk::Placement;
use crate::flow::conn::Conn;
use crate::flow::queue::Patience;
use crate::node::fq::{List, parsed};
use crate::node::out::Out;
use crate::node::paths::{Avoid, Choice, Kind, Wanted};
use crate::node::shared::Setup;
use crate::session::Integrity;
use crate::slab::Key;

/// Bytes of buffers that may wait for acknowledgement.
const HELD_LIMIT: usize = 96 << 20;
/// A flow that has its turn has something to send.
const HEAD: &str = "a flow that is scheduled has a head";

/// Kind of a connection's new data.
fn kind(conn: &Conn) -> Kind {
    match conn.is_opening() {
        true => Kind::First,
        false => Kind::New,
    }
}

/// How new data of a connection is shared out over the paths.
fn scheduler(conn: &Conn, setup: &Setup) -> Scheduler {
    conn.out.schedule.own.unwrap_or(setup.policy.scheduler)
}

/// Opens a flow whose head was queued before the peer restarted.
fn open(cx: &mut SendCx<'_>, key: Key) {
    let conn = cx.flows.get_mut(key).expect("the caller has it");
    if conn.out.secrets.is_none() {
        let head = conn.out.queue.head().expect(HEAD);
        let Segment { meta, seq, .. } = parsed(&head.buffer);
        conn.open(cx.sealer.session.epoch_secrets().clone(), meta);
        conn.out.stream.begin_at(seq);
    }
}

/// Why a flow's turn ends with nothing sent.
enum Unsent {
    /// Nothing of it may go now: it is the next one's.
    Over,
    /// Nothing of any flow: it is the first when something may. Otherwise the ones with short segments, for
    /// which there is credit first, would leave none to the others.
    Blocked,
    /// Need of a trusted path: the flow keeps its turn until there is room on one. Flows that take any path would leave
    /// no room to it, because they take small pieces as soon as there is any.
    Strict,
}

/// The turns of the flows that have new data, until one of them may send.
pub(super) struct Round<'a> {
    queues: &'a mut Queues,
    /// Bytes that the peer can hold.
    store: usize,
    /// Bytes that a flow may send in one round.
    turn: usize,
    /// Limits below which CoDel leaves a flow's queue alone.
    patience: Patience,
    /// A flow waits for room on a trusted path: no other is to take it.
    trusted_awaited: bool,
}

impl<'a> Round<'a> {
    pub(super) fn new(cx: &SendCx<'_>, queues: &'a mut Queues, store: usize) -> Self {
        Self {
            queues,
            store,
            turn: cx.paths.turn(),
            patience: Patience {
                burst: cx.paths.burst(),
                target: cx.paths.standing(&cx.shared.setup),
            },
            trusted_awaited: false,
        }
    }

    /// New data, one run of datagrams: of one flow, or of several where each has little.
    ///
    /// Flows take turns by deficit round robin; those that had nothing to send come first, once (RFC 8290).
    pub(super) fn send(mut self, cx: &mut SendCx<'_>) -> Option<Out> {
        self.queues.held_by_trust = false;
        self.queues.shares.short_of_paths = false;
        if !self.queues.lost.has_room(cx, self.store) || cx.in_flight.held() >= HELD_LIMIT {
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
        while let Some((key, may)) = self.queues.fq.trusted_only(cx.flows) {
            let sent = match may {
                true => self.send_run(cx, key, List::TrustedOnly),
                false => Err(Unsent::Over),
            };
            match sent {
                Err(Unsent::Over) => self.queues.fq.end_turn(List::TrustedOnly),
                Err(Unsent::Strict) => {
                    self.trusted_awaited = true;
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
                    self.queues.fq.pass(list);
                    passed += 1;
                }
                Err(Unsent::Strict) => {
                    self.queues.fq.await_trusted(list);
                    self.trusted_awaited = true;
                }
                sent => return sent,
            }
        }
        Err(Unsent::Over)
    }

    /// The flow whose turn it is; see [`FairQueue::next_flow`].
    fn next_flow(&mut self, cx: &mut SendCx<'_>, list: List, passed: &mut usize) -> Option<Key> {
        let of_turn = (self.turn, cx.shared.more_comes);
        self.queues
            .fq
            .next_flow(cx.now, cx.flows, of_turn, list, passed)
    }

    /// Asks CoDel about the head of a flow's queue; true if that dropped a segment.
    fn judge(&mut self, cx: &mut SendCx<'_>, key: Key) -> bool {
        let trips = cx
            .paths
            .active(&cx.shared.setup)
            .map(|link| link.path.srtt());
        let of_turn = (self.patience, trips.max().unwrap_or_default());
        self.queues
            .fq
            .judge(cx.now, cx.shared, cx.flows, key, of_turn)
    }

    /// Sends a run of chunks from the head of a flow's queue.
    fn send_run(&mut self, cx: &mut SendCx<'_>, key: Key, list: List) -> Result<Out, Unsent> {
        let bumps = Arc::clone(&cx.shared.setup.bumps);
        let bump = bumps.of(cx.flows.get(key).expect("the caller has it").bump);
        let mut placed = self.place(cx, key, bump)?;
        // Only what can go is judged: waiting for a path is no congestion.
        if self.judge(cx, key) {
            // A segment is missing now, so what follows stands elsewhere.
            let conn = cx.flows.get(key).expect("the caller has it");
            if conn.out.queue.is_empty() {
                return Err(Unsent::Over);
            }
            placed = self.place(cx, key, bump)?;
        }
        self.fill_run(cx, key, list, placed, bump)
            .ok_or(Unsent::Over)
    }

    /// The plan of what stands at the head of a flow's queue, and what carries it.
    fn place<'b>(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        bump: &'b Bump,
    ) -> Result<(Plan, Carrier<'b>), Unsent> {
        let conn = cx.flows.get_mut(key).expect("the caller has it");
        let left = conn.out.queue.head().expect(HEAD).rest.left;
        if let Some(split) = bump.split() {
            let bundle = self
                .queues
                .shares
                .bundle_for(cx, split, left + MAX_OVERHEAD);
            let bundle = bundle.ok_or(Unsent::Over)?;
            open(cx, key);
            return Ok((self.plan(cx, key, bump), bundle));
        }
        open(cx, key);
        let plan = self.plan(cx, key, bump);
        let strict = plan.is_strict;
        let conn = cx.flows.get(key).expect("the caller has it");
        let chained = bump.chain().is_some();
        let wanted = Wanted {
            placement: match strict {
                true => Placement::TrustedOnly,
                false => Placement::Any,
            },
            kind: kind(conn),
            scheduler: scheduler(conn, &cx.shared.setup),
            bytes: left + MAX_OVERHEAD,
            backlog: self.queues.fq.backlog(),
            avoid: Avoid::Nothing,
            under_way: conn.under_way() * self.queues.fq.flows().max(1),
        };
        match self.choose(cx, wanted, chained) {
            Choice::Send { link, budget } => Ok((plan, Carrier::link(cx.paths, link, budget))),
            Choice::Wait(at) => {
                self.queues.held_by_trust |= strict;
                cx.paths.wait_until(at);
                // What any path may carry waits for all of them.
                Err(match strict {
                    true => Unsent::Strict,
                    false => Unsent::Blocked,
                })
            }
            Choice::Nobody if self.trusted_awaited => Err(Unsent::Blocked),
            Choice::Nobody => {
                self.queues.held_by_trust |= chained;
                Err(Unsent::Over)
            }
        }
    }

    /// The plan of what stands at the head of a flow's queue.
    fn plan(&self, cx: &mut SendCx<'_>, key: Key, bump: &Bump) -> Plan {
        let conn = cx.flows.get_mut(key).expect("the caller has it");
        Plan::of_head(&mut conn.out, bump, self.queues.lost.is_full()).expect(HEAD)
    }

    /// The scheduler under the rules of trust.
    fn choose(&self, cx: &mut SendCx<'_>, mut wanted: Wanted, chained: bool) -> Choice {
        let ruled = !chained || cx.paths.has_trusted(&cx.shared.setup);
        // With no trusted path alive, chained flows wait, unless the user would rather not.
        if !ruled && cx.shared.setup.policy.hold_without_trusted {
            return Choice::Nobody;
        }
        if !ruled {
            wanted.placement = Placement::Any;
        }
        if self.trusted_awaited && wanted.placement == Placement::Any {
            wanted.avoid = Avoid::Trusted;
        }
        cx.paths.choose(&cx.shared.setup, cx.now, &wanted)
    }

    /// Cuts the head of a flow's queue into chunks, and what follows, as many as fit one send: of this
    /// flow, and then of those whose turn it is next on its list.
    fn fill_run(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        list: List,
        (plan, carrier): (Plan, Carrier<'_>),
        bump: &Bump,
    ) -> Option<Out> {
        let conn = cx.flows.get(key).expect("the caller has it");
        let alike = (kind(conn), scheduler(conn, &cx.shared.setup));
        let is_redundant = alike.1 == Scheduler::Redundant;
        let list = Some(list).filter(|list| *list != List::TrustedOnly && carrier.split.is_none());
        let wanted = self.wanted(cx, key, list, carrier.usual_payload());
        let first = cx.in_flight.next_key();
        let mut run = Run::new(cx, carrier, bump, wanted);
        let mut last = key;
        self.fill(cx, &mut run, key, plan);
        while run.pieces > 0
            && !run.full
            && let Some(list) = list
            && let Some((next, plan)) = self.joins(cx, &run, list, alike)
            && next != last
        {
            self.fill(cx, &mut run, next, plan);
            last = next;
        }
        if run.pieces > 0 && is_redundant {
            copies::note(cx, run.carrier.links[0], run.batches[0], first);
        }
        let deferred = run.deferred;
        match run.finish(cx, &mut self.queues.shares) {
            None if deferred => self.queues.lost.send_trusted(cx),
            out => out,
        }
    }

    /// Datagrams for what waits of a flow, and of those of a list that may go along with it, about.
    fn wanted(&self, cx: &SendCx<'_>, key: Key, list: Option<List>, room: usize) -> usize {
        let pieces = |key| {
            let conn = cx.flows.get(key);
            conn.map_or(0, |conn| conn.out.queue.bytes().div_ceil(room))
        };
        let mut wanted = pieces(key) + 1;
        let others = list.map(|list| self.queues.fq.others(list).take(MAX_SEGMENTS));
        for other in others.into_iter().flatten() {
            if wanted >= MAX_SEGMENTS {
                break;
            }
            wanted += pieces(other);
        }
        wanted
    }

    /// The flow whose turn it is next, and the plan of what it has to send, if that may go along in a run.
    fn joins(
        &mut self,
        cx: &mut SendCx<'_>,
        run: &Run<'_>,
        list: List,
        (of_kind, by): (Kind, Scheduler),
    ) -> Option<(Key, Plan)> {
        let key = self.next_flow(cx, list, &mut 0)?;
        let conn = cx.flows.get_mut(key).expect("it was just seen");
        let fits = conn.bump == run.bump.number
            && scheduler(conn, &cx.shared.setup) == by
            && (cx.shared.setup.policy.hint.is_none() || kind(conn) == of_kind)
            && conn.out.secrets.is_some()
            && conn.out.queue.passes(cx.now, self.patience);
        if !fits {
            return None;
        }
        let plan = self.plan(cx, key, run.bump);
        (run.allowed || !plan.is_strict).then_some((key, plan))
    }

    /// Takes from a flow's queue into a run what it may send now.
    fn fill(&mut self, cx: &mut SendCx<'_>, run: &mut Run<'_>, key: Key, head: Plan) {
        let SendCx {
            now,
            shared,
            sealer,
            paths,
            flows,
            in_flight,
        } = cx;
        let (alone, bump, split) = (self.queues.fq.flows() == 1, run.bump, run.carrier.split);
        let links = run.carrier.links.clone();
        let open = flows.open_frame(key);
        let conn = flows.get_mut(key).expect("its turn was looked at");
        let is_bare = sealer.session.integrity() == Integrity::Off && open.is_none();
        let mut cutter = Cutter {
            key,
            run,
            shared,
            in_flight,
            head: Some(head),
            bare: is_bare && bump.chain().is_some(),
            sealer,
            open,
            sent: 0,
            to: match split {
                Some(split) => To::Bundle(paths, &mut self.queues.shares, split),
                None => To::Link(&mut paths[links[0]], &mut self.queues.lost),
            },
        };
        let stats = &mut conn.stats;
        let sent = self.queues.fq.take(&mut conn.out, |out| {
            while let Some(mut head) = out.queue.pop() {
                let segment = parsed(&head.buffer);
                if !cutter.cut(out, stats, &segment, &mut head.rest) {
                    out.queue.put_back(head);
                    break;
                }
                cutter.shared.pool.give(head.buffer);
                // The next one goes along unless it is another's turn, or CoDel's.
                let turns = (alone && split.is_none()) || !out.schedule.is_spent();
                if cutter.run.full || !turns || !out.queue.passes(*now, self.patience) {
                    break;
                }
            }
            cutter.sent
        });
        for link in links {
            conn.by_path.entry(paths[link].local).sent += sent;
        }
    }
}
