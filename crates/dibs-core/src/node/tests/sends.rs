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
