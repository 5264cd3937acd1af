//! Two paths over a modelled link: utilisation, queue, recovery.

use super::testing::{Link, World};
use super::*;

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);
const S: Duration = Duration::from_secs(1);
const MBIT: u64 = 1_000_000;

/// A link of `rate` bits a second, with `rtt` and a queue of `queue`.
fn world(rate: u64, rtt: Duration, queue: Duration) -> World {
    World::new(Link::new(rate, rtt / 2, queue), Link::new(0, rtt / 2, MS))
}

struct Row {
    name: &'static str,
    rate: u64,
    rtt: Duration,
    queue: Duration,
    loss: f64,
}

#[test]
fn fills_the_link_and_keeps_the_queue_short() {
    let row = |name, rate, rtt, queue, loss| Row {
        name,
        rate,
        rtt,
        queue,
        loss,
    };
    let table = [
        row("1 Mbit/s 100 ms", MBIT, 100 * MS, 500 * MS, 0.0),
        row("20 Mbit/s 20 ms", 20 * MBIT, 20 * MS, 100 * MS, 0.0),
        row("20 Mbit/s 300 ms", 20 * MBIT, 300 * MS, 100 * MS, 0.0),
        row("100 Mbit/s 4 ms 1 %", 100 * MBIT, 4 * MS, 50 * MS, 0.01),
        row("100 Mbit/s 4 ms 5 %", 100 * MBIT, 4 * MS, 50 * MS, 0.05),
        row("100 Mbit/s 300 ms 5 %", 100 * MBIT, 300 * MS, 50 * MS, 0.05),
        row("1 Gbit/s 0.1 ms", 1000 * MBIT, 100 * US, 50 * MS, 0.0),
        row("1 Gbit/s 0.1 ms shallow", 1000 * MBIT, 100 * US, MS, 0.0),
        row("1 Gbit/s 1 ms", 1000 * MBIT, MS, 10 * MS, 0.0),
        row("1 Gbit/s 50 ms", 1000 * MBIT, 50 * MS, 50 * MS, 0.0),
        row("1 Gbit/s 50 ms shallow", 1000 * MBIT, 50 * MS, MS, 0.0),
        row("1 Gbit/s 50 ms 1 %", 1000 * MBIT, 50 * MS, 20 * MS, 0.01),
        row("10 Gbit/s 0.05 ms", 10_000 * MBIT, 50 * US, 5 * MS, 0.0),
        row(
            "10 Gbit/s 0.05 ms 1 %",
            10_000 * MBIT,
            50 * US,
            5 * MS,
            0.01,
        ),
    ];
    for r in table {
        let mut w = world(r.rate, r.rtt, r.queue);
        w.ab.loss = r.loss;
        let warm = if r.rate >= 5_000 * MBIT {
            300 * MS
        } else {
            2 * S + 20 * r.rtt
        };
        let mut t90 = Duration::ZERO;
        for _ in 0..40 {
            let u = w.utilisation(warm / 40);
            if t90.is_zero() && u > 0.9 {
                t90 = w.now.since(Time::from_nanos(1_000_000_000));
            }
        }
        w.ab.waits.clear();
        w.ab.overflows = 0;
        let span = if r.rate >= 5_000 * MBIT {
            S / 2
        } else {
            3 * S + 20 * r.rtt
        };
        let u = w.utilisation(span);
        assert!(u > 0.955 * (1.0 - r.loss), "{}: {u}", r.name);
        let (p50, p95, max) = (w.ab.wait(0.5), w.ab.wait(0.95), w.ab.wait(1.0));
        println!(
            "{:25} {:.3} t90 {:?} queue p50 {:?} p95 {:?} max {:?} over {} stats {:?}",
            r.name,
            u,
            t90,
            p50,
            p95,
            max,
            w.ab.overflows,
            w.a.stats()
        );
    }
}
