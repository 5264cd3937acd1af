//! Acknowledgements of the kernels.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;

/// What the kernel of host 0 is given after that of host 1 said all this at once.
fn heard(acks: &[u32]) -> Vec<u32> {
    let mut pair = Pair::connected();
    pair.send(0, 1, &text(30_000), 0, 1);
    pair.send_ack(1, 1);
    pair.run(Duration::from_millis(20));
    let before = pair.injected[0].len();
    acks.iter().for_each(|ack| pair.send_ack(1, *ack));
    pair.run(Duration::from_millis(20));
    let acked = |frame: &Vec<u8>| match packet::parse(&frame[virtio::LEN..]) {
        Ok(Packet::Tcp(segment)) => segment.ack.raw(),
        other => panic!("not a segment: {other:?}"),
    };
    pair.injected[0][before..].iter().map(acked).collect()
}

#[test]
fn what_a_later_one_says_too_is_not_sent() {
    assert_eq!(heard(&[1401, 2801, 30_001]), [30_001]);
    assert_eq!(heard(&[u32::MAX - 5, 2801]), [2801], "over the wrap");
}

#[test]
fn repetitions_are_all_sent() {
    assert_eq!(
        heard(&[1401, 1401, 1401, 1401]),
        [1401, 1401, 1401, 1401],
        "TCP counts them"
    );
    assert_eq!(heard(&[2801, 1401]), [2801, 1401]);
}

/// Nobody would hear that they are lost, and so that the path takes less than it did.
#[test]
fn many_at_once_go_in_datagrams_that_any_path_takes() {
    let mut pair = Pair::connected();
    pair.send(0, 1, &text(30_000), 0, 1);
    pair.send_ack(1, 1);
    pair.run(Duration::from_secs(3));
    let (before, longest) = (pair.injected[0].len(), Rc::new(RefCell::new(0)));
    let tap = longest.clone();
    pair.filter = Box::new(move |host, _, bytes| {
        if host == 1 {
            let mut longest = tap.borrow_mut();
            *longest = bytes.len().max(*longest);
        }
        true
    });
    (0..100).for_each(|_| pair.send_ack(1, 30_001));
    pair.run(Duration::from_millis(50));
    assert_eq!(pair.injected[0].len() - before, 100);
    let longest = *longest.borrow();
    assert!((512..=1200).contains(&longest), "{longest}");
}

/// Datagrams on the wire for 20 questions of 64 bytes and their answers, on this bump.
fn asked_and_answered(bump: BumpId, think: Duration) -> usize {
    let mut pair = Pair::by_one_path(DELAY);
    pair.bump = bump;
    let seen = Rc::new(RefCell::new(0));
    let tap = seen.clone();
    let text = text(64);
    for round in 0..25 {
        if round == 5 {
            let tap = tap.clone();
            pair.filter = Box::new(move |_, path, _| {
                *tap.borrow_mut() += usize::from(path == 0);
                true
            });
        }
        for host in [0, 1] {
            pair.send(host, 1 + 64 * round, &text, flags::PSH, round);
            pair.run(DELAY + think);
        }
    }
    pair.assert_stream(0, &text.repeat(25));
    pair.assert_stream(1, &text.repeat(25));
    *seen.borrow()
}

#[test]
fn an_answer_takes_the_paths_acknowledgement_along() {
    for bump in [bump::SCRAMBLE, bump::SEAL] {
        let at_once = asked_and_answered(bump, Duration::ZERO);
        assert_eq!(at_once, 40, "bump {bump}");
        let late = asked_and_answered(bump, Duration::from_millis(5));
        assert_eq!(
            late, 80,
            "bump {bump}: nobody waits for an answer that long"
        );
    }
}
