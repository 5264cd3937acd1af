//! Schedule of a flow: what is kept of it between its chunks by its rounds, its scheduler and the rules of trust.

use dibs_settings::Scheduler;

/// State of a flow by which its new data is shared out. Schedulers get it as numbers of what is wanted, and stay pure.
///
/// A flow takes part in the rounds (deficit round robin, RFC 8290) from [`begin`](Self::begin) to [`end`](Self::end).
// One type, so that its fields fill each other's gaps: tables have many.
#[derive(Debug, Default)]
pub struct FlowSchedule {
    /// Bytes until the next chunk that only trusted paths carry; below zero what went too far.
    until_trusted: i64,
    /// Bytes of the turn that are left. Below zero how many went too much: at most what a queue holds, by all paths at
    /// once.
    credit: i32,
    takes_part: bool,
    /// Scheduler of its own; none: that of all others.
    pub own: Option<Scheduler>,
}

impl FlowSchedule {
    /// Part in the rounds from now on, with a `quantum` to begin with; false if the flow has it already.
    pub const fn begin(&mut self, quantum: usize) -> bool {
        let begins = !self.takes_part;
        if begins {
            self.credit = quantum as i32;
            self.takes_part = true;
        }
        begins
    }

    /// Part in the rounds no more.
    pub const fn end(&mut self) {
        self.takes_part = false;
    }

    /// True if its turn is over.
    pub const fn is_spent(&self) -> bool {
        self.credit <= 0
    }

    /// Credit of one more round.
    pub const fn refill(&mut self, quantum: usize) {
        self.credit += quantum as i32;
    }

    /// Credit of so many bytes is used.
    pub const fn spend(&mut self, bytes: usize) {
        self.credit -= bytes as i32;
    }

    /// True if the next chunk goes by a trusted path come what may.
    pub const fn is_due(&self) -> bool {
        self.until_trusted <= 0
    }

    /// Chunk of `len` bytes goes. After one that was due, `next` draws the distance to the next one that will be: what
    /// others went beyond it is made up for.
    pub fn on_chunk(&mut self, len: usize, next: impl FnOnce() -> i64) {
        self.until_trusted += match self.is_due() {
            true => next(),
            false => -(len as i64),
        };
    }
}
