//! New keys by volume and by time, at once, over a network that loses and reorders.

use super::*;

fn link(seed: u8, loss: u64, delay: u64, limits: KeyLimits) -> Link {
    let mut link = Link::new(seed, loss, Duration::from_millis(delay));
    link.nodes = pair_with(&Options {
        seed,
        limits,
        ..Options::default()
    });
    link
}

#[test]
fn volume_rekeys_long_before_time_does() {
    let limits = KeyLimits {
        per_phase: 50,
        phases: 8,
        previous_kept: 20,
    };
    let mut link = link(3, 0, 20, limits);
    link.initiate(0);
    link.run_until(at(1));
    let mut seen = std::collections::BTreeSet::new();
    for tick in 100..3000 {
        link.chat();
        link.run_until(ms(tick * 10));
        seen.extend(link.currents());
        assert!(link.currents().iter().all(Option::is_some), "at {tick}");
    }
    // 200 datagrams each, 100 a second.
    assert!((13..=16).contains(&seen.len()), "{}", seen.len());
    for node in &link.nodes {
        assert!(node.not_opened.is_empty(), "{:?}", node.not_opened);
        assert!(node.sessions.indices.len() <= 5);
    }
}

#[test]
fn without_a_new_session_sending_stops_at_the_limit_and_says_so_once() {
    let [mut a, mut b] = short_lived();
    // One datagram confirmed the session.
    for number in 1..16 {
        let datagram = a.data(at(1)).expect("within the limit");
        b.receive(at(1), a.source(), &datagram);
        assert_eq!(a.timeout(at(1)).len(), usize::from(number == 8));
        assert!(!a.sessions.poll_exhausted(a.peer));
    }
    assert!(b.not_opened.is_empty());
    let session = a.sessions.sending(at(1), a.peer).unwrap();
    let mut buf = [0; OVERHEAD];
    let refused = session.seal(&mut buf, PathId::new(0), 1000, 0, false);
    assert_eq!(refused, Err(crate::session::SealError::Exhausted));
    assert!(a.current(at(1)).is_none());
    assert!(a.sessions.poll_exhausted(a.peer));
    assert!(!a.sessions.poll_exhausted(a.peer));
    assert_eq!(a.sessions.state(at(1), a.peer), PeerState::Connecting);

    let data = b.data(at(1)).unwrap();
    a.receive(at(1), b.source(), &data);
    assert!(a.not_opened.is_empty(), "what comes is still opened");
    connect(at(2), &mut a, &mut b);
    assert!(a.data(at(2)).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Both ends have sent half of what a session may when the first one's age is reached, so that
    /// calls for either reason cross, and any message of theirs is lost or late. Neither end is
    /// ever without a session, and no datagram meets keys that are gone.
    #[test]
    fn volume_and_time_at_once_stand_loss_and_reordering(
        seed in any::<u8>(),
        loss in 0..35u64,
        delay in 1..700u64,
        phases in prop_oneof![Just(34u64), Just(36), Just(38)],
    ) {
        // Ten datagrams a second: half of the phases are over after 107 to 120 s.
        let limits = KeyLimits { per_phase: 64, phases, previous_kept: 32 };
        let mut link = link(seed, loss, delay, limits);
        link.initiate(0);
        let mut connected = false;
        let mut sessions = std::collections::BTreeSet::new();
        for tick in 1..4000 {
            link.chat();
            link.run_until(ms(100 * tick));
            let currents = link.currents();
            connected |= currents.iter().all(Option::is_some);
            prop_assert!(!connected || currents.iter().all(Option::is_some), "at {tick}");
            sessions.extend(currents);
        }
        prop_assert!(sessions.len() >= 4, "{}", sessions.len());
        for node in &mut link.nodes {
            prop_assert!(node.not_opened.is_empty(), "{:?}", node.not_opened);
            prop_assert!(!node.sessions.poll_exhausted(node.peer));
            prop_assert!(node.sessions.indices.len() <= 5);
        }
    }
}
