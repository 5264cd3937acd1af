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
        let active = links.find(|l| l.local.get() == 0 && l.is_active(&pair.nodes[host].shared));
        active.map(|l| l.id)
    })
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
