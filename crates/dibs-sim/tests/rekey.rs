//! New keys under load: by volume many times in one transfer, over links that lose and reorder.

use std::time::Duration;

use dibs_core::Time;
use dibs_core::counters::Counter;
use dibs_core::session::KeyLimits;
use dibs_netem::Conditions;
use dibs_sim::history::{Op, Order, PathSetup, Plan, Setup};
use dibs_sim::{History, Report, World};

const BYTES: u64 = 20_000_000;
const BUFFER: usize = 192 << 10;

fn path(trusted: bool) -> PathSetup {
    let link = Conditions::new()
        .rate(20_000_000)
        .delay(Duration::from_millis(8))
        .jitter(Duration::from_millis(2))
        .loss(0.02);
    PathSetup {
        trusted: [trusted; 2],
        v6: false,
        mtu: 1500,
        link: [link.clone(), link],
    }
}

/// One connection with data both ways, most of it from A to B.
fn transfer(seed: u64, keys: KeyLimits) -> Report {
    let setup = Setup {
        keys,
        ..Setup::ordinary(vec![path(true), path(false)])
    };
    let plan = Plan::ordinary([BYTES, BYTES / 20], Order::Both, BUFFER);
    let begin = Time::ZERO + Duration::from_secs(1);
    let history = History {
        setup,
        ops: vec![(begin, Op::Open(plan))],
        quiet: begin,
    };
    let report = World::run(seed, &history).unwrap_or_else(|f| panic!("{f:?}"));
    assert_eq!(report.delivered, BYTES + BYTES / 20);
    report
}

#[test]
fn volume_rekeys_cost_a_transfer_nothing() {
    let (mut usually, mut often) = (Duration::ZERO, Duration::ZERO);
    for seed in 1..5 {
        let usual = transfer(seed, KeyLimits::default());
        let report = transfer(
            seed,
            KeyLimits {
                per_phase: 128,
                phases: 64,
                previous_kept: 64,
            },
        );
        let count = |report: &Report, counter| report.coverage.counter(counter);
        let sessions = |report: &Report| count(report, Counter::Sessions);
        assert!(
            sessions(&report) >= sessions(&usual) + 2 * 3,
            "{} sessions instead of {}",
            sessions(&report),
            sessions(&usual)
        );
        for never in [
            Counter::KeysExhausted,
            Counter::DatagramUnauthentic,
            Counter::DatagramExpired,
            Counter::TunNoSession,
        ] {
            assert_eq!(count(&report, never), 0, "{}", never.name());
        }
        usually += usual.took;
        often += report.took;
    }
    // Each run has losses of its own.
    assert!(
        often < usually.mul_f64(1.2),
        "{often:?} instead of {usually:?}"
    );
}
