//! A kernel that does not answer what a peer calls, and one that does.

use super::*;
use crate::node::SilentPort;

/// How far apart a kernel sends the same SYN.
const REPEATED: [u64; 3] = [1000, 2000, 4000];

/// The port of host 1 that is called.
fn port() -> u16 {
    tuple(0).dport
}

fn silent(calls: u64) -> SilentPort {
    SilentPort {
        bump: BUMP,
        port: port(),
        calls,
        refuses: false,
    }
}

/// Host 0 sends a SYN of this number.
fn call(pair: &mut Pair, seq: u32) {
    send(pair, tuple(0), seq, flags::SYN);
}

/// The kernel of the host that `tuple` begins at sends this.
fn send(pair: &mut Pair, tuple: FlowKey, seq: u32, flags: u16) {
    let headers = Headers {
        tuple,
        meta: IpMeta::default(),
        seq: SeqNumber::new(seq),
        ack: SeqNumber::new(0),
        flags,
        window: WINDOW,
        urgent: 0,
        timestamps: None,
        options: None,
    };
    let node = &mut pair.nodes[usize::from(tuple.src == inner(1))];
    let mut buffer = node.tun_buffer();
    headers.write(&mut buffer[..MAX_HEADERS], 0, 0);
    let len = headers.encoded_len();
    node.handle_tun(pair.now, pair.bump, buffer, len);
}

/// News of host 1's ports since it was asked last.
fn told(pair: &mut Pair) -> Vec<Vec<SilentPort>> {
    let events = std::mem::take(&mut pair.events[1]).into_iter();
    let ports = events.filter_map(|event| match event {
        Event::SilentPorts { peer: 0, ports } => Some(ports),
        _ => None,
    });
    ports.collect()
}

fn unanswered(pair: &Pair) -> u64 {
    pair.nodes[1].counters().get(Counter::CallUnanswered)
}

fn wait(pair: &mut Pair, millis: u64) {
    pair.run(Duration::from_millis(millis));
}

#[test]
fn a_call_that_is_repeated_in_vain_is_told_until_one_is_answered() {
    let mut pair = Pair::connected();
    for pause in REPEATED {
        call(&mut pair, 7);
        wait(&mut pair, pause);
    }
    assert_eq!(pair.injected[1].len(), 3, "the SYNs come out");
    assert_eq!(told(&mut pair), [[silent(1)]]);
    assert_eq!(pair.nodes[1].peers(pair.now)[0].silent, [silent(1)]);
    assert_eq!(unanswered(&pair), 1, "the connection counts once");
    // A later connection, which is answered.
    call(&mut pair, 99);
    wait(&mut pair, 100);
    send(&mut pair, tuple(1), 1, flags::SYN | flags::ACK);
    wait(&mut pair, 100);
    assert_eq!(told(&mut pair), [[]; 1]);
    assert_eq!(pair.nodes[1].peers(pair.now)[0].silent, []);
    assert!(told(&mut pair).is_empty() && pair.nodes[0].peers(pair.now)[0].silent.is_empty());
}

/// A kernel's answer may get lost on its way, and whoever calls then calls again.
#[test]
fn a_call_that_is_answered_is_never_in_vain() {
    for answer in [flags::SYN | flags::ACK, flags::ACK] {
        let mut pair = Pair::connected();
        pair.filter = Box::new(|from, _, _| from == 0);
        for pause in REPEATED {
            call(&mut pair, 7);
            wait(&mut pair, 100);
            send(&mut pair, tuple(1), 1, answer);
            wait(&mut pair, pause);
        }
        assert_eq!(
            told(&mut pair),
            Vec::<Vec<SilentPort>>::new(),
            "{answer:#x}"
        );
        assert_eq!(unanswered(&pair), 0, "{answer:#x}");
    }
}

/// A kernel drops a SYN when it has no room for one, and whoever calls may give up at once.
#[test]
fn a_single_call_may_get_no_answer() {
    let mut pair = Pair::connected();
    for seq in [7, 8, 9] {
        call(&mut pair, seq);
        wait(&mut pair, 1000);
    }
    call(&mut pair, 10);
    wait(&mut pair, 200);
    call(&mut pair, 10);
    wait(&mut pair, 60_000);
    assert_eq!((told(&mut pair).len(), unanswered(&pair)), (0, 0));
}

/// A firewall that rejects says so, and nobody calls again.
#[test]
fn an_error_of_the_host_itself_shows_at_once_that_nobody_answers() {
    let mut pair = Pair::connected();
    call(&mut pair, 7);
    wait(&mut pair, 100);
    let syn = pair.injected[1].last().expect("the SYN")[virtio::LEN..].to_vec();
    let reject = |kind: [u8; 2]| {
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, packet::ICMP, 0, 0];
        packet.extend([10, 0, 1, 2, 10, 0, 1, 1]);
        packet.extend(kind);
        packet.extend([0; 6]);
        packet.extend(&syn[..28]);
        let len = packet.len() as u16;
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet
    };
    // That a packet is too long says nothing of the port.
    for (kind, expected) in [([3, 4], 0), ([11, 0], 0), ([3, 13], 1), ([3, 3], 1)] {
        let packet = reject(kind);
        let node = &mut pair.nodes[1];
        let mut buffer = node.tun_buffer();
        buffer[..virtio::LEN].fill(0);
        buffer[virtio::LEN..virtio::LEN + packet.len()].copy_from_slice(&packet);
        node.handle_tun(pair.now, BUMP, buffer, virtio::LEN + packet.len());
        wait(&mut pair, 100);
        let silent = &pair.nodes[1].peers(pair.now)[0].silent;
        assert_eq!(silent.len(), expected, "{kind:?}");
    }
    assert_eq!(unanswered(&pair), 1);
}

/// Behind a gateway another host answers, or none.
#[test]
fn hosts_behind_a_gateway_may_be_silent() {
    let mut pair = Pair::new();
    let behind = IpNet::from(inner(1));
    let mut config = config(1, Integrity::On);
    config.addresses = vec![IpAddr::from([10, 0, 9, 1])];
    config.gateway = vec![behind];
    pair.nodes[1] = Node::new(Time::ZERO, config, [2; 32]).unwrap();
    wait(&mut pair, 3000);
    for pause in REPEATED {
        call(&mut pair, 7);
        wait(&mut pair, pause);
    }
    assert_eq!(pair.injected[1].len(), 3, "the SYNs come out");
    assert_eq!(unanswered(&pair), 0);
}

/// A port that nobody calls any more is not told for ever.
#[test]
fn a_silent_port_that_nobody_calls_is_forgotten() {
    let mut pair = Pair::connected();
    for pause in REPEATED {
        call(&mut pair, 7);
        wait(&mut pair, pause);
    }
    assert_eq!(told(&mut pair).len(), 1);
    wait(&mut pair, 16 * 60 * 1000);
    assert_eq!(told(&mut pair), [[]; 1]);
}
