//! The peer listens at several places, or at others than before.

use super::*;

/// An address of the first path at which nobody is.
fn nobody(n: u16) -> SocketAddr {
    SocketAddr::new("10.0.1.99".parse().unwrap(), n)
}

/// A pair of which host 0 knows these endpoints on the first path, and the usual one on the second. What goes to an
/// address on the first path at which nobody is gets lost.
fn calling(first: &[SocketAddr]) -> Pair {
    let mut pair = Pair::new();
    let mut config = config(0, Integrity::On);
    config.peers[0].endpoints = endpoints(first);
    pair.nodes[0] = Node::new(Time::ZERO, config, [1; 32]).unwrap();
    pair.listens = Some(addr(1, 0));
    pair
}

fn endpoints(first: &[SocketAddr]) -> Vec<(usize, SocketAddr)> {
    let first = first.iter().map(|to| (0, *to));
    first.chain([(1, addr(1, 1))]).collect()
}

/// Places to which the trusted paths of host 0 lead, each with its state.
fn trusted(pair: &Pair) -> Vec<(SocketAddr, &'static str)> {
    let paths = pair.nodes[0].paths();
    let trusted = paths.iter().filter(|path| path.local == 0);
    trusted.map(|path| (path.remote, path.state)).collect()
}

/// Like IPv4 and IPv6 addresses of one name, of which one leads nowhere.
#[test]
fn of_several_endpoints_each_has_its_turn() {
    let there = addr(1, 0);
    for first in [
        [there, nobody(1), nobody(2)],
        [nobody(1), there, nobody(2)],
        [nobody(1), nobody(2), there],
    ] {
        let mut pair = calling(&first);
        pair.run(Duration::from_secs(30));
        assert_eq!(trusted(&pair), [(there, "active")], "of {first:?}");
        // One path over one interface, however many addresses the peer has.
        pair.assert_open();
    }
}

#[test]
fn a_peer_that_is_not_known_to_be_anywhere_is_called_once_it_is() {
    let mut pair = Pair::new();
    let mut config = config(0, Integrity::On);
    config.peers[0].endpoints.clear();
    pair.nodes[0] = Node::new(Time::ZERO, config, [1; 32]).unwrap();
    pair.run(Duration::from_secs(30));
    assert_eq!(pair.sent, [[0; 2]; 2], "nobody is called");
    pair.nodes[0].set_endpoints(pair.now, 0, endpoints(&[addr(1, 0)]));
    pair.run(Duration::from_millis(100));
    pair.assert_open();
}

/// The name of the peer is another address's, after an outage in which the peer got one.
#[test]
fn a_peer_that_is_elsewhere_is_found_there_and_what_led_to_it_is_given_up() {
    let mut pair = calling(&[addr(1, 0)]);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    let data = text(100_000);
    pair.send(0, 1, &data[..50_000], 0, 1);
    pair.run(Duration::from_secs(1));

    let new = SocketAddr::new("10.0.1.2".parse().unwrap(), 7777);
    pair.listens = Some(new);
    pair.send(0, 50_001, &data[50_000..], 0, 2);
    pair.run(Duration::from_secs(10));
    let before = trusted(&pair);
    assert!(before.iter().all(|(_, state)| *state != "active"));

    // The same again is no news.
    pair.nodes[0].set_endpoints(pair.now, 0, endpoints(&[addr(1, 0)]));
    assert_eq!(trusted(&pair), before);
    pair.nodes[0].set_endpoints(pair.now, 0, endpoints(&[new]));
    pair.run(Duration::from_secs(2));
    assert_eq!(trusted(&pair), [(new, "active")]);
    pair.assert_stream(1, &data);
}

#[test]
fn a_path_that_is_answered_stays_though_its_peer_is_said_to_be_elsewhere() {
    let mut pair = calling(&[addr(1, 0)]);
    pair.run(Duration::from_secs(3));
    pair.nodes[0].set_endpoints(pair.now, 0, endpoints(&[nobody(1)]));
    pair.run(Duration::from_secs(30));
    assert_eq!(trusted(&pair), [(addr(1, 0), "active")]);
}
