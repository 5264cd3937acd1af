//! One peer: who it is, its sessions in use, and the handshake under way with it.

use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;
use x25519_dalek::PublicKey;

use super::chain::{Chain, ChainSecret, Moment};
use super::cookie::{Mac, PublicMacs};
use super::established::Session;
use super::handshake::{Dropped, FAR_RETRY};
use super::keys::{KeyOrigin, Role, Secret};
use super::message::Timestamp;
use super::noise::Noise;
use super::random::Random;
use super::rate_limit::{Bucket, Rate};
use crate::time::Time;

/// Sessions kept to receive late datagrams by. Calls of both ends for age and for volume can make as many
/// within the time that a datagram is under way on a far path.
const PREVIOUS_SESSIONS: usize = 3;
/// How long we wait for the confirmation of a session before calling again ourselves.
pub(super) const CONFIRMATION: Duration = Duration::from_secs(1);
/// For how long after our first message 1 the smaller public key makes us ignore the peer's.
/// Later ones show that ours do not get through.
const TIE_BREAK: Duration = Duration::from_secs(2);
/// For how long the peer's calls go before ours. No longer, for they may be recordings: who
/// restarted does not remember which timestamps it has seen.
const YIELDING: Duration = Duration::from_secs(5);
/// Age at which a session whose handshake went by an untrusted path is followed by one by a trusted path, if there is
/// one again. The responder leaves it to the initiator for a while.
const INITIATOR_RENEWAL: Duration = Duration::from_secs(5);
const RESPONDER_RENEWAL: Duration = Duration::from_secs(10);
/// Reading a message 1 of a peer from where it is, whoever else sends from there.
const OWN: Rate = Rate {
    burst: 4,
    each: Duration::from_secs(1),
};
/// Calls that are made early, as there is cause to: connections may ask for a peer all day that is gone.
const EARLY: Rate = Rate {
    burst: 16,
    each: Duration::from_secs(300),
};
/// Between two times that the owner is told that nothing secures a handshake.
const TELL_UNSECURED: Duration = Duration::from_secs(60);

/// A peer of this node, as long as the node runs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerId(u32);

impl PeerId {
    pub(super) const fn from_index(index: u32) -> Self {
        Self(index)
    }

    /// Counted from 0 in the order of adding; not reused.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Why a peer was not added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AddPeerError {
    /// The key is this node's own.
    #[error("the peer has this host's own public key")]
    OwnKey,
    /// Another peer has this key.
    #[error("another peer has the same public key")]
    DuplicateKey,
}

/// Cause to call a peer early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hurry {
    /// A local connection has data for it.
    Wanted,
    /// The peer may be within reach again: a path, an address or an endpoint changed, or something of its came.
    Reachable,
}

/// How far we are with a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PeerState {
    /// There is a session to send by.
    Established,
    /// A handshake is under way.
    Connecting,
    /// Neither.
    Down,
}

/// The receiver indices given out: random, so that they tell an observer nothing, and unique.
#[derive(Default)]
pub(super) struct Indices {
    peers: BTreeMap<u32, PeerId>,
}

impl Indices {
    /// A free index, from now on `peer`'s.
    pub(super) fn allocate(&mut self, peer: PeerId, rng: &mut dyn Random) -> u32 {
        let mut bytes = [0; 4];
        rng.fill(&mut bytes);
        let mut index = u32::from_ne_bytes(bytes);
        while self.peers.contains_key(&index) {
            index = index.wrapping_add(1);
        }
        self.peers.insert(index, peer);
        index
    }

    pub(super) fn free(&mut self, index: u32) {
        let owner = self.peers.remove(&index);
        assert!(owner.is_some(), "an index is freed once");
    }

    /// Whose `index` is.
    pub(super) fn peer(&self, index: u32) -> Option<PeerId> {
        self.peers.get(&index).copied()
    }

    /// The same, among `peers`.
    pub(super) fn owner<'a>(
        &self,
        peers: &'a mut [HandshakePeer],
        index: u32,
    ) -> Option<(PeerId, &'a mut HandshakePeer)> {
        let id = self.peer(index)?;
        Some((id, &mut peers[id.index()]))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }
}

/// The sessions with one peer. A new one takes over only once it is known to work at both ends.
#[derive(Default)]
pub(super) struct PeerSessions {
    /// The one to send by.
    current: Option<Session>,
    /// One that we answered, and that the initiator has not used yet: receive only, for message
    /// 1 could have been sent long ago.
    next: Option<Session>,
    /// Since when there has been such a one, be it the same or not.
    answering: Option<Time>,
    /// Receive only, the newest first.
    previous: Vec<Session>,
}

impl PeerSessions {
    /// The session to send by.
    pub(super) fn current(&mut self, now: Time) -> Option<&mut Session> {
        self.current
            .as_mut()
            .filter(|session| session.may_send(now))
    }

    pub(super) fn has_current(&self, now: Time) -> bool {
        self.current
            .as_ref()
            .is_some_and(|session| session.may_send(now))
    }

    /// True once, when the current session has used up its keys.
    pub(super) fn poll_exhausted(&mut self) -> bool {
        self.current.as_mut().is_some_and(Session::poll_exhausted)
    }

    /// Whether a peer that called is about to confirm our answer. Not for long: what was answered
    /// may have been a recording, and as many of them as somebody has may follow.
    pub(super) fn is_answering(&self, now: Time) -> bool {
        self.answering
            .is_some_and(|since| now.since(since) < CONFIRMATION)
    }

    /// The session whose datagrams carry `index`.
    pub(super) fn find(&mut self, index: u32) -> Option<&mut Session> {
        self.current
            .iter_mut()
            .chain(&mut self.next)
            .chain(&mut self.previous)
            .find(|session| session.local_index() == index)
    }

    /// Takes a session that we initiated: the answer proved that the peer has it.
    pub(super) fn install_initiated(&mut self, session: Session, indices: &mut Indices) {
        // The peer may be sending by the one that waits, which so becomes the newest of the
        // previous ones; promoting it later would set the two ends apart.
        self.answering = None;
        let replaced = [self.current.replace(session), self.next.take()];
        self.retire(replaced, indices);
    }

    /// Takes a session that we answered: it waits for the initiator's first datagram.
    pub(super) fn install_answered(&mut self, now: Time, session: Session, indices: &mut Indices) {
        self.answering.get_or_insert(now);
        if let Some(unused) = self.next.replace(session) {
            indices.free(unused.local_index());
        }
    }

    /// Notes that an authenticated datagram came by `index`; true if that makes a session current.
    pub(super) fn confirm(&mut self, index: u32, indices: &mut Indices) -> bool {
        let Some(next) = self.next.take_if(|session| session.local_index() == index) else {
            return false;
        };
        self.answering = None;
        let replaced = [self.current.replace(next)];
        self.retire(replaced, indices);
        true
    }

    fn retire<const N: usize>(&mut self, replaced: [Option<Session>; N], indices: &mut Indices) {
        for session in replaced.into_iter().flatten() {
            self.previous.insert(0, session);
        }
        let keep = self.previous.len().min(PREVIOUS_SESSIONS);
        for session in self.previous.drain(keep..) {
            indices.free(session.local_index());
        }
    }

    /// Drops what is past its lifetime at `now`.
    pub(super) fn expire(&mut self, now: Time, indices: &mut Indices) {
        self.drop_if(indices, |session| session.expires_at() <= now);
    }

    fn drop_if(&mut self, indices: &mut Indices, gone: impl Fn(&Session) -> bool) {
        if self.next.as_ref().is_some_and(&gone) {
            self.answering = None;
        }
        let slots = [&mut self.current, &mut self.next];
        let dropped = slots
            .into_iter()
            .filter_map(|slot| slot.take_if(|session| gone(session)));
        for session in dropped.chain(self.previous.extract_if(.., |session| gone(session))) {
            indices.free(session.local_index());
        }
    }

    /// When the first of them expires.
    pub(super) fn next_expiry(&self) -> Option<Time> {
        let sessions = self.current.iter().chain(&self.next).chain(&self.previous);
        sessions.map(Session::expires_at).min()
    }

    /// Origin of the current session's keys.
    pub(super) fn origin(&self, now: Time) -> Option<KeyOrigin> {
        let current = self.current.as_ref();
        let usable = current.filter(|session| session.may_send(now));
        usable.map(Session::origin)
    }

    /// When the current session should be followed by one whose handshake goes by a trusted path.
    fn renewal_at(&self) -> Option<Time> {
        let current = self.current.as_ref();
        let session = current.filter(|session| session.origin() != KeyOrigin::Trusted)?;
        let age = match session.role() {
            Role::Initiator => INITIATOR_RENEWAL,
            Role::Responder => RESPONDER_RENEWAL,
        };
        Some(session.created() + age)
    }

    /// When the current session should be followed by another.
    pub(super) fn rekey_at(&self) -> Option<Time> {
        self.current.as_ref().map(Session::rekey_at)
    }
}

/// Our own call to a peer, until a session is confirmed.
pub(super) struct Initiation {
    /// When the first message 1 of this call was sent.
    pub(super) started: Time,
    /// When there was cause to hurry the last time.
    pub(super) hurried: Time,
    pub(super) attempts: u32,
    /// It was repeated early, since the peer called too.
    pub(super) repeated: bool,
    pub(super) retry_at: Time,
    /// The latest message 1; none while we let the peer's own go first.
    pub(super) sent: Option<SentInitiation>,
}

impl Initiation {
    /// The message 1 that carried `index`, if it may still be answered.
    pub(super) fn awaiting(&mut self, index: u32) -> Option<&mut SentInitiation> {
        self.sent.as_mut().filter(|sent| sent.local_index == index)
    }

    /// The peer called, too: it is there, and may not have been when our message 1 was sent. If it was,
    /// that costs less than a round trip, for the answer to the first one is worthless then. Once only: the
    /// peer's may be a recording.
    pub(super) fn repeat_now(&mut self, now: Time) {
        if !std::mem::replace(&mut self.repeated, true) {
            self.retry_at = self.retry_at.min(now);
        }
    }
}

/// A message 1 that may still be answered.
pub(super) struct SentInitiation {
    pub(super) at: Time,
    pub(super) local_index: u32,
    pub(super) noise: Noise,
    /// We call the path trusted that it went by.
    pub(super) trusted: bool,
    /// The secrets that it named, and when.
    pub(super) named: Vec<Arc<ChainSecret>>,
    pub(super) began: Moment,
    /// What a cookie reply is tied to.
    pub(super) mac1: Mac,
}

/// All that is kept about one peer.
pub(super) struct HandshakePeer {
    pub(super) public: PublicKey,
    /// The preshared key; zeros if there is none.
    pub(super) psk: Box<Secret>,
    pub(super) has_psk: bool,
    pub(super) chain: Chain,
    pub(super) macs: PublicMacs,
    /// The peer's latest cookie, and when it came.
    pub(super) cookie: Option<(Time, Mac)>,
    /// The latest message 1 of the peer: none older is answered.
    pub(super) latest: Option<Timestamp>,
    /// When it was told the last time that a message 1 of the peer was too old.
    pub(super) outdated: Option<Time>,
    /// When the owner was told the last time that nothing secures a handshake by an untrusted path.
    unsecured: Option<Time>,
    /// How long its latest answer took, by a path that we call untrusted, and by a trusted one.
    pub(super) answered_within: [Option<Duration>; 2],
    /// Budget of its calls from where it is, beyond that of others.
    own: Bucket,
    /// Budgets of our own calls to it that are made early, by [`Hurry`].
    early: [Bucket; 2],
    pub(super) initiation: Option<Initiation>,
    pub(super) sessions: PeerSessions,
}

impl HandshakePeer {
    pub(super) fn new(public: PublicKey, psk: Option<Box<Secret>>) -> Self {
        let has_psk = psk.is_some();
        Self {
            public,
            psk: psk.unwrap_or_else(|| Box::new(Secret::new([0; 32]))),
            has_psk,
            chain: Chain::default(),
            macs: PublicMacs::new(&public),
            cookie: None,
            latest: None,
            outdated: None,
            unsecured: None,
            answered_within: [None; 2],
            own: Bucket::default(),
            early: [Bucket::default(); 2],
            initiation: None,
            sessions: PeerSessions::default(),
        }
    }

    /// Our message 1 that carried `index`, if it may still be answered.
    pub(super) fn awaiting(&mut self, index: u32) -> Option<&mut SentInitiation> {
        self.initiation.as_mut()?.awaiting(index)
    }

    /// True if a handshake with what is held now has a secret in it that nobody knows who records untrusted paths.
    pub(super) fn is_secured(&self) -> bool {
        self.has_psk || self.chain.has_sound()
    }

    /// True if one more message 1 from where the peer is may be read.
    pub(super) fn admit_own(&mut self, now: Time) -> bool {
        self.own.take(now, OWN)
    }

    /// Has a call that waits go on at once, and be repeated for a while as often as one that has just begun.
    pub(super) fn hurry(&mut self, now: Time, cause: Hurry) {
        let waits = |call: &&mut Initiation| call.retry_at > now + FAR_RETRY;
        if let Some(call) = self.initiation.as_mut().filter(waits)
            && self.early[cause as usize].take(now, EARLY)
        {
            call.hurried = now;
            call.retry_at = now;
        }
    }

    /// True if the owner is to be told that nothing secures a handshake by an untrusted path.
    pub(super) fn tell_unsecured(&mut self, now: Time) -> bool {
        let known = |told| now.since(told) < TELL_UNSECURED;
        let tells = !self.unsecured.is_some_and(known);
        if tells {
            self.unsecured = Some(now);
        }
        tells
    }

    /// When a call by a trusted path should follow a handshake by an untrusted one, if there is no call under way.
    pub(super) fn renewal_at(&self) -> Option<Time> {
        match self.initiation {
            Some(_) => None,
            None => self.sessions.renewal_at(),
        }
    }

    /// Gives way to a call of the peer, unless our own stands: the one of the `smaller` public key does, for a while.
    pub(super) fn give_way(
        &mut self,
        now: Time,
        smaller: bool,
        indices: &mut Indices,
    ) -> Result<(), Dropped> {
        let Some(ours) = &mut self.initiation else {
            return Ok(());
        };
        let age = now.since(ours.started);
        let ours_stands = ours.sent.is_some() && age < TIE_BREAK;
        if ours_stands && smaller {
            ours.repeat_now(now);
            return Err(Dropped::Crossed);
        }
        // The peer's goes first; ours is taken up again if nothing comes of it.
        if age < YIELDING {
            if let Some(sent) = ours.sent.take() {
                indices.free(sent.local_index);
            }
            ours.retry_at = ours.retry_at.max(now + CONFIRMATION);
        }
        Ok(())
    }

    /// Ends our call, if there is one.
    pub(super) fn stop_calling(&mut self, indices: &mut Indices) {
        let sent = self
            .initiation
            .take()
            .and_then(|initiation| initiation.sent);
        if let Some(sent) = sent {
            indices.free(sent.local_index);
        }
    }

    /// The next time at which something is to be done for this peer.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let handshake = match &self.initiation {
            Some(initiation) => Some(initiation.retry_at),
            None => self.sessions.rekey_at(),
        };
        handshake
            .into_iter()
            .chain(self.sessions.next_expiry())
            .min()
    }

    /// Whether a message 1 is to be sent at `now`.
    pub(super) fn call_due(&self, now: Time) -> bool {
        match &self.initiation {
            Some(initiation) => initiation.retry_at <= now,
            None => self.sessions.rekey_at().is_some_and(|at| at <= now),
        }
    }
}
