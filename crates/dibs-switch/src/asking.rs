//! What becomes of a choice that a peer was asked about.

use crate::conns::{Choice, Choices, Pair, Socket, Version};
use crate::messages::Outcome;

/// A choice that a peer was asked about.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The connection's socket here.
    pub socket: Socket,
    /// The bump that was chosen; 0 is plain.
    pub bump: u8,
    /// The version that it was asked with last.
    pub version: Version,
    /// What had been chosen before.
    pub before: Option<Choice>,
    /// The bump that the connection was on, by whatever reason.
    pub origin: u8,
    /// It has left there already, and the kernel was told of the choice: the peer had said that it would follow.
    pub left: bool,
    /// The peer has named its socket of the connection: without that it does nothing.
    pub named: bool,
}

/// What came of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The peer answered.
    Answer(Outcome),
    /// It did not, within its time: it may have done its part all the same.
    Silence,
    /// There was no session to ask by.
    NoSession,
    /// It could not be asked for another reason.
    NotAsked,
}

/// What has become of the choice, and who has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// It is in force.
    InForce,
    /// Another one has been made meanwhile, here or by the peer, and stands.
    Superseded,
    /// What stood before stands again.
    TakenBack,
    /// The same, and that was no choice: the kernel, which was told of this one, is to put the connection on this
    /// bump again, by no choice.
    PutBack(u8),
    /// This one is in force, later than what the peer was asked for: it puts the connection back to where
    /// it was, whether the peer had moved it or not. The peer is to be told.
    BroughtBack(Choice),
}

impl Choices {
    /// Carries out what came of asking for a choice of `host`. Unless another one has taken its place, the
    /// kernel is to be told what stands now.
    pub fn conclude(
        &mut self,
        pair: Pair,
        asked: Asked,
        verdict: Verdict,
        host: u64,
    ) -> Conclusion {
        let version = asked.version;
        let agreed = match verdict {
            Verdict::Answer(outcome) => outcome == Outcome::Done,
            // The peer's part waits for a session: the choice is sent again then.
            Verdict::NoSession => asked.bump == 0,
            Verdict::Silence | Verdict::NotAsked => false,
        };
        let known = self.of(&pair, asked.socket);
        let Some(stands) = known.filter(|known| known.version == version) else {
            let ours = Choice {
                bump: asked.bump,
                socket: asked.socket,
                version,
                pending: false,
            };
            self.overtake(
                pair,
                version,
                if agreed { Some(ours) } else { asked.before },
            );
            return Conclusion::Superseded;
        };
        // Or it was told back, by a peer that agreed and restarted before its answer got here.
        if agreed || !stands.pending {
            self.settle(&pair, version);
            return Conclusion::InForce;
        }
        self.take_back(&pair, version, asked.before);
        if verdict != Verdict::Silence || !asked.named {
            return match asked.before {
                None if asked.left => Conclusion::PutBack(asked.origin),
                _ => Conclusion::TakenBack,
            };
        }
        let bump = asked.before.map_or(asked.origin, |choice| choice.bump);
        let back = self.propose(pair, asked.socket, bump, host, version.generation);
        self.settle(&pair, back.version);
        Conclusion::BroughtBack(Choice {
            pending: false,
            ..back
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    const SOCKET: Socket = Socket(77);
    const HOST: u64 = 7;

    /// A choice of ours for `bump`, of which the peer knows, on top of what stands.
    fn ask(choices: &mut Choices, bump: u8) -> Asked {
        let before = choices.get(&pair());
        Asked {
            socket: SOCKET,
            bump,
            version: choices.propose(pair(), SOCKET, bump, HOST, 0).version,
            before,
            origin: 2,
            left: false,
            named: true,
        }
    }

    fn bump(choices: &Choices) -> Option<u8> {
        choices.get(&pair()).map(|choice| choice.bump)
    }

    #[test]
    fn what_the_peer_agrees_to_or_cannot_know_of_yet_is_in_force() {
        for (bump, verdict, stands) in [
            (3, Verdict::Answer(Outcome::Done), true),
            (3, Verdict::NoSession, false),
            (0, Verdict::NoSession, true),
            (0, Verdict::NotAsked, false),
            (0, Verdict::Answer(Outcome::Failed), false),
        ] {
            let mut choices = Choices::default();
            let asked = ask(&mut choices, bump);
            let conclusion = choices.conclude(pair(), asked, verdict, HOST);
            let expected = match stands {
                true => Conclusion::InForce,
                false => Conclusion::TakenBack,
            };
            assert_eq!(conclusion, expected, "{bump} {verdict:?}");
            assert_eq!(choices.get(&pair()).is_some(), stands);
            assert!(choices.get(&pair()).is_none_or(|choice| !choice.pending));
        }
    }

    /// The peer said that it would follow, and then could not.
    #[test]
    fn who_left_for_nothing_is_put_back() {
        let refused = Verdict::Answer(Outcome::Failed);
        let mut choices = Choices::default();
        let asked = Asked {
            left: true,
            ..ask(&mut choices, 0)
        };
        let conclusion = choices.conclude(pair(), asked, refused, HOST);
        assert_eq!(conclusion, Conclusion::PutBack(2));
        assert_eq!(choices.get(&pair()), None);
        // What was chosen before says itself where it belongs.
        let first = ask(&mut choices, 3);
        let done = Verdict::Answer(Outcome::Done);
        choices.conclude(pair(), first, done, HOST);
        let asked = Asked {
            left: true,
            ..ask(&mut choices, 0)
        };
        let conclusion = choices.conclude(pair(), asked, refused, HOST);
        assert_eq!(conclusion, Conclusion::TakenBack);
        assert_eq!(bump(&choices), Some(3));
    }

    #[test]
    fn who_may_have_followed_is_called_back_by_a_later_choice() {
        let mut choices = Choices::default();
        let asked = ask(&mut choices, 3);
        let conclusion = choices.conclude(pair(), asked, Verdict::Silence, HOST);
        let back = choices.get(&pair()).expect("it is chosen to be back");
        assert_eq!(conclusion, Conclusion::BroughtBack(back));
        assert_eq!((back.bump, back.version.generation), (2, 2));
        // It has not named its socket, so it has not followed.
        let asked = Asked {
            named: false,
            ..ask(&mut choices, 1)
        };
        let conclusion = choices.conclude(pair(), asked, Verdict::Silence, HOST);
        assert_eq!(conclusion, Conclusion::TakenBack);
        assert_eq!(choices.get(&pair()), Some(back));
    }

    /// The peer agreed, restarted and told it back; the user chose again; only then was the first question
    /// given up, and the connection put back to where it had been (seeds 474461 and 476849).
    #[test]
    fn a_question_that_nobody_answered_undoes_no_later_choice() {
        let peer = Version {
            generation: 2,
            host: HOST + 1,
        };
        for by_peer in [false, true] {
            let mut choices = Choices::default();
            let first = ask(&mut choices, 0);
            if by_peer {
                assert_eq!(choices.accept(pair(), SOCKET, 3, peer), Ok(()));
            } else {
                let told_back = choices.accept(pair(), SOCKET, 0, first.version);
                assert_eq!(told_back, Ok(()));
                let second = ask(&mut choices, 3);
                let done = Verdict::Answer(Outcome::Done);
                let conclusion = choices.conclude(pair(), second, done, HOST);
                assert_eq!(conclusion, Conclusion::InForce);
            }
            let conclusion = choices.conclude(pair(), first, Verdict::Silence, HOST);
            assert_eq!(conclusion, Conclusion::Superseded);
            assert_eq!(bump(&choices), Some(3));
        }
    }

    #[test]
    fn a_choice_that_was_told_back_stands_whatever_comes_of_the_question() {
        let mut choices = Choices::default();
        let asked = ask(&mut choices, 0);
        assert_eq!(choices.accept(pair(), SOCKET, 0, asked.version), Ok(()));
        for verdict in [Verdict::Silence, Verdict::Answer(Outcome::NoConnection)] {
            let conclusion = choices.conclude(pair(), asked, verdict, HOST);
            assert_eq!(conclusion, Conclusion::InForce);
            assert_eq!(bump(&choices), Some(0));
        }
    }
}
