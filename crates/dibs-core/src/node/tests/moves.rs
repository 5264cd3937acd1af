//! A host that changes its address on the trusted path: the path does not roam, it is asked for anew.

use super::*;

/// Of the `n`th change.
fn place(n: u16) -> SocketAddr {
    SocketAddr::new("10.0.1.77".parse().unwrap(), 6000 + n)
}

/// The ids of the trusted path that both hosts use.
fn in_use(pair: &Pair) -> [Option<PathId>; 2] {
    [0, 1].map(|host| {
        let mut links = pair.nodes[host].peers[0].paths.iter();
        let active =
            links.find(|l| l.local.get() == 0 && l.is_active(&pair.nodes[host].shared.setup));
        active.map(|l| l.id)
    })
}

/// Host 0 moves while `sender` has a stream under way on scramble, which needs the trusted path: it was there again only
/// after 5 s, when the old path counted as down.
#[test]
fn a_trusted_path_carries_again_within_a_second_and_a_half() {
    for (sender, delay) in [(0, 1), (1, 1), (0, 50), (1, 50)] {
        let mut pair = Pair::far_apart(Duration::from_millis(delay));
        let data = text(100_000);
        let mut at = 0;
        let mut part = |pair: &mut Pair| {
            pair.send(sender, 1 + at as u32, &data[at..at + 500], 0, at as u32);
            at += 500;
            at
        };
        for n in 0..4 {
            for _ in 0..20 {
                part(&mut pair);
                pair.run(Duration::from_millis(50));
            }
            let old = in_use(&pair);
            pair.moved = Some(place(n));
            let sent = part(&mut pair);
            pair.run(Duration::from_millis(1500));
            let [a, b] = in_use(&pair);
            assert!(
                a.is_some() && a == b && a != old[0],
                "{sender} {delay} {n}: {a:?} {b:?}"
            );
            pair.assert_stream(1 - sender, &data[..sent]);
            for node in &pair.nodes {
                assert_eq!(
                    node.paths().len(),
                    2,
                    "the old one goes: {:?}",
                    node.paths()
                );
            }
        }
        let challenged = pair.nodes[1].counters().get(Counter::EndpointChallenged);
        assert!(challenged > 0 && challenged < 40, "{challenged}");
        assert_eq!(pair.nodes[1].counters().get(Counter::EndpointMoved), 0);
    }
}

/// The local address is another one: nobody waits until something is due.
#[test]
fn a_new_address_is_told_at_once() {
    let mut pair = Pair::connected();
    pair.run(Duration::from_secs(60));
    let old = in_use(&pair);
    pair.moved = Some(place(0));
    pair.nodes[0].set_path_addresses(pair.now, 0, vec![place(0).ip()]);
    pair.run(Duration::from_millis(100));
    let [a, b] = in_use(&pair);
    assert!(a.is_some() && a == b && a != old[0], "{a:?} {b:?}");
}

/// Host 1 was told where host 0 is: from elsewhere it takes no question, and asks none.
#[test]
fn a_trusted_path_does_not_leave_a_configured_endpoint() {
    let mut pair = Pair::new();
    let mut b = config(1, Integrity::On);
    b.peers[0].endpoints = vec![(0, addr(0, 0)), (1, addr(0, 1))];
    pair.nodes[1] = Node::new(Time::ZERO, b, [2; 32]).unwrap();
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair.moved = Some(place(0));
    pair.run(Duration::from_secs(60));
    assert_eq!(in_use(&pair), [None, None]);
    let counters = pair.nodes[1].counters();
    assert_eq!(counters.get(Counter::EndpointChallenged), 0);
    assert!(
        pair.nodes[1].peers[0]
            .paths
            .iter()
            .all(|l| l.remote != place(0))
    );
}

/// More often than there are ids, and than paths to a peer may be.
#[test]
fn a_host_may_move_as_often_as_it_likes() {
    let mut pair = Pair::connected();
    let data = text(100_000);
    for n in 0..140 {
        pair.moved = Some(place(n));
        pair.run(Duration::from_secs(8));
        let [a, b] = in_use(&pair);
        assert!(a.is_some() && a == b, "move {n}: {a:?} and {b:?}");
        for node in &pair.nodes {
            let paths = node.paths();
            assert!(paths.len() <= crate::node::paths::MAX_LINKS);
            assert!(paths.iter().any(|p| !p.trusted && p.state == "active"));
            assert_eq!(node.counters().get(Counter::PathRefused), 0);
        }
        // Some is on its way when it moves next.
        let at = usize::from(n) * 700;
        pair.send(0, 1 + at as u32, &data[at..at + 700], 0, n.into());
    }
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data[..140 * 700]);
}

/// Host 1 has a path of old, which host 0 has forgotten, by the id that host 0 gives next.
#[test]
fn a_question_under_the_id_of_another_path_is_asked_under_a_new_one() {
    let mut pair = Pair::connected();
    let [Some(old), _] = in_use(&pair) else {
        panic!("the trusted path is open");
    };
    pair.moved = Some(place(0));
    let peer = &mut pair.nodes[0].peers[0];
    let at = peer.paths.iter().position(|l| l.id == old).unwrap();
    let given_up = peer.paths.remove(at);
    peer.abandon(&mut pair.nodes[0].shared, [given_up]);
    pair.join(old, 0);
    pair.run(Duration::from_secs(30));
    let [a, b] = in_use(&pair);
    assert!(a.is_some() && a == b && a != Some(old), "{a:?} and {b:?}");
}
