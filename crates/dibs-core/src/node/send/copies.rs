//! Copies of what one path was given, by the others: the `redundant` scheduler. The first that arrives counts.

use smallvec::SmallVec;

use super::datagram::MAX_SEGMENTS;
use super::retransmit::{is_stale, retransmit_chunks, shape};
use super::{CLEAR, SendCx};
use crate::chunk::{Content, Delayed};
use crate::counters::Counter;
use crate::node::out::Out;
use crate::node::paths::Kind;
use crate::path::Blocked;
use crate::session::TAG_LEN;
use crate::slab::Key;

/// Chunks that wait to be copied to a path, at most; the oldest goes for another one, for it has likely arrived
/// by a quicker path.
const MAX_COPIES: usize = 256;

/// What a run of `redundant` has just sent is to go by the other paths, too, as far as each chunk's placement allows: those of
/// the batch that were added as `from` and later.
pub(super) fn note(cx: &mut SendCx<'_>, by: usize, batch: Key, from: Key) {
    let sent_in = |content: &Content| matches!(content, Content::Chunk(c) if c.batch == batch);
    for (key, pending) in cx.in_flight.since(from) {
        if !sent_in(&pending.content) {
            continue;
        }
        for at in cx.paths.carriers(cx.shared, pending.placement, Kind::New) {
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
    if cx.paths[at].copies.is_empty() {
        return None;
    }
    let mut copies = std::mem::take(&mut cx.paths[at].copies);
    if !cx.paths[at].is_active(cx.shared) {
        return None;
    }
    let mut out = None;
    while out.is_none()
        && let Some(Delayed { key, .. }) = copies.front()
    {
        let chunk = match cx.in_flight.get(*key) {
            Some(pending) if !is_stale(cx.flows, cx.in_flight, pending) => &pending.content,
            _ => {
                copies.pop_front();
                continue;
            }
        };
        // A copy that this path does not take whole is not worth pieces.
        let shape = match chunk {
            Content::Chunk(chunk) => shape(cx, at, chunk),
            _ => None,
        };
        let Some(shape) = shape else {
            copies.pop_front();
            continue;
        };
        let wanted = shape.len().max(CLEAR + TAG_LEN);
        let budget = cx.paths[at].path.budget(cx.now, wanted);
        if budget < wanted {
            let blocked = cx.paths[at].path.blocked_until(cx.now, wanted);
            if let Blocked::Pacing(until) = blocked {
                cx.paths.wait_until(Some(until));
            }
            break;
        }
        let keys: SmallVec<[Key; MAX_SEGMENTS]> =
            copies.iter().take(MAX_SEGMENTS).map(|c| c.key).collect();
        let before = copies.len();
        out = retransmit_chunks(cx, (at, budget), &mut copies, 0);
        let sent = before - copies.len();
        for key in &keys[..sent] {
            cx.shared.count(Counter::ChunkCopied);
            if let Some(pending) = cx.in_flight.get_mut(*key) {
                pending.copies = pending.copies.saturating_add(1);
            }
        }
        if sent == 0 {
            break;
        }
    }
    cx.paths[at].copies = copies;
    out
}
