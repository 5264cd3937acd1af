//! Two paths over a modelled link: utilisation, queue, loss, outage, MTU.

pub(super) mod world;

use super::*;
use world::{Link, World};

const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);
const MBIT: u64 = 1_000_000;
const GBIT: u64 = 1000 * MBIT;

/// A link of `rate` bits a second, with `rtt` and a queue of `queue`.
fn world(rate: u64, rtt: Duration, queue: Duration) -> World {
    World::new(Link::new(rate, rtt / 2, queue), Link::new(0, rtt / 2, MS))
}

/// A world past its start, and its queue's history forgotten.
fn warm(rate: u64, rtt: Duration, queue: Duration) -> World {
    let mut w = world(rate, rtt, queue);
    w.run(start_time(rate, rtt));
    w.ab.waits.clear();
    w
}

fn start_time(rate: u64, rtt: Duration) -> Duration {
    20 * rtt + if rate >= GBIT { S / 5 } else { S }
}

/// The time until the link is used to `fraction` over `step`, at most `limit`.
fn time_to(w: &mut World, fraction: f64, step: Duration, limit: Duration) -> Duration {
    let start = w.now;
    while w.utilisation(step) < fraction {
        assert!(
            w.now.since(start) < limit,
            "not within {limit:?}: {:?}",
            w.a.stats()
        );
    }
    w.now.since(start)
}

#[test]
fn fills_the_link_and_keeps_the_queue_short() {
    // Rate, round trip, the queue's size, loss; the utilisation and the queue asked for.
    let table = [
        (MBIT, 100 * MS, 500 * MS, 0.0, 0.97, 35 * MS),
        (20 * MBIT, 20 * MS, 100 * MS, 0.0, 0.98, 5 * MS),
        (20 * MBIT, 300 * MS, 100 * MS, 0.0, 0.97, 15 * MS),
        (100 * MBIT, 4 * MS, 50 * MS, 0.01, 0.97, 2 * MS),
        (100 * MBIT, 4 * MS, 50 * MS, 0.05, 0.935, 2 * MS),
        (100 * MBIT, 300 * MS, 50 * MS, 0.05, 0.93, 15 * MS),
        (GBIT, 100 * US, 50 * MS, 0.0, 0.965, 2 * MS),
        (GBIT, 100 * US, MS, 0.0, 0.965, MS),
        (GBIT, MS, 10 * MS, 0.0, 0.965, 2 * MS),
        (GBIT, 50 * MS, 50 * MS, 0.0, 0.965, 8 * MS),
        (GBIT, 50 * MS, MS, 0.0, 0.965, MS),
        (GBIT, 50 * MS, 20 * MS, 0.01, 0.965, 8 * MS),
        (10 * GBIT, 50 * US, 5 * MS, 0.0, 0.965, MS),
        (10 * GBIT, 50 * US, 5 * MS, 0.01, 0.965, MS),
    ];
    for (rate, rtt, queue, loss, least, longest) in table {
        let mut w = world(rate, rtt, queue);
        w.ab.loss = loss;
        w.run(start_time(rate, rtt));
        w.ab.waits.clear();
        let used = w.utilisation(20 * rtt + if rate > GBIT { S / 5 } else { S });
        let (half, most, max) = (w.ab.wait(0.5), w.ab.wait(0.95), w.ab.wait(1.0));
        println!(
            "{:5} Mbit/s {rtt:>5?} {:1.0} %: used {used:.3}, queue {half:?} {most:?} {max:?}",
            rate / MBIT,
            loss * 100.0,
        );
        assert!(
            used > least && most <= longest,
            "{rate} {rtt:?} {loss}: {used} {most:?}"
        );
        assert!(w.a.stats().spurious == 0);
    }
}

#[test]
fn a_start_takes_about_a_round_trip_for_each_doubling() {
    for (rate, rtt) in [
        (20 * MBIT, 20 * MS),
        (100 * MBIT, 100 * MS),
        (GBIT, 50 * MS),
    ] {
        let mut w = world(rate, rtt, 50 * MS);
        let doublings = (rate as f64 / 8.0 * rtt.as_secs_f64() / 12_000.0).log2() as u32;
        time_to(&mut w, 0.9, rtt, (doublings + 4) * rtt);
    }
}

#[test]
fn what_another_sender_found_is_where_it_begins() {
    let rtt = 100 * MS;
    let mut w = world(GBIT, rtt, 50 * MS);
    // The round trip is known from what opened the path.
    w.send_one();
    w.run(3 * rtt);
    let now = w.now;
    w.a.begin_at(now, GBIT / 8);
    w.run(rtt);
    assert!(w.utilisation(rtt) > 0.85, "{:?}", w.a.stats());
    // Too much by far is a queue for a while, and no more.
    let mut w = world(100 * MBIT, rtt, 200 * MS);
    w.send_one();
    w.run(3 * rtt);
    let now = w.now;
    w.a.begin_at(now, GBIT / 8);
    w.run(20 * rtt);
    w.ab.waits.clear();
    assert!(w.utilisation(20 * rtt) > 0.9, "{:?}", w.a.stats());
    assert!(w.ab.wait(0.95) < 50 * MS, "{:?}", w.ab.wait(0.95));
}

#[test]
fn follows_the_rate_down_and_up() {
    for (rate, rtt) in [(20 * MBIT, 20 * MS), (100 * MBIT, 4 * MS), (GBIT, 100 * US)] {
        let mut w = warm(rate, rtt, 100 * MS);
        let step = rtt.max(5 * MS);
        w.ab.rate = rate / 2;
        w.run(20 * step);
        w.ab.waits.clear();
        let used = w.utilisation(S / 2);
        assert!(used > 0.95, "{rate} halved: {used}");
        assert!(
            w.ab.wait(0.95) < 8 * MS,
            "{rate} halved: {:?}",
            w.ab.wait(0.95)
        );
        for (up, steps) in [(rate, 30), (4 * rate, 60)] {
            w.ab.rate = up;
            time_to(&mut w, 0.93, step, steps * step);
            let used = w.utilisation(S / 2);
            assert!(used > 0.95, "{rate} to {up}: {used}");
        }
    }
}

#[test]
fn clumped_reports_and_late_timers_cost_neither_rate_nor_queue() {
    for (rate, rtt, lump, tick) in [
        (100 * MBIT, 20 * MS, 8 * MS, US),
        (GBIT, 100 * US, 500 * US, 100 * US),
        (GBIT, 100 * US, 2 * MS, MS),
        (10 * GBIT, 50 * US, 300 * US, 100 * US),
        (10 * GBIT, 50 * US, 2 * MS, MS),
    ] {
        let mut w = world(rate, rtt, 50 * MS);
        (w.lump, w.tick) = (lump, tick);
        w.run(start_time(rate, rtt));
        w.ab.waits.clear();
        let used = w.utilisation(S / 4);
        let most = w.ab.wait(0.95);
        println!("{rate} {rtt:?} {lump:?} {tick:?}: {used:.3} {most:?}");
        assert!(
            used > 0.95 && most < 2 * lump + 3 * MS,
            "{rate} {lump:?}: {used} {most:?}"
        );
    }
}

#[test]
fn where_the_processor_is_the_limit_the_path_is_none() {
    for (lump, tick) in [(US, US), (300 * US, 100 * US), (2 * MS, 500 * US)] {
        let mut w = world(40 * GBIT, 40 * US, 10 * MS);
        (w.lump, w.tick) = (lump, tick);
        w.demand = Some(GBIT);
        w.run(100 * MS);
        let got = w.utilisation(S / 10) * 40.0 / 8.0;
        assert!(got > 1.0, "{lump:?}: {got}");
    }
}

#[test]
fn reordering_is_learned() {
    for (rate, rtt, jitter) in [(100 * MBIT, 10 * MS, 2 * MS), (20 * MBIT, 40 * MS, 40 * MS)] {
        let mut w = world(rate, rtt, 50 * MS);
        w.ab.jitter = jitter;
        w.run(S);
        let used = w.utilisation(2 * S);
        let stats = w.a.stats();
        assert!(used > 0.9, "{jitter:?}: {used}");
        assert!(
            stats.spurious > 0 && stats.lost < stats.sent / 50,
            "{stats:?}"
        );
    }
}

#[test]
fn heavy_loss_makes_it_back_off_and_its_end_come_back() {
    let mut w = warm(100 * MBIT, 10 * MS, 50 * MS);
    w.ab.loss = 0.3;
    w.run(S);
    let sent = w.a.stats().bytes_sent;
    w.run(S);
    let rate = (w.a.stats().bytes_sent - sent) * 8;
    assert!(rate < 30 * MBIT, "{rate}");
    w.ab.loss = 0.0;
    time_to(&mut w, 0.9, 50 * MS, S);
}

#[test]
fn a_route_that_becomes_longer_or_shorter_is_measured_again() {
    for (from, to) in [(20 * MS, 70 * MS), (70 * MS, 20 * MS), (MS, 30 * MS)] {
        let mut w = warm(100 * MBIT, from, 50 * MS);
        (w.ab.delay, w.ba.delay) = (to / 2, to / 2);
        w.run(S);
        let used = w.utilisation(S);
        assert!(used > 0.9, "{from:?} to {to:?}: {used}");
        let min = w.a.stats().min_rtt;
        assert!(
            min >= to && min < to + 2 * MS,
            "{from:?} to {to:?}: {min:?}"
        );
    }
}

#[test]
fn an_outage_is_noticed_gives_back_what_was_in_flight_and_ends_quickly() {
    for (rate, rtt) in [(MBIT, 100 * MS), (20 * MBIT, 20 * MS), (GBIT, 100 * US)] {
        let mut w = warm(rate, rtt, 100 * MS);
        let mtu = w.a.mtu();
        w.ab.down = true;
        // The probes' spacing grows, and one of them has to find that it has been long enough.
        let noticed = 4 * rtt + 140 * MS;
        w.run(noticed);
        assert_eq!(w.a.state(), PathState::Suspect);
        assert!(w.untold() <= 1, "all but the latest probe is given back");
        w.run(2 * S - noticed);
        assert_eq!(w.a.blocked_until(w.now, 1), Blocked::Inactive);
        w.ab.down = false;
        let limit = 2 * rtt + 30 * MS;
        let took = time_to(&mut w, 0.8, (rtt / 4).max(4 * MS), limit + rtt);
        println!("{rate} {rtt:?}: back after {took:?}");
        assert_eq!((w.a.state(), w.a.mtu()), (PathState::Active, mtu));
    }
}

#[test]
fn no_sample_of_the_rate_reaches_back_to_before_an_outage() {
    let mut w = warm(20 * MBIT, 20 * MS, 100 * MS);
    // The window fills before the interface is seen to be down.
    w.ab.down = true;
    let mtu = w.a.mtu();
    while w.a.blocked_until(w.now, mtu.into()) != Blocked::Window {
        assert_eq!(w.a.state(), PathState::Active);
        w.run(MS);
    }
    w.a.abandon(&mut Vec::new());
    let sent_at = w.now + 6 * S;
    let seq = w.a.on_sent(sent_at, mtu, 0, true);
    let known = w.a.sent.rate(seq).unwrap();
    let (at, bytes) = (sent_at + 20 * MS, u64::from(mtu));
    let sample = w.a.rate.on_delivered(at, bytes, sent_at, known, 20 * MS);
    let sample = sample.unwrap();
    assert_eq!(sample.bytes_per_sec, bytes * 50, "over one round trip");
    assert!(sample.app_limited);
}

#[test]
fn a_dead_path_goes_down_and_comes_back() {
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    w.ab.down = true;
    w.run(10 * S);
    assert_eq!(w.a.state(), PathState::Down);
    let mut probes = |from: Duration| {
        w.run(from);
        let sent = w.a.stats().sent;
        w.run(10 * S);
        w.a.stats().sent - sent
    };
    let soon = probes(Duration::ZERO);
    assert!(
        (30..=41).contains(&soon),
        "four a second, not {soon} in ten"
    );
    let later = probes(100 * S);
    assert!(
        (5..=6).contains(&later),
        "one in a 64th of two minutes, not {later} in ten seconds"
    );
    let in_the_end = probes(3600 * S);
    assert!((1..=2).contains(&in_the_end), "{in_the_end} in ten seconds");
    w.ab.down = false;
    time_to(&mut w, 0.9, 20 * MS, 6 * S + 200 * MS);
}

#[test]
fn a_trickle_does_not_keep_a_dead_path_alive() {
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    w.demand = Some(0);
    w.run(S);
    w.ab.down = true;
    // A datagram each ten milliseconds never fills the window.
    let deadline = w.now + 150 * MS;
    while w.now < deadline {
        w.send_one();
        w.run(10 * MS);
    }
    assert_eq!(w.a.state(), PathState::Suspect);
}

#[test]
fn little_to_send_does_not_lower_the_rate() {
    let mut w = warm(100 * MBIT, 20 * MS, 50 * MS);
    w.demand = Some(125_000);
    w.run(20 * S);
    let rate = w.a.stats().delivery_rate * 8;
    assert!(rate > 95 * MBIT, "{rate}");
    w.demand = None;
    w.ab.waits.clear();
    time_to(&mut w, 0.9, 20 * MS, 60 * MS);
    assert!(
        w.ab.wait(1.0) < 10 * MS,
        "the restart is paced: {:?}",
        w.ab.wait(1.0)
    );
}

#[test]
fn idle_needs_no_timer_and_wants_a_ping() {
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    w.demand = Some(0);
    w.run(S / 2);
    assert_eq!(w.untold(), 0, "all is acknowledged");
    assert_eq!(w.a.stats().in_flight, 0);
    assert_eq!(w.a.poll_timeout(), None);
    let keepalive = [S, 20 * S];
    assert!(!w.a.wants_ping(w.now, keepalive));
    let at = w.a.next_ping(keepalive).unwrap();
    assert!(at > w.now && at <= w.now + S && w.a.wants_ping(at, keepalive));
}

#[test]
fn the_longer_a_path_is_unused_the_less_often_it_is_asked() {
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    w.demand = Some(0);
    w.run(S / 2);
    let keepalive = [S, 20 * S];
    let at = w.a.next_ping(keepalive).unwrap();
    w.run(at.since(w.now));
    for wait in [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0] {
        w.ping();
        w.run(S / 10);
        let at = w.a.next_ping(keepalive).unwrap();
        let next = at.since(w.now).as_secs_f64();
        assert!((0.8 * wait..1.1 * wait).contains(&next), "{wait}: {next}");
        w.run(at.since(w.now));
    }
    // What carries something again is in use.
    w.demand = None;
    w.run(S);
    w.demand = Some(0);
    w.run(S / 2);
    let at = w.a.next_ping(keepalive).unwrap();
    assert!(at <= w.now + S, "{:?}", at.since(w.now));
}

#[test]
fn the_mtu_is_found_and_a_black_hole_noticed() {
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    assert_eq!(w.a.mtu(), 1472);
    w.ab.mtu = 1400;
    w.run(S);
    assert!((1340..=1372).contains(&w.a.mtu()), "{}", w.a.mtu());
    let used = w.utilisation(S);
    assert!(used > 0.93, "{used}");
}

/// What a silent path has in flight is given up before it is known whether it died; that it takes shorter datagrams is
/// found all the same.
#[test]
fn what_is_given_up_after_a_timeout_still_shows_a_black_hole() {
    let mut now = Time::ZERO + S;
    let mut path = fresh(now);
    path.on_validated(now, 20 * MS);
    for _ in 0..10 {
        now = exchange(&mut path, now, 20 * MS);
    }
    let probe = path.poll_mtu_probe(now).expect("a longer one is tried");
    let seq = path.on_mtu_probe_sent(now, probe);
    let frame = AckFrame::new(
        0,
        &[SeqRange {
            start: seq,
            end: seq,
        }],
    )
    .unwrap();
    let (mut acked, mut lost) = (Vec::new(), Vec::new());
    path.on_ack(now + 20 * MS, &frame, &mut acked, &mut lost)
        .unwrap();
    now += 20 * MS;
    let long = path.mtu();
    assert!(long > 1300, "{long}");
    for round in 1.. {
        assert!(round < 20, "it is never found");
        path.on_sent(now, long, round, true);
        lost.clear();
        // The alarm comes again until the path has been silent for long enough.
        while lost.is_empty() {
            now = path.poll_timeout().expect("an answer is due");
            path.on_timeout(now, &mut lost);
            path.abandon_unanswered(now, &mut lost);
        }
        assert_eq!(lost, [round]);
        // The short probe gets through.
        now = exchange(&mut path, now, 20 * MS);
        assert!(!path.is_unanswered());
        if path.mtu() < long {
            break;
        }
    }
}

#[test]
fn the_predicted_delivery_is_about_when_it_arrives() {
    let w = warm(20 * MBIT, 20 * MS, 50 * MS);
    // The queue is short: half a round trip, and the time that the link takes.
    for bytes in [1472, 100_000, 1_000_000] {
        let took =
            w.a.predict_delivery(w.now, bytes)
                .since(w.now)
                .as_secs_f64();
        let want = 0.01 + bytes as f64 * 8.0 / 20e6;
        assert!(
            (took - want).abs() < 0.25 * want + 0.003,
            "{bytes}: {took} for {want}"
        );
    }
}

/// A path that has carried nothing yet.
fn fresh(now: Time) -> Path {
    let config = PathConfig { longest: 1472 };
    Path::new(now, config)
}

/// Sends a datagram of 100 bytes, which is acknowledged after a round trip; when that is.
fn exchange(path: &mut Path, now: Time, rtt: Duration) -> Time {
    let seq = path.on_sent(now, 100, 0, true);
    let range = SeqRange {
        start: seq,
        end: seq,
    };
    let frame = AckFrame::new(0, &[range]).unwrap();
    let (mut acked, mut lost) = (Vec::new(), Vec::new());
    path.on_ack(now + rtt, &frame, &mut acked, &mut lost)
        .unwrap();
    now + rtt
}

/// Whoever waits for it is to send it no more.
#[test]
fn what_was_lost_and_arrives_is_told_to_have_arrived() {
    let mut path = fresh(Time::ZERO);
    path.on_validated(Time::ZERO, 20 * MS);
    for token in 0..20 {
        path.on_sent(Time::ZERO, 1000, token, true);
    }
    let (mut acked, mut lost) = (Vec::new(), Vec::new());
    let mut on_ack = |at, start, end| {
        let frame = AckFrame::new(0, &[SeqRange { start, end }]).unwrap();
        path.on_ack(at, &frame, &mut acked, &mut lost).unwrap();
        let told = (std::mem::take(&mut acked), std::mem::take(&mut lost));
        (told, path.stats().spurious)
    };
    let ((acked, lost), _) = on_ack(Time::ZERO + 60 * MS, 10, 19);
    assert_eq!(acked, Vec::from_iter(10..20));
    assert_eq!(lost, Vec::from_iter(0..10));
    let late = on_ack(Time::ZERO + 61 * MS, 0, 19);
    assert_eq!(late, ((Vec::from_iter(0..10), vec![]), 10));
    let again = on_ack(Time::ZERO + 62 * MS, 0, 19);
    assert_eq!(again, ((vec![], vec![]), 10));
}

#[test]
fn a_path_that_had_little_to_carry_is_not_thought_slow() {
    let mut now = Time::from_nanos(1);
    let mut path = fresh(now);
    path.on_validated(now, 3 * MS);
    for _ in 0..100 {
        now += 20 * MS;
        now = exchange(&mut path, now, 3 * MS);
    }
    let rate = path.stats().delivery_rate;
    assert!((1..50_000).contains(&rate), "{rate}");
    let predicted = path.predict_delivery(now, 1472).since(now);
    assert!(predicted < 5 * MS, "{predicted:?}");
}

#[test]
fn a_path_measured_while_its_host_was_busy_is_not_thought_slow() {
    let mut now = Time::from_nanos(1);
    let mut path = fresh(now);
    path.on_validated(now, 100 * MS);
    for rtt in [MS, 100 * MS, 100 * MS] {
        now = exchange(&mut path, now, rtt);
    }
    assert!(path.stats().srtt > 80 * MS);
    let expected = path.expected_rate();
    assert!(expected > 1_000_000, "{expected}");
}

#[test]
fn before_validation_nothing_goes_and_no_acknowledgement_changes_that() {
    let now = Time::from_nanos(1);
    let mut path = fresh(now);
    let (mut acked, mut lost) = (Vec::new(), Vec::new());
    assert_eq!((path.budget(now, 1), path.poll_mtu_probe(now)), (0, None));
    let frame = |n| AckFrame::new(0, &[SeqRange { start: n, end: n }]).unwrap();
    let refused = path.on_ack(now, &frame(0), &mut acked, &mut lost);
    assert_eq!(refused, Err(AckError::NeverSent(0)));
    path.on_sent(now, 100, 7, true);
    path.on_ack(now + MS, &frame(0), &mut acked, &mut lost)
        .unwrap();
    assert_eq!((acked, lost), (vec![7], vec![]));
    assert_eq!(path.state(), PathState::Unvalidated);
    path.on_validated(now + MS, MS);
    assert!(path.budget(now + 2 * MS, 1) > 0);
    assert_eq!(path.poll_mtu_probe(now + MS), Some(1472));
}

#[test]
fn a_token_bucket_is_not_taken_for_a_faster_link() {
    for (rate, rtt, burst) in [
        (GBIT, 100 * US, MS),
        (GBIT, 100 * US, 8 * MS),
        (100 * MBIT, 4 * MS, 4 * MS),
    ] {
        let mut w = world(rate, rtt, 50 * MS);
        w.ab.burst = burst;
        for wait in [start_time(rate, rtt), S / 10] {
            w.run(wait);
            w.ab.waits.clear();
            let used = w.utilisation(S / 4);
            assert!(used > 0.97, "{rate} {burst:?}: {used}");
            assert!(
                w.ab.wait(0.95) < 6 * MS,
                "{rate} {burst:?}: {:?}",
                w.ab.wait(0.95)
            );
            // A while with little to send fills the bucket.
            w.demand = Some(rate / 80);
            w.run(S / 2);
            w.demand = None;
        }
    }
}

#[test]
fn a_queue_is_predicted_whatever_the_rate_is_believed_to_be() {
    // What the sender's own window has under way, in time of the rate beside the round trip: the pacer,
    // which is still at the path's start, never has to wait for anything.
    for (rate, rtt, queue) in [
        (GBIT, 100 * US, 3 * MS),
        (100 * MBIT, 4 * MS, 3 * MS),
        (50 * MBIT, 60 * MS, 10 * MS),
    ] {
        for burst in [Duration::ZERO, 2 * MS] {
            let mut w = world(rate, rtt, 50 * MS);
            w.ab.burst = burst;
            w.demand = Some(20_000);
            w.run(S);
            w.demand = None;
            w.window = (rate as f64 / 8.0 * (rtt + queue).as_secs_f64()) as u64;
            w.run(S);
            let used = w.utilisation(S / 2);
            assert!(used > 0.97, "{rate} {burst:?}: {used}");
            let (predicted, want) = (w.a.predict_delivery(w.now, 1472), w.now + rtt / 2 + queue);
            let early = want.since(predicted).as_secs_f64() / queue.as_secs_f64();
            let late = predicted.since(want).as_secs_f64() / queue.as_secs_f64();
            assert!(
                early < 0.4 && late < 0.4,
                "{rate} {burst:?}: {early} {late}"
            );
        }
    }
}

#[test]
fn pauses_of_a_host_are_no_congestion() {
    for (rate, rtt, pause, least) in [
        (GBIT, 100 * US, [50 * MS, 5 * MS], 0.97),
        (GBIT, 100 * US, [100 * MS, 15 * MS], 0.93),
        (GBIT, 100 * US, [100 * MS, 40 * MS], 0.65),
        (100 * MBIT, 20 * MS, [100 * MS, 30 * MS], 0.97),
    ] {
        let mut w = world(rate, rtt, 50 * MS);
        w.pause = pause;
        w.run(S / 2);
        let used = w.utilisation(S);
        assert!(used > least, "{rate} {pause:?}: {used} {:?}", w.a.stats());
        assert_eq!((w.a.state(), w.lost), (PathState::Active, 0));
    }
}

#[test]
fn bulk_after_a_trickle_grows_quickly() {
    for (rate, rtt) in [(GBIT, 100 * US), (100 * MBIT, 20 * MS)] {
        let mut w = world(rate, rtt, 50 * MS);
        w.demand = Some(20_000);
        w.run(3 * S);
        w.demand = None;
        time_to(&mut w, 0.9, rtt.max(4 * MS), 15 * rtt + 60 * MS);
    }
}

/// A window of 2.6 times what the path holds, all of which goes now by this path and now by another one.
#[test]
fn bursts_that_overfill_a_path_end_its_start() {
    for (rate, rtt) in [
        (20 * MBIT, 20 * MS),
        (100 * MBIT, 10 * MS),
        (5 * MBIT, 60 * MS),
    ] {
        let mut w = world(rate, rtt, 10 * rtt);
        let holds = (rate as f64 / 8.0 * rtt.as_secs_f64()) as u64;
        let turn = |w: &mut World| {
            for (demand, window) in [(None, 26 * holds / 10), (Some(rate / 80), u64::MAX)] {
                (w.demand, w.window) = (demand, window);
                w.send_one();
                w.run(5 * rtt / 2);
            }
        };
        (0..8).for_each(|_| turn(&mut w));
        w.ab.waits.clear();
        turn(&mut w);
        let (waits, stats) = (w.ab.wait(1.0), w.a.stats());
        assert!(waits < rtt / 3, "{rate} {rtt:?}: {waits:?} {stats:?}");
        let expected = w.a.expected_rate() as f64 * 8.0 / rate as f64;
        assert!((0.9..1.1).contains(&expected), "{rate} {rtt:?}: {expected}");
    }
}

/// The window is full when a burst ends, and the pause after that is none of the path's.
#[test]
fn a_pause_after_bursts_that_filled_the_window_does_not_make_the_path_slow() {
    let (rate, rtt) = (20 * MBIT, 20 * MS);
    let mut w = world(rate, rtt, 10 * rtt);
    for _ in 0..12 {
        w.demand = None;
        w.send_one();
        w.run(rtt);
        w.demand = Some(0);
        w.run(10 * rtt);
    }
    // A round trip of the empty path is in each sample: a burst begins and ends within one.
    let known = w.a.stats().delivery_rate as f64 * 8.0 / rate as f64;
    assert!(known > 0.6, "{known} {:?}", w.a.stats());
    assert!(w.a.expected_rate() > rate / 8, "{:?}", w.a.stats());
}

#[test]
fn a_report_whose_largest_elicited_none_measures_the_round_trip() {
    let now = Time::from_nanos(1);
    let mut path = fresh(now);
    path.on_validated(now, 40 * MS);
    path.on_sent(now, 1000, 1, true);
    path.on_sent(now + MS, 50, 0, false);
    let frame = AckFrame::new(0, &[SeqRange { start: 0, end: 1 }]).unwrap();
    let (mut acked, mut lost) = (Vec::new(), Vec::new());
    path.on_ack(now + 3 * MS, &frame, &mut acked, &mut lost)
        .unwrap();
    assert_eq!(acked, [1]);
    assert_eq!(path.stats().min_rtt, 2 * MS);
    path.on_ack(now + 90 * MS, &frame, &mut acked, &mut lost)
        .unwrap();
    assert_eq!(
        (acked.len(), path.stats().min_rtt),
        (1, 2 * MS),
        "told again is no news"
    );
}

#[test]
fn random_operations_keep_the_books() {
    use std::collections::{BTreeMap, BTreeSet};
    use world::Rng;

    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let mut now = Time::from_nanos(1);
        let mut path = Path::new(now, PathConfig { longest: 8952 });
        path.on_validated(now, MS);
        // What waits: token and bytes by number. MTU probes have no token.
        let mut waiting: BTreeMap<u64, (Option<u64>, u64)> = BTreeMap::new();
        let mut missing = BTreeSet::new();
        let (mut acked, mut lost) = (Vec::new(), Vec::new());
        let mut probes = 0;
        for token in 0..5000 {
            let scale = [10, 1000, 100_000][rng.below(3) as usize];
            now += Duration::from_micros(rng.below(scale));
            match rng.below(8) {
                0..=2 => {
                    let bytes = 1 + rng.below(9000);
                    let seq = path.next_seq();
                    assert_eq!(path.on_sent(now, bytes as u16, token, true), seq);
                    waiting.insert(seq, (Some(token), bytes));
                }
                3 => {
                    path.on_sent(now, 50, u64::MAX, false);
                }
                4 => {
                    if let Some(size) = path.poll_mtu_probe(now) {
                        waiting.insert(path.next_seq(), (None, size.into()));
                        path.on_mtu_probe_sent(now, size);
                        probes += 1;
                    }
                }
                5 => {
                    path.on_timeout(now, &mut lost);
                }
                _ => {
                    let mut ranges = Vec::new();
                    let mut end = path.next_seq().saturating_sub(rng.below(4)) as i64;
                    while end >= 0 && ranges.len() < 1 + rng.below(40) as usize {
                        let start = (end - rng.below(12) as i64).max(0);
                        ranges.push(SeqRange {
                            start: start as u64,
                            end: end as u64,
                        });
                        end = start - 2 - rng.below(6) as i64;
                    }
                    let delay = rng.below(5000) as u32;
                    let Some(frame) = AckFrame::new(delay, &ranges) else {
                        continue;
                    };
                    match path.on_ack(now, &frame, &mut acked, &mut lost) {
                        Ok(()) => assert!(frame.largest() < path.next_seq()),
                        Err(AckError::NeverSent(n)) => assert!(n >= path.next_seq()),
                    }
                }
            }
            // What was lost may arrive all the same; no acknowledgement says of what arrived before that it is lost.
            for token in lost.drain(..) {
                let found = waiting.iter().find(|(_, w)| w.0 == Some(token));
                let seq = *found.expect("each token is lost once").0;
                waiting.remove(&seq);
                missing.insert(token);
            }
            for token in acked.drain(..) {
                let found = waiting.iter().find(|(_, w)| w.0 == Some(token));
                match found.map(|(seq, _)| *seq) {
                    Some(seq) => drop(waiting.remove(&seq)),
                    None => assert!(missing.remove(&token), "each token arrives once"),
                }
            }
            let waits: u64 = waiting
                .values()
                .filter(|w| w.0.is_some())
                .map(|w| w.1)
                .sum();
            let probed: u64 = waiting
                .values()
                .filter(|w| w.0.is_none())
                .map(|w| w.1)
                .sum();
            let in_flight = path.stats().in_flight;
            assert!(waits <= in_flight && in_flight <= waits + probed);
            let budget = path.budget(now, usize::MAX) as u64;
            assert!(budget <= path.stats().cwnd.saturating_sub(in_flight));
            assert!(path.predict_delivery(now, 1500) >= now);
        }
        assert!(probes > 0);
    }
}

#[test]
fn datagrams_that_nobody_acknowledges_are_not_remembered_for_ever() {
    let mut path = fresh(Time::ZERO);
    path.on_validated(Time::ZERO, MS);
    // A host that only receives answers with what elicits no acknowledgement.
    let mut now = Time::ZERO;
    for _ in 0..1_000_000 {
        now += 100 * US;
        path.on_received(now, path.next_seq(), true);
        path.on_sent(now, 60, 0, false);
    }
    assert!(path.sent.next() - path.sent.base() <= 256);
}

/// Rate and round trip of a link that marks what waits for longer than 2 ms, and has room for little more.
#[test]
fn marks_of_routers_keep_the_queue_short_and_cost_no_datagram() {
    for (rate, rtt) in [(20 * MBIT, 20 * MS), (100 * MBIT, 4 * MS), (GBIT, 20 * MS)] {
        let mut w = world(rate, rtt, 100 * MS);
        w.ab.marks = Some(2 * MS);
        w.run(start_time(rate, rtt));
        w.ab.waits.clear();
        let lost = w.lost;
        let used = w.utilisation(2 * S);
        let stats = w.a.stats();
        assert!(
            stats.marked > 0 && stats.marked < stats.sent / 4,
            "{stats:?}"
        );
        assert!(used > 0.95, "{rate} {rtt:?}: {used}");
        assert!(w.ab.wait(0.95) < 8 * MS, "{:?}", w.ab.wait(0.95));
        assert_eq!(w.lost, lost);
    }
}

#[test]
fn a_network_that_drops_what_is_capable_of_ecn_gets_it_without() {
    let mut w = world(20 * MBIT, 20 * MS, 50 * MS);
    w.ab.drops_ect = true;
    w.run(2 * S);
    assert!(!w.a.is_ect());
    assert!(w.utilisation(S) > 0.95, "{:?}", w.a.stats());
    // One that had let it through and does so no more, as after a move.
    let mut w = warm(20 * MBIT, 20 * MS, 50 * MS);
    assert!(w.a.is_ect());
    w.ab.drops_ect = true;
    w.run(3 * S);
    assert!(!w.a.is_ect());
    assert!(w.utilisation(S) > 0.95, "{:?}", w.a.stats());
}

#[test]
fn a_late_answer_shows_that_a_network_lets_ecn_through() {
    for stall in [200 * MS, 2 * S] {
        let mut w = world(20 * MBIT, 20 * MS, 50 * MS);
        let end = w.now + stall;
        w.lump = Duration::from_nanos(end.as_nanos());
        w.run(stall - 50 * MS);
        assert!(w.a.stats().ptos > 0 && !w.a.is_ect(), "{:?}", w.a.stats());
        w.lump = Duration::from_nanos(1);
        w.run(2 * S);
        assert!(w.a.is_ect(), "{:?}", w.a.stats());
    }
}
