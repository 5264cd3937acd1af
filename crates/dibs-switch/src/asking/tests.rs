//! What comes of questions, whatever happens meanwhile.

use super::*;
use crate::answering::{Here, Wanted};
use crate::conns::tests::pair;
use crate::marks::Hand;
use crate::messages::Named;
use crate::plausible::Hosts;
use crate::telling::TELL_AGAIN;

const SOCKET: Socket = Socket(77);
const HOST: u64 = 7;
const NOW: Time = Time::from_nanos(1_000_000_000_000);
const DONE: Answer = Ok((Outcome::Done, 0));
const SILENCE: Answer = Err(Unanswered::Silent);

fn conn() -> Meant {
    Meant {
        pair: pair(),
        socket: SOCKET,
    }
}

/// The peer has named its socket.
fn named() -> ConnTable {
    let mut conns = ConnTable::default();
    conns.update(&pair(), |conn| conn.learn_name(SOCKET, Socket(5)));
    conns
}

fn choice(conns: &ConnTable) -> Option<Choice> {
    conns.get(&pair()).choice.get()
}

/// Takes the peer's choice, or ours that it tells back.
fn accept(conns: &mut ConnTable, number: u8, version: Version) {
    assert!(hear(conns, number, version, (true, None)));
}

/// Takes a word of the peer, its choice or its rule's, while a rule here has the connection there. True if it is followed.
fn hear(
    conns: &mut ConnTable,
    number: u8,
    version: Version,
    (explicit, ruled): (bool, Option<BumpId>),
) -> bool {
    let (own, peer, socket) = (HOST, HOST + 1, SOCKET);
    let wanted = Wanted {
        switch: Switch {
            bump: BumpId::new(number),
            explicit,
            ready: false,
            ground: Ground::Forced,
        },
        hosts: Hosts { own, peer },
        refusal: None,
    };
    let here = Here {
        socket,
        bound: false,
        on: None,
        required: None,
        ruled,
    };
    let pair = pair().reversed();
    let named = Named { pair, socket };
    { wanted.judge(conns, (named, version), Some(here), NOW) }.is_ok()
}

/// A choice of ours for the bump of this number, on top of what stands.
fn ask(conns: &mut ConnTable, number: u8) -> Negotiation {
    let mut asked = Negotiation::choose(conns, conn(), BumpId::new(number), BumpId::new(2), HOST)
        .expect("none waits");
    begin(&mut asked, false);
    asked
}

/// The peer is asked from now on.
fn begin(asked: &mut Negotiation, sends: bool) {
    assert_eq!(asked.next(), Step::Unlock);
    asked.handle_done();
    assert_eq!(asked.next(), Step::Look);
    asked.handle_look(sends);
}

/// The steps that are left.
fn rest(mut asked: Negotiation) -> Vec<Step> {
    let mut steps = Vec::new();
    while asked.next() != Step::Done {
        steps.push(asked.next());
        asked.handle_done();
    }
    steps
}

fn conclude(conns: &mut ConnTable, mut asked: Negotiation, answer: Answer) -> Conclusion {
    assert_eq!(asked.handle_answer(conns, answer), Ok(()));
    assert_eq!(asked.next(), Step::Conclude);
    asked.conclude(conns, NOW)
}

fn bump(conns: &ConnTable) -> Option<Option<BumpId>> {
    choice(conns).map(|choice| choice.bump)
}

/// A move by no choice, which no rule here wants.
fn by_rule(conns: &mut ConnTable, bump: u8) -> Negotiation {
    let moving = Moving {
        bump: BumpId::new(bump),
        ruled: false,
    };
    conns.update(&conn().pair, |conn| conn.phase.move_to_moving(moving));
    Negotiation::by_rule(conn(), moving, HOST)
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
        let mut conns = named();
        let asked = ask(&mut conns, bump);
        let conclusion = conclude(&mut conns, asked, answer);
        let expected = match stands {
            true => Conclusion::InForce,
            false => Conclusion::TakenBack,
        };
        assert_eq!(conclusion, expected, "{bump} {answer:?}");
        assert_eq!(choice(&conns).is_some(), stands);
        assert!(!conns.get(&pair()).is_asked());
    }
}

/// The peer said that it would follow, and then could not.
#[test]
fn who_left_for_nothing_is_put_back() {
    let refused = Ok((Outcome::Failed, 0));
    let leave = |conns: &mut ConnTable| {
        let mut asked = ask(conns, 0);
        asked.handle_look(true);
        assert_eq!(asked.next(), Step::Ask { ready: true });
        assert_eq!(asked.handle_answer(conns, DONE), Ok(()));
        assert_eq!(asked.next(), Step::Drain);
        asked.handle_done();
        assert_eq!(asked.next(), Step::Leave);
        assert!(asked.handle_silent(conns, true));
        assert_eq!(asked.next(), Step::Ask { ready: false });
        asked
    };
    let mut conns = named();
    let asked = leave(&mut conns);
    let conclusion = conclude(&mut conns, asked, refused);
    assert_eq!(conclusion, Conclusion::PutBack(BumpId::new(2)));
    assert_eq!(choice(&conns), None);
    // What was chosen before says itself where it belongs.
    let first = ask(&mut conns, 3);
    conclude(&mut conns, first, DONE);
    let asked = leave(&mut conns);
    let conclusion = conclude(&mut conns, asked, refused);
    assert_eq!(conclusion, Conclusion::TakenBack);
    assert_eq!(bump(&conns), Some(BumpId::new(3)));
}

#[test]
fn who_falls_silent_stays_if_another_choice_has_come() {
    let mut conns = named();
    let mut asked = ask(&mut conns, 0);
    let mut ruled = by_rule(&mut conns, 0);
    for moved in [&mut asked, &mut ruled] {
        moved.handle_look(true);
        assert_eq!(moved.handle_answer(&mut conns, DONE), Ok(()));
    }
    let (mut gone, version) = (asked, asked.version());
    assert!(!gone.handle_silent(&conns, false), "it is over");
    let mut unchosen = ConnTable::default();
    assert!(
        !ruled.handle_silent(&unchosen, true),
        "the peer has ended it"
    );
    by_rule(&mut unchosen, 0);
    assert!(ruled.handle_silent(&unchosen, true) && !ruled.handle_silent(&conns, true));
    let host = HOST + 1;
    let theirs = Version { host, ..version };
    accept(&mut conns, 3, theirs);
    assert!(!asked.handle_silent(&conns, true));
    // It is asked as what it is, and taken for older.
    assert_eq!(
        (asked.next(), asked.version()),
        (Step::Ask { ready: false }, version)
    );
    let older = Ok((Outcome::Older, theirs.generation));
    let conclusion = conclude(&mut conns, asked, older);
    assert_eq!(conclusion, Conclusion::Superseded);
    // Were that choice not to be carried out, nothing of ours would wait for ever.
    let (bump, socket) = (None, SOCKET);
    let ours = Some(Choice {
        bump,
        socket,
        version,
    });
    assert!(conns.update(&pair(), |conn| conn.choice.take_back(theirs, ours)));
    assert_eq!(choice(&conns), None);
}

#[test]
fn a_peer_that_knows_of_a_later_choice_is_asked_once_more() {
    let older = |generation| Ok((Outcome::Older, generation));
    let mut conns = named();
    let mut asked = ask(&mut conns, 3);
    let first = choice(&conns).expect("it was proposed");
    assert_eq!(asked.handle_answer(&mut conns, older(9)), Ok(()));
    assert_eq!((asked.next(), asked.version().generation), (Step::Save, 10));
    // What cannot be saved is not said.
    let mut unsaved = (asked, conns.clone());
    unsaved.0.handle_saved(&mut unsaved.1, false);
    assert_eq!(
        (unsaved.0.next(), unsaved.0.answer()),
        (Step::Conclude, older(1))
    );
    assert_eq!(choice(&unsaved.1), Some(first));
    let conclusion = unsaved.0.conclude(&mut unsaved.1, NOW);
    assert_eq!(conclusion, Conclusion::TakenBack);

    asked.handle_saved(&mut conns, true);
    assert_eq!(asked.next(), Step::Ask { ready: false });
    let conclusion = conclude(&mut conns, asked, older(11));
    assert_eq!(conclusion, Conclusion::TakenBack);
    // Nor is it believed everything.
    let mut asked = ask(&mut conns, 3);
    let implausible = asked.handle_answer(&mut conns, older(u64::MAX));
    assert_eq!(implausible, Err(Implausible::Generation));
    assert_eq!(
        (asked.next(), asked.version().generation),
        (Step::Conclude, 1)
    );
    // Rules move connections by no version.
    let mut ruled = by_rule(&mut conns, 3);
    begin(&mut ruled, false);
    assert_eq!(ruled.handle_answer(&mut conns, older(9)), Ok(()));
    assert_eq!(ruled.next(), Step::Conclude);
}

#[test]
fn nothing_is_chosen_while_the_peer_is_asked() {
    let mut conns = named();
    let asked = ask(&mut conns, 3);
    assert!(Negotiation::choose(&mut conns, conn(), None, BumpId::new(2), HOST).is_none());
    asked.withdraw(&mut conns);
    assert_eq!(choice(&conns), None);
}

#[test]
fn a_rule_of_the_peer_stands_against_what_stood_before_too() {
    let mut conns = named();
    let own = Ok((Outcome::OwnRule, 2));
    let mut asked = ask(&mut conns, 0);
    assert_eq!(asked.handle_answer(&mut conns, own), Ok(()));
    asked.conclude(&mut conns, NOW);
    assert_eq!(rest(asked), [Step::Mark], "nothing stood");
    // One that does not require its bump stands against plain alone.
    for (bump, next, gives_in) in [(0, 0, true), (3, 1, true), (3, 0, false), (2, 0, false)] {
        let mut first = ask(&mut conns, bump);
        assert_eq!(first.handle_answer(&mut conns, DONE), Ok(()));
        first.conclude(&mut conns, NOW);
        let mut asked = ask(&mut conns, next);
        assert_eq!(asked.handle_answer(&mut conns, own), Ok(()));
        asked.conclude(&mut conns, NOW);
        assert_eq!(asked.stood(), Some(first.version()));
        let gives_in = gives_in.then_some(Step::GiveIn(2));
        let expected: Vec<Step> = [Step::Mark].into_iter().chain(gives_in).collect();
        assert_eq!(rest(asked), expected);
    }
}

#[test]
fn who_may_have_followed_is_called_back_by_a_later_choice() {
    let mut conns = named();
    let asked = ask(&mut conns, 3);
    let conclusion = conclude(&mut conns, asked, SILENCE);
    let back = choice(&conns).expect("it is chosen to be back");
    assert_eq!(conclusion, Conclusion::BroughtBack(back));
    assert_eq!((back.bump, back.version.generation), (BumpId::new(2), 2));
    // It has not named its socket, so it has not followed.
    conns.update(&pair(), |conn| conn.learn_name(Socket(78), Socket(5)));
    let mut asked = ask(&mut conns, 1);
    assert_eq!(asked.handle_answer(&mut conns, SILENCE), Ok(()));
    let conclusion = asked.conclude(&mut conns, NOW);
    assert_eq!(conclusion, Conclusion::TakenBack);
    assert_eq!(choice(&conns), Some(back));
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
        let mut conns = named();
        let first = ask(&mut conns, 0);
        if by_peer {
            accept(&mut conns, 3, peer);
        } else {
            accept(&mut conns, 0, first.version);
            let second = ask(&mut conns, 3);
            let conclusion = conclude(&mut conns, second, DONE);
            assert_eq!(conclusion, Conclusion::InForce);
        }
        let conclusion = conclude(&mut conns, first, SILENCE);
        assert_eq!(conclusion, Conclusion::Superseded);
        assert_eq!(bump(&conns), Some(BumpId::new(3)));
    }
}

#[test]
fn a_choice_that_was_told_back_stands_whatever_comes_of_the_question() {
    let mut conns = named();
    let asked = ask(&mut conns, 0);
    accept(&mut conns, 0, asked.version);
    for answer in [SILENCE, Ok((Outcome::NoConnection, 0))] {
        let conclusion = conclude(&mut conns, asked, answer);
        assert_eq!(conclusion, Conclusion::InForce);
        assert_eq!(bump(&conns), Some(None));
    }
}

#[test]
fn what_came_back_is_saved_then_marked_and_only_then_told() {
    let now = Time::from_nanos(1_000_000_000_000);
    let mut conns = named();
    let mut asked = ask(&mut conns, 3);
    assert_eq!(asked.handle_answer(&mut conns, SILENCE), Ok(()));
    asked.conclude(&mut conns, NOW);
    assert_eq!(rest(asked), [Step::Save, Step::Mark]);
    asked.handle_saved(&mut conns, true);
    assert_eq!((asked.next(), conns.next_telling()), (Step::Mark, None));
    asked.handle_marked(&mut conns, now);
    assert_eq!(
        (asked.next(), conns.next_telling()),
        (Step::Done, Some(now))
    );
}

/// The peer's own move crossed it, and was given up: nothing said that the connection was on a bump at all
/// (seed 340006425).
#[test]
fn what_the_peer_gave_up_is_where_it_went_instead() {
    let handed = |number, by: Hand| by.on(BumpId::new(number));
    for (number, ruled, left) in [
        (2, false, handed(2, Hand::Other)),
        (3, false, handed(3, Hand::Peer)),
        (2, true, None),
        (0, false, None),
    ] {
        let mut conns = named();
        let bump = BumpId::new(number);
        conns.update(&conn().pair, |conn| {
            conn.phase.move_to_moving(Moving { bump, ruled });
            conn.place.hand_over(handed(3, Hand::Peer));
        });
        let mut asked = Negotiation::by_rule(conn(), Moving { bump, ruled }, HOST);
        begin(&mut asked, false);
        assert_eq!(conclude(&mut conns, asked, DONE), Conclusion::InForce);
        assert_eq!(conns.get(&conn().pair).place.handed(), left);
    }
}

/// Rules of both hosts contradict each other: the peer had agreed before its own rule moved the connection (seed 1099511671877).
#[test]
fn what_the_peer_agreed_to_before_its_own_rule_moved_it_says_nothing_of_where_it_is() {
    let moving = Moving {
        bump: BumpId::new(2),
        ruled: true,
    };
    let by_peer = Hand::Peer.on(BumpId::new(3));
    let mut conns = named();
    conns.update(&conn().pair, |conn| conn.phase.move_to_moving(moving));
    let mut asked = Negotiation::by_rule(conn(), moving, HOST);
    begin(&mut asked, false);
    let (generation, host) = (1, HOST + 1);
    let version = Version { generation, host };
    assert!(!hear(&mut conns, 3, version, (false, moving.bump)));
    assert_eq!(conclude(&mut conns, asked, DONE), Conclusion::InForce);
    assert_eq!(conns.get(&conn().pair).place.handed(), by_peer);
}

#[test]
fn what_rules_move_goes_there_unless_a_rule_of_the_peer_wants_it_back() {
    let own = Ok((Outcome::OwnRule, 2));
    for (bump, answer, step, again) in [
        (0, own, Step::GiveIn(2), None),
        (3, own, Step::GiveIn(2), None),
        (0, DONE, Step::Move, None),
        (0, SILENCE, Step::Move, Some(NOW + TELL_AGAIN)),
    ] {
        let mut conns = ConnTable::default();
        let mut ruled = by_rule(&mut conns, bump);
        begin(&mut ruled, false);
        assert_eq!(ruled.handle_answer(&mut conns, answer), Ok(()));
        ruled.conclude(&mut conns, NOW);
        assert_eq!((rest(ruled), conns.next_moved()), (vec![step], again));
    }
    // The peer has ended it, and gone nowhere.
    for (answer, conclusion) in [
        (Ok((Outcome::Older, 0)), Conclusion::Superseded),
        (SILENCE, Conclusion::Superseded),
        (DONE, Conclusion::InForce),
    ] {
        let mut conns = named();
        let mut crossed = by_rule(&mut conns, 3);
        begin(&mut crossed, false);
        conns.update(&conn().pair, |conn| conn.phase.end_moving(crossed.moving()));
        assert_eq!(conclude(&mut conns, crossed, answer), conclusion);
    }
    // A move of the peer stands against it, and has come here already. A choice is not known here yet, and no rule of the peer.
    for (generation, conclusion) in [(0, Conclusion::Superseded), (1, Conclusion::InForce)] {
        let mut conns = named();
        let mut crossed = by_rule(&mut conns, 3);
        begin(&mut crossed, false);
        let answer = Ok((Outcome::Older, generation));
        assert_eq!(conclude(&mut conns, crossed, answer), conclusion);
    }
    // The next move ended it, and is over, too: the answer is from before, or the peer is to be asked for the next one again.
    let mut conns = named();
    let mut first = by_rule(&mut conns, 0);
    begin(&mut first, false);
    let mut next = by_rule(&mut conns, 3);
    begin(&mut next, false);
    let moving = next.moving();
    assert_eq!(conclude(&mut conns, next, DONE), Conclusion::InForce);
    conns.update(&conn().pair, |conn| conn.phase.end_moving(moving));
    assert_eq!(conclude(&mut conns, first, DONE), Conclusion::Superseded);
    assert_eq!(conns.next_moved(), Some(NOW + TELL_AGAIN));
    // A rule here has it go there all the same.
    let mut conns = ConnTable::default();
    let (bump, ruled) = (BumpId::new(3), true);
    let moving = Moving { bump, ruled };
    conns.update(&conn().pair, |conn| conn.phase.move_to_moving(moving));
    let mut ruled = Negotiation::by_rule(conn(), moving, HOST);
    begin(&mut ruled, false);
    assert_eq!(ruled.handle_answer(&mut conns, own), Ok(()));
    ruled.conclude(&mut conns, NOW);
    assert_eq!(rest(ruled), vec![Step::Move]);
    // What was chosen meanwhile is above it.
    let mut conns = named();
    let mut ruled = by_rule(&mut conns, 3);
    begin(&mut ruled, false);
    let host = HOST + 1;
    accept(
        &mut conns,
        0,
        Version {
            generation: 1,
            host,
        },
    );
    assert_eq!(conclude(&mut conns, ruled, DONE), Conclusion::Superseded);
    let mut unasked = by_rule(&mut conns, 3);
    unasked.handle_unasked();
    assert_eq!(unasked.next(), Step::Conclude);
}
