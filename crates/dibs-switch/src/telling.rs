//! Which choices peers are still to be told: they may not know of them, or have moved connections that they are to
//! put back.

use std::time::Duration;

use dibs_core::Time;

use crate::conns::{Choice, Version};
use crate::messages::{Answer, Outcome, Unanswered};

/// Before a peer is told again.
pub const TELL_AGAIN: Duration = Duration::from_secs(1);

/// Whether a connection's peer is to be told what stands for it: most are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Telling(Option<Box<Due>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    at: Time,
    /// Only of this choice; none: of whatever stands by then.
    version: Option<Version>,
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
    pub fn tell_later(&mut self, known: Option<Choice>, now: Time) {
        if let Some(choice) = known.filter(|choice| !choice.pending) {
            self.begin(Some(choice.version), now + TELL_AGAIN);
        }
    }

    fn begin(&mut self, version: Option<Version>, at: Time) {
        let due = { &mut self.0 }.get_or_insert_with(|| Box::new(Due { at, version }));
        due.at = due.at.min(at);
        due.version = due.version.filter(|known| Some(*known) == version);
    }

    /// When it is due.
    pub fn due(&self) -> Option<Time> {
        self.0.as_ref().map(|due| due.at)
    }

    /// What the peer is to be told by now, of what is `known`; it is not due any more, until its
    /// [answer](Self::handle_answer). Behind a choice that waits, and may come to nothing, it waits, too.
    pub fn take_due(&mut self, known: Option<Choice>, now: Time) -> Option<Choice> {
        let mut due = self.0.take_if(|due| due.at <= now)?;
        match known {
            Some(choice) if choice.pending => {
                due.at = now + TELL_AGAIN;
                self.0 = Some(due);
                None
            }
            known => known.filter(|choice| due.version.is_none_or(|told| told == choice.version)),
        }
    }

    /// What the peer answered that was told of a choice. What else it refuses stays as it is there; and without a
    /// session it is told with the next one. A rule of the peer that wants another bump is returned: the
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
    use dibs_settings::BumpId;

    use super::*;
    use crate::conns::{Chosen, Socket};

    const SOCKET: Socket = Socket(77);
    const START: Time = Time::from_nanos(1_000_000_000_000);
    const LATER: Time = Time::from_nanos(1_001_000_000_000);

    /// A choice that is in force.
    fn choose(chosen: &mut Chosen, bump: u8) -> Choice {
        let version = chosen.propose(SOCKET, BumpId::new(bump), 7, 0).version;
        chosen.settle(version);
        chosen.get().expect("it was just made")
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
            assert_eq!(telling.take_due(chosen.get(), START), Some(choice));
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
            assert_eq!(telling.take_due(chosen.get(), START), Some(choice));
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
        assert_eq!(telling.take_due(chosen.get(), START), None);
        let mut other = (telling.clone(), chosen.clone());
        assert_eq!(telling.take_due(chosen.get(), LATER), Some(choice));
        choose(&mut other.1, 2);
        assert_eq!(other.0.take_due(other.1.get(), LATER), None);
        assert_eq!(other.0, Telling::default());
    }

    /// The session was new while the peer was asked, who answered nothing.
    #[test]
    fn what_stands_once_a_choice_came_to_nothing_is_told_too() {
        let (mut telling, mut chosen) = (Telling::default(), Chosen::default());
        let before = choose(&mut chosen, 1);
        let later = chosen.propose(SOCKET, BumpId::new(2), 7, 0);
        telling.tell_all(START);
        assert_eq!(telling.take_due(chosen.get(), START), None);
        assert_eq!(telling.due(), Some(LATER));
        chosen.take_back(later.version, Some(before));
        assert_eq!(telling.take_due(chosen.get(), LATER), Some(before));
        // What was to be told alone is part of what stands.
        telling.tell_later(chosen.get(), START);
        telling.tell_all(START);
        let choice = choose(&mut chosen, 3);
        assert_eq!(telling.take_due(chosen.get(), START), Some(choice));
        assert_eq!(telling, Telling::default());
    }
}
