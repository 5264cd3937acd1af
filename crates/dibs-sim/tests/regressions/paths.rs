//! Paths and sessions.

use super::*;

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

/// A message of the daemons was lost where the only trusted path carried nothing any more, and untrusted ones may carry
/// data: it arrives once.
#[test]
fn a_word_that_a_dead_trusted_path_lost_arrives_once() {
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
