use super::*;
use crate::conns::Version;
use crate::conns::tests::{bump, pair};
use crate::locks::GRACE;
use crate::marks::{Hand, STRAGGLERS};
use crate::phase::Moving;
use dibs_wire::FlowKey;

const SOCKET: Socket = Socket(77);
const START: Time = Time::from_nanos(1_000_000_000_000);

fn entry(mark: SeenMark, closed: bool) -> Entry {
    let finished = false;
    Entry {
        mark,
        closed,
        finished,
    }
}

fn choose(conns: &mut ConnTable, number: u8) {
    conns.update(&pair(), |conn| {
        conn.choice.propose(SOCKET, BumpId::new(number), 7, 0);
    });
}

const MOVING: Moving = Moving {
    bump: None,
    ruled: false,
};

#[test]
fn who_has_nothing_to_say_has_no_entry() {
    let mut conns = ConnTable::default();
    assert_eq!(conns.update(&pair(), |conn| conn.choice.get()), None);
    assert_eq!(conns, ConnTable::default());
    conns.update(&pair(), |conn| conn.phase.move_to_moving(MOVING));
    assert!(conns != ConnTable::default());
    conns.update_each([&pair()], |conn| conn.phase.end_moving(MOVING));
    assert_eq!(conns, ConnTable::default());
    let version = Version::default();
    let told = |conn: &mut Conn| conn.telling.tell(version, START);
    conns.update(&pair(), told);
    assert_eq!(conns.take_tellings(START, |_| false), []);
    assert_eq!(conns.next_telling(), Some(START));
    assert_eq!(conns.take_tellings(START, |_| true), []);
    assert_eq!(conns, ConnTable::default());
}

#[test]
fn a_name_holds_for_one_socket() {
    let mut conns = ConnTable::default();
    assert_eq!(conns.get(&pair()).name(SOCKET), Socket::UNKNOWN);
    conns.update(&pair(), |conn| conn.learn_name(SOCKET, Socket(5)));
    assert_eq!(conns.get(&pair()).name(SOCKET), Socket(5));
    assert_eq!(conns.get(&pair()).name(Socket(78)), Socket::UNKNOWN);
    let known = Vec::from_iter(conns.known(|_, _| true));
    conns.sweep(&known, |_| Some(Socket(78)), |_, _| false);
    assert_eq!(conns, ConnTable::default());
}

#[test]
fn what_left_a_moment_ago_is_kept_in_plain_until_it_moves_again() {
    let leaves = true;
    let [left, back] = [None, BumpId::new(1)].map(|bump| Mark {
        leaves,
        ..Mark::moved(pair(), bump)
    });
    let mut conn = Conn::default();
    conn.place.handle_followed(BumpId::new(3));
    let new = conn.move_to_mark(&left, START);
    assert_eq!((new.chosen, new.was), (true, BumpId::new(3)));
    assert_eq!((conn.place.followed(), conn.place.has_left()), (None, true));
    assert!(!conn.place.may_follow(START) && conn.place.may_follow(START + STRAGGLERS));
    let new = conn.move_to_mark(&back, START);
    assert_eq!(
        (new.chosen, new.was, conn.place.has_left()),
        (false, None, false)
    );
}

#[test]
fn what_a_rule_of_the_peer_moves_for_the_first_time_comes_from_plain() {
    let bump = BumpId::new(1);
    let mut conn = Conn::default();
    conn.place.hand_over(Hand::Peer.on(bump));
    let new = conn.move_to_mark(&Mark::moved(pair(), bump), START);
    assert_eq!(new.was, None);
    let new = conn.move_to_mark(&Mark::moved(pair(), BumpId::new(2)), START);
    assert_eq!(new.was, bump);
}

#[test]
fn what_is_gone_is_swept_and_what_has_the_same_ends_is_told() {
    for (socket, goes_on, gone, taken) in [
        (None, false, vec![pair()], vec![]),
        (None, true, vec![], vec![]),
        (Some(SOCKET), false, vec![], vec![]),
        (Some(Socket(78)), false, vec![], vec![pair()]),
    ] {
        let swept = Swept { gone, taken };
        let mut conns = ConnTable::default();
        choose(&mut conns, 1);
        let handed = Hand::Other.on(bump(1));
        conns.update(&pair(), |conn| conn.place.hand_over(handed));
        let known = Vec::from_iter(conns.known(|_, _| true));
        assert_eq!(conns.sweep(&known, |_| socket, |_, _| goes_on), swept);
        let gone = socket.is_none() && !goes_on;
        assert_eq!(conns == ConnTable::default(), gone);
    }
}

/// Connections that a peer moves while the sockets of others are looked for have none among these.
#[test]
fn what_came_while_others_were_looked_for_is_neither_swept_nor_unlocked() {
    let mut conns = ConnTable::default();
    choose(&mut conns, 1);
    conns.update(&pair(), |conn| conn.lock.adopt(bump(1)));
    let came = conns.clone();
    let swept = conns.sweep(&[], |_| None, |_, _| false);
    assert_eq!(swept, Swept::default());
    let none = Tracked::new(Vec::new());
    let mends = conns.mend_locks(START, &[], &none, |_| None, |_| false);
    assert_eq!((mends, conns), (Vec::new(), came));
}

/// The next one of the same ends has no socket among those that were looked for either.
#[test]
fn what_began_with_the_ends_of_one_that_ended_while_that_was_looked_for_is_not_swept() {
    let mut conns = ConnTable::default();
    choose(&mut conns, 1);
    let known = Vec::from_iter(conns.known(|_, _| true));
    for handed in [None, Hand::Other.on(bump(2))] {
        let mut next = conns.clone();
        next.update(&pair(), |conn| match handed {
            None => drop(conn.choice.propose(Socket(78), Some(bump(2)), 7, 0)),
            handed => conn.place.hand_over(handed),
        });
        let came = next.clone();
        let swept = next.sweep(&known, |_| None, |_, _| false);
        assert_eq!((swept, next), (Swept::default(), came));
    }
}

#[test]
fn only_what_is_on_its_bump_or_chosen_to_be_stays_locked() {
    for (lives, passes, on, chosen, stays) in [
        (Some(true), false, 1, None, true),
        (Some(true), false, 0, Some(1), true),
        (Some(true), false, 2, Some(3), false),
        (None, false, 1, Some(1), false),
        (None, true, 1, Some(1), true),
    ] {
        let mut conns = ConnTable::default();
        conns.update(&pair(), |conn| conn.lock.adopt(bump(1)));
        if let Some(number) = chosen {
            choose(&mut conns, number);
        }
        let (mark, closed) = (seen(on, false), false);
        let tracked = Tracked::new(vec![(pair(), entry(mark, closed))]);
        let is_it = |other: &FlowKey| *other == pair();
        let lives = |other: &FlowKey| lives.filter(|_| is_it(other));
        let mends = conns.mend_locks(START, &[pair()], &tracked, lives, |_| passes);
        assert_eq!(conns.locked().next().is_some(), stays);
        let mend = match on {
            1 if stays && !passes => Some(Mend::Lock(bump(1))),
            // Another program may have taken it there with its lock.
            2 => Some(Mend::Unlock),
            _ => None,
        };
        assert_eq!(mends, mend.map(|mend| (pair(), mend)).as_slice());
    }
}

#[test]
fn what_is_due_is_locked_and_what_has_ended_is_unlocked_unless_its_other_end_is_ours() {
    let locked = SeenMark {
        locked: true,
        ..seen(1, false)
    };
    let ours = pair().reversed();
    for (mark, alive, mend) in [
        (seen(1, false), vec![pair()], Some(Mend::Lock(bump(1)))),
        (seen(2, false), vec![pair()], None),
        (locked, vec![pair()], None),
        (locked, vec![], Some(Mend::Unlock)),
        (locked, vec![ours], None),
    ] {
        let mut conns = ConnTable::default();
        conns.update(&pair(), |conn| conn.lock.confirm(bump(1), START));
        let closed = false;
        let tracked = Tracked::new(vec![(pair(), entry(mark, closed))]);
        let lives = |pair: &FlowKey| alive.contains(pair).then_some(true);
        let mends = conns.mend_locks(START + GRACE, &[pair()], &tracked, lives, |_| false);
        let mends: Vec<Mend> = mends.into_iter().map(|(_, mend)| mend).collect();
        assert_eq!(mends, mend.as_slice(), "{mark:?} {alive:?}");
    }
}

fn seen(number: u8, chosen: bool) -> SeenMark {
    SeenMark {
        bump: BumpId::new(number),
        chosen,
        locked: false,
        carried: true,
        told: true,
    }
}

#[test]
fn a_mark_that_says_otherwise_than_our_record_is_another_programs() {
    let mut conn = Conn::default();
    assert!(conn.knows(seen(0, false)) && !conn.knows(seen(1, false)));
    assert!(conn.is_chosen_elsewhere(seen(1, true)) && !conn.knows(seen(1, true)));
    conn.phase.move_to_moving(MOVING);
    assert!(conn.knows(seen(1, false)) && !conn.knows(seen(1, true)));
    conn.phase.end_moving(MOVING);
    let by = Some(Hand::Other);
    assert_eq!(conn.handle_mark(seen(1, true), by, START), Foreign::Chosen);
    assert_eq!(conn.handle_mark(seen(1, false), by, START), Foreign::News);
    assert!(conn.knows(seen(1, false)) && !conn.knows(seen(0, false)));
    let untold = SeenMark {
        told: false,
        ..seen(0, false)
    };
    assert!(conn.knows(untold));
    assert_eq!(conn.handle_mark(seen(0, false), by, START), Foreign::News);
    assert_eq!(conn, Conn::default());
    let by = Some(Hand::Peer);
    assert_eq!(conn.handle_mark(seen(2, false), by, START), Foreign::Known);
    conn.move_to_mark(&Mark::moved(pair(), None), START);
    let later = START + STRAGGLERS;
    let straggles = conn.handle_mark(seen(2, false), by, START);
    assert_eq!(straggles, Foreign::Straggler);
    assert_eq!(conn.handle_mark(seen(2, false), by, later), Foreign::Known);
    let ruled = conn.handle_mark(seen(2, false), Some(Hand::Rule), START);
    assert_eq!(ruled, Foreign::News);
}

#[test]
fn a_choice_outlives_a_mark_that_lost_it() {
    let mut conns = ConnTable::default();
    choose(&mut conns, 1);
    conns.update(&pair(), |conn| {
        assert!(conn.knows(seen(1, true)) && !conn.knows(seen(0, false)));
        // Nor does a move by no choice take it off, which the choice has overtaken (seed 330008752).
        conn.phase.move_to_moving(MOVING);
        assert!(conn.knows(seen(1, true)) && !conn.knows(seen(0, false)));
        assert_eq!(conn.handle_mark(seen(0, false), None, START), Foreign::Lost);
        assert!(!conn.is_chosen_elsewhere(seen(1, true)));
        assert!(conn.is_chosen_elsewhere(seen(3, true)));
        conn.place.move_to_chosen(BumpId::new(3));
        assert!(!conn.is_chosen_elsewhere(seen(3, true)) && conn.knows(seen(3, true)));
        let asked = conn.choice.propose(SOCKET, None, 7, 0);
        conn.phase.move_to_asked(asked.version, None);
        assert!(conn.knows(seen(3, true)), "the peer is asked");
        // Another program chooses what nobody had chosen (seed 67220).
        let mut moved = conn.clone();
        moved.move_to_mark(&Mark::moved(pair(), BumpId::new(3)), START);
        assert!(!moved.knows(seen(3, true)));
        // Another program took it off meanwhile (seed 1099511629871).
        assert!(!conn.knows(seen(0, false)));
        assert_eq!(conn.handle_mark(seen(0, false), None, START), Foreign::Lost);
        assert_eq!(conn.had(), Some((BumpId::new(3), true)));
        // What another program chose meanwhile stays if nothing comes of that (seed 360000931).
        assert!(!conn.knows(seen(0, true)));
    });
}

/// The daemon ends before a question does, or just after.
#[test]
fn a_choice_that_was_asked_about_stands_only_where_the_mark_is() {
    for (on, stands) in [(None, Some(1)), (Some(2), Some(2)), (Some(3), Some(1))] {
        let mut conns = ConnTable::default();
        choose(&mut conns, 1);
        let stood = conns.get(&pair()).choice.get();
        conns.update(&pair(), |conn| {
            let asked = conn.choice.propose(SOCKET, BumpId::new(2), 7, 0);
            conn.phase.move_to_asked(asked.version, stood);
        });
        let saved: Vec<_> = conns.saved().collect();
        let mut next = ConnTable::default();
        for (pair, saved) in &saved {
            next.update(pair, |conn| conn.restore(saved));
        }
        assert!(next.get(&pair()).is_asked());
        next.update(&pair(), |conn| conn.end_question(on.and_then(BumpId::new)));
        let known = next.get(&pair());
        let known_on = known.in_force().and_then(|choice| choice.bump);
        assert_eq!(known_on, stands.and_then(BumpId::new), "{on:?}");
        let mut cleared = next.clone();
        cleared.clear();
        assert!(cleared.iter().all(|(_, conn)| !conn.phase.is_cut_short()));
        let mut ended = next.clone();
        let known = Vec::from_iter(ended.known(|_, _| true));
        ended.sweep(&known, |_| None, |_, _| false);
        assert_eq!(ended, ConnTable::default());
        // The next one may end as early.
        assert_eq!(next.saved().eq(saved), known_on != BumpId::new(2));
        let again = next.update(&pair(), |conn| conn.take_cut_short(SOCKET));
        assert_eq!(again.is_some(), known_on != BumpId::new(2));
        assert_eq!(next.get(&pair()).phase, Phase::default());
    }
}
