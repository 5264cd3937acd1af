//! Senders as Linux has them, alone over a link.

use std::time::Duration;

use dibs_core::Time;
use dibs_sim::bulk::{Algorithm, Carried, Change, Link, Plain};

/// More than the span takes.
const ENDLESS: u64 = 1 << 40;
const BOTH: [Algorithm; 2] = [Algorithm::Cubic, Algorithm::Bbr];

fn alone(algorithm: Algorithm, link: &Link, changes: Vec<Change>) -> Carried {
    let plain = Plain::new(1, algorithm, link, changes, ENDLESS);
    let carried = plain.run();
    carried.unwrap_or_else(|fault| panic!("{algorithm:?} over {link}: {fault}"))
}

#[test]
fn both_senders_fill_a_link() {
    for (megabits, millis) in [(50, 20), (20, 80), (300, 10)] {
        let link = Link::clean(megabits, millis, true);
        for algorithm in BOTH {
            let rate = alone(algorithm, &link, Vec::new()).rate();
            let least = 0.9 * megabits as f64;
            assert!(rate >= least, "{algorithm:?}: {rate} Mbit/s over {link}");
        }
    }
}

#[test]
fn hystart_ends_slow_start_before_the_queue_is_long() {
    for (megabits, millis) in [(50, 20), (50, 40), (100, 80), (20, 160)] {
        // Nothing else would end it: the buffer takes whatever comes.
        let mut link = Link::clean(megabits, millis, true);
        link.buffer = 64 << 20;
        let mut plain = Plain::new(1, Algorithm::Cubic, &link, Vec::new(), ENDLESS);
        let mut at = Time::ZERO;
        while plain.sender().window().1 {
            at += Duration::from_millis(1);
            assert!(at < Time::ZERO + Duration::from_secs(3), "over {link}");
            plain.run_until(at);
        }
        // A window of which the link holds half at least; the other half is the queue.
        let holds = megabits * 1000 * millis / 8 / 1448;
        let (window, _) = plain.sender().window();
        let right = holds / 2..2 * holds;
        assert!(right.contains(&window), "{window} of {holds} over {link}");
        assert_eq!(plain.sender().stats().again, 0);
    }
}

#[test]
fn bbr_stands_random_loss_and_cubic_does_not() {
    let link = Link {
        loss: 0.01,
        ..Link::clean(50, 40, true)
    };
    let [cubic, bbr] = BOTH.map(|algorithm| alone(algorithm, &link, Vec::new()).rate());
    assert!(bbr > 40.0, "BBR {bbr} Mbit/s");
    assert!(cubic < 10.0, "CUBIC {cubic} Mbit/s");
}

#[test]
fn a_loss_is_repaired_without_a_timeout() {
    let link = Link {
        loss: 0.001,
        // Nothing else is lost.
        buffer: 16 << 20,
        ..Link::clean(20, 30, true)
    };
    let carried = alone(Algorithm::Cubic, &link, Vec::new());
    let sender = carried.sender;
    assert!(sender.recoveries > 3, "{sender:?}");
    assert_eq!(sender.timeouts, 0, "{sender:?}");
    // Nothing is sent again that was not lost.
    assert!(sender.again < 2 * sender.segments / 1000, "{sender:?}");
}

#[test]
fn a_timeout_for_nothing_is_taken_back() {
    // A round trip that is at once longer than the timeout, and loses nothing.
    let link = Link::clean(50, 20, true);
    let far = Change {
        at: Duration::from_secs(3),
        link: 0,
        becomes: Link {
            round_trip: Duration::from_millis(1500),
            ..link.clone()
        },
    };
    let carried = alone(Algorithm::Cubic, &link, vec![far]);
    let sender = carried.sender;
    assert!(sender.timeouts > 0 && sender.undone > 0, "{sender:?}");
}
