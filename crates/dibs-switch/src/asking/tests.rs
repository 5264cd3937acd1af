//! What comes of questions, whatever happens meanwhile.

use super::*;
use crate::conns::tests::pair;

const SOCKET: Socket = Socket(77);
const HOST: u64 = 7;
const DONE: Answer = Ok((Outcome::Done, 0));
const SILENCE: Answer = Err(Unanswered::Silent);

fn conn() -> Meant {
    Meant {
        pair: pair(),
        socket: SOCKET,
    }
}

/// The peer has named its socket.
fn named() -> Names {
    let mut names = Names::default();
    names.learn(pair(), SOCKET, Socket(5));
    names
}

/// A choice of ours for `bump`, on top of what stands.
fn ask(choices: &mut Choices, bump: u8) -> Negotiation {
    let mut asked = Negotiation::choose(choices, conn(), bump, 2, HOST).expect("none waits");
    asked.begin(false);
    asked
}

fn conclude(choices: &mut Choices, mut asked: Negotiation, answer: Answer) -> Conclusion {
    assert_eq!(asked.handle_answer(choices, answer), Ok(()));
    assert_eq!(asked.next(), Step::Conclude);
    asked.conclude(choices, &named())
}

fn bump(choices: &Choices) -> Option<u8> {
    choices.get(&pair()).map(|choice| choice.bump)
}

#[test]
fn what_the_peer_agrees_to_or_cannot_know_of_yet_is_in_force() {
    for (bump, answer, stands) in [
        (3, DONE, true),
        (3, Err(Unanswered::NoSession), false),
        (0, Err(Unanswered::NoSession), true),
        (0, Err(Unanswered::NotAsked), false),
        (0, Ok((Outcome::Failed, 0)), false),
    ] {
        let mut choices = Choices::default();
        let asked = ask(&mut choices, bump);
        let conclusion = conclude(&mut choices, asked, answer);
        let expected = match stands {
            true => Conclusion::InForce,
            false => Conclusion::TakenBack,
        };
        assert_eq!(conclusion, expected, "{bump} {answer:?}");
        assert_eq!(choices.get(&pair()).is_some(), stands);
        assert!(choices.get(&pair()).is_none_or(|choice| !choice.pending));
    }
}

/// The peer said that it would follow, and then could not.
#[test]
fn who_left_for_nothing_is_put_back() {
    let refused = Ok((Outcome::Failed, 0));
    let leave = |choices: &mut Choices| {
        let mut asked = ask(choices, 0);
        asked.begin(true);
        assert_eq!(asked.next(), Step::Ask { ready: true });
        assert_eq!(asked.handle_answer(choices, DONE), Ok(()));
        assert_eq!(asked.next(), Step::Drain);
        assert!(asked.handle_silent(choices, true));
        assert_eq!(asked.next(), Step::Ask { ready: false });
        asked
    };
    let mut choices = Choices::default();
    let asked = leave(&mut choices);
    let conclusion = conclude(&mut choices, asked, refused);
    assert_eq!(conclusion, Conclusion::PutBack(2));
    assert_eq!(choices.get(&pair()), None);
    // What was chosen before says itself where it belongs.
    let first = ask(&mut choices, 3);
    conclude(&mut choices, first, DONE);
    let asked = leave(&mut choices);
    let conclusion = conclude(&mut choices, asked, refused);
    assert_eq!(conclusion, Conclusion::TakenBack);
    assert_eq!(bump(&choices), Some(3));
}

#[test]
fn who_falls_silent_stays_if_another_choice_has_come() {
    let mut choices = Choices::default();
    let mut asked = ask(&mut choices, 0);
    let mut ruled = Negotiation::by_rule(conn(), 0, HOST);
    for moved in [&mut asked, &mut ruled] {
        moved.begin(true);
        assert_eq!(moved.handle_answer(&mut choices, DONE), Ok(()));
    }
    let (mut gone, version) = (asked, asked.version());
    assert!(!gone.handle_silent(&choices, false), "it is over");
    assert!(ruled.handle_silent(&choices, true), "it is no choice");
    let host = HOST + 1;
    let theirs = Version { host, ..version };
    assert_eq!(choices.accept(pair(), SOCKET, 3, theirs), Ok(()));
    assert!(!asked.handle_silent(&choices, true));
    // It is asked as what it is, and taken for older.
    assert_eq!(
        (asked.next(), asked.version()),
        (Step::Ask { ready: false }, version)
    );
    let older = Ok((Outcome::Older, theirs.generation));
    let conclusion = conclude(&mut choices, asked, older);
    assert_eq!(conclusion, Conclusion::Superseded);
    // Were that choice not to be carried out, nothing of ours would wait for ever.
    let ours = Choice {
        bump: 0,
        socket: SOCKET,
        version,
        pending: true,
    };
    assert!(choices.refuse(&pair(), theirs, Some(ours)));
    assert_eq!(choices.get(&pair()), None);
}

#[test]
fn a_peer_that_knows_of_a_later_choice_is_asked_once_more() {
    let older = |generation| Ok((Outcome::Older, generation));
    let mut choices = Choices::default();
    let mut asked = ask(&mut choices, 3);
    let first = choices.get(&pair()).expect("it was proposed");
    assert_eq!(asked.handle_answer(&mut choices, older(9)), Ok(()));
    assert_eq!((asked.next(), asked.version().generation), (Step::Save, 10));
    // What cannot be saved is not said.
    let mut unsaved = (asked, choices.clone());
    unsaved.0.handle_saved(&mut unsaved.1, false);
    assert_eq!(
        (unsaved.0.next(), unsaved.0.answer()),
        (Step::Conclude, older(1))
    );
    assert_eq!(unsaved.1.get(&pair()), Some(first));
    let conclusion = unsaved.0.conclude(&mut unsaved.1, &named());
    assert_eq!(conclusion, Conclusion::TakenBack);

    asked.handle_saved(&mut choices, true);
    assert_eq!(asked.next(), Step::Ask { ready: false });
    let conclusion = conclude(&mut choices, asked, older(11));
    assert_eq!(conclusion, Conclusion::TakenBack);
    // Nor is it believed everything.
    let mut asked = ask(&mut choices, 3);
    let implausible = asked.handle_answer(&mut choices, older(u64::MAX));
    assert_eq!(implausible, Err(Implausible::Generation));
    assert_eq!(
        (asked.next(), asked.version().generation),
        (Step::Conclude, 1)
    );
    // Rules move connections by no version.
    let mut ruled = Negotiation::by_rule(conn(), 3, HOST);
    ruled.begin(false);
    assert_eq!(ruled.handle_answer(&mut choices, older(9)), Ok(()));
    assert_eq!(ruled.next(), Step::Conclude);
}

#[test]
fn nothing_is_chosen_while_the_peer_is_asked() {
    let mut choices = Choices::default();
    let asked = ask(&mut choices, 3);
    assert!(Negotiation::choose(&mut choices, conn(), 0, 2, HOST).is_none());
    asked.withdraw(&mut choices);
    assert!(choices.is_empty());
}

#[test]
fn a_rule_of_the_peer_stands_against_what_stood_before_too() {
    let mut choices = Choices::default();
    let own = Ok((Outcome::OwnRule, 2));
    let mut asked = ask(&mut choices, 0);
    assert_eq!(asked.handle_answer(&mut choices, own), Ok(()));
    assert_eq!(asked.gives_in(), None, "nothing stood");
    asked.conclude(&mut choices, &named());
    for (bump, gives_in) in [(3, true), (2, false)] {
        let mut first = ask(&mut choices, bump);
        assert_eq!(first.handle_answer(&mut choices, DONE), Ok(()));
        first.conclude(&mut choices, &named());
        let mut asked = ask(&mut choices, 0);
        assert_eq!(asked.handle_answer(&mut choices, own), Ok(()));
        let expected = gives_in.then_some((first.version(), 2));
        assert_eq!(asked.gives_in(), expected);
        asked.conclude(&mut choices, &named());
    }
}

#[test]
fn who_may_have_followed_is_called_back_by_a_later_choice() {
    let mut choices = Choices::default();
    let asked = ask(&mut choices, 3);
    let conclusion = conclude(&mut choices, asked, SILENCE);
    let back = choices.get(&pair()).expect("it is chosen to be back");
    assert_eq!(conclusion, Conclusion::BroughtBack(back));
    assert_eq!((back.bump, back.version.generation), (2, 2));
    // It has not named its socket, so it has not followed.
    let mut asked = ask(&mut choices, 1);
    assert_eq!(asked.handle_answer(&mut choices, SILENCE), Ok(()));
    let conclusion = asked.conclude(&mut choices, &Names::default());
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
            let conclusion = conclude(&mut choices, second, DONE);
            assert_eq!(conclusion, Conclusion::InForce);
        }
        let conclusion = conclude(&mut choices, first, SILENCE);
        assert_eq!(conclusion, Conclusion::Superseded);
        assert_eq!(bump(&choices), Some(3));
    }
}

#[test]
fn a_choice_that_was_told_back_stands_whatever_comes_of_the_question() {
    let mut choices = Choices::default();
    let asked = ask(&mut choices, 0);
    assert_eq!(choices.accept(pair(), SOCKET, 0, asked.version), Ok(()));
    for answer in [SILENCE, Ok((Outcome::NoConnection, 0))] {
        let conclusion = conclude(&mut choices, asked, answer);
        assert_eq!(conclusion, Conclusion::InForce);
        assert_eq!(bump(&choices), Some(0));
    }
}

/// It is the peer's doing that messages wait, or that of the trusted paths between us.
#[test]
fn messages_that_wait_are_no_fault_of_ours() {
    let full = Unanswered::from(ControlError::TooMany);
    assert_eq!(full, Unanswered::Full);
}
