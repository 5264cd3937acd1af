//! A path that carries nothing: what it costs, and whether it is there when it is needed.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// Bytes of IPv4 and UDP headers.
const HEADERS: u64 = 28;
/// Bytes that an idle path may cost a day, on the wire and both ways.
const A_DAY: u64 = 3_000_000;
const HOUR: Duration = Duration::from_secs(3600);
const SECOND: Duration = Duration::from_secs(1);

/// Traffic of the paths.
#[derive(Default)]
struct Seen {
    /// Bytes on the wire by local path that host 0 sent or received.
    bytes: [u64; 2],
    /// When host 0 sent something by it last, and the longest time between.
    last: [Option<Time>; 2],
    pause: [Duration; 2],
}

/// Counts what goes by the paths; `passes` says what arrives of host, path, length.
fn count(
    pair: &mut Pair,
    passes: impl Fn(usize, usize, usize) -> bool + 'static,
) -> Rc<RefCell<Seen>> {
    let seen = Rc::new(RefCell::new(Seen::default()));
    let tap = seen.clone();
    pair.filter = Box::new(move |host, path, bytes| {
        let arrives = passes(host, path, bytes.len());
        if host == 0 || arrives {
            tap.borrow_mut().bytes[path] += bytes.len() as u64 + HEADERS;
        }
        arrives
    });
    seen
}

/// Has both ends keep the second path as a backup.
fn spare_second(pair: &mut Pair) {
    for host in 0..2 {
        let usage = Usage {
            role: Role::Backup,
            ..Usage::default()
        };
        pair.nodes[host].set_usage(pair.now, 1, usage);
    }
}

/// Runs for an hour, and returns what each path cost, as bytes a day.
fn an_hour(pair: &mut Pair, seen: &RefCell<Seen>) -> [u64; 2] {
    *seen.borrow_mut() = Seen::default();
    let end = pair.now + HOUR;
    let mut before = [0; 2];
    while pair.now < end {
        pair.run(SECOND / 4);
        let mut seen = seen.borrow_mut();
        for (path, before) in before.iter_mut().enumerate() {
            if std::mem::replace(before, pair.sent[0][path]) != pair.sent[0][path] {
                let last = seen.last[path].replace(pair.now);
                let pause = last.map_or(Duration::ZERO, |last| pair.now.since(last));
                seen.pause[path] = seen.pause[path].max(pause);
            }
        }
    }
    seen.borrow().bytes.map(|bytes| bytes * 24)
}

#[test]
fn a_path_that_carries_nothing_costs_little_and_is_not_forgotten_on_its_way() {
    let mut pair = Pair::connected();
    let seen = count(&mut pair, |_, _, _| true);
    let costs = an_hour(&mut pair, &seen);
    for path in [0, 1] {
        assert!(costs[path] <= A_DAY, "{costs:?} bytes a day");
        let pause = seen.borrow().pause[path];
        assert!(
            pause < 25 * SECOND,
            "a translator forgets after 30 s: {pause:?}"
        );
    }
    pair.assert_open();
}

/// The backup has a smaller MTU than its interface says, and another path carries data.
#[test]
fn a_backup_costs_as_little_while_another_path_is_in_use() {
    let mut pair = Pair::connected();
    pair.bump = bump::SEAL;
    spare_second(&mut pair);
    let seen = count(&mut pair, |_, path, len| path == 0 || len <= 1400);
    pair.run(1300 * SECOND);
    *seen.borrow_mut() = Seen::default();
    let data = text(1_000_000);
    for (i, part) in data.chunks(1000).enumerate() {
        pair.send(0, 1 + i as u32 * 1000, part, 0, i as u32);
        pair.run(SECOND);
        pair.send_ack(1, 1 + (i + 1) as u32 * 1000);
        pair.run(SECOND);
    }
    pair.assert_stream(1, &data);
    let a_day = seen.borrow().bytes[1] * 86_400 / 2000;
    assert!(a_day <= A_DAY, "{a_day} bytes a day");
}

#[test]
fn a_path_that_is_down_or_was_never_there_costs_as_little() {
    for opened in [true, false] {
        let mut pair = Pair::new();
        if opened {
            pair.run(3 * SECOND);
        }
        let seen = count(&mut pair, |_, path, _| path != 1);
        pair.run(HOUR);
        let costs = an_hour(&mut pair, &seen);
        assert!(costs[1] <= A_DAY, "{opened}: {costs:?} bytes a day");
        // It is back within a small part of that.
        pair.filter = Box::new(|_, _, _| true);
        pair.run(8 * SECOND);
        pair.assert_open();
    }
}

/// Both ends use only the first path, for so long; then it dies in the midst of a stream.
#[test]
fn what_is_idle_takes_over_within_a_second() {
    for delay in [1, 20, 100].map(Duration::from_millis) {
        for to in [0, 1] {
            let mut pair = Pair::far_apart(delay);
            pair.bump = bump::SEAL;
            spare_second(&mut pair);
            let data = text(200_000);
            let mut at = 0;
            let mut part = |pair: &mut Pair| {
                pair.send(1 - to, 1 + at as u32, &data[at..at + 1000], 0, at as u32);
                at += 1000;
                at
            };
            for _ in 0..95 {
                part(&mut pair);
                pair.run(SECOND / 2);
            }
            pair.filter = Box::new(|_, path, _| path == 1);
            let mut sent = 0;
            for _ in 0..10 {
                sent = part(&mut pair);
                pair.run(SECOND / 10);
            }
            let sent_at_once = sent - 1000 * (2 * delay.as_millis() as usize / 100 + 1);
            let end = pair
                .received(to)
                .iter()
                .map(|s| s.0 as usize + s.1.len())
                .max();
            assert!(
                end.unwrap() > sent_at_once,
                "{delay:?} {to}: {end:?} of {sent}"
            );
            pair.run(SECOND);
            pair.assert_stream(to, &data[..sent]);
        }
    }
}

#[test]
fn others_are_asked_at_once_when_one_falls_silent() {
    let mut pair = Pair::connected();
    pair.run(60 * SECOND);
    let before = pair.sent[0][1];
    // What only the trusted path may carry.
    pair.filter = Box::new(|_, path, _| path == 1);
    pair.send(0, 1, b"word", 0, 1);
    pair.run(SECOND / 2);
    assert!(pair.sent[0][1] > before, "the other one is asked");

    let mut pair = Pair::connected();
    pair.run(60 * SECOND);
    let before = pair.sent[0][1];
    let now = pair.now;
    pair.nodes[0].set_path(now, 0, false, 1500);
    pair.run(SECOND / 10);
    assert!(pair.sent[0][1] > before, "and where an interface goes down");
}

/// An owner that comes late because nothing was due has not slept.
#[test]
fn a_host_with_nothing_to_do_is_not_asleep() {
    let mut pair = Pair::connected();
    let now = pair.now;
    // The other end's word stays out.
    pair.filter = Box::new(|host, _, _| host == 0);
    pair.run(60 * SECOND);
    let paths = pair.nodes[0].paths();
    let down = paths
        .iter()
        .filter(|path| path.stats.state == crate::path::PathState::Down)
        .count();
    assert_eq!(down, 2, "since {now:?}: {paths:?}");
}

/// Has nothing arrive, as where the peer is switched off.
fn switch_off(pair: &mut Pair) -> Rc<RefCell<Seen>> {
    count(pair, |_, _, _| false)
}

/// Has all arrive but the calls of one host: the other is to find it.
fn switch_on(pair: &mut Pair, silent: usize) {
    const CALL: usize = 1200;
    pair.filter = Box::new(move |host, _, bytes| host != silent || bytes.len() != CALL);
}

/// Time until a path of host 0 carries data again.
fn back_after(pair: &mut Pair) -> Duration {
    let from = pair.now;
    let is_back = |pair: &Pair| {
        let is_up = pair.nodes[0].peers[0].association.is_up();
        is_up
            && pair.nodes[0]
                .paths()
                .iter()
                .any(|path| path.state == "active")
    };
    while !is_back(pair) && pair.now.since(from) < HOUR {
        pair.run(SECOND / 10);
    }
    pair.now.since(from)
}

#[test]
fn a_peer_that_is_switched_off_costs_little() {
    for one_path in [false, true] {
        let mut pair = Pair::connected();
        if one_path {
            let now = pair.now;
            pair.nodes[0].set_path(now, 1, false, 1500);
        }
        let seen = switch_off(&mut pair);
        pair.run(24 * HOUR);
        let costs = seen.borrow().bytes;
        assert!(
            costs.iter().all(|bytes| *bytes <= A_DAY),
            "{costs:?} bytes a day"
        );
        assert!(costs[0] > A_DAY / 4, "it is still looked for: {costs:?}");
    }
}

/// Connections that ask for the peer all day cost more, within bounds.
#[test]
fn connections_that_ask_for_a_peer_all_day_cost_little_more() {
    let mut pair = Pair::connected();
    let seen = switch_off(&mut pair);
    for second in 0..8640 {
        pair.send_ack(0, second);
        pair.run(10 * SECOND);
    }
    let costs = seen.borrow().bytes;
    assert!(
        costs.iter().all(|bytes| *bytes <= 3 * A_DAY),
        "{costs:?} bytes a day"
    );
}

#[test]
fn a_peer_that_is_back_is_found_within_a_small_part_of_its_absence() {
    for one_path in [false, true] {
        for minutes in [1, 10, 60, 600] {
            let mut pair = Pair::connected();
            if one_path {
                let now = pair.now;
                pair.nodes[0].set_path(now, 1, false, 1500);
            }
            switch_off(&mut pair);
            let absence = minutes * 60 * SECOND;
            pair.run(absence);
            switch_on(&mut pair, 1);
            let took = back_after(&mut pair);
            let bound = (absence / 20).clamp(2 * SECOND, 40 * SECOND) + SECOND;
            assert!(took <= bound, "{took:?} after {absence:?}");
        }
    }
}

/// A sign that a peer may be within reach has it called at once.
#[test]
fn a_peer_is_called_at_once_where_there_is_cause() {
    type Cause = fn(&mut Pair);
    let causes: [(&str, Cause); 5] = [
        ("an interface", |pair| {
            let now = pair.now;
            pair.nodes[0].set_path(now, 0, true, 1500);
        }),
        ("an address", |pair| {
            let now = pair.now;
            pair.nodes[0].set_path_addresses(now, 1, vec![addr(0, 1).ip(), addr(9, 1).ip()]);
        }),
        ("an endpoint", |pair| {
            let now = pair.now;
            let endpoints = vec![(1, addr(1, 1))];
            pair.nodes[0].set_endpoints(now, 0, endpoints);
        }),
        ("data", |pair| pair.send(0, 1, b"word", 0, 1)),
        ("a call of the peer", |pair| {
            switch_on(pair, 0);
            let mut config = config(1, Integrity::On);
            config.peers[0].endpoints = vec![(0, addr(0, 0))];
            pair.nodes[1] = Node::new(pair.now, config, [3; 32]).unwrap();
        }),
    ];
    for (cause, happens) in causes {
        let mut pair = Pair::connected();
        let now = pair.now;
        pair.nodes[0].set_path(now, 0, cause != "an interface", 1500);
        switch_off(&mut pair);
        pair.run(HOUR);
        switch_on(&mut pair, 1);
        // Not just when a call was due anyhow.
        let before = pair.sent[0];
        pair.run(5 * SECOND);
        assert_eq!(pair.sent[0], before, "{cause}: no call was due");
        happens(&mut pair);
        let took = back_after(&mut pair);
        assert!(took <= 2 * SECOND, "{cause}: {took:?}");
    }
}

/// A datagram of the peer does so too, while the session lasts.
#[test]
fn a_peer_that_is_heard_is_called_at_once() {
    let mut pair = Pair::connected();
    switch_off(&mut pair);
    pair.run(170 * SECOND);
    let calls = |pair: &Pair| {
        pair.nodes[0]
            .sessions
            .calling_since(pair.nodes[0].peers[0].id)
    };
    assert!(calls(&pair).is_some());
    switch_on(&mut pair, 1);
    pair.run(5 * SECOND);
    assert!(calls(&pair).is_none(), "there is a new session");
}
