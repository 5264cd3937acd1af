//! What CoDel drops arrives, whatever TCP makes of it.

use super::bounds::{speak, speak_in_segments};
use super::*;
use crate::node::fq::MAX_DROPPED;

const BYTES: usize = 60_000;

/// How often host 0 counted something.
fn count(pair: &Pair, counter: Counter) -> u64 {
    pair.nodes[0].counters().get(counter)
}

/// A pair of which host 0 had more to send than its one path took at first.
fn with_a_queue(data: &[u8]) -> Pair {
    let mut pair = Pair::by_one_path(Duration::from_millis(50));
    let now = pair.now;
    pair.send_ack(1, 1);
    pair.send(0, 1, data, 0, 0);
    while count(&pair, Counter::CodelDropped) == 0 {
        assert!(pair.now.since(now) < Duration::from_secs(1), "no queue");
        pair.run(Duration::from_millis(1));
    }
    pair
}

/// Asserts that the kernel of host 1 was given `data` from number 1 on, in whatever order.
fn assert_arrived(pair: &Pair, data: &[u8]) {
    let mut arrived = vec![false; data.len()];
    for (seq, payload, ..) in pair.received(1) {
        let at = seq as usize - 1;
        assert!(payload == data[at..at + payload.len()], "bytes at {seq}");
        arrived[at..at + payload.len()].fill(true);
    }
    let missing = arrived.iter().filter(|there| !**there).count();
    assert_eq!(missing, 0, "bytes are missing");
}

#[test]
fn what_tcp_does_not_send_again_goes_after_all() {
    let data = text(BYTES);
    let mut pair = with_a_queue(&data);
    pair.run(Duration::from_secs(2));
    assert_arrived(&pair, &data);
    let returned = count(&pair, Counter::CodelReturned);
    assert_eq!(returned, count(&pair, Counter::CodelDropped));
}

/// As Linux does that takes back what it marked as lost: its timer sends the first byte that it misses,
/// and nothing that the outage did not hold up.
#[test]
fn what_was_dropped_before_an_outage_is_there_soon_after_it() {
    let data = text(BYTES);
    let mut pair = with_a_queue(&data);
    pair.filter = Box::new(|_, _, _| false);
    pair.run(Duration::from_millis(100));
    let before = pair.received(1).len();
    for tick in 1..=6 {
        pair.send(0, 1, &data[..1400], 0, tick);
        pair.run(Duration::from_secs(1));
    }
    assert_eq!(pair.received(1).len(), before);
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(1));
    assert_arrived(&pair, &data);
}

#[test]
fn what_tcp_sends_again_goes_once() {
    let data = text(BYTES);
    let mut pair = with_a_queue(&data);
    for tick in 1..=20 {
        pair.send(0, 1, &data, 0, tick);
        pair.run(Duration::from_millis(50));
    }
    pair.run(Duration::from_secs(5));
    assert_arrived(&pair, &data);
    assert_eq!(count(&pair, Counter::CodelReturned), 0);
}

#[test]
fn a_new_connection_between_the_same_ports_gets_nothing_of_the_old_one() {
    let mut pair = with_a_queue(&text(BYTES));
    pair.send(0, 1_000_000, b"", flags::SYN, 1);
    pair.run(Duration::from_secs(2));
    assert_eq!(count(&pair, Counter::CodelReturned), 0);
    assert_eq!(pair.nodes[0].peers[0].queues.fq.kept().0, 0);
}

/// A thousand flows that are dropped of at the same time must not push out each other's: what goes before TCP
/// has had the time to send it again goes twice, and out of order.
#[test]
fn each_of_many_flows_has_time_to_send_again() {
    const FLOWS: u16 = 1000;
    let mut pair = Pair::by_one_path(Duration::from_millis(50));
    let data = text(50_000);
    for port in 0..FLOWS {
        speak(&mut pair, 1000 + port, 1, &data);
    }
    let spoke = pair.now;
    while count(&pair, Counter::CodelDropped) < 200 {
        assert!(pair.now.since(spoke) < Duration::from_secs(60));
        pair.run(Duration::from_millis(10));
    }
    // The first one's time may be over.
    assert!(count(&pair, Counter::CodelReturned) <= 1);
}

#[test]
fn only_so_many_are_kept() {
    const FLOWS: u16 = 120;
    let mut pair = Pair::by_one_path(Duration::from_millis(300));
    let data = text(50_000);
    for port in 0..FLOWS {
        for n in 0..9 {
            let at = (1000 + port, 1 + 50_000 * n);
            speak_in_segments(&mut pair, at, &data, 25_000);
        }
    }
    let mut most = 0;
    for _ in 0..2000 {
        pair.run(Duration::from_millis(10));
        most = most.max(pair.nodes[0].peers[0].queues.fq.kept().1);
    }
    assert!(most <= MAX_DROPPED && most > MAX_DROPPED / 2, "{most}");
    pair.run(Duration::from_secs(60));
    let returned = count(&pair, Counter::CodelReturned);
    assert_eq!(returned, count(&pair, Counter::CodelDropped));
    let peer = &pair.nodes[0].peers[0];
    let kept = peer.queues.fq.kept();
    assert_eq!(kept, (0, 0));
    assert_eq!((peer.queues.fq.backlog(), peer.queues.fq.memory()), (0, 0));
}
