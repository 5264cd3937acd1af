//! All sessions of a node.

use core::time::Duration;
use std::collections::BTreeMap;

use dibs_settings::Handshake;
use x25519_dalek::{PublicKey, StaticSecret};

use super::cookie::{CookieJar, PublicMacs};
use super::established::Session;
use super::keys::{Integrity, KeyOrigin, PathId, Secret, SessionId, Suite};
use super::peer::{AddPeerError, HandshakePeer, Hurry, Indices, PeerId, PeerState};
use super::random::Random;
use super::rate_limit::HandshakeLimiter;
use super::seal::{self, KeyLimits, OpenError, Opened};
use crate::time::Time;

/// Configuration of a node's sessions.
pub struct Config {
    /// The node's static key; in a box, as what moves about leaves copies behind that nobody wipes.
    pub private: Box<StaticSecret>,
    /// The AEAD of sessions that this node initiates.
    pub suite: Suite,
    /// Has to be the same at both ends.
    pub integrity: Integrity,
    /// By which paths keys may be agreed.
    pub handshake: Handshake,
}

/// Claim of a data datagram about itself, which nobody has checked.
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

    /// Origin of the keys of the session to send by.
    pub fn origin(&self, now: Time, id: PeerId) -> Option<KeyOrigin> {
        self.peers[id.index()].sessions.origin(now)
    }

    /// True if a handshake with a peer by an untrusted path can be agreed to as things are, if the peer holds what we
    /// hold.
    pub fn may_go_by_untrusted(&self, id: PeerId) -> bool {
        match self.config.handshake {
            Handshake::Trusted => false,
            Handshake::Chained => self.peers[id.index()].is_secured(),
            Handshake::Any => true,
        }
    }

    /// True if handshakes that come by untrusted paths are read at all.
    pub fn reads_untrusted(&self) -> bool {
        self.config.handshake != Handshake::Trusted
    }

    /// True, from time to time, if the owner is to be told that [nothing secures](super::Dropped::Unsecured) a
    /// handshake with a peer.
    pub fn tell_unsecured(&mut self, now: Time, id: PeerId) -> bool {
        let is_wanted = self.config.handshake == Handshake::Chained;
        is_wanted && self.peers[id.index()].tell_unsecured(now)
    }

    /// Since when a peer has been called, if it is.
    pub fn calling_since(&self, id: PeerId) -> Option<Time> {
        let initiation = self.peers[id.index()].initiation.as_ref()?;
        Some(initiation.started)
    }

    /// Calls a peer at once that has been called in vain for so long that the next call would have to wait, within a
    /// budget.
    pub fn hurry(&mut self, now: Time, id: PeerId, cause: Hurry) {
        self.peers[id.index()].hurry(now, cause);
    }

    /// When a peer should be called by a trusted path, if there is one: the handshake of its session went by another.
    pub fn renewal_at(&self, id: PeerId) -> Option<Time> {
        self.peers[id.index()].renewal_at()
    }

    /// The session to send to a peer by.
    pub fn sending(&mut self, now: Time, id: PeerId) -> Option<&mut Session> {
        self.peers[id.index()].sessions.current(now)
    }

    /// True once for each session with a peer that stopped sending since its keys are used up.
    pub fn poll_exhausted(&mut self, id: PeerId) -> bool {
        self.peers[id.index()].sessions.poll_exhausted()
    }

    /// Claim of a data datagram about itself.
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
        if opened.authenticated {
            peer.chain.on_used(name);
        }
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

    /// Drops expired sessions, and returns the peers to [call](Self::initiate): again, or for a new session.
    pub fn handle_timeout(&mut self, now: Time) -> Vec<PeerId> {
        let mut due = Vec::new();
        for (index, peer) in self.peers.iter_mut().enumerate() {
            // Asked first, so that a host that slept through a session's end calls again.
            if peer.call_due(now) {
                due.push(PeerId::from_index(index as u32));
            }
            peer.sessions.expire(now, &mut self.indices);
        }
        due
    }
}
