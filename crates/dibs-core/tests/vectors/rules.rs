//! docs/protocol.md once more: what it says of handshake, keys and datagrams, with nothing but the
//! primitives.

use aws_lc_rs::{aead, hmac};
use dibs_core::session::{Integrity, Suite};
use siphasher::sip::SipHasher24;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, HandshakeState};

use crate::session::{
    EPOCH, FLOW, INCARNATION, INITIATOR, INITIATOR_EPHEMERAL, JOINS_AS, PATH, PRESHARED, RESPONDER,
    RESPONDER_EPHEMERAL, RESPONDER_INDEX, SEQ, SOLO_OFFSET, TOKEN, chained, cookie, handshake,
    header_block, plaintext, public,
};
use crate::{Vector, unhex};

fn hmac_sha256(key: &[u8], message: &[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    hmac::sign(&key, message).as_ref().to_vec()
}

/// HKDF-Expand (RFC 5869) for one block, with the name of the protocol in front.
fn expand(key: &[u8], purpose: &[u8], length: usize) -> Vec<u8> {
    let info = [b"dibs 1 ", purpose, &[1]].concat();
    hmac_sha256(key, &info)[..length].to_vec()
}

/// HKDF-Extract (RFC 5869).
fn extract(salt: &[u8], secret: &[u8]) -> Vec<u8> {
    hmac_sha256(salt, secret)
}

fn mac(key: &[u8], message: &[u8]) -> Vec<u8> {
    hmac_sha256(key, message)[..16].to_vec()
}

fn mac1_key(public: &[u8]) -> Vec<u8> {
    expand(&extract(&[], public), b"mac1", 32)
}

fn mac1(public: &[u8], message: &[u8]) -> Vec<u8> {
    mac(&mac1_key(public), message)
}

/// What the shape fields of a sequence number and of its three neighbours are masked with.
fn shape_masks(shape: &[u8; 16], seq: u64) -> u64 {
    let input = [&[PATH][..], &(seq / 4).to_be_bytes()].concat();
    SipHasher24::new_with_key(shape).hash(&input)
}

fn seal(suite: Suite, key: &[u8], nonce: [u8; 12], aad: &[u8], text: &[u8]) -> Vec<u8> {
    let algorithm = match suite {
        Suite::Aes256Gcm => &aead::AES_256_GCM,
        Suite::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
    };
    let key = aead::UnboundKey::new(algorithm, key).expect("32 bytes");
    let nonce = aead::Nonce::assume_unique_for_key(nonce);
    let mut sealed = text.to_vec();
    aead::LessSafeKey::new(key)
        .seal_in_place_append_tag(nonce, aead::Aad::from(aad), &mut sealed)
        .expect("a short text");
    sealed
}

/// The usual algorithms; the only random number of a handshake is its ephemeral key.
struct Scripted([u8; 32]);

impl CryptoResolver for Scripted {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Self(self.0)))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        DefaultResolver.resolve_dh(choice)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

impl Random for Scripted {
    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), snow::Error> {
        out.copy_from_slice(&self.0);
        Ok(())
    }
}

fn noise<'a>(
    own: &'a [u8; 32],
    ephemeral: [u8; 32],
    prologue: &'a [u8],
    psk: &'a [u8; 32],
) -> Builder<'a> {
    let pattern = "Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s".parse();
    let pattern = pattern.expect("a pattern of Noise");
    Builder::with_resolver(pattern, Box::new(Scripted(ephemeral)))
        .prologue(prologue)
        .and_then(|b| b.local_private_key(own))
        .and_then(|b| b.psk(2, psk))
        .expect("every part once")
}

/// The hello in a message 1 to the responder.
pub(crate) fn hello_of(message: &[u8]) -> Vec<u8> {
    assert_eq!((message.len(), message[0], message[1]), (1200, 1, 1));
    let mut responder = noise(&RESPONDER, RESPONDER_EPHEMERAL, &message[..8], &PRESHARED)
        .build_responder()
        .expect("complete");
    let mut payload = vec![0; 1200];
    responder
        .read_message(&message[8..1168], &mut payload)
        .expect("it is meant for the responder");
    let length = usize::from(u16::from_be_bytes([payload[12], payload[13]]));
    payload[14..14 + length].to_vec()
}

/// Message 1 as the initiator of the vectors writes it, and its state.
fn message_1(suite: Suite, integrity: Integrity) -> (Vec<u8>, HandshakeState) {
    let start = vec![1, 1, suite as u8, integrity as u8, 0x0a, 0x0b, 0x0c, 0x0d];
    first_message(start, &[], 0, (1, None), &PRESHARED)
}

/// Message 1 of a host that joins by an untrusted path, without a preshared key.
fn joining_message_1() -> Vec<u8> {
    let start = vec![1, 1, 1, 0, 0x0a, 0x0b, 0x0c, 0x0d];
    let ticket = [&TOKEN[..], JOINS_AS.as_bytes()].concat();
    first_message(start, &ticket, 0, (0, None), &[0; 32]).0
}

/// Message 1 of which this is the start, with this ticket, `nanos` later, with the label of its path and the secret that it names.
fn first_message(
    mut message: Vec<u8>,
    ticket: &[u8],
    nanos: u32,
    (label, named): (u8, Option<&[u8]>),
    psk: &[u8; 32],
) -> (Vec<u8>, HandshakeState) {
    let remote = public(RESPONDER);
    let mut initiator = noise(&INITIATOR, INITIATOR_EPHEMERAL, &message.clone(), psk)
        .remote_public_key(remote.as_bytes())
        .expect("32 bytes")
        .build_initiator()
        .expect("complete");
    let mut payload = 1_700_000_000u64.to_be_bytes().to_vec();
    payload.extend((123_456_789u32 + nanos).to_be_bytes());
    payload.extend([0, 23 + ticket.len() as u8]);
    payload.push(1);
    payload.extend([0x11; 8]);
    payload.extend(32_768u32.to_be_bytes());
    // Three bumps: scramble, share with two of two, seal.
    payload.extend([3, 1, 0, 0, 2, 2, 2, 3, 0, 0]);
    payload.extend(ticket);
    payload.resize(1038, 0);
    payload.extend([label, u8::from(named.is_some())]);
    payload.extend(named.unwrap_or_default());
    payload.resize(1168 - 8 - 96, 0);
    message.resize(1168, 0);
    initiator
        .write_message(&payload, &mut message[8..])
        .expect("room for it");
    let mac1 = mac1(remote.as_bytes(), &message);
    message.extend(mac1);
    message.extend([0; 16]);
    (message, initiator)
}

/// The secrets of the direction from initiator to responder, and the session's name.
struct Keys {
    datagram: Vec<u8>,
    shape: [u8; 16],
    epoch: Vec<u8>,
    session: Vec<u8>,
    /// Secret that the handshake leaves for later ones, and its name.
    chain: Vec<u8>,
    chain_id: Vec<u8>,
}

/// The keys of a handshake whose other half is `message_2`.
fn keys(initiator: HandshakeState, message_2: &[u8]) -> Keys {
    let start = [2, 0, 0, 0, 0x0a, 0x0b, 0x0c, 0x0d];
    keys_of(initiator, message_2, start, (RESPONDER_INDEX, 1))
}

/// The same of one that begins and says so.
fn keys_of(
    mut initiator: HandshakeState,
    message_2: &[u8],
    start: [u8; 8],
    (index, label): (u32, u8),
) -> Keys {
    let (body, sent_mac1) = message_2.split_at(message_2.len() - 16);
    assert_eq!(sent_mac1, mac1(public(INITIATOR).as_bytes(), body));
    assert_eq!(body[..8], start);
    let mut payload = vec![0; body.len()];
    let length = initiator
        .read_message(&body[8..], &mut payload)
        .expect("the responder's answer");
    assert_eq!(payload[..4], index.to_be_bytes());
    assert_eq!(payload[4], label);
    assert_eq!(length, 5 + 23, "its index, its label and its hello");
    let hash = initiator.get_handshake_hash().to_vec();
    let (to_responder, to_initiator) = initiator.dangerously_get_raw_split();
    let left = extract(&hash, &[to_responder, to_initiator].concat());
    let secret = extract(&hash, &to_responder);
    Keys {
        datagram: expand(&secret, b"datagram", 32),
        shape: expand(&secret, b"shape", 16).try_into().expect("16 bytes"),
        epoch: expand(&secret, b"epoch", 32),
        session: expand(&extract(&hash, &[]), b"session id", 8),
        chain: expand(&left, b"chain", 32),
        chain_id: expand(&left, b"chain id", 8),
    }
}

/// The preshared key of a handshake that has the secret of the first one in it.
fn chained_psk(first: &Keys) -> [u8; 32] {
    let mixed = expand(&extract(&PRESHARED, &first.chain), b"chained psk", 32);
    mixed.try_into().expect("32 bytes")
}

/// The handshake after the first one, by an untrusted path: message 1, and the name of the session.
fn chained_handshake(first: &Keys) -> (Vec<u8>, Vec<u8>) {
    let agreed = (Suite::Aes256Gcm, Integrity::On);
    let start = vec![1, 1, 1, 0, 0x0a, 0x0b, 0x0c, 0x0e];
    let psk = chained_psk(first);
    let (message_1, state) = first_message(start, &[], 1, (0, Some(&first.chain_id)), &psk);
    let answer = [2, 1, 0, 0, 0x0a, 0x0b, 0x0c, 0x0e];
    let index = RESPONDER_INDEX + 1;
    let keys = keys_of(state, &chained(agreed).message_2, answer, (index, 0));
    (message_1, keys.session)
}

fn epoch_key(keys: &Keys) -> Vec<u8> {
    let mut purpose = b"flow".to_vec();
    purpose.extend(FLOW.get().to_be_bytes());
    purpose.extend(u32::from(INCARNATION).to_be_bytes());
    purpose.extend(EPOCH.to_be_bytes());
    expand(&keys.epoch, &purpose, 32)
}

fn solo_key(epoch_key: &[u8]) -> Vec<u8> {
    expand(
        epoch_key,
        &[b"solo".as_slice(), &SOLO_OFFSET.to_be_bytes()].concat(),
        32,
    )
}

fn initial_mac(key: &[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY, key);
    hmac::sign(&key, b"dibs epoch").as_ref().to_vec()
}

fn initial_buffer(mac: &[u8]) -> Vec<u8> {
    [&[0; 44], mac].concat()
}

/// The definition of the scrambler, byte by byte.
fn scramble(initial: &[u8], plain: &[u8]) -> Vec<u8> {
    let stream = [initial, plain].concat();
    stream
        .windows(65)
        .map(|w| w.iter().fold(0, |x, b| x ^ b))
        .collect()
}

fn datagram(suite: Suite, keys: &Keys, payload: &[u8], inside: bool, block: &[u8]) -> Vec<u8> {
    let mask = (shape_masks(&keys.shape, SEQ) >> (16 * (SEQ % 4))) as u16;
    let shape = (block.len() as u16 | if inside { 0x8000 } else { 0 }) ^ mask;
    let mut datagram = vec![4, PATH];
    datagram.extend(shape.to_be_bytes());
    datagram.extend(RESPONDER_INDEX.to_be_bytes());
    datagram.extend(SEQ.to_be_bytes());

    let iv = expand(&keys.datagram, b"iv", 12);
    let number = [&[0, 0, 0, PATH][..], &SEQ.to_be_bytes()].concat();
    let nonce: Vec<u8> = iv.iter().zip(number).map(|(a, b)| a ^ b).collect();
    let nonce = nonce.try_into().expect("12 bytes");
    let key = expand(&keys.datagram, b"key", 32);
    let text = if inside {
        [payload, block].concat()
    } else {
        datagram.extend_from_slice(payload);
        block.to_vec()
    };
    let sealed = seal(suite, &key, nonce, &datagram, &text);
    datagram.extend(sealed);
    datagram
}

pub(crate) fn vectors() -> Vec<Vector> {
    let run = |suite, integrity| {
        let real = handshake((suite, integrity));
        let (message, state) = message_1(suite, integrity);
        let keys = keys(state, &real.message_2);
        let buffer = initial_buffer(&initial_mac(&epoch_key(&keys)));
        let scrambled = scramble(&buffer, &plaintext());
        (real, message, keys, buffer, scrambled)
    };
    let (real, message_1, keys, buffer, scrambled) = run(Suite::Aes256Gcm, Integrity::On);
    let block = header_block(real.session, true);
    let epoch = epoch_key(&keys);
    let solo = solo_key(&epoch);
    let outside = datagram(Suite::Aes256Gcm, &keys, &scrambled, false, &block);
    let inside = datagram(Suite::Aes256Gcm, &keys, &plaintext(), true, &block);

    let masks = shape_masks(&keys.shape, SEQ);
    let masks = (0..4).flat_map(|n| ((masks >> (16 * n)) as u16).to_be_bytes());
    let masks = masks.collect();

    let (real, _, keys_2, _, scrambled_2) = run(Suite::ChaCha20Poly1305, Integrity::On);
    let block_2 = header_block(real.session, true);
    let chacha = datagram(
        Suite::ChaCha20Poly1305,
        &keys_2,
        &scrambled_2,
        false,
        &block_2,
    );

    let (real, _, _, _, scrambled_3) = run(Suite::Aes256Gcm, Integrity::Off);
    let block_3 = header_block(real.session, false);
    let mut bare = vec![6, PATH];
    bare.extend((block_3.len() as u16).to_be_bytes());
    bare.extend(RESPONDER_INDEX.to_be_bytes());
    bare.extend(SEQ.to_be_bytes());
    bare.extend(scrambled_3);
    bare.extend(block_3);

    let (chained_message_1, chained_session) = chained_handshake(&keys);
    vec![
        ("chained_message_1", chained_message_1),
        ("chained_session_id", chained_session),
        ("joining_message_1", joining_message_1()),
        ("mac1_of_message_1", message_1[1168..1184].to_vec()),
        ("message_1", message_1),
        ("shape_masks", masks),
        ("session_id", keys.session.clone()),
        ("epoch_mac", initial_mac(&epoch)),
        ("epoch_key", epoch),
        ("solo_mac", initial_mac(&solo)),
        ("solo_key", solo),
        ("initial_buffer", buffer),
        ("scrambled", scrambled),
        ("scrambled_from_zeros", scramble(&[0; 64], &plaintext())),
        ("datagram", outside),
        ("datagram_payload_inside", inside),
        ("datagram_chacha20_poly1305", chacha),
        ("datagram_bare", bare),
        ("cookie_reply", cookie_reply()),
        ("mac2_of_the_next_message_1", mac2()),
    ]
}

/// The primitives by themselves, and what lies between the rules and their results.
pub(crate) fn steps() -> Vec<Vector> {
    let agreed = (Suite::Aes256Gcm, Integrity::On);
    let (_, state) = message_1(agreed.0, agreed.1);
    let keys = keys(state, &handshake(agreed).message_2);
    let numbers: [u8; 16] = core::array::from_fn(|n| n as u8);
    let siphash = SipHasher24::new_with_key(&numbers).hash(&numbers[..15]);
    let text = b"what do ya want for nothing?";
    vec![
        ("hmac_sha256", hmac_sha256(b"Jefe", text)),
        ("siphash_2_4", siphash.to_be_bytes().to_vec()),
        ("mac1_key", mac1_key(public(RESPONDER).as_bytes())),
        ("cookie", made_cookie()),
        ("shape_key", keys.shape.to_vec()),
        ("chained_psk", chained_psk(&keys).to_vec()),
        ("chain", keys.chain),
        ("chain_id", keys.chain_id),
    ]
}

/// As their authors published them: RFC 4231, 4.3; "SipHash: a fast short-input PRF", appendix A.
#[test]
fn the_primitives_are_the_published_ones() {
    let steps = steps();
    let of = |wanted| steps.iter().find(|(name, _)| *name == wanted).unwrap();
    let hmac = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
    assert_eq!(of("hmac_sha256").1, unhex(hmac));
    assert_eq!(of("siphash_2_4").1, unhex("a129ca6149be45e5"));
}

/// The cookie of 192.0.2.1, port 5300.
fn made_cookie() -> Vec<u8> {
    let mut place = vec![0; 10];
    place.extend([0xff, 0xff, 192, 0, 2, 1]);
    place.extend(5300u16.to_be_bytes());
    mac(&[6; 32], &place)
}

fn cookie_reply() -> Vec<u8> {
    let [message_1, ..] = cookie();
    let nonce = [7; 24];
    let key = expand(
        &extract(&nonce, public(RESPONDER).as_bytes()),
        b"cookie",
        32,
    );
    let mac1 = &message_1[1168..1184];
    let sealed = seal(Suite::ChaCha20Poly1305, &key, [0; 12], mac1, &made_cookie());
    let mut reply = vec![3, 0, 0, 0, 0x0a, 0x0b, 0x0c, 0x0d];
    reply.extend(nonce);
    reply.extend(sealed);
    reply
}

fn mac2() -> Vec<u8> {
    let [_, _, again] = cookie();
    mac(&made_cookie(), &again[..1184])
}
