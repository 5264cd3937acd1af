//! A peer with a valid key whose daemon sends what it is told: `dibs-core` with nothing around it
//! that would check.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use dibs_config::PublicKey;
use dibs_core::bump;
use dibs_core::node::{LocalPath, Node, NodeConfig, PeerConfig};
use dibs_core::session::{self, Integrity, StaticSecret, Suite};
use dibs_core::{Prefix, Time};
use dibs_wire::virtio;

use crate::daemon::SOON;
use crate::{Net, daemon};

/// The hostile daemon, in the place of `a`'s, on the trusted link.
pub struct HostilePeer {
    node: Node,
    socket: UdpSocket,
    began: Instant,
}

impl HostilePeer {
    /// Connects to the daemon of `b`.
    ///
    /// # Errors
    /// If no session comes about.
    pub fn connect(net: &Net) -> Result<Self> {
        let own = "10.0.1.1:5300";
        let socket = net.a.host.in_ns(|| UdpSocket::bind(own)).context(own)?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let everything = |any: IpAddr| Prefix::new(any, 0).context("a prefix without bits");
        let PublicKeys { private, public } = keys(net)?;
        let config = NodeConfig {
            private,
            suite: Suite::for_this_cpu(),
            integrity: Integrity::On,
            paths: vec![LocalPath {
                trusted: true,
                mtu: 1500,
                up: true,
                addresses: vec!["10.0.1.1".parse()?],
            }],
            peers: vec![PeerConfig {
                public,
                preshared: None,
                prefixes: vec![everything([0; 4].into())?, everything([0; 16].into())?],
                endpoints: vec![(0, "10.0.1.2:5300".parse()?)],
            }],
            addresses: Vec::new(),
            gateway: Vec::new(),
            trusted_share: 0.05,
            bumps: bump::ordinary(),
            hold_without_trusted: true,
        };
        let mut peer = Self {
            node: Node::new(Time::ZERO, config, [42; 32])?,
            socket,
            began: Instant::now(),
        };
        while !peer.node.paths().iter().any(|path| path.state == "active") {
            ensure!(peer.began.elapsed() < SOON, "no session comes about");
            peer.work()?;
        }
        Ok(peer)
    }

    /// Sends an IP packet for `b`'s TUN.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn send(&mut self, packet: &[u8]) -> Result<()> {
        let now = self.now();
        let mut buffer = self.node.tun_buffer();
        buffer[..virtio::LEN].fill(0);
        buffer[virtio::LEN..][..packet.len()].copy_from_slice(packet);
        let len = virtio::LEN + packet.len();
        self.node.handle_tun(now, bump::SCRAMBLE, buffer, len);
        self.work()
    }

    /// Sends and receives what there is.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn work(&mut self) -> Result<()> {
        let now = self.now();
        if self.node.poll_timeout().is_some_and(|due| due <= now) {
            let wall = SystemTime::now().duration_since(UNIX_EPOCH)?;
            self.node.handle_timeout(now, wall);
        }
        while let Some(transmit) = self.node.poll_transmit(now) {
            for datagram in transmit.bytes.chunks(transmit.segment) {
                self.socket.send_to(datagram, transmit.to)?;
            }
        }
        let mut datagram = [0; 65_536];
        // Nothing for a millisecond is no error.
        if let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
            let now = self.now();
            self.node
                .handle_datagram(now, 0, from, &mut datagram[..len]);
        }
        self.node.flush_injections();
        while let Some(injection) = self.node.poll_injection() {
            self.node.recycle(injection);
        }
        while self.node.poll_event().is_some() {}
        Ok(())
    }

    fn now(&self) -> Time {
        Time::ZERO + self.began.elapsed()
    }
}

struct PublicKeys {
    private: StaticSecret,
    public: session::PublicKey,
}

/// The private key of `a`, the public one of `b`.
fn keys(net: &Net) -> Result<PublicKeys> {
    Ok(PublicKeys {
        private: StaticSecret::from(*net.a.private_key()?.as_bytes()),
        public: public_key(&net.b)?,
    })
}

/// What everybody knows of a host who has its public key.
///
/// # Errors
/// If it cannot be read.
pub fn public_key(node: &daemon::Node) -> Result<session::PublicKey> {
    let public: PublicKey = node.private_key()?.public();
    Ok(session::PublicKey::from(*public.as_bytes()))
}

/// First handshake messages for this host, valid in all but that it does not know their sender.
///
/// # Errors
/// If its key cannot be read.
pub fn strangers_calls(to: &daemon::Node, number: usize) -> Result<Vec<Vec<u8>>> {
    let mut rng = session::SeededRandom::new([7; 32]);
    let config = session::Config {
        private: StaticSecret::from([77; 32]),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
    };
    let mut sessions = session::Sessions::new(config, Time::ZERO, &mut rng);
    let peer = sessions.add_peer(public_key(to)?, None)?;
    let wall = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let hello = session::Hello::default();
    let calls =
        (0..number).filter_map(|_| sessions.initiate(Time::ZERO, wall, peer, &hello, &mut rng));
    Ok(calls.collect())
}

/// An IPv4 UDP packet, as it is inside a bump.
pub fn udp_packet(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (from.ip(), to.ip()) else {
        panic!("IPv4 addresses, not {from} and {to}");
    };
    let udp = 8 + payload.len() as u16;
    let mut packet = vec![0x45, 0];
    packet.extend((20 + udp).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    packet.extend(src.octets());
    packet.extend(dst.octets());
    let sum: u32 = packet
        .as_chunks::<2>()
        .0
        .iter()
        .map(|word| u32::from(u16::from_be_bytes(*word)))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend(udp.to_be_bytes());
    // No UDP checksum (RFC 768).
    packet.extend([0, 0]);
    packet.extend(payload);
    packet
}
