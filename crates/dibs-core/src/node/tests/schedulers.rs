//! Which path new data takes: the schedulers, roles and the hint.

use super::bounds::speak;
use core::num::NonZeroU64;

use super::*;

const SEAL: BumpId = bump::SEAL;
const CHUNKS: u32 = 40;
const LEN: usize = 14_000;

/// What each path of host 0 carried while it sent as many superpackets, in bytes.
fn carried(pair: &mut Pair, from: u32) -> [u64; 2] {
    let before = pair.sent[0];
    for at in 0..CHUNKS {
        pair.send(0, from + at * LEN as u32, &text(LEN), 0, from + at);
        pair.run(Duration::from_millis(20));
    }
    pair.run(Duration::from_secs(1));
    assert_eq!(
        pair.stream(1).len(),
        from as usize - 1 + CHUNKS as usize * LEN
    );
    [0, 1].map(|path| pair.sent[0][path] - before[path])
}

/// Where the stream goes on after so many calls of [`carried`].
const fn after(calls: u32) -> u32 {
    1 + calls * CHUNKS * LEN as u32
}

/// On a bump that any path may carry.
fn sealed() -> Pair {
    let mut pair = Pair::connected();
    pair.bump = SEAL;
    pair
}

fn prefer(path: usize) -> Option<Hint> {
    Some(Hint {
        path,
        weight: Hint::WEIGHT,
        delta: Hint::DELTA,
    })
}

/// Acknowledgements and probes of an idle path.
const LITTLE: u64 = 10_000;

fn unused(pair: &Pair, path: usize) -> Option<Unused> {
    let paths = pair.nodes[0].paths();
    paths.iter().find(|p| p.local == path).unwrap().unused
}

#[test]
fn new_data_goes_by_the_preferred_path_but_for_the_first_words() {
    for path in [0, 1] {
        let mut pair = sealed();
        pair.nodes[0].prefer(prefer(path));
        let bytes = carried(&mut pair, after(0));
        let other = 1 - path;
        // Until the peer has said that it knows the flow.
        assert!(
            bytes[other] > 1400 && bytes[other] < 2 * LEN as u64,
            "{bytes:?}"
        );
        let bytes = carried(&mut pair, after(1));
        assert!(bytes[other] < LITTLE, "{bytes:?}");
        assert_eq!(unused(&pair, other), Some(Unused::NotPreferred));
        assert_eq!(unused(&pair, path), None);
        pair.nodes[0].prefer(None);
        assert_eq!(unused(&pair, other), None);
    }
}

#[test]
fn a_preferred_path_that_does_not_answer_is_left_at_once_and_taken_again_when_it_does() {
    let mut pair = sealed();
    carried(&mut pair, after(0));
    pair.nodes[0].prefer(prefer(1));
    carried(&mut pair, after(1));
    pair.filter = Box::new(|_, path, _| path != 1);
    let bytes = carried(&mut pair, after(2));
    assert!(
        bytes[0] > (u64::from(CHUNKS) - 10) * LEN as u64,
        "{bytes:?}"
    );
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(1));
    let bytes = carried(&mut pair, after(3));
    assert!(bytes[0] < LITTLE, "{bytes:?}");
}

#[test]
fn trust_stands_above_the_hint() {
    let mut pair = Pair::connected();
    pair.nodes[0].prefer(prefer(1));
    carried(&mut pair, after(0));
    let bytes = carried(&mut pair, after(1));
    let all = u64::from(CHUNKS) * LEN as u64;
    assert!(bytes[0] > all / 50, "the share of trusted paths: {bytes:?}");
    assert!(bytes[1] > all / 2, "{bytes:?}");
}

#[test]
fn a_backup_carries_data_only_while_no_other_path_may() {
    let mut pair = sealed();
    let backup = Usage {
        role: Role::Backup,
        ..Usage::default()
    };
    pair.nodes[0].set_usage(pair.now, 0, backup);
    let bytes = carried(&mut pair, after(0));
    assert!(bytes[0] < LITTLE, "{bytes:?}");
    assert_eq!(unused(&pair, 0), Some(Unused::Backup));
    pair.nodes[0].set_path(pair.now, 1, false, 1500);
    let bytes = carried(&mut pair, after(1));
    assert_eq!(bytes[1], 0);
    assert!(bytes[0] > u64::from(CHUNKS) * LEN as u64, "{bytes:?}");
}

#[test]
fn a_path_that_is_never_used_carries_nothing_until_it_may_again() {
    let mut pair = sealed();
    let never = Usage {
        role: Role::Never,
        ..Usage::default()
    };
    pair.nodes[0].set_usage(pair.now, 1, never);
    let before = pair.sent[0][1];
    pair.run(Duration::from_secs(5));
    assert_eq!(pair.sent[0][1], before);
    assert_eq!(unused(&pair, 1), Some(Unused::Never));
    pair.nodes[0].set_usage(pair.now, 1, Usage::default());
    pair.run(Duration::from_secs(5));
    assert_eq!(unused(&pair, 1), None);
}

#[test]
fn a_limited_path_sends_no_more_than_it_may() {
    let mut pair = Pair::by_one_path(DELAY);
    pair.bump = SEAL;
    let limit = Usage {
        rate: NonZeroU64::new(100_000),
        ..Usage::default()
    };
    pair.nodes[0].set_usage(pair.now, 0, limit);
    let before = pair.sent[0][0];
    for at in 0..CHUNKS {
        pair.send(0, 1 + at * LEN as u32, &text(LEN), 0, at);
    }
    pair.run(Duration::from_secs(2));
    let sent = pair.sent[0][0] - before;
    assert!((150_000..230_000).contains(&sent), "{sent}");
}

#[test]
fn in_turn_both_paths_carry_about_the_same() {
    let mut pair = sealed();
    pair.nodes[0].set_scheduler(Scheduler::RoundRobin);
    let [one, other] = carried(&mut pair, after(0));
    assert!(one.abs_diff(other) < (one + other) / 5, "{one} {other}");
}

#[test]
fn every_scheduler_brings_all_over() {
    for scheduler in Scheduler::ALL {
        for bump in [BUMP, SEAL] {
            let mut pair = Pair::connected();
            pair.bump = bump;
            pair.nodes[0].set_scheduler(scheduler);
            let mut lost = dice(3);
            pair.filter = Box::new(move |_, _, _| !lost());
            carried(&mut pair, after(0));
        }
    }
}

#[test]
fn by_all_paths_at_once_a_loss_on_one_is_no_loss() {
    let mut pair = sealed();
    carried(&mut pair, after(0));
    pair.nodes[0].set_scheduler(Scheduler::Redundant);
    let bytes = carried(&mut pair, after(1));
    let all = u64::from(CHUNKS) * LEN as u64;
    assert!(bytes.iter().all(|&bytes| bytes > all), "{bytes:?}");
    // One path loses a third of all: not one chunk has to be sent again.
    let mut lost = dice(30);
    pair.filter = Box::new(move |host, path, _| host != 0 || path != 1 || !lost());
    let resent = pair.nodes[0].counters().get(Counter::ChunkResent);
    for at in 0..CHUNKS {
        pair.send(0, after(2) + at * 1000, &text(1000), 0, after(2) + at);
        // Just longer than it takes to get there.
        pair.run(DELAY + Duration::from_millis(1));
        let arrived = pair.stream(1).len();
        assert_eq!(arrived, after(2) as usize - 1 + (at as usize + 1) * 1000);
    }
    let again = pair.nodes[0].counters().get(Counter::ChunkResent) - resent;
    assert_eq!(again, 0);
}

#[test]
fn of_scramble_the_trusted_part_is_copied_nowhere() {
    let mut pair = Pair::connected();
    pair.nodes[0].set_scheduler(Scheduler::Redundant);
    let bytes = carried(&mut pair, after(0));
    let all = u64::from(CHUNKS) * LEN as u64;
    assert!(bytes[0] > all && bytes[1] < all, "{bytes:?}");
}

/// What connections from a port of host 0 are shared out by.
fn from_port(port: u16, scheduler: Scheduler) -> FlowScheduler {
    FlowScheduler {
        local_ports: vec![port..=port],
        ..FlowScheduler::all(scheduler)
    }
}

/// Chunks that host 0 copied while connections from these ports said a word each, that of a port at `seq`.
fn copied(pair: &mut Pair, ports: &[u16], seq: u32) -> u64 {
    let count = |pair: &Pair| pair.nodes[0].counters().get(Counter::ChunkCopied);
    let before = count(pair);
    for port in ports {
        speak(pair, *port, seq, &text(100));
    }
    pair.run(Duration::from_millis(100));
    count(pair) - before
}

#[test]
fn a_connection_has_a_scheduler_of_its_own_from_its_first_segment_on() {
    let mut pair = sealed();
    pair.nodes[0].set_flow_schedulers(vec![from_port(7, Scheduler::Redundant)]);
    assert_eq!(copied(&mut pair, &[7], 1), 1);
    assert_eq!(copied(&mut pair, &[8], 1), 0);
    // The list changes while both are there.
    pair.nodes[0].set_flow_schedulers(vec![from_port(8, Scheduler::Redundant)]);
    assert_eq!(copied(&mut pair, &[7], 101), 0);
    assert_eq!(copied(&mut pair, &[8], 101), 1);
    pair.nodes[0].set_flow_schedulers(Vec::new());
    assert_eq!(copied(&mut pair, &[7, 8], 201), 0);
    // What is for all others is not for those that have their own.
    pair.nodes[0].set_scheduler(Scheduler::Redundant);
    pair.nodes[0].set_flow_schedulers(vec![
        from_port(7, Scheduler::LowestRtt),
        FlowScheduler {
            remote_ports: vec![81..=90],
            ..FlowScheduler::all(Scheduler::LowestRtt)
        },
    ]);
    assert_eq!(copied(&mut pair, &[7], 301), 0);
    assert_eq!(copied(&mut pair, &[8], 301), 1);
}

#[test]
fn what_goes_along_with_others_is_shared_out_as_they_are() {
    let mut pair = sealed();
    let redundant = (10..15).map(|port| from_port(port, Scheduler::Redundant));
    pair.nodes[0].set_flow_schedulers(redundant.collect());
    // In turn, so that each run could go on with one of the others.
    let ports = [10, 20, 11, 21, 12, 22, 13, 23, 14, 24];
    for (at, seq) in [1, 101, 201].into_iter().enumerate() {
        assert_eq!(copied(&mut pair, &ports, seq), 5, "word {at}");
    }
    let arrived: usize = { pair.injected[1].iter() }
        .map(|frame| match packet::parse(&frame[virtio::LEN..]) {
            Ok(Packet::Tcp(s)) => s.payload.len(),
            other => panic!("not a segment: {other:?}"),
        })
        .sum();
    assert_eq!(arrived, 3 * ports.len() * 100);
}

#[test]
fn a_connection_is_on_each_bump_under_the_same_scheduler() {
    for bump in [BUMP, SEAL] {
        let mut pair = Pair::connected();
        pair.bump = bump;
        pair.nodes[0].set_flow_schedulers(vec![from_port(7, Scheduler::RoundRobin)]);
        let of_conn = |pair: &Pair| {
            let conns = pair.nodes[0].peers[0].flows.iter();
            let mut ours = conns.filter(|(_, conn)| conn.bump == bump);
            ours.next().unwrap().1.out.schedule.own
        };
        assert_eq!(copied(&mut pair, &[7], 1), 0);
        assert_eq!(of_conn(&pair), Some(Scheduler::RoundRobin));
    }
}

#[test]
fn first_words_and_the_bulk_take_different_paths_though_they_are_sent_at_once() {
    let mut pair = sealed();
    copied(&mut pair, &[7, 9], 1);
    pair.nodes[0].prefer(prefer(1));
    let by_path = |pair: &Pair, port: u16| {
        let conns = pair.nodes[0].conns();
        let conn = conns.iter().find(|conn| conn.tuple.sport == port);
        let mut bytes = [0; 2];
        for (path, of) in conn.unwrap().by_path.iter() {
            bytes[path] += of.sent;
        }
        bytes
    };
    let before = [7, 9].map(|port| by_path(&pair, port));
    // The first words of connection 8 between those of two that are under way.
    for (port, seq) in [(7, 101), (8, 1), (9, 101)] {
        speak(&mut pair, port, seq, &text(100));
    }
    pair.run(Duration::from_millis(100));
    assert_eq!(by_path(&pair, 8), [100, 0]);
    for (port, before) in [7, 9].into_iter().zip(before) {
        let after = by_path(&pair, port);
        assert_eq!(after, [before[0], before[1] + 100], "connection {port}");
    }
}

#[test]
fn nobody_is_called_or_answered_by_a_path_that_carries_nothing() {
    for host in [0, 1] {
        let mut pair = Pair::agreeing(Handshake::Trusted);
        let never = Usage {
            role: Role::Never,
            ..Usage::default()
        };
        // The other path is not trusted, so no session comes about.
        pair.nodes[host].set_usage(pair.now, 0, never);
        pair.run(Duration::from_secs(10));
        assert_eq!(pair.sent[host], [0, 0]);
        let unused = pair.nodes[host].counters().get(Counter::HandshakeUnused);
        assert_eq!(unused > 0, host == 1, "{unused}");
        pair.nodes[host].set_usage(pair.now, 0, Usage::default());
        pair.run(Duration::from_secs(30));
        pair.assert_open();
    }
}
