//! Who copies authentic datagrams, and sends them on from elsewhere.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

const ELSEWHERE: &str = "10.0.2.66:4444";

fn elsewhere() -> SocketAddr {
    ELSEWHERE.parse().unwrap()
}

/// What host 1 sends on the untrusted link to anybody but the peer, now.
fn sent_elsewhere(pair: &mut Pair) -> usize {
    let mut bytes = 0;
    while let Some(t) = pair.nodes[1].poll_transmit(pair.now) {
        if t.to.ip() == elsewhere().ip() {
            bytes += t.bytes.len();
        } else {
            for datagram in t.bytes.chunks(t.segment) {
                pair.wire.push_back(InFlight {
                    due: pair.now + DELAY,
                    to: 0,
                    path: t.path,
                    from: addr(1, t.path),
                    bytes: datagram.to_vec(),
                });
            }
        }
    }
    bytes
}

/// A recorder of what host 0 sends on the untrusted link, and whether it is let through.
fn recorder(pair: &mut Pair, pass: bool) -> Rc<RefCell<Vec<Vec<u8>>>> {
    let heard = Rc::new(RefCell::new(Vec::new()));
    let tap = heard.clone();
    pair.filter = Box::new(move |host, path, bytes| {
        let tapped = host == 0 && path == 1;
        if tapped {
            tap.borrow_mut().push(bytes.to_vec());
        }
        pass || !tapped
    });
    heard
}

fn remote(pair: &Pair, local: usize) -> SocketAddr {
    let paths = pair.nodes[1].paths();
    paths.iter().find(|p| p.local == local).unwrap().remote
}

#[test]
fn a_spoofed_address_gets_little_and_moves_nothing() {
    let mut pair = Pair::connected();
    let heard = recorder(&mut pair, false);
    for tick in 0..200 {
        pair.send(0, 1 + tick * 20_000, &text(20_000), 0, tick);
        pair.run(Duration::from_millis(20));
    }
    pair.filter = Box::new(|_, _, _| true);
    pair.outputs();
    let heard = heard.take();
    assert!(heard.len() > 20, "{}", heard.len());
    let before = remote(&pair, 1);
    let (mut received, mut sent) = (0, 0);
    // Each is authentic, newer than all before, and comes from where the peer is not.
    for datagram in heard.iter().take(100) {
        received += datagram.len();
        let mut copy = datagram.clone();
        pair.nodes[1].handle_datagram(pair.now, 1, elsewhere(), &mut copy);
        sent += sent_elsewhere(&mut pair);
        assert!(sent <= 3 * received, "{sent} of {received}");
        pair.now += Duration::from_millis(300);
        let wall = Duration::from_secs(1_000_000) + pair.now.since(Time::ZERO);
        pair.nodes[1].handle_timeout(pair.now, wall);
        sent += sent_elsewhere(&mut pair);
        assert!(sent <= 3 * received, "{sent} of {received}");
    }
    assert!(sent > 0, "it was asked");
    assert!(pair.nodes[1].counters().get(Counter::EndpointChallenged) > 0);
    assert_eq!(pair.nodes[1].counters().get(Counter::EndpointMoved), 0);
    assert_eq!(remote(&pair, 1), before);
}

#[test]
fn the_shortest_datagram_brings_at_most_three_times_its_length() {
    let mut pair = Pair::connected();
    let heard = recorder(&mut pair, false);
    // Idle: pings and acknowledgements.
    pair.run(Duration::from_secs(3));
    let shortest = heard
        .borrow()
        .iter()
        .min_by_key(|d| d.len())
        .unwrap()
        .clone();
    assert!(shortest.len() < 50, "{}", shortest.len());
    let mut copy = shortest.clone();
    pair.nodes[1].handle_datagram(pair.now, 1, elsewhere(), &mut copy);
    let mut sent = 0;
    for _ in 0..60 {
        sent += sent_elsewhere(&mut pair);
        pair.now += Duration::from_millis(100);
        let wall = Duration::from_secs(1_000_000) + pair.now.since(Time::ZERO);
        pair.nodes[1].handle_timeout(pair.now, wall);
    }
    assert!(
        sent > 0 && sent <= 3 * shortest.len(),
        "{sent} of {}",
        shortest.len()
    );
}

#[test]
fn a_copied_question_for_a_path_brings_at_most_three_times_its_length() {
    let mut pair = Pair::new();
    let heard = recorder(&mut pair, false);
    pair.run(Duration::from_millis(150));
    let join = heard
        .borrow()
        .iter()
        .find(|d| matches!(d[0], 4 | 5))
        .unwrap()
        .clone();
    let mut copy = join.clone();
    pair.nodes[1].handle_datagram(pair.now, 1, elsewhere(), &mut copy);
    let mut sent = 0;
    for _ in 0..200 {
        sent += sent_elsewhere(&mut pair);
        pair.now += Duration::from_millis(100);
        let wall = Duration::from_secs(1_000_000) + pair.now.since(Time::ZERO);
        pair.nodes[1].handle_timeout(pair.now, wall);
    }
    assert!(
        sent > 0 && sent <= 3 * join.len(),
        "{sent} of {}",
        join.len()
    );
    // The peer itself asks again, and is answered where it is.
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(6));
    pair.assert_open();
    assert_eq!(remote(&pair, 1), addr(0, 1));
}

#[test]
fn a_peer_that_moved_is_found_and_a_trusted_path_is_asked_for_anew() {
    for path in [1, 0] {
        let mut pair = Pair::connected();
        let open = |pair: &Pair| {
            let mut links = pair.nodes[1].peers[0].paths.iter();
            links.find(|l| l.local.get() == path).map(|l| l.id)
        };
        let before = open(&pair);
        let heard = Rc::new(RefCell::new(Vec::new()));
        let tap = heard.clone();
        pair.filter = Box::new(move |host, at, bytes| {
            let tapped = (host, at) == (0, path);
            if tapped {
                tap.borrow_mut().push(bytes.to_vec());
            }
            !tapped
        });
        let moved: SocketAddr = format!("10.0.{}.99:7777", path + 1).parse().unwrap();
        for _ in 0..100 {
            pair.run(Duration::from_millis(20));
            for mut datagram in heard.take() {
                pair.nodes[1].handle_datagram(pair.now, path, moved, &mut datagram);
            }
        }
        assert_eq!(remote(&pair, path), moved);
        let counted = pair.nodes[1].counters().get(Counter::EndpointMoved);
        assert_eq!(counted, path as u64, "what is trusted does not roam");
        assert_eq!(open(&pair) == before, path == 1, "it is another path");
    }
}

#[test]
fn a_copy_on_another_socket_does_not_keep_the_true_one_out() {
    let mut pair = Pair::connected();
    let heard = recorder(&mut pair, false);
    for tick in 0..20 {
        pair.send(0, 1 + tick * 20_000, &text(20_000), 0, tick);
        pair.run(Duration::from_millis(5));
    }
    pair.filter = Box::new(|_, _, _| true);
    let heard = heard.take();
    assert!(!heard.is_empty());
    for datagram in &heard {
        let mut copy = datagram.clone();
        pair.nodes[1].handle_datagram(pair.now, 0, addr(0, 0), &mut copy);
    }
    let count = |pair: &Pair, c| pair.nodes[1].counters().get(c);
    assert_eq!(count(&pair, Counter::WrongPath), heard.len() as u64);
    for datagram in &heard {
        let mut copy = datagram.clone();
        pair.nodes[1].handle_datagram(pair.now, 1, addr(0, 1), &mut copy);
    }
    assert_eq!(count(&pair, Counter::DatagramReplayed), 0);
}

#[test]
fn a_peer_numbers_only_its_own_paths() {
    let mut pair = Pair::connected();
    let ids = |node: &Node| -> Vec<bool> {
        let links = node.peers[0].paths.iter();
        links.map(|l| node.peers[0].paths.numbers(l.id)).collect()
    };
    let ours = [ids(&pair.nodes[0]), ids(&pair.nodes[1])];
    assert_eq!(ours, [vec![true; 2], vec![false; 2]]);
    // Host 0 takes one of the other's.
    let id = PathId::new(100 + u8::from(!pair.nodes[1].peers[0].paths.numbers(PathId::new(100))));
    pair.join(id, 1);
    pair.run(Duration::from_secs(1));
    assert!(pair.nodes[1].counters().get(Counter::PathRefused) > 0);
    assert!(pair.nodes[1].peers[0].paths.iter().all(|l| l.id != id));
}

#[test]
fn what_comes_much_later_changes_nothing_and_is_counted() {
    let mut pair = Pair::connected();
    pair.send_ack(1, 1);
    let heard = recorder(&mut pair, false);
    let data = text(200_000);
    for (i, part) in data.chunks(20_000).enumerate() {
        pair.send(0, 1 + i as u32 * 20_000, part, 0, i as u32);
        pair.run(Duration::from_millis(5));
    }
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(20));
    pair.assert_stream(1, &data);
    let before = pair.injected[1].len();
    for mut late in heard.take() {
        pair.nodes[1].handle_datagram(pair.now, 1, addr(0, 1), &mut late);
    }
    pair.run(Duration::from_secs(1));
    assert_eq!(pair.injected[1].len(), before);
    assert!(pair.nodes[1].counters().get(Counter::ChunkDuplicate) > 0);
    pair.assert_open();
}

#[test]
fn a_path_knows_its_round_trip_although_it_asked_several_times() {
    for ms in [1, 10, 50, 60, 100, 130, 200] {
        let delay = Duration::from_millis(ms);
        let pair = Pair::far_apart(delay);
        for path in pair.nodes.iter().flat_map(Node::paths) {
            let stats = path.stats;
            assert!(
                stats.srtt >= 2 * delay && stats.ptos <= 2,
                "{ms} ms: {stats:?}"
            );
        }
    }
}

#[test]
fn a_peer_is_reached_however_long_the_way() {
    for ms in [350, 600, 900] {
        let mut pair = Pair::new();
        pair.delay = Duration::from_millis(ms);
        pair.run(Duration::from_secs(15));
        pair.assert_open();
    }
}

#[test]
fn a_path_that_nobody_answered_for_long_is_not_thought_to_be_long() {
    let mut pair = Pair::new();
    let now = pair.now;
    pair.nodes[1].set_path(now, 1, false, 1500);
    // What is asked there gets lost, as with an interface that is down.
    pair.filter = Box::new(|_, path, _| path == 0);
    pair.run(Duration::from_secs(60));
    let now = pair.now;
    pair.nodes[1].set_path(now, 1, true, 1500);
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(10));
    pair.assert_open();
    for path in pair.nodes.iter().flat_map(Node::paths) {
        assert!(path.stats.srtt <= Duration::from_secs(1), "{path:?}");
    }
}

#[test]
fn what_tcp_sends_again_is_not_dropped_for_a_queue() {
    const BYTES: usize = 60_000;
    let mut pair = Pair::far_apart(Duration::from_millis(50));
    let now = pair.now;
    pair.nodes[0].set_path(now, 1, false, 1500);
    let data = text(BYTES);
    pair.send(0, 1, &data, 0, 0);
    pair.run(Duration::from_secs(2));
    let dropped = |pair: &Pair| pair.nodes[0].counters().get(Counter::CodelDropped);
    let of_new = dropped(&pair);
    assert!(of_new > 0, "the path is slow at first");
    for tick in 0..100 {
        pair.send(0, 1, &data, 0, tick);
        pair.run(Duration::from_millis(2));
    }
    pair.run(Duration::from_secs(5));
    assert_eq!(dropped(&pair), of_new);
}

#[test]
fn what_routers_mark_is_told_to_the_sender_by_path() {
    let mut pair = Pair::connected();
    let data = text(40_000);
    pair.send(0, 1, &data, 0, 1);
    pair.outputs();
    let marked = |pair: &Pair| -> Vec<u64> {
        let paths = pair.nodes[0].paths();
        paths.iter().map(|path| path.stats.marked).collect()
    };
    assert_eq!(marked(&pair), [0, 0]);
    let mut to_mark = 3;
    for _ in 0..1000 {
        pair.outputs();
        let Some(mut w) = pair.wire.pop_front() else {
            break;
        };
        pair.now = pair.now.max(w.due);
        let node = &mut pair.nodes[w.to];
        if w.to == 1 && w.path == 1 && to_mark > 0 {
            to_mark -= 1;
            node.handle_marked_datagram(pair.now, w.path, w.from, &mut w.bytes);
        } else {
            node.handle_datagram(pair.now, w.path, w.from, &mut w.bytes);
        }
    }
    pair.run(Duration::from_millis(100));
    assert_eq!((to_mark, marked(&pair)), (0, vec![0, 3]));
}
