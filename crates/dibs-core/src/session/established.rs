//! One established session: the keys of both directions under one receiver index.

use core::time::Duration;

use super::keys::{
    EpochSecrets, HandshakeKeys, Integrity, KeyOrigin, PathId, Role, SessionId, SessionKeys, Suite,
};
use super::seal::{self, KeyLimits, OpenError, OpenKeys, Opened, SealError, SealKeys};
use crate::time::Time;

/// Age at which a session is refused, in both directions.
pub const REJECT_AFTER: Duration = Duration::from_secs(180);

/// What both ends settled before the keys.
#[derive(Clone, Copy)]
pub(super) struct Agreement {
    pub(super) role: Role,
    pub(super) suite: Suite,
    pub(super) integrity: Integrity,
    pub(super) origin: KeyOrigin,
    pub(super) local_index: u32,
    pub(super) remote_index: u32,
}

/// Protects the datagrams exchanged with one peer until the next handshake.
pub struct Session {
    id: SessionId,
    agreement: Agreement,
    created: Time,
    /// When a new handshake should begin.
    rekey_at: Time,
    seal: SealKeys,
    open: OpenKeys,
    epochs: EpochSecrets,
}

impl Session {
    pub(super) fn new(
        now: Time,
        rekey_at: Time,
        agreement: Agreement,
        handshake: &HandshakeKeys,
        limits: KeyLimits,
    ) -> Self {
        let keys = SessionKeys::new(agreement.role, handshake);
        Self {
            id: keys.id,
            agreement,
            created: now,
            rekey_at,
            seal: SealKeys::new(agreement.suite, &keys.outgoing, limits),
            open: OpenKeys::new(agreement.suite, &keys.incoming, limits),
            epochs: keys.epochs(),
        }
    }

    /// The session's name, the same at both ends.
    pub const fn id(&self) -> SessionId {
        self.id
    }

    /// Role of this end in the handshake.
    pub const fn role(&self) -> Role {
        self.agreement.role
    }

    /// Integrity that both ends agreed on for unauthenticated data.
    pub const fn integrity(&self) -> Integrity {
        self.agreement.integrity
    }

    /// Origin of its keys.
    pub const fn origin(&self) -> KeyOrigin {
        self.agreement.origin
    }

    /// The AEAD in use.
    pub const fn suite(&self) -> Suite {
        self.agreement.suite
    }

    /// The receiver index that the peer writes.
    pub const fn local_index(&self) -> u32 {
        self.agreement.local_index
    }

    /// When its handshake ended here.
    pub(super) const fn created(&self) -> Time {
        self.created
    }

    /// When the session may no longer be used.
    pub fn expires_at(&self) -> Time {
        self.created + REJECT_AFTER
    }

    /// Whether it may be sent by: it has neither expired nor sealed all that its keys may.
    pub(super) fn may_send(&self, now: Time) -> bool {
        self.expires_at() > now && !self.seal.is_exhausted()
    }

    /// True once, when a datagram could not be sealed for the session's keys are used up.
    pub(super) fn poll_exhausted(&mut self) -> bool {
        self.seal.poll_exhausted()
    }

    /// When a new handshake should begin: by age, or at once if this one is half used up.
    pub(super) fn rekey_at(&self) -> Time {
        if self.seal.wants_rekey() {
            Time::ZERO
        } else {
            self.rekey_at
        }
    }

    /// The roots of the epoch keys, to be cloned by whoever needs them for longer.
    pub const fn epoch_secrets(&self) -> &EpochSecrets {
        &self.epochs
    }

    /// What opens copies of all that is going to be sent by it.
    #[cfg(feature = "observe")]
    pub(super) fn tap(&self) -> super::tap::Tap {
        super::tap::Tap {
            session: self.id,
            index: self.agreement.remote_index,
            integrity: self.agreement.integrity,
            keys: self.seal.opener(),
        }
    }

    /// Finishes one datagram in place, without allocating.
    ///
    /// `buf` is the whole datagram: 16 bytes of room, the payload, `header_len` bytes of header
    /// block, 16 bytes of room. Sequence numbers of a path have to grow; where an error is
    /// returned, the datagram must not be sent.
    ///
    /// # Errors
    /// [`SealError::Layout`] and [`SealError::SequenceReused`] are the caller's fault;
    /// [`SealError::Exhausted`] lasts until a new session is there.
    pub fn seal(
        &mut self,
        buf: &mut [u8],
        path_id: PathId,
        seq: u64,
        header_len: usize,
        payload_inside: bool,
    ) -> Result<(), SealError> {
        let receiver = self.agreement.remote_index;
        self.seal
            .seal(receiver, buf, path_id, seq, header_len, payload_inside)
    }

    /// Finishes one bare datagram (docs/protocol.md, 9): as [`seal`](Self::seal), with no room for a tag.
    ///
    /// # Errors
    /// [`SealError::IntegrityRequired`] unless both ends agreed to `integrity = "off"`.
    pub fn seal_bare(
        &mut self,
        buf: &mut [u8],
        path_id: PathId,
        seq: u64,
        header_len: usize,
    ) -> Result<(), SealError> {
        match self.agreement.integrity {
            Integrity::On => Err(SealError::IntegrityRequired),
            Integrity::Off => {
                self.seal
                    .seal_bare(self.agreement.remote_index, buf, path_id, seq, header_len)
            }
        }
    }

    /// Authenticates and decrypts a datagram in place, and notes it against replay.
    ///
    /// A bare datagram is handed out as not authenticated, if the session agreed to such.
    ///
    /// # Errors
    /// Every error means: drop, count. The bytes of the datagram are void then.
    #[inline]
    pub fn open<'a>(&mut self, datagram: &'a mut [u8]) -> Result<Opened<'a>, OpenError> {
        let (receiver, _) = seal::receiver_and_path(datagram).ok_or(OpenError::Malformed)?;
        if receiver != self.agreement.local_index {
            return Err(OpenError::UnknownIndex);
        }
        if !seal::is_bare(datagram) {
            return self.open.open(datagram);
        }
        match self.agreement.integrity {
            Integrity::On => Err(OpenError::BareRefused),
            Integrity::Off => seal::open_bare(datagram),
        }
    }
}
