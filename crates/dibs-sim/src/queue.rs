//! What is under way, in the order in which it arrives.

use std::collections::BTreeMap;

use dibs_core::Time;

/// By the time of arrival; of what arrives at once, what was sent first comes first.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    due: BTreeMap<(Time, u64), T>,
    sent: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            due: BTreeMap::new(),
            sent: 0,
        }
    }
}

impl<T> Queue<T> {
    pub(crate) fn push(&mut self, at: Time, arrival: T) {
        self.sent += 1;
        self.due.insert((at, self.sent), arrival);
    }

    /// When something arrives next.
    pub(crate) fn next(&self) -> Option<Time> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// What has arrived by `now`.
    pub(crate) fn take(&mut self, now: Time) -> Option<T> {
        self.next().filter(|at| *at <= now)?;
        self.due.pop_first().map(|(_, arrival)| arrival)
    }
}
