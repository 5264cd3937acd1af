//! Faults that random histories found, as histories of their own: what a seed does changes with the
//! simulator, these do not.

use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump;
use dibs_core::counters::Counter;
use dibs_netem::Conditions;
use dibs_settings::{BumpId, Level};
use dibs_sim::adversary::Tamper;
use dibs_sim::coverage::Seen;
use dibs_sim::history::{Op, Order, PathSetup, Plan, Setup};
use dibs_sim::steering::ruling::{Rule, Selected};
use dibs_sim::{History, Report, World};

/// On no bump.
const PLAIN: Option<BumpId> = None;
const SCRAMBLE: Option<BumpId> = Some(bump::SCRAMBLE);
const SHARE: Option<BumpId> = Some(bump::SHARE);
const SEAL: Option<BumpId> = Some(bump::SEAL);

fn at(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

fn path(trusted: bool, link: Conditions) -> PathSetup {
    PathSetup {
        trusted: [trusted; 2],
        v6: false,
        mtu: 1500,
        link: [link.clone(), link],
    }
}

fn clean() -> Conditions {
    Conditions::new()
        .rate(50_000_000)
        .delay(Duration::from_millis(5))
}

fn setup(paths: Vec<PathSetup>) -> Setup {
    Setup {
        direct: clean(),
        tick: [Duration::from_micros(1); 2],
        clock: [0xffff_ff00, 7],
        ..Setup::ordinary(paths)
    }
}

fn plan(bytes: [u64; 2], order: Order, bump: [bool; 2]) -> Plan {
    Plan {
        bump: bump.map(|bump| if bump { SCRAMBLE } else { PLAIN }),
        ..Plan::ordinary(bytes, order, 64 << 10)
    }
}

fn run(setup: Setup, ops: Vec<(Time, Op)>) -> Report {
    let quiet = ops.last().map_or(Time::ZERO, |(at, _)| *at);
    let history = History { setup, ops, quiet };
    World::run(1, &history).unwrap_or_else(|f| panic!("{} at {:?}\n{}", f.what, f.at, f.state))
}

/// The same with time before all calms down, in which hosts stay unable to do what they are to do.
fn with_rest(mut ops: Vec<(Time, Op)>) -> Vec<(Time, Op)> {
    let last = ops.last().expect("something happens").0;
    ops.push((last + Duration::from_secs(5), Op::Control(0, 1)));
    ops
}

/// The first packet in the bump was a bare acknowledgement, which opened the flow without a base:
/// all data behind it stood at wrong numbers.
#[test]
fn a_direction_that_opens_with_an_acknowledgement_carries_data_later() {
    let request = plan([50_000, 50_000], Order::Reply, [false, false]);
    let ops = vec![
        (at(1000), Op::Open(request)),
        // In the midst of the request: the server only acknowledges so far.
        (at(1025), Op::Switch(0, 1, SCRAMBLE)),
    ];
    let report = run(setup(vec![path(true, clean())]), ops);
    assert_eq!(report.delivered, 100_000);
    assert!(report.bytes[0] > 50_000, "the answer went by the bump");
}

/// The timers of paths that nothing could be sent by were due for ever.
#[test]
fn an_outage_beyond_the_session_s_life_keeps_no_daemon_busy() {
    let paths = vec![path(true, clean()), path(false, clean())];
    let ops = vec![
        (
            at(1000),
            Op::Open(plan([1000, 1000], Order::Both, [true; 2])),
        ),
        (at(2000), Op::Interface(0, 0, false)),
        (
            at(250_000),
            Op::Open(plan([1000, 1000], Order::Both, [true; 2])),
        ),
        (at(260_000), Op::Interface(0, 0, true)),
    ];
    assert_eq!(run(setup(paths), ops).delivered, 4000);
}

/// Everything that a restarted daemon's peer still had on its way spoke of paths and flows that the
/// new one did not know.
#[test]
fn restarts_of_both_ends_lose_no_byte() {
    let paths = || vec![path(true, clean()), path(false, clean())];
    for gap in [
        Duration::ZERO,
        Duration::from_millis(30),
        Duration::from_secs(3),
    ] {
        let ops = vec![
            (
                at(1000),
                Op::Open(plan([2_000_000, 500_000], Order::Both, [true; 2])),
            ),
            (at(1150), Op::Restart(0, gap)),
            (at(1400), Op::Restart(1, gap)),
            (at(1401), Op::Restart(0, gap)),
        ];
        assert_eq!(run(setup(paths()), ops).delivered, 2_500_000);
    }
}

/// With the last confirmation lost one end took the path as open, the other refused all it brought.
#[test]
fn a_path_opens_however_much_of_its_opening_is_lost() {
    let lossy = clean().loss(0.5);
    for seed in 0..20 {
        let mut ops: Vec<_> = (0..10)
            .map(|i| {
                (
                    at(300 * i),
                    Op::Restart((i % 2) as usize, Duration::from_millis(i)),
                )
            })
            .collect();
        ops.push((
            at(9000),
            Op::Open(plan([3000, 3000], Order::Both, [true; 2])),
        ));
        let history = History {
            setup: setup(vec![path(true, lossy.clone()), path(false, lossy.clone())]),
            ops,
            quiet: at(9000),
        };
        World::run(seed, &history).unwrap_or_else(|f| panic!("{seed}: {} {}", f.what, f.state));
    }
}

/// A question that somebody forwarded to another path's socket took that path's number for good.
#[test]
fn who_forwards_old_datagrams_shuts_no_path() {
    for seed in 0..20 {
        let mut ops = Vec::new();
        for i in 0..40 {
            ops.push((at(50 * i), Op::Attack((i % 2) as usize, 50)));
            if i % 10 == 0 {
                ops.push((at(50 * i), Op::Restart(1, Duration::ZERO)));
            }
        }
        ops.push((
            at(2100),
            Op::Open(plan([100_000, 100_000], Order::Both, [true; 2])),
        ));
        let lossy = clean().loss(0.3);
        let history = History {
            setup: setup(vec![path(true, lossy.clone()), path(false, lossy)]),
            ops,
            quiet: at(2100),
        };
        World::run(seed, &history).unwrap_or_else(|f| panic!("{seed}: {} {}", f.what, f.state));
    }
}

/// Pieces of a segment that lay behind its urgent pointer had shorter headers than the datagrams
/// were cut for: what was left over was taken for frames.
#[test]
fn urgent_data_is_cut_like_other_data() {
    let urgent = Plan {
        urgent: true,
        ..plan([200_000, 200_000], Order::Both, [true; 2])
    };
    let paths = vec![path(true, clean()), path(false, clean())];
    let report = run(setup(paths), vec![(at(1000), Op::Open(urgent))]);
    assert_eq!(report.delivered, 400_000);
    assert!(report.coverage.get(Seen::Urgent) > 10);
}

/// The next chunk for trusted paths was drawn as if chunks were as long as the path's datagrams: of
/// short segments a fraction of the share went by them.
#[test]
fn of_short_segments_the_trusted_paths_carry_their_share_too() {
    let mut wide = path(false, clean());
    wide.mtu = 9000;
    let short = Plan {
        rx: 800,
        keepalive: Some(Duration::from_secs(2)),
        ..plan([400_000, 0], Order::HalfClose, [true; 2])
    };
    let history = Setup {
        trusted_share: 0.5,
        ..setup(vec![
            path(true, clean().delay(Duration::from_millis(20))),
            wide,
        ])
    };
    let report = run(history, vec![(at(1000), Op::Open(short))]);
    let [trusted, untrusted] = report.bytes.map(|b| b as f64);
    assert!(trusted > 0.7 * untrusted, "{report:?}");
}

/// Where untrusted paths may carry data while no trusted one is there, they took lost messages of
/// the daemons, too.
#[test]
fn the_daemons_words_wait_for_a_trusted_path() {
    let paths = vec![path(true, clean()), path(false, clean())];
    let lax = Setup {
        hold_without_trusted: false,
        ..setup(paths)
    };
    let lingers = Plan {
        lingers: true,
        ..plan([3000, 3000], Order::Both, [false; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(lingers)),
        (at(1500), Op::Choose(0, 0, SCRAMBLE)),
        // It is on its way.
        (at(1501), Op::Outage(0, true)),
        (at(2500), Op::Outage(0, false)),
    ];
    let report = run(lax, ops);
    assert_eq!(report.delivered, 6000);
    assert_eq!(report.coverage.get(Seen::SwitchedIn), 1);
    assert!(report.coverage.counter(Counter::ChunkResent) > 0);
}

/// Whoever sent the peer's last word of a path's opening from elsewhere had the path opened to
/// there: on a trusted path, which does not roam, for good.
#[test]
fn a_path_opens_to_nowhere_but_where_the_peer_proved_itself() {
    for seed in 0..30 {
        let elsewhere = Tamper::new(&[(Seen::AdversarySource, 0.5)], Duration::from_millis(20));
        let mut ops = Vec::new();
        for path in 0..2 {
            for host in 0..2 {
                ops.push((at(0), Op::Tamper(path, host, elsewhere.clone())));
            }
        }
        for i in 0..6 {
            let restart = Op::Restart((i % 2) as usize, Duration::from_millis(i));
            ops.push((at(500 * i), restart));
        }
        let transfer = plan([100_000, 100_000], Order::Both, [true; 2]);
        ops.push((at(3000), Op::Open(transfer)));
        let history = History {
            setup: setup(vec![path(true, clean()), path(false, clean())]),
            ops,
            quiet: at(3000),
        };
        let run = World::run(seed, &history);
        run.unwrap_or_else(|f| panic!("{seed}: {} {}", f.what, f.state));
    }
}

/// The hosts disagreed about a path, and whoever sat there brought what one asked on it to the other's
/// trusted path, from the right address, and the answer back: the one that trusted it sent there what is for
/// trusted paths only (seed 1636303).
#[test]
fn a_question_brought_to_a_trusted_path_opens_no_other() {
    let mut misdirected = 0;
    for seed in 0..40 {
        let bringing = Tamper::new(
            &[(Seen::AdversaryCross, 0.3), (Seen::AdversaryReplay, 0.5)],
            Duration::from_millis(20),
        );
        let disputed = PathSetup {
            trusted: [true, false],
            ..path(true, clean())
        };
        let transfer = plan([100_000, 100_000], Order::Both, [true; 2]);
        let ops = vec![
            (at(0), Op::Outage(0, true)),
            (at(0), Op::Tamper(1, 0, bringing.clone())),
            (at(0), Op::Tamper(1, 1, bringing.clone())),
            (at(2000), Op::Open(transfer)),
            // All that is under way waits for a trusted path.
            (at(2010), Op::Interface(1, 0, false)),
            (at(6000), Op::Interface(1, 0, true)),
            (at(6000), Op::Outage(0, false)),
        ];
        let history = History {
            setup: Setup {
                // Host B has an endpoint for its peer, or none.
                calls: [true, seed % 2 == 0],
                ..setup(vec![disputed, path(true, clean())])
            },
            ops,
            quiet: at(6000),
        };
        let run = World::run(seed, &history);
        let report = run.unwrap_or_else(|f| panic!("{seed}: {} {}", f.what, f.state));
        misdirected += report.coverage.counter(Counter::PathMisdirected);
    }
    assert!(misdirected > 0, "nobody brought a question");
}

/// A daemon that restarted while an interface was down numbered its paths otherwise than before. What
/// it sent came by other interfaces than those numbers had stood for, and was dropped before it could
/// prove the restart: no path ever opened again.
#[test]
fn who_restarts_may_number_its_paths_anew() {
    let ops = vec![
        (at(1500), Op::Interface(0, 0, false)),
        (at(2000), Op::Restart(0, Duration::from_millis(3))),
        (
            at(4000),
            Op::Open(plan([3000, 3000], Order::Both, [true; 2])),
        ),
        (at(5000), Op::Interface(0, 0, true)),
    ];
    let report = run(setup(vec![path(true, clean()), path(true, clean())]), ops);
    assert_eq!(report.delivered, 6000);
    assert!(report.took < Duration::from_secs(30), "{report:?}");
}

/// A daemon that had agreed to a choice died before its answer got through. The next one told the choice
/// back; then the question came again, found the connection over, and the choice in force was taken back.
#[test]
fn a_choice_that_the_peer_told_back_stays() {
    let lax = Setup {
        hold_without_trusted: false,
        calls: [true; 2],
        ..setup(vec![path(true, clean()), path(false, clean())])
    };
    // A closes first and is left in TIME-WAIT; B is gone once it has read everything.
    let answer = Plan {
        client: 1,
        slow: Some(Duration::from_millis(100)),
        ..plan([0, 20_000], Order::Reply, [true; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(answer)),
        (at(1500), Op::Choose(0, 0, SCRAMBLE)),
        (at(1600), Op::Choose(0, 0, PLAIN)),
        (at(1601), Op::Interface(0, 0, false)),
        (at(3500), Op::Restart(1, Duration::from_millis(10))),
        (at(3600), Op::Interface(0, 0, true)),
    ];
    let report = run(lax, ops);
    assert_eq!(report.delivered, 20_000);
    // The question, and what the new session is told once the question has come to its end.
    assert_eq!(report.coverage.get(Seen::SwitchRefused), 2);
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

/// A new session was not used until the last question by an earlier one was due again. Where the round trip
/// had grown meanwhile, that was, each time, after the peer had been called once more, and knew of the
/// session no longer.
#[test]
fn a_new_session_is_used_before_the_next_call() {
    let ops = vec![
        (at(1000), Op::Restart(1, Duration::ZERO)),
        (at(1001), Op::Restart(0, Duration::ZERO)),
        // It has answered, and hears no more of it.
        (at(1008), Op::Suspend(1, Duration::from_secs(2))),
        (
            at(1020),
            Op::Link(0, 0, clean().delay(Duration::from_millis(20))),
        ),
        (
            at(5000),
            Op::Open(plan([3000, 3000], Order::Both, [true; 2])),
        ),
    ];
    let report = run(setup(vec![path(true, clean())]), ops);
    assert_eq!(report.delivered, 6000);
    assert!(report.took < Duration::from_secs(10), "{report:?}");
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
            (at(away + 17_000), Op::Link(0, 1, clean())),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 6000);
        late += report.coverage.get(Seen::LateAnswer);
    }
    assert!(late > 0, "no answer was late");
}

/// A word about a connection waited for the trusted path, until that connection had ended and another one
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
            (at(1200), Op::Interface(0, 0, false)),
            // It is left in TIME-WAIT where it was closed first.
            (at(1500), Op::Choose(0, 0, PLAIN)),
            (at(20_000), Op::Open(second)),
            (at(21_000), Op::Interface(0, 0, true)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 304);
        assert_eq!(report.coverage.get(Seen::ChosenOut), 1, "nothing was said");
        assert_eq!(report.coverage.get(Seen::PortsAgain), 1);
        assert_eq!(report.coverage.get(Seen::SwitchedOut), 0);
    }
}

/// The opening of a flow that was split was written before the stream knew its base, where a peer had
/// restarted while bytes waited for a path (seed 6 of the first histories with all bumps).
#[test]
fn what_waits_for_a_path_while_the_peer_restarts_is_carried_on() {
    let share = Plan {
        bump: [SHARE; 2],
        ..plan([200_000, 50_000], Order::Both, [true; 2])
    };
    let ops = vec![
        (at(1000), Op::Open(share)),
        (at(1050), Op::Interface(0, 1, false)),
        (at(1100), Op::Restart(1, Duration::from_millis(1))),
        (at(5000), Op::Interface(0, 1, true)),
    ];
    let paths = vec![path(true, clean()), path(false, clean())];
    let report = run(setup(paths), ops);
    assert_eq!(report.delivered, 250_000);
    assert!(report.coverage.get(Seen::ShareWaited) > 0);
}

/// A connection on share waits for its paths, however many of how many it takes, and goes on.
#[test]
fn what_is_split_waits_for_its_paths() {
    let share = Plan {
        bump: [SHARE; 2],
        ..plan([300_000, 100_000], Order::Both, [true; 2])
    };
    for (scheme, waits) in [((2, 2), true), ((2, 3), false), ((3, 3), true)] {
        let paths = (0..usize::from(scheme.1)).map(|at| path(at == 0, clean()));
        let setup = Setup {
            share: scheme,
            ..setup(paths.collect())
        };
        let ops = vec![
            (at(1000), Op::Open(share)),
            (at(1030), Op::Interface(0, 1, false)),
            (at(1031), Op::Outage(1, true)),
            (at(9000), Op::Interface(0, 1, true)),
            (at(9001), Op::Outage(1, false)),
        ];
        let report = run(setup, ops);
        assert_eq!(report.delivered, 400_000);
        let took = report.took > Duration::from_millis(9010);
        assert_eq!(took, waits, "{scheme:?}: {:?}", report.took);
        assert!(report.coverage.get(Seen::Share) > 400);
    }
}

/// The start of a stream was in sets of shares that expired, and the kernel that lacked it answered by
/// another way: its node waited for a start that TCP had sent again, and held all that was new until
/// TCP's timer sent it again, too (seed 956329).
#[test]
fn a_stream_whose_start_expired_does_not_crawl() {
    let upload = Plan {
        bump: [SHARE, PLAIN],
        ..Plan::ordinary([160_000, 100_000], Order::Both, 512 << 10)
    };
    let setup = Setup {
        follow: false,
        ..setup(vec![path(true, clean()), path(true, clean())])
    };
    let ops = vec![
        (at(1000), Op::Open(upload)),
        (at(1011), Op::Interface(1, 1, false)),
        (at(30_000), Op::Interface(1, 1, true)),
    ];
    let report = run(setup, ops);
    assert_eq!(report.delivered, 260_000);
    assert!(report.coverage.get(Seen::ShareWaited) > 0);
    let took = report.took;
    assert!(took < Duration::from_secs(100), "{took:?}");
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
/// histories with all bumps).
#[test]
fn a_choice_gives_in_to_what_the_peer_requires() {
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
        assert_eq!(report.coverage.get(Seen::OwnRule), 1);
    }
}

/// Of two daemons that had both ended, the one that started first called into nothing, and refused the call
/// of the other, since its own stood: until it called again.
#[test]
fn whichever_daemon_starts_later_the_session_comes_at_once() {
    for offset in (0..600).step_by(40) {
        for late in 0..2 {
            let ops = vec![
                (at(1000), Op::Restart(1 - late, Duration::from_secs(2))),
                (
                    at(1000),
                    Op::Restart(late, Duration::from_millis(2000 + offset)),
                ),
                (
                    at(3000 + offset),
                    Op::Open(plan([3000, 3000], Order::Both, [true; 2])),
                ),
            ];
            let setup = Setup {
                calls: [true; 2],
                ..setup(vec![path(true, clean()), path(false, clean())])
            };
            let report = run(setup, ops);
            let took = report.took - Duration::from_millis(3000 + offset);
            // Round trips of 10 ms.
            let limit = Duration::from_millis(150);
            assert!(took < limit, "{late} later by {offset} ms: {took:?}");
        }
    }
}

/// A peer that called for lack of an answer called once more while the paths of the session that came of
/// the other's call were being opened: what was under way by them then was sent again after a second.
#[test]
fn who_has_just_come_back_is_not_called_again() {
    for start in (7000..8000).step_by(10) {
        let ops = vec![
            (
                at(1000),
                Op::Restart(0, Duration::from_millis(start - 1000)),
            ),
            (
                at(start),
                Op::Open(plan([3000, 3000], Order::Both, [true; 2])),
            ),
        ];
        let setup = Setup {
            calls: [true; 2],
            ..setup(vec![path(true, clean()), path(false, clean())])
        };
        let report = run(setup, ops);
        let took = report.took - Duration::from_millis(start);
        // Round trips of 10 ms.
        let limit = Duration::from_millis(150);
        assert!(took < limit, "back after {start} ms: {took:?}");
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
        assert!(report.coverage.get(Seen::OwnRule) > 0);
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
            (at(1200), Op::Cross(0, [SEAL; 2])),
            (at(18_000), Op::Outage(0, false)),
        ];
        let paths = vec![path(true, clean()), path(false, clean())];
        let report = run(setup(paths), ops);
        assert_eq!(report.delivered, 6000);
        refused += report.coverage.get(Seen::Refused);
    }
    assert!(refused > 0, "no choice came to nothing");
}

/// The peer agreed to a choice, died, and told it back; the user chose again. Then the first question was
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
            (at(4000), Op::Choose(0, 0, SCRAMBLE)),
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
        ..plan([3000, 3000], Order::Both, [true; 2])
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

fn rule(level: Level, bump: BumpId) -> Rule {
    let meant = Selected::Ports(0..=9_999);
    Rule { bump, level, meant }
}

/// A connection that both ends can move, which speaks now and then and stays open.
fn lingering(bytes: [u64; 2]) -> Plan {
    Plan {
        lingers: true,
        keepalive: Some(Duration::from_secs(2)),
        ..plan(bytes, Order::Both, [false; 2])
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
