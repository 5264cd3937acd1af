//! Copies of what one path was given, by the others: the `redundant` scheduler. The first that arrives counts.

use smallvec::SmallVec;

use super::super::paths::Kind;
use super::super::peer::{Delayed, Out, Peer};
use super::run::MAX_SEGMENTS;
use super::{CLEAR, Turn};
use crate::chunk::Content;
use crate::counters::Counter;
use crate::session::TAG_LEN;
use crate::slab::Key;

/// Chunks that wait to be copied to a path, at most; the oldest goes for another one, for it has likely arrived
/// by a quicker path.
const MAX_COPIES: usize = 256;

impl Peer {
    /// What a run of `redundant` has just sent is to go by the other paths, too, as far as each chunk's placement allows: those of
    /// the batch that were added as `from` and later.
    pub(super) fn note_copies(&mut self, turn: &Turn<'_>, by: usize, batch: Key, from: Key) {
        let sent_in = |content: &Content| matches!(content, Content::Chunk(c) if c.batch == batch);
        for (key, pending) in self.waiting.since(from) {
            if !sent_in(&pending.content) {
                continue;
            }
            for at in self
                .paths
                .carriers(turn.shared, pending.placement, Kind::New)
            {
                if at == by {
                    continue;
                }
                let copies = &mut self.paths[at].copies;
                if copies.len() == MAX_COPIES {
                    copies.pop_front();
                }
                copies.push_back(Delayed { key, lost_by: None });
            }
        }
    }

    /// Sends copies by the first path that has room for them.
    pub(super) fn send_copies(&mut self, turn: &mut Turn<'_>) -> Option<Out> {
        (0..self.paths.len()).find_map(|at| self.send_copies_by(turn, at))
    }

    fn send_copies_by(&mut self, turn: &mut Turn<'_>, at: usize) -> Option<Out> {
        if self.paths[at].copies.is_empty() {
            return None;
        }
        let mut copies = std::mem::take(&mut self.paths[at].copies);
        if !self.paths[at].is_active(turn.shared) {
            return None;
        }
        let mut out = None;
        while out.is_none()
            && let Some(Delayed { key, .. }) = copies.front()
        {
            let chunk = match self.waiting.get(*key) {
                Some(pending) if !self.is_stale(pending) => &pending.content,
                _ => {
                    copies.pop_front();
                    continue;
                }
            };
            // A copy that this path does not take whole is not worth pieces.
            let shape = match chunk {
                Content::Chunk(chunk) => self.shape(turn.shared, at, chunk),
                _ => None,
            };
            let Some(shape) = shape else {
                copies.pop_front();
                continue;
            };
            let wanted = shape.len().max(CLEAR + TAG_LEN);
            let budget = self.paths[at].path.budget(turn.now, wanted);
            if budget < wanted {
                let blocked = self.paths[at].path.blocked_until(turn.now, wanted);
                if let crate::path::Blocked::Pacing(until) = blocked {
                    self.paths.wait_until(Some(until));
                }
                break;
            }
            let keys: SmallVec<[Key; MAX_SEGMENTS]> =
                copies.iter().take(MAX_SEGMENTS).map(|c| c.key).collect();
            let before = copies.len();
            out = self.send_chunks_again(turn, (at, budget), &mut copies, 0);
            let sent = before - copies.len();
            for key in &keys[..sent] {
                turn.shared.count(Counter::ChunkCopied);
                if let Some(pending) = self.waiting.get_mut(*key) {
                    pending.copies = pending.copies.saturating_add(1);
                }
            }
            if sent == 0 {
                break;
            }
        }
        self.paths[at].copies = copies;
        out
    }
}
