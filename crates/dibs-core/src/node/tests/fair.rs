//! Turns of many flows.

use std::collections::BTreeMap;

use super::bounds::speak;
use super::*;

/// Bytes a second.
const RATE: u64 = 50_000_000;
/// Of a message in one datagram.
const SHORT: usize = 1000;
/// What Linux hands over at most, about.
const LONG: usize = 60_000;

/// Two hosts with a trusted path alone, which host 0 takes for one of `RATE`.
fn paced() -> Pair {
    let mut pair = Pair::connected();
    let now = pair.now;
    for node in &mut pair.nodes {
        node.set_path(now, 1, false, 1500);
    }
    pair.nodes[0].expect_rate(now, 0, inner(1), RATE);
    pair
}

/// The sequence numbers that each port of host 0 has come to.
struct Flows {
    next: BTreeMap<u16, u32>,
}

impl Flows {
    fn new() -> Self {
        Self {
            next: BTreeMap::new(),
        }
    }

    fn send(&mut self, pair: &mut Pair, port: u16, len: usize) {
        let next = self.next.entry(port).or_insert(1);
        speak(pair, port, *next, &text(len));
        *next += len as u32;
    }
}

/// Payload bytes of each port that host 1 was given.
fn arrived(pair: &Pair) -> BTreeMap<u16, usize> {
    let mut arrived = BTreeMap::new();
    for frame in &pair.injected[1] {
        match packet::parse(&frame[virtio::LEN..]) {
            Ok(Packet::Tcp(s)) => *arrived.entry(s.tuple.sport).or_default() += s.payload.len(),
            other => panic!("not a segment: {other:?}"),
        }
    }
    arrived
}

#[test]
fn long_segments_get_their_turn_among_short_ones() {
    let (mut pair, mut flows) = (paced(), Flows::new());
    for _ in 0..20 {
        flows.send(&mut pair, 1, LONG);
    }
    for port in 2..12 {
        for _ in 0..300 {
            flows.send(&mut pair, port, SHORT);
        }
    }
    pair.run(Duration::from_millis(20));
    let arrived = arrived(&pair);
    let short: usize = (2..12).map(|port| arrived[&port]).sum::<usize>() / 10;
    let long = arrived.get(&1).copied().unwrap_or(0);
    assert!(long >= short / 2, "{arrived:?}");
    assert!(long <= short + 2 * LONG, "{arrived:?}");
}

#[test]
fn who_has_something_to_say_at_last_is_heard_before_those_who_talk_on() {
    let (mut pair, mut flows) = (paced(), Flows::new());
    for port in 1..100 {
        flows.send(&mut pair, port, LONG);
        flows.send(&mut pair, port, LONG);
    }
    pair.run(Duration::from_millis(10));
    assert!(arrived(&pair).len() > 5, "all of them have had a turn");
    flows.send(&mut pair, 200, SHORT);
    pair.run(DELAY + Duration::from_millis(3));
    assert_eq!(arrived(&pair).get(&200), Some(&SHORT));
}

#[test]
fn objects_of_a_page_come_one_after_another() {
    let (mut pair, mut flows) = (paced(), Flows::new());
    for _ in 0..2 {
        for port in 1..=6 {
            flows.send(&mut pair, port, 10_000);
        }
    }
    pair.run(Duration::from_millis(20));
    let frames = pair.injected[1].iter();
    let mut ports: Vec<u16> = frames
        .map(|frame| match packet::parse(&frame[virtio::LEN..]) {
            Ok(Packet::Tcp(s)) => s.tuple.sport,
            other => panic!("not a segment: {other:?}"),
        })
        .collect();
    ports.dedup();
    assert_eq!(ports, [1, 2, 3, 4, 5, 6]);
    assert!(arrived(&pair).values().all(|bytes| *bytes == 20_000));
}

#[test]
fn those_who_come_and_go_leave_the_others_their_turns() {
    let (mut pair, mut flows) = (paced(), Flows::new());
    for _ in 0..20 {
        flows.send(&mut pair, 1, LONG);
    }
    pair.run(Duration::from_millis(1));
    // Together they would have more to send than the path takes.
    for _ in 0..100 {
        for port in 2..152 {
            flows.send(&mut pair, port, SHORT);
        }
        pair.run(Duration::from_millis(1));
    }
    let arrived = arrived(&pair);
    let short: usize = (2..152).map(|port| arrived[&port]).sum::<usize>() / 150;
    assert!(arrived[&1] >= short, "{arrived:?}");
}

/// Behind a gap an epoch begins, whose first bytes only a trusted path carries, as what is sent again.
#[test]
fn who_needs_a_trusted_path_gets_its_turn_as_those_who_take_any() {
    const FLOWS: u16 = 100;
    /// Those of which each segment follows a gap.
    const BROKEN: u16 = 10;
    let (mut pair, mut flows) = (Pair::connected(), Flows::new());
    let now = pair.now;
    for path in 0..2 {
        pair.nodes[0].expect_rate(now, path, inner(1), RATE);
    }
    for _ in 0..12 {
        for port in 1..=FLOWS {
            flows.send(&mut pair, port, 20_000);
            if port <= BROKEN {
                *flows.next.get_mut(&port).expect("it was sent") += 1000;
            }
        }
    }
    pair.run(Duration::from_millis(60));
    let arrived = arrived(&pair);
    let of = |port: u16| arrived.get(&port).copied().unwrap_or(0);
    let others: usize = (BROKEN + 1..=FLOWS).map(of).sum::<usize>() / usize::from(FLOWS - BROKEN);
    assert!(others < 200_000, "there is more to send: {others}");
    for port in 1..=BROKEN {
        assert!(of(port) >= others / 2, "{port}: {} of {others}", of(port));
    }
}

#[test]
fn what_many_flows_have_to_say_goes_in_few_sends() {
    let (mut pair, mut flows) = (paced(), Flows::new());
    for round in 0..3 {
        let (sends, before) = (pair.sends[0], pair.injected[1].len());
        for port in 1..=60 {
            flows.send(&mut pair, port, SHORT);
        }
        pair.run(Duration::from_millis(20));
        let sends = pair.sends[0] - sends;
        assert_eq!(pair.injected[1].len() - before, 60, "round {round}");
        // In the first round flows are opened one by one: with lengths of their own.
        assert!(sends < 20 || round == 0, "{sends} sends in round {round}");
    }
    let all = arrived(&pair);
    assert!(all.values().all(|bytes| *bytes == 3 * SHORT), "{all:?}");
}
