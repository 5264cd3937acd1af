//! How datagrams are put together to sends.

use super::*;

#[test]
fn a_send_goes_on_with_the_next_segment() {
    // What Linux hands over at most; a few datagrams more than one send takes.
    const SUPERPACKET: usize = 45 * 1448;
    let mut pair = Pair::connected();
    let now = pair.now;
    pair.nodes[0].set_path(now, 1, false, 1500);
    pair.nodes[0].expect_rate(now, 0, inner(1), 2_000_000_000);
    let data = text(4 * SUPERPACKET);
    for (at, part) in (0..).zip(data.chunks(SUPERPACKET)) {
        pair.send(0, 1 + at * SUPERPACKET as u32, part, 0, 1);
    }
    let mut sends = Vec::new();
    while let Some(t) = pair.nodes[0].poll_transmit(now) {
        sends.push((t.bytes.len().div_ceil(t.segment), t.bytes.len() % t.segment));
        for datagram in t.bytes.chunks(t.segment) {
            pair.wire.push_back(InFlight {
                due: now + DELAY,
                to: 1,
                path: t.path,
                from: addr(0, t.path),
                bytes: datagram.to_vec(),
            });
        }
    }
    let datagrams: usize = sends.iter().map(|(count, _)| count).sum();
    assert_eq!(sends.len(), datagrams.div_ceil(44), "{sends:?}");
    assert!(sends.iter().all(|(_, short)| *short == 0), "{sends:?}");
    pair.run(Duration::from_millis(20));
    pair.assert_stream(1, &data);
}

/// The datagrams of each send that a node has for now.
fn sends(pair: &mut Pair, host: usize) -> Vec<usize> {
    let (now, mut sends) = (pair.now, Vec::new());
    while let Some(t) = pair.nodes[host].poll_transmit(now) {
        sends.push(t.bytes.len().div_ceil(t.segment));
    }
    sends
}

#[test]
fn what_fills_no_send_waits_for_what_comes() {
    let mut pair = Pair::connected();
    let now = pair.now;
    pair.nodes[0].set_path(now, 1, false, 1500);
    pair.nodes[0].expect_rate(now, 0, inner(1), 2_000_000_000);
    let part = text(45 * 1448);
    pair.send(0, 1, &part, 0, 1);
    pair.nodes[0].set_more_comes(true);
    assert_eq!(sends(&mut pair, 0), [44]);
    pair.send(0, 1 + part.len() as u32, &part, 0, 1);
    assert_eq!(sends(&mut pair, 0), [44]);
    pair.nodes[0].set_more_comes(false);
    let rest = sends(&mut pair, 0);
    assert!(rest.len() == 1 && rest[0] < 44, "nothing comes: {rest:?}");

    // It waits for no more than what the caller has at hand.
    pair.send(0, 1 + 2 * part.len() as u32, b"late", 0, 1);
    pair.nodes[0].set_more_comes(true);
    assert!(sends(&mut pair, 0).is_empty());
    pair.now = now + Duration::from_micros(1);
    assert_eq!(sends(&mut pair, 0), [1]);
}

#[test]
fn a_path_is_acknowledged_by_the_segment_that_goes_there() {
    let mut pair = Pair::connected();
    let now = pair.now;
    for node in &mut pair.nodes {
        node.set_path(now, 1, false, 1500);
    }
    pair.send(0, 1, &text(30_000), 0, 1);
    pair.run(DELAY / 2);
    pair.now += DELAY;
    while let Some(mut w) = pair.wire.pop_front() {
        pair.nodes[w.to].handle_datagram(pair.now, w.path, w.from, &mut w.bytes);
    }
    pair.send_ack(1, 30_001);
    assert_eq!(sends(&mut pair, 1), [1], "TCP's and the path's, in one");
}
