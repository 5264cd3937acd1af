//! Devices on the ordinary route, and connections that two hosts call by different names.

use super::*;

/// A router that translates, takes up nothing in its midst, and resets what it does not know.
const RESETS: Between = Between {
    translates: true,
    tracks: false,
    forgets: None,
    adopts: false,
    resets: true,
    renumbers: false,
    lost: 0.0,
    late: None,
    forges: false,
};

fn behind(between: Between) -> Setup {
    Setup {
        follow: true,
        leaving: Leaving::Proved,
        between,
        ..setup(vec![path(true, clean()), path(false, clean())])
    }
}

/// The same with paths that drop all from then on, both ways.
fn cut(from: u64, to: u64) -> (Time, Op) {
    (at(from), Op::Cut(Duration::from_millis(to - from)))
}

fn begins(bump: Option<BumpId>, bytes: [u64; 2]) -> Plan {
    Plan {
        bump: [bump; 2],
        ..lingering(bytes)
    }
}

/// A reset of the connection before pulled a connection of the same ends to a bump, which the far end knew by another name: its
/// handshake never ended (seeds 1099511631322, 2199023257600).
#[test]
fn a_late_reset_takes_no_later_connection_to_its_bump() {
    let mut again = 0;
    for after in 5..16 {
        let before = Plan {
            lingers: false,
            ..begins(SEAL, [600_000, 0])
        };
        let later = Plan {
            port_of: Some(0),
            ..begins(PLAIN, [3000, 3000])
        };
        let ops = vec![
            (at(1000), Op::Open(before)),
            // What A has sent by then B answers with resets.
            (at(1060), Op::Abort(0, 1)),
            (at(1060 + after), Op::Open(later)),
        ];
        let report = run(behind(RESETS), with_rest(ops));
        again += report.coverage.get(Seen::PortsAgain);
    }
    assert!(again > 0);
}

/// A program chose plain for a connection that plain does not carry, while the daemon found out the same of another one: until
/// that was over nothing put the first one back (seed 1099511632876).
#[test]
fn a_connection_that_is_taken_to_plain_waits_on_its_bump_for_its_turn() {
    let ops = vec![
        (at(1000), Op::Open(begins(SEAL, [3000, 3000]))),
        (at(1000), Op::Open(begins(SEAL, [3_000_000, 0]))),
        (at(1100), Op::Choose(0, 0, PLAIN)),
        (at(1200), Op::Mark(1, 0, PLAIN, true)),
    ];
    let report = run(behind(RESETS), with_rest(ops));
    assert!(report.coverage.get(Seen::MarkChosen) > 0);
    assert!(report.coverage.get(Seen::PlainRefused) > 0);
}

/// A user chose a bump again for a connection that he had taken off it a moment before. It still had its rule there, and went to the bump
/// before the peer did; what the peer acknowledged in plain its router had not seen, and answered with a reset.
#[test]
fn a_connection_has_no_rule_of_its_own_left_when_it_may_follow_its_peer() {
    let busy = Plan {
        slow: Some(Duration::from_millis(5)),
        ..begins(PLAIN, [3_000_000, 3_000_000])
    };
    for after in [200, 400, 600, 800] {
        let ops = vec![
            (at(1000), Op::Open(busy)),
            (at(2000), Op::Choose(0, 0, SEAL)),
            (at(5000), Op::Choose(0, 0, PLAIN)),
            (at(5000 + after), Op::Choose(0, 0, SEAL)),
        ];
        let report = run(behind(RESETS), with_rest(ops));
        assert!(report.coverage.get(Seen::LeftFirst) > 0, "{after}");
        assert_eq!(report.coverage.get(Seen::Pinned), 0, "{after}");
    }
}

/// The same by no choice, while a peer was asked that did not answer: the mark was taken for what stood before
/// (seed 1099511629871).
#[test]
fn a_connection_that_is_taken_to_plain_is_put_back_while_its_peer_is_asked() {
    for first in [PLAIN, SCRAMBLE] {
        let mut ops = vec![
            (at(1000), Op::Open(begins(SEAL, [300_000, 300_000]))),
            cut(2000, 9000),
            (at(2100), Op::Choose(0, 0, SHARE)),
            (at(2200), Op::Mark(0, 0, PLAIN, false)),
        ];
        if first.is_some() {
            ops.insert(1, (at(1300), Op::Choose(0, 0, first)));
        }
        run(behind(RESETS), with_rest(ops));
    }
}

/// A program chose plain for a connection before its host knew that it was of a peer, whose later choice was then refused for
/// ever (seed 1099511628553).
#[test]
fn a_choice_of_a_program_for_a_connection_that_is_not_known_yet_is_the_older_one() {
    let ops = vec![
        (at(1000), Op::Open(begins(PLAIN, [3000, 3000]))),
        (at(1200), Op::Mark(0, 1, PLAIN, true)),
        (at(1400), Op::Choose(0, 0, SEAL)),
    ];
    let adopts = Between {
        adopts: true,
        ..RESETS
    };
    let report = run(behind(adopts), with_rest(ops));
    assert!(report.coverage.get(Seen::MarkedByHand) > 0);
}

/// An entry was lost while its connection was about to follow the peer to plain: the kernel had the choice before the state file
/// (seed 2199023263105).
#[test]
fn a_choice_of_the_peer_is_saved_before_the_kernel_knows() {
    let tracks = Between {
        tracks: true,
        resets: false,
        ..RESETS
    };
    for lost in (3500..3900).step_by(10) {
        let ops = vec![
            (at(1000), Op::Open(begins(PLAIN, [3_000_000, 3_000_000]))),
            (at(1200), Op::Choose(0, 0, SCRAMBLE)),
            (at(2500), Op::Choose(0, 0, PLAIN)),
            (at(3500), Op::Choose(0, 0, PLAIN)),
            (at(lost), Op::Flush(1)),
            (at(lost + 1), Op::Restart(1, Duration::from_millis(1))),
        ];
        run(behind(tracks), with_rest(ops));
    }
}

/// A router that translates, follows numbers, and resets what it would have translated if it had not taken it for invalid.
const TRACKS: Between = Between {
    tracks: true,
    ..RESETS
};

/// Programs that read slowly keep bytes under way by the bump while the host that leaves first says something in plain: the other
/// kernel took the window of that, and what it sent by the bump was acknowledged in plain before a router had seen it.
#[test]
fn what_is_sent_by_the_bump_once_the_other_end_has_left_does_not_end_the_connection() {
    let far = clean().delay(Duration::from_millis(30));
    for (host, after) in [0, 1]
        .into_iter()
        .flat_map(|host| (8..14).map(move |ms| (host, ms)))
    {
        let plan = Plan {
            slow: Some(Duration::from_millis(2)),
            ..begins(PLAIN, [4_000_000; 2])
        };
        let ops = vec![
            (at(1000), Op::Open(plan)),
            (at(1500), Op::Choose(0, 0, SCRAMBLE)),
            (at(6000 + after), Op::Choose(0, host, PLAIN)),
        ];
        let setup = Setup {
            paths: vec![path(true, far.clone()), path(false, far.clone())],
            ..behind(TRACKS)
        };
        run(setup, with_rest(ops));
    }
}

/// A connection that had carried much by its bump left for plain before routers had heard of all of it.
#[test]
fn a_connection_leaves_for_plain_only_once_routers_have_heard_of_all() {
    let mut behind_of = 0;
    for after in (1500..1900).step_by(20) {
        let ops = vec![
            (at(1000), Op::Open(begins(PLAIN, [3_000_000; 2]))),
            (at(1200), Op::Choose(0, 0, SCRAMBLE)),
            (at(after), Op::Choose(0, 0, PLAIN)),
        ];
        let report = run(behind(TRACKS), with_rest(ops));
        behind_of += report.coverage.get(Seen::RoutersBehind);
    }
    assert!(behind_of > 0);
}

/// Histories that no few lines show.
///
/// - What came late of a connection was compared with the numbers of the next one of the same ends, on another bump (1099511633084).
/// - No path carried anything just when both ends saw that no bump carries a connection, and nobody tried again (2199023262600).
/// - A host that had started again told its peer of a choice by a name that the peer did not know, and then not again
///   (1099511636148).
/// - A host that had not heard of its peer's abort started again, and called the connection by a name that the peer refuses: shares
///   of what it sent again and again wait there for ten seconds each (1099511628689).
/// - A connection had the ends of one that had been on a bump, began in plain, and was to be silent: what it sent was taken for more of
///   the earlier one (1099511638669).
/// - A daemon that started again compared the numbers of a connection that had long been there, of which data was lost (6558).
/// - A peer said that it had gone to plain, was taken from there by a rule of its own, and the first word came last (628).
/// - What another program chose could not be saved, and was kept by no choice, because the kernel had followed it (9644).
/// - A reset in answer to a forged packet closed a router's entry for good; a forged packet was none (2199023264562, 2199023262716).
/// - A daemon ended while it asked, and the next one marked a connection by a name that the peer did not know (1099511627790), or forgot
///   what had stood before (116).
/// - A connection that began on a bump had the ends of one that began in plain, and its far end the name that the router had given that
///   one, until the match was forgotten (1099511658325, 1099511659043).
/// - A connection came to be known while a host looked which of those that it knew have ended, and was taken for one that has: its
///   choice was forgotten, and its mark cleared (40263, 42397, 44437, 1099511669650).
/// - A firewall changed numbers, nobody had noticed yet, and the byte of a shadow was new to the far kernel (2199023309347); or there was
///   no shadow, and it forgot the connection (2199023280623).
/// - A connection came from plain to a bump that an earlier one of the same ends had begun on, by another name: the far end handed what
///   it sent to that one (1099511670018, 1099511673191).
/// - A daemon asked twice about one move by a rule, and the second answer came after the peer's own rule had moved it (45489).
/// - Another program chose the bump that a connection had by no choice, while its peer was asked about another one, and nobody took that
///   up (67220).
/// - A host had begun anew and called a connection by the address that it lends its peer, which refused that; the peer had nothing to
///   say, and what it was asked to say was lost (1099511811954, 1099511662774). Its daemon refused what was said of it by that address
///   (1099511807359, 1099511725330, 1099511927807).
/// - A server had not heard the end of a handshake in plain, and said its answer again by the bump: its connection was taken for one that
///   began there, so nobody compared numbers that a firewall changed (2199023407174, 2199023414656, 2199023323884).
/// - A connection followed a rule of the peer as its first move, and was taken for one that had been on that bump before: so its numbers
///   counted as those of an earlier one of the same ends (2199023408119).
/// - A connection was matched by a name that an earlier one on the bump had had. Its kernel followed what came by the bump before its daemon
///   moved it, and its flow went on as that of the earlier one (2199023269765).
/// - A window closed before smoltcp sent its FIN again (1099511700355).
/// - A copy of an earlier call took the only socket that listened (1099511642596, 1099511682416).
/// - A firewall moved numbers by about as much as was under way, so they were taken to fit (2199023323982).
/// - Another program took a connection to plain just before both daemons began anew, one of which then knew it by no name of the other
///   (2199023324058).
/// - What was under way in plain was lost, and the other kernel asked now and then by a byte whether this one is there, which was taken
///   for data that this one does not take: its numbers were said to be changed (1099511671623, 1099511644675).
/// - What came late of a connection by one bump was compared with the numbers of the next one of the same ends, which had come from plain
///   to another bump (1099511682177).
/// - A connection whose SYN had gone by a bump was to begin in plain, as the peer did not answer. The answer came by the bump, was taken
///   for a straggler, and plain did not know the connection that followed (211380).
/// - A late urgent pointer was looked for among those of the latest connection of its ends, which had another name (1099511681430).
/// - A host agreed to follow a rule, then its own rule moved the connection, and the first word came last: it was locked to one end
///   (1099511671877).
/// - A daemon died asking, and its peer had agreed. The next one had no session, and gave the same version to the user's next choice
///   (1099511803833).
/// - The simulated kernel had a connection follow a late packet of an earlier one of the same ends, which conntrack takes for invalid
///   (2199023412444).
/// - A firewall changed numbers, and a knock for a rule that had ended took longer than the attempt to take the connection back to plain
///   (2199024762116).
/// - More than a window went by the bump between a knock and the move to plain, behind a firewall that follows numbers (2199024769347).
/// - Shadows were doubled and came late, and each copy had both ends say again all that they had shown since (2199025001560).
/// - A host took long to fall silent by what it knew of its paths, and its peer's window opened meanwhile: what that sent by the bump was
///   acknowledged in plain, by a kernel that had left (2199023901054).
/// - A host that was to take a renumbered connection back knocked for a rule that was gone, for as long as it would have tried to
///   (2199040001598).
/// - A connection that was let follow its peer was put back by a choice for plain that the peer had not agreed to (1099513443844).
/// - A connection began with the ends of one that had ended while that was looked for, and was taken for it: its choice was forgotten, and
///   its mark cleared (1099513438422).
/// - A simulated kernel acknowledged with a number beyond a window that had closed, which a router answered with a reset (2199025061719).
/// - A host agreed to follow its peer to plain, and stayed on its bump, because its own user had asked for plain meanwhile (2199033000369).
/// - Another program's choice waited for its turn, and the entry was lost: it was made again on that bump, but by no choice (801665).
/// - Two simulated kernels took each other's probe, and dropped what acknowledged that, because its bytes were old (1099514006954).
/// - A rule that is new took a locked connection to its bump, while the peer was asked about others: it was locked there (1099523001730).
/// - A host that left first had said nothing by its bump, and its first word made it take data by the bump again, which it acknowledged in
///   plain (2199026002778).
/// - Data in front of what came by a bump was lost in plain, and the bump carried nothing for long, so TCP did not send it again: the
///   numbers were taken to differ (704652, 3201695).
/// - A connection began by another bump than one before it with the same ends, and what it sent there later was taken for that one's
///   (1099514007370).
/// - A late word of a rule that the peer had before kept a connection unlocked for good (2199060001516).
/// - Of data that came again to a kernel that does not take it, later data came first each time (2199080001223); that kernel had just probed
///   a closed window (2199080001390); or nothing but a probe came, and the kernel was silent, as it had not sent what that acknowledged
///   (2199080001438, 2199028002990, 2199040002886).
/// - The first word on a bump was a repetition, and routers were shown no more than that of what went by the bump before (2199070006328).
/// - A host that listened was taken for one that has the connection (828773, 1099520003060, 53000001291, 54000028189).
/// - The peer did not follow what a rule takes to its bump, since it had just left (3200718).
/// - A peer that restarted had left the bump of a lock, which stayed (54000002147, 53000018798, 55000005464).
/// - A host asked its peer to come back to a bump that it was about to leave at the peer's word (54000007482).
/// - Another program took a connection elsewhere with its lock, which stayed (55000040036).
/// - A connection was chosen before its SYN had arrived, and the peer was not told once it had (56000002425, 56000016065, 56000017414,
///   55000022956).
/// - Another program marked what only listened, which has no entry in conntrack (55000042527, 57000004183).
#[test]
fn seeds_that_failed_keep_all_promises() {
    for seed in [
        1_099_511_633_084,
        2_199_023_262_600,
        1_099_511_636_148,
        1_099_511_628_689,
        2_199_023_264_562,
        2_199_023_262_716,
        1_099_511_638_669,
        6558,
        628,
        9644,
        1_099_511_627_790,
        116,
        1_099_511_658_325,
        1_099_511_659_043,
        40_263,
        42_397,
        44_437,
        1_099_511_669_650,
        2_199_023_309_347,
        2_199_023_280_623,
        1_099_511_670_018,
        1_099_511_673_191,
        45_489,
        67_220,
        1_099_511_811_954,
        1_099_511_662_774,
        2_199_023_407_174,
        2_199_023_414_656,
        2_199_023_323_884,
        2_199_023_408_119,
        2_199_023_269_765,
        1_099_511_700_355,
        1_099_511_642_596,
        1_099_511_682_416,
        2_199_023_323_982,
        2_199_023_324_058,
        1_099_511_671_623,
        1_099_511_644_675,
        1_099_511_682_177,
        211_380,
        1_099_511_681_430,
        1_099_511_807_359,
        1_099_511_725_330,
        1_099_511_927_807,
        1_099_511_671_877,
        2_199_023_412_444,
        1_099_511_803_833,
        2_199_024_762_116,
        2_199_024_769_347,
        2_199_025_001_560,
        2_199_023_901_054,
        2_199_040_001_598,
        1_099_513_443_844,
        1_099_513_438_422,
        2_199_025_061_719,
        2_199_033_000_369,
        801_665,
        1_099_514_006_954,
        1_099_523_001_730,
        2_199_026_002_778,
        1_099_514_007_370,
        2_199_060_001_516,
        704_652,
        3_201_695,
        2_199_080_001_223,
        2_199_080_001_390,
        2_199_080_001_438,
        2_199_028_002_990,
        2_199_040_002_886,
        2_199_070_006_328,
        828_773,
        1_099_520_003_060,
        53_000_001_291,
        54_000_028_189,
        3_200_718,
        54_000_002_147,
        53_000_018_798,
        55_000_005_464,
        54_000_007_482,
        55_000_040_036,
        56_000_002_425,
        56_000_016_065,
        56_000_017_414,
        55_000_022_956,
        55_000_042_527,
        57_000_004_183,
        2_199_090_016_532,
        2_199_023_256_704,
        1_099_511_629_028,
        2_199_090_020_653,
    ] {
        dibs_sim::run(seed).unwrap_or_else(|fault| panic!("{fault}"));
    }
}

/// Faults where a connection begins or ends:
///
/// - Ports used again were taken for a renumbered connection, by what one end had heard of the connection before (57000002796,
///   58000017007, 923063, 53000001598, 52000002166, 56000006835, 2199090023200).
/// - A connection whose SYN had gone by its bump was let out directly, and took the answer by the bump for a straggler (58000029892).
/// - The simulator's kernel took a reset for its own that Linux challenges (60000026098).
/// - A firewall renumbered a connection at rest by less than a window, and none of its ends sent data again that would have shown it:
///   each kernel only asked for what the other one had not (2199094000364, 2199090000069, 2199092004777, 2199100012637, 2199100041374).
#[test]
fn connections_that_begin_and_end_keep_all_promises() {
    for seed in [
        57_000_002_796,
        58_000_017_007,
        923_063,
        53_000_001_598,
        52_000_002_166,
        56_000_006_835,
        58_000_029_892,
        2_199_090_023_200,
        60_000_026_098,
        2_199_094_000_364,
        2_199_090_000_069,
        2_199_092_004_777,
        2_199_100_012_637,
        2_199_100_041_374,
    ] {
        dibs_sim::run(seed).unwrap_or_else(|fault| panic!("{fault}"));
    }
}
