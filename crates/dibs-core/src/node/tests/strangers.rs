//! A host that no peer has taken yet, and calls with a ticket.

use super::*;
use crate::node::{MAX_TICKET, Ticket};

const TICKET: &[u8] = b"let me in, please";

/// Host 0 calls host 1, which has this key in its place.
fn calling(known: u8, ticket: &[u8]) -> Pair {
    let mut pair = Pair::new();
    let mut config = config(1, Integrity::On);
    config.peers[0].public = PublicKey::from(&StaticSecret::from([known; 32]));
    config.peers[0].preshared = None;
    pair.nodes[1] = Node::new(Time::ZERO, config, [2; 32]).unwrap();
    pair.nodes[0].set_ticket(0, Ticket::new(ticket.to_vec().into()).unwrap());
    pair
}

fn key_of_caller() -> PublicKey {
    PublicKey::from(&StaticSecret::from([7; 32]))
}

/// Strangers of which host 1 is told.
fn told(pair: &mut Pair) -> Vec<(PublicKey, Vec<u8>)> {
    let events = std::mem::take(&mut pair.events[1]).into_iter();
    let strangers = events.filter_map(|event| match event {
        Event::Stranger { key, ticket } => Some((key, ticket.as_bytes().to_vec())),
        _ => None,
    });
    strangers.collect()
}

#[test]
fn a_stranger_with_a_ticket_is_told_and_not_answered() {
    let mut pair = calling(77, TICKET);
    let calls = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let seen = std::rc::Rc::clone(&calls);
    pair.filter = Box::new(move |host, _, datagram| {
        assert_eq!(host, 0, "host 1 is silent");
        let clear = datagram.windows(TICKET.len()).any(|part| part == TICKET);
        assert!(!clear && datagram.len() == 1200);
        seen.borrow_mut().push(datagram.to_vec());
        true
    });
    pair.run(Duration::from_secs(1));
    let first = told(&mut pair);
    assert!(!first.is_empty());
    let expected = (key_of_caller(), TICKET.to_vec());
    assert!(first.iter().all(|stranger| *stranger == expected));
    // Whoever repeats or alters what was recorded brings no other key and no other ticket in.
    let recorded = calls.borrow()[0].clone();
    for at in (0..recorded.len()).step_by(61) {
        let mut altered = recorded.clone();
        altered[at] ^= 1;
        pair.nodes[1].handle_datagram(pair.now, 0, addr(0, 0), &mut altered);
    }
    pair.nodes[1].handle_datagram(pair.now, 0, addr(0, 0), &mut recorded.clone());
    pair.filter = Box::new(|_, _, _| false);
    pair.run(Duration::from_millis(1));
    assert!(told(&mut pair).iter().all(|stranger| *stranger == expected));
}

#[test]
fn strangers_are_told_one_at_a_time_and_only_with_a_ticket() {
    let mut pair = calling(77, b"");
    pair.run(Duration::from_secs(1));
    assert_eq!(told(&mut pair), []);
    let count = pair.nodes[1].counters().get(Counter::HandshakeUnknownPeer);
    assert!(count > 0);

    let mut pair = calling(77, TICKET);
    // Nobody asks for the news.
    pair.busy[1] = true;
    pair.run(Duration::from_secs(3));
    pair.busy[1] = false;
    pair.filter = Box::new(|_, _, _| false);
    pair.run(Duration::from_millis(1));
    assert_eq!(told(&mut pair).len(), 1);

    let long = |length: usize| Ticket::new(vec![7; length].into());
    assert!(long(MAX_TICKET).is_some() && long(MAX_TICKET + 1).is_none());
}

/// A session says that the peer has taken us, so nothing of the ticket goes to it again.
#[test]
fn a_ticket_is_forgotten_once_there_is_a_session() {
    let mut pair = Pair::new();
    pair.nodes[0].set_ticket(0, Ticket::new(TICKET.to_vec().into()).unwrap());
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    assert_eq!(told(&mut pair), []);
    let peer = &pair.nodes[0].peers[0];
    assert_eq!(peer.association.ticket, Ticket::default());
}
