//! First handshake messages of strangers, from addresses that are not theirs.

use super::*;
use crate::session::{Config as SessionConfig, Hello, Sessions, Way};

fn call(to: &Node) -> Vec<u8> {
    let mut rng = SeededRandom::new([8; 32]);
    let config = SessionConfig {
        private: Box::new(StaticSecret::from([77; 32])),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: Handshake::Trusted,
    };
    let mut stranger = Sessions::new(config, Time::ZERO, &mut rng);
    let id = stranger.add_peer(*to.sessions.public_key(), None).unwrap();
    let wall = Duration::from_secs(1);
    let hello = Hello::default();
    stranger.initiate(Time::ZERO, wall, id, Way::new(true), &hello, &mut rng)
}

#[test]
fn few_cookies_go_where_no_peer_is_known_to_be_and_data_goes_on() {
    let mut pair = Pair::connected();
    let call = call(&pair.nodes[1]);
    let data = text(50_000);
    let (mut strangers, mut known) = (0, 0);
    for tick in 0..1000u32 {
        for burst in 0..10 {
            let from = SocketAddr::from(([10, 0, 1, 100 + burst], 1024 + tick as u16));
            pair.nodes[1].handle_datagram(pair.now, 0, from, &mut call.clone());
        }
        // Somebody uses the peer's address, too.
        let from = addr(0, 0);
        pair.nodes[1].handle_datagram(pair.now, 0, from, &mut call.clone());
        while let Some((_, to, reply)) = pair.nodes[1].outbox.pop_front() {
            assert_eq!(reply[0], 3, "a cookie");
            assert!(reply.len() < call.len());
            match to == from {
                true => known += 1,
                false => strangers += 1,
            }
        }
        if tick % 100 == 0 {
            pair.send(0, 1 + tick * 500, &data, 0, tick);
        }
        pair.run(Duration::from_millis(1));
    }
    assert!((16..=16 + 21).contains(&strangers), "{strangers} cookies");
    assert!(known > 900, "{known} cookies");
    let count = |c| pair.nodes[1].counters().get(c);
    assert!(count(Counter::HandshakeUnknownPeer) <= 32 + 51);
    assert!(count(Counter::HandshakeOverload) > 9000);
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &text(50_000).repeat(10));
}
