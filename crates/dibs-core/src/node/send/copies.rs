//! Copies of what one path was given, by the others: the `redundant` scheduler. The first that arrives counts.

use smallvec::SmallVec;

use super::context::SendCx;
use super::datagram::{MAX_SEGMENTS, Shape};
use super::retransmit::{is_stale, retransmit_chunks, shape};
use crate::chunk::{Content, Delayed, Placement};
use crate::counters::Counter;
use crate::node::out::Out;
use crate::node::paths::{Avoid, Kind, Wanted};
use crate::slab::Key;

/// Chunks that wait to be copied to a path, at most; the oldest goes for another one, for it has likely arrived
/// by a quicker path.
const MAX_COPIES: usize = 256;

/// Lets the other paths carry, too, what a run of `redundant` has just sent, as far as each chunk's placement allows:
/// the chunks of the batch that were added as `from` and later.
pub(super) fn note(cx: &mut SendCx<'_>, by: usize, batch: Key, from: Key) {
    let sent_in = |content: &Content| matches!(content, Content::Chunk(c) if c.batch == batch);
    for (key, pending) in cx.in_flight.since(from) {
        if !sent_in(&pending.content) {
            continue;
        }
        for at in cx
            .paths
            .carriers(&cx.shared.setup, pending.placement, Kind::New)
        {
            if at == by {
                continue;
            }
            let copies = &mut cx.paths[at].copies;
            if copies.len() == MAX_COPIES {
                copies.pop_front();
            }
            copies.push_back(Delayed { key, lost_by: None });
        }
    }
}

/// Sends copies by the first path that has room for them.
pub(super) fn send(cx: &mut SendCx<'_>) -> Option<Out> {
    (0..cx.paths.len()).find_map(|at| send_by(cx, at))
}

fn send_by(cx: &mut SendCx<'_>, at: usize) -> Option<Out> {
    let link = &mut cx.paths[at];
    if link.copies.is_empty() {
        return None;
    }
    let mut copies = std::mem::take(&mut link.copies);
    if !link.is_active(&cx.shared.setup) {
        return None;
    }
    let placement = Placement::Only(link.id);
    let mut out = None;
    while let Some(Delayed { key, .. }) = copies.front() {
        // A copy that this path does not take whole is not worth pieces, and by a path that the user keeps for when the
        // others are gone none goes once one of them is back.
        let Some(shape) = shape_of(cx, at, *key) else {
            copies.pop_front();
            continue;
        };
        let wanted = Wanted::alone(placement, shape.len(), Avoid::Nothing);
        let Some(carrier) = cx.choose(&wanted) else {
            break;
        };
        let first = copies.iter().take(MAX_SEGMENTS).map(|copy| copy.key);
        let keys: SmallVec<[Key; MAX_SEGMENTS]> = first.collect();
        let before = copies.len();
        out = retransmit_chunks(cx, carrier, &mut copies);
        for key in &keys[..before - copies.len()] {
            cx.shared.count(Counter::ChunkCopied);
            if let Some(pending) = cx.in_flight.get_mut(*key) {
                pending.copies = pending.copies.saturating_add(1);
            }
        }
        break;
    }
    cx.paths[at].copies = copies;
    out
}

fn shape_of(cx: &SendCx<'_>, at: usize, key: Key) -> Option<Shape> {
    let pending = cx.in_flight.get(key)?;
    let carriers = cx
        .paths
        .carriers(&cx.shared.setup, pending.placement, Kind::New);
    if !carriers.contains(&at) {
        return None;
    }
    match &pending.content {
        Content::Chunk(chunk) if !is_stale(cx.now, cx.flows, cx.in_flight, pending) => {
            shape(cx, at, chunk)
        }
        _ => None,
    }
}
