//! What several paths give together, without chance in it.

use std::time::Duration;

use dibs_core::Time;
use dibs_netem::Conditions;
use dibs_sim::history::{Op, Order, PathSetup, Plan, Setup};
use dibs_sim::{History, Report, World};

const RATE: u64 = 20_000_000;
const DELAY: Duration = Duration::from_millis(10);
const BYTES: u64 = 10_000_000;

fn path(trusted: bool, link: Conditions) -> PathSetup {
    PathSetup {
        trusted: [trusted; 2],
        v6: false,
        mtu: 1500,
        link: [link.clone(), link],
    }
}

fn link() -> Conditions {
    Conditions::new().rate(RATE).delay(DELAY)
}

/// One connection from A to B with a window of `buffer` bytes: about what the paths hold, for CoDel
/// drops what stands in the queue longer. Returns Mbit/s.
fn transfer(paths: Vec<PathSetup>, buffer: usize) -> (f64, Report) {
    let setup = Setup::ordinary(paths);
    let plan = Plan::ordinary([BYTES, 0], Order::HalfClose, buffer);
    let begin = Time::ZERO + Duration::from_secs(1);
    let history = History {
        setup,
        ops: vec![(begin, Op::Open(plan))],
        quiet: begin,
    };
    let report = World::run(1, &history).unwrap_or_else(|f| panic!("{f:?}"));
    assert_eq!(report.delivered, BYTES);
    let took = report.took - Duration::from_secs(1);
    let megabits = BYTES as f64 * 8e-6 / took.as_secs_f64();
    (megabits, report)
}

#[test]
fn two_equal_paths_carry_nearly_twice_as_much_as_one() {
    let (one, report) = transfer(vec![path(true, link())], 64 << 10);
    assert_eq!(report.retransmitted, 0, "TCP notices nothing");
    assert!(one > 0.85 * RATE as f64 * 1e-6, "{one} Mbit/s by one path");

    let (two, report) = transfer(vec![path(true, link()), path(false, link())], 128 << 10);
    assert_eq!(report.retransmitted, 0, "TCP notices nothing");
    assert!(two > 1.7 * one, "{two} Mbit/s by two paths, {one} by one");
    let [trusted, untrusted] = report.bytes.map(|bytes| bytes as f64);
    assert!((0.8..1.25).contains(&(trusted / untrusted)), "{report:?}");

    let lossy = vec![path(true, link()), path(false, link().loss(0.01))];
    let (lossy, _) = transfer(lossy, 192 << 10);
    assert!(
        lossy > 0.8 * two,
        "{lossy} Mbit/s with 1 % loss, {two} without"
    );
}

/// Window of TCP that is more than one path holds and little more than both do: if all of it goes now by one path and now by
/// the other, each waits half of the time.
#[test]
fn a_window_of_little_more_than_two_paths_hold_fills_both() {
    let (one, _) = transfer(vec![path(true, link())], 64 << 10);
    for window in [96, 112, 120, 128, 136, 144, 160, 192] {
        let both = vec![path(true, link()), path(false, link())];
        let (two, _) = transfer(both, window << 10);
        let least = if window < 112 { 1.4 } else { 1.6 };
        assert!(
            two > least * one,
            "{two} Mbit/s with {window} KiB, {one} by one"
        );
    }
}

#[test]
fn a_slow_or_lossy_path_does_not_hold_up_a_quick_one() {
    let quick = || path(true, link());
    let (alone, _) = transfer(vec![quick()], 64 << 10);
    for (name, other) in [
        ("slow", link().rate(RATE / 20).delay(4 * DELAY)),
        ("lossy", link().loss(0.2)),
    ] {
        let (both, _) = transfer(vec![quick(), path(false, other)], 128 << 10);
        assert!(
            both > 0.9 * alone,
            "{both} Mbit/s with a {name} path, {alone} without"
        );
    }
}

#[test]
fn a_path_of_a_longer_round_trip_adds_what_the_window_has_for_it_and_costs_nothing() {
    let quick = || path(true, link());
    let (alone, _) = transfer(vec![quick()], 64 << 10);
    // The window covers what both carry until what goes by the far one is acknowledged.
    let far = link().delay(4 * DELAY);
    let (both, _) = transfer(vec![quick(), path(false, far)], 256 << 10);
    assert!(both > 1.6 * alone, "{both} Mbit/s by both, {alone} by one");
    // Or it does not, and the far one waits.
    for (times, window) in [(4, 96), (4, 128), (6, 128), (16, 128), (16, 256)] {
        let far = link().delay(times * DELAY);
        let (both, _) = transfer(vec![quick(), path(false, far)], window << 10);
        assert!(
            both > 0.9 * alone,
            "{both} Mbit/s with {times} times the delay and {window} KiB, {alone} without"
        );
    }
}
