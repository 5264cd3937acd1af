//! Keys of one session, all by HKDF-SHA256 from what the handshake left: one secret a direction,
//! and from it one key a purpose, so that no two algorithms ever share one (docs/protocol.md, 3).

use core::fmt;
use std::sync::Arc;

use aws_lc_rs::{aead, hkdf, hmac};
pub use dibs_settings::{Integrity, KeyOrigin};
use dibs_wire::frame::FlowId;
use zeroize::{Zeroize, ZeroizeOnDrop};

/// Bytes after a datagram's header block.
pub const TAG_LEN: usize = 16;

/// Thirty-two secret bytes, wiped when dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Takes `bytes` over; the caller wipes its own copy.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(super) fn as_mut_bytes(&mut self) -> &mut [u8; 32] {
        &mut self.0
    }

    pub(super) fn from_slice(bytes: &[u8]) -> Self {
        let mut secret = Self([0; 32]);
        secret.0.copy_from_slice(bytes);
        secret
    }

    fn prk(&self) -> hkdf::Prk {
        hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &self.0)
    }

    /// The secret derived from this one for `purpose`, an independent key.
    pub(super) fn derive(&self, purpose: &[&[u8]]) -> Self {
        let mut out = Self([0; 32]);
        expand(&self.prk(), purpose, &mut out.0);
        out
    }
}

/// HKDF-Expand with `info` = our name and the parts of `purpose`, one after another.
///
/// Parts have a fixed length for a given first part, so that no two purposes run into each other.
pub(super) fn expand(prk: &hkdf::Prk, purpose: &[&[u8]], out: &mut [u8]) {
    struct Len(usize);
    impl hkdf::KeyType for Len {
        fn len(&self) -> usize {
            self.0
        }
    }
    let mut info: smallvec::SmallVec<[&[u8]; 8]> = smallvec::smallvec![b"dibs 1 ".as_slice()];
    info.extend_from_slice(purpose);
    prk.expand(&info, Len(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("HKDF-Expand gives up to 255 blocks, we ask for no more");
}

/// HKDF-Extract of `secret` under `salt`.
pub(super) fn extract(salt: &[u8], secret: &[u8]) -> hkdf::Prk {
    hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(secret)
}

/// The AEAD of a session, chosen by the initiator and bound by the handshake's prologue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Suite {
    /// AES-256-GCM, the faster one where the CPU has AES.
    Aes256Gcm = 1,
    /// ChaCha20-Poly1305, constant time everywhere.
    ChaCha20Poly1305 = 2,
}

impl Suite {
    /// The faster suite on this CPU that is also free of timing leaks on it.
    pub fn for_this_cpu() -> Self {
        #[cfg(target_arch = "x86_64")]
        let aes = std::arch::is_x86_feature_detected!("aes")
            && std::arch::is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let aes = std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let aes = false;
        if aes {
            Self::Aes256Gcm
        } else {
            Self::ChaCha20Poly1305
        }
    }

    pub(super) const fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Aes256Gcm),
            2 => Some(Self::ChaCha20Poly1305),
            _ => None,
        }
    }

    fn algorithm(self) -> &'static aead::Algorithm {
        match self {
            Self::Aes256Gcm => &aead::AES_256_GCM,
            Self::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }
}

/// Role of an end in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Role {
    /// We sent message 1.
    Initiator,
    /// We answered it.
    Responder,
}

/// A direction, seen from here: what is `Outgoing` at one end is `Incoming` at the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Direction {
    /// From us to the peer.
    Outgoing,
    /// From the peer to us.
    Incoming,
}

/// A path's id on the wire: each has numbers of its own for its datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(u8);

impl PathId {
    /// The id as on the wire.
    pub const fn new(raw: u8) -> Self {
        Self(raw)
    }

    /// The id as on the wire.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Its place in a table of all paths.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The name of a session, the same at both ends; not secret, never on the wire in clear.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u64);

impl SessionId {
    /// The name as a number.
    pub const fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "session {:016x}", self.0)
    }
}

/// What a finished handshake leaves: the transcript's hash and one secret a direction.
pub(super) struct HandshakeKeys {
    pub(super) hash: [u8; 32],
    pub(super) initiator: Secret,
    pub(super) responder: Secret,
}

/// The secrets of one direction, one a purpose.
pub(super) struct DirectionKeys {
    /// Start of the chain of key phases.
    pub(super) datagram: Secret,
    /// Key of the mask over the shape field.
    pub(super) shape: [u8; 16],
    epoch: Secret,
}

impl DirectionKeys {
    fn new(hash: &[u8; 32], secret: &Secret) -> Self {
        let prk = extract(hash, secret.as_bytes());
        let derive = |purpose: &[u8]| {
            let mut out = Secret::new([0; 32]);
            expand(&prk, &[purpose], out.as_mut_bytes());
            out
        };
        let mut shape = [0; 16];
        expand(&prk, &[b"shape"], &mut shape);
        Self {
            datagram: derive(b"datagram"),
            shape,
            epoch: derive(b"epoch"),
        }
    }
}

/// Everything derived once for a session.
pub(super) struct SessionKeys {
    pub(super) id: SessionId,
    pub(super) outgoing: DirectionKeys,
    pub(super) incoming: DirectionKeys,
}

impl SessionKeys {
    pub(super) fn new(role: Role, keys: &HandshakeKeys) -> Self {
        let mut id = [0; 8];
        expand(&extract(&keys.hash, &[]), &[b"session id"], &mut id);
        let initiator = DirectionKeys::new(&keys.hash, &keys.initiator);
        let responder = DirectionKeys::new(&keys.hash, &keys.responder);
        let (outgoing, incoming) = match role {
            Role::Initiator => (initiator, responder),
            Role::Responder => (responder, initiator),
        };
        Self {
            id: SessionId(u64::from_be_bytes(id)),
            outgoing,
            incoming,
        }
    }

    pub(super) fn epochs(&self) -> EpochSecrets {
        EpochSecrets(Arc::new(EpochRoots {
            session: self.id,
            outgoing: self.outgoing.epoch.clone(),
            incoming: self.incoming.epoch.clone(),
        }))
    }
}

/// The roots of a session's epoch keys: outliving the session, since flows that were opened under it go
/// on after a rekey. All of these share the one copy there is.
#[derive(Clone)]
pub struct EpochSecrets(Arc<EpochRoots>);

struct EpochRoots {
    session: SessionId,
    outgoing: Secret,
    incoming: Secret,
}

impl EpochSecrets {
    /// The session that these belong to.
    pub fn session(&self) -> SessionId {
        self.0.session
    }

    /// The key of one epoch of a flow that goes in `direction`.
    pub fn epoch_key(
        &self,
        direction: Direction,
        flow: FlowId,
        incarnation: u32,
        epoch: u32,
    ) -> EpochKey {
        let root = match direction {
            Direction::Outgoing => &self.0.outgoing,
            Direction::Incoming => &self.0.incoming,
        };
        EpochKey(root.derive(&[
            b"flow",
            &flow.get().to_be_bytes(),
            &incarnation.to_be_bytes(),
            &epoch.to_be_bytes(),
        ]))
    }
}

/// The key of an epoch, or of one solo chunk.
#[derive(Clone)]
pub struct EpochKey(Secret);

impl EpochKey {
    /// HMAC-SHA1 with this key, which ends the initial buffer (Kato et al. 2019).
    pub fn initial_mac(&self) -> [u8; 20] {
        let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, self.0.as_bytes());
        let mut mac = [0; 20];
        mac.copy_from_slice(hmac::sign(&key, b"dibs epoch").as_ref());
        mac
    }

    /// The key of the solo chunk at `offset` of the stream.
    pub fn solo(&self, offset: u64) -> Self {
        Self(self.0.derive(&[b"solo", &offset.to_be_bytes()]))
    }

    /// The key itself.
    pub const fn secret(&self) -> &Secret {
        &self.0
    }
}

/// The AEAD key and nonce base of one key phase of one direction.
pub(super) struct PhaseKey {
    cipher: Cipher,
    iv: [u8; 12],
}

/// The same AEAD by the fastest means of this CPU.
enum Cipher {
    /// AES-256-GCM by vectors, where the CPU has them.
    Vector(dibs_gcm::Key),
    Library(aead::LessSafeKey),
}

impl Cipher {
    fn new(suite: Suite, key: &Secret) -> Self {
        let vector = match suite {
            Suite::Aes256Gcm => dibs_gcm::Key::new(key.as_bytes()),
            Suite::ChaCha20Poly1305 => None,
        };
        vector.map_or_else(|| Self::Library(aead_key(suite, key)), Self::Vector)
    }
}

impl PhaseKey {
    pub(super) fn new(suite: Suite, secret: &Secret) -> Self {
        Self::with_cipher(secret, |key| Cipher::new(suite, key))
    }

    fn with_cipher(secret: &Secret, cipher: impl FnOnce(&Secret) -> Cipher) -> Self {
        let mut iv = [0; 12];
        expand(&secret.prk(), &[b"iv"], &mut iv);
        Self {
            cipher: cipher(&secret.derive(&[b"key"])),
            iv,
        }
    }

    /// The secret of the phase that follows the one of `secret`.
    pub(super) fn successor(secret: &Secret) -> Secret {
        secret.derive(&[b"phase"])
    }

    fn nonce(&self, path: PathId, seq: u64) -> [u8; 12] {
        // In whole words, as the vector key reads it again at once.
        let [a, b, c, d, tail @ ..] = self.iv;
        let head = u32::from_be_bytes([a, b, c, d]) ^ u32::from(path.get());
        let tail = u64::from_be_bytes(tail) ^ seq;
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&head.to_be_bytes());
        nonce[4..].copy_from_slice(&tail.to_be_bytes());
        nonce
    }

    /// Encrypts `text` in place and returns the tag over `aad` and it.
    pub(super) fn seal(
        &self,
        path: PathId,
        seq: u64,
        aad: &[u8],
        text: &mut [u8],
    ) -> [u8; TAG_LEN] {
        let nonce = self.nonce(path, seq);
        match &self.cipher {
            Cipher::Vector(key) => key.seal(&nonce, aad, text),
            Cipher::Library(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(nonce);
                let tag = key
                    .seal_in_place_separate_tag(nonce, aead::Aad::from(aad), text)
                    .expect("an AEAD refuses only lengths that no datagram has");
                tag.as_ref()
                    .try_into()
                    .expect("the tags of both suites have 16 bytes")
            }
        }
    }

    /// Decrypts `text`, whose end is the tag, in place; on failure `text` is lost.
    pub(super) fn open(&self, path: PathId, seq: u64, aad: &[u8], text: &mut [u8]) -> bool {
        let nonce = self.nonce(path, seq);
        match &self.cipher {
            Cipher::Vector(key) => text
                .split_last_chunk_mut::<TAG_LEN>()
                .is_some_and(|(text, tag)| key.open(&nonce, aad, text, tag)),
            Cipher::Library(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(nonce);
                key.open_in_place(nonce, aead::Aad::from(aad), text).is_ok()
            }
        }
    }

    /// Decrypts `text` into `out` (of the same length); `text` stays as it was.
    pub(super) fn open_to(
        &self,
        path: PathId,
        seq: u64,
        aad: &[u8],
        text: &[u8],
        tag: &[u8],
        out: &mut [u8],
    ) -> bool {
        let nonce = self.nonce(path, seq);
        match &self.cipher {
            Cipher::Vector(key) => tag.try_into().is_ok_and(|tag| {
                out.copy_from_slice(text);
                key.open(&nonce, aad, out, tag)
            }),
            Cipher::Library(key) => {
                let nonce = aead::Nonce::assume_unique_for_key(nonce);
                key.open_separate_gather(nonce, aead::Aad::from(aad), text, tag, out)
                    .is_ok()
            }
        }
    }
}

/// The AEAD of `suite` under `key`.
pub(super) fn aead_key(suite: Suite, key: &Secret) -> aead::LessSafeKey {
    let key = aead::UnboundKey::new(suite.algorithm(), key.as_bytes());
    aead::LessSafeKey::new(key.expect("both suites take 32 bytes"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::hex;
    use super::*;

    fn keys() -> HandshakeKeys {
        HandshakeKeys {
            hash: [1; 32],
            initiator: Secret::new([2; 32]),
            responder: Secret::new([3; 32]),
        }
    }

    fn check_vector(suite: Suite, key: &str, nonce: &str, aad: &str, plain: &str, sealed: &str) {
        let key = aead_key(suite, &Secret::from_slice(&hex(key)));
        let nonce = || aead::Nonce::try_assume_unique_for_key(&hex(nonce)).unwrap();
        let mut text = hex(plain);
        let tag = key
            .seal_in_place_separate_tag(nonce(), aead::Aad::from(hex(aad)), &mut text)
            .unwrap();
        text.extend_from_slice(tag.as_ref());
        assert_eq!(text, hex(sealed));
        let opened = key
            .open_in_place(nonce(), aead::Aad::from(hex(aad)), &mut text)
            .unwrap();
        assert_eq!(opened, hex(plain));
    }

    #[test]
    fn chacha20_poly1305_rfc_8439_2_8_2() {
        check_vector(
            Suite::ChaCha20Poly1305,
            "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9f",
            "070000004041424344454647",
            "50515253c0c1c2c3c4c5c6c7",
            "4c616469657320616e642047656e746c656d656e206f662074686520636c6173
             73206f66202739393a204966204920636f756c64206f6666657220796f75206f
             6e6c79206f6e652074697020666f7220746865206675747572652c2073756e73
             637265656e20776f756c642062652069742e",
            "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6
             3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36
             92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc
             3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd060
             0691",
        );
    }

    /// McGrew and Viega, "The Galois/Counter Mode of Operation", test case 16.
    #[test]
    fn aes_256_gcm_test_case_16() {
        check_vector(
            Suite::Aes256Gcm,
            "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308",
            "cafebabefacedbaddecaf888",
            "feedfacedeadbeeffeedfacedeadbeefabaddad2",
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72
             1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa
             8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662
             76fc6ece0f4e1768cddf8853bb2d551b",
        );
    }

    /// RFC 5869, A.1: the extract and expand that everything here rests on.
    #[test]
    fn hkdf_rfc_5869_a_1() {
        struct L42;
        impl hkdf::KeyType for L42 {
            fn len(&self) -> usize {
                42
            }
        }
        let prk = extract(&hex("000102030405060708090a0b0c"), &[0x0b; 22]);
        let mut okm = [0; 42];
        let info = hex("f0f1f2f3f4f5f6f7f8f9");
        prk.expand(&[&info], L42).unwrap().fill(&mut okm).unwrap();
        let expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf
                        34007208d5b887185865";
        assert_eq!(okm.as_slice(), hex(expected));
    }

    #[test]
    fn both_ends_derive_the_same_keys_per_direction() {
        let a = SessionKeys::new(Role::Initiator, &keys());
        let b = SessionKeys::new(Role::Responder, &keys());
        assert_eq!(a.id, b.id);
        let (out, inc) = (Direction::Outgoing, Direction::Incoming);
        let mac = |k: &SessionKeys, d| k.epochs().epoch_key(d, FlowId::new(7), 1, 2).initial_mac();
        assert_eq!(mac(&a, out), mac(&b, inc));
        assert_eq!(mac(&a, inc), mac(&b, out));
        assert_ne!(mac(&a, out), mac(&a, inc));
    }

    #[test]
    fn every_epoch_and_solo_chunk_has_its_own_key() {
        let epochs = SessionKeys::new(Role::Initiator, &keys()).epochs();
        let key = |f, i, e| epochs.epoch_key(Direction::Outgoing, FlowId::new(f), i, e);
        let mut macs = vec![
            key(0, 0, 0).initial_mac(),
            key(1, 0, 0).initial_mac(),
            key(0, 1, 0).initial_mac(),
            key(0, 0, 1).initial_mac(),
            key(0, 0, 0).solo(0).initial_mac(),
            key(0, 0, 0).solo(1).initial_mac(),
        ];
        let drawn = macs.len();
        macs.sort_unstable();
        macs.dedup();
        assert_eq!(macs.len(), drawn);
    }

    #[test]
    fn the_nonce_is_iv_xor_path_and_sequence_number() {
        let key = PhaseKey::new(Suite::Aes256Gcm, &Secret::new([9; 32]));
        let nonce = key.nonce(PathId::new(0xab), 0x0102_0304_0506_0708);
        let mut expected = key.iv;
        for (n, x) in expected
            .iter_mut()
            .zip([0, 0, 0, 0xab, 1, 2, 3, 4, 5, 6, 7, 8])
        {
            *n ^= x;
        }
        assert_eq!(nonce, expected);
    }

    /// The datagrams of the vector key are those of the library, and each opens the other's.
    #[test]
    fn vector_and_library_give_equal_datagrams() {
        let secret = Secret::new([0x42; 32]);
        let vector = PhaseKey::new(Suite::Aes256Gcm, &secret);
        let library = PhaseKey::with_cipher(&secret, |key| {
            Cipher::Library(aead_key(Suite::Aes256Gcm, key))
        });
        if !matches!(vector.cipher, Cipher::Vector(_)) {
            eprintln!("NOT TESTED: this CPU has no vectors for AES-GCM");
            return;
        }
        let plain: Vec<u8> = (0..9000_u32).map(|i| ((i * 37) >> 3) as u8).collect();
        let (path, other) = (PathId::new(3), PathId::new(2));
        let lengths = [(16, 0), (16, 1440), (1424, 36), (1300, 130), (8900, 40)];
        for (seq, (aad_len, text_len)) in (1 << 40..).zip(lengths) {
            let aad = &plain[..aad_len];
            let datagram = |key: &PhaseKey| {
                let mut text = plain[..text_len].to_vec();
                let tag = key.seal(path, seq, aad, &mut text);
                text.extend_from_slice(&tag);
                text
            };
            let sealed = datagram(&library);
            assert_eq!(datagram(&vector), sealed, "lengths {aad_len}, {text_len}");
            for key in [&vector, &library] {
                let mut text = sealed.clone();
                assert!(key.open(path, seq, aad, &mut text), "opens in place");
                assert_eq!(text[..text_len], plain[..text_len]);
                let (text, tag) = sealed.split_at(text_len);
                let mut out = vec![0; text_len];
                assert!(
                    key.open_to(path, seq, aad, text, tag, &mut out),
                    "opens beside"
                );
                assert_eq!(out, plain[..text_len]);

                assert!(
                    !key.open_to(other, seq, aad, text, tag, &mut out),
                    "other path"
                );
                assert!(
                    !key.open_to(path, seq + 1, aad, text, tag, &mut out),
                    "other number"
                );
                assert!(
                    !key.open_to(path, seq, &aad[1..], text, tag, &mut out),
                    "other header"
                );
                assert!(
                    !key.open_to(path, seq, aad, text, &tag[1..], &mut out),
                    "short tag"
                );
                assert!(
                    !key.open(path, seq, aad, &mut sealed[text_len + 1..].to_vec()),
                    "short"
                );
            }
        }
    }
}
