//! Which choices peers are still to be told: they may not know of them, or have moved connections that they are to
//! put back.

use std::collections::BTreeMap;
use std::ops::Add;
use std::time::{Duration, Instant};

use crate::asking::{Answer, Unanswered};
use crate::conns::{Choice, Choices, Pair, Version};
use crate::messages::Outcome;

/// Before a peer is told again.
pub const TELL_AGAIN: Duration = Duration::from_secs(1);

/// The connections whose peers are to be told what stands for them; `T` is what tells the time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tellings<T = Instant>(BTreeMap<Pair, Telling<T>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Telling<T> {
    at: T,
    /// Only of this choice; none: of whatever stands by then.
    version: Option<Version>,
}

impl<T> Default for Tellings<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Copy + Ord + Add<Duration, Output = T>> Tellings<T> {
    /// The peer of these connections has a new session: it is told at once all that stands for them, or will
    /// once what waits for its answer has come to something or nothing.
    pub fn tell_all(&mut self, pairs: impl IntoIterator<Item = Pair>, now: T) {
        for pair in pairs {
            self.begin(pair, None, now);
        }
    }

    /// The peer is told at once of a choice that is in force.
    pub fn tell(&mut self, pair: Pair, choice: Choice, now: T) {
        self.begin(pair, Some(choice.version), now);
    }

    /// The peer asked for what is older than what is in force here, so it does not know of that: it is told, unless
    /// a later choice comes of what it asks.
    pub fn tell_later(&mut self, pair: Pair, choices: &Choices, now: T) {
        let known = choices.get(&pair).filter(|choice| !choice.pending);
        if let Some(choice) = known {
            self.begin(pair, Some(choice.version), now + TELL_AGAIN);
        }
    }

    fn begin(&mut self, pair: Pair, version: Option<Version>, at: T) {
        let telling = self.0.entry(pair).or_insert(Telling { at, version });
        telling.at = telling.at.min(at);
        telling.version = telling.version.filter(|known| Some(*known) == version);
    }

    /// When the next one is due.
    pub fn next_due(&self) -> Option<T> {
        self.0.values().map(|telling| telling.at).min()
    }

    /// What is to be told by now of the connections that are `meant`; it is not due any more, until its
    /// [answer](Self::handle_answer). Behind a choice that waits, and may come to nothing, it waits, too.
    pub fn take_due(
        &mut self,
        choices: &Choices,
        now: T,
        meant: impl Fn(&Pair) -> bool,
    ) -> Vec<(Pair, Choice)> {
        let mut told = Vec::new();
        self.0.retain(|pair, telling| {
            if telling.at > now || !meant(pair) {
                return true;
            }
            match choices.get(pair) {
                Some(choice) if choice.pending => {
                    telling.at = now + TELL_AGAIN;
                    return true;
                }
                Some(choice) if telling.version.is_none_or(|told| told == choice.version) => {
                    told.push((*pair, choice));
                }
                _ => {}
            }
            false
        });
        told
    }

    /// What the peer answered that was told of a choice. What else it refuses stays as it is there; and without a
    /// session it is told with the next one. A rule of the peer that wants another bump is returned: the
    /// choice is to be given up for it.
    pub fn handle_answer(
        &mut self,
        pair: Pair,
        version: Version,
        answer: Answer,
        now: T,
    ) -> Option<u64> {
        match answer {
            // What it knows of may come to nothing, and what it could not do it may do later.
            Ok((Outcome::Older | Outcome::Failed, _))
            | Err(Unanswered::Silent | Unanswered::Full) => {
                self.begin(pair, Some(version), now + TELL_AGAIN);
                None
            }
            Ok((Outcome::OwnRule, own)) => Some(own),
            _ => None,
        }
    }

    /// Forgets a connection that is gone.
    pub fn forget(&mut self, pair: &Pair) {
        self.0.remove(pair);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::Socket;
    use crate::conns::tests::pair;

    const SOCKET: Socket = Socket(77);
    const START: Duration = Duration::from_secs(1000);
    const LATER: Duration = Duration::from_secs(1001);

    /// A choice that is in force.
    fn choose(choices: &mut Choices, bump: u8) -> Choice {
        let version = choices.propose(pair(), SOCKET, bump, 7, 0).version;
        choices.settle(&pair(), version);
        choices.get(&pair()).expect("it was just made")
    }

    fn due(
        tellings: &mut Tellings<Duration>,
        choices: &Choices,
        now: Duration,
    ) -> Vec<(Pair, Choice)> {
        tellings.take_due(choices, now, |_| true)
    }

    #[test]
    fn a_peer_is_told_until_it_answers() {
        let (mut tellings, mut choices) = (Tellings::default(), Choices::default());
        let choice = choose(&mut choices, 1);
        tellings.tell(pair(), choice, START);
        assert_eq!(tellings.take_due(&choices, START, |_| false), []);
        for answer in [
            Err(Unanswered::Silent),
            Err(Unanswered::Full),
            Ok((Outcome::Older, 9)),
            Ok((Outcome::Failed, 1)),
        ] {
            assert_eq!(due(&mut tellings, &choices, START), [(pair(), choice)]);
            assert_eq!(tellings.next_due(), None, "it was asked");
            let own = tellings.handle_answer(pair(), choice.version, answer, START);
            assert_eq!((own, tellings.next_due()), (None, Some(LATER)));
            tellings.tell(pair(), choice, START);
        }
        for (answer, own) in [
            (Ok((Outcome::Done, 1)), None),
            (Ok((Outcome::NoConnection, 0)), None),
            (Err(Unanswered::NoSession), None),
            (Ok((Outcome::OwnRule, 3)), Some(3)),
        ] {
            tellings.tell(pair(), choice, START);
            assert_eq!(due(&mut tellings, &choices, START), [(pair(), choice)]);
            let given = tellings.handle_answer(pair(), choice.version, answer, START);
            assert_eq!((given, tellings.next_due()), (own, None));
        }
    }

    #[test]
    fn who_asks_for_what_is_older_is_told_unless_something_comes_of_it() {
        let (mut tellings, mut choices) = (Tellings::default(), Choices::default());
        tellings.tell_later(pair(), &choices, START);
        assert_eq!(tellings.next_due(), None, "nothing is chosen");
        let choice = choose(&mut choices, 1);
        tellings.tell_later(pair(), &choices, START);
        assert_eq!(due(&mut tellings, &choices, START), []);
        let mut other = (tellings.clone(), choices.clone());
        assert_eq!(due(&mut tellings, &choices, LATER), [(pair(), choice)]);
        choose(&mut other.1, 2);
        assert_eq!(due(&mut other.0, &other.1, LATER), []);
        assert_eq!(other.0, Tellings::default());
    }

    /// The session was new while the peer was asked, who answered nothing.
    #[test]
    fn what_stands_once_a_choice_came_to_nothing_is_told_too() {
        let (mut tellings, mut choices) = (Tellings::default(), Choices::default());
        let before = choose(&mut choices, 1);
        let later = choices.propose(pair(), SOCKET, 2, 7, 0);
        tellings.tell_all([pair()], START);
        assert_eq!(due(&mut tellings, &choices, START), []);
        assert_eq!(tellings.next_due(), Some(LATER));
        choices.take_back(&pair(), later.version, Some(before));
        assert_eq!(due(&mut tellings, &choices, LATER), [(pair(), before)]);
        // What was to be told alone is part of what stands.
        tellings.tell_later(pair(), &choices, START);
        tellings.tell_all([pair()], START);
        let choice = choose(&mut choices, 3);
        assert_eq!(due(&mut tellings, &choices, START), [(pair(), choice)]);
        tellings.tell(pair(), choice, START);
        tellings.forget(&pair());
        assert_eq!(tellings, Tellings::default());
    }
}
