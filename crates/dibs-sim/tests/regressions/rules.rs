//! Rules that come and go.

use super::*;

fn rule(level: Level, bump: BumpId) -> Rule {
    let meant = Selected::Ports(0..=9_999);
    let holds = true;
    Rule {
        bump,
        level,
        meant,
        holds,
    }
}

fn ruled(ops: Vec<(Time, Op)>) -> Report {
    let paths = vec![path(true, clean()), path(false, clean())];
    let setup = Setup {
        follow: true,
        ..setup(paths)
    };
    run(setup, with_rest(ops))
}

/// Rules of both hosts wanted one connection on different bumps. For a moment both had it on one of them, and one
/// end locked it there, for good: it dropped what the other sent (seed 65000104).
#[test]
fn rules_that_contradict_each_other_at_the_two_ends_lock_nothing() {
    for between in [0, 100, 2000, 5000] {
        let ops = vec![
            (at(1000), Op::Open(lingering([3_000_000, 3_000_000]))),
            (at(1100), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])),
            (
                at(1100 + between),
                Op::Rules(1, vec![rule(Level::Usual, bump::SCRAMBLE)]),
            ),
        ];
        let report = ruled(ops);
        assert_eq!(report.delivered, 6_000_000);
        assert!(report.coverage.get(Seen::RuleMoved) > 0);
    }
}

/// The peer went to where a rule of its own wanted a connection, which a rule here required elsewhere; that rule went,
/// and the lock stayed (seed 65001464).
#[test]
fn what_was_required_stays_locked_to_no_bump_that_the_peer_has_left() {
    let ops = vec![
        (at(1000), Op::Open(lingering([300_000, 300_000]))),
        (
            at(1000),
            Op::Rules(0, vec![rule(Level::Require, bump::SEAL)]),
        ),
        (
            at(1000),
            Op::Rules(1, vec![rule(Level::Require, bump::SEAL)]),
        ),
        (
            at(5000),
            Op::Rules(0, vec![rule(Level::Usual, bump::SCRAMBLE)]),
        ),
        (at(6000), Op::Rules(1, vec![rule(Level::Usual, bump::SEAL)])),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 600_000);
    assert!(report.coverage.get(Seen::Locked) > 0);
}

/// A rule that does not require its bump was made where plain had been chosen, and stood against the peer's word of
/// that choice: with the next session one end gave it up, and the other did not (seeds 65000824, 65000953).
#[test]
fn a_choice_that_both_ends_know_is_not_given_up_for_a_later_rule() {
    for (restarted, chooser) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let ops = vec![
            (at(1000), Op::Open(lingering([3000, 3000]))),
            (at(2000), Op::Choose(0, chooser, PLAIN)),
            (at(4000), Op::Rules(1, vec![rule(Level::Usual, bump::SEAL)])),
            (at(6000), Op::Restart(restarted, Duration::from_millis(10))),
            (at(9000), Op::Choose(0, 0, PLAIN)),
        ];
        let report = ruled(ops);
        assert_eq!(report.delivered, 6000);
        let [moved, given_up] = [Seen::RuleMoved, Seen::OwnRule].map(|it| report.coverage.get(it));
        assert_eq!((moved, given_up), (0, 0));
    }
}

/// The same of a choice for another bump, when the peer's rule refused plain (seeds 65000540, 65000695).
#[test]
fn who_may_not_go_back_to_plain_stays_where_it_was_chosen_to_be() {
    let ops = vec![
        (at(1000), Op::Open(lingering([3000, 3000]))),
        (at(2000), Op::Choose(0, 0, SCRAMBLE)),
        (at(4000), Op::Rules(1, vec![rule(Level::Usual, bump::SEAL)])),
        (at(6000), Op::Choose(0, 0, PLAIN)),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 6000);
    let [refused, given_up] = [Seen::Refused, Seen::OwnRule].map(|it| report.coverage.get(it));
    assert_eq!((refused, given_up), (1, 0));
}

/// The peer could not follow what a rule required, against a choice that stood; when the rule went, the kernel had the
/// connection where that had wanted it, and the daemons said otherwise (seed 65000397).
#[test]
fn a_choice_is_in_force_again_once_no_rule_stands_against_it() {
    let ops = vec![
        (at(1000), Op::Open(lingering([3000, 3000]))),
        (at(2000), Op::Choose(0, 0, SCRAMBLE)),
        (at(4000), Op::Unable(1, Duration::from_secs(2))),
        (
            at(4100),
            Op::Rules(0, vec![rule(Level::Require, bump::SEAL)]),
        ),
        (at(8000), Op::Rules(0, vec![])),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 6000);
    for happened in [Seen::ChoiceOverruled, Seen::Failed, Seen::ChoiceLeft] {
        assert!(report.coverage.get(happened) > 0, "{happened:?}");
    }
}

/// The peer could not do its part when a rule was made, and was not asked again: what the rule required never came.
#[test]
fn a_peer_that_could_not_follow_a_rule_is_asked_again() {
    for level in [Level::Usual, Level::Require] {
        let ops = vec![
            (at(1000), Op::Open(lingering([300_000, 300_000]))),
            (at(1050), Op::Unable(1, Duration::from_secs(4))),
            (at(1060), Op::Rules(0, vec![rule(level, bump::SEAL)])),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), with_rest(ops));
        assert_eq!(report.delivered, 600_000);
        for happened in [Seen::Failed, Seen::RuleAgain, Seen::RuleFollowed] {
            assert!(report.coverage.get(happened) > 0, "{happened:?}");
        }
    }
}

/// A rule was removed while there was no session: the peer stayed on its bump, and locked (seed 65000370).
#[test]
fn a_peer_hears_with_the_next_session_that_a_rule_is_gone() {
    let plan = Plan {
        keepalive: None,
        pause: Duration::from_secs(20),
        ..lingering([3_000_000, 0])
    };
    let ops = vec![
        (at(1000), Op::Open(plan)),
        (at(1010), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])),
        (at(6000), Op::Cut(Duration::from_secs(5))),
        (at(6100), Op::Restart(0, Duration::from_millis(10))),
        (at(7000), Op::Rules(0, vec![])),
        (at(20_000), Op::Rules(0, vec![])),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 3_000_000);
    for happened in [Seen::RuleMoved, Seen::RuleFreed, Seen::RuleAgain] {
        assert!(report.coverage.get(happened) > 0, "{happened:?}");
    }
}

/// A rule ended whose connections had begun on its bump, behind a firewall that never saw them: they used to break.
#[test]
fn what_plain_does_not_carry_stays_when_its_rule_ends() {
    let setup = Setup {
        leaving: Leaving::Firewalled,
        follow: true,
        ..setup(vec![path(true, clean())])
    };
    // Of the host that opens the connection: so its SYN goes by the bump.
    let ops = vec![
        (at(500), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])),
        (at(1000), Op::Open(lingering([300_000, 300_000]))),
        (at(1500), Op::Rules(0, Vec::new())),
    ];
    let report = run(setup, with_rest(ops));
    assert_eq!(report.delivered, 600_000);
    assert!(report.coverage.get(Seen::RuleFreed) > 0);
    assert!(report.coverage.get(Seen::PlainRefused) > 0);
    assert_eq!(report.coverage.get(Seen::PlainProved), 0);
}

/// Rules of both hosts wanted a connection that began by one of them, and the kernel had it there; once that rule was gone,
/// plain did not carry it, and it stayed where nobody wanted it any more (seeds 300000142, 300000480).
#[test]
fn what_one_rule_lets_go_goes_where_a_rule_of_the_peer_wants_it() {
    for leaving in [Leaving::Proved, Leaving::Firewalled] {
        let setup = Setup {
            leaving,
            follow: true,
            ..setup(vec![path(true, clean())])
        };
        let ops = vec![
            (at(500), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])),
            (at(1000), Op::Open(lingering([300_000, 300_000]))),
            (
                at(2000),
                Op::Rules(1, vec![rule(Level::Usual, bump::SCRAMBLE)]),
            ),
            (at(4000), Op::Rules(0, Vec::new())),
        ];
        let report = run(setup, with_rest(ops));
        assert_eq!(report.delivered, 600_000);
        assert!(report.coverage.get(Seen::RuleFreed) > 0);
    }
}

/// Each host had heard that the other one's rule wants the connection there. Both rules ended, and each left it there for the other's.
#[test]
fn what_rules_of_both_hosts_let_go_at_once_goes_to_plain() {
    let rules = vec![rule(Level::Usual, bump::SEAL)];
    for later in [0, 3, 40, 2000] {
        let ops = vec![
            (at(500), Op::Open(lingering([300_000, 300_000]))),
            (at(1500), Op::Rules(0, rules.clone())),
            (at(2500), Op::Rules(1, rules.clone())),
            (at(4000), Op::Rules(0, Vec::new())),
            (at(4000 + later), Op::Rules(1, Vec::new())),
        ];
        let report = ruled(ops);
        assert_eq!(report.delivered, 600_000);
        assert_eq!(report.unkept, 0, "{later}");
        assert!(report.coverage.get(Seen::RuleFreed) > 0);
    }
}

/// Connections of rules that ended while the peer had not seen that plain carries them, or while both hosts moved them at once: each host
/// took them for the other one's.
#[test]
fn what_nothing_keeps_leaves() {
    for seed in [
        112,
        357,
        823,
        911,
        1020,
        1740,
        1_099_516_900_848,
        1_099_516_901_407,
        2_199_099_000_059,
        2_199_099_002_217,
    ] {
        let report = dibs_sim::run(seed).unwrap_or_else(|text| panic!("{text}"));
        assert_eq!(report.unkept, 0, "{seed}");
    }
}

/// A user was told that rules could not be saved, and nobody tried again: what one end required alone never got through
/// (seed 300000091).
#[test]
fn rules_that_could_not_be_saved_are_changed_later() {
    let require = vec![rule(Level::Require, bump::SEAL)];
    let ops = vec![
        (at(1000), Op::Rules(0, require.clone())),
        (at(1000), Op::Rules(1, require)),
        (at(2000), Op::Unable(0, Duration::from_secs(3))),
        (at(2100), Op::Rules(0, Vec::new())),
        (at(2100), Op::Rules(1, Vec::new())),
        (at(2200), Op::Open(lingering([3000, 3000]))),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 6000);
    assert!(report.coverage.get(Seen::FailedHere) > 0);
}

/// Another program took the mark off a connection of a rule, and the rule ended before the next packet: the connection
/// went on in plain, which does not carry it (seed 310008896).
#[test]
fn what_is_taken_off_the_bump_of_a_rule_is_put_back_at_once() {
    let setup = Setup {
        leaving: Leaving::Firewalled,
        follow: true,
        ..setup(vec![path(true, clean())])
    };
    let plan = Plan {
        pause: Duration::from_secs(9),
        ..lingering([3000, 3000])
    };
    let ops = vec![
        (at(500), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])),
        (at(1000), Op::Open(plan)),
        (at(4000), Op::Mark(0, 0, None, false)),
        (at(4500), Op::Rules(0, Vec::new())),
    ];
    let report = run(setup, with_rest(ops));
    assert_eq!(report.delivered, 6000);
    assert!(report.coverage.get(Seen::MarkedByHand) > 0);
    assert!(report.coverage.get(Seen::PlainRefused) > 0);
}

/// One end gave up what was chosen for what the other required, and that rule ended before the other chose so, too: what was
/// chosen counted again at one end alone (seed 340001107).
#[test]
fn a_choice_that_counts_again_is_told_to_the_peer() {
    let ops = vec![
        (at(1000), Op::Open(lingering([3000, 3000]))),
        (at(2000), Op::Choose(0, 0, SCRAMBLE)),
        (at(3900), Op::Unable(0, Duration::from_millis(400))),
        (
            at(4000),
            Op::Rules(1, vec![rule(Level::Require, bump::SEAL)]),
        ),
        (at(4500), Op::Choose(0, 0, SHARE)),
        (at(4700), Op::Rules(1, vec![])),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 6000);
    for happened in [Seen::OwnRule, Seen::ChoiceLeft] {
        assert!(report.coverage.get(happened) > 0, "{happened:?}");
    }
}

/// A connection is not to wait for a peer that is gone longer than anybody needs to find that out.
#[test]
fn a_connection_whose_rule_prefers_a_bump_begins_in_plain_once_the_peer_is_gone() {
    let ops = vec![
        (
            at(1000),
            Op::Rules(0, vec![rule(Level::Prefer, bump::SEAL)]),
        ),
        (at(5000), Op::Restart(1, Duration::from_secs(60))),
        (
            at(5100),
            Op::Open(plan([3000, 3000], Order::Both, [false; 2])),
        ),
        // It moves once the peer is back, if it is still there.
        (at(5100), Op::Open(lingering([3000, 3000]))),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 12_000);
    let [waited, moved] = [Seen::RuleWaited, Seen::RuleMoved].map(|it| report.coverage.get(it));
    assert_eq!((waited, moved), (2, 1));
}

/// Rules hold by the time of day alone: what is on their bump leaves it, and comes back, with a state file that takes
/// nothing.
#[test]
fn connections_follow_the_time_of_day_although_nothing_can_be_saved() {
    let holds = rule(Level::Usual, bump::SEAL);
    let ended = Rule {
        holds: false,
        ..holds.clone()
    };
    let ops = vec![
        (at(1000), Op::Open(lingering([3000, 3000]))),
        (at(2000), Op::Rules(0, vec![holds.clone()])),
        (at(5000), Op::Unable(0, Duration::from_secs(60))),
        (at(6000), Op::Rules(0, vec![ended])),
        (at(9000), Op::Rules(0, vec![holds])),
    ];
    let report = ruled(ops);
    assert_eq!(report.delivered, 6000);
    let [turned, moved, freed] =
        [Seen::RulesTurned, Seen::RuleMoved, Seen::RuleFreed].map(|it| report.coverage.get(it));
    assert_eq!((turned, moved, freed), (2, 2, 1));
}

/// No path carries anything for as long as an answer is waited for, or longer: the peer is to hear which bumps the rule needs all the same.
#[test]
fn what_a_rule_needs_is_said_when_paths_carry_again() {
    let outage = |millis, is_out| (0..2).map(move |path| (at(millis), Op::Outage(path, is_out)));
    for ends in [15_500, 40_000] {
        let mut ops: Vec<(Time, Op)> = outage(1000, true).collect();
        ops.push((at(1100), Op::Rules(0, vec![rule(Level::Usual, bump::SEAL)])));
        ops.extend(outage(ends, false));
        ops.push((at(ends + 10_000), Op::Open(lingering([3000, 3000]))));
        let report = ruled(ops);
        assert_eq!(report.delivered, 6000);
        assert!(report.coverage.get(Seen::Wanted) > 0, "{ends}");
    }
}
