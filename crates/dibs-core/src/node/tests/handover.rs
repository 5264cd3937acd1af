//! Live connections that come into a bump, and leave it.

use super::*;

/// Segment that a kernel was given.
fn segment(frame: &[u8]) -> packet::Segment<'_> {
    let Ok(Packet::Tcp(segment)) = packet::parse(&frame[virtio::LEN..]) else {
        panic!("a segment");
    };
    segment
}

#[test]
fn a_chain_waits_for_what_went_before_it_in_plain() {
    let mut pair = Pair::connected();
    // The far kernel, already steered, acknowledges what it has of the plain stream: up to 1000.
    pair.send_ack(1, 1000);
    pair.run(Duration::from_millis(10));
    let data = text(30_000);
    pair.send(0, 5000, &data, 0, 1);
    pair.run(Duration::from_millis(20));
    assert!(
        pair.stream(1).is_empty(),
        "4000 bytes are still on their way in plain"
    );
    pair.send_ack(1, 5000);
    pair.run(Duration::from_millis(5));
    pair.assert_stream(1, &data);
    // Where they never come, it goes on all the same.
    pair.send(0, 100_000, &data, 0, 2);
    pair.run(Duration::from_millis(30));
    pair.assert_stream(1, &data);
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.stream(1).len(), 2 * data.len());
}

/// Linux discards bytes with an acknowledgement from long ago.
#[test]
fn what_waits_acknowledges_no_less_than_what_passes_it() {
    let mut pair = Pair::connected();
    pair.send_ack(1, 1000);
    pair.run(Duration::from_millis(10));
    let data = text(30_000);
    pair.send(0, 5000, &data, 0, 1);
    pair.run(Duration::from_millis(5));
    pair.segment(0, 35_000, b"", 0, 2, 7);
    pair.run(Duration::from_millis(5));
    pair.send_ack(1, 5000);
    pair.run(Duration::from_millis(5));
    pair.assert_stream(1, &data);
    let acks = pair.injected[1].iter().map(|frame| {
        let segment = segment(frame);
        (segment.payload.is_empty(), segment.ack.raw())
    });
    let acks: Vec<_> = acks.collect();
    assert_eq!(acks[0], (true, 7), "the acknowledgement passes");
    assert!(acks[1..].iter().all(|ack| *ack == (false, 7)), "{acks:?}");
}

#[test]
fn a_connection_that_leaves_falls_silent_until_all_has_arrived() {
    const SCALE: u8 = 7;
    let mut pair = Pair::connected();
    let data = text(50_000);
    pair.send(0, 1, &data, 0, 1);
    pair.send_ack(1, 1);
    pair.run(Duration::from_millis(100));
    let left = Event::Drained {
        peer: 0,
        bump: BUMP,
        tuple: tuple(0),
    };
    let window_of = |frame: &Vec<u8>| {
        let segment = segment(frame);
        (segment.ack, segment.window)
    };

    pair.send(0, 50_001, &data, 0, 2);
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), SCALE);
    pair.outputs();
    assert!(!pair.events[0].contains(&left), "it has just spoken");
    let before = pair.injected[0].len();
    pair.send_ack(1, 50_001);
    pair.outputs();
    pair.send_ack(1, 100_001);
    pair.run(Duration::from_millis(1));
    let windows: Vec<_> = pair.injected[0][before..].iter().map(window_of).collect();
    assert_eq!(
        windows,
        [(SeqNumber::new(50_001), 391), (SeqNumber::new(100_001), 0)]
    );
    pair.run(Duration::from_millis(6));
    assert!(pair.events[0].contains(&left));
    let before = pair.injected[0].len();
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.outputs();
    let windows: Vec<_> = pair.injected[0][before..].iter().map(window_of).collect();
    assert_eq!(
        windows,
        [(SeqNumber::new(100_001), WINDOW)],
        "the window opens again"
    );

    // Asked for twice and ended once: whoever asked is told.
    for _ in 0..2 {
        let now = pair.now;
        pair.nodes[0].drain(now, BUMP, tuple(0), SCALE);
    }
    let told = |pair: &Pair| {
        pair.events[0]
            .iter()
            .filter(|event| **event == left)
            .count()
    };
    let before = told(&pair);
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.outputs();
    assert_eq!(told(&pair), before + 1);

    // Without an end it ends by itself.
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), SCALE);
    pair.send_ack(1, 100_001);
    pair.run(Duration::from_millis(20));
    assert_eq!(
        window_of(pair.injected[0].last().unwrap()),
        (SeqNumber::new(100_001), 0)
    );
    pair.run(Duration::from_millis(1000));
    assert_eq!(
        window_of(pair.injected[0].last().unwrap()),
        (SeqNumber::new(100_001), WINDOW)
    );
}

/// A kernel called silent a moment after its last byte sent one more burst by the bump: its window was still open.
#[test]
fn a_kernel_is_silent_once_its_window_has_closed() {
    let mut pair = Pair::connected();
    pair.send(0, 1, &text(50_000), 0, 1);
    pair.send_ack(1, 1);
    pair.run(Duration::from_millis(100));
    let silent = |pair: &Pair| {
        let told = |event: &&Event| matches!(event, Event::Drained { .. });
        pair.events[0].iter().filter(told).count()
    };
    let given = |pair: &Pair| {
        let last = segment(pair.injected[0].last().unwrap());
        (last.ack.raw(), last.window)
    };
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.run(Duration::from_millis(50));
    assert_eq!(silent(&pair), 0, "nothing is acknowledged");
    assert_eq!(given(&pair), (1, WINDOW));
    pair.send_ack(1, 50_001);
    pair.run(Duration::from_millis(5));
    assert_eq!((silent(&pair), given(&pair)), (1, (50_001, 0)));
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.outputs();
    assert_eq!(given(&pair), (50_001, WINDOW));
    // With nothing under way no acknowledgement is to come that could close it.
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.outputs();
    assert_eq!((silent(&pair), given(&pair)), (1, (50_001, 0)));
    pair.run(Duration::from_millis(5));
    assert_eq!(silent(&pair), 2);
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.outputs();
    assert_eq!(given(&pair), (50_001, WINDOW));
}

/// The last bytes by a bump that a connection left were acknowledged by the next one, so the first one never heard of that.
#[test]
fn a_bump_that_a_connection_left_for_another_one_is_not_waited_for() {
    let mut pair = Pair::connected();
    pair.send(0, 1, &text(50_000), 0, 1);
    pair.send_ack(1, 1);
    pair.run(Duration::from_millis(100));
    pair.bump = bump::SEAL;
    pair.send(0, 50_001, &text(50_000), 0, 2);
    pair.send_ack(1, 100_001);
    pair.run(Duration::from_millis(5));
    let drained = |pair: &Pair, on: BumpId| {
        let is = |event: &&Event| matches!(event, Event::Drained { bump, .. } if *bump == on);
        pair.events[0].iter().filter(is).count()
    };
    let drain = |pair: &mut Pair| {
        for bump in [BUMP, bump::SEAL] {
            let now = pair.now;
            pair.nodes[0].drain(now, bump, tuple(0), 7);
        }
        pair.run(Duration::from_millis(15));
        [BUMP, bump::SEAL].map(|bump| drained(pair, bump))
    };
    assert_eq!(drain(&mut pair), [0, 1], "it may still be under way");
    pair.run(Duration::from_millis(200));
    assert_eq!([BUMP, bump::SEAL].map(|bump| drained(&pair, bump)), [1, 1]);
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.nodes[0].end_drain(bump::SEAL, tuple(0));
    let before = pair.injected[0].len();
    assert_eq!(drain(&mut pair), [2, 2]);
    let mut given = pair.injected[0][before..]
        .iter()
        .map(|frame| segment(frame).ack.raw());
    assert!(given.all(|ack| ack == 100_001), "no old word");
}

/// A far end that has left for plain says something there with its window open, for this end has not closed that. What the kernel here
/// then sends by the bump is acknowledged in plain, where a router that has not seen it answers with a reset.
#[test]
fn a_kernel_that_gets_a_window_in_plain_is_not_carried_on() {
    let mut pair = Pair::connected();
    let data = text(50_000);
    pair.send(0, 1, &data, 0, 1);
    pair.send_ack(1, 50_001);
    pair.run(Duration::from_millis(100));
    pair.send_ack(1, 50_001);
    let broken = |pair: &Pair| pair.nodes[0].counters().get(Counter::SilenceBroken);
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.run(Duration::from_millis(10));
    let before = pair.stream(1).len();
    pair.send(0, 50_001, &data, 0, 2);
    pair.run(Duration::from_millis(20));
    assert_eq!((pair.stream(1).len(), broken(&pair)), (before, 1));
    // The far kernel waits for what that acknowledges.
    let bare = segment(pair.injected[1].last().unwrap());
    assert!(bare.payload.is_empty() && bare.has(flags::ACK));
    assert_eq!(bare.seq, SeqNumber::new(50_001));
    let stands = pair.nodes[0].conns()[0].stands.expect("it is known");
    assert_eq!(stands.0, SeqNumber::new(50_001), "nothing is under way");
    // It stays there after all, and its TCP sends again what is missing.
    pair.nodes[0].end_drain(BUMP, tuple(0));
    pair.send(0, 50_001, &data, 0, 3);
    pair.run(Duration::from_millis(20));
    assert_eq!(pair.stream(1).len(), before + data.len());
    // Another connection of the same ends has nothing to be silent for.
    pair.send_ack(1, 100_001);
    pair.run(Duration::from_millis(20));
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.run(Duration::from_millis(10));
    pair.segment(0, 500_000, b"", flags::SYN, 4, 0);
    pair.send(0, 500_001, &data, 0, 5);
    pair.run(Duration::from_millis(20));
    assert_eq!(broken(&pair), 1);
}

/// The window of a far end that waits opens after a while. What it sends then by the bump the kernel here, which has left for plain by
/// then, would acknowledge there.
#[test]
fn a_kernel_that_leaves_first_is_given_no_data() {
    let mut pair = Pair::connected();
    let data = text(50_000);
    pair.send(1, 1, &data, 0, 1);
    pair.send_ack(0, 50_001);
    pair.run(Duration::from_millis(100));
    let now = pair.now;
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.nodes[0].refuse(BUMP, tuple(0));
    let before = pair.stream(0).len();
    // Also once its own window has opened.
    for wait in [20, 2000] {
        pair.send(1, 50_001, &data, flags::FIN, 2);
        pair.run(Duration::from_millis(wait));
        assert_eq!(pair.stream(0).len(), before);
    }
    let last = segment(pair.injected[0].last().unwrap());
    assert!(!last.has(flags::FIN));
    assert!(pair.nodes[0].counters().get(Counter::SilenceBroken) > 0);
    // It stays there after all, or comes back, or its kernel goes on there by itself.
    for (part, goes_on) in (0..3).zip([
        |pair: &mut Pair| pair.nodes[0].end_drain(BUMP, tuple(0)),
        |pair: &mut Pair| pair.nodes[0].enter(pair.now, BUMP, tuple(0), None),
        |pair: &mut Pair| pair.send_ack(0, 50_001),
    ]) {
        pair.nodes[0].refuse(BUMP, tuple(0));
        goes_on(&mut pair);
        let seq = 50_001 + part * data.len() as u32;
        pair.send(1, seq, &data, 0, 3 + part);
        pair.run(Duration::from_millis(100));
        let all = before + (part as usize + 1) * data.len();
        assert_eq!(pair.stream(0).len(), all, "{part}");
    }
}

/// A kernel that has said nothing by the bump since it came from plain has no window that could be closed.
#[test]
fn a_kernel_that_leaves_first_is_given_no_data_after_its_first_word_either() {
    let mut pair = Pair::connected();
    let data = text(50_000);
    pair.send(1, 1, &data, 0, 1);
    pair.send_ack(0, 50_001);
    pair.run(Duration::from_millis(100));
    let now = pair.now;
    pair.nodes[0].enter(now, BUMP, tuple(0), None);
    pair.nodes[0].drain(now, BUMP, tuple(0), 7);
    pair.nodes[0].refuse(BUMP, tuple(0));
    pair.send_ack(0, 50_001);
    let before = pair.stream(0).len();
    pair.send(1, 50_001, &data, 0, 2);
    pair.run(Duration::from_millis(20));
    assert_eq!(pair.stream(0).len(), before);
    // Once it is to be silent no more it goes on there.
    pair.run(Duration::from_secs(2));
    pair.send_ack(0, 50_001);
    pair.send(1, 50_001, &data, 0, 3);
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.stream(0).len(), before + data.len());
}

#[test]
fn a_connection_goes_on_at_the_rate_that_it_came_with() {
    const BYTES: usize = 40_000;
    const EVERY: Duration = Duration::from_millis(2);
    let mut pair = Pair::far_apart(Duration::from_millis(50));
    let now = pair.now;
    pair.nodes[0].set_path(now, 1, false, 1500);
    pair.nodes[0].expect_rate(now, 0, inner(1), BYTES as u64 * 500);
    let data = text(BYTES);
    let mut seq = 1;
    for tick in 0..500 {
        pair.send(0, seq, &data, 0, tick);
        pair.run(EVERY);
        seq += BYTES as u32;
    }
    pair.run(Duration::from_millis(60));
    let counters = pair.nodes[0].counters();
    assert_eq!(counters.get(Counter::CodelDropped), 0, "it made a queue");
    assert_eq!(pair.stream(1).len(), 500 * BYTES);
}

/// A firewall on the ordinary route that adds to the numbers of one direction.
#[test]
fn numbers_that_something_in_plain_changes_are_told_at_both_ends() {
    const ADDED: u32 = 1 << 30;
    let renumbered = |pair: &Pair, host: usize| {
        let said = Event::Renumbered {
            bump: BUMP,
            tuple: tuple(host),
        };
        let seen = pair.nodes[host].conns();
        assert_eq!(seen[0].renumbered, pair.events[host].contains(&said));
        // A shadow of such numbers would be a byte that the far kernel takes for new.
        assert!(!seen[0].renumbered || seen[0].given.is_none());
        seen[0].renumbered
    };
    let mut pair = Pair::connected();
    let bases = [1, ADDED, ADDED.wrapping_neg()];
    for (base, expected) in bases.into_iter().zip([[false; 2], [true; 2], [true; 2]]) {
        // The far kernel stands behind `base + 1000`, the near one counts from 1001 on.
        pair.send_ack(1, base.wrapping_add(1000));
        pair.send(0, 1001, &text(1000), 0, 1);
        pair.run(Duration::from_millis(10));
        pair.send_ack(1, base.wrapping_add(1000));
        pair.send(0, 1001, &text(1000), 0, 2);
        pair.run(Duration::from_millis(100));
        assert_eq!([0, 1].map(|host| renumbered(&pair, host)), expected);
        for host in [0, 1] {
            let now = pair.now;
            let node = &mut pair.nodes[host];
            assert!(node.is_seen(BUMP, tuple(host)));
            node.enter(now, BUMP, tuple(host), None);
            assert!(!node.is_seen(BUMP, tuple(host)), "nothing is compared yet");
        }
    }
}

/// The handshake went in plain but for the end of it, so the kernel that was called says its answer again, by the bump.
#[test]
fn an_answer_that_is_repeated_by_a_bump_does_not_hide_that_numbers_are_changed() {
    for (added, bits) in [(0, 0), (1 << 22, 0), (1 << 22, flags::FIN)] {
        let mut pair = Pair::connected();
        for wait in [1000, 2000, 4000] {
            pair.segment(1, 6, b"", flags::SYN, 1, 1001 + added);
            pair.segment(0, 1001, &text(if bits == 0 { 1000 } else { 0 }), bits, 1, 7);
            pair.run(Duration::from_millis(10));
            pair.send_ack(1, 1001 + added);
            pair.run(Duration::from_millis(wait));
        }
        let renumbered = pair.nodes[1].conns()[0].renumbered;
        assert_eq!(renumbered, added > 0, "{bits}");
    }
}

/// Data of a connection that was here before this daemon started, or whose numbers fitted on another bump, may be long in coming: it is
/// lost again and again, and the kernel that waits for it gets on no more than one that takes it for strange.
#[test]
fn numbers_that_fitted_are_not_compared_again() {
    let hears_strange = |pair: &mut Pair| {
        pair.send_ack(1, 1 << 30);
        pair.send(0, 1001, &text(1000), 0, 1);
        pair.run(Duration::from_millis(10));
        pair.send_ack(1, 1 << 30);
        pair.run(Duration::from_millis(100));
        let conns = pair.nodes[1].conns();
        conns.iter().any(|conn| conn.renumbered)
    };
    let mut pair = Pair::connected();
    pair.nodes[1].resume(pair.now, BUMP, tuple(1), 0);
    assert!(!hears_strange(&mut pair));

    for (was, differ) in [(Some(BUMP), false), (Some(bump::SHARE), true), (None, true)] {
        let mut pair = Pair::connected();
        pair.send(0, 1001, &text(1000), 0, 1);
        pair.segment(1, 5, b"", 0, 1, 2001);
        pair.run(Duration::from_millis(10));
        for host in [0, 1] {
            pair.nodes[host].enter(pair.now, bump::SEAL, tuple(host), was);
        }
        pair.bump = bump::SEAL;
        assert_eq!(hears_strange(&mut pair), differ, "{was:?}");
    }
}

/// A kernel answers strange numbers twice a second at most, and may have answered others just before the connection came here.
#[test]
fn a_kernel_that_said_nothing_is_asked_once_the_peers_goes_on() {
    let mut pair = Pair::connected();
    let asked = |pair: &Pair| {
        let given = pair.received(1);
        given.iter().filter(|of| of.1.is_empty()).count()
    };
    for (wait, expected) in [(200, 0), (400, 0), (800, 2), (100, 4), (1600, 4)] {
        pair.send(0, 1001, &text(1000), 0, 1);
        pair.run(Duration::from_millis(10));
        assert_eq!(asked(&pair), expected, "before {wait} ms");
        pair.run(Duration::from_millis(wait - 10));
    }
    // What it says at last is strange, and both ends know it once the other one has answered.
    pair.send_ack(1, 1 << 30);
    pair.run(Duration::from_millis(10));
    pair.send(0, 1001, &text(1000), 0, 1);
    pair.run(Duration::from_millis(10));
    let said = |host: usize| pair.nodes[host].conns()[0].renumbered;
    assert_eq!([said(0), said(1)], [true; 2]);
}
