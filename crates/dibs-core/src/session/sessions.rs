//! All sessions of a node.

use core::time::Duration;
use std::collections::BTreeMap;

use x25519_dalek::{PublicKey, StaticSecret};

use super::cookie::{CookieJar, PublicMacs};
use super::established::Session;
use super::keys::{Integrity, PathId, Secret, SessionId, Suite};
use super::message::Hello;
use super::peer::{AddPeerError, HandshakePeer, Indices, PeerId, PeerState};
use super::random::Random;
use super::rate_limit::HandshakeLimiter;
use super::seal::{self, KeyLimits, OpenError, Opened};
use crate::time::Time;

/// Who this node is, and what it wants of its sessions.
pub struct Config {
    /// The node's static key; in a box, as what moves about leaves copies behind that nobody wipes.
    pub private: Box<StaticSecret>,
    /// The AEAD of sessions that this node initiates.
    pub suite: Suite,
    /// Has to be the same at both ends.
    pub integrity: Integrity,
}

/// What a datagram of data says of itself, which nobody has checked.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The receiver index.
    index: u32,
    /// Whose session has that.
    pub peer: PeerId,
    /// A path of that peer.
    pub path: PathId,
}

/// A datagram of data, opened.
pub struct Received<'a> {
    /// From whom.
    pub peer: PeerId,
    /// By which session.
    pub session: SessionId,
    /// The initiator's first datagram by this session: it is now the one to send by.
    pub confirmed: bool,
    /// The datagram.
    pub opened: Opened<'a>,
}

/// A message 1 to be sent to a peer.
pub struct Transmit {
    /// To whom.
    pub peer: PeerId,
    /// The whole datagram.
    pub datagram: Vec<u8>,
}

/// All sessions and handshakes of a node; the [module](super) says how to drive it.
pub struct Sessions {
    pub(super) config: Config,
    pub(super) public: PublicKey,
    pub(super) macs: PublicMacs,
    pub(super) jar: CookieJar,
    pub(super) limiter: HandshakeLimiter,
    pub(super) limits: KeyLimits,
    /// By [`PeerId::index`].
    pub(super) peers: Vec<HandshakePeer>,
    by_key: BTreeMap<[u8; 32], PeerId>,
    pub(super) indices: Indices,
    /// Wall-clock time of our latest message 1: the next one is later, whatever the clock does.
    pub(super) last_wall: Duration,
}

impl Sessions {
    /// A node without peers.
    pub fn new(config: Config, now: Time, rng: &mut dyn Random) -> Self {
        let public = PublicKey::from(&*config.private);
        Self {
            public,
            macs: PublicMacs::new(&public),
            jar: CookieJar::new(now, rng),
            limiter: HandshakeLimiter::new(rng),
            limits: KeyLimits::default(),
            peers: Vec::new(),
            by_key: BTreeMap::new(),
            indices: Indices::default(),
            last_wall: Duration::ZERO,
            config,
        }
    }

    /// The same with other limits for the keys of sessions to come.
    #[must_use]
    pub fn with_key_limits(self, limits: KeyLimits) -> Self {
        Self { limits, ..self }
    }

    /// This node's public key.
    pub const fn public_key(&self) -> &PublicKey {
        &self.public
    }

    /// Adds a peer, with the key that both ends share beforehand if there is one.
    ///
    /// # Errors
    /// The public key is ours, or another peer's.
    pub fn add_peer(
        &mut self,
        public: PublicKey,
        psk: Option<Box<Secret>>,
    ) -> Result<PeerId, AddPeerError> {
        if public == self.public {
            return Err(AddPeerError::OwnKey);
        }
        if self.by_key.contains_key(public.as_bytes()) {
            return Err(AddPeerError::DuplicateKey);
        }
        let id = PeerId::from_index(self.peers.len() as u32);
        let psk = psk.unwrap_or_else(|| Box::new(Secret::new([0; 32])));
        self.peers.push(HandshakePeer::new(public, psk));
        self.by_key.insert(public.to_bytes(), id);
        Ok(id)
    }

    /// The peer that has this public key.
    pub fn peer_by_key(&self, public: &PublicKey) -> Option<PeerId> {
        self.by_key.get(public.as_bytes()).copied()
    }

    /// How far we are with a peer.
    pub fn state(&self, now: Time, id: PeerId) -> PeerState {
        let peer = &self.peers[id.index()];
        if peer.sessions.has_current(now) {
            PeerState::Established
        } else if peer.initiation.is_some() || peer.sessions.is_answering(now) {
            PeerState::Connecting
        } else {
            PeerState::Down
        }
    }

    /// The session to send to a peer by.
    pub fn sending(&mut self, now: Time, id: PeerId) -> Option<&mut Session> {
        self.peers[id.index()].sessions.current(now)
    }

    /// True once for each session with a peer that stopped sending since its keys are used up.
    pub fn poll_exhausted(&mut self, id: PeerId) -> bool {
        self.peers[id.index()].sessions.poll_exhausted()
    }

    /// What a data datagram says of itself.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn peek(&self, datagram: &[u8]) -> Result<Claim, OpenError> {
        let (index, path) = seal::receiver_and_path(datagram).ok_or(OpenError::Malformed)?;
        let peer = self.indices.peer(index).ok_or(OpenError::UnknownIndex)?;
        Ok(Claim { index, peer, path })
    }

    /// Authenticates and decrypts a data datagram in place, by whichever path it came.
    ///
    /// # Errors
    /// Every error means: drop, count. The bytes of the datagram are void then.
    pub fn open<'a>(
        &mut self,
        now: Time,
        datagram: &'a mut [u8],
    ) -> Result<Received<'a>, OpenError> {
        self.open_claimed(now, self.peek(datagram)?, datagram)
    }

    /// The same of one whose [claim](Self::peek) is known. One that came by another path than it claims is not to be
    /// opened: it must not even count as seen, for it may be a copy that overtook the true one.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_claimed<'a>(
        &mut self,
        now: Time,
        claim: Claim,
        datagram: &'a mut [u8],
    ) -> Result<Received<'a>, OpenError> {
        let Claim {
            index, peer: id, ..
        } = claim;
        let Self { indices, peers, .. } = self;
        let peer = &mut peers[id.index()];
        let session = peer.sessions.find(index).ok_or(OpenError::UnknownIndex)?;
        if session.expires_at() <= now {
            return Err(OpenError::Expired);
        }
        let name = session.id();
        let opened = session.open(datagram)?;
        let confirmed = opened.authenticated && peer.sessions.confirm(index, indices);
        if confirmed {
            peer.stop_calling(indices);
        }
        Ok(Received {
            peer: id,
            session: name,
            confirmed,
            opened,
        })
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        let due = self.peers.iter().filter_map(HandshakePeer::next_timeout);
        due.min()
    }

    /// Drops expired sessions, and returns the message 1 of every call and rekey that is due.
    pub fn handle_timeout(
        &mut self,
        now: Time,
        wall: Duration,
        mut hello_for: impl FnMut(PeerId) -> Hello,
        rng: &mut dyn Random,
    ) -> Vec<Transmit> {
        let mut transmits = Vec::new();
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            // Asked first, so that a host that slept through a session's end calls again.
            let due = peer.call_due(now);
            peer.sessions.expire(now, &mut self.indices);
            if due {
                let peer = PeerId::from_index(index as u32);
                let datagram = self.initiate(now, wall, peer, &hello_for(peer), rng);
                transmits.push(Transmit { peer, datagram });
            }
        }
        transmits
    }
}
