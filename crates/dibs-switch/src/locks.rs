//! Connections of which only what comes by their bump is taken: LOCKED (docs/switching.md).
//!
//! A connection is locked once both ends said that they send it by the bump, and what they sent in plain
//! before has had time to arrive; it is unlocked before either leaves. One end asks by a CONFIRM message about what
//! [stays](stays_on) on its bump, [`wants_asking`](Locks::wants_asking), and
//! [takes the answer](Locks::handle_answer); the other [answers](answer).

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

use crate::asking::Answer;
use crate::conns::{Choice, Choices, Pair, Socket};
use crate::messages::{Named, Outcome};

/// What both ends sent in plain before they were on the bump has arrived, or is lost.
pub const GRACE: Duration = Duration::from_secs(1);
/// Before a peer that is not on the bump is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The bump that a connection stays on that is `on` one by its mark: none if it is about to leave it, or not there
/// yet, by its choice. A rule that requires its bump stands above that.
pub fn stays_on(on: Option<u8>, choice: Option<Choice>, is_required: bool) -> Option<u8> {
    let is_there = |bump| choice.is_none_or(|choice| !choice.pending && choice.bump == bump);
    on.filter(|bump| is_required || is_there(*bump))
}

/// What this host knows of a connection that a CONFIRM names.
#[derive(Clone, Copy, Debug)]
pub struct Here {
    /// Its socket.
    pub socket: Socket,
    /// The bump that it [stays on](stays_on).
    pub stays_on: Option<u8>,
}

/// Answers a peer that has a connection on `bump` whether it is there at this end, too: then both ends know.
pub fn answer(bump: u8, named: &Named, here: Option<Here>) -> (Outcome, u64) {
    match here {
        None => (Outcome::NoConnection, 0),
        Some(here) if here.socket != named.socket => (Outcome::OtherSocket, here.socket.0.into()),
        Some(here) if here.stays_on == Some(bump) => (Outcome::Done, 0),
        Some(_) => (Outcome::Older, 0),
    }
}

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
    /// What the peer answered that was asked whether it has a connection on `bump`. `stays_on`: where this end has it
    /// by now. Without an answer there is nobody to confirm anything.
    pub fn handle_answer(
        &mut self,
        pair: Pair,
        bump: u8,
        answer: Answer,
        stays_on: Option<u8>,
        now: T,
    ) {
        match answer {
            Ok((Outcome::Done, _)) if stays_on == Some(bump) => self.confirm(pair, bump, now),
            Ok((Outcome::Done, _)) | Err(_) => {}
            Ok(_) => self.refuse(pair, bump, now),
        }
    }

    /// Both ends are on `bump`: this one [answered](answer) so.
    pub fn confirm(&mut self, pair: Pair, bump: u8, now: T) {
        let known = self.0.get(&pair).filter(|lock| lock.bump == bump);
        if known.is_none_or(|lock| matches!(lock.state, State::Refused(_))) {
            let state = State::Confirmed(now + GRACE);
            self.0.insert(pair, Lock { bump, state });
        }
    }

    /// The peer says that it is not on `bump`. That undoes no lock: it may have said so before it entered,
    /// and a late word of one bump says nothing of another.
    fn refuse(&mut self, pair: Pair, bump: u8, now: T) {
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

    /// Whether a connection that is about to go to a bump, or to plain (0), is to be released before: on a lock for
    /// another one something is known.
    pub fn holds_back(&self, pair: &Pair, bump: u8) -> bool {
        bump == 0 || self.is_elsewhere(pair, bump)
    }

    /// A connection is on `bump` from now on: a lock for another one is forgotten, which the peer may have confirmed
    /// once more since it was released. Whether there was one.
    pub fn enter(&mut self, pair: &Pair, bump: u8) -> bool {
        let was_elsewhere = self.is_elsewhere(pair, bump);
        if was_elsewhere {
            self.release(pair);
        }
        was_elsewhere
    }

    fn is_elsewhere(&self, pair: &Pair, bump: u8) -> bool {
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

    /// Forgets what is gone, and what is not `on` its bump any more, by its mark, nor chosen to be: the entry of a
    /// choice is made again where it was lost.
    pub fn sweep(
        &mut self,
        choices: &Choices,
        lives: impl Fn(&Pair) -> bool,
        on: impl Fn(&Pair) -> Option<u8>,
    ) {
        self.0.retain(|pair, lock| {
            let chosen = choices.get(pair).map(|choice| choice.bump);
            lives(pair) && [on(pair), chosen].contains(&Some(lock.bump))
        });
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asking::Unanswered;
    use crate::conns::tests::pair;

    const SOCKET: Socket = Socket(77);

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
        assert!(locks.is_locked(&pair(), 1));
    }

    #[test]
    fn what_goes_elsewhere_is_released_before_and_is_not_locked_there() {
        let (mut locks, start) = (Locks::<Duration>::default(), Duration::from_secs(1000));
        locks.confirm(pair(), 1, start);
        assert!(locks.holds_back(&pair(), 0) && locks.holds_back(&pair(), 2));
        assert!(!locks.holds_back(&pair(), 1) && !locks.enter(&pair(), 1));
        assert!(locks.enter(&pair(), 2) && locks == Locks::default());
        assert!(!locks.holds_back(&pair(), 2));
    }

    #[test]
    fn only_what_is_on_its_bump_or_chosen_to_be_stays_locked() {
        let mut choices = Choices::default();
        for (lives, on, chosen, stays) in [
            (true, Some(1), None, true),
            (true, None, Some(1), true),
            (true, Some(2), Some(3), false),
            (false, Some(1), Some(1), false),
        ] {
            let mut locks = Locks::<Duration>::default();
            locks.adopt(pair(), 1);
            choices.clear();
            if let Some(bump) = chosen {
                choices.propose(pair(), SOCKET, bump, 7, 0);
            }
            locks.sweep(&choices, |_| lives, |_| on);
            assert_eq!(locks.is_locked(&pair(), 1), stays);
        }
    }

    #[test]
    fn what_is_about_to_leave_or_not_there_yet_does_not_stay() {
        let mut choices = Choices::default();
        let chosen = |choices: &Choices| choices.get(&pair());
        assert_eq!(stays_on(None, None, false), None);
        assert_eq!(stays_on(Some(1), None, false), Some(1));
        let choice = choices.propose(pair(), SOCKET, 1, 7, 0);
        assert_eq!(stays_on(Some(1), chosen(&choices), false), None);
        assert_eq!(stays_on(Some(1), chosen(&choices), true), Some(1));
        choices.settle(&pair(), choice.version);
        assert_eq!(stays_on(Some(1), chosen(&choices), false), Some(1));
        assert_eq!(stays_on(Some(2), chosen(&choices), false), None);
    }

    #[test]
    fn both_ends_know_once_one_has_asked() {
        let named = Named {
            pair: pair().reversed(),
            socket: SOCKET,
        };
        let here = |socket, stays_on| Some(Here { socket, stays_on });
        let start = Duration::from_secs(1000);
        for (here, outcome) in [
            (None, (Outcome::NoConnection, 0)),
            (here(Socket(78), Some(1)), (Outcome::OtherSocket, 78)),
            (here(SOCKET, Some(2)), (Outcome::Older, 0)),
            (here(SOCKET, None), (Outcome::Older, 0)),
            (here(SOCKET, Some(1)), (Outcome::Done, 0)),
        ] {
            assert_eq!(answer(1, &named, here), outcome);
            let mut locks = Locks::<Duration>::default();
            locks.handle_answer(pair(), 1, Ok(outcome), Some(1), start);
            let confirmed = outcome.0 == Outcome::Done;
            assert_eq!(locks.next_due().is_some(), confirmed);
            assert!(!locks.wants_asking(&pair(), 1, start));
        }
        // It left while the peer was asked; or there was nobody.
        for (answer, stays_on) in [
            (Ok((Outcome::Done, 0)), None),
            (Err(Unanswered::Silent), Some(1)),
        ] {
            let mut locks = Locks::<Duration>::default();
            locks.handle_answer(pair(), 1, answer, stays_on, start);
            assert_eq!(locks, Locks::default());
        }
    }
}
