//! Deadlines: which there are, and whose.

use std::collections::BTreeMap;

use super::*;

/// Reasons for which host 0 was called while a pair ran for so many seconds.
fn reasons(pair: &mut Pair, seconds: u64) -> BTreeMap<Reason, u32> {
    let mut seen = BTreeMap::new();
    let end = pair.now + Duration::from_secs(seconds);
    while pair.now < end {
        let due = pair.nodes[0].poll_timeout().expect("a peer has deadlines");
        *seen.entry(due.reason).or_default() += 1;
        let span = due.at.since(pair.now).max(Duration::from_millis(1));
        pair.run(span.min(end.since(pair.now)));
    }
    seen
}

#[test]
fn an_idle_node_waits_for_its_paths_and_sweeps_and_for_no_other_reason_spins() {
    let mut pair = Pair::connected();
    pair.run(Duration::from_secs(60));
    let seen = reasons(&mut pair, 60);
    for reason in [Reason::Path, Reason::Receiver] {
        assert!(seen.contains_key(&reason), "{seen:?}");
    }
    let rare = |reason| seen.get(&reason).copied().unwrap_or(0) <= 2;
    let others = [
        Reason::Pacer,
        Reason::Handover,
        Reason::Dropped,
        Reason::Message,
    ];
    assert!(others.into_iter().all(rare), "{seen:?}");
    assert!(seen.values().sum::<u32>() < 200, "{seen:?}");
}

#[test]
fn a_node_without_answer_waits_to_repeat_its_handshake() {
    let mut pair = Pair::connected();
    pair.filter = Box::new(|_, _, _| false);
    let seen = reasons(&mut pair, 600);
    assert!(
        seen.contains_key(&Reason::Path),
        "it asks the paths first: {seen:?}"
    );
    let calls = seen.get(&Reason::Handshake).copied().unwrap_or(0);
    assert!(calls > 5, "{seen:?}");
}

#[test]
fn what_a_pacer_holds_back_waits_for_it() {
    let mut pair = Pair::by_one_path(DELAY);
    pair.bump = bump::SEAL;
    let limit = Usage {
        rate: core::num::NonZeroU64::new(100_000),
        ..Usage::default()
    };
    pair.nodes[0].set_usage(pair.now, 0, limit);
    for at in 0..40 {
        pair.send(0, 1 + at * 14_000, &text(14_000), 0, at);
    }
    assert!(reasons(&mut pair, 1).contains_key(&Reason::Pacer));
}
