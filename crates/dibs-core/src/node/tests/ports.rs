//! Ports that a connection has after an earlier one, which was on other bumps too.

use super::*;
use crate::flow::conn::Conn;

/// Number behind what host 0 has sent on the earlier connection, and the first one of the next.
const EARLIER: u32 = 650_000;
const NEXT: u32 = 100_000;
/// First number of host 1 on the next one.
const ANSWER: u32 = 200_000;

/// The kernel of `host` sends this by a bump: number, what it acknowledges, flags, data.
fn by(pair: &mut Pair, bump: BumpId, host: usize, sent: (u32, u32, u16, &[u8])) {
    pair.bump = bump;
    let (seq, ack, bits, payload) = sent;
    pair.segment(host, seq, payload, bits, 1, ack);
    pair.run(Duration::from_millis(50));
}

/// The connection on a bump, as `host` has it.
fn conn(pair: &Pair, host: usize, bump: BumpId) -> &Conn {
    let flows = &pair.nodes[host].peers[0].flows;
    let key = flows.find(tuple(host), bump).expect("it was there");
    flows.get(key).expect("it was found")
}

fn incarnation(pair: &Pair, host: usize) -> u16 {
    conn(pair, host, BUMP).out.stream.incarnation()
}

/// A connection on scramble by which both hosts have sent something that the other one has.
fn earlier() -> Pair {
    let mut pair = Pair::connected();
    by(&mut pair, BUMP, 0, (600_000, 600_000, 0, &text(50_000)));
    by(&mut pair, BUMP, 1, (600_000, EARLIER, 0, &text(50_000)));
    by(&mut pair, BUMP, 0, (EARLIER, EARLIER, 0, b""));
    assert_eq!([0, 1].map(|host| pair.stream(host).len()), [50_000; 2]);
    pair
}

/// The next one's SYN goes by seal, and is not answered yet.
fn call(pair: &mut Pair) {
    by(pair, bump::SEAL, 0, (NEXT, 0, flags::SYN, b""));
    pair.injected = [Vec::new(), Vec::new()];
}

/// The new data counted as what the earlier connection had sent before.
#[test]
fn a_connection_that_began_by_another_bump_is_not_the_one_before() {
    for host in [0, 1] {
        let mut pair = earlier();
        let before = [0, 1].map(|host| incarnation(&pair, host));
        call(&mut pair);
        let answer = (ANSWER, NEXT + 1, flags::SYN, &b""[..]);
        by(&mut pair, bump::SEAL, 1, answer);
        for (host, before) in before.into_iter().enumerate() {
            let new = conn(&pair, host, BUMP);
            assert_eq!((new.sent_end, new.acked, new.given()), (None, None, None));
            assert_ne!(incarnation(&pair, host), before);
        }
        by(&mut pair, bump::SEAL, 0, (NEXT + 1, ANSWER + 1, 0, b""));
        pair.injected = [Vec::new(), Vec::new()];
        let (seq, ack) = [(NEXT + 1, ANSWER + 1), (ANSWER + 1, NEXT + 1)][host];
        let data = text(30_000);
        by(&mut pair, BUMP, host, (seq, ack, 0, &data));
        assert_eq!(pair.received(1 - host)[0].0, seq);
        pair.assert_stream(1 - host, &data);
        let new = conn(&pair, host, BUMP);
        assert_eq!(new.sent_end, Some(SeqNumber::new(seq + 30_000)));
        assert_eq!(new.stats.retransmissions, 0);
    }
}

#[test]
fn what_waits_by_another_bump_is_of_no_use_to_the_next_connection() {
    let mut pair = earlier();
    let now = pair.now;
    (0..2).for_each(|path| pair.nodes[0].set_path(now, path, false, 1500));
    by(&mut pair, BUMP, 0, (EARLIER, EARLIER, 0, &text(50_000)));
    assert_eq!(conn(&pair, 0, BUMP).out.queue.bytes(), 50_000);
    call(&mut pair);
    assert_eq!(conn(&pair, 0, BUMP).out.queue.bytes(), 0);
    let queues = &pair.nodes[0].peers[0].queues;
    assert_eq!((queues.fq.backlog(), queues.fq.memory()), (0, 0));
}

/// The window of the earlier one was to be closed, and it was to be given no data.
#[test]
fn a_connection_does_not_leave_because_the_one_before_did() {
    let mut pair = earlier();
    pair.nodes[0].drain(pair.now, BUMP, tuple(0), 0);
    pair.nodes[0].refuse(BUMP, tuple(0));
    pair.outputs();
    assert!(conn(&pair, 0, BUMP).clamp.is_some());
    call(&mut pair);
    let new = conn(&pair, 0, BUMP);
    assert!(new.clamp.is_none() && !new.refuses);
    // The rules of both hosts contradict each other.
    by(&mut pair, BUMP, 1, (ANSWER, NEXT + 1, flags::SYN, b""));
    by(&mut pair, BUMP, 1, (ANSWER + 1, NEXT + 1, 0, b"data"));
    assert_eq!(pair.stream(0), b"data");
}

/// The kernel's repetition comes after what went on by another bump.
#[test]
fn a_syn_that_is_sent_again_begins_nothing() {
    let mut pair = earlier();
    call(&mut pair);
    let answer = (ANSWER, NEXT + 1, flags::SYN, &b""[..]);
    by(&mut pair, bump::SEAL, 1, answer);
    let data = text(30_000);
    let (seq, ack) = (NEXT + 1, ANSWER + 1);
    by(&mut pair, BUMP, 0, (seq, ack, 0, &data[..20_000]));
    by(&mut pair, BUMP, 1, (ack, seq + 20_000, 0, b""));
    let before = [0, 1].map(|host| incarnation(&pair, host));
    by(&mut pair, bump::SEAL, 0, (NEXT, 0, flags::SYN, b""));
    by(&mut pair, bump::SEAL, 1, answer);
    assert_eq!([0, 1].map(|host| incarnation(&pair, host)), before);
    let same = conn(&pair, 0, BUMP);
    assert_eq!(same.sent_end, Some(SeqNumber::new(seq + 20_000)));
    by(&mut pair, BUMP, 0, (seq + 20_000, ack, 0, &data[20_000..]));
    pair.assert_stream(1, &data);
}

/// A SYN of somebody else who has the host's address, or of a host behind it that has begun anew: the peer goes on.
#[test]
fn a_connection_lives_on_after_a_syn_that_begins_none() {
    let mut pair = earlier();
    call(&mut pair);
    by(&mut pair, BUMP, 1, (EARLIER, EARLIER, 0, b""));
    let data = text(60_000);
    let (one, other) = data.split_at(30_000);
    by(&mut pair, BUMP, 0, (EARLIER, EARLIER, 0, one));
    by(&mut pair, BUMP, 1, (EARLIER, EARLIER + 30_000, 0, &data));
    by(&mut pair, BUMP, 0, (EARLIER + 30_000, EARLIER, 0, other));
    assert_eq!(pair.received(1)[0].0, EARLIER);
    pair.assert_stream(1, &data);
    pair.assert_stream(0, &data);
    let live = conn(&pair, 0, BUMP);
    assert_eq!(live.sent_end, Some(SeqNumber::new(EARLIER + 60_000)));
}
