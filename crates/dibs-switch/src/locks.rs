//! Connections of which only what comes by their bump is taken: LOCKED (docs/switching.md).
//!
//! A connection is locked once both ends said that they send it by the bump, and what they sent in plain
//! before has had time to arrive; it is unlocked before either leaves. One end asks by a CONFIRM message about what
//! [stays](crate::rules::Ruling::stays_on) on its bump, [`wants_asking`](Lock::wants_asking), and
//! [takes the answer](Lock::handle_answer); the other [answers](answer).

use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;

use crate::conns::Socket;
use crate::messages::{Answer, Named, Outcome};
use crate::tracked::{Entry, Mend};

/// Time after which bytes that both ends sent in plain before they were on the bump have arrived, or are lost.
pub const GRACE: Duration = Duration::from_secs(1);
/// Before a peer that is not on the bump is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Knowledge of this host about a connection that a CONFIRM names.
#[derive(Clone, Copy, Debug)]
pub struct Here {
    /// Its socket.
    pub socket: Socket,
    /// The bump that it [stays on](crate::rules::Ruling::stays_on).
    pub stays_on: Option<BumpId>,
}

/// Answers a peer that has a connection on `bump` whether it is there at this end, too: then both ends know.
pub fn answer(bump: BumpId, named: &Named, here: Option<Here>) -> (Outcome, u64) {
    match here {
        None => (Outcome::NoConnection, 0),
        Some(here) if here.socket != named.socket => (Outcome::OtherSocket, here.socket.0.into()),
        Some(here) if here.stays_on == Some(bump) => (Outcome::Done, 0),
        Some(_) => (Outcome::Older, 0),
    }
}

/// State of a connection's lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lock(State);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Nothing is known.
    #[default]
    Open,
    /// The peer is asked whether it is on the bump too.
    Asked { bump: BumpId },
    /// The peer is not on the bump; it is not asked again before.
    Refused { bump: BumpId, until: Time },
    /// The peer is on the bump too; locked from then on.
    Confirmed { bump: BumpId, at: Time },
    /// Locked on the bump.
    Locked { bump: BumpId },
    /// Locked on the bump by an earlier run, or with one of the peer; the peer may have left it since.
    Adopted { bump: BumpId },
}

impl Lock {
    /// Takes the answer of the peer to the question whether it has the connection on `bump`. `stays_on`: where this end
    /// has it by now. Without an answer nobody confirms anything, nor by one that was overtaken: the lock was
    /// [released](Self::release) since the peer was asked. True if the kernel is to be told that it is locked no more.
    pub fn handle_answer(
        &mut self,
        bump: BumpId,
        answer: Answer,
        stays_on: Option<BumpId>,
        now: Time,
    ) -> bool {
        let was = self.locked();
        match answer {
            Ok((Outcome::Done, _)) if stays_on == Some(bump) && self.bump() == Some(bump) => {
                self.confirm(bump, now);
            }
            Ok((Outcome::Done, _)) | Err(_) => {
                if self.0 == (State::Asked { bump }) {
                    self.release();
                }
            }
            Ok(_) => self.refuse(bump, now),
        }
        was != self.locked()
    }

    /// The peer is about to be asked whether it has the connection on `bump`.
    pub fn ask(&mut self, bump: BumpId) {
        if self.is_unconfirmed() {
            self.0 = State::Asked { bump };
        }
    }

    /// Both ends are on `bump`: this one [answered](answer) so.
    pub fn confirm(&mut self, bump: BumpId, now: Time) {
        if self.0 == (State::Adopted { bump }) {
            self.0 = State::Locked { bump };
        } else if self.bump() != Some(bump) || self.is_unconfirmed() {
            let at = now + GRACE;
            self.0 = State::Confirmed { bump, at };
        }
    }

    /// The peer says that it is not on `bump`. That undoes no lock of this run: it may have said so before it entered,
    /// and a late word of one bump says nothing of another.
    fn refuse(&mut self, bump: BumpId, now: Time) {
        if self.is_unconfirmed() || self.0 == (State::Adopted { bump }) {
            let until = now + ASK_AGAIN;
            self.0 = State::Refused { bump, until };
        }
    }

    fn is_unconfirmed(&self) -> bool {
        matches!(
            self.0,
            State::Open | State::Asked { .. } | State::Refused { .. }
        )
    }

    /// The bump that something is known of.
    pub(crate) fn bump(&self) -> Option<BumpId> {
        match self.0 {
            State::Open => None,
            State::Asked { bump }
            | State::Refused { bump, .. }
            | State::Confirmed { bump, .. }
            | State::Locked { bump }
            | State::Adopted { bump } => Some(bump),
        }
    }

    /// The kernel has it locked since an earlier run.
    pub fn adopt(&mut self, bump: BumpId) {
        self.0 = State::Adopted { bump };
    }

    /// The peer restarted: whatever it said, it may have left the bump since (seed 54000002147).
    pub fn handle_restart(&mut self) {
        match self.0 {
            State::Locked { bump } => self.0 = State::Adopted { bump },
            State::Confirmed { .. } => self.release(),
            _ => {}
        }
    }

    /// The connection is about to leave its bump, or has ended.
    pub fn release(&mut self) {
        *self = Self::default();
    }

    /// Bump on which it is locked.
    pub fn locked(&self) -> Option<BumpId> {
        match self.0 {
            State::Locked { bump } | State::Adopted { bump } => Some(bump),
            _ => None,
        }
    }

    /// True if a connection that is about to go to a bump, or to plain, is to be released before, because a lock for
    /// another bump is known.
    pub fn holds_back(&self, bump: Option<BumpId>) -> bool {
        bump.is_none() || self.is_elsewhere(bump)
    }

    /// The connection is on this bump, or on none, from now on: a lock for another one is forgotten, which the peer may have confirmed
    /// once more since it was released. Whether there was one.
    pub fn enter(&mut self, bump: Option<BumpId>) -> bool {
        let was_elsewhere = self.is_elsewhere(bump);
        if was_elsewhere {
            self.release();
        }
        was_elsewhere
    }

    fn is_elsewhere(&self, bump: Option<BumpId>) -> bool {
        self.bump().is_some() && self.bump() != bump
    }

    /// True if the peer should be asked if it is on `bump`.
    pub fn wants_asking(&self, bump: BumpId, now: Time) -> bool {
        match self.0 {
            _ if self.bump() != Some(bump) => true,
            State::Open | State::Asked { .. } | State::Adopted { .. } => true,
            State::Refused { until, .. } => until <= now,
            State::Confirmed { .. } | State::Locked { .. } => false,
        }
    }

    /// When it is to be locked, if both ends wait for that.
    pub fn due(&self) -> Option<Time> {
        match self.0 {
            State::Confirmed { at, .. } => Some(at),
            _ => None,
        }
    }

    /// Locks what is due by now and still on its bump, which is returned; forgets what has left since it was confirmed.
    pub fn lock_due(&mut self, now: Time, is_on: impl Fn(BumpId) -> bool) -> Option<BumpId> {
        let State::Confirmed { bump, at } = self.0 else {
            return None;
        };
        if at > now {
            return None;
        }
        match is_on(bump) {
            true => self.0 = State::Locked { bump },
            false => self.release(),
        }
        self.locked()
    }

    /// Correction of the entry that conntrack has of it. `lives`: there is a socket of it here, and neither end has
    /// begun to end it, or one has.
    pub fn mend(&self, Entry { mark, closed, .. }: Entry, lives: Option<bool>) -> Option<Mend> {
        match lives {
            Some(_) if !mark.locked => {
                let locked = self.locked().filter(|bump| Some(*bump) == mark.bump);
                locked.map(Mend::Lock)
            }
            Some(established) => (established && closed).then_some(Mend::Revive),
            None => mark.locked.then_some(Mend::Unlock),
        }
    }

    /// True if it is for any of these bumps.
    pub fn is_for(&self, bumps: [Option<BumpId>; 2]) -> bool {
        self.bump().is_some() && bumps.contains(&self.bump())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::{bump, pair};
    use crate::marks::SeenMark;
    use crate::messages::Unanswered;

    const SOCKET: Socket = Socket(77);
    const START: Time = Time::from_nanos(1_000_000_000_000);

    fn on(_: BumpId) -> bool {
        true
    }

    #[test]
    fn a_lock_takes_both_ends_and_a_while() {
        let mut lock = Lock::default();
        assert!(lock.wants_asking(bump(1), START));
        lock.confirm(bump(1), START);
        assert!(!lock.wants_asking(bump(1), START));
        let due = START + GRACE;
        assert_eq!(lock.due(), Some(due));
        assert_eq!(lock.lock_due(due - Duration::from_nanos(1), on), None);
        assert_eq!(lock.locked(), None);
        // Said again: it does not begin anew.
        lock.confirm(bump(1), START + GRACE / 2);
        assert_eq!(lock.lock_due(due, on), BumpId::new(1));
        assert_eq!(lock.locked(), BumpId::new(1));
        assert_eq!(lock.due(), None);
    }

    #[test]
    fn what_leaves_in_between_is_not_locked() {
        let mut lock = Lock::default();
        lock.confirm(bump(1), START);
        lock.release();
        assert_eq!(lock.lock_due(START + GRACE, on), None);
        // Nor by the time of an earlier stay.
        lock.confirm(bump(1), START + GRACE / 2);
        assert_eq!(lock.lock_due(START + GRACE, on), None);
    }

    #[test]
    fn an_answer_from_before_a_release_confirms_nothing() {
        let mut lock = Lock::default();
        lock.ask(bump(1));
        lock.release();
        let answer = Ok((Outcome::Done, 0));
        assert!(!lock.handle_answer(bump(1), answer, BumpId::new(1), START));
        assert_eq!(lock, Lock::default());
    }

    #[test]
    fn what_left_while_it_was_confirmed_is_not_locked_but_forgotten() {
        let mut lock = Lock::default();
        lock.confirm(bump(1), START);
        assert_eq!(lock.due(), Some(START + GRACE));
        assert_eq!(lock.lock_due(START + GRACE, |_| false), None);
        assert_eq!(lock, Lock::default());
    }

    #[test]
    fn a_refusal_stands_for_a_while_and_against_no_confirmation() {
        let mut lock = Lock::default();
        lock.refuse(bump(1), START);
        assert!(!lock.wants_asking(bump(1), START));
        assert!(lock.wants_asking(bump(1), START + ASK_AGAIN));
        lock.confirm(bump(1), START);
        assert_eq!(lock.lock_due(START + GRACE, on), BumpId::new(1));
        lock.refuse(bump(1), START + GRACE);
        assert_eq!(
            lock.locked(),
            BumpId::new(1),
            "the peer said so before it left"
        );
        // It was asked about another bump before the connection came to this one (seed 630673).
        lock.refuse(bump(2), START + GRACE);
        assert_eq!(lock.locked(), BumpId::new(1));
    }

    /// Both daemons were killed while the peer left the bump (seed 360009232).
    #[test]
    fn a_lock_of_an_earlier_run_is_asked_about_and_goes_if_the_peer_has_left() {
        let adopted = || {
            let mut lock = Lock::default();
            lock.adopt(bump(1));
            assert!(lock.wants_asking(bump(1), START));
            lock
        };
        let stays_on = BumpId::new(1);
        for (answer, goes, asks) in [
            (Ok((Outcome::Done, 0)), false, false),
            (Ok((Outcome::Older, 0)), true, false),
            (Err(Unanswered::Silent), false, true),
        ] {
            let mut lock = adopted();
            assert_eq!(lock.handle_answer(bump(1), answer, stays_on, START), goes);
            assert_eq!(lock.locked().is_none(), goes);
            assert_eq!(lock.wants_asking(bump(1), START), asks);
        }
    }

    #[test]
    fn a_peer_that_restarted_is_asked_again_and_its_no_opens_the_lock() {
        let mut lock = Lock::default();
        lock.confirm(bump(1), START);
        lock.handle_restart();
        assert_eq!(lock, Lock::default(), "it is not locked yet");
        lock.confirm(bump(1), START);
        lock.lock_due(START + GRACE, on);
        lock.handle_restart();
        assert_eq!(lock.locked(), BumpId::new(1), "until the peer has answered");
        assert!(lock.wants_asking(bump(1), START));
        let no = Ok((Outcome::Older, 0));
        assert!(lock.handle_answer(bump(1), no, BumpId::new(1), START));
        assert_eq!(lock.locked(), None);
    }

    #[test]
    fn what_goes_elsewhere_is_released_before_and_is_not_locked_there() {
        let mut lock = Lock::default();
        lock.confirm(bump(1), START);
        assert!(lock.holds_back(None) && lock.holds_back(BumpId::new(2)));
        assert!(!lock.holds_back(BumpId::new(1)) && !lock.enter(BumpId::new(1)));
        assert!(lock.enter(BumpId::new(2)) && lock == Lock::default());
        assert!(!lock.holds_back(BumpId::new(2)));
    }

    #[test]
    fn an_entry_is_locked_by_our_record_revived_while_it_lives_and_unlocked_when_it_has_ended() {
        let mut lock = Lock::default();
        lock.adopt(bump(1));
        let entry = |number, locked, closed| {
            let mark = SeenMark {
                bump: BumpId::new(number),
                chosen: false,
                locked,
                carried: true,
                told: true,
            };
            let finished = false;
            Entry {
                mark,
                closed,
                finished,
            }
        };
        for (entry, lives, mend) in [
            (
                entry(1, false, false),
                Some(true),
                Some(Mend::Lock(bump(1))),
            ),
            (
                entry(1, false, true),
                Some(false),
                Some(Mend::Lock(bump(1))),
            ),
            (entry(2, false, false), Some(true), None),
            (entry(1, true, false), Some(true), None),
            (entry(1, true, true), Some(true), Some(Mend::Revive)),
            (entry(1, true, true), Some(false), None),
            (entry(1, true, true), None, Some(Mend::Unlock)),
            (entry(1, false, false), None, None),
        ] {
            assert_eq!(lock.mend(entry, lives), mend, "{entry:?} {lives:?}");
        }
        lock.release();
        assert_eq!(lock.mend(entry(1, false, false), Some(true)), None);
        assert_eq!(lock.mend(entry(0, false, false), Some(true)), None);
    }

    #[test]
    fn both_ends_know_once_one_has_asked() {
        let named = Named {
            pair: pair().reversed(),
            socket: SOCKET,
        };
        let here = |socket, stays_on| Some(Here { socket, stays_on });
        for (here, outcome) in [
            (None, (Outcome::NoConnection, 0)),
            (here(Socket(78), BumpId::new(1)), (Outcome::OtherSocket, 78)),
            (here(SOCKET, BumpId::new(2)), (Outcome::Older, 0)),
            (here(SOCKET, None), (Outcome::Older, 0)),
            (here(SOCKET, BumpId::new(1)), (Outcome::Done, 0)),
        ] {
            assert_eq!(answer(bump(1), &named, here), outcome);
            let mut lock = Lock::default();
            lock.ask(bump(1));
            assert!(!lock.handle_answer(bump(1), Ok(outcome), BumpId::new(1), START));
            let confirmed = outcome.0 == Outcome::Done;
            assert_eq!(lock.due().is_some(), confirmed);
            assert!(!lock.wants_asking(bump(1), START));
        }
        // It left while the peer was asked; or there was nobody.
        for (answer, stays_on) in [
            (Ok((Outcome::Done, 0)), None),
            (Err(Unanswered::Silent), BumpId::new(1)),
        ] {
            let mut lock = Lock::default();
            lock.ask(bump(1));
            assert!(!lock.handle_answer(bump(1), answer, stays_on, START));
            assert_eq!(lock, Lock::default());
        }
    }
}
