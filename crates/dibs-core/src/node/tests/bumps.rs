//! Bumps without a chain.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// Datagrams seen: sender, path, bytes.
type Seen = Rc<RefCell<Vec<(usize, usize, Vec<u8>)>>>;

/// A pair on a bump, and what goes over its wires; `lose` percent of it is lost.
fn watched(bump: u8, lose: u64) -> (Pair, Seen) {
    let mut pair = Pair::connected();
    pair.bump = bump;
    let seen = Seen::default();
    let tap = seen.clone();
    let mut loses = dice(lose);
    pair.filter = Box::new(move |host, path, bytes| {
        tap.borrow_mut().push((host, path, bytes.to_vec()));
        !loses()
    });
    (pair, seen)
}

fn assert_unreadable(seen: &Seen, data: &[u8]) {
    let seen = seen.borrow();
    let needle = &data[..16];
    for (_, path, bytes) in seen.iter() {
        assert!(
            !bytes.windows(16).any(|w| w == needle),
            "read on path {path}"
        );
    }
}

#[test]
fn what_is_sealed_is_read_on_no_path() {
    let (mut pair, seen) = watched(bump::SEAL, 0);
    let data = text(2_000_000);
    pair.pour(&data, 20, Duration::from_millis(20));
    pair.run(Duration::from_secs(2));
    pair.assert_stream(1, &data);
    assert_unreadable(&seen, &data);
    assert!(pair.sent[0].iter().all(|sent| *sent > 100_000));
    // Zeros would show the key stream, or nothing at all.
    pair.send(0, 1 + 2_000_000, &[0; 40_000], 0, 100);
    pair.run(Duration::from_secs(1));
    let seen = seen.borrow();
    assert!(
        !seen
            .iter()
            .any(|(_, _, b)| b.windows(16).any(|w| w == [0; 16]))
    );
}

#[test]
fn what_was_lost_of_a_sealed_stream_is_encrypted_anew() {
    let (mut pair, seen) = watched(bump::SEAL, 10);
    let data = text(3_000_000);
    pair.pour(&data, 20, Duration::from_millis(10));
    pair.run(Duration::from_secs(5));
    pair.assert_stream(1, &data);
    assert_unreadable(&seen, &data);
    assert!(pair.nodes[0].counters().get(Counter::ChunkResent) > 10);
}

#[test]
fn a_sealed_stream_needs_no_trusted_path() {
    let (mut pair, seen) = watched(bump::SEAL, 0);
    let now = pair.now;
    for node in &mut pair.nodes {
        node.set_path(now, 0, false, 1500);
    }
    let data = text(200_000);
    pair.pour(&data, 20, Duration::from_millis(10));
    pair.send(0, 1, &data[..5_000], 0, 9);
    pair.run(Duration::from_secs(2));
    assert_unreadable(&seen, &data);
    let got = pair.received(1);
    let again = got.iter().filter(|r| r.3 == 9).map(|r| r.1.len());
    assert_eq!(
        again.sum::<usize>(),
        5_000,
        "a retransmission goes there too"
    );
    let all = got.iter().filter(|r| r.3 != 9).map(|r| r.1.len());
    assert_eq!(all.sum::<usize>(), data.len());
}

#[test]
fn padded_lengths_are_of_few_kinds() {
    let mut bumps = bump::ordinary();
    bumps.retain(|b| b.number != bump::SEAL);
    bumps.push(bump::seal(bump::Padding::Buckets));
    let mut pair = Pair::new();
    for (host, node) in pair.nodes.iter_mut().enumerate() {
        let config = NodeConfig {
            bumps: bumps.clone(),
            ..config(host, Integrity::On)
        };
        *node = Node::new(Time::ZERO, config, [host as u8; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.bump = bump::SEAL;
    let lengths = Rc::new(RefCell::new(std::collections::BTreeSet::new()));
    let tap = lengths.clone();
    pair.filter = Box::new(move |host, _, bytes| {
        if host == 0 {
            tap.borrow_mut().insert(bytes.len());
        }
        true
    });
    let mut seq = 1;
    for len in (1..4000).step_by(37) {
        pair.send(0, seq, &text(len), 0, 1);
        seq += len as u32;
        pair.run(Duration::from_millis(3));
    }
    assert_eq!(pair.stream(1).len(), seq as usize - 1);
    let lengths = lengths.borrow();
    let data: Vec<_> = lengths.iter().filter(|l| **l > 128).collect();
    assert_eq!(data, [&256, &512, &1024, &1472]);
}

#[test]
fn an_unknown_bump_is_not_opened() {
    let mut pair = Pair::connected();
    let config = NodeConfig {
        bumps: vec![bump::scramble()],
        ..config(1, Integrity::On)
    };
    pair.nodes[1] = Node::new(pair.now, config, [5; 32]).unwrap();
    pair.run(Duration::from_secs(5));
    pair.bump = bump::SEAL;
    pair.send(0, 1, &text(5_000), 0, 1);
    pair.run(Duration::from_secs(1));
    assert!(pair.received(1).is_empty());
    assert!(pair.nodes[1].counters().get(Counter::BumpUnknown) > 0);
}
