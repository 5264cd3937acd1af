//! A host with a node, and what has to hold of everything that the node puts out.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump;
use dibs_core::node::{Event, LocalPath, Node, NodeConfig, PeerConfig};
use dibs_core::preference::Usage;
use dibs_core::session::{Integrity, PublicKey, Secret, StaticSecret, Suite};
use dibs_settings::{BumpId, Handshake, Opening, Scheduler};
use dibs_wire::virtio::VirtioHdr;
use dibs_wire::{FlowKey, Packet, packet, virtio};

use crate::views;

pub(crate) const BUMP: BumpId = bump::SCRAMBLE;
/// Of the two links: 0 is trusted, 1 is not.
pub(crate) const MTU: u16 = 1500;
/// Sends, packets and rounds after which a node that still has some is taken to go on for ever.
const ENDLESS: usize = 200_000;
/// What a peer may make a node hold out of order (docs/architecture.md, Bounds).
const MAX_HELD: usize = 32 << 20;
const MAX_PATHS: usize = 32;
/// Unacknowledged bytes, and one send of 64 KiB more.
const MAX_WAITING: usize = (96 << 20) + (64 << 10);

pub(crate) fn key(host: usize) -> StaticSecret {
    StaticSecret::from([7 + 2 * host as u8; 32])
}

pub(crate) fn addr(host: usize, path: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::from([10, 0, path as u8 + 1, host as u8 + 1]), 5300)
}

/// An address of a host's kernel.
pub(crate) fn inner(host: usize, ipv6: bool) -> IpAddr {
    if ipv6 {
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host as u16 + 1))
    } else {
        IpAddr::from([10, 0, 1, host as u8 + 1])
    }
}

/// One of a few connections as `host` sends; every other one is IPv6.
pub(crate) fn tuple(host: usize, conn: usize) -> FlowKey {
    let ipv6 = conn % 2 == 1;
    let tuple = FlowKey::tcp((inner(0, ipv6), 40_000 + conn as u16), (inner(1, ipv6), 80));
    if host == 0 { tuple } else { tuple.reversed() }
}

pub(crate) fn preshared() -> Box<Secret> {
    Box::new(Secret::new([3; 32]))
}

/// What the lowest bit of a scene says.
pub(crate) fn integrity(scene: u8) -> Integrity {
    match scene & 1 {
        0 => Integrity::On,
        _ => Integrity::Off,
    }
}

pub(crate) fn suite(other: bool) -> Suite {
    if other {
        Suite::ChaCha20Poly1305
    } else {
        Suite::Aes256Gcm
    }
}

pub(crate) fn wall(now: Time) -> Duration {
    Duration::from_secs(1_000_000) + now.since(Time::ZERO)
}

/// What came out of a node.
#[derive(Default)]
pub(crate) struct Outputs {
    /// Local path, destination, datagram.
    pub(crate) datagrams: Vec<(usize, SocketAddr, Vec<u8>)>,
    /// Virtio header and packet.
    pub(crate) frames: Vec<Vec<u8>>,
    pub(crate) events: Vec<Event>,
}

/// A node and the number of its host, 0 or 1.
pub(crate) struct Host {
    pub(crate) node: Node,
    number: usize,
    /// What its kernel sends by.
    pub(crate) bump: BumpId,
}

impl Host {
    /// A node that calls its peer, or waits to be called.
    pub(crate) fn new(number: usize, calls: bool, integrity: Integrity, seed: u8) -> Self {
        let other = 1 - number;
        let paths = [(0, true), (1, false)].map(|(path, trusted)| LocalPath {
            trusted,
            mtu: MTU,
            up: true,
            usage: Usage::default(),
            addresses: vec![addr(number, path).ip()],
            public: Vec::new(),
        });
        let endpoints = (0..2).map(|path| (path, addr(other, path)));
        let config = NodeConfig {
            private: Box::new(key(number)),
            suite: suite(seed & 1 != 0),
            integrity,
            handshake: Handshake::Chained,
            paths: paths.to_vec(),
            peers: vec![PeerConfig {
                public: PublicKey::from(&key(other)),
                preshared: Some(preshared()),
                prefixes: [false, true].map(|ipv6| inner(other, ipv6).into()).to_vec(),
                accept: vec![Opening::ANY],
                endpoints: endpoints.filter(|_| calls).collect(),
                appears_as: Vec::new(),
            }],
            addresses: vec![inner(number, false), inner(number, true)],
            reachable: Vec::new(),
            gateway: Vec::new(),
            exit: Vec::new(),
            trusted_share: 0.05,
            bumps: bump::ordinary(),
            pads: bump::Pads::new(&[!seed; 32]),
            hold_without_trusted: true,
            scheduler: Scheduler::default(),
            hint: None,
        };
        let node = Node::new(Time::ZERO, config, [seed; 32]).expect("two different keys");
        Self {
            node,
            number,
            bump: BUMP,
        }
    }

    /// Gives the node a frame that its TUN handed over.
    pub(crate) fn hand_tun(&mut self, now: Time, frame: &[u8]) {
        let mut buffer = self.node.tun_buffer();
        buffer[..frame.len()].copy_from_slice(frame);
        self.node.handle_tun(now, self.bump, buffer, frame.len());
    }

    /// Takes everything out that is to go, and checks it.
    pub(crate) fn outputs(&mut self, now: Time) -> Outputs {
        let mut out = Outputs::default();
        let node = &mut self.node;
        while let Some(transmit) = node.poll_transmit(now) {
            assert!(transmit.path < 2, "it leaves by a path that there is");
            assert!(!transmit.bytes.is_empty() && transmit.segment > 0);
            for datagram in transmit.bytes.chunks(transmit.segment) {
                assert!(
                    datagram.len() <= usize::from(MTU) - 28,
                    "a datagram of {} bytes does not fit the MTU",
                    datagram.len()
                );
                out.datagrams
                    .push((transmit.path, transmit.to, datagram.to_vec()));
            }
            assert!(out.datagrams.len() < ENDLESS, "sending has an end");
        }
        node.flush_injections();
        while let Some(injection) = node.poll_injection() {
            assert!(injection.bump <= bump::SEAL, "a TUN that there is");
            self::check_frame(injection.frame(), self.number);
            out.frames.push(injection.frame().to_vec());
            node.recycle(injection);
            assert!(out.frames.len() < ENDLESS, "injecting has an end");
        }
        while let Some(event) = node.poll_event() {
            if let Event::Control { peer, .. } = event {
                node.control_done(peer);
            }
            out.events.push(event);
            assert!(out.events.len() < ENDLESS, "events have an end");
        }
        out
    }

    /// Does what is due at `now`, and gives what comes out of it to `take`.
    pub(crate) fn timeouts(&mut self, now: Time, mut take: impl FnMut(Outputs)) {
        for _ in 0..64 {
            if self.node.poll_timeout().is_none_or(|due| due.at > now) {
                return;
            }
            self.node.handle_timeout(now, wall(now));
            take(self.outputs(now));
        }
        panic!(
            "due at {:?}, still so after 64 rounds at {now:?}",
            self.node.poll_timeout()
        );
    }

    /// The bounds of docs/architecture.md.
    pub(crate) fn check_bounds(&self, now: Time) {
        for peer in self.node.peers(now) {
            assert!(peer.held <= MAX_HELD, "{peer:?}");
            assert!(peer.unacknowledged <= MAX_WAITING, "{peer:?}");
        }
        assert!(self.node.paths().len() <= MAX_PATHS);
    }
}

/// What the node of `host` gives to its kernel is a packet from the peer's host to this one, of
/// exactly its own length, that the kernel and the software segmentation can take.
fn check_frame(frame: &[u8], host: usize) {
    let (header, packet) = frame
        .split_first_chunk::<{ virtio::LEN }>()
        .expect("a virtio header stands in front");
    let header = VirtioHdr::decode(header).expect("the virtio header is one of ours");
    assert!(packet.len() <= 65_535, "an IP packet");
    let parsed = packet::parse(packet).expect("an IP packet");
    let (src, dst) = match parsed {
        Packet::Tcp(s) => (s.tuple.src, s.tuple.dst),
        Packet::Opaque(o) => {
            // Behind extension headers stands TCP or ICMPv6, too.
            let carried = match o.src.is_ipv6() {
                false => matches!(o.protocol, packet::TCP | packet::ICMP),
                true => matches!(o.protocol, 0 | 44 | 60 | packet::TCP | packet::ICMPV6),
            };
            assert!(carried, "protocol {}", o.protocol);
            (o.src, o.dst)
        }
    };
    assert_eq!(
        parsed.own_len(),
        packet.len(),
        "nothing stands behind the packet"
    );
    let ipv6 = src.is_ipv6();
    assert_eq!(src, inner(1 - host, ipv6), "from the peer's host");
    assert_eq!(dst, inner(host, ipv6), "to this host");
    views::check_segmentation(&header, frame);
}
