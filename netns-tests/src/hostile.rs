//! A peer with a valid key whose daemon sends what it is told: `dibs-core` with nothing around it
//! that would check.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use dibs_config::{PrivateKey, PublicKey};
use dibs_core::Time;
use dibs_core::bump;
use dibs_core::node::{ControlError, Event, LocalPath, Node, NodeConfig, PeerConfig};
use dibs_core::preference::Usage;
use dibs_core::session::{self, Integrity, StaticSecret, Suite};
use dibs_netns::Host;
use dibs_settings::{Handshake, Opening, Scheduler};
use dibs_wire::virtio;

use crate::daemon::SOON;
use crate::{Net, daemon};

/// The hostile daemon: in the place of `a`'s, on the trusted link, or elsewhere.
pub struct HostilePeer {
    node: Node,
    socket: UdpSocket,
    began: Instant,
    /// Messages of the daemon.
    heard: Vec<Vec<u8>>,
}

/// Who it is, and whom it calls.
struct Identity {
    private: Box<StaticSecret>,
    own: SocketAddr,
    peer: session::PublicKey,
    at: SocketAddr,
}

impl HostilePeer {
    /// Connects to the daemon of `b`.
    ///
    /// # Errors
    /// If no session comes about.
    pub fn connect(net: &Net) -> Result<Self> {
        let identity = Identity {
            private: Box::new(StaticSecret::from(*net.a.private_key()?.as_bytes())),
            own: "10.0.1.1:5300".parse()?,
            peer: public_key(&net.b)?,
            at: "10.0.1.2:5300".parse()?,
        };
        Self::between(&net.a.host, identity)
    }

    /// A peer of its own key, at this address of [`intruder`](Net::intruder), which connects to the daemon of
    /// `a`.
    ///
    /// # Errors
    /// If no session comes about.
    pub fn guest(net: &Net, host: &Host, own: SocketAddr, key: &PrivateKey) -> Result<Self> {
        let identity = Identity {
            private: Box::new(StaticSecret::from(*key.as_bytes())),
            own,
            peer: public_key(&net.a)?,
            at: "10.0.3.1:5300".parse()?,
        };
        Self::between(host, identity)
    }

    fn between(host: &Host, identity: Identity) -> Result<Self> {
        let Identity {
            private,
            own,
            peer,
            at,
        } = identity;
        let socket = host.in_ns(|| UdpSocket::bind(own));
        let socket = socket.with_context(|| own.to_string())?;
        socket.set_read_timeout(Some(Duration::from_millis(1)))?;
        let config = NodeConfig {
            private,
            suite: Suite::for_this_cpu(),
            integrity: Integrity::On,
            handshake: Handshake::Chained,
            paths: vec![LocalPath {
                trusted: true,
                mtu: 1500,
                up: true,
                usage: Usage::default(),
                addresses: vec![own.ip()],
                public: Vec::new(),
            }],
            peers: vec![PeerConfig {
                public: peer,
                preshared: None,
                // What they leave out is named: it refuses nothing itself.
                prefixes: {
                    "0.0.0.0/0 10.0.0.0/8 127.0.0.0/8 224.0.0.0/3 ::/0 fc00::/7".split(' ')
                }
                .map(str::parse)
                .collect::<Result<_, _>>()?,
                accept: vec![Opening::ANY],
                endpoints: vec![(0, at)],
                appears_as: Vec::new(),
            }],
            addresses: Vec::new(),
            reachable: Vec::new(),
            gateway: Vec::new(),
            exit: Vec::new(),
            trusted_share: 0.05,
            bumps: bump::ordinary(),
            pads: bump::Pads::new(&[43; 32]),
            hold_without_trusted: true,
            scheduler: Scheduler::default(),
            hint: None,
        };
        let mut peer = Self {
            node: Node::new(Time::ZERO, config, [own.port() as u8; 32])?,
            socket,
            began: Instant::now(),
            heard: Vec::new(),
        };
        while !peer.node.paths().iter().any(|path| path.state == "active") {
            ensure!(peer.began.elapsed() < SOON, "no session comes about");
            peer.work()?;
        }
        Ok(peer)
    }

    /// Sends a message to the daemon, or has it wait for its turn; false if too many do.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn say(&mut self, message: &[u8]) -> Result<bool> {
        let said = self.node.send_control(self.now(), 0, message, None);
        match said {
            Err(ControlError::TooMany) => Ok(false),
            said => Ok(said.map(|()| true)?),
        }
    }

    /// The messages of the daemon since it was last asked for them.
    pub fn heard(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.heard)
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

    /// Sends what there is, and receives a datagram.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn work(&mut self) -> Result<()> {
        let now = self.now();
        if self.node.poll_timeout().is_some_and(|due| due.at <= now) {
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
        while let Some(event) = self.node.poll_event() {
            if let Event::Control { peer, bytes } = event {
                self.node.control_done(peer);
                self.heard.push(bytes);
            }
        }
        Ok(())
    }

    fn now(&self) -> Time {
        Time::ZERO + self.began.elapsed()
    }
}

/// Public key of a host, which everybody knows.
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
        private: Box::new(StaticSecret::from([77; 32])),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: Handshake::Any,
    };
    let mut sessions = session::Sessions::new(config, Time::ZERO, &mut rng);
    let peer = sessions.add_peer(public_key(to)?, None)?;
    let wall = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let hello = session::Hello::default();
    let calls = (0..number).map(|_| {
        sessions.initiate(
            Time::ZERO,
            wall,
            peer,
            session::Way::new(true),
            &hello,
            &mut rng,
        )
    });
    Ok(calls.collect())
}
