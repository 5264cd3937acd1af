//! Which choices peers are still to be told: they may not know of them, or have moved connections that they are to
//! put back. And what they are to be asked again for that rules here moved, of which they could not do their part.

use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;

use crate::conns::{Choice, Version};
use crate::messages::{Answer, Outcome, Unanswered};

/// Before a peer is told again.
pub const TELL_AGAIN: Duration = Duration::from_secs(1);

/// Dues to a connection's peer: it is to be told what stands for it, or asked again. Most have none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telling(Option<Box<Dues>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Dues {
    choice: Option<Due>,
    moved: Option<Moved>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    at: Time,
    /// Only of this choice; none: of whatever stands by then.
    version: Option<Version>,
}

/// Rules moved it, and the peer has not done its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moved {
    /// None: with the next session.
    at: Option<Time>,
    /// Where it is to be.
    bump: Option<BumpId>,
}

impl Telling {
    /// The peer has a new session: it is told at once all that stands, or will once what waits for its answer has come
    /// to something or nothing.
    pub fn tell_all(&mut self, now: Time) {
        self.begin(None, now);
    }

    /// The peer is told at once of a choice that is in force.
    pub fn tell(&mut self, version: Version, now: Time) {
        self.begin(Some(version), now);
    }

    /// The peer asked for what is older than what is in force here, so it does not know of that: it is told, unless
    /// a later choice comes of what it asks.
    pub fn tell_later(&mut self, in_force: Option<Choice>, now: Time) {
        if let Some(choice) = in_force {
            self.begin(Some(choice.version), now + TELL_AGAIN);
        }
    }

    fn begin(&mut self, version: Option<Version>, at: Time) {
        self.update(|dues| {
            let due = dues.choice.get_or_insert(Due { at, version });
            due.at = due.at.min(at);
            due.version = due.version.filter(|known| Some(*known) == version);
        });
    }

    fn update<R>(&mut self, change: impl FnOnce(&mut Dues) -> R) -> R {
        let mut dues = self.0.take().unwrap_or_default();
        let changed = change(&mut dues);
        self.0 = Some(dues).filter(|dues| **dues != Dues::default());
        changed
    }

    /// When the peer is to be told.
    pub fn due(&self) -> Option<Time> {
        self.0.as_ref()?.choice.map(|due| due.at)
    }

    /// When it is to be asked again for its part where rules moved the connection.
    pub fn moved_due(&self) -> Option<Time> {
        self.0.as_ref()?.moved?.at
    }

    /// Choice, of what is `known`, that the peer is to be told by now. It is not due any more until its
    /// [answer](Self::handle_answer). Behind a choice that is `asked`, and may come to nothing, it waits, too.
    pub fn take_due(&mut self, known: Option<Choice>, asked: bool, now: Time) -> Option<Choice> {
        let take = |dues: &mut Dues| {
            let due = dues.choice.take()?;
            if asked {
                let at = now + TELL_AGAIN;
                dues.choice = Some(Due { at, ..due });
                return None;
            }
            known.filter(|choice| due.version.is_none_or(|told| told == choice.version))
        };
        self.due().filter(|due| *due <= now)?;
        self.update(take)
    }

    /// Bump to which a rule moved the connection, if the peer is to be asked for its part again by now. It is not due
    /// any more until its [answer](Self::handle_moved). Behind a choice that is `asked`, it waits, too.
    pub fn take_moved(&mut self, asked: bool, now: Time) -> Option<Option<BumpId>> {
        let take = |dues: &mut Dues| {
            let moved = dues.moved.take()?;
            if asked {
                let at = Some(now + TELL_AGAIN);
                dues.moved = Some(Moved { at, ..moved });
                return None;
            }
            Some(moved.bump)
        };
        self.moved_due().filter(|due| *due <= now)?;
        self.update(take)
    }

    /// The peer has a new session: it is asked for what waited for that.
    pub fn handle_session(&mut self, now: Time) {
        if let Some(moved) = self.0.as_mut().and_then(|dues| dues.moved.as_mut()) {
            moved.at = Some(now);
        }
    }

    /// Takes the answer of the peer that was asked for its part because rules moved the connection. To a bump it is
    /// asked with each session anyway.
    pub fn handle_moved(&mut self, bump: Option<BumpId>, answer: Answer, now: Time) {
        let at = match answer {
            Ok((Outcome::Failed, _))
            | Err(Unanswered::Silent | Unanswered::Full | Unanswered::NotAsked) => {
                Some(Some(now + TELL_AGAIN))
            }
            Err(Unanswered::NoSession) if bump.is_none() => Some(None),
            _ => None,
        };
        self.update(|dues| dues.moved = at.map(|at| Moved { at, bump }));
    }

    /// Takes the answer of the peer that was told of a choice. Whatever else the peer refuses stays as it is there;
    /// without a session it is told with the next one. A rule of the peer that wants another bump is returned: the
    /// choice is to be given up for it.
    pub fn handle_answer(&mut self, version: Version, answer: Answer, now: Time) -> Option<u64> {
        match answer {
            // What it knows of may come to nothing, and what it could not do it may do later.
            Ok((Outcome::Older | Outcome::Failed, _))
            | Err(Unanswered::Silent | Unanswered::Full) => {
                self.begin(Some(version), now + TELL_AGAIN);
                None
            }
            Ok((Outcome::OwnRule, own)) => Some(own),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::{Chosen, Socket};

    const SOCKET: Socket = Socket(77);
    const START: Time = Time::from_nanos(1_000_000_000_000);
    const LATER: Time = Time::from_nanos(1_001_000_000_000);

    /// A choice that is in force.
    fn choose(chosen: &mut Chosen, bump: u8) -> Choice {
        chosen.propose(SOCKET, BumpId::new(bump), 7, 0)
    }

    #[test]
    fn a_peer_is_told_until_it_answers() {
        let (mut telling, mut chosen) = (Telling::default(), Chosen::default());
        let choice = choose(&mut chosen, 1);
        telling.tell(choice.version, START);
        for answer in [
            Err(Unanswered::Silent),
            Err(Unanswered::Full),
            Ok((Outcome::Older, 9)),
            Ok((Outcome::Failed, 1)),
        ] {
            assert_eq!(telling.take_due(chosen.get(), false, START), Some(choice));
            assert_eq!(telling.due(), None, "it was asked");
            let own = telling.handle_answer(choice.version, answer, START);
            assert_eq!((own, telling.due()), (None, Some(LATER)));
            telling.tell(choice.version, START);
        }
        for (answer, own) in [
            (Ok((Outcome::Done, 1)), None),
            (Ok((Outcome::NoConnection, 0)), None),
            (Err(Unanswered::NoSession), None),
            (Ok((Outcome::OwnRule, 3)), Some(3)),
        ] {
            telling.tell(choice.version, START);
            assert_eq!(telling.take_due(chosen.get(), false, START), Some(choice));
            let given = telling.handle_answer(choice.version, answer, START);
            assert_eq!((given, telling.due()), (own, None));
        }
    }

    #[test]
    fn who_asks_for_what_is_older_is_told_unless_something_comes_of_it() {
        let (mut telling, mut chosen) = (Telling::default(), Chosen::default());
        telling.tell_later(chosen.get(), START);
        assert_eq!(telling.due(), None, "nothing is chosen");
        let choice = choose(&mut chosen, 1);
        telling.tell_later(chosen.get(), START);
        assert_eq!(telling.take_due(chosen.get(), false, START), None);
        let mut other = (telling.clone(), chosen.clone());
        assert_eq!(telling.take_due(chosen.get(), false, LATER), Some(choice));
        choose(&mut other.1, 2);
        assert_eq!(other.0.take_due(other.1.get(), false, LATER), None);
        assert_eq!(other.0, Telling::default());
    }

    #[test]
    fn a_peer_is_asked_until_it_follows_a_rule() {
        let (mut telling, bump) = (Telling::default(), BumpId::new(1));
        for again in [
            Ok((Outcome::Failed, 0)),
            Err(Unanswered::Silent),
            Err(Unanswered::Full),
            Err(Unanswered::NotAsked),
        ] {
            telling.handle_moved(bump, again, START);
            assert_eq!(telling.take_moved(false, START), None);
            assert_eq!(telling.moved_due(), Some(LATER));
            assert_eq!(telling.take_moved(false, LATER), Some(bump));
            assert_eq!(telling, Telling::default(), "it was asked");
        }
        for (bump, answer, with_session) in [
            (bump, Ok((Outcome::Done, 0)), None),
            (bump, Ok((Outcome::OwnRule, 2)), None),
            (bump, Err(Unanswered::NoSession), None),
            (None, Err(Unanswered::NoSession), Some(None)),
        ] {
            telling.handle_moved(bump, Err(Unanswered::Silent), START);
            telling.handle_moved(bump, answer, START);
            assert_eq!(telling.moved_due(), None);
            telling.handle_session(LATER);
            assert_eq!(telling.take_moved(false, LATER), with_session);
            assert_eq!(telling, Telling::default());
        }
        // A choice may stand above it, once it is in force.
        telling.handle_moved(bump, Err(Unanswered::Silent), START);
        assert_eq!(telling.take_moved(true, LATER), None);
        assert_eq!(telling.moved_due(), Some(LATER + TELL_AGAIN));
        let later = LATER + TELL_AGAIN;
        assert_eq!(telling.take_moved(false, later), Some(bump));
        assert_eq!(telling, Telling::default());
    }

    /// The session was new while the peer was asked, who answered nothing.
    #[test]
    fn what_stands_once_a_choice_came_to_nothing_is_told_too() {
        let (mut telling, mut chosen) = (Telling::default(), Chosen::default());
        let before = choose(&mut chosen, 1);
        let later = chosen.propose(SOCKET, BumpId::new(2), 7, 0);
        telling.tell_all(START);
        assert_eq!(telling.take_due(chosen.get(), true, START), None);
        assert_eq!(telling.due(), Some(LATER));
        chosen.take_back(later.version, Some(before));
        assert_eq!(telling.take_due(chosen.get(), false, LATER), Some(before));
        // What was to be told alone is part of what stands.
        telling.tell_later(chosen.get(), START);
        telling.tell_all(START);
        let choice = choose(&mut chosen, 3);
        assert_eq!(telling.take_due(chosen.get(), false, START), Some(choice));
        assert_eq!(telling, Telling::default());
    }
}
