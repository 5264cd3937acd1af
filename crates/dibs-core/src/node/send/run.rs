//! A run: datagrams of one flow for one path, cut from the head of its queue and sealed where they lie.

use std::sync::Arc;

use dibs_settings::Scheduler;

use super::super::fq::{List, parsed};
use super::super::out::{Out, Source};
use super::super::paths::Kind;
use super::super::peer::Peer;
use super::SendCx;
use super::cutter::{Cutter, Rest};
use super::data::{kind, scheduler};
use crate::bump::{Bump, Chain};
use crate::session::Integrity;
use crate::slab::Key;

/// Segments of one GSO send, at most (the kernel's UDP_MAX_SEGMENTS of old).
pub(super) const MAX_SEGMENTS: usize = 64;
/// Bytes of one GSO send, at most: an IPv6 payload with its UDP header.
pub(super) const MAX_BATCH: usize = 65_000;
/// Chunks left out of untrusted runs that may wait for a trusted path.
pub(super) const MAX_DELAYED: usize = 64;
/// Bytes of a datagram beside its payload, usually less.
pub(super) const MOST_BESIDE: usize = 128;
/// A datagram that falls short of the others of its send by no more than this part of them is padded:
/// the send goes on behind it, with the next segment.
pub(super) const MOST_PADDED: usize = 32;
/// Lengths of padded datagrams: powers of two between these, or the path's.
const MIN_BUCKET: usize = 128;
const MAX_BUCKET: usize = 1024;

impl Peer {
    /// Cuts the head of a flow's queue into chunks of one path, and what follows, as many as fit one send: of this
    /// flow, and then of those whose turn it is next on its list.
    pub(super) fn fill_run(
        &mut self,
        cx: &mut SendCx<'_>,
        key: Key,
        list: List,
        (link, budget): (usize, usize),
    ) -> Option<Out> {
        let may_be_untrusted = self.is_lax(cx.shared);
        let conn = self.flows.get(key).expect("the caller has it");
        let path = &self.paths[link];
        let mtu = usize::from(path.path.mtu());
        let budget = budget.min(path.path.quantum().max(mtu)).min(MAX_BATCH);
        let most = (budget / mtu).clamp(1, MAX_SEGMENTS);
        let most = most.min(self.wanted(key, list, mtu));
        let buffer = cx.shared.pool.take_for(most * mtu);
        let mut run = Run {
            link,
            allowed: path.trusted || may_be_untrusted,
            bump: conn.bump,
            kind: kind(conn),
            scheduler: scheduler(conn, cx.shared),
            mtu,
            most,
            batch: self.in_flight.add_batch(buffer),
            at: 0,
            kept: 0,
            stride: 0,
            pieces: 0,
            unused: true,
            deferred: false,
            full: false,
        };
        let bumps = Arc::clone(&cx.shared.bumps);
        let bump = bumps.of(run.bump);
        let mut last = key;
        let first = self.in_flight.next_key();
        self.fill(cx, &mut run, bump, key);
        while run.pieces > 0
            && !run.full
            && let Some(next) = self.joins(cx, &run, list)
            && next != last
        {
            self.fill(cx, &mut run, bump, next);
            last = next;
        }
        if run.unused {
            self.in_flight
                .drop_empty_batch(run.batch, &mut cx.shared.pool);
        } else if self.in_flight.has_batch(run.batch) {
            let used = if bump.is_sealed() { run.kept } else { run.at };
            self.in_flight
                .shrink_batch(run.batch, used, &mut cx.shared.pool);
        }
        if run.pieces > 0 {
            if run.scheduler == Scheduler::Redundant {
                self.note_copies(cx, link, run.batch, first);
            }
            let source = match bump.is_sealed() {
                true => Source::Scratch,
                false => Source::Batch(run.batch, run.at),
            };
            return Some(Out::by(&self.paths[link], run.stride, source));
        }
        if run.deferred {
            return self.send_delayed_trusted(cx);
        }
        None
    }

    /// Datagrams for what waits of a flow, and of those that may go along with it, about.
    fn wanted(&self, key: Key, list: List, mtu: usize) -> usize {
        let room = mtu - MOST_BESIDE;
        let conn = self.flows.get(key).expect("the caller has it");
        let mut wanted = conn.out.queue.bytes().div_ceil(room) + 1;
        if list == List::TrustedOnly {
            return wanted;
        }
        for other in self.fq.others(list).take(MAX_SEGMENTS) {
            if wanted >= MAX_SEGMENTS {
                break;
            }
            let conn = self.flows.get(other);
            wanted += conn.map_or(0, |conn| conn.out.queue.bytes().div_ceil(room));
        }
        wanted
    }

    /// The flow whose turn it is next, if what it has to send may go along in a run.
    fn joins(&mut self, cx: &SendCx<'_>, run: &Run, list: List) -> Option<Key> {
        if list == List::TrustedOnly {
            return None;
        }
        let key = self.next_flow(cx, list, &mut 0)?;
        let conn = self.flows.get_mut(key).expect("it was just seen");
        let fits = conn.bump == run.bump
            && scheduler(conn, cx.shared) == run.scheduler
            && (cx.shared.policy.hint.is_none() || kind(conn) == run.kind)
            && conn.out.secrets.is_some()
            && conn.out.queue.passes(cx.now, cx.patience);
        if !fits {
            return None;
        }
        let (strict, _) = self.is_strict(cx, key);
        (run.allowed || !strict).then_some(key)
    }

    /// Takes from a flow's queue into a run what it may send now.
    fn fill(&mut self, cx: &mut SendCx<'_>, run: &mut Run, bump: &Bump, key: Key) {
        let alone = self.fq.flows() == 1;
        let conn = self.flows.get_mut(key).expect("its turn was looked at");
        let open = conn.open_frame();
        let link = &mut self.paths[run.link];
        let mut cutter = Cutter {
            key,
            run,
            in_flight: &mut self.in_flight,
            delayed: &mut self.retransmit.trusted,
            guarded: bump.chain().map(Chain::guarded),
            bare: cx.session.integrity() == Integrity::Off
                && open.is_none()
                && bump.chain().is_some(),
            bump,
            link,
            open,
            sent: 0,
        };
        let held = self.fq.watch(&conn.out.queue);
        while let Some(mut head) = conn.out.queue.pop() {
            let segment = parsed(&head.buffer);
            let mut rest = Rest {
                left: head.left(),
                withheld: head.withheld,
                mss: head.mss,
            };
            if !cutter.cut(cx, &mut conn.out, &mut conn.stats, &segment, &mut rest) {
                (head.payload_at, head.withheld) = (head.end - rest.left, rest.withheld);
                conn.out.queue.put_back(head);
                break;
            }
            cx.shared.pool.give(head.buffer);
            // The next one goes along unless it is another's turn, or CoDel's.
            let turns = alone || conn.out.deficit > 0;
            if cutter.run.full || !turns || !conn.out.queue.passes(cx.now, cx.patience) {
                break;
            }
        }
        let (local, sent) = (cutter.link.local, cutter.sent);
        conn.by_path.entry(local).sent += sent;
        self.fq.settle(&held, &conn.out.queue);
    }
}

/// Datagrams of one path that go in one send, being filled.
pub(super) struct Run {
    /// Index of the path among the links.
    pub(super) link: usize,
    /// The path may carry what is for trusted ones.
    pub(super) allowed: bool,
    /// The bump of all that goes.
    pub(super) bump: u8,
    /// What all that goes is, if the user prefers a path.
    pub(super) kind: Kind,
    /// The scheduler of all that goes.
    pub(super) scheduler: Scheduler,
    pub(super) mtu: usize,
    /// Datagrams, at most.
    pub(super) most: usize,
    pub(super) batch: Key,
    /// Bytes of datagrams filled.
    pub(super) at: usize,
    /// Bytes of what is encrypted as they were, filled in the batch: the datagrams lie elsewhere.
    pub(super) kept: usize,
    /// Length of all datagrams but the last.
    pub(super) stride: usize,
    pub(super) pieces: usize,
    /// The batch holds no chunk.
    pub(super) unused: bool,
    /// Some were left to a trusted path.
    pub(super) deferred: bool,
    /// Nothing more fits.
    pub(super) full: bool,
}

/// Bytes that bring a datagram of `len` to the next of the lengths that an observer may see.
pub(super) fn padding(len: usize, mtu: usize) -> usize {
    let bucket = len.next_power_of_two().max(MIN_BUCKET);
    let bucket = if bucket > MAX_BUCKET {
        mtu
    } else {
        bucket.min(mtu)
    };
    bucket.saturating_sub(len)
}
