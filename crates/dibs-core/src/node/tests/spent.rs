//! A path whose volume is used up: it carries what keeps the peers together, and nothing of connections.

use super::*;

const SPENT: Usage = Usage {
    role: Role::Primary,
    rate: None,
    spent: true,
};
/// More than what keeps a path alive for some seconds, and much less than what connections send here.
const LITTLE: u64 = 10_000;

/// Host `from` sends much, and the other acknowledges it; what each host sent by each path meanwhile.
fn stream(pair: &mut Pair, from: usize, at: &mut usize) -> [[u64; 2]; 2] {
    let data = text(4_000_000);
    let before = pair.sent;
    for _ in 0..50 {
        pair.send(
            from,
            1 + *at as u32,
            &data[*at..*at + 10_000],
            0,
            *at as u32,
        );
        *at += 10_000;
        pair.run(Duration::from_millis(10));
        pair.send_ack(1 - from, 1 + *at as u32);
    }
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1 - from, &data[..*at]);
    [0, 1].map(|host| [0, 1].map(|path| pair.sent[host][path] - before[host][path]))
}

#[test]
fn neither_end_sends_data_by_a_spent_path() {
    for from in [0, 1] {
        for lossy in [false, true] {
            let mut pair = Pair::connected();
            pair.bump = bump::SEAL;
            for node in &mut pair.nodes {
                node.set_scheduler(Scheduler::RoundRobin);
            }
            let mut at = 0;
            let both = stream(&mut pair, from, &mut at);
            assert!(both[from].iter().all(|bytes| *bytes > LITTLE), "{both:?}");
            pair.nodes[0].set_usage(pair.now, 0, SPENT);
            if lossy {
                // The first words of it are lost.
                let mut lost = 0;
                pair.filter = Box::new(move |host, path, _| {
                    lost += usize::from((host, path) == (0, 0));
                    (host, path) != (0, 0) || lost > 3
                });
            }
            pair.run(Duration::from_secs(1));
            let spared = stream(&mut pair, from, &mut at);
            for host in [0, 1] {
                assert!(spared[host][0] < LITTLE, "{from} {lossy}: {spared:?}");
            }
            assert_eq!(unused(&pair, 0), Some(Unused::Spent));
            assert_eq!(unused(&pair, 1), Some(Unused::SpentThere));

            pair.nodes[0].set_usage(pair.now, 0, Usage::default());
            pair.run(Duration::from_millis(100));
            let again = stream(&mut pair, from, &mut at);
            assert!(again[from].iter().all(|bytes| *bytes > LITTLE), "{again:?}");
        }
    }
}

/// Why a host sends no data by the trusted path.
fn unused(pair: &Pair, host: usize) -> Option<Unused> {
    let paths = pair.nodes[host].paths();
    paths.iter().find(|path| path.local == 0).unwrap().unused
}

/// The only path is spent, and trusted: sessions go on, and what the daemons say gets through.
#[test]
fn keys_and_messages_pass_by_a_spent_path() {
    for both in [false, true] {
        let mut pair = Pair::by_one_path(DELAY);
        for host in 0..=usize::from(both) {
            pair.nodes[host].set_usage(pair.now, 0, SPENT);
        }
        pair.run(Duration::from_secs(900));
        let sessions = pair.nodes[0].counters().get(Counter::Sessions);
        assert!(sessions >= 5, "{sessions} in a quarter of an hour");
        assert!(pair.nodes[1].peers(pair.now)[0].reachable);
        let mut drawn = 1u32;
        // Half of the datagrams are lost.
        pair.filter = Box::new(move |_, _, _| {
            drawn = drawn.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            drawn >> 31 == 0
        });
        for host in [0, 1] {
            pair.nodes[host]
                .send_control(pair.now, 0, b"word", None)
                .unwrap();
        }
        pair.run(Duration::from_secs(20));
        for host in [0, 1] {
            let mut events = pair.events[host].iter();
            let heard = events.any(|e| matches!(e, Event::Control { .. }));
            assert!(heard, "{both}: host {host} heard nothing");
        }
    }
}

/// A path that was spent before it was joined, and a peer that restarts: it is told as soon as it sends.
#[test]
fn who_knows_nothing_of_it_is_told() {
    let mut pair = Pair::new();
    pair.bump = bump::SEAL;
    pair.nodes[0].set_usage(pair.now, 0, SPENT);
    pair.run(Duration::from_secs(3));
    let mut at = 0;
    let sent = stream(&mut pair, 1, &mut at);
    assert!(sent[1][0] < 3 * LITTLE, "{sent:?}");
    assert_eq!(unused(&pair, 1), Some(Unused::SpentThere));
}

#[test]
fn only_what_sessions_carry_counts() {
    let mut pair = Pair::connected();
    let before = pair.nodes[1].carried().to_vec();
    let mut junk = vec![4; 1400];
    let mut call = vec![1; 1200];
    for _ in 0..1000 {
        pair.nodes[1].handle_datagram(pair.now, 0, addr(0, 0), &mut junk);
        pair.nodes[1].handle_datagram(pair.now, 0, addr(0, 0), &mut call);
    }
    assert_eq!(pair.nodes[1].carried(), before);
    pair.bump = bump::SEAL;
    let (sent, carried) = (pair.sent, pair.nodes[1].carried().to_vec());
    pair.run(Duration::ZERO);
    stream(&mut pair, 0, &mut 0);
    for path in [0, 1] {
        let more = pair.nodes[1].carried()[path] - carried[path];
        let went: u64 = (0..2)
            .map(|host| pair.sent[host][path] - sent[host][path])
            .sum();
        assert_eq!(more, went, "what went by path {path}, both ways");
    }
}
