//! Marks that other programs set, and entries that conntrack loses.

use super::*;

/// Histories of a connection that begins on these bumps, by the marks of other programs.
fn marked(bump: [Option<BumpId>; 2], follow: bool, mut ops: Vec<(Time, Op)>) -> Report {
    let setup = Setup {
        follow,
        leaving: Leaving::Proved,
        ..setup(vec![path(true, clean()), path(false, clean())])
    };
    let plan = Plan {
        bump,
        ..lingering([300_000, 300_000])
    };
    ops.insert(0, (at(1000), Op::Open(plan)));
    let report = run(setup, with_rest(ops));
    assert_eq!(report.delivered, 600_000);
    report
}

/// Each host told the other of the mark here, and followed the other's: both locked the connection, each to the other's bump
/// (seed 300000151).
#[test]
fn marks_that_contradict_each_other_at_the_two_ends_lock_nothing_to_one_end() {
    for follow in [true, false] {
        let report = marked(
            [SCRAMBLE, SEAL],
            follow,
            vec![(at(5000), Op::Control(0, 1))],
        );
        assert!(report.coverage.get(Seen::MarkFollowed) > 0);
        assert!(report.coverage.get(Seen::Locked) > 0);
    }
}

/// A mark for a bump that rules of the peer use was taken for the peer's doing, and the peer stayed locked to another one
/// (seed 300000514).
#[test]
fn the_peer_is_told_of_a_mark_for_a_bump_that_its_rules_use() {
    let meant = Selected::Ports(9..=9);
    let rule = Rule {
        bump: bump::SEAL,
        level: Level::Usual,
        meant,
        holds: true,
    };
    let report = marked(
        [SCRAMBLE, SCRAMBLE],
        true,
        vec![
            (at(1500), Op::Rules(0, vec![rule])),
            (at(4000), Op::Mark(0, 1, SEAL, false)),
        ],
    );
    assert!(report.coverage.get(Seen::MarkedByHand) > 0);
    assert!(report.coverage.get(Seen::MarkFollowed) > 0);
}

/// The entry was lost while the peer was asked about a choice: the connection went on in plain (seed 300000637).
#[test]
fn an_entry_that_is_lost_while_the_peer_is_asked_is_made_again() {
    for millis in [0, 3, 8, 12] {
        marked(
            [SCRAMBLE, SCRAMBLE],
            false,
            vec![
                (at(3000), Op::Choose(0, 0, SCRAMBLE)),
                (at(6000), Op::Choose(0, 0, SEAL)),
                (at(6000 + millis), Op::Flush(0)),
            ],
        );
    }
}

/// Another program chose a bump that could not be, and its mark stayed, of which no peer knew.
#[test]
fn a_choice_of_another_program_that_cannot_be_is_undone() {
    for able in [true, false] {
        let mut ops = vec![(at(4000), Op::Mark(0, 0, SEAL, true))];
        if !able {
            ops.insert(0, (at(3500), Op::Unable(0, Duration::from_secs(2))));
        }
        let report = marked([SCRAMBLE, SCRAMBLE], true, ops);
        assert!(report.coverage.get(Seen::MarkChosen) > 0);
    }
}

/// A program chose plain for a connection whose bump a rule requires, and the mark was not written over: its kernel sent nothing any
/// more that would have had it put right, so one end stayed locked to the other's bump (seed 1099511632935).
#[test]
fn a_choice_of_another_program_against_a_rule_that_requires_its_bump_is_undone() {
    let rule = Rule {
        bump: bump::SEAL,
        level: Level::Require,
        meant: Selected::Ports(0..=9),
        holds: true,
    };
    let rules = |host| (at(2000), Op::Rules(host, vec![rule.clone()]));
    let plan = Plan {
        lingers: true,
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(plan)),
        (at(1100), Op::Choose(0, 1, SEAL)),
        rules(0),
        rules(1),
        (at(6000), Op::Mark(0, 1, PLAIN, true)),
    ];
    let setup = Setup {
        follow: true,
        ..setup(vec![path(true, clean())])
    };
    let report = run(setup, with_rest(ops));
    assert!(report.coverage.get(Seen::MarkedByHand) > 0);
}
