//! Handshakes between two peers and a stranger who knows their public keys: messages delivered,
//! changed, replayed, crossed, lost, under load and not, in any order.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::session::{
    Arrived, Config, HandshakeOutcome, Hello, Integrity, MAX_HELLO, OVERHEAD, PathId, PeerId,
    PublicKey, Role, SeededRandom, SessionId, Sessions, Way, is_handshake,
};
use dibs_settings::Handshake;

use crate::host;
use crate::input::Input;

/// Two peers, and one whom neither knows.
const PARTIES: usize = 3;
/// Where the proof of an address begins, in message 1.
const MAC2_AT: usize = 1184;
/// Datagrams that are remembered.
const KEPT: usize = 64;

struct Party {
    sessions: Sessions,
    peers: Vec<PeerId>,
    hello: Hello,
    next_seq: u64,
    /// Messages 1 that led to a session since the start.
    answered: HashSet<Vec<u8>>,
}

struct Parties {
    now: Time,
    wall: Duration,
    rng: SeededRandom,
    integrity: Integrity,
    parties: Vec<Party>,
    /// Every handshake datagram and its sender.
    sent: Vec<(usize, Vec<u8>)>,
    genuine: HashSet<Vec<u8>>,
    /// What was sealed, and what it says.
    sealed: HashMap<Vec<u8>, Vec<u8>>,
    /// Those that a responder began.
    begun: HashSet<SessionId>,
}

/// The first byte sets the scene; operations follow.
pub fn handshake(data: &[u8]) {
    let mut input = Input::new(data);
    let mut all = Parties::new(input.u8());
    input.each(64, |input| {
        all.step(input);
        true
    });
}

impl Parties {
    fn new(scene: u8) -> Self {
        let integrity = host::integrity(scene);
        let mut all = Self {
            now: Time::ZERO + Duration::from_secs(1),
            wall: Duration::from_secs(1_000_000),
            rng: SeededRandom::new([scene; 32]),
            integrity,
            parties: Vec::new(),
            sent: Vec::new(),
            genuine: HashSet::new(),
            sealed: HashMap::new(),
            begun: HashSet::new(),
        };
        for number in 0..PARTIES {
            let party = all.party(number, scene & 2 << number != 0);
            all.parties.push(party);
        }
        all
    }

    fn party(&mut self, number: usize, other_suite: bool) -> Party {
        let config = Config {
            private: Box::new(host::key(number)),
            suite: host::suite(other_suite),
            integrity: self.integrity,
            handshake: Handshake::Any,
        };
        let mut sessions = Sessions::new(config, self.now, &mut self.rng);
        // The stranger calls both; they know only each other.
        let known: &[usize] = match number {
            0 => &[1],
            1 => &[0],
            _ => &[0, 1],
        };
        let peers = known.iter().map(|&other| {
            let public = PublicKey::from(&host::key(other));
            let added = sessions.add_peer(public, Some(host::preshared()));
            added.expect("different keys")
        });
        Party {
            peers: peers.collect(),
            sessions,
            hello: Hello::default(),
            next_seq: 0,
            answered: HashSet::new(),
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.u8();
        let who = input.below(PARTIES);
        match op % 10 {
            0 => self.call(who, input),
            1 | 2 => self.deliver(who, input, false),
            3 => self.deliver(who, input, true),
            4 => {
                let kind = input.below(4) as u8;
                let bytes = [&[kind], input.block()].concat();
                self.hand(who, input.u8(), &bytes);
            }
            5 => self.now += Duration::from_millis(u64::from(input.u16())),
            6 => {
                let minutes = u64::from(input.u8() & 3);
                self.now += Duration::from_secs(60 * minutes);
                self.timeouts(who);
            }
            7 => self.data(who, input),
            8 => {
                // The clock of a host may be set back.
                let step = Duration::from_secs(u64::from(input.u16()));
                self.wall = if input.flag() {
                    self.wall + step
                } else {
                    self.wall.saturating_sub(step)
                };
            }
            _ => self.parties[who] = self.party(who, input.flag()),
        }
    }

    fn call(&mut self, who: usize, input: &mut Input<'_>) {
        let len = usize::from(input.u16()) % (MAX_HELLO + 2);
        let peer = input.below(2);
        match Hello::new(vec![who as u8; len]) {
            Ok(hello) => self.parties[who].hello = hello,
            Err(_) => assert!(len > MAX_HELLO),
        }
        let trusted = input.flag();
        self.call_peer(who, peer, trusted);
    }

    fn call_peer(&mut self, who: usize, peer: usize, trusted: bool) {
        let (now, wall) = (self.now, self.wall);
        let party = &mut self.parties[who];
        let peer = party.peers[peer % party.peers.len()];
        let message = party.sessions.initiate(
            now,
            wall,
            peer,
            Way::new(trusted),
            &party.hello,
            &mut self.rng,
        );
        self.remember(who, message);
    }

    fn timeouts(&mut self, who: usize) {
        let party = &mut self.parties[who];
        let due = party.sessions.handle_timeout(self.now);
        for peer in due {
            self.call_peer(who, peer.index(), true);
        }
        let next = self.parties[who].sessions.poll_timeout();
        assert!(
            next.is_none_or(|t| t > self.now),
            "{next:?} is still due at {:?}",
            self.now
        );
    }

    fn remember(&mut self, who: usize, message: Vec<u8>) {
        assert!(is_handshake(&message));
        self.genuine.insert(message.clone());
        if self.sent.len() == KEPT {
            self.sent.remove(0);
        }
        self.sent.push((who, message));
    }

    /// Hands over something that was sent, changed or not.
    fn deliver(&mut self, to: usize, input: &mut Input<'_>, change: bool) {
        let from = input.u8();
        let back = 1 + input.below(8);
        let Some(at) = self.sent.len().checked_sub(back) else {
            return;
        };
        let mut bytes = self.sent[at].1.clone();
        if change {
            for _ in 0..=input.below(3) {
                let at = usize::from(input.u16()) % bytes.len();
                bytes[at] ^= input.u8();
            }
            let len = usize::from(input.u16());
            match input.below(6) {
                0 => bytes.truncate(len),
                1 => bytes.resize(bytes.len() + len % 64, 0),
                2 => {
                    // A piece of another message in its place.
                    let other = &self.sent[len % self.sent.len()].1;
                    let piece = len % bytes.len().min(other.len());
                    bytes[..piece].copy_from_slice(&other[..piece]);
                }
                _ => {}
            }
        }
        self.hand(to, from, &bytes);
    }

    /// `from`: the lower bits are the address and the path, the upper ones its label and whether the receiver is under
    /// load.
    fn hand(&mut self, to: usize, from: u8, bytes: &[u8]) {
        let arrived = Arrived {
            path: usize::from(from >> 2 & 1),
            trusted: from & 0x40 == 0,
            from: SocketAddr::from(([10, 9, 8, from & 3], 5300)),
            peer_there: None,
            under_load: from & 0x80 != 0,
        };
        let (now, party) = (self.now, &mut self.parties[to]);
        let hello = party.hello.clone();
        let sessions = &mut party.sessions;
        let outcome = sessions.handle(now, arrived, bytes, |_| hello, &mut self.rng);
        self.check(to, bytes, &outcome);
        if let Some(reply) = outcome.reply {
            self.remember(to, reply);
        }
    }

    fn check(&mut self, to: usize, bytes: &[u8], outcome: &HandshakeOutcome) {
        if let Some(reply) = &outcome.reply {
            assert!(reply.len() <= bytes.len(), "no answer is longer");
        }
        let Some(established) = &outcome.established else {
            return;
        };
        assert!(
            to < 2 && outcome.dropped.is_none(),
            "a stranger has no session"
        );
        // Message 1 proves an address behind its authentic part.
        let first = established.role == Role::Responder;
        let known = |sent: &Vec<u8>| {
            sent == bytes
                || (first && sent.len() == bytes.len() && sent[..MAC2_AT] == bytes[..MAC2_AT])
        };
        assert!(
            self.genuine.iter().any(known),
            "only what was sent as it came leads to a session"
        );
        if first {
            let fresh = self.parties[to].answered.insert(bytes[..MAC2_AT].to_vec());
            assert!(fresh, "a message 1 counts once");
            self.begun.insert(established.session);
        } else {
            assert!(self.begun.contains(&established.session), "both ends agree");
        }
    }

    /// Seals a datagram by whatever session there is and hands it over, changed or not.
    fn data(&mut self, who: usize, input: &mut Input<'_>) {
        let other = 1 - who.min(1);
        let (path, payload_inside) = (input.u8(), input.flag());
        let (header, payload) = (input.block(), input.block());
        let change = input.u16();
        let peer = self.parties[who].peers[0];
        let seq = self.parties[who].next_seq;
        self.parties[who].next_seq += 1;
        let mut sealed = vec![0; OVERHEAD + header.len() + payload.len()];
        sealed[16..][..payload.len()].copy_from_slice(payload);
        sealed[16 + payload.len()..][..header.len()].copy_from_slice(header);
        let Some(session) = self.parties[who].sessions.sending(self.now, peer) else {
            return self.garbage(other, &mut sealed);
        };
        session
            .seal(
                &mut sealed,
                PathId::new(path),
                seq,
                header.len(),
                payload_inside,
            )
            .expect("each number is used once");
        let content = [header, payload].concat();
        self.sealed.insert(sealed.clone(), content);
        if change > 0x8000 {
            let at = usize::from(change) % sealed.len();
            sealed[at] ^= 1 + (change >> 8) as u8 % 255;
        }
        for _ in 0..2 {
            self.open(other, &sealed);
        }
    }

    fn garbage(&mut self, to: usize, bytes: &mut [u8]) {
        let opened = self.parties[to].sessions.open(self.now, bytes);
        assert!(opened.is_err(), "it was sealed by nobody");
    }

    fn open(&mut self, to: usize, datagram: &[u8]) {
        let bare = datagram[0] == 6;
        let mut bytes = datagram.to_vec();
        let Ok(received) = self.parties[to].sessions.open(self.now, &mut bytes) else {
            return;
        };
        let opened = received.opened;
        if !opened.authenticated {
            assert!(bare && self.integrity == Integrity::Off && !received.confirmed);
            return;
        }
        // Opened once: what comes again is a replay.
        let content = self.sealed.remove(datagram);
        let got = [opened.header, &*opened.payload].concat();
        assert_eq!(content, Some(got), "what opens was sealed, and not opened");
    }
}
