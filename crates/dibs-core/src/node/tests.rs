//! Two nodes and nothing else: each packet is made and looked at by hand.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_settings::{BumpId, Handshake, Hint, Opening, Place, Role, Scheduler};
use dibs_wire::emit::{Headers, MAX_HEADERS};
use dibs_wire::packet::{self, IpMeta, Packet, flags};
use dibs_wire::{FlowKey, SeqNumber, virtio};
use ipnet::IpNet;

mod bounds;
mod recovery;

use super::*;
use crate::bump::{self, Pads};
use crate::counters::Counter;
use crate::node::paths::Link;
use crate::path_index::PathIndex;
use crate::preference::{Unused, Usage};
use crate::session::{
    Integrity, KeyLimits, MAX_DATAGRAM, PathId, PublicKey, Secret, SeededRandom, StaticSecret,
    Suite, is_handshake,
};
use crate::time::Time;

mod accept;
mod acks;
mod away;
mod bare;
mod bumps;
mod deadlines;
mod drop_cache;
mod endpoints;
mod fair;
mod flood;
mod gateway;
mod handover;
mod hostile;
mod idle;
mod joins;
mod moves;
mod names;
mod paths;
mod ports;
mod rates;
mod rekey;
mod schedulers;
mod sends;
mod silence;
mod spent;
mod strangers;
mod toy;
mod untrusted;

pub(super) const BUMP: BumpId = bump::SCRAMBLE;
const DELAY: Duration = Duration::from_millis(1);
/// Of each segment.
const WINDOW: u16 = 1000;

struct InFlight {
    due: Time,
    to: usize,
    path: usize,
    from: SocketAddr,
    bytes: Vec<u8>,
}

type Filter = Box<dyn FnMut(usize, usize, &[u8]) -> bool>;

/// Two hosts with two links: 0 is trusted, 1 is not.
pub(super) struct Pair {
    pub(super) now: Time,
    /// The one that the kernels' segments come by.
    bump: BumpId,
    pub(super) nodes: [Node; 2],
    wire: VecDeque<InFlight>,
    /// Of both links, each way.
    delay: Duration,
    injected: [Vec<Vec<u8>>; 2],
    events: [Vec<Event>; 2],
    /// Owners that ask for no events.
    busy: [bool; 2],
    /// Says whether a datagram (sender, path, bytes) passes.
    filter: Filter,
    sent: [[u64; 2]; 2],
    /// Where host 0 is on the first path, if not where it was at first.
    moved: Option<SocketAddr>,
    /// The only place where host 1 is on the first path, if not wherever it is called.
    listens: Option<SocketAddr>,
    /// Calls that each host sent datagrams with.
    sends: [usize; 2],
    /// The longest datagram that the paths take, and the payload of the segments that a superpacket stands for.
    longest: usize,
    mss: u16,
}

fn addr(host: usize, path: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::from([10, 0, path as u8 + 1, host as u8 + 1]), 5300)
}

pub(super) fn inner(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 1, host as u8 + 1])
}

fn node(host: usize, seed: u8, integrity: Integrity) -> Node {
    Node::new(Time::ZERO, config(host, integrity), [seed; 32]).unwrap()
}

fn config(host: usize, integrity: Integrity) -> NodeConfig {
    let keys = [StaticSecret::from([7; 32]), StaticSecret::from([9; 32])];
    let other = 1 - host;
    NodeConfig {
        private: Box::new(keys[host].clone()),
        suite: Suite::for_this_cpu(),
        integrity,
        handshake: Handshake::Chained,
        paths: vec![
            LocalPath {
                trusted: true,
                mtu: 1500,
                up: true,
                usage: Usage::default(),
                addresses: vec![addr(host, 0).ip()],
                public: Vec::new(),
            },
            LocalPath {
                trusted: false,
                mtu: 1500,
                up: true,
                usage: Usage::default(),
                addresses: vec![addr(host, 1).ip()],
                public: Vec::new(),
            },
        ],
        peers: vec![PeerConfig {
            public: PublicKey::from(&keys[other]),
            preshared: Some(Box::new(Secret::new([3; 32]))),
            prefixes: vec![IpNet::from(inner(other))],
            accept: vec![Opening::ANY],
            endpoints: if host == 0 {
                vec![(0, addr(1, 0)), (1, addr(1, 1))]
            } else {
                vec![]
            },
            appears_as: Vec::new(),
        }],
        addresses: vec![inner(host)],
        reachable: vec![inner(host)],
        gateway: Vec::new(),
        exit: Vec::new(),
        trusted_share: 0.05,
        bumps: bump::ordinary(),
        pads: Pads::new(&[host as u8 + 100; 32]),
        hold_without_trusted: true,
        scheduler: Scheduler::Balanced,
        hint: None,
    }
}

impl Pair {
    fn new() -> Self {
        Self::with(Integrity::On)
    }

    /// Host 0 opens a path of this id to the other, by a local one.
    fn join(&mut self, id: PathId, path: usize) {
        let Node { shared, peers, .. } = &mut self.nodes[0];
        let (local, remote) = (PathIndex::new(path), addr(1, path));
        let link = Link::join(self.now, shared, id, local, remote);
        peers[0].paths.add(link);
    }

    fn with(integrity: Integrity) -> Self {
        Self {
            now: Time::ZERO + Duration::from_secs(1),
            bump: BUMP,
            nodes: [node(0, 1, integrity), node(1, 2, integrity)],
            wire: VecDeque::new(),
            delay: DELAY,
            injected: [Vec::new(), Vec::new()],
            events: [Vec::new(), Vec::new()],
            busy: [false; 2],
            filter: Box::new(|_, _, _| true),
            sent: [[0; 2]; 2],
            moved: None,
            listens: None,
            sends: [0; 2],
            longest: 1472,
            mss: 1400,
        }
    }

    /// With both paths open.
    pub(super) fn connected() -> Self {
        Self::far_apart(DELAY)
    }

    /// The same of hosts that agree on keys by such paths.
    fn agreeing(handshake: Handshake) -> Self {
        let mut pair = Self::new();
        for (host, node) in pair.nodes.iter_mut().enumerate() {
            let config = NodeConfig {
                handshake,
                ..config(host, Integrity::On)
            };
            *node = Node::new(Time::ZERO, config, [host as u8 + 1; 32]).unwrap();
        }
        pair
    }

    /// The same with so much delay each way.
    fn far_apart(delay: Duration) -> Self {
        let mut pair = Self::new();
        pair.delay = delay;
        pair.run(Duration::from_secs(3));
        pair.assert_open();
        pair
    }

    /// The same of which host 0 has one path.
    fn by_one_path(delay: Duration) -> Self {
        let mut pair = Self::far_apart(delay);
        pair.nodes[0].set_path(pair.now, 1, false, 1500);
        pair
    }

    fn assert_open(&self) {
        for node in &self.nodes {
            let paths = node.paths();
            assert_eq!(paths.len(), 2, "{paths:?}");
            assert!(paths.iter().all(|p| p.state == "active"), "{paths:?}");
            assert_eq!(paths.iter().filter(|p| p.trusted).count(), 1);
        }
    }

    fn outputs(&mut self) {
        for host in 0..2 {
            let node = &mut self.nodes[host];
            while let Some(t) = node.poll_transmit(self.now) {
                self.sends[host] += 1;
                let moved = self.moved.filter(|_| t.path == 0);
                let from = moved.filter(|_| host == 0);
                let listens = self.listens.filter(|_| t.path == 0);
                let place = [listens, moved][host];
                let lands = place.is_none_or(|at| at == t.to);
                for datagram in t.bytes.chunks(t.segment) {
                    assert!(datagram.len() <= self.longest, "a datagram fits the MTU");
                    self.sent[host][t.path] += datagram.len() as u64;
                    if lands && (self.filter)(host, t.path, datagram) {
                        self.wire.push_back(InFlight {
                            due: self.now + self.delay,
                            to: 1 - host,
                            path: t.path,
                            from: from
                                .or(listens.filter(|_| host == 1))
                                .unwrap_or(addr(host, t.path)),
                            bytes: datagram.to_vec(),
                        });
                    }
                }
            }
            node.flush_injections();
            while let Some(injection) = node.poll_injection() {
                assert_eq!(injection.bump, self.bump);
                self.injected[host].push(injection.frame().to_vec());
                node.recycle(injection);
            }
            if self.busy[host] {
                continue;
            }
            while let Some(event) = node.poll_event() {
                if let Event::Control { peer, .. } = event {
                    node.control_done(peer);
                }
                self.events[host].push(event);
            }
        }
    }

    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        loop {
            self.outputs();
            let timers = self
                .nodes
                .iter()
                .filter_map(Node::poll_timeout)
                .map(|due| due.at);
            let next = timers.chain(self.wire.front().map(|w| w.due)).min();
            let Some(next) = next.filter(|t| *t <= end) else {
                break;
            };
            self.now = self.now.max(next);
            while self.wire.front().is_some_and(|w| w.due <= self.now) {
                let mut w = self.wire.pop_front().unwrap();
                self.nodes[w.to].handle_datagram(self.now, w.path, w.from, &mut w.bytes);
            }
            for node in &mut self.nodes {
                if node.poll_timeout().is_some_and(|due| due.at <= self.now) {
                    let wall = Duration::from_secs(1_000_000) + self.now.since(Time::ZERO);
                    node.handle_timeout(self.now, wall);
                }
            }
        }
        self.now = end;
    }

    /// The kernel of `host` sends `payload` at `seq`.
    fn send(&mut self, host: usize, seq: u32, payload: &[u8], bits: u16, tsval: u32) {
        self.segment(host, seq, payload, bits, tsval, 5);
    }

    /// The kernel of host 0 sends this from number 1 on, in superpackets, and waits after each `burst`
    /// of them.
    fn pour(&mut self, data: &[u8], burst: usize, pause: Duration) {
        for (i, part) in data.chunks(50_000).enumerate() {
            self.send(0, 1 + i as u32 * 50_000, part, 0, i as u32);
            if i % burst == burst - 1 {
                self.run(pause);
            }
        }
    }

    /// The kernel of `host` acknowledges up to `ack`.
    fn send_ack(&mut self, host: usize, ack: u32) {
        self.segment(host, 7, b"", 0, 1, ack);
    }

    fn segment(&mut self, host: usize, seq: u32, payload: &[u8], bits: u16, tsval: u32, ack: u32) {
        let headers = Headers {
            tuple: tuple(host),
            meta: IpMeta {
                tos: 0,
                ttl: 64,
                flow_label: 0,
            },
            seq: SeqNumber::new(seq),
            ack: SeqNumber::new(ack),
            flags: flags::ACK | bits,
            window: WINDOW,
            urgent: 0,
            timestamps: Some((tsval, 1)),
            options: None,
        };
        let node = &mut self.nodes[host];
        let mut buffer = node.tun_buffer();
        let at = headers.encoded_len();
        let gso = if payload.len() > usize::from(self.mss) {
            self.mss
        } else {
            0
        };
        headers.write(&mut buffer[..MAX_HEADERS], payload.len(), gso);
        buffer[at..at + payload.len()].copy_from_slice(payload);
        node.handle_tun(self.now, self.bump, buffer, at + payload.len());
    }

    /// What the kernel of `host` was given: (sequence number, payload, flags, TSval).
    fn received(&self, host: usize) -> Vec<(u32, Vec<u8>, u16, u32)> {
        let parse = |frame: &Vec<u8>| match packet::parse(&frame[virtio::LEN..]) {
            Ok(Packet::Tcp(s)) => {
                assert_eq!(s.tuple, tuple(1 - host));
                (
                    s.seq.raw(),
                    s.payload.to_vec(),
                    s.flags,
                    s.timestamps.map_or(0, |t| t.0),
                )
            }
            other => panic!("not a segment: {other:?}"),
        };
        self.injected[host].iter().map(parse).collect()
    }

    /// What the kernel of `host` was given, put together, is `data` (not printed: it is long).
    fn assert_stream(&self, host: usize, data: &[u8]) {
        let got = self.stream(host);
        let same = got.iter().zip(data).take_while(|(a, b)| a == b).count();
        assert!(
            got == data,
            "{} bytes instead of {}, equal up to {same}",
            got.len(),
            data.len()
        );
    }

    fn stream(&self, host: usize) -> Vec<u8> {
        self.received(host)
            .into_iter()
            .flat_map(|(_, payload, _, _)| payload)
            .collect()
    }
}

pub(super) fn tuple(host: usize) -> FlowKey {
    let one = FlowKey::tcp((inner(0), 40_000), (inner(1), 80));
    if host == 0 { one } else { one.reversed() }
}

/// True in so many of a hundred cases.
fn dice(percent: u64) -> impl FnMut() -> bool {
    let mut state = 1u64;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % 100 < percent
    }
}

fn text(len: usize) -> Vec<u8> {
    b"It was a bright cold day in April, and the clocks were striking thirteen. "
        .iter()
        .copied()
        .cycle()
        .take(len)
        .collect()
}

/// Loopback takes 65,535 bytes: longer than a header block may be, and two of them than a burst.
#[test]
fn a_path_may_take_the_longest_packets_of_all() {
    let mut pair = Pair::new();
    (pair.longest, pair.mss) = (MAX_DATAGRAM, 65_000);
    for (host, node) in pair.nodes.iter_mut().enumerate() {
        let mut config = config(host, Integrity::On);
        config.paths.iter_mut().for_each(|path| path.mtu = 65_535);
        *node = Node::new(Time::ZERO, config, [host as u8 + 1; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    let mtus: Vec<_> = pair.nodes[0].paths().iter().map(|p| p.stats.mtu).collect();
    assert_eq!(mtus, [MAX_DATAGRAM as u16; 2]);
    let data = text(4_000_000);
    pair.pour(&data, 10, Duration::from_millis(5));
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data);
    // And it may be told to take less, while it is used.
    let now = pair.now;
    (0..2).for_each(|path| pair.nodes[0].set_path(now, path, true, 1500));
    pair.longest = 1472;
    pair.send(0, 4_000_001, &data[..50_000], 0, 1000);
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &[&data[..], &data[..50_000]].concat());
    for node in &pair.nodes {
        assert_eq!(node.counters().get(Counter::KeysExhausted), 0);
    }
}

#[test]
fn both_paths_open_and_the_session_is_seen_by_both() {
    let pair = Pair::connected();
    for host in 0..2 {
        assert!(pair.events[host].contains(&Event::PeerUp {
            peer: 0,
            restarted: false
        }));
    }
}

#[test]
fn a_superpacket_arrives_as_one_stream_in_order() {
    let mut pair = Pair::connected();
    let data = text(60_000);
    pair.send(0, 1000, &data, flags::PSH, 77);
    pair.run(Duration::from_millis(500));
    let got = pair.received(1);
    pair.assert_stream(1, &data);
    let mut next = 1000;
    for (at, (seq, payload, bits, tsval)) in got.iter().enumerate() {
        assert_eq!(*seq, next);
        next += payload.len() as u32;
        assert_eq!(
            bits & flags::PSH != 0,
            at + 1 == got.len(),
            "PSH stays on the last piece"
        );
        assert_eq!(*tsval, 77);
    }
    assert!(
        got.len() < 30,
        "pieces are put together again: {}",
        got.len()
    );
}

#[test]
fn nothing_readable_and_nothing_of_the_start_on_the_untrusted_path() {
    let mut pair = Pair::connected();
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let tap = seen.clone();
    pair.filter = Box::new(move |_, path, bytes| {
        if path == 1 {
            tap.borrow_mut().extend_from_slice(bytes);
        }
        true
    });
    let data = text(2_000_000);
    // All at once: one path alone would take longer.
    pair.pour(&data, 20, Duration::from_millis(20));
    pair.run(Duration::from_secs(2));
    pair.assert_stream(1, &data);
    let seen = seen.borrow();
    assert!(
        seen.len() > 100_000,
        "the untrusted path carries its part: {}",
        seen.len()
    );
    let needle = &text(16)[..];
    assert!(!seen.windows(16).any(|w| w == needle));
    assert!(pair.sent[0][0] as f64 > 0.05 * data.len() as f64);
}

#[test]
fn lost_datagrams_are_sent_again_and_tcp_never_notices() {
    let mut pair = Pair::connected();
    let mut loses = dice(10);
    pair.filter = Box::new(move |_, path, _| path == 0 || !loses());
    let data = text(3_000_000);
    pair.pour(&data, 20, Duration::from_millis(10));
    pair.run(Duration::from_secs(5));
    pair.assert_stream(1, &data);
    assert!(pair.nodes[0].counters().get(Counter::ChunkResent) > 10);
    assert_eq!(pair.nodes[0].counters().get(Counter::ChunkGivenUp), 0);
}

#[test]
fn a_kernel_retransmission_goes_alone_and_by_the_trusted_path() {
    let mut pair = Pair::connected();
    let data = text(30_000);
    pair.send(0, 1, &data, 0, 1);
    pair.run(Duration::from_millis(300));
    let before = pair.sent[0][1];
    pair.send(0, 1 + 10_000, &data[10_000..15_000], 0, 2);
    pair.run(Duration::from_millis(50));
    let again: Vec<u8> = pair
        .received(1)
        .into_iter()
        .filter(|r| r.3 == 2)
        .flat_map(|r| r.1)
        .collect();
    assert_eq!(again, data[10_000..15_000]);
    assert!(
        pair.sent[0][1] - before < 500,
        "only acknowledgements went by the untrusted path"
    );
    assert_eq!(pair.nodes[0].conns()[0].stats.retransmissions, 4);
}

#[test]
fn both_directions_at_once() {
    let mut pair = Pair::connected();
    let (a, b) = (text(400_000), vec![0x5a; 400_000]);
    for i in 0..8 {
        pair.send(0, i * 50_000, &a[i as usize * 50_000..][..50_000], 0, i);
        pair.send(1, 9 + i * 50_000, &b[i as usize * 50_000..][..50_000], 0, i);
        pair.run(Duration::from_millis(30));
    }
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &a);
    pair.assert_stream(0, &b);
}

#[test]
fn a_fin_keeps_its_place_and_empty_segments_pass() {
    let mut pair = Pair::connected();
    pair.send(0, 1, b"request", flags::PSH, 1);
    pair.send(0, 8, b"", flags::FIN, 2);
    pair.send(1, 500, b"", 0, 9);
    pair.run(Duration::from_millis(100));
    let got = pair.received(1);
    assert_eq!(got.len(), 2, "{got:?}");
    assert_eq!((got[0].0, &got[0].1[..]), (1, &b"request"[..]));
    assert_eq!(
        (got[1].0, got[1].1.len(), got[1].2 & flags::FIN),
        (8, 0, flags::FIN)
    );
    assert_eq!(pair.received(0).len(), 1);
}

#[test]
fn a_restarted_peer_is_noticed_and_the_stream_goes_on() {
    let mut pair = Pair::connected();
    let data = text(20_000);
    pair.send(0, 1, &data, 0, 1);
    pair.run(Duration::from_millis(200));
    pair.nodes[0] = node(0, 77, Integrity::On);
    pair.nodes[0].shared.setup.instance ^= 1;
    pair.run(Duration::from_secs(5));
    pair.assert_open();
    pair.send(0, 20_001, &data, 0, 2);
    pair.run(Duration::from_millis(500));
    pair.assert_stream(1, &[&data[..], &data[..]].concat());
    assert!(pair.events[1].contains(&Event::PeerUp {
        peer: 0,
        restarted: true
    }));
    // The other way round: who restarts waits to be called.
    pair.nodes[1] = node(1, 78, Integrity::On);
    pair.send(0, 30_001, &data[..1000], 0, 3);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair.send(0, 40_001, &data, 0, 3);
    pair.run(Duration::from_secs(2));
    pair.send(0, 60_001, &data, 0, 4);
    pair.run(Duration::from_secs(2));
    assert!(
        pair.stream(1).ends_with(&data),
        "{:?}",
        pair.nodes[0].peers(pair.now)
    );
}

#[test]
fn a_dead_untrusted_path_costs_nothing_but_time() {
    let mut pair = Pair::connected();
    let data = text(1_000_000);
    for (i, part) in data.chunks(50_000).enumerate() {
        if i == 7 {
            pair.filter = Box::new(|_, path, _| path == 0);
        }
        pair.send(0, 1 + i as u32 * 50_000, part, 0, i as u32);
        pair.run(Duration::from_millis(50));
    }
    pair.run(Duration::from_secs(3));
    pair.assert_stream(1, &data);
}

#[test]
fn a_trusted_path_that_is_no_limit_takes_all() {
    let mut pair = Pair::far_apart(Duration::from_micros(20));
    let data = text(30_000_000);
    for (i, part) in data.chunks(50_000).enumerate() {
        if i == 400 {
            pair.sent = [[0; 2]; 2];
        }
        pair.send(0, 1 + i as u32 * 50_000, part, 0, i as u32);
        // 0.5 GB/s, until the paths are known to carry more, and then 2.5; four packets at a time, so that
        // the other path would be free for the next.
        if i % 4 == 3 {
            let pause = if i < 200 { 400 } else { 80 };
            pair.run(Duration::from_micros(pause));
        }
    }
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data);
    let [trusted, untrusted] = pair.sent[0];
    assert!(20 * untrusted < trusted, "{trusted} and {untrusted} bytes");
}

#[test]
fn without_a_trusted_path_chained_flows_wait_and_then_go_on() {
    let mut pair = Pair::connected();
    let data = text(100_000);
    pair.send(0, 1, &data[..50_000], 0, 1);
    pair.run(Duration::from_millis(200));
    pair.filter = Box::new(|_, path, _| path == 1);
    pair.run(Duration::from_secs(10));
    let before = pair.stream(1).len();
    pair.send(0, 50_001, &data[50_000..], 0, 2);
    pair.run(Duration::from_secs(2));
    assert_eq!(pair.stream(1).len(), before);
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(3));
    pair.assert_stream(1, &data);
}

#[test]
fn bare_data_passes_only_where_it_was_agreed() {
    let mut pair = Pair::with(Integrity::Off);
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    let data = text(300_000);
    for (i, part) in data.chunks(50_000).enumerate() {
        pair.send(0, 1 + i as u32 * 50_000, part, 0, i as u32);
        pair.run(Duration::from_millis(20));
    }
    pair.run(Duration::from_secs(1));
    pair.assert_stream(1, &data);
}

#[test]
fn strangers_and_garbage_are_counted_and_harmless() {
    let mut pair = Pair::agreeing(Handshake::Trusted);
    pair.run(Duration::from_secs(3));
    let from: SocketAddr = "10.9.9.9:1".parse().unwrap();
    for len in [0, 1, 15, 16, 40, 1400] {
        for kind in 0..8u8 {
            let mut bytes = vec![kind; len];
            pair.nodes[1].handle_datagram(pair.now, 0, from, &mut bytes);
            pair.nodes[1].handle_datagram(pair.now, 1, from, &mut bytes);
        }
    }
    let counters = pair.nodes[1].counters();
    assert!(counters.get(Counter::DatagramMalformed) > 0);
    assert!(counters.get(Counter::DatagramUnknownIndex) > 0);
    assert!(counters.get(Counter::HandshakeUntrusted) > 0);
    pair.send(0, 1, b"still here", 0, 1);
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.stream(1), b"still here");
}

#[test]
fn foreign_inner_addresses_do_not_come_out() {
    let mut pair = Pair::connected();
    // The receiving host no longer has the address.
    pair.nodes[1].set_addresses(vec!["10.0.1.77".parse().unwrap()]);
    pair.send(0, 1, b"for somebody else", 0, 1);
    pair.run(Duration::from_millis(100));
    assert!(pair.injected[1].is_empty());
    assert!(pair.nodes[1].counters().get(Counter::InnerAddress) > 0);
}

#[test]
fn control_messages_arrive_once_even_over_loss() {
    let mut pair = Pair::connected();
    let mut loses = dice(33);
    pair.filter = Box::new(move |_, _, _| !loses());
    for i in 0..40u8 {
        pair.nodes[0]
            .send_control(pair.now, 0, &[i; 100], None)
            .unwrap();
    }
    pair.run(Duration::from_secs(20));
    let mut got: Vec<u8> = pair.events[1]
        .iter()
        .filter_map(|e| match e {
            Event::Control { bytes, .. } => Some(bytes[0]),
            _ => None,
        })
        .collect();
    got.sort_unstable();
    assert_eq!(got, (0..40).collect::<Vec<u8>>());
}

#[test]
fn an_opaque_packet_larger_than_a_datagram_arrives_whole() {
    let mut pair = Pair::connected();
    let mut packet = vec![0u8; 4000];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&4000u16.to_be_bytes());
    // The first of several fragments.
    packet[6] = 0x20;
    packet[9] = packet::TCP;
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(a) => a.octets(),
        IpAddr::V6(_) => unreachable!("inner addresses here are IPv4"),
    };
    packet[12..16].copy_from_slice(&octets(inner(0)));
    packet[16..20].copy_from_slice(&octets(inner(1)));
    packet[2000] = 42;
    let node = &mut pair.nodes[0];
    let mut buffer = node.tun_buffer();
    buffer[..virtio::LEN].fill(0);
    buffer[virtio::LEN..virtio::LEN + 4000].copy_from_slice(&packet);
    node.handle_tun(pair.now, BUMP, buffer, virtio::LEN + 4000);
    let before = pair.sent[0][1];
    pair.run(Duration::from_millis(100));
    assert_eq!(pair.injected[1].len(), 1);
    assert_eq!(pair.injected[1][0][virtio::LEN..], packet);
    assert!(
        pair.sent[0][1] - before < 300,
        "only the trusted path carries it"
    );
}
