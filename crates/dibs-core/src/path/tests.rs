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

#[test]
fn explore() {
    let start = Time::from_nanos(1_000_000_000);
    // rate changes
    for (rate, rtt) in [
        (20 * MBIT, 20 * MS),
        (100 * MBIT, 4 * MS),
        (1000 * MBIT, 100 * US),
        (1000 * MBIT, 50 * MS),
        (20 * MBIT, 300 * MS),
    ] {
        let mut w = world(rate, rtt, 100 * MS);
        w.run(2 * S + 10 * rtt);
        for (what, r) in [
            ("halved", rate / 2),
            ("doubled", rate),
            ("x4", rate * 4),
            ("/10", rate * 4 / 10),
        ] {
            w.ab.rate = r;
            w.ab.waits.clear();
            let t0 = w.now;
            let mut t90 = None;
            let (mut tq, lost0) = (None, w.lost);
            for _ in 0..400 {
                w.ab.waits.clear();
                let u = w.utilisation((rtt.max(4 * MS)) / 4);
                if t90.is_none() && u > 0.9 {
                    t90 = Some(w.now.since(t0));
                }
                if tq.is_none() && w.ab.wait(0.9) < 10 * MS && w.now.since(t0) > rtt {
                    tq = Some(w.now.since(t0));
                }
            }
            println!(
                "{rate} {rtt:?} {what}: t90 {t90:?} queue short after {tq:?} lost {} {:?} u {}",
                w.lost - lost0,
                w.a.stats().delivery_rate * 8,
                w.utilisation(S)
            );
        }
    }
    // ack aggregation and noise
    for (rate, rtt, lump, tick, jitter) in [
        (100 * MBIT, 20 * MS, 8 * MS, US, US),
        (1000 * MBIT, 100 * US, 500 * US, 100 * US, US),
        (1000 * MBIT, 100 * US, 2 * MS, MS, US),
        (10_000 * MBIT, 50 * US, 300 * US, 100 * US, US),
        (10_000 * MBIT, 50 * US, 2 * MS, MS, US),
        (100 * MBIT, 10 * MS, US, US, 2 * MS),
        (100 * MBIT, 10 * MS, US, US, 10 * MS),
        (20 * MBIT, 40 * MS, US, US, 40 * MS),
        (20 * MBIT, 40 * MS, 10 * MS, MS, 40 * MS),
    ] {
        let mut w = world(rate, rtt, 50 * MS);
        (w.lump, w.tick, w.ab.jitter) = (lump, tick, jitter);
        let span = if rate > 5000 * MBIT { 300 * MS } else { 3 * S };
        w.run(span);
        w.ab.waits.clear();
        let u = w.utilisation(span);
        let st = w.a.stats();
        println!(
            "{rate} {rtt:?} lump {lump:?} tick {tick:?} jitter {jitter:?}: {u:.3} p95 {:?} lost {} spurious {} {:?} pto {}",
            w.ab.wait(0.95),
            st.lost,
            st.spurious,
            st.srtt,
            st.ptos
        );
    }
    // heavy loss
    for loss in [0.1, 0.2, 0.3] {
        let mut w = world(100 * MBIT, 10 * MS, 50 * MS);
        w.run(2 * S);
        w.ab.loss = loss;
        let us: Vec<f64> = (0..6).map(|_| w.utilisation(S / 2)).collect();
        w.ab.loss = 0.0;
        println!(
            "loss {loss}: {us:.2?} then {:.2} {:.2}",
            w.utilisation(S / 2),
            w.utilisation(S / 2)
        );
    }
    // outage
    for (rate, rtt) in [
        (MBIT, 100 * MS),
        (20 * MBIT, 20 * MS),
        (1000 * MBIT, 100 * US),
        (100 * MBIT, 300 * MS),
    ] {
        let mut w = world(rate, rtt, 100 * MS);
        w.run(2 * S + 10 * rtt);
        w.ab.down = true;
        let t0 = w.now;
        let mut sus = None;
        while w.now.since(t0) < 2 * S {
            w.run(MS);
            if sus.is_none() && w.a.state() == PathState::Suspect {
                sus = Some(w.now.since(t0));
            }
        }
        let untold = w.untold();
        w.ab.down = false;
        let t0 = w.now;
        while w.a.state() != PathState::Active {
            w.run(MS);
        }
        let t1 = w.now.since(t0);
        let (mut t90, mut n) = (None, 0);
        while t90.is_none() && n < 400 {
            n += 1;
            if w.utilisation((rtt / 2).max(5 * MS)) > 0.8 {
                t90 = Some(w.now.since(t0));
            }
        }
        println!(
            "outage {rate} {rtt:?}: suspect {sus:?} untold {untold} active {t1:?} t90 {t90:?} then {:.3} mtu {}",
            w.utilisation(S),
            w.a.mtu()
        );
    }
    // base rtt change
    for (from, to) in [(20 * MS, 70 * MS), (70 * MS, 20 * MS), (MS, 30 * MS)] {
        let mut w = world(100 * MBIT, from, 50 * MS);
        w.run(2 * S);
        w.ab.delay = to / 2;
        w.ba.delay = to / 2;
        let us: Vec<f64> = (0..20).map(|_| w.utilisation(S / 4)).collect();
        println!("rtt {from:?} -> {to:?}: {us:.2?} {:?}", w.a.stats().min_rtt);
    }
    // app limited
    let mut w = world(100 * MBIT, 20 * MS, 50 * MS);
    w.run(2 * S);
    w.demand = Some(125_000);
    w.run(20 * S);
    println!("app limited {:?}", w.a.stats());
    w.demand = None;
    for _ in 0..5 {
        println!("  {:.3}", w.utilisation(20 * MS));
    }
    let _ = start;
}

#[test]
fn cpu_noise() {
    for (lump, tick, demand) in [
        (300 * US, 100 * US, 1_000_000_000u64),
        (2 * MS, 500 * US, 1_000_000_000),
        (US, US, 1_000_000_000),
        (300 * US, 100 * US, 50_000_000),
    ] {
        let mut w = world(40_000 * MBIT, 40 * US, 10 * MS);
        w.lump = lump;
        w.tick = tick;
        w.demand = Some(demand);
        w.run(100 * MS);
        let u = w.utilisation(200 * MS) * 40e9 / 8.0;
        println!(
            "cpu {lump:?} {tick:?} {:.3} of demand {:?}",
            u / demand as f64,
            w.a.stats()
        );
    }
}

#[test]
fn speed() {
    use std::time::Instant;
    for loss in [0, 100] {
        let start = Time::from_nanos(1_000_000_000);
        let config = PathConfig {
            interface_mtu: 1500,
            overhead: 28,
        };
        let mut a = Path::new(start, config);
        let mut b = Path::new(start, config);
        a.on_validated(start, US * 100);
        let (mut acked, mut lost, mut buf) = (Vec::new(), Vec::new(), Vec::new());
        let t0 = Instant::now();
        let mut n = 0u64;
        let mut now = start;
        let (mut ts, mut tr, mut ta) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let mut pending = std::collections::VecDeque::new();
        for _ in 0..100_000 {
            now += US * 32;
            let t = Instant::now();
            a.budget(now, 40_000);
            let first = a.next_seq();
            for _ in 0..32 {
                a.on_sent(now, 1472, n, true);
                n += 1;
            }
            ts += t.elapsed();
            let t = Instant::now();
            for s in first..first + 32 {
                if loss == 0 || s * 7919 % 10007 % loss != 0 {
                    b.on_received(now, s, true);
                }
            }
            buf.clear();
            b.encode_ack(now, 1000, &mut buf);
            tr += t.elapsed();
            pending.push_back(buf.clone());
            if pending.len() > 20 {
                let f = pending.pop_front().unwrap();
                let t = Instant::now();
                let f = AckFrame::decode(&f).unwrap();
                acked.clear();
                lost.clear();
                a.on_ack(now, &f, &mut acked, &mut lost).unwrap();
                a.poll_timeout();
                ta += t.elapsed();
            }
        }
        println!(
            "speed loss 1/{loss}: {:?} per datagram: sent {:.1} received {:.1} ack {:.1} ns, lost {}",
            t0.elapsed() / n as u32,
            ts.as_nanos() as f64 / n as f64,
            tr.as_nanos() as f64 / n as f64,
            ta.as_nanos() as f64 / n as f64,
            a.stats().lost
        );
    }
}
