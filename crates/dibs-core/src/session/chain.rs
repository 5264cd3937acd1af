//! Secrets that handshakes leave for later ones (docs/protocol.md, 2, "Chain").
//!
//! Each handshake leaves both ends one secret, under one name. A later handshake mixes in the newest secret that both
//! ends hold, beside the preshared key. So whoever recorded that later handshake, and can one day break its
//! Diffie-Hellman, still lacks the secret, unless they have broken the handshake that left it.
//!
//! Messages may be lost, so the two ends do not always hold the same secrets; but there is always one that both hold.
//! An end drops a secret only once it knows that the peer keeps a newer one. "Newer" means the same at both ends: a
//! secret goes for the sake of another one only if it was held when the handshake of that other one began here, and
//! then its own message 1 was answered before the other's.

use std::sync::Arc;

use zeroize::Zeroizing;

use super::keys::{HandshakeKeys, Secret, SessionId, expand, extract};

/// Secrets that a message 1 names, at most.
pub(super) const MOST_NAMED: usize = 3;
/// Length of a name, in bytes.
pub(super) const CHAIN_ID_LEN: usize = 8;

/// The name of a secret, the same at both ends; only ever sent encrypted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChainId([u8; CHAIN_ID_LEN]);

impl ChainId {
    pub(super) const fn new(bytes: [u8; CHAIN_ID_LEN]) -> Self {
        Self(bytes)
    }

    pub(super) const fn as_bytes(&self) -> &[u8; CHAIN_ID_LEN] {
        &self.0
    }
}

/// The secret of one handshake.
pub(super) struct ChainSecret {
    id: ChainId,
    secret: Secret,
    /// Nobody knows it who only recorded untrusted paths, whatever they can compute: its handshake went by a trusted
    /// path, or had a sound secret or a preshared key in it.
    sound: bool,
}

impl ChainSecret {
    /// The one that a finished handshake leaves.
    pub(super) fn new(keys: &HandshakeKeys, sound: bool) -> Arc<Self> {
        let mut both = Zeroizing::new([0; 64]);
        both[..32].copy_from_slice(keys.initiator.as_bytes());
        both[32..].copy_from_slice(keys.responder.as_bytes());
        let root = extract(&keys.hash, &*both);
        let mut id = [0; CHAIN_ID_LEN];
        expand(&root, &[b"chain id"], &mut id);
        // Written where it stays.
        let mut chain = Arc::new(Self {
            id: ChainId(id),
            secret: Secret::new([0; 32]),
            sound,
        });
        let own = Arc::get_mut(&mut chain).expect("nobody else has it yet");
        expand(&root, &[b"chain"], own.secret.as_mut_bytes());
        chain
    }

    pub(super) const fn id(&self) -> ChainId {
        self.id
    }

    pub(super) const fn is_sound(&self) -> bool {
        self.sound
    }

    /// The preshared key of a handshake that has this secret in it.
    pub(super) fn mixed_with(&self, preshared: &Secret) -> Box<Secret> {
        let mut mixed = Box::new(Secret::new([0; 32]));
        let prk = extract(preshared.as_bytes(), self.secret.as_bytes());
        expand(&prk, &[b"chained psk"], mixed.as_mut_bytes());
        mixed
    }
}

/// A moment in the history of one [`Chain`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(super) struct Moment(u64);

/// How far a secret is known to be held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Known {
    /// Here. The peer may never have got our message 2.
    Here,
    /// At both ends.
    Both,
    /// At both ends, and the peer knows that: it keeps this one until there is a newer one.
    Settled,
}

struct Entry {
    secret: Arc<ChainSecret>,
    session: SessionId,
    known: Known,
    /// When its handshake began at this end: message 1 was sent, or answered.
    began: Moment,
    /// When it came about.
    since: Moment,
}

/// The secrets that are held in common with one peer.
#[derive(Default)]
pub(super) struct Chain {
    /// The oldest first: at most [`MOST_NAMED`], and one that the peer may not have.
    entries: Vec<Entry>,
    clock: u64,
}

impl Chain {
    /// The secrets to be named in a message 1 that is sent now, the newest first.
    pub(super) fn name(&mut self) -> (Moment, Vec<Arc<ChainSecret>>) {
        let now = self.now();
        let common = self.entries.iter().rev().filter(|e| e.known != Known::Here);
        let named = common.take(MOST_NAMED).map(|e| Arc::clone(&e.secret));
        (now, named.collect())
    }

    /// The newest secret here of those that a message 1 of the peer names: the peer holds it, so it is settled.
    pub(super) fn take_named(&mut self, named: &[ChainId]) -> Option<Arc<ChainSecret>> {
        let mut newest = (0..self.entries.len()).rev();
        let at = newest.find(|at| named.contains(&self.entries[*at].secret.id))?;
        let secret = Arc::clone(&self.entries[at].secret);
        self.settle(at);
        Some(secret)
    }

    /// True if a handshake that names what is held now has a sound secret in it if the peer holds it, too.
    pub(super) fn has_sound(&self) -> bool {
        let mut common = self.entries.iter().filter(|e| e.known != Known::Here);
        common.any(|entry| entry.secret.sound)
    }

    /// Keeps the secret of a handshake that was answered. The one of an earlier answer that the peer has neither named
    /// nor used is of no use: the peer sends a new message 1 only while it has no answer to the one before.
    pub(super) fn on_answered(&mut self, secret: Arc<ChainSecret>, session: SessionId) {
        self.entries.retain(|entry| entry.known != Known::Here);
        let began = self.now();
        self.add(secret, session, Known::Here, began);
    }

    /// Keeps the secret of a handshake of ours that was answered, whose message 1 went at `began`. The secret that the
    /// peer `used` it has kept; if it used none, it has none of those that were named.
    pub(super) fn on_finished(
        &mut self,
        began: Moment,
        used: Option<ChainId>,
        secret: Arc<ChainSecret>,
        session: SessionId,
    ) {
        match used {
            Some(id) => {
                let at = self.entries.iter().position(|e| e.secret.id == id);
                if let Some(at) = at {
                    self.settle(at);
                }
            }
            None => self
                .entries
                .retain(|entry| entry.known == Known::Here || entry.since > began),
        }
        self.add(secret, session, Known::Both, began);
    }

    /// An authenticated datagram came by a session: the peer has the secret of its handshake and, as the one who
    /// called sends by it only with message 2, and the other one only after that, keeps it.
    pub(super) fn on_used(&mut self, session: SessionId) {
        let is_new = |entry: &Entry| entry.session == session && entry.known != Known::Settled;
        if let Some(at) = self.entries.iter().position(is_new) {
            self.settle(at);
        }
    }

    fn now(&mut self) -> Moment {
        self.clock += 1;
        Moment(self.clock)
    }

    fn add(&mut self, secret: Arc<ChainSecret>, session: SessionId, known: Known, began: Moment) {
        let since = self.now();
        self.entries.push(Entry {
            secret,
            session,
            known,
            began,
            since,
        });
        self.bound();
    }

    /// The peer keeps the one at `at`: what was held when its handshake began is not needed any more.
    fn settle(&mut self, at: usize) {
        let entry = &mut self.entries[at];
        entry.known = Known::Settled;
        let began = entry.began;
        self.entries.retain(|other| other.since > began);
        self.bound();
    }

    /// Drops the oldest of more than can be named. Each new one settles one of those before it, so there are not
    /// as many, unless a peer does not keep to the rules.
    fn bound(&mut self) {
        let common = self.entries.iter().filter(|e| e.known != Known::Here);
        if common.count() > MOST_NAMED {
            let oldest = self.entries.iter().position(|e| e.known != Known::Here);
            self.entries.remove(oldest.expect("there are several"));
        }
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<ChainId> {
        self.entries.iter().map(|entry| entry.secret.id).collect()
    }
}
