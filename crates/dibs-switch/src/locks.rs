//! Connections of which only what comes by their bump is taken: LOCKED (docs/switching.md).
//!
//! A connection is locked once both ends said that they send it by the bump, and what they sent in plain
//! before has had time to arrive; it is unlocked before either leaves.

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

use crate::conns::Pair;

/// What both ends sent in plain before they were on the bump has arrived, or is lost.
pub const GRACE: Duration = Duration::from_secs(1);
/// Before a peer that is not on the bump is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(2);

/// What is known of each connection's lock; `T` is what tells the time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locks<T = Instant>(BTreeMap<Pair, Lock<T>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lock<T> {
    bump: u8,
    state: State<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State<T> {
    /// The peer is not on the bump; it is not asked again before.
    Refused(T),
    /// The peer is on the bump too; locked from then on.
    Confirmed(T),
    Locked,
}

impl<T: Ord> Lock<T> {
    fn is_due(&self, now: T) -> bool {
        matches!(&self.state, State::Confirmed(at) if *at <= now)
    }
}

impl<T> Default for Locks<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Locks<T> {
    /// Both ends are on `bump`.
    pub fn confirm(&mut self, pair: Pair, bump: u8, now: T) {
        let known = self.0.get(&pair).filter(|lock| lock.bump == bump);
        if known.is_none_or(|lock| matches!(lock.state, State::Refused(_))) {
            let state = State::Confirmed(now + GRACE);
            self.0.insert(pair, Lock { bump, state });
        }
    }

    /// The peer says that it is not on `bump`. That undoes no lock: it may have said so before it entered,
    /// and a late word of one bump says nothing of another.
    pub fn refuse(&mut self, pair: Pair, bump: u8, now: T) {
        let known = self.0.get(&pair);
        if known.is_none_or(|lock| matches!(lock.state, State::Refused(_))) {
            let state = State::Refused(now + ASK_AGAIN);
            self.0.insert(pair, Lock { bump, state });
        }
    }

    /// The kernel has it locked since an earlier run.
    pub fn adopt(&mut self, pair: Pair, bump: u8) {
        let state = State::Locked;
        self.0.insert(pair, Lock { bump, state });
    }

    /// The connection is about to leave its bump, or has ended.
    pub fn release(&mut self, pair: &Pair) {
        self.0.remove(pair);
    }

    /// Whether a connection on `bump` is locked.
    pub fn is_locked(&self, pair: &Pair, bump: u8) -> bool {
        let lock = self.0.get(pair);
        lock.is_some_and(|lock| lock.bump == bump && lock.state == State::Locked)
    }

    /// All that are locked.
    pub fn locked(&self) -> impl Iterator<Item = Pair> {
        let locked = self
            .0
            .iter()
            .filter(|(_, lock)| lock.state == State::Locked);
        locked.map(|(pair, _)| *pair)
    }

    /// Whether anything is known of a lock for another bump than this.
    pub fn is_elsewhere(&self, pair: &Pair, bump: u8) -> bool {
        self.0.get(pair).is_some_and(|lock| lock.bump != bump)
    }

    /// Whether the peer should be asked if it is on `bump`.
    pub fn wants_asking(&self, pair: &Pair, bump: u8, now: T) -> bool {
        match self.0.get(pair) {
            Some(lock) if lock.bump == bump => match lock.state {
                State::Refused(until) => until <= now,
                State::Confirmed(_) | State::Locked => false,
            },
            _ => true,
        }
    }

    /// What is due by now.
    pub fn due(&self, now: T) -> impl Iterator<Item = Pair> {
        let due = self.0.iter().filter(move |(_, lock)| lock.is_due(now));
        due.map(|(pair, _)| *pair)
    }

    /// Locks what is due and still on its bump, and returns it; forgets what has left since it was confirmed.
    pub fn take_due(&mut self, now: T, is_on: impl Fn(&Pair, u8) -> bool) -> Vec<(Pair, u8)> {
        let mut locked = Vec::new();
        self.0.retain(|pair, lock| {
            if !lock.is_due(now) {
                return true;
            }
            lock.state = State::Locked;
            let stays = is_on(pair, lock.bump);
            if stays {
                locked.push((*pair, lock.bump));
            }
            stays
        });
        locked
    }

    /// When the next one is due.
    pub fn next_due(&self) -> Option<T> {
        let due = self.0.values().filter_map(|lock| match lock.state {
            State::Confirmed(at) => Some(at),
            State::Refused(_) | State::Locked => None,
        });
        due.min()
    }

    /// Forgets what is not on its bump any more.
    pub fn retain(&mut self, is_on: impl Fn(&Pair, u8) -> bool) {
        self.0.retain(|pair, lock| is_on(pair, lock.bump));
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    fn on(_: &Pair, _: u8) -> bool {
        true
    }

    #[test]
    fn a_lock_takes_both_ends_and_a_while() {
        let (mut locks, start) = (Locks::<Duration>::default(), Duration::from_secs(1000));
        assert!(locks.wants_asking(&pair(), 1, start));
        locks.confirm(pair(), 1, start);
        assert!(!locks.wants_asking(&pair(), 1, start));
        let due = start + GRACE;
        assert_eq!(locks.next_due(), Some(due));
        assert_eq!(locks.take_due(due - Duration::from_nanos(1), on), []);
        assert!(!locks.is_locked(&pair(), 1));
        // Said again: it does not begin anew.
        locks.confirm(pair(), 1, start + GRACE / 2);
        assert_eq!(locks.take_due(due, on), [(pair(), 1)]);
        assert!(locks.is_locked(&pair(), 1) && !locks.is_locked(&pair(), 2));
        assert_eq!(locks.next_due(), None);
    }

    #[test]
    fn what_leaves_in_between_is_not_locked() {
        let (mut locks, start) = (Locks::<Duration>::default(), Duration::from_secs(1000));
        locks.confirm(pair(), 1, start);
        locks.release(&pair());
        assert_eq!(locks.take_due(start + GRACE, on), []);
        // Nor by the time of an earlier stay.
        locks.confirm(pair(), 1, start + GRACE / 2);
        assert_eq!(locks.take_due(start + GRACE, on), []);
    }

    #[test]
    fn what_left_while_it_was_confirmed_is_not_locked_but_forgotten() {
        let (mut locks, start) = (Locks::<Duration>::default(), Duration::from_secs(1000));
        locks.confirm(pair(), 1, start);
        assert!(locks.due(start).next().is_none());
        assert_eq!(locks.due(start + GRACE).next(), Some(pair()));
        assert_eq!(locks.take_due(start + GRACE, |_, _| false), []);
        assert_eq!(locks, Locks::default());
    }

    #[test]
    fn a_refusal_stands_for_a_while_and_against_no_confirmation() {
        let (mut locks, start) = (Locks::<Duration>::default(), Duration::from_secs(1000));
        locks.refuse(pair(), 1, start);
        assert!(!locks.wants_asking(&pair(), 1, start));
        assert!(locks.wants_asking(&pair(), 1, start + ASK_AGAIN));
        locks.confirm(pair(), 1, start);
        assert_eq!(locks.take_due(start + GRACE, on), [(pair(), 1)]);
        locks.refuse(pair(), 1, start + GRACE);
        assert!(
            locks.is_locked(&pair(), 1),
            "the peer said so before it left"
        );
        // It was asked about another bump before the connection came to this one (seed 630673).
        locks.refuse(pair(), 2, start + GRACE);
        assert!(locks.is_locked(&pair(), 1) && locks.is_elsewhere(&pair(), 2));
        assert!(locks.is_elsewhere(&pair(), 2) && !locks.is_elsewhere(&pair(), 1));
        locks.retain(|_, bump| bump != 1);
        assert_eq!(locks, Locks::default());
    }
}
