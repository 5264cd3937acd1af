//! How a sender stands to its losses, and what is kept of them.

use super::event::{NO_THRESHOLD, State};
use super::scoreboard::News;

/// Acknowledgements out of order that mean a loss, where nothing was ever reordered.
const DUPLICATES: u64 = 3;

/// What an acknowledgement brought.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signs {
    /// It acknowledges more than those before.
    pub(super) advanced: bool,
    /// The receiver's window ends further on.
    pub(super) opened: bool,
    /// Something came twice (D-SACK).
    pub(super) repeated: bool,
    /// TSecr.
    pub(super) echo: u32,
    pub(super) news: News,
}

#[derive(Debug)]
pub(super) struct Recovery {
    pub(super) state: State,
    /// What was new when it began: once all before is acknowledged, it is over.
    pub(super) high: u64,
    /// Reordering was seen.
    pub(super) reordered: bool,
    /// Segments that order may differ by before a loss is seen, as far as is known.
    pub(super) reordering: u64,
    /// RACK's window in quarters of the least round trip.
    pub(super) steps: u32,
    pub(super) steps_kept: u32,
    /// No wider again before what is sent after so much was delivered.
    pub(super) steps_round: u64,
    /// The reduction under way may be taken back.
    pub(super) undoable: bool,
    /// Segments sent again that have not been named as come twice; none if nothing was sent again.
    pub(super) undo_again: Option<u64>,
    /// The time stamp of the first that was sent again.
    pub(super) again_since: Option<u32>,
    pub(super) prior_threshold: u64,
    /// Of the rate reduction: delivered, and sent, since it began; the window then.
    pub(super) prr: (u64, u64, u64),
}

impl Default for Recovery {
    fn default() -> Self {
        Self {
            state: State::Open,
            high: 0,
            reordered: false,
            reordering: DUPLICATES,
            steps: 1,
            steps_kept: 0,
            steps_round: 0,
            undoable: false,
            undo_again: None,
            again_since: None,
            prior_threshold: NO_THRESHOLD,
            prr: (0, 0, 1),
        }
    }
}

impl Recovery {
    /// Whether more reordering is known than duplicates that mean a loss.
    pub(super) const fn reorders(&self) -> bool {
        self.reordering > DUPLICATES
    }

    /// So many segments are sent.
    pub(super) fn note_sent(&mut self, count: u64) {
        self.prr.1 += count;
    }

    /// So many segments are sent again.
    pub(super) fn note_again(&mut self, clock: u32, count: u64) {
        self.again_since.get_or_insert(clock);
        self.undo_again = Some(self.undo_again.unwrap_or(0) + count);
    }
}
