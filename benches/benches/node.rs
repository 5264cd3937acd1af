//! The core alone: superpackets of 64 KiB from one node's TUN to the other's, over a wire that costs
//! nothing, acknowledgements included. And what tiny chunks cost who restores them.

use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use dibs_core::Time;
use dibs_core::bump::{self, Decode};
use dibs_core::node::{LocalPath, Node, NodeConfig, PeerConfig};
use dibs_core::preference::Usage;
use dibs_core::session::{Integrity, PublicKey, StaticSecret, Suite};
use dibs_core::stream::rx::{Decoders, Piece, RxStream, Sink, Store};
use dibs_settings::{Handshake, Opening, Scheduler};
use dibs_wire::checksum::crc32c;
use dibs_wire::emit::{Headers, MAX_HEADERS};
use dibs_wire::frame::{BASE_OFFSET, TcpFields};
use dibs_wire::packet::{IpMeta, flags};
use dibs_wire::{FlowKey, SeqNumber};

const PAYLOAD: usize = 64 * 1024 - 512;
/// Virtual time between superpackets: 9.5 Gbit/s.
const STEP: Duration = Duration::from_micros(55);

fn inner(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 1, host as u8 + 1])
}

fn addr(host: usize, path: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::from([10, 0, path as u8 + 1, host as u8 + 1]), 5300)
}

struct Wire {
    nodes: [Node; 2],
    now: Time,
    seq: u32,
    /// Datagrams on their way: (receiver, path, from, segment, bytes).
    flying: Vec<(usize, usize, SocketAddr, usize, Vec<u8>)>,
    spare: Vec<Vec<u8>>,
    delivered: usize,
    /// By each node's work, acknowledgements included.
    spent: [Duration; 2],
}

impl Wire {
    fn new(paths: usize, integrity: Integrity) -> Self {
        let keys = [StaticSecret::from([7; 32]), StaticSecret::from([9; 32])];
        let node = |host: usize| {
            let config = NodeConfig {
                private: Box::new(keys[host].clone()),
                suite: Suite::for_this_cpu(),
                integrity,
                handshake: Handshake::Chained,
                paths: (0..paths)
                    .map(|p| LocalPath {
                        trusted: p == 0,
                        mtu: 1500,
                        up: true,
                        usage: Usage::default(),
                        addresses: vec![addr(host, p).ip()],
                        public: Vec::new(),
                    })
                    .collect(),
                peers: vec![PeerConfig {
                    public: PublicKey::from(&keys[1 - host]),
                    preshared: None,
                    prefixes: vec![inner(1 - host).into()],
                    accept: vec![Opening::ANY],
                    endpoints: if host == 0 {
                        (0..paths).map(|p| (p, addr(1, p))).collect()
                    } else {
                        Vec::new()
                    },
                    appears_as: Vec::new(),
                }],
                addresses: vec![inner(host)],
                reachable: Vec::new(),
                gateway: Vec::new(),
                exit: Vec::new(),
                trusted_share: 0.05,
                bumps: bump::ordinary(),
                pads: bump::Pads::new(&[host as u8 + 2; 32]),
                hold_without_trusted: true,
                scheduler: Scheduler::default(),
                hint: None,
            };
            Node::new(Time::ZERO, config, [host as u8; 32]).expect("two different keys")
        };
        let mut wire = Self {
            nodes: [node(0), node(1)],
            now: Time::ZERO + Duration::from_secs(1),
            seq: 0,
            flying: Vec::new(),
            spare: Vec::new(),
            delivered: 0,
            spent: [Duration::ZERO; 2],
        };
        for _ in 0..20_000 {
            wire.now += Duration::from_micros(100);
            wire.turn();
        }
        for _ in 0..2_000 {
            wire.superpacket();
        }
        assert!(
            wire.delivered > 1_000,
            "the path is open: {}",
            wire.delivered
        );
        wire
    }

    fn superpacket(&mut self) {
        let tuple = FlowKey::tcp((inner(0), 40_000), (inner(1), 80));
        let headers = Headers {
            tuple,
            meta: IpMeta {
                tos: 0,
                ttl: 64,
                flow_label: 0,
            },
            seq: SeqNumber::new(self.seq),
            ack: SeqNumber::new(5),
            flags: flags::ACK,
            window: 1000,
            urgent: 0,
            timestamps: Some((self.seq >> 16, 1)),
            options: None,
        };
        self.seq = self.seq.wrapping_add(PAYLOAD as u32);
        let begin = Instant::now();
        let mut buffer = self.nodes[0].tun_buffer();
        headers.write(&mut buffer[..MAX_HEADERS], PAYLOAD, 1448);
        self.nodes[0].handle_tun(
            self.now,
            bump::SCRAMBLE,
            buffer,
            headers.encoded_len() + PAYLOAD,
        );
        self.spent[0] += begin.elapsed();
        self.now += STEP;
        self.turn();
    }

    /// Lets both nodes do what they can at this time.
    fn turn(&mut self) {
        loop {
            for host in 0..2 {
                let node = &mut self.nodes[host];
                let mut begin = Instant::now();
                if node.poll_timeout().is_some_and(|due| due.at <= self.now) {
                    node.handle_timeout(self.now, Duration::from_secs(1));
                }
                while let Some(t) = node.poll_transmit(self.now) {
                    // The copy is the wire's.
                    self.spent[host] += begin.elapsed();
                    let mut bytes = self.spare.pop().unwrap_or_default();
                    bytes.clear();
                    bytes.extend_from_slice(t.bytes);
                    self.flying
                        .push((1 - host, t.path, addr(host, t.path), t.segment, bytes));
                    begin = Instant::now();
                }
                self.spent[host] += begin.elapsed();
            }
            if self.flying.is_empty() {
                return;
            }
            for (to, path, from, segment, mut bytes) in self.flying.drain(..) {
                let begin = Instant::now();
                for datagram in bytes.chunks_mut(segment) {
                    self.nodes[to].handle_datagram(self.now, path, from, datagram);
                }
                self.spent[to] += begin.elapsed();
                self.spare.push(bytes);
            }
            for (node, spent) in self.nodes.iter_mut().zip(&mut self.spent) {
                let begin = Instant::now();
                node.flush_injections();
                while let Some(injection) = node.poll_injection() {
                    black_box(injection.frame());
                    node.recycle(injection);
                    self.delivered += 1;
                }
                while node.poll_event().is_some() {}
                *spent += begin.elapsed();
            }
        }
    }
}

fn node(c: &mut Criterion) {
    let mut group = c.benchmark_group("node");
    group.throughput(Throughput::Bytes(PAYLOAD as u64));
    for (name, paths, integrity) in [
        ("one-path", 1, Integrity::On),
        ("two-paths", 2, Integrity::On),
        ("bare", 1, Integrity::Off),
    ] {
        let mut wire = Wire::new(paths, integrity);
        group.bench_function(name, |b| b.iter(|| wire.superpacket()));
    }
    for (host, name) in ["sender", "receiver"].into_iter().enumerate() {
        let mut wire = Wire::new(1, Integrity::On);
        group.bench_function(name, |b| {
            b.iter_custom(|rounds| {
                let before = wire.spent[host];
                (0..rounds).for_each(|_| wire.superpacket());
                wire.spent[host] - before
            });
        });
    }
    group.finish();
}

/// Bytes as they are, each chunk for itself.
struct AsTheyAre;

impl Decoders for AsTheyAre {
    fn epoch(&self, _: u32) -> Option<Box<dyn Decode>> {
        None
    }

    fn solo(&self, _: u32, _: u64) -> Option<Box<dyn Decode>> {
        None
    }

    fn has_crc(&self) -> bool {
        true
    }
}

/// A kernel that has no use for what it gets.
struct Nowhere([u8; 1]);

impl Sink for Nowhere {
    fn room(&mut self, _: u64, _: &TcpFields<'_>, len: usize) -> &mut [u8] {
        &mut self.0[..len]
    }

    fn commit(&mut self) {}

    fn retract(&mut self) {}
}

/// Four epochs that wait for a gap, and solo chunks of a byte each that never close it.
struct Tiny {
    stream: RxStream,
    store: Store,
    sink: Nowhere,
}

impl Tiny {
    fn new() -> Self {
        let mut tiny = Self {
            stream: RxStream::default(),
            store: Store::new(32 << 20),
            sink: Nowhere([0]),
        };
        for epoch in 1..=4 {
            tiny.chunk(epoch, false, 0);
            tiny.chunk(epoch, false, 1 << 20);
        }
        tiny
    }

    fn chunk(&mut self, epoch: u32, solo: bool, at: u64) {
        let bytes = [at as u8];
        let piece = Piece {
            solo,
            first: !solo && at == 0,
            early: false,
            ahead: 0,
            withheld: false,
            epoch,
            offset: BASE_OFFSET + at,
            crc: crc32c(&bytes),
            tcp: &TcpFields::EMPTY,
            bytes: &bytes,
        };
        let outcome = self
            .stream
            .chunk(&piece, &AsTheyAre, &mut self.store, &mut self.sink);
        black_box(outcome);
    }
}

/// What each of so many chunks costs, all of which are kept: the same, however many there are.
fn tiny_chunks(c: &mut Criterion) {
    let mut group = c.benchmark_group("tiny-chunks");
    for kept in [64, 512, 4096] {
        group.throughput(Throughput::Elements(kept));
        group.bench_function(kept.to_string(), |b| {
            b.iter_batched_ref(
                Tiny::new,
                |tiny| (1..=kept).for_each(|at| tiny.chunk(4, true, at)),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, node, tiny_chunks);
criterion_main!(benches);
