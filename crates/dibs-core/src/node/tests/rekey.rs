//! New keys under load.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// A pair on a bump, with keys that are soon used up.
fn limited(bump: BumpId, limits: KeyLimits) -> Pair {
    let mut pair = Pair::new();
    pair.bump = bump;
    pair.nodes = [(0, 1), (1, 2)]
        .map(|(host, seed)| node(host, seed, Integrity::On).with_key_limits(limits));
    pair
}

fn is_data(bytes: &[u8]) -> bool {
    matches!(bytes[0], 4..=6)
}

const ALL: [BumpId; 3] = [bump::SCRAMBLE, bump::SHARE, bump::SEAL];

#[test]
fn volume_rekeys_under_load_without_a_stall() {
    ALL.into_iter().for_each(rekeys_without_a_stall);
}

fn rekeys_without_a_stall(bump: BumpId) {
    // A share is a datagram too.
    let per_phase = if bump == bump::SHARE { 400 } else { 200 };
    let limits = KeyLimits {
        per_phase,
        phases: 16,
        previous_kept: 100,
    };
    let mut pair = limited(bump, limits);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    let before = pair.nodes[0].counters().get(Counter::Sessions);
    let data = text(8_000_000);
    pair.pour(&data, 4, Duration::from_millis(15));
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data);
    for node in &pair.nodes {
        let count = |counter| node.counters().get(counter);
        assert!(count(Counter::Sessions) >= before + 2);
        for never in [
            Counter::KeysExhausted,
            Counter::DatagramUnauthentic,
            Counter::DatagramExpired,
            Counter::DatagramUnknownIndex,
            Counter::ChunkResent,
            Counter::TunNoSession,
        ] {
            assert_eq!(count(never), 0, "{}", never.name());
        }
    }
}

#[test]
fn at_the_limit_a_node_stops_and_says_so_and_goes_on_with_new_keys() {
    ALL.into_iter().for_each(stops_and_goes_on);
}

fn stops_and_goes_on(bump: BumpId) {
    let limits = KeyLimits {
        per_phase: 100,
        phases: 10,
        previous_kept: 50,
    };
    let mut pair = limited(bump, limits);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    // Nothing of a handshake passes from now on.
    let data_sent = Rc::new(RefCell::new([0; 2]));
    let seen = data_sent.clone();
    pair.filter = Box::new(move |host, _, bytes| {
        seen.borrow_mut()[host] += u64::from(is_data(bytes));
        is_data(bytes)
    });
    let data = text(4_000_000);
    for (i, part) in data.chunks(50_000).enumerate() {
        pair.send(0, 1 + i as u32 * 50_000, part, 0, i as u32);
        pair.run(Duration::from_millis(10));
    }
    pair.run(Duration::from_secs(2));
    assert!(data_sent.borrow()[0] <= 1000, "{}", data_sent.borrow()[0]);
    let told = |pair: &Pair| {
        let exhausted = Event::KeysExhausted { peer: 0 };
        let told = pair.events[0].iter().filter(|e| **e == exhausted).count();
        (told, pair.events[0].contains(&Event::PeerDown { peer: 0 }))
    };
    assert_eq!(told(&pair), (1, true));
    let counters = pair.nodes[0].counters();
    assert!(counters.get(Counter::KeysExhausted) > 0);
    let before = data_sent.borrow()[0];
    pair.run(Duration::from_secs(2));
    assert_eq!(data_sent.borrow()[0], before, "not one more");

    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(5));
    pair.assert_open();
    pair.injected[1].clear();
    let more = text(100_000);
    pair.send(0, 5_000_000, &more[..50_000], 0, 1000);
    pair.send(0, 5_050_000, &more[50_000..], 0, 1000);
    pair.run(Duration::from_secs(1));
    assert!(pair.stream(1).ends_with(&more));
}

#[test]
fn keys_may_end_between_the_shares_of_a_set() {
    let data = text(50_000);
    for per_phase in 20..26 {
        let limits = KeyLimits {
            per_phase,
            phases: 4,
            previous_kept: 10,
        };
        let mut pair = limited(bump::SHARE, limits);
        pair.run(Duration::from_secs(3));
        pair.assert_open();
        pair.filter = Box::new(|_, _, bytes| is_data(bytes));
        for (i, part) in data.chunks(500).enumerate() {
            pair.send(0, 1 + i as u32 * 500, part, 0, i as u32);
            pair.run(Duration::from_millis(1));
        }
        let refused = pair.nodes[0].counters().get(Counter::KeysExhausted);
        assert!(refused > 0, "{per_phase}");
    }
}

/// Whether data passes in both directions now.
fn passes(pair: &mut Pair, seq: u32) {
    pair.injected = Default::default();
    for host in 0..2 {
        pair.send(host, seq, b"anybody there?", 0, seq);
    }
    pair.run(Duration::from_millis(200));
    for host in 0..2 {
        assert_eq!(pair.stream(host), b"anybody there?", "at {:?}", pair.now);
    }
}

#[test]
fn the_old_session_lasts_while_new_ones_are_not_confirmed() {
    let mut pair = Pair::connected();
    // Whoever answers, the answer is lost: from two minutes on one call follows another.
    let calls = Rc::new(RefCell::new(0));
    let seen = calls.clone();
    pair.filter = Box::new(move |_, _, bytes| {
        *seen.borrow_mut() += u32::from(bytes[0] == 1);
        bytes[0] != 2
    });
    for second in 0..175 {
        pair.run(Duration::from_millis(800));
        passes(&mut pair, 1 + second * 100);
    }
    assert!(*calls.borrow() > 20, "{}", calls.borrow());
    let expired = |host: usize| pair.nodes[host].counters().get(Counter::DatagramExpired);
    assert_eq!([expired(0), expired(1)], [0, 0]);
    pair.filter = Box::new(|_, _, _| true);
    for second in 175..300 {
        pair.run(Duration::from_millis(800));
        passes(&mut pair, 1 + second * 100);
    }
}

#[test]
fn who_has_no_endpoint_can_call_where_the_peer_has_proved_to_be() {
    let mut pair = Pair::connected();
    // The initiator's own calls are lost.
    pair.filter = Box::new(|host, _, bytes| host == 1 || bytes[0] != 1);
    for second in 0..400 {
        pair.run(Duration::from_millis(800));
        passes(&mut pair, 1 + second * 100);
    }
}
