//! What users choose, and what the daemons say to each other about it.

use super::*;

/// A daemon that had agreed to a choice died before its answer got through. The next one told the choice
/// back; then the question came again, found the connection over, and the choice in force was taken back.
#[test]
fn a_choice_that_the_peer_told_back_stays() {
    let lax = Setup {
        hold_without_trusted: false,
        calls: [true; 2],
        ..setup(vec![path(true, clean()), path(false, clean())])
    };
    let deaf = clean().loss(1.0);
    // A closes first and is left in TIME-WAIT; B is gone once it has read everything.
    let answer = Plan {
        client: 1,
        slow: Some(Duration::from_millis(100)),
        ..plan([0, 20_000], Order::Reply, [true; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(answer)),
        (at(1500), Op::Choose(0, 0, SCRAMBLE)),
        (at(2900), Op::Choose(0, 0, PLAIN)),
        // B hears the question, and its last packet is acknowledged.
        (at(2901), Op::Link(0, 1, deaf.clone())),
        (at(2901), Op::Link(1, 1, deaf)),
        (at(3500), Op::Restart(1, Duration::from_millis(10))),
        (at(3600), Op::Link(0, 1, clean())),
        (at(3600), Op::Link(1, 1, clean())),
    ];
    let report = run(lax, ops);
    assert_eq!(report.delivered, 20_000);
    // Word that it begins on a bump, before its call has arrived; the question, and what the new session is told once the question
    // has come to its end, and again once names are known.
    assert_eq!(report.coverage.get(Seen::SwitchRefused), 4);
}

/// A choice that was asked for once more, as a later one than the peer knew, was written down only after
/// the answer. The next daemon gave its version to another choice, and the ends never agreed.
#[test]
fn a_daemon_that_dies_asking_again_leaves_no_version_to_be_used_twice() {
    let deaf = clean().loss(1.0);
    let lingers = Plan {
        lingers: true,
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let mut asked_again = 0;
    for gap in 0..20 {
        let ops = vec![
            (at(1000), Op::Open(lingers)),
            // What B asks is lost, what it answers is not: A hears of the crossing only by that.
            (at(2000), Op::Link(0, 1, deaf.clone())),
            (at(2000), Op::Cross(0, [SCRAMBLE; 2])),
            (at(2002), Op::Link(0, 1, clean())),
            (at(2005 + gap), Op::Restart(0, Duration::from_millis(1))),
            (at(2030), Op::Choose(0, 0, PLAIN)),
        ];
        let report = run(setup(vec![path(true, clean())]), ops);
        assert_eq!(report.delivered, 6000);
        asked_again += report.coverage.get(Seen::AskedAgain);
    }
    assert!(asked_again > 0);
}

/// The simulated daemons numbered their questions from 0 on, so that the answer to one of a daemon that
/// had died was taken for that to another one of the next daemon.
#[test]
fn answers_to_a_daemon_that_died_say_nothing_to_the_next_one() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let deaf = clean().loss(1.0);
    let ops = vec![
        (at(1000), Op::Open(lingers)),
        (at(1000), Op::Open(lingers)),
        // A's first question comes too late for B, which says so; its second one is lost.
        (at(2000), Op::Link(0, 1, deaf.clone())),
        (at(2000), Op::Cross(1, [SCRAMBLE; 2])),
        (at(2001), Op::Link(0, 0, deaf)),
        (at(2002), Op::Choose(0, 0, SCRAMBLE)),
        (at(2010), Op::Restart(0, Duration::from_millis(1))),
        (at(2011), Op::Link(0, 0, clean())),
        (at(2011), Op::Link(0, 1, clean())),
    ];
    let report = run(setup(vec![path(true, clean())]), ops);
    assert_eq!(report.delivered, 12_000);
    assert!(report.coverage.get(Seen::LateAnswer) > 0);
}

/// A daemon told a new session's peer of its choices, once: where the trusted path was away for longer than
/// it waited, the answer came too late, and the rest was not told until the next session.
#[test]
fn what_a_new_session_is_told_is_told_until_there_is_an_answer() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let deaf = clean().loss(1.0);
    let mut late = 0;
    for away in (2250..2400).step_by(5) {
        let ops = vec![
            (at(1000), Op::Open(lingers)),
            (at(2000), Op::Link(0, 0, deaf.clone())),
            (at(2000), Op::Choose(0, 0, SCRAMBLE)),
            (at(2001), Op::Restart(0, Duration::from_millis(1))),
            (at(2002), Op::Link(0, 0, clean())),
            (at(away), Op::Link(0, 1, deaf.clone())),
            (at(away), Op::Link(1, 1, deaf.clone())),
            (at(away + 17_000), Op::Link(0, 1, clean())),
            (at(away + 17_000), Op::Link(1, 1, clean())),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 6000);
        late += report.coverage.get(Seen::LateAnswer);
    }
    assert!(late > 0, "no answer was late");
}

/// A word about a connection waited for a path, until that connection had ended and another one
/// had taken its ports: at one end that one went in plain, while the other end required the bump.
#[test]
fn a_late_word_moves_no_later_connection_of_the_same_ends() {
    let first = plan([100, 100], Order::HalfClose, [false; 2]);
    for require in [[PLAIN; 2], [PLAIN, SCRAMBLE]] {
        let second = Plan {
            port_of: Some(0),
            lingers: true,
            require,
            ..plan([100, 4], Order::Reply, [true; 2])
        };
        let ops = vec![
            (at(1000), Op::Open(first)),
            (at(10_500), Op::Interface(0, 0, false)),
            (at(10_500), Op::Interface(0, 1, false)),
            // It is left in TIME-WAIT where it was closed first.
            (at(10_500), Op::Choose(0, 0, PLAIN)),
            (at(11_500), Op::Open(second)),
            (at(12_000), Op::Interface(0, 0, true)),
            (at(12_000), Op::Interface(0, 1, true)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 304);
        assert_eq!(report.coverage.get(Seen::ChosenOut), 1, "nothing was said");
        assert_eq!(report.coverage.get(Seen::PortsAgain), 1);
        // Peers are asked to confirm where it is, too.
        assert!(
            report.coverage.get(Seen::SocketNamed) > 0,
            "it was not late"
        );
        assert_eq!(report.coverage.get(Seen::SwitchedOut), 0);
    }
}

/// Each bump gave time stamps a floor of its own, so that at a switch a packet that came late by the old
/// one had an older stamp than the kernel had seen (seed 221 of the first histories with all bumps).
#[test]
fn a_thousand_switches_between_all_bumps_lose_nothing() {
    let long = plan([3_000_000, 3_000_000], Order::Both, [true; 2]);
    let far = clean().delay(Duration::from_millis(20));
    let slow = clean().rate(5_000_000);
    let mut ops = vec![(at(1000), Op::Open(long))];
    let bumps = [PLAIN, SCRAMBLE, SHARE, SEAL];
    let mut dice = dibs_netem::rng::Rng::new(7);
    for i in 0..1000 {
        let (host, bump) = (dice.below(2) as usize, dice.pick(&bumps));
        ops.push((at(1010 + 9 * i), Op::Choose(0, host, bump)));
    }
    let paths = vec![path(true, slow), path(false, far), path(false, clean())];
    let report = run(setup(paths), ops);
    assert_eq!(report.delivered, 6_000_000);
    let times = |what| report.coverage.get(what);
    assert!(times(Seen::BumpToBump) > 100, "{report:?}");
    for what in [Seen::Share, Seen::Sealed, Seen::Chained] {
        assert!(times(what) > 100, "{}: {}", what.name(), times(what));
    }
}

/// A daemon died while it asked for a bump other than the one that the peer requires. The next one put the
/// choice in force, was refused, and kept to it: the peer took nothing any more (seed 1318 of the first
/// histories with all bumps). Nobody speaks of the choice now.
#[test]
fn a_choice_that_a_daemon_died_asking_for_does_not_stand_against_what_the_peer_requires() {
    let required = Plan {
        bump: [SEAL; 2],
        require: [SEAL, PLAIN],
        keepalive: Some(Duration::from_secs(2)),
        pause: Duration::from_secs(20),
        ..plan([30_000, 30_000], Order::Both, [true; 2])
    };
    let deaf = clean().loss(1.0);
    for bump in [PLAIN, SCRAMBLE, SHARE] {
        let ops = vec![
            (at(1000), Op::Open(required)),
            (at(2000), Op::Link(0, 1, deaf.clone())),
            (at(2000), Op::Choose(0, 1, bump)),
            (at(2001), Op::Restart(1, Duration::from_millis(1))),
            (at(2002), Op::Link(0, 1, clean())),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 60_000);
        assert_eq!(report.coverage.get(Seen::CrashAsking), 1);
        assert_eq!(report.coverage.get(Seen::OwnRule), 0);
    }
}

/// A choice for plain was made without a session. Before the peer could say that it requires a bump, the
/// user chose something else, and was refused that: what stood before came back, and nobody spoke of it
/// again (seed 727 of the first histories with all bumps).
#[test]
fn a_choice_that_is_taken_back_leaves_none_that_the_peer_refuses() {
    let required = Plan {
        bump: [SEAL; 2],
        require: [SEAL, PLAIN],
        keepalive: Some(Duration::from_secs(2)),
        pause: Duration::from_secs(20),
        ..plan([30_000, 30_000], Order::Both, [true; 2])
    };
    for later in (60..160).step_by(4) {
        let ops = vec![
            (at(1000), Op::Open(required)),
            (at(1500), Op::Interface(1, 0, false)),
            (at(1501), Op::Restart(1, Duration::ZERO)),
            (at(2000), Op::Choose(0, 1, PLAIN)),
            (at(2500), Op::Interface(1, 0, true)),
            (at(2500 + later), Op::Choose(0, 1, SCRAMBLE)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 60_000);
        for happened in [Seen::NoSession, Seen::OwnRule] {
            assert!(report.coverage.get(happened) > 0, "{happened:?}");
        }
    }
}

/// What both daemons told each other of a choice that was in force got no answer; meanwhile another choice
/// waited, hid it, and came to nothing. It was not told again, and each end kept its own (seed 473986).
#[test]
fn a_choice_that_another_one_hid_is_told_again() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let mut refused = 0;
    for away in 1115..1130 {
        let ops = vec![
            (at(500), Op::Open(lingers)),
            // Both die before they hear of each other's.
            (at(1100), Op::Cross(0, [PLAIN; 2])),
            (at(1100), Op::Restart(0, Duration::from_millis(1))),
            (at(1100), Op::Restart(1, Duration::from_millis(1))),
            // The session comes, and what is said by it gets nowhere.
            (at(away), Op::Outage(0, true)),
            (at(away), Op::Outage(1, true)),
            (at(1200), Op::Cross(0, [SEAL; 2])),
            (at(18_000), Op::Outage(0, false)),
            (at(18_000), Op::Outage(1, false)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 6000);
        refused += report.coverage.get(Seen::Refused);
    }
    assert!(refused > 0, "no choice came to nothing");
}

/// The peer agreed to a choice, died, and told it back; its user chose again. Then the first question was
/// given up for want of an answer, and put the connection back to where it had been, still locked to where
/// it was (seeds 474461, 476849).
#[test]
fn a_question_that_was_never_answered_undoes_no_later_choice() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        bump: [SEAL; 2],
        ..plan([3000, 3000], Order::Both, [true; 2])
    };
    let deaf = clean().loss(1.0);
    let mut superseded = 0;
    for away in 2014..2020 {
        let ops = vec![
            (at(1000), Op::Open(lingers)),
            (at(2000), Op::Choose(0, 0, PLAIN)),
            // It has got the question; that it follows is lost.
            (at(away), Op::Link(0, 1, deaf.clone())),
            (at(2030), Op::Restart(1, Duration::from_millis(1))),
            (at(2031), Op::Link(0, 1, clean())),
            (at(4000), Op::Choose(0, 1, SCRAMBLE)),
        ];
        let report = run(setup(vec![path(true, clean())]), ops);
        assert_eq!(report.delivered, 6000);
        let unanswered = report.coverage.get(Seen::Unanswered);
        assert_eq!(unanswered, 0, "nothing came back");
        superseded += report.coverage.get(Seen::Superseded);
    }
    assert!(superseded > 0, "the first question was answered");
}

/// A host that was sending had left for plain, on its peer's word, when the peer could not follow: it stayed
/// in plain, by a choice that did not stand (seed 4001313).
#[test]
fn who_left_comes_back_if_its_peer_cannot_follow() {
    let sends = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3_000_000, 3000], Order::Both, [true; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(sends)),
        (at(1100), Op::Unable(1, Duration::from_secs(3))),
        (at(1200), Op::Choose(0, 0, PLAIN)),
    ];
    let report = run(setup(vec![path(true, clean())]), with_rest(ops));
    assert_eq!(report.delivered, 3_003_000);
    for happened in [Seen::LeftFirst, Seen::Failed, Seen::PutBack] {
        assert!(report.coverage.get(happened) > 0, "{happened:?}");
    }
}

/// A choice that was made without a session was told once, when the peer could not carry it out, and then
/// not before the next session (seeds 4000134, 4009915).
#[test]
fn what_a_peer_could_not_carry_out_it_is_told_again() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let deaf = clean().loss(1.0);
    let ops = vec![
        (at(1000), Op::Open(lingers)),
        (at(2000), Op::Link(0, 0, deaf)),
        (at(2000), Op::Restart(0, Duration::from_millis(1))),
        (at(2010), Op::Choose(0, 0, PLAIN)),
        (at(2010), Op::Unable(1, Duration::from_secs(6))),
        (at(2020), Op::Link(0, 0, clean())),
    ];
    let report = run(setup(vec![path(true, clean())]), with_rest(ops));
    assert_eq!(report.delivered, 6000);
    for happened in [Seen::NoSession, Seen::Failed] {
        assert!(report.coverage.get(happened) > 0, "{happened:?}");
    }
}

/// A daemon says that its host has chosen in the last of all generations, and that somebody else has. What the
/// user of the other end chooses afterwards holds at both ends.
#[test]
fn a_peer_makes_no_choice_that_cannot_be_overruled() {
    let lingers = Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    for (last, by) in [(PLAIN, 2), (SHARE, 2), (PLAIN, 9), (SHARE, 9)] {
        let ops = vec![
            (at(1000), Op::Open(lingers)),
            (at(2000), Op::Choose(0, 1, SCRAMBLE)),
            (at(4000), Op::Outbid(0, 1, SEAL, by)),
            (at(6000), Op::Choose(0, 0, last)),
            (at(8000), Op::Outbid(0, 1, SEAL, by)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), with_rest(ops));
        assert_eq!(report.delivered, 6000);
        let seen = |what| report.coverage.get(what);
        assert_eq!(seen(Seen::VersionRefused), 2, "by {by}");
        // Of the two that were chosen, and no other.
        let chosen = [Seen::SwitchedIn, Seen::SwitchedOut].map(seen);
        assert_eq!(chosen.iter().sum::<u64>(), 2, "{chosen:?}");
    }
}

/// A connection that began on its bump, behind a firewall that never saw it: a choice and a mark of plain used to break
/// it.
#[test]
fn what_plain_does_not_carry_stays_on_its_bump() {
    let walled = Setup {
        leaving: Leaving::Firewalled,
        follow: true,
        ..setup(vec![path(true, clean())])
    };
    let lingers = |bump| Plan {
        lingers: true,
        ..plan([300_000, 300_000], Order::Both, bump)
    };
    for by in [0, 1] {
        let ops = vec![
            (at(1000), Op::Open(lingers([true; 2]))),
            (at(1000), Op::Open(lingers([false; 2]))),
            (at(1020), Op::Choose(1, by, SCRAMBLE)),
            (at(1500), Op::Choose(0, by, PLAIN)),
            (at(1500), Op::Choose(1, by, PLAIN)),
        ];
        let report = run(walled.clone(), with_rest(ops));
        assert_eq!(report.delivered, 1_200_000);
        let seen = |seen| report.coverage.get(seen);
        assert_eq!((seen(Seen::PlainRefused), seen(Seen::PlainProved)), (1, 1));
    }
}

/// The same where plain carries all, with losses on the way.
#[test]
fn what_plain_carries_goes_there() {
    let open = Setup {
        leaving: Leaving::Proved,
        direct: clean().loss(0.2),
        follow: true,
        ..setup(vec![path(true, clean())])
    };
    let lingers = Plan {
        lingers: true,
        ..plan([30_000, 30_000], Order::Both, [true; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(lingers)),
        (at(1500), Op::Choose(0, 0, PLAIN)),
    ];
    let report = run(open, with_rest(ops));
    assert_eq!(report.coverage.get(Seen::PlainProved), 1);
}
