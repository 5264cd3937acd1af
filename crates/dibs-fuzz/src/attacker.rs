//! A peer that has the keys and keeps to no rule: what it says is authentic.

use std::collections::BTreeMap;

use dibs_core::Time;
use dibs_core::session::{
    Arrived, CLEAR_HEADER_LEN, Config, Direction, EpochSecrets, Hello, Integrity, OVERHEAD, PathId,
    PeerId, PublicKey, SeededRandom, Sessions, Way, is_handshake,
};
use dibs_scramble::{BUFFER_LEN, Scrambler, initial_buffer};
use dibs_settings::Handshake;
use dibs_wire::frame::{FlowId, Frame, Frames};

use crate::host::{self, wall};

/// What it remembers of a path.
#[derive(Clone, Copy, Default)]
pub(crate) struct PathMemory {
    next_seq: u64,
    /// The highest number that the other end used.
    pub(crate) seen: Option<u64>,
    /// The last question of the other end.
    pub(crate) challenge: [u8; 8],
    pub(crate) nonce: [u8; 8],
}

pub(crate) struct Attacker {
    sessions: Sessions,
    peer: PeerId,
    rng: SeededRandom,
    /// What it says of itself in a handshake.
    pub(crate) hello: Hello,
    pub(crate) epochs: Option<EpochSecrets>,
    paths: Vec<PathMemory>,
    /// By flow, incarnation and epoch.
    chains: BTreeMap<(FlowId, u16, u32), Scrambler>,
    /// A flow of the other end: number, incarnation, epoch.
    pub(crate) heard: (FlowId, u16, u32),
}

impl Attacker {
    /// It plays host 0.
    pub(crate) fn new(now: Time, integrity: Integrity, other_suite: bool) -> Self {
        let mut rng = SeededRandom::new([11; 32]);
        let config = Config {
            private: Box::new(host::key(0)),
            suite: host::suite(other_suite),
            integrity,
            handshake: Handshake::Any,
        };
        let mut sessions = Sessions::new(config, now, &mut rng);
        let peer = sessions
            .add_peer(PublicKey::from(&host::key(1)), Some(host::preshared()))
            .expect("two different keys");
        Self {
            sessions,
            peer,
            rng,
            hello: Hello::new(hello(1, 32 << 10)).expect("a few bytes"),
            epochs: None,
            paths: vec![PathMemory::default(); 256],
            chains: BTreeMap::new(),
            heard: (FlowId::new(0), 0, 0),
        }
    }

    /// A first handshake message.
    pub(crate) fn call(&mut self, now: Time) -> Vec<u8> {
        self.sessions.initiate(
            now,
            wall(now),
            self.peer,
            Way::new(true),
            &self.hello,
            &mut self.rng,
        )
    }

    /// Takes what the other end sent, and answers a call.
    pub(crate) fn take(&mut self, now: Time, mut datagram: Vec<u8>) -> Option<Vec<u8>> {
        if is_handshake(&datagram) {
            let arrived = Arrived {
                path: 0,
                trusted: true,
                from: host::addr(1, 0),
                peer_there: None,
                under_load: false,
            };
            let hello = self.hello.clone();
            let outcome = self
                .sessions
                .handle(now, arrived, &datagram, |_| hello, &mut self.rng);
            if let Some(established) = outcome.established {
                self.epochs = Some(established.epochs);
            }
            return outcome.reply;
        }
        let received = self.sessions.open(now, &mut datagram).ok()?;
        let opened = received.opened;
        let memory = &mut self.paths[opened.path_id.index()];
        memory.seen = memory.seen.max(Some(opened.seq));
        for frame in Frames::new(opened.header) {
            match frame.expect("an honest node sends no malformed frames") {
                Frame::PathJoin { nonce, .. } => memory.nonce = nonce,
                Frame::PathAccept { challenge, .. } | Frame::PathChallenge { challenge } => {
                    memory.challenge = challenge;
                }
                Frame::Chunk(chunk) => self.heard = (chunk.flow, chunk.incarnation, chunk.epoch),
                Frame::Segment(segment) => {
                    (self.heard.0, self.heard.1) = (segment.flow, segment.incarnation);
                }
                _ => {}
            }
        }
        None
    }

    pub(crate) fn path(&self, id: u8) -> PathMemory {
        self.paths[usize::from(id)]
    }

    /// Leaves out some numbers of a path.
    pub(crate) fn skip(&mut self, id: u8, numbers: u64) {
        let next = &mut self.paths[usize::from(id)].next_seq;
        *next = next.saturating_add(numbers);
    }

    /// A datagram of this header block and payload; none without a session.
    pub(crate) fn seal(
        &mut self,
        now: Time,
        path: u8,
        header: &[u8],
        payload: &[u8],
        inside: bool,
        bare: bool,
    ) -> Option<Vec<u8>> {
        let session = self.sessions.sending(now, self.peer)?;
        let next = &mut self.paths[usize::from(path)].next_seq;
        let (path, seq) = (PathId::new(path), *next);
        *next = next.saturating_add(1);
        let mut datagram = vec![0; OVERHEAD + header.len() + payload.len()];
        let header_at = CLEAR_HEADER_LEN + payload.len();
        datagram[CLEAR_HEADER_LEN..header_at].copy_from_slice(payload);
        datagram[header_at..][..header.len()].copy_from_slice(header);
        let sealed = if bare {
            datagram.truncate(header_at + header.len());
            session.seal_bare(&mut datagram, path, seq, header.len())
        } else {
            session.seal(&mut datagram, path, seq, header.len(), inside)
        };
        sealed.ok().map(|()| datagram)
    }

    /// The name of the session whose keys it uses.
    pub(crate) fn session(&self) -> u64 {
        self.epochs.as_ref().map_or(0, |e| e.session().as_u64())
    }

    /// Scrambles the next bytes of an epoch, or a solo chunk of it.
    pub(crate) fn scramble(
        &mut self,
        (flow, incarnation, epoch): (FlowId, u16, u32),
        solo_at: Option<u64>,
        plain: &[u8],
    ) -> Vec<u8> {
        let mut sent = plain.to_vec();
        let Some(epochs) = &self.epochs else {
            return sent;
        };
        let buffer = || -> [u8; BUFFER_LEN] {
            let key = epochs.epoch_key(Direction::Outgoing, flow, u32::from(incarnation), epoch);
            let key = match solo_at {
                Some(offset) => key.solo(offset),
                None => key,
            };
            initial_buffer(&key.initial_mac())
        };
        if solo_at.is_some() {
            Scrambler::new(&buffer()).scramble_in_place(&mut sent);
        } else {
            self.chains
                .entry((flow, incarnation, epoch))
                .or_insert_with(|| Scrambler::new(&buffer()))
                .scramble_in_place(&mut sent);
        }
        sent
    }

    /// Begins an epoch's chain anew.
    pub(crate) fn restart_chain(&mut self, chain: (FlowId, u16, u32)) {
        self.chains.remove(&chain);
    }
}

/// A hello of this instance, with so many KiB of room.
pub(crate) fn hello(instance: u64, room: u32) -> Vec<u8> {
    [&[1][..], &instance.to_be_bytes(), &room.to_be_bytes()].concat()
}
