//! Who floods, and who recorded.

use super::*;

/// Somebody who knows the public key of `to`, and whom `to` does not know.
fn stranger(to: &Node, seed: u8) -> Node {
    let mut rng = SeededRandom::new([seed; 32]);
    let config = Config {
        private: Box::new(StaticSecret::from([seed; 32])),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: Handshake::Trusted,
    };
    let mut sessions = Sessions::new(config, Time::ZERO, &mut rng);
    let peer = sessions.add_peer(*to.sessions.public_key(), None).unwrap();
    Node::new(9, sessions, peer, rng)
}

/// Any address: the sender of a flood chooses it.
fn spoofed(number: u32) -> SocketAddr {
    let [a, b, c, d] = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
    SocketAddr::from(([a | 1, b, c, d], 1024 + (number % 60_000) as u16))
}

/// A peer that calls until it has a session.
fn call(now: Time, from: &mut Node, to: &mut Node) -> bool {
    let messages = match from.current(now) {
        Some(_) => Vec::new(),
        None if now == at(0) => vec![from.initiate(now)],
        None => from.timeout(now),
    };
    for message in messages {
        if let Some(reply) = to.receive(now, from.source(), &message)
            && let Some(data) = from.receive(now, to.source(), &reply)
        {
            to.receive(now, from.source(), &data);
        }
    }
    from.current(now).is_some() && from.current(now) == to.current(now)
}

#[test]
fn a_flood_from_spoofed_addresses_costs_little_and_keeps_nobody_out() {
    let [mut a, mut b] = pair();
    let mut flooder = stranger(&b, 77);
    // Valid in all but its sender: reading it takes all that reading a peer's takes.
    let forged = flooder.initiate(at(0));
    let (mut read, mut demanded, mut bytes) = (0, 0, 0);
    let mut connected_at = None;
    let seconds = 10;
    for tick in 0..1000 * seconds {
        let now = ms(tick);
        for burst in 0..10 {
            let outcome = b.handle(now, spoofed(tick as u32 * 10 + burst), &forged);
            match outcome.dropped {
                Some(Dropped::UnknownPeer) => read += 1,
                Some(Dropped::CookieDemanded) => demanded += 1,
                other => panic!("{other:?}"),
            }
            bytes += outcome.reply.map_or(0, |reply| reply.len());
        }
        if call(now, &mut a, &mut b) && connected_at.is_none() {
            connected_at = Some(now);
        }
    }
    assert!(read <= 32 + 50 * seconds, "{read} were read");
    assert_eq!(read + demanded, 10_000 * seconds);
    assert!(bytes as u64 <= 64 * demanded, "{bytes} bytes of answers");
    let connected_at = connected_at.expect("a peer gets through");
    assert!(connected_at < at(3), "{connected_at:?}");
}

#[test]
fn a_session_in_use_does_not_notice_a_flood() {
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    let forged = stranger(&b, 77).initiate(at(0));
    for number in 0..5000 {
        b.handle(at(1), spoofed(number), &forged);
        if number % 100 == 0 {
            let data = a.data(at(1)).unwrap();
            b.receive(at(1), a.source(), &data);
        }
    }
    assert!(b.not_opened.is_empty());
    assert_eq!(a.current(at(1)), b.current(at(1)));
    assert!(
        b.sessions.indices.len() <= 2,
        "strangers leave nothing behind"
    );
}

#[test]
fn a_proved_address_is_read_at_a_bounded_rate_too() {
    let [_, mut b] = pair();
    let mut flooder = stranger(&b, 77);
    b.under_load = true;
    let first = flooder.initiate(at(0));
    let cookie = b.handle(at(0), flooder.source(), &first).reply.unwrap();
    assert_eq!(
        flooder.handle(at(0), b.source(), &cookie).cookie_from,
        Some(flooder.peer)
    );
    let mut drops = BTreeMap::new();
    for _ in 0..100 {
        let message = flooder.initiate(at(1));
        let outcome = b.handle(at(1), flooder.source(), &message);
        assert!(outcome.reply.is_none());
        *drops.entry(outcome.dropped.unwrap()).or_insert(0) += 1;
    }
    let expected = [(Dropped::UnknownPeer, 4), (Dropped::Overload, 96)];
    assert_eq!(drops, BTreeMap::from(expected));
}

/// Somebody behind the peer's address calls from all of its ports, with proof of each.
#[test]
fn many_ports_of_its_address_keep_no_peer_out_where_it_is_known_to_be() {
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    let mut flooder = stranger(&b, 77);
    b.under_load = true;
    let mut refused = 0;
    for port in 6000..6400 {
        let from = SocketAddr::new(a.source().ip(), port);
        let first = flooder.initiate(at(1));
        let cookie = b.handle(at(1), from, &first).reply.unwrap();
        flooder.handle(at(1), b.source(), &cookie);
        let again = flooder.initiate(at(1));
        let dropped = b.handle(at(1), from, &again).dropped.unwrap();
        refused += u32::from(dropped == Dropped::Overload);
    }
    assert!(refused >= 400 - 64, "{refused} of 400 are too many");

    let first = a.initiate(at(1));
    let cookie = b.handle(at(1), a.source(), &first).reply.unwrap();
    a.handle(at(1), b.source(), &cookie);
    let unknown = a.initiate(at(1));
    let outcome = b.handle(at(1), a.source(), &unknown);
    assert_eq!(outcome.dropped, Some(Dropped::Overload));
    b.knows_place = true;
    let calls: Vec<_> = (0..10).map(|_| a.initiate(at(1))).collect();
    let heard = calls.iter().filter(|call| {
        let outcome = b.handle(at(1), a.source(), call);
        outcome.established.is_some()
    });
    assert_eq!(heard.count(), 4, "it has a budget, too");
}

#[test]
fn a_cookie_is_good_for_one_address_and_port_only() {
    let [mut a, mut b] = pair();
    b.under_load = true;
    let first = a.initiate(at(0));
    let cookie = b.handle(at(0), a.source(), &first).reply.unwrap();
    a.handle(at(0), b.source(), &cookie);
    let second = a.initiate(at(1));
    for elsewhere in ["192.0.2.1:5301", "192.0.2.9:5300", "[2001:db8::1]:5300"] {
        let outcome = b.handle(at(1), elsewhere.parse().unwrap(), &second);
        assert_eq!(outcome.dropped, Some(Dropped::CookieDemanded));
    }
    let mapped = "[::ffff:192.0.2.1]:5300".parse().unwrap();
    let outcome = b.handle(at(1), mapped, &second);
    assert!(outcome.established.is_some(), "the same address");
}

/// What the trusted path showed of `a`'s calls before `b` restarted, oldest first.
fn recordings(number: u64) -> (Node, Node, Vec<Vec<u8>>) {
    let [mut a, mut b] = pair();
    let recorded: Vec<_> = (0..number).map(|n| a.initiate(ms(n))).collect();
    connect(ms(number), &mut a, &mut b);
    let [_, restarted] = pair_with(&Options {
        seed: 9,
        ..Options::default()
    });
    (a, restarted, recorded)
}

#[test]
fn recordings_do_not_keep_a_restarted_daemon_from_calling() {
    let (mut a, mut b, recorded) = recordings(600);
    let mut calls = 0;
    let mut connected_at = None;
    for (n, replayed) in recorded.iter().enumerate() {
        let now = at(100) + Duration::from_millis(50 * n as u64);
        // Somebody far away: what is answered does not reach `a`, and would say nothing to it.
        let reply = b.receive(now, spoofed(n as u32), replayed);
        if let Some(reply) = reply {
            let outcome = a.handle(now, b.source(), &reply);
            assert_eq!(outcome.dropped, Some(Dropped::UnknownIndex));
        }
        // As a node does that has no session.
        let mut messages = b.timeout(now);
        if b.sessions.state(now, b.peer) == PeerState::Down {
            messages.push(b.initiate(now));
        }
        for message in messages {
            calls += 1;
            // The answer takes a while, in which more recordings come.
            if let Some(next) = recorded.get(n + 1) {
                b.receive(now, spoofed(n as u32), next);
            }
            if let Some(reply) = a.receive(now, b.source(), &message)
                && let Some(data) = b.receive(now, a.source(), &reply)
            {
                a.receive(now, b.source(), &data);
            }
        }
        if connected_at.is_none() && b.current(now).is_some() && a.current(now) == b.current(now) {
            connected_at = Some(now);
        }
    }
    assert!(calls > 0);
    let connected_at = connected_at.expect("a session in spite of them");
    assert!(
        connected_at.since(at(100)) < Duration::from_secs(10),
        "{connected_at:?}"
    );
    assert!(b.sessions.indices.len() <= 4, "nor do they pile up");
}

#[test]
fn a_recording_after_a_real_call_is_refused() {
    let (mut a, mut b, recorded) = recordings(20);
    for replayed in &recorded[..10] {
        assert!(b.receive(at(100), spoofed(1), replayed).is_some());
    }
    connect(at(101), &mut a, &mut b);
    let session = b.current(at(101));
    b.dropped.clear();
    for replayed in &recorded {
        assert!(b.receive(at(102), spoofed(1), replayed).is_none());
    }
    assert!(b.dropped.iter().all(|reason| *reason == Dropped::Replayed));
    assert_eq!(b.current(at(102)), session);
}

#[test]
fn what_is_only_peeked_at_does_not_count_as_seen() {
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    let data = a.data(at(1)).unwrap();
    let claim = b.sessions.peek(&data).unwrap();
    assert_eq!((claim.peer.index(), claim.path.get()), (0, 0));
    assert!(b.sessions.open(at(1), &mut data.clone()).is_ok());
    let again = b.sessions.open(at(1), &mut data.clone()).err();
    assert_eq!(again, Some(OpenError::Replayed));
}
