//! Streams: what is sent of them, and what waits.

use super::*;

/// The first packet in the bump was a bare acknowledgement, which opened the flow without a base:
/// all data behind it stood at wrong numbers.
#[test]
fn a_direction_that_opens_with_an_acknowledgement_carries_data_later() {
    let request = plan([50_000, 50_000], Order::Reply, [false, false]);
    let ops = vec![
        (at(1000), Op::Open(request)),
        // In the midst of the request: the server only acknowledges so far.
        (at(1025), Op::Mark(0, 1, SCRAMBLE, false)),
    ];
    let report = run(setup(vec![path(true, clean())]), ops);
    assert_eq!(report.delivered, 100_000);
    assert!(report.bytes[0] > 50_000, "the answer went by the bump");
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

/// A firewall that follows TCP's numbers had not seen what went by the bump between the knock and the move. It dropped what
/// acknowledged that, for good, or ended the connection by a reset (seed 2199023262782).
#[test]
fn what_goes_by_a_bump_after_the_knock_is_shown_to_a_strict_firewall() {
    for resets in [false, true] {
        let between = Between {
            tracks: true,
            resets,
            ..Between::default()
        };
        for (bytes, order) in [
            ([2_000_000; 2], Order::Reply),
            ([2_000_000, 0], Order::Both),
        ] {
            for (host, after) in [(0, 35), (0, 50), (1, 35), (1, 50)] {
                let setup = Setup {
                    leaving: Leaving::Proved,
                    follow: true,
                    between,
                    ..setup(vec![path(true, clean()), path(false, clean())])
                };
                let plan = Plan {
                    bump: [PLAIN; 2],
                    ..Plan::ordinary(bytes, order, 256 << 10)
                };
                let ops = vec![
                    (at(1000), Op::Open(plan)),
                    (at(1100), Op::Choose(0, host, SEAL)),
                    (at(1100 + after), Op::Choose(0, host, PLAIN)),
                ];
                let report = run(setup, ops);
                assert!(report.coverage.get(Seen::PlainProved) > 0);
                assert_eq!(report.delivered, bytes.iter().sum::<u64>());
            }
        }
    }
}

/// Plain is quicker than the bump. A kernel was called silent while its window was still open, and one more burst of it went by the
/// bump, which what followed in plain overtook.
#[test]
fn next_to_nothing_is_sent_again_for_a_way_back_to_plain() {
    let quick = Conditions::new()
        .rate(50_000_000)
        .delay(Duration::from_millis(1));
    for (host, after) in [(0, 40), (0, 55), (0, 70), (1, 40), (1, 55), (1, 70)] {
        let resent = |back: Option<Op>| {
            let setup = Setup {
                leaving: Leaving::Proved,
                direct: quick.clone(),
                follow: true,
                ..setup(vec![path(true, clean()), path(false, clean())])
            };
            let plan = Plan {
                bump: [PLAIN; 2],
                ..Plan::ordinary([2_000_000; 2], Order::Both, 64 << 10)
            };
            let mut ops = vec![
                (at(1000), Op::Open(plan)),
                (at(1050), Op::Choose(0, host, SEAL)),
            ];
            ops.extend(back.map(|back| (at(1050 + after), back)));
            run(setup, ops).coverage.get(Seen::Retransmitted)
        };
        let (stays, returns) = (resent(None), resent(Some(Op::Choose(0, host, PLAIN))));
        assert!(returns <= stays + 5, "{stays}, then {returns}");
    }
}

/// Data that is under way when a connection moves may reach further than a firewall moves its numbers, for longer than TCP waits. By a
/// slow way, the end that sent it took the other kernel for one that does not take it.
#[test]
fn a_transfer_over_long_ways_is_not_taken_for_a_renumbered_one() {
    let way = |delay, rate, loss| {
        let link = Conditions::new().rate(rate).loss(loss);
        link.delay(Duration::from_millis(delay))
    };
    for (plain, by_bump) in [
        (way(300, 50_000_000, 0.0), way(5, 50_000_000, 0.0)),
        (way(300, 8_000_000, 0.01), way(20, 8_000_000, 0.01)),
        (way(20, 20_000_000, 0.0), way(400, 1_000_000, 0.02)),
    ] {
        for (bytes, by) in [([6_000_000, 0], 0), ([0, 6_000_000], 1)] {
            let transfer = Plan {
                buffer: 1 << 20,
                rx: 1 << 21,
                ..plan(bytes, Order::Both, [false; 2])
            };
            let setup = Setup {
                follow: true,
                direct: plain.clone(),
                ..setup(vec![path(true, by_bump.clone())])
            };
            let ops = vec![
                (at(1000), Op::Open(transfer)),
                (at(4000), Op::Choose(0, by, SEAL)),
            ];
            // Renumbering of a connection that nobody renumbers is a fault.
            assert_eq!(run(setup, with_rest(ops)).delivered, 6_000_000);
        }
    }
}
