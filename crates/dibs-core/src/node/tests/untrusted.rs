//! Keys that are agreed by untrusted paths, while no trusted one answers, or where there is none.

use super::*;
use crate::session::{Config as SessionConfig, Hello, KeyOrigin, Sessions, Way};

const SECOND: Duration = Duration::from_secs(1);

/// How the two hosts of a pair agree on keys.
#[derive(Clone, Copy)]
struct Keys {
    handshake: Handshake,
    preshared: bool,
}

const ANY: Keys = Keys {
    handshake: Handshake::Any,
    preshared: false,
};
const CHAINED: Keys = Keys {
    handshake: Handshake::Chained,
    preshared: false,
};
const PRESHARED: Keys = Keys {
    handshake: Handshake::Chained,
    preshared: true,
};
const TRUSTED: Keys = Keys {
    handshake: Handshake::Trusted,
    preshared: true,
};

/// A host of such a pair, with a path that it trusts or without.
fn host(number: usize, seed: u8, keys: Keys, trusts: bool) -> Node {
    let mut config = config(number, Integrity::On);
    config.handshake = keys.handshake;
    config.paths[0].trusted = trusts;
    if !keys.preshared {
        config.peers[0].preshared = None;
    }
    Node::new(Time::ZERO, config, [seed; 32]).unwrap()
}

fn pair(keys: Keys) -> Pair {
    let mut pair = Pair::new();
    pair.bump = bump::SEAL;
    pair.nodes = [host(0, 1, keys, true), host(1, 2, keys, true)];
    pair
}

fn connected(keys: Keys) -> Pair {
    let mut pair = pair(keys);
    pair.run(3 * SECOND);
    pair.assert_open();
    pair
}

impl Pair {
    fn cut_trusted(&mut self) {
        self.filter = Box::new(|_, path, _| path == 1);
    }

    fn mend(&mut self) {
        self.filter = Box::new(|_, _, _| true);
    }

    /// Origin of the keys, at both ends.
    fn keys(&self) -> [Option<KeyOrigin>; 2] {
        [0, 1].map(|host| self.nodes[host].peers(self.now)[0].keys)
    }

    /// True if a segment and a message of the daemons pass both ways within a second.
    fn passes(&mut self, seq: u32) -> bool {
        self.injected = Default::default();
        self.events = Default::default();
        let now = self.now;
        for host in 0..2 {
            self.send(host, seq, b"anybody there?", 0, seq);
            let _ = self.nodes[host].send_control(now, 0, &seq.to_be_bytes(), None);
        }
        self.run(SECOND);
        let said = Event::Control {
            peer: 0,
            bytes: seq.to_be_bytes().to_vec(),
        };
        (0..2)
            .all(|host| self.stream(host) == b"anybody there?" && self.events[host].contains(&said))
    }

    fn told(&self, host: usize) -> bool {
        self.events[host].contains(&Event::Unsecured { peer: 0 })
    }
}

/// A stream on seal for half an hour: at no time a byte waits for a second.
#[test]
fn half_an_hour_without_the_trusted_path_is_no_pause() {
    let mut pair = connected(CHAINED);
    assert_eq!(pair.keys(), [Some(KeyOrigin::Trusted); 2]);
    pair.run(5 * SECOND);
    pair.cut_trusted();
    // The path is noticed to be away.
    pair.run(2 * SECOND);
    let mut sent = 0;
    for step in 0..1800 {
        pair.injected = Default::default();
        pair.send(0, 1 + sent, &[step as u8; 1000], 0, step);
        sent += 1000;
        pair.run(SECOND);
        pair.send_ack(1, 1 + sent);
        let came = pair.stream(1);
        assert_eq!(came, [step as u8; 1000], "in second {step}");
    }
    assert_eq!(pair.keys(), [Some(KeyOrigin::Chained); 2]);
    assert!(pair.passes(sent + 1));
    // Not one session ended.
    let down = Event::PeerDown { peer: 0 };
    assert!(!pair.events.iter().flatten().any(|event| *event == down));
    // Once it is back, the next keys are agreed by it.
    pair.mend();
    pair.run(30 * SECOND);
    assert_eq!(pair.keys(), [Some(KeyOrigin::Trusted); 2]);
    let sessions = |pair: &Pair| pair.nodes[0].counters().get(Counter::Sessions);
    let before = sessions(&pair);
    pair.run(60 * SECOND);
    assert_eq!(sessions(&pair), before, "once");
}

#[test]
fn only_trusted_paths_as_ever_if_the_user_says_so() {
    let mut pair = connected(TRUSTED);
    pair.cut_trusted();
    pair.run(200 * SECOND);
    assert_eq!(pair.keys(), [None, None]);
    pair.mend();
    pair.run(10 * SECOND);
    assert_eq!(pair.keys(), [Some(KeyOrigin::Trusted); 2]);
}

#[test]
fn both_may_start_while_the_trusted_path_is_away() {
    for (keys, expected) in [
        (ANY, Some(KeyOrigin::Untrusted)),
        (PRESHARED, Some(KeyOrigin::Preshared)),
        (CHAINED, None),
        (TRUSTED, None),
    ] {
        let mut pair = pair(keys);
        pair.cut_trusted();
        pair.run(4 * SECOND);
        assert_eq!(pair.keys(), [None, None], "the trusted path has its time");
        pair.run(6 * SECOND);
        assert_eq!(pair.keys(), [expected; 2]);
        // Only who has an endpoint calls; the other end does not know where to.
        let waits = keys.handshake == Handshake::Chained && expected.is_none();
        assert_eq!(pair.told(0), waits);
        assert_eq!(pair.passes(1), expected.is_some());
        pair.mend();
        pair.run(30 * SECOND);
        assert_eq!(pair.keys(), [Some(KeyOrigin::Trusted); 2]);
        assert!(pair.passes(1001));
    }
}

#[test]
fn who_restarts_meanwhile_comes_back_as_configured() {
    for restarts in 0..2 {
        for (keys, expected) in [
            (ANY, Some(KeyOrigin::Untrusted)),
            (PRESHARED, Some(KeyOrigin::Preshared)),
            (CHAINED, None),
        ] {
            let mut pair = connected(keys);
            pair.cut_trusted();
            pair.run(10 * SECOND);
            pair.nodes[restarts] = host(restarts, 9, keys, true);
            pair.events = Default::default();
            // Whoever has no endpoint waits until the other end calls, which is when it hears nothing.
            pair.run(10 * SECOND);
            assert_eq!(pair.keys()[restarts], expected, "host {restarts}");
            match expected {
                Some(_) => assert!(pair.passes(1)),
                None => assert!(pair.told(0) || pair.told(1)),
            }
            pair.mend();
            pair.run(30 * SECOND);
            assert_eq!(pair.keys(), [Some(KeyOrigin::Trusted); 2]);
            assert!(pair.passes(1001));
        }
    }
}

#[test]
fn without_any_trusted_path_seal_works_at_once() {
    let mut pair = pair(ANY);
    pair.nodes = [host(0, 1, ANY, false), host(1, 2, ANY, false)];
    pair.run(2 * SECOND);
    assert_eq!(pair.keys(), [Some(KeyOrigin::Untrusted); 2]);
    for number in 0..300 {
        assert!(pair.passes(1 + 100 * number), "at {:?}", pair.now);
    }
    assert!(pair.nodes[0].paths().iter().all(|path| !path.trusted));
    // What needs a trusted path waits for one.
    pair.bump = bump::SCRAMBLE;
    pair.injected = Default::default();
    pair.send(0, 1, &text(1000), 0, 1);
    pair.run(5 * SECOND);
    assert_eq!(pair.stream(1), b"");
}

/// The path that one end calls untrusted is so, whatever the other calls it.
#[test]
fn the_lower_label_counts_for_keys_too() {
    let mut pair = pair(CHAINED);
    pair.nodes[1] = host(1, 2, CHAINED, false);
    pair.run(20 * SECOND);
    assert_eq!(pair.keys(), [None, None]);
    assert!(pair.nodes[1].counters().get(Counter::HandshakeUnsecured) > 0);
    assert!(pair.told(1));
}

/// A stranger who floods one path with first messages, each of which takes Diffie-Hellman to read.
#[test]
fn a_flood_by_one_path_leaves_the_other_its_budget() {
    for flooded in 0..2 {
        let mut pair = pair(ANY);
        if flooded == 0 {
            // Calls go by the untrusted path.
            pair.cut_trusted();
        }
        let mut rng = SeededRandom::new([8; 32]);
        let config = SessionConfig {
            private: Box::new(StaticSecret::from([77; 32])),
            suite: Suite::Aes256Gcm,
            integrity: Integrity::On,
            handshake: Handshake::Any,
        };
        let mut stranger = Sessions::new(config, Time::ZERO, &mut rng);
        let public = *pair.nodes[1].sessions.public_key();
        let to = stranger.add_peer(public, None).unwrap();
        let hello = Hello::default();
        let call = stranger.initiate(Time::ZERO, SECOND, to, Way::new(false), &hello, &mut rng);
        for tick in 0..8000u32 {
            for burst in 0..4 {
                let port = 1024 + (tick % 30_000) as u16;
                let from = SocketAddr::from(([10, 0, 1 + flooded as u8, 100 + burst], port));
                pair.nodes[1].handle_datagram(pair.now, flooded, from, &mut call.clone());
            }
            pair.run(Duration::from_millis(1));
        }
        let count = |counter| pair.nodes[1].counters().get(counter);
        assert!(count(Counter::HandshakeUnknownPeer) <= 32 + 50 * 8 + 1);
        assert!(pair.keys().iter().all(Option::is_some), "path {flooded}");
        let cookies = count(Counter::HandshakeCookie) + count(Counter::HandshakeOverload);
        let unread = 4 * 8000 - count(Counter::HandshakeUnknownPeer);
        assert_eq!(cookies, unread, "the peer itself was read at once");
    }
}

/// Messages of the daemons keep to the trusted path as long as that carries anything, and go by others only then.
#[test]
fn messages_go_by_untrusted_paths_only_while_there_is_no_other() {
    let mut pair = connected(ANY);
    let by_untrusted = |pair: &mut Pair| {
        let before = pair.sent[0][1];
        for _ in 0..10 {
            pair.nodes[0]
                .send_control(pair.now, 0, &[7; 1000], None)
                .unwrap();
        }
        pair.run(SECOND);
        pair.sent[0][1] - before
    };
    assert!(by_untrusted(&mut pair) < 1000);
    pair.cut_trusted();
    pair.run(2 * SECOND);
    assert!(by_untrusted(&mut pair) > 10_000);
    pair.mend();
    pair.run(10 * SECOND);
    assert!(by_untrusted(&mut pair) < 1000);
}
