//! Data datagrams of an established session: their layout, sealing and opening.
//!
//! ```text
//!  0  type u8             4 and 5: data under an even or odd key phase; 6: bare (docs/protocol.md, 9)
//!  1  path id u8
//!  2  shape u16           bit 15: the payload is encrypted too; below: length h of the header
//!                         block; masked, so that lengths and kinds of frames do not show
//!  4  receiver index u32
//!  8  sequence number u64 per path, never used twice in a session
//! 16  payload             p bytes
//!     header block        h bytes
//!     tag                 16 bytes, absent in type 6
//! ```
//!
//! The header block stands last, so that the clear header and a payload that stays in its
//! published form are one piece of associated data and a datagram costs one AEAD call.

use siphasher::sip::SipHasher24;
use thiserror::Error;

use super::keys::{DirectionKeys, PathId, PhaseKey, Secret, Suite, TAG_LEN};
use super::replay::ReplayWindow;

/// Bytes before the payload.
pub const CLEAR_HEADER_LEN: usize = 16;
/// Bytes that an authenticated datagram adds to payload and header block.
pub const OVERHEAD: usize = CLEAR_HEADER_LEN + TAG_LEN;
/// The longest header block that the shape field can tell.
pub const MAX_HEADER_BLOCK: usize = 0x7fff;
/// The longest datagram: any may be a header block alone.
pub const MAX_DATAGRAM: usize = OVERHEAD + MAX_HEADER_BLOCK;

const DATA: u8 = 4;
const BARE: u8 = 6;
const PAYLOAD_INSIDE: u16 = 0x8000;

/// How much one key, and one session, may seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyLimits {
    /// Datagrams sealed under one key, all paths together, before the next key phase.
    pub per_phase: u64,
    /// Key phases of one session; then sending stops. At half of them a new handshake begins.
    pub phases: u64,
    /// Authenticated datagrams of a phase after which the one before is forgotten.
    pub previous_kept: u64,
}

impl Default for KeyLimits {
    /// Well below 2^28 datagrams a key: with 64 KiB each, 2^26 of them are 2^38 blocks of AES-GCM,
    /// a distinguishing advantage of 2^-53 (RFC 9001, B.1).
    fn default() -> Self {
        Self {
            per_phase: 1 << 26,
            phases: 64,
            previous_kept: 1 << 20,
        }
    }
}

/// Why a datagram was not sealed. Nothing of it may be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SealError {
    /// The buffer has no room for header block, clear header and tag, or the header block is
    /// longer than [`MAX_HEADER_BLOCK`].
    #[error("the datagram has no room for its header block, or that is too long")]
    Layout,
    /// The sequence number is not above the last one of this path: a nonce would be used twice.
    #[error("the sequence number was used before on this path")]
    SequenceReused,
    /// The session sealed all that its keys may; only a new handshake helps.
    #[error("the session has sealed as much as its keys allow")]
    Exhausted,
    /// A bare datagram in a session that did not agree to any.
    #[error("the session does not allow unauthenticated datagrams")]
    IntegrityRequired,
}

/// Why a datagram was dropped; its bytes are void. All of these are the peer's or a stranger's
/// doing, so they are counted by name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Error)]
pub enum OpenError {
    /// Too short, of an unknown type, or its lengths do not add up.
    #[error("malformed datagram")]
    Malformed,
    /// No session has this receiver index.
    #[error("unknown receiver index")]
    UnknownIndex,
    /// The session is past its lifetime.
    #[error("session expired")]
    Expired,
    /// Seen before, or too old to tell.
    #[error("replayed datagram")]
    Replayed,
    /// The tag does not match.
    #[error("datagram failed authentication")]
    Unauthentic,
    /// A bare datagram in a session that did not agree to any.
    #[error("bare datagram in an authenticated session")]
    BareRefused,
}

/// A datagram opened in place.
pub struct Opened<'a> {
    /// The path that the sender meant; the caller checks that it came in by that one.
    pub path_id: PathId,
    /// Sequence number on that path.
    pub seq: u64,
    /// The header block, in clear.
    pub header: &'a [u8],
    /// The payload, mutable so that a bump can be undone where it lies.
    pub payload: &'a mut [u8],
    /// True if the payload was encrypted, not only authenticated.
    pub payload_inside: bool,
    /// False for a bare datagram: nothing in it is known to be the peer's.
    pub authenticated: bool,
}

/// The clear header, decoded; any 16 bytes are one.
#[derive(Clone, Copy)]
struct ClearHeader {
    kind: u8,
    path_id: PathId,
    shape: u16,
    receiver: u32,
    seq: u64,
}

impl ClearHeader {
    fn parse(datagram: &[u8]) -> Option<Self> {
        let (header, _) = datagram.split_first_chunk::<CLEAR_HEADER_LEN>()?;
        let [kind, path, s0, s1, r0, r1, r2, r3, seq @ ..] = *header;
        Some(Self {
            kind,
            path_id: PathId::new(path),
            shape: u16::from_be_bytes([s0, s1]),
            receiver: u32::from_be_bytes([r0, r1, r2, r3]),
            seq: u64::from_be_bytes(seq),
        })
    }

    fn emit(&self, datagram: &mut [u8]) {
        datagram[0] = self.kind;
        datagram[1] = self.path_id.get();
        datagram[2..4].copy_from_slice(&self.shape.to_be_bytes());
        datagram[4..8].copy_from_slice(&self.receiver.to_be_bytes());
        datagram[8..16].copy_from_slice(&self.seq.to_be_bytes());
    }
}

/// The receiver index of a data datagram and its path; `None` if it is none.
pub(super) fn receiver_and_path(datagram: &[u8]) -> Option<(u32, PathId)> {
    let header = ClearHeader::parse(datagram)?;
    (DATA..=BARE)
        .contains(&header.kind)
        .then_some((header.receiver, header.path_id))
}

/// SipHash-2-4 of path and sequence number under a key of the direction: one masks four datagrams.
#[derive(Clone)]
struct ShapeMask {
    hasher: SipHasher24,
    /// The four computed last, and of what: a path and a quarter of a sequence number.
    latest: ((PathId, u64), u64),
}

impl ShapeMask {
    fn new(key: &[u8; 16]) -> Self {
        let hasher = SipHasher24::new_with_key(key);
        let first = PathId::new(0);
        let latest = ((first, 0), Self::hash(&hasher, first, 0));
        Self { hasher, latest }
    }

    fn hash(hasher: &SipHasher24, path_id: PathId, quarter: u64) -> u64 {
        let mut input = [0; 9];
        input[0] = path_id.get();
        input[1..].copy_from_slice(&quarter.to_be_bytes());
        hasher.hash(&input)
    }

    fn of(&mut self, path_id: PathId, seq: u64) -> u16 {
        let of = (path_id, seq / 4);
        if self.latest.0 != of {
            self.latest = (of, Self::hash(&self.hasher, of.0, of.1));
        }
        (self.latest.1 >> (16 * (seq % 4))) as u16
    }
}

/// The sending direction.
pub(super) struct SealKeys {
    suite: Suite,
    /// Secret of the current phase.
    secret: Secret,
    key: PhaseKey,
    mask: ShapeMask,
    phase: u64,
    sealed_in_phase: u64,
    /// Per path, the lowest sequence number not yet used.
    next_seq: Box<[u64; 256]>,
    exhausted: Exhausted,
    limits: KeyLimits,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Exhausted {
    No,
    /// And nobody was told.
    Now,
    Told,
}

impl SealKeys {
    pub(super) fn new(suite: Suite, keys: &DirectionKeys, limits: KeyLimits) -> Self {
        Self {
            suite,
            secret: keys.datagram.clone(),
            key: PhaseKey::new(suite, &keys.datagram),
            mask: ShapeMask::new(&keys.shape),
            phase: 0,
            sealed_in_phase: 0,
            next_seq: Box::new([0; 256]),
            exhausted: Exhausted::No,
            limits,
        }
    }

    /// What opens all that these keys are going to seal.
    #[cfg(feature = "observe")]
    pub(super) fn opener(&self) -> OpenKeys {
        assert_eq!(self.phase, 0, "nothing was sealed yet");
        OpenKeys::beginning(self.suite, &self.secret, self.mask.clone(), self.limits)
    }

    /// Whether half of what the session may seal is used up, so that it is time for another.
    pub(super) fn wants_rekey(&self) -> bool {
        self.phase >= self.limits.phases / 2
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.exhausted != Exhausted::No
    }

    /// True once, when the last key has sealed all that it may.
    pub(super) fn poll_exhausted(&mut self) -> bool {
        let now = self.exhausted == Exhausted::Now;
        if now {
            self.exhausted = Exhausted::Told;
        }
        now
    }

    pub(super) fn seal(
        &mut self,
        receiver: u32,
        buf: &mut [u8],
        path_id: PathId,
        seq: u64,
        header_len: usize,
        payload_inside: bool,
    ) -> Result<(), SealError> {
        let room = buf.len().checked_sub(OVERHEAD).ok_or(SealError::Layout)?;
        let mut shape = shape_of(header_len, room)?;
        if payload_inside {
            shape |= PAYLOAD_INSIDE;
        }
        self.claim(path_id, seq)?;
        self.spend()?;

        ClearHeader {
            kind: DATA | (self.phase & 1) as u8,
            path_id,
            shape: shape ^ self.mask.of(path_id, seq),
            receiver,
            seq,
        }
        .emit(buf);
        let text_end = buf.len() - TAG_LEN;
        let aad_len = if payload_inside {
            CLEAR_HEADER_LEN
        } else {
            text_end - header_len
        };
        let (body, tag) = buf.split_at_mut(text_end);
        let (aad, text) = body.split_at_mut(aad_len);
        tag.copy_from_slice(&self.key.seal(path_id, seq, aad, text));
        Ok(())
    }

    pub(super) fn seal_bare(
        &mut self,
        receiver: u32,
        buf: &mut [u8],
        path_id: PathId,
        seq: u64,
        header_len: usize,
    ) -> Result<(), SealError> {
        let room = buf
            .len()
            .checked_sub(CLEAR_HEADER_LEN)
            .ok_or(SealError::Layout)?;
        let shape = shape_of(header_len, room)?;
        self.claim(path_id, seq)?;
        ClearHeader {
            kind: BARE,
            path_id,
            shape,
            receiver,
            seq,
        }
        .emit(buf);
        Ok(())
    }

    /// Takes `seq` for this datagram; one nonce, one content, whatever the caller does.
    fn claim(&mut self, path_id: PathId, seq: u64) -> Result<(), SealError> {
        let next = &mut self.next_seq[path_id.index()];
        if seq < *next || seq == u64::MAX {
            return Err(SealError::SequenceReused);
        }
        *next = seq + 1;
        Ok(())
    }

    /// Counts one use of the key, and moves on to the next key in time.
    fn spend(&mut self) -> Result<(), SealError> {
        if self.sealed_in_phase == self.limits.per_phase {
            if self.phase + 1 >= self.limits.phases {
                if self.exhausted == Exhausted::No {
                    self.exhausted = Exhausted::Now;
                }
                return Err(SealError::Exhausted);
            }
            self.secret = PhaseKey::successor(&self.secret);
            self.key = PhaseKey::new(self.suite, &self.secret);
            self.phase += 1;
            self.sealed_in_phase = 0;
        }
        self.sealed_in_phase += 1;
        Ok(())
    }
}

fn shape_of(header_len: usize, room: usize) -> Result<u16, SealError> {
    if header_len > room || header_len > MAX_HEADER_BLOCK {
        return Err(SealError::Layout);
    }
    Ok(header_len as u16)
}

/// The receiving direction.
pub(super) struct OpenKeys {
    suite: Suite,
    previous: Option<PhaseKey>,
    current: PhaseKey,
    next: PhaseKey,
    /// Secret of the next phase.
    next_secret: Secret,
    mask: ShapeMask,
    phase: u64,
    opened_in_phase: u64,
    /// Per path, made at its first authenticated datagram: an index into 256 of them.
    windows: Vec<Option<Box<ReplayWindow>>>,
    /// Where a trial decryption goes that must not cost the ciphertext.
    scratch: Vec<u8>,
    limits: KeyLimits,
}

impl OpenKeys {
    pub(super) fn new(suite: Suite, keys: &DirectionKeys, limits: KeyLimits) -> Self {
        let mask = ShapeMask::new(&keys.shape);
        Self::beginning(suite, &keys.datagram, mask, limits)
    }

    /// From the first phase on.
    fn beginning(suite: Suite, secret: &Secret, mask: ShapeMask, limits: KeyLimits) -> Self {
        let next_secret = PhaseKey::successor(secret);
        Self {
            suite,
            previous: None,
            current: PhaseKey::new(suite, secret),
            next: PhaseKey::new(suite, &next_secret),
            next_secret,
            mask,
            phase: 0,
            opened_in_phase: 0,
            windows: core::iter::repeat_with(|| None).take(256).collect(),
            scratch: Vec::new(),
            limits,
        }
    }

    #[inline(always)]
    pub(super) fn open<'a>(&mut self, datagram: &'a mut [u8]) -> Result<Opened<'a>, OpenError> {
        let clear = ClearHeader::parse(datagram).ok_or(OpenError::Malformed)?;
        if clear.kind & !1 != DATA {
            return Err(OpenError::Malformed);
        }
        let ClearHeader { path_id, seq, .. } = clear;
        let window = self.windows[path_id.index()].as_deref();
        if window.map_or(seq == u64::MAX, |w| !w.is_new(seq)) {
            return Err(OpenError::Replayed);
        }

        let shape = clear.shape ^ self.mask.of(path_id, seq);
        let payload_inside = shape & PAYLOAD_INSIDE != 0;
        let header_len = usize::from(shape & !PAYLOAD_INSIDE);
        let payload_len = datagram
            .len()
            .checked_sub(OVERHEAD + header_len)
            .ok_or(OpenError::Malformed)?;
        let header_start = CLEAR_HEADER_LEN + payload_len;
        let aad_len = if payload_inside {
            CLEAR_HEADER_LEN
        } else {
            header_start
        };

        let (aad, text) = datagram.split_at_mut(aad_len);
        if !self.open_text(clear, aad, text) {
            return Err(OpenError::Unauthentic);
        }
        self.windows[path_id.index()]
            .get_or_insert_default()
            .accept(seq);

        let (front, back) = datagram.split_at_mut(header_start);
        Ok(Opened {
            path_id,
            seq,
            header: &back[..header_len],
            payload: &mut front[CLEAR_HEADER_LEN..],
            payload_inside,
            authenticated: true,
        })
    }

    /// Decrypts by the phase that the type's low bit names: the current one, or one of its
    /// neighbours, which share the other parity.
    fn open_text(&mut self, clear: ClearHeader, aad: &[u8], text: &mut [u8]) -> bool {
        let ClearHeader {
            kind, path_id, seq, ..
        } = clear;
        if u64::from(kind & 1) == self.phase & 1 {
            let authentic = self.current.open(path_id, seq, aad, text);
            self.opened_in_phase += u64::from(authentic);
            if self.opened_in_phase >= self.limits.previous_kept {
                self.previous = None;
            }
            return authentic;
        }
        // A late one of the phase before is likelier than the first of the next one, but if it
        // is not, the ciphertext is needed again.
        if let Some(previous) = &self.previous {
            let (sealed, tag) = text.split_at_mut(text.len() - TAG_LEN);
            self.scratch.resize(sealed.len(), 0);
            if previous.open_to(path_id, seq, aad, sealed, tag, &mut self.scratch) {
                sealed.copy_from_slice(&self.scratch);
                return true;
            }
        }
        let authentic = self.next.open(path_id, seq, aad, text);
        if authentic {
            self.advance();
        }
        authentic
    }

    /// The peer moved to the next phase: so do we.
    fn advance(&mut self) {
        self.next_secret = PhaseKey::successor(&self.next_secret);
        let after_next = PhaseKey::new(self.suite, &self.next_secret);
        let current = core::mem::replace(&mut self.next, after_next);
        self.previous = Some(core::mem::replace(&mut self.current, current));
        self.phase += 1;
        self.opened_in_phase = 1;
    }
}

/// Whether `datagram` is a bare one, of type 6.
pub(super) fn is_bare(datagram: &[u8]) -> bool {
    datagram.first() == Some(&BARE)
}

/// Splits a bare datagram. Neither replay window nor keys have a say.
pub(super) fn open_bare(datagram: &mut [u8]) -> Result<Opened<'_>, OpenError> {
    let clear = ClearHeader::parse(datagram).ok_or(OpenError::Malformed)?;
    let room = datagram.len() - CLEAR_HEADER_LEN;
    let header_len = usize::from(clear.shape);
    if clear.kind != BARE || clear.shape & PAYLOAD_INSIDE != 0 || header_len > room {
        return Err(OpenError::Malformed);
    }
    let (front, header) = datagram.split_at_mut(datagram.len() - header_len);
    Ok(Opened {
        path_id: clear.path_id,
        seq: clear.seq,
        header,
        payload: &mut front[CLEAR_HEADER_LEN..],
        payload_inside: false,
        authenticated: false,
    })
}

#[cfg(test)]
mod tests;
