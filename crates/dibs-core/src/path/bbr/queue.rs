//! Whether a queue stands in the path.

use crate::time::Time;
use core::time::Duration;

/// For how long a queue is tolerated (and for at least a round): a pause of a busy host looks the same.
const TOLERATED: Duration = Duration::from_millis(20);

/// What a round says of the queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sign {
    None,
    /// A router has marked datagrams.
    Marked,
    /// It has been there for longer than is tolerated.
    Stands,
}

/// The queue that the rounds show.
#[derive(Debug)]
pub(super) struct Queue {
    /// Since when each round has had one.
    since: Option<Time>,
    /// It was drained for standing, and has not been away since.
    stood: bool,
    drained_at: Time,
    /// Routers have marked datagrams in this round (ECN).
    marked: bool,
}

impl Queue {
    pub(super) const fn new(now: Time) -> Self {
        Self {
            since: None,
            stood: false,
            drained_at: now,
            marked: false,
        }
    }

    pub(super) const fn on_marked(&mut self) {
        self.marked = true;
    }

    pub(super) const fn on_drained(&mut self, now: Time) {
        self.drained_at = now;
    }

    /// What was seen of it before says nothing any more.
    pub(super) const fn forget(&mut self) {
        self.since = None;
        self.stood = false;
    }

    /// It stands and something is to be done: whether that has been tried already.
    pub(super) const fn stands_again(&mut self) -> bool {
        self.stood = !self.stood;
        !self.stood
    }

    /// A round has ended that began at `started`; `drains`: the queue is on its way out, `queued`: the round's
    /// round trips show one.
    pub(super) fn on_round(
        &mut self,
        now: Time,
        started: Time,
        drains: bool,
        queued: bool,
    ) -> Sign {
        let marked = core::mem::take(&mut self.marked);
        if started < self.drained_at || drains {
            self.since = None;
            return Sign::None;
        }
        if marked {
            self.since = None;
            return Sign::Marked;
        }
        if !queued {
            self.forget();
            return Sign::None;
        }
        let since = *self.since.get_or_insert(started);
        if now.since(since) < TOLERATED {
            return Sign::None;
        }
        self.since = None;
        Sign::Stands
    }
}
