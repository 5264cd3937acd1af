//! Who brings the question for a path to another path.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// An address on the first path of who sits on the second.
fn elsewhere() -> SocketAddr {
    "10.0.1.66:4444".parse().unwrap()
}

/// Host 0 calls both paths trusted, host 1 only the first.
fn disagreeing(change: impl FnOnce(&mut NodeConfig)) -> Pair {
    let mut pair = Pair::new();
    let mut configs = [config(0, Integrity::On), config(1, Integrity::On)];
    configs[0].paths[1].trusted = true;
    change(&mut configs[1]);
    let [a, b] = configs;
    pair.nodes = [
        Node::new(Time::ZERO, a, [1; 32]).unwrap(),
        Node::new(Time::ZERO, b, [2; 32]).unwrap(),
    ];
    pair
}

/// Host 1 is told where the peer is.
fn with_endpoints(config: &mut NodeConfig) {
    config.peers[0].endpoints = vec![(0, addr(0, 0)), (1, addr(0, 1))];
}

/// Host 1 is reached at addresses that are translated into its own.
fn behind_translation(config: &mut NodeConfig) {
    config.paths[0].addresses = vec!["192.168.1.2".parse().unwrap()];
    config.paths[1].addresses = vec!["192.168.2.2".parse().unwrap()];
}

fn count(pair: &Pair, counter: Counter) -> u64 {
    pair.nodes[1].counters().get(counter)
}

/// The trust of host 0's open path by each of its interfaces.
fn open(pair: &Pair) -> [Option<bool>; 2] {
    let paths = pair.nodes[0].paths();
    [0, 1].map(|local| {
        let mut of = paths.iter().filter(|p| p.local == local);
        of.find(|p| p.state == "active").map(|p| p.trusted)
    })
}

/// Lets nothing pass on the second path. What host 0 asks there is brought to host 1's first, from the
/// address that `from` says for the first and the others, and all that host 1 says there back to host 0's
/// second.
fn bring(pair: &mut Pair, from: [SocketAddr; 2]) {
    let heard = Rc::new(RefCell::new([Vec::new(), Vec::new()]));
    let tap = heard.clone();
    pair.filter = Box::new(move |host, path, bytes| {
        if path != host {
            tap.borrow_mut()[host].push(bytes.to_vec());
        }
        path == 0
    });
    let mut brought = 0;
    for _ in 0..100 {
        pair.run(Duration::from_millis(20));
        let [asked, answered] = heard.take();
        for mut datagram in asked {
            let from = from[brought.min(1)];
            brought += usize::from(!is_handshake(&datagram));
            pair.nodes[1].handle_datagram(pair.now, 0, from, &mut datagram);
        }
        for mut datagram in answered {
            pair.nodes[0].handle_datagram(pair.now, 1, addr(1, 1), &mut datagram);
        }
    }
    assert!(brought > 2, "host 0 asked");
}

#[test]
fn a_question_brought_to_a_trusted_path_gets_no_answer() {
    for known in [true, false] {
        for from in [elsewhere(), addr(0, 0)] {
            let mut pair = disagreeing(|config| {
                if known {
                    with_endpoints(config);
                }
            });
            bring(&mut pair, [from; 2]);
            assert_eq!(open(&pair), [Some(true), None], "{known} {from}");
            let counter = match known && from == elsewhere() {
                true => Counter::PathRefused,
                false => Counter::PathMisdirected,
            };
            assert!(count(&pair, counter) > 2, "{known} {from}");
        }
    }
}

#[test]
fn where_addresses_are_translated_only_the_endpoint_opens_a_trusted_path() {
    let mut pair = disagreeing(behind_translation);
    pair.run(Duration::from_secs(5));
    assert_eq!(open(&pair), [None, Some(false)], "an untrusted one opens");
    assert!(count(&pair, Counter::PathMisdirected) > 2);
    let misdirected = |pair: &Pair| pair.nodes[1].peers(pair.now)[0].misdirected.clone();
    let to = addr(1, 0).ip();
    assert_eq!(misdirected(&pair), [(0, to)]);
    let told = std::mem::take(&mut pair.events[1]).into_iter();
    let told = told.filter(|event| matches!(event, Event::Misdirected { .. }));
    let once = Event::Misdirected {
        peer: 0,
        path: 0,
        to,
    };
    assert_eq!(told.collect::<Vec<_>>(), [once]);
    // The first path gets the address that the peer writes to.
    pair.nodes[1].set_path_addresses(pair.now, 0, vec![addr(1, 0).ip()]);
    pair.run(Duration::from_secs(5));
    assert_eq!(open(&pair), [Some(true), Some(false)]);
    assert_eq!(misdirected(&pair), []);

    let mut pair = disagreeing(|config| {
        behind_translation(config);
        config.peers[0].endpoints = vec![(0, addr(0, 0))];
        // As host 0 asks, not host 1.
        config.paths[0].up = false;
    });
    pair.run(Duration::from_millis(150));
    let now = pair.now;
    pair.nodes[1].set_path(now, 0, true, 1500);
    pair.run(Duration::from_secs(5));
    assert_eq!(open(&pair), [Some(true), Some(false)]);
}

#[test]
fn an_address_of_two_paths_does_not_tell_which_is_meant() {
    for known in [true, false] {
        let mut pair = disagreeing(|config| {
            config.paths[1].addresses.push(addr(1, 0).ip());
            if known {
                config.peers[0].endpoints = vec![(0, addr(0, 0))];
            }
        });
        pair.run(Duration::from_secs(5));
        assert_eq!(open(&pair), [known.then_some(true), Some(false)]);
    }
}

#[test]
fn what_was_asked_once_from_the_endpoint_is_not_answered_elsewhere() {
    let mut pair = disagreeing(|config| {
        with_endpoints(config);
        behind_translation(config);
    });
    bring(&mut pair, [addr(0, 0), elsewhere()]);
    let links = &pair.nodes[1].peers[0].paths;
    assert!(links.iter().all(|l| l.remote != elsewhere()));
    assert!(count(&pair, Counter::PathRefused) > 2);
}

/// As when a peer has given all numbers of paths and begins anew.
#[test]
fn a_path_that_is_open_answers_no_question_of_another() {
    let mut pair = disagreeing(|_| {});
    pair.run(Duration::from_secs(3));
    assert_eq!(open(&pair), [Some(true), Some(false)]);
    let peer = &mut pair.nodes[0].peers[0];
    let id = peer.paths.iter().find(|l| l.local.get() == 0).unwrap().id;
    // Nothing takes the place of the open one.
    let now = pair.now;
    peer.paths.clear();
    pair.nodes[0].set_path(now, 0, false, 1500);
    pair.join(id, 1);
    bring(&mut pair, [addr(0, 0); 2]);
    assert_eq!(open(&pair)[1], None);
    assert!(count(&pair, Counter::PathMisdirected) > 2);
}

#[test]
fn what_the_peer_calls_untrusted_needs_no_address() {
    let mut pair = Pair::new();
    let mut b = config(1, Integrity::On);
    behind_translation(&mut b);
    b.paths[0].addresses = vec![addr(1, 0).ip()];
    b.paths[1].trusted = true;
    pair.nodes[1] = Node::new(Time::ZERO, b, [2; 32]).unwrap();
    pair.run(Duration::from_secs(5));
    assert_eq!(open(&pair), [Some(true), Some(false)]);
}
