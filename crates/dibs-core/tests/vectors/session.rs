//! Vectors of handshake, keys and datagrams, from two [`Sessions`] with scripted randomness.

use core::time::Duration;
use dibs_core::Time;
use dibs_core::bump::{self, Padding, Scheme};
use dibs_core::node::{LocalPath, Node, NodeConfig, PeerConfig, Ticket};
use dibs_core::preference::Usage;
use dibs_core::session::{
    Arrived, CLEAR_HEADER_LEN, Config, Direction, Dropped, EpochSecrets, Hello, Integrity,
    OVERHEAD, PathId, PeerId, PublicKey, Random, Secret, SessionId, Sessions, StaticSecret, Suite,
    Way,
};
use dibs_scramble::{Scrambler, initial_buffer};
use dibs_settings::{self, Opening, Scheduler};
use dibs_wire::bytes::Writer;
use dibs_wire::checksum::crc32c;
use dibs_wire::frame::{self, BASE_OFFSET, Chunk, FlowId};

use crate::frames;
use crate::rules;
use crate::{Vector, documented};

pub(crate) const INITIATOR: [u8; 32] = [0x01; 32];
pub(crate) const RESPONDER: [u8; 32] = [0x02; 32];
pub(crate) const PRESHARED: [u8; 32] = [0x03; 32];
pub(crate) const INITIATOR_EPHEMERAL: [u8; 32] = [0x04; 32];
pub(crate) const RESPONDER_EPHEMERAL: [u8; 32] = [0x05; 32];
const COOKIE_SECRET: [u8; 32] = [0x06; 32];
const COOKIE_NONCE: [u8; 24] = [0x07; 24];
const INITIATOR_INDEX: u32 = 0x0a0b_0c0d;
pub(crate) const RESPONDER_INDEX: u32 = 0x1a1b_1c1d;
const WALL: Duration = Duration::new(1_700_000_000, 123_456_789);
const SOURCE: &str = "192.0.2.1:5300";

/// Token of a host that joins, and the name that it gives itself.
pub(crate) const TOKEN: [u8; 32] = [0x0b; 32];
pub(crate) const JOINS_AS: &str = "van";

/// Where the datagrams of the vectors stand.
pub(crate) const PATH: u8 = 2;
pub(crate) const SEQ: u64 = 0x0102_0304;
/// The stream of the vectors.
pub(crate) const FLOW: FlowId = FlowId::new(7);
pub(crate) const INCARNATION: u16 = 1;
pub(crate) const EPOCH: u32 = 1;
pub(crate) const SOLO_OFFSET: u64 = BASE_OFFSET + 50;

/// What is drawn at random, by length: 32 bytes are a key, 24 a nonce, 4 an index (or a delay).
struct Script {
    key: [u8; 32],
    index: u32,
}

impl Random for Script {
    fn fill(&mut self, out: &mut [u8]) {
        match out.len() {
            32 => out.copy_from_slice(&self.key),
            24 => out.copy_from_slice(&COOKIE_NONCE),
            4 => out.copy_from_slice(&self.index.to_ne_bytes()),
            other => panic!("nobody draws {other} bytes"),
        }
    }
}

fn hello(instance: u64) -> Hello {
    let mut bytes = vec![1];
    bytes.extend_from_slice(&instance.to_be_bytes());
    bytes.extend_from_slice(&32_768u32.to_be_bytes());
    bytes.extend_from_slice(&[3, 1, 0, 0, 2, 2, 2, 3, 0, 0]);
    Hello::new(bytes).expect("23 bytes")
}

pub(crate) fn public(private: [u8; 32]) -> PublicKey {
    PublicKey::from(&StaticSecret::from(private))
}

/// One end.
struct End {
    sessions: Sessions,
    peer: PeerId,
    script: Script,
}

impl End {
    fn new(own: [u8; 32], other: [u8; 32], agreed: Agreed, script: Script) -> Self {
        let config = Config {
            private: Box::new(StaticSecret::from(own)),
            suite: agreed.0,
            integrity: agreed.1,
            handshake: dibs_settings::Handshake::Chained,
        };
        let mut cookies = Script {
            key: COOKIE_SECRET,
            index: 0,
        };
        let mut sessions = Sessions::new(config, Time::ZERO, &mut cookies);
        let peer = sessions
            .add_peer(public(other), Some(Box::new(Secret::new(PRESHARED))))
            .expect("another key");
        Self {
            sessions,
            peer,
            script,
        }
    }

    /// A call by a path that is trusted, or not.
    fn call(&mut self, trusted: bool) -> Vec<u8> {
        self.call_saying(&hello(0x1111_1111_1111_1111), trusted)
    }

    fn call_saying(&mut self, hello: &Hello, trusted: bool) -> Vec<u8> {
        let (now, script) = (Time::ZERO, &mut self.script);
        { &mut self.sessions }.initiate(now, WALL, self.peer, Way::new(trusted), hello, script)
    }
}

/// By a path that is trusted, or not.
fn arrived(trusted: bool, under_load: bool) -> Arrived {
    Arrived {
        path: 0,
        trusted,
        from: SOURCE.parse().expect("an address"),
        peer_there: None,
        under_load,
    }
}

type Agreed = (Suite, Integrity);

fn ends(agreed: Agreed) -> (End, End) {
    let script = |key, index| Script { key, index };
    let initiator = script(INITIATOR_EPHEMERAL, INITIATOR_INDEX);
    let responder = script(RESPONDER_EPHEMERAL, RESPONDER_INDEX);
    (
        End::new(INITIATOR, RESPONDER, agreed, initiator),
        End::new(RESPONDER, INITIATOR, agreed, responder),
    )
}

/// A finished handshake.
pub(crate) struct Handshake {
    pub(crate) message_1: Vec<u8>,
    pub(crate) message_2: Vec<u8>,
    pub(crate) session: SessionId,
    pub(crate) epochs: EpochSecrets,
    initiator: End,
    responder: End,
}

pub(crate) fn handshake(agreed: Agreed) -> Handshake {
    let (initiator, responder) = ends(agreed);
    handshake_between(initiator, responder, true)
}

/// The handshake after that one, by an untrusted path.
pub(crate) fn chained(agreed: Agreed) -> Handshake {
    let Handshake {
        initiator,
        responder,
        ..
    } = handshake(agreed);
    handshake_between(initiator, responder, false)
}

fn handshake_between(mut initiator: End, mut responder: End, trusted: bool) -> Handshake {
    let message_1 = initiator.call(trusted);
    let answer = responder.sessions.handle(
        Time::ZERO,
        arrived(trusted, false),
        &message_1,
        |_| hello(0x2222_2222_2222_2222),
        &mut responder.script,
    );
    let message_2 = answer.reply.expect("a good message 1 is answered");
    let outcome = initiator.sessions.handle(
        Time::ZERO,
        arrived(trusted, false),
        &message_2,
        |_| panic!("message 2 is answered by data"),
        &mut initiator.script,
    );
    let established = outcome.established.expect("a good message 2 ends it");
    Handshake {
        message_1,
        message_2,
        session: established.session,
        epochs: established.epochs,
        initiator,
        responder,
    }
}

/// Message 1, the cookie that it is answered with under load, and message 1 with the proof.
pub(crate) fn cookie() -> [Vec<u8>; 3] {
    let (mut initiator, mut responder) = ends((Suite::Aes256Gcm, Integrity::On));
    let message_1 = initiator.call(true);
    let mut answer = |message: &[u8]| {
        let hello = |_| hello(0);
        let (end, now) = (&mut responder, Time::ZERO);
        end.sessions
            .handle(now, arrived(true, true), message, hello, &mut end.script)
    };
    let outcome = answer(&message_1);
    assert_eq!(outcome.dropped, Some(Dropped::CookieDemanded));
    let reply = outcome.reply.expect("the cookie");
    let (end, hello) = (&mut initiator, |_| panic!("a cookie is not answered"));
    let taken = end.sessions.handle(
        Time::ZERO,
        arrived(true, false),
        &reply,
        hello,
        &mut end.script,
    );
    assert_eq!(taken.dropped, None);
    let again = initiator.call(true);
    assert!(answer(&again).established.is_some(), "the proof holds");
    [message_1, reply, again]
}

/// A ticket, the hello that carries it, and message 1 of a host that joins by an untrusted path. No preshared key is in it.
fn joining() -> [Vec<u8>; 3] {
    let ticket = [&TOKEN[..], JOINS_AS.as_bytes()].concat();
    let hello = [hello(0x1111_1111_1111_1111).as_bytes(), &ticket].concat();
    let (mut initiator, _) = ends((Suite::Aes256Gcm, Integrity::On));
    let said = Hello::new(hello.clone()).expect("58 bytes");
    let message_1 = initiator.call_saying(&said, false);
    [ticket, hello, message_1]
}

/// The plaintext of the vectors.
pub(crate) fn plaintext() -> Vec<u8> {
    b"0123456789".repeat(13)
}

pub(crate) fn epoch_buffer(epochs: &EpochSecrets) -> [u8; 64] {
    let key = epochs.epoch_key(Direction::Outgoing, FLOW, INCARNATION.into(), EPOCH);
    initial_buffer(&key.initial_mac())
}

/// The header block of the vectors: the first chunk of a flow. A bare one may open none.
pub(crate) fn header_block(session: SessionId, open: bool) -> Vec<u8> {
    let chunk = Chunk {
        flow: FLOW,
        incarnation: INCARNATION,
        solo: false,
        ahead: 0,
        first: true,
        detached: false,
        withheld: false,
        epoch: EPOCH,
        offset: BASE_OFFSET,
        crc: crc32c(&plaintext()),
        tcp: frames::fields(),
        open: open.then(|| frames::open(session.as_u64())),
    };
    let mut block = vec![0; frame::chunk_len(&chunk.tcp, chunk.solo, chunk.open.as_ref())];
    chunk.encode(&mut Writer::new(&mut block));
    block
}

/// The datagram before it is sealed, without the room for a tag.
pub(crate) fn open_datagram(payload: &[u8], block: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0; CLEAR_HEADER_LEN];
    datagram.extend_from_slice(payload);
    datagram.extend_from_slice(block);
    datagram
}

impl Handshake {
    pub(crate) fn scrambled(&self) -> Vec<u8> {
        let mut bytes = plaintext();
        Scrambler::new(&epoch_buffer(&self.epochs)).scramble_in_place(&mut bytes);
        bytes
    }

    fn datagram(&mut self, payload: &[u8], inside: bool) -> Vec<u8> {
        self.datagram_at(SEQ, payload, inside)
    }

    fn datagram_at(&mut self, seq: u64, payload: &[u8], inside: bool) -> Vec<u8> {
        let block = header_block(self.session, true);
        let mut datagram = open_datagram(payload, &block);
        datagram.resize(OVERHEAD + payload.len() + block.len(), 0);
        let End { sessions, peer, .. } = &mut self.initiator;
        let session = sessions.sending(Time::ZERO, *peer).expect("established");
        session
            .seal(&mut datagram, PathId::new(PATH), seq, block.len(), inside)
            .expect("the first datagram of a path");
        datagram
    }

    /// The masks of four shape fields in a row.
    fn shape_masks(&mut self) -> Vec<u8> {
        let shape = header_block(self.session, true).len() as u16;
        let mask = |seq| {
            let datagram = self.datagram_at(seq, &[], false);
            (u16::from_be_bytes([datagram[2], datagram[3]]) ^ shape).to_be_bytes()
        };
        (SEQ..SEQ + 4).flat_map(mask).collect()
    }

    fn bare_datagram(&mut self, payload: &[u8]) -> Vec<u8> {
        let block = header_block(self.session, false);
        let mut datagram = open_datagram(payload, &block);
        let End { sessions, peer, .. } = &mut self.initiator;
        let session = sessions.sending(Time::ZERO, *peer).expect("established");
        session
            .seal_bare(&mut datagram, PathId::new(PATH), SEQ, block.len())
            .expect("both ends agreed to it");
        datagram
    }
}

pub(crate) fn vectors() -> Vec<Vector> {
    let mut aes = handshake((Suite::Aes256Gcm, Integrity::On));
    let chained = chained((Suite::Aes256Gcm, Integrity::On));
    let scrambled = aes.scrambled();
    let epoch = aes
        .epochs
        .epoch_key(Direction::Outgoing, FLOW, INCARNATION.into(), EPOCH);
    let solo = epoch.solo(SOLO_OFFSET);
    let [_, cookie_reply, again] = cookie();
    let outside = aes.datagram(&scrambled, false);
    let inside = handshake((Suite::Aes256Gcm, Integrity::On)).datagram(&plaintext(), true);
    let shape_masks = handshake((Suite::Aes256Gcm, Integrity::On)).shape_masks();
    let mut chacha = handshake((Suite::ChaCha20Poly1305, Integrity::On));
    let chacha_payload = chacha.scrambled();
    let mut off = handshake((Suite::Aes256Gcm, Integrity::Off));
    let off_payload = off.scrambled();
    let [ticket, joining_hello, joining_message_1] = joining();
    vec![
        ("token", TOKEN.to_vec()),
        ("token_public", public(TOKEN).as_bytes().to_vec()),
        ("ticket", ticket),
        ("joining_hello", joining_hello),
        ("joining_message_1", joining_message_1),
        ("initiator_private", INITIATOR.to_vec()),
        ("initiator_public", public(INITIATOR).as_bytes().to_vec()),
        ("responder_private", RESPONDER.to_vec()),
        ("responder_public", public(RESPONDER).as_bytes().to_vec()),
        ("preshared_key", PRESHARED.to_vec()),
        ("initiator_ephemeral", INITIATOR_EPHEMERAL.to_vec()),
        ("responder_ephemeral", RESPONDER_EPHEMERAL.to_vec()),
        (
            "initiator_hello",
            hello(0x1111_1111_1111_1111).as_bytes().to_vec(),
        ),
        (
            "responder_hello",
            hello(0x2222_2222_2222_2222).as_bytes().to_vec(),
        ),
        ("message_1", aes.message_1.clone()),
        ("mac1_of_message_1", aes.message_1[1168..1184].to_vec()),
        ("shape_masks", shape_masks),
        ("message_2", aes.message_2.clone()),
        ("cookie_secret", COOKIE_SECRET.to_vec()),
        ("cookie_reply", cookie_reply),
        (
            "mac2_of_the_next_message_1",
            again[again.len() - 16..].to_vec(),
        ),
        ("session_id", aes.session.as_u64().to_be_bytes().to_vec()),
        ("chained_message_1", chained.message_1),
        ("chained_message_2", chained.message_2),
        (
            "chained_session_id",
            chained.session.as_u64().to_be_bytes().to_vec(),
        ),
        ("epoch_key", epoch.secret().as_bytes().to_vec()),
        ("epoch_mac", epoch.initial_mac().to_vec()),
        ("solo_key", solo.secret().as_bytes().to_vec()),
        ("solo_mac", solo.initial_mac().to_vec()),
        ("initial_buffer", epoch_buffer(&aes.epochs).to_vec()),
        ("plaintext", plaintext()),
        ("scrambled", scrambled),
        ("header_block", header_block(aes.session, true)),
        ("datagram", outside),
        ("datagram_payload_inside", inside),
        (
            "datagram_chacha20_poly1305",
            chacha.datagram(&chacha_payload, false),
        ),
        ("datagram_bare", off.bare_datagram(&off_payload)),
    ]
}

#[test]
fn the_rules_of_the_document_give_the_same_bytes() {
    let documented = documented();
    for (name, bytes) in rules::vectors() {
        let found = documented.get(name);
        assert_eq!(found, Some(&bytes), "{name} of docs/protocol.md");
    }
}

#[test]
fn a_node_says_hello_as_documented() {
    let config = NodeConfig {
        private: Box::new(StaticSecret::from(INITIATOR)),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: dibs_settings::Handshake::Chained,
        paths: vec![LocalPath {
            trusted: true,
            mtu: 1500,
            up: true,
            usage: Usage::default(),
            addresses: Vec::new(),
            public: Vec::new(),
        }],
        peers: vec![PeerConfig {
            public: public(RESPONDER),
            preshared: Some(Box::new(Secret::new(PRESHARED))),
            prefixes: Vec::new(),
            accept: vec![Opening::ANY],
            endpoints: vec![(0, SOURCE.parse().expect("an address"))],
            appears_as: Vec::new(),
        }],
        addresses: Vec::new(),
        reachable: Vec::new(),
        gateway: Vec::new(),
        exit: Vec::new(),
        trusted_share: 0.05,
        bumps: vec![
            bump::scramble(),
            bump::share(Scheme::new(2, 2).expect("two of two")),
            bump::seal(Padding::None),
        ],
        pads: bump::Pads::new(&[8; 32]),
        hold_without_trusted: true,
        scheduler: Scheduler::Balanced,
        hint: None,
    };
    let mut node = Node::new(Time::ZERO, config, [9; 32]).expect("another key");
    let [ticket, expected, _] = joining();
    node.set_ticket(0, Ticket::new(ticket.into()).expect("35 bytes"));
    node.handle_timeout(Time::ZERO, WALL);
    let call = node.poll_transmit(Time::ZERO).expect("it calls its peer");
    let found = rules::hello_of(call.bytes);
    let (version, rest) = found.split_at(1);
    assert_eq!((version, &rest[8..]), (&[1][..], &expected[9..]));
}
