//! What waits for a path that is away holds up nothing that needs it not.

use super::*;
use crate::preference::Unused;

/// Host 0 sends some by `bump` while `path` carries nothing any more, and then, by a seal that needs no such path,
/// many times what the peer may have to hold. That arrives, and what waits does once the path is back.
fn others_go_on(bump: BumpId, path: usize) {
    let mut pair = Pair::connected();
    pair.bump = bump;
    let data = text(4_000_000);
    pair.send(0, 1, &data[..50_000], 0, 1);
    pair.run(Duration::from_millis(200));
    pair.assert_stream(1, &data[..50_000]);
    pair.filter = Box::new(move |_, at, _| at != path);
    pair.send(0, 50_001, &data[50_000..100_000], 0, 2);
    pair.run(Duration::from_millis(200));
    let before = pair.injected[1].split_off(0);
    let waits = pair.nodes[0].peers[0].in_flight.len();
    assert!(waits > 0, "it waits for the path");

    pair.nodes[0].peers[0].association.set_store(256 << 10);
    pair.bump = bump::SEAL;
    for (i, part) in data.chunks(50_000).enumerate() {
        pair.send(0, 5_000_000 + i as u32 * 50_000, part, 0, i as u32);
        pair.run(Duration::from_millis(10));
    }
    pair.run(Duration::from_secs(2));
    pair.assert_stream(1, &data);
    let peer = &pair.nodes[0].peers[0];
    assert!(peer.in_flight.len() <= waits, "nothing else waits");
    assert!(peer.in_flight.claim() < 256 << 10);

    pair.bump = bump;
    pair.injected[1] = before;
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(5));
    pair.assert_stream(1, &data[..100_000]);
    assert!(pair.nodes[0].peers[0].in_flight.is_empty());
}

#[test]
fn shares_wait_for_their_path_alone() {
    others_go_on(bump::SHARE, 1);
}

#[test]
fn what_only_trusted_paths_carry_waits_for_them_alone() {
    others_go_on(BUMP, 0);
}

/// A kernel that lives says so again and again; what one left that gave up is not kept for the day when there is
/// a path again.
#[test]
fn what_a_dead_connection_left_waits_a_quarter_of_an_hour() {
    let mut pair = Pair::connected();
    pair.bump = bump::SHARE;
    let now = pair.now;
    pair.nodes[0].set_path(now, 1, false, 1500);
    pair.send(0, 1, &text(50_000), 0, 1);
    pair.run(Duration::from_secs(800));
    assert!(pair.nodes[0].peers[0].queues.fq.memory() > 50_000);
    pair.run(Duration::from_secs(200));
    assert_eq!(pair.nodes[0].peers[0].queues.fq.memory(), 0);
    assert!(pair.nodes[0].conns().is_empty());
}

/// A connection comes back to a bump after gigabytes elsewhere: numbers that lie far behind lie ahead.
#[test]
fn gigabytes_elsewhere_leave_no_number_far_ahead() {
    let mut pair = Pair::connected();
    pair.send(0, 1, &text(1000), 0, 1);
    pair.run(Duration::from_millis(100));
    pair.send_ack(1, 1001);
    pair.run(Duration::from_millis(100));
    let gone = 5 << 29;
    pair.send(0, 1001 + gone, &text(1000), 0, 2);
    pair.run(Duration::from_millis(100));
    pair.send_ack(1, 2001 + gone);
    pair.run(Duration::from_millis(100));
    let conn = |host: usize| pair.nodes[host].peers[0].flows.iter().next().unwrap().1;
    let to = Some(SeqNumber::new(2001 + gone));
    assert_eq!((conn(0).sent_end, conn(1).acked), (to, to));
    assert_eq!(pair.received(1).last().unwrap().0, 1001 + gone);
}

/// States of the second path that host 0 told of since.
fn told(pair: &mut Pair) -> Vec<&'static str> {
    let events = std::mem::take(&mut pair.events[0]).into_iter();
    let states = events.filter_map(|event| match event {
        Event::Path { path: 1, state, .. } => Some(state),
        _ => None,
    });
    states.collect()
}

/// An uplink that is up and leads nowhere, as before the login at a captive portal.
#[test]
fn a_path_by_which_nothing_comes_is_told_of_within_three_seconds() {
    let mut pair = Pair::new();
    pair.filter = Box::new(|_, path, _| path == 0);
    pair.run(Duration::from_secs(3));
    assert_eq!(told(&mut pair), ["joining", "down"]);
    let seen = |pair: &Pair| {
        let paths = pair.nodes[0].paths();
        let path = paths.into_iter().find(|path| path.local == 1).unwrap();
        (path.state, path.unused)
    };
    let silent = ("down", Some(Unused::Unanswered));
    assert_eq!(seen(&pair), silent);
    pair.run(Duration::from_secs(300));
    assert_eq!(seen(&pair), silent);
    assert_eq!(told(&mut pair), [""; 0], "once is enough");

    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(10));
    assert_eq!(told(&mut pair), ["active"]);
    for node in &mut pair.nodes {
        node.set_scheduler(Scheduler::RoundRobin);
    }
    // Its volume is used up under a connection.
    let mut at = 0;
    for cut in [false, true] {
        if cut {
            pair.filter = Box::new(|_, path, _| path == 0);
        }
        for _ in 0..50 {
            pair.send(0, 1 + at, &text(10_000), 0, at);
            at += 10_000;
            pair.run(Duration::from_millis(10));
            pair.send_ack(1, 1 + at);
        }
        let expected: &[&str] = if cut { &["suspect"] } else { &[] };
        assert_eq!(told(&mut pair), expected);
    }
}

/// A busy host or a handover between cells makes such pauses; a peer that is away is silent for longer.
#[test]
fn a_pause_is_no_absence() {
    let mut pair = Pair::connected();
    let reachable = |pair: &Pair| pair.nodes[0].peers(pair.now)[0].reachable;
    pair.filter = Box::new(|_, _, _| false);
    pair.send(0, 1, &text(50_000), 0, 1);
    pair.run(Duration::from_secs(1));
    let paths = pair.nodes[0].paths();
    assert!({ paths.iter() }.all(|path| path.unused == Some(Unused::Unanswered)));
    assert!(reachable(&pair), "after a second");
    pair.run(Duration::from_secs(6));
    assert!(!reachable(&pair), "after seven");
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(6));
    assert!(reachable(&pair), "it is back");
}
