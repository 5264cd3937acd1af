//! The secret that each handshake leaves for the next one: it stands loss, delay and restarts, and what it is good for.

use super::*;
use crate::session::chain::ChainSecret;
use crate::session::keys::HandshakeKeys;
use crate::session::noise::Noise;

fn with(handshake: [Handshake; 2], psk: Option<u8>) -> [Node; 2] {
    pair_with(&Options {
        handshake,
        psk: [psk; 2],
        ..Options::default()
    })
}

/// Two nodes with `handshake = "chained"` and a session by a trusted path, whose trusted path is gone now.
fn cut_off() -> [Node; 2] {
    let mut nodes = with([Handshake::Chained; 2], None);
    let [a, b] = &mut nodes;
    connect(at(0), a, b);
    talk(at(0), a, b);
    nodes.iter_mut().for_each(|node| node.trusted = false);
    nodes
}

/// A datagram each way.
fn talk(now: Time, a: &mut Node, b: &mut Node) {
    for _ in 0..2 {
        let data = a.data(now).unwrap();
        b.receive(now, a.source(), &data);
        let data = b.data(now).unwrap();
        a.receive(now, b.source(), &data);
    }
}

fn origins(now: Time, a: &Node, b: &Node) -> [Option<KeyOrigin>; 2] {
    [a, b].map(|node| node.sessions.origin(now, node.peer))
}

fn chain_of(node: &Node) -> &crate::session::chain::Chain {
    &node.sessions.peers[node.peer.index()].chain
}

/// How many secrets both hold.
fn common(a: &Node, b: &Node) -> usize {
    let (ours, theirs) = (chain_of(a).ids(), chain_of(b).ids());
    ours.iter().filter(|id| theirs.contains(id)).count()
}

fn both(origin: KeyOrigin) -> [Option<KeyOrigin>; 2] {
    [Some(origin); 2]
}

/// The one of message 1 and message 2, that says which secret is in it.
fn used(message_2: &[u8]) -> u8 {
    message_2[1]
}

#[test]
fn what_keys_rest_on_is_the_same_at_both_ends() {
    use Handshake::{Any, Chained};
    for (psk, first) in [
        (None, KeyOrigin::Untrusted),
        (Some(7), KeyOrigin::Preshared),
    ] {
        let [mut a, mut b] = with([Any; 2], psk);
        (a.trusted, b.trusted) = (false, false);
        connect(at(0), &mut a, &mut b);
        assert_eq!(origins(at(0), &a, &b), both(first));
        // A secret that anybody may have is none.
        connect(at(1), &mut b, &mut a);
        let second = match psk {
            None => KeyOrigin::Untrusted,
            Some(_) => KeyOrigin::Chained,
        };
        assert_eq!(origins(at(1), &a, &b), both(second));
        // The lower label counts, and both ends see it.
        a.trusted = true;
        connect(at(2), &mut a, &mut b);
        assert_eq!(origins(at(2), &a, &b), both(second));
        connect(at(3), &mut b, &mut a);
        assert_eq!(origins(at(3), &a, &b), both(second));
        b.trusted = true;
        connect(at(4), &mut a, &mut b);
        assert_eq!(origins(at(4), &a, &b), both(KeyOrigin::Trusted));
        (a.trusted, b.trusted) = (false, false);
        connect(at(5), &mut a, &mut b);
        assert_eq!(origins(at(5), &a, &b), both(KeyOrigin::Chained));
    }
    let [mut a, mut b] = cut_off();
    for minute in 1..30 {
        connect(at(60 * minute), &mut a, &mut b);
        assert_eq!(origins(at(60 * minute), &a, &b), both(KeyOrigin::Chained));
        std::mem::swap(&mut a, &mut b);
    }
    assert!(chain_of(&a).ids().len() <= 2, "old secrets go");
    let [mut a, mut b] = with([Chained, Chained], Some(7));
    (a.trusted, b.trusted) = (false, false);
    connect(at(0), &mut a, &mut b);
    assert_eq!(origins(at(0), &a, &b), both(KeyOrigin::Preshared));
}

#[test]
fn nothing_in_common_is_refused_by_either_end() {
    use Handshake::{Any, Chained, Trusted};
    for (modes, reason) in [
        ([Any, Chained], Dropped::Unsecured),
        ([Any, Trusted], Dropped::Untrusted),
    ] {
        let [mut a, mut b] = with(modes, None);
        // One end calling it trusted does not make it so.
        (a.trusted, b.trusted) = (false, reason == Dropped::Untrusted);
        let first = a.initiate(at(0));
        let refused = b.handle(at(0), a.source(), &first);
        assert_eq!(refused.dropped, Some(reason));
        assert!(refused.reply.is_none() && refused.established.is_none());
        let told = (reason == Dropped::Unsecured).then_some(b.peer);
        assert_eq!(refused.unsecured, told);
        let again = a.initiate(at(1));
        assert_eq!(
            b.handle(at(1), a.source(), &again).unsecured,
            None,
            "told a moment ago"
        );
        let later = a.initiate(at(100));
        assert_eq!(b.handle(at(100), a.source(), &later).unsecured, told);
    }
    // The answer says that nothing is in it.
    let [mut a, mut b] = with([Chained, Any], None);
    (a.trusted, b.trusted) = (false, false);
    let first = a.initiate(at(0));
    let second = b.receive(at(0), a.source(), &first).unwrap();
    let refused = a.handle(at(0), b.source(), &second);
    assert_eq!(
        (refused.dropped, refused.unsecured),
        (Some(Dropped::Unsecured), Some(a.peer))
    );
    assert!(a.current(at(0)).is_none() && b.current(at(0)).is_none());
    let again = a.handle(at(0), b.source(), &second);
    assert_eq!(again.dropped, Some(Dropped::UnknownIndex));
    // The call goes on, and succeeds by a trusted path.
    (a.trusted, b.trusted) = (true, true);
    let due = a.sessions.poll_timeout().unwrap();
    let first = a.timeout(due).remove(0);
    let second = b.receive(due, a.source(), &first).unwrap();
    let data = a.receive(due, b.source(), &second).unwrap();
    b.receive(due, a.source(), &data);
    assert_eq!(origins(due, &a, &b), both(KeyOrigin::Trusted));
}

#[test]
fn a_lost_message_2_or_confirmation_leaves_a_secret_in_common() {
    // Message 2 is lost, again and again.
    let [mut a, mut b] = cut_off();
    for second in 1..20 {
        let first = a.initiate(at(second));
        let reply = b.receive(at(second), a.source(), &first).unwrap();
        assert_eq!(used(&reply), 1);
    }
    assert!(chain_of(&b).ids().len() <= 3);
    connect(at(30), &mut a, &mut b);
    assert_eq!(origins(at(30), &a, &b), both(KeyOrigin::Chained));

    // It comes, and what the initiator sends by the session is lost.
    let [mut a, mut b] = cut_off();
    for second in 1..20 {
        let first = a.initiate(at(second));
        let reply = b.receive(at(second), a.source(), &first).unwrap();
        assert_eq!(used(&reply), 1, "the newest that it named");
        assert!(a.receive(at(second), b.source(), &reply).is_some());
        assert!(chain_of(&a).ids().len() <= 3 && chain_of(&b).ids().len() <= 3);
    }
    connect(at(30), &mut a, &mut b);
    assert_eq!(origins(at(30), &a, &b), both(KeyOrigin::Chained));
    // The same, and then the other end calls.
    let first = a.initiate(at(40));
    let reply = b.receive(at(40), a.source(), &first).unwrap();
    assert!(a.receive(at(40), b.source(), &reply).is_some());
    connect(at(50), &mut b, &mut a);
    assert_eq!(origins(at(50), &a, &b), both(KeyOrigin::Chained));
}

/// Somebody keeps calls back and brings them later, as far as they are not too old.
#[test]
fn calls_that_come_late_push_no_proved_secret_out() {
    let [mut a, mut b] = cut_off();
    let kept: Vec<_> = (0..20)
        .map(|n| a.initiate(at(1) + Duration::from_millis(n)))
        .collect();
    for call in &kept {
        assert!(b.receive(at(2), a.source(), call).is_some());
        assert!(common(&a, &b) > 0);
        assert!(chain_of(&b).ids().len() <= 4);
    }
    for call in &kept {
        assert!(b.receive(at(3), a.source(), call).is_none(), "seen");
    }
    connect(at(10), &mut b, &mut a);
    assert_eq!(origins(at(10), &a, &b), both(KeyOrigin::Chained));
}

#[test]
fn a_restart_of_either_end_takes_a_trusted_path_and_then_goes_on() {
    for restarted in 0..2 {
        let mut nodes = cut_off();
        let recorded = nodes[1 - restarted].initiate(at(1));
        let fresh = pair_with(&Options {
            handshake: [Handshake::Chained; 2],
            seed: 9,
            ..Options::default()
        });
        let fresh = fresh.into_iter().nth(restarted).unwrap();
        nodes[restarted] = Node {
            trusted: false,
            ..fresh
        };
        for (from, to) in [(0, 1), (1, 0)] {
            let (call, source) = (nodes[from].initiate(at(2)), nodes[from].source());
            let outcome = nodes[to].handle(at(2), source, &call);
            assert_eq!(outcome.dropped, Some(Dropped::Unsecured));
        }
        let elsewhere = SocketAddr::from(([192, 0, 2, 9], 1));
        nodes[restarted].receive(at(3), elsewhere, &recorded);
        let [a, b] = &mut nodes;
        (a.trusted, b.trusted) = (true, true);
        connect(at(10), a, b);
        assert_eq!(origins(at(10), a, b), both(KeyOrigin::Trusted));
        talk(at(10), a, b);
        (a.trusted, b.trusted) = (false, false);
        connect(at(20), b, a);
        connect(at(30), a, b);
        assert_eq!(origins(at(30), a, b), both(KeyOrigin::Chained));
        assert!(chain_of(a).ids().len() <= 2 && chain_of(b).ids().len() <= 2);
    }
}

#[test]
fn an_answer_that_names_another_secret_costs_a_retry() {
    let [mut a, mut b] = cut_off();
    // Two secrets to name.
    let first = a.initiate(at(1));
    let second = b.receive(at(1), a.source(), &first).unwrap();
    a.receive(at(1), b.source(), &second);
    let first = a.initiate(at(2));
    let second = b.receive(at(2), a.source(), &first).unwrap();
    assert_eq!(used(&second), 1);
    for (says, reason) in [
        (0, Dropped::Unauthentic),
        (2, Dropped::Unauthentic),
        (3, Dropped::Malformed),
        (4, Dropped::Malformed),
    ] {
        let mut forged = second.clone();
        forged[1] = says;
        let forged = with_mac1(forged, &a);
        assert_eq!(
            a.handle(at(2), b.source(), &forged).dropped,
            Some(reason),
            "{says}"
        );
    }
    let data = a.receive(at(2), b.source(), &second).expect("the true one");
    b.receive(at(2), a.source(), &data);
    assert_eq!(origins(at(2), &a, &b), both(KeyOrigin::Chained));
    assert_eq!(a.current(at(2)), b.current(at(2)));
}

proptest! {
    /// Whatever is lost, delayed or crossed, there is a secret that both hold, and few of them.
    #[test]
    fn there_is_always_a_secret_in_common(
        seed in any::<u8>(),
        steps in prop::collection::vec((0..2_usize, 0..6_u8, any::<prop::sample::Index>()), 1..120),
    ) {
        let mut nodes = with([Handshake::Chained; 2], None);
        let [a, b] = &mut nodes;
        a.rng = SeededRandom::new([seed; 32]);
        connect(at(0), a, b);
        nodes.iter_mut().for_each(|node| node.trusted = false);
        // What was sent and has not come, for whom.
        let mut wire: Vec<(usize, Vec<u8>)> = Vec::new();
        for (n, (who, what, which)) in steps.into_iter().enumerate() {
            // Far apart, so that no end's call stands for long.
            let now = at(3 * (n as u64 + 1));
            let source = nodes[1 - who].source();
            match what {
                0 | 1 => {
                    let call = nodes[who].initiate(now);
                    wire.push((1 - who, call));
                }
                2 => wire.extend(nodes[who].data(now).map(|data| (1 - who, data))),
                _ => {
                    let for_it: Vec<_> = (0..wire.len()).filter(|at| wire[*at].0 == who).collect();
                    if for_it.is_empty() {
                        continue;
                    }
                    let at = for_it[which.index(for_it.len())];
                    let datagram = match what {
                        5 => wire[at].1.clone(),
                        _ => wire.remove(at).1,
                    };
                    let reply = nodes[who].receive(now, source, &datagram);
                    wire.extend(reply.map(|reply| (1 - who, reply)));
                }
            }
            let [a, b] = &nodes;
            prop_assert!(common(a, b) > 0, "{:?} and {:?}", chain_of(a).ids(), chain_of(b).ids());
            prop_assert!(chain_of(a).ids().len() <= 4 && chain_of(b).ids().len() <= 4);
        }
        let end = at(10_000);
        let [a, b] = &mut nodes;
        connect(end, a, b);
        prop_assert_eq!(origins(end, a, b), both(KeyOrigin::Chained));
    }
}

/// An attacker who recorded a handshake of the untrusted path and has all private keys of it, static and ephemeral: with
/// the secret that was in it, it derives what it leaves; without, it cannot even read message 2. What is left of one
/// does not tell what was in it.
#[test]
fn all_private_keys_of_a_chained_handshake_do_not_tell_its_session() {
    let keys = [[1; 32], [2; 32]].map(StaticSecret::from);
    let public = [PublicKey::from(&keys[0]), PublicKey::from(&keys[1])];
    let zeros = Secret::new([0; 32]);
    let left_by_the_trusted_one = ChainSecret::new(
        &HandshakeKeys {
            hash: [7; 32],
            initiator: Secret::new([8; 32]),
            responder: Secret::new([9; 32]),
        },
        true,
    );
    let psk = left_by_the_trusted_one.mixed_with(&zeros);
    let ephemeral = |end: u8| Secret::new([3 + end; 32]);
    let initiator = || Noise::initiator(&keys[0], &public[1], b"dibs", ephemeral(0));

    let mut caller = initiator();
    let mut called = Noise::responder(&keys[1], b"dibs", ephemeral(1));
    let mut message_1 = vec![0; 96];
    caller.write(b"", &mut message_1);
    called.read(&message_1).unwrap();
    called.set_psk(&psk);
    let mut message_2 = vec![0; 48];
    called.write(b"", &mut message_2);
    caller.set_psk(&psk);
    caller.read(&message_2).unwrap();
    let (ours, theirs) = (caller.finish(), called.finish());
    assert_eq!(ours.hash, theirs.hash);

    // The same computed again from the recording.
    let replayed = |psk: &Secret| {
        let mut again = initiator();
        let mut first = vec![0; 96];
        again.write(b"", &mut first);
        assert_eq!(first, message_1, "every private key is right");
        again.set_psk(psk);
        again.read(&message_2).map(|_| again.finish())
    };
    let known = replayed(&psk).expect("with the secret it is all there");
    assert_eq!(known.initiator.as_bytes(), ours.initiator.as_bytes());
    assert!(
        replayed(&zeros).is_err(),
        "without it message 2 does not open"
    );
    // Nor does what the handshake itself leaves for the next one.
    let left = ChainSecret::new(&ours, true);
    assert!(replayed(&left.mixed_with(&zeros)).is_err());
}
