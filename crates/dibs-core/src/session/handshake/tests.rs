use std::collections::BTreeMap;

use dibs_settings::Handshake;
use dibs_wire::frame::FlowId;
use proptest::prelude::*;

use super::*;
use crate::session::REJECT_AFTER;
use crate::session::keys::{Integrity, KeyOrigin, PathId, Secret};
use crate::session::message::{INITIATION_LEN, MAX_HELLO};
use crate::session::peer::{AddPeerError, PeerState};
use crate::session::random::SeededRandom;
use crate::session::seal::OpenError;
use crate::session::seal::{KeyLimits, OVERHEAD};
use x25519_dalek::{PublicKey, StaticSecret};

mod attacks;
mod chain;
mod rekey;

const WALL: Duration = Duration::from_secs(1_700_000_000);

fn ms(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

fn at(seconds: u64) -> Time {
    ms(1000 * seconds)
}

/// One end of a link, with what it heard.
struct Node {
    name: u8,
    sessions: Sessions,
    peer: PeerId,
    rng: SeededRandom,
    seq: u64,
    under_load: bool,
    /// Its peer is known to be where datagrams come from.
    knows_place: bool,
    /// How it labels the only path.
    trusted: bool,
    established: Vec<Established>,
    dropped: Vec<Dropped>,
    not_opened: Vec<OpenError>,
}

impl Node {
    fn new(name: u8, sessions: Sessions, peer: PeerId, rng: SeededRandom) -> Self {
        Self {
            name,
            sessions,
            peer,
            rng,
            seq: 0,
            under_load: false,
            knows_place: false,
            trusted: true,
            established: Vec::new(),
            dropped: Vec::new(),
            not_opened: Vec::new(),
        }
    }

    fn source(&self) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, self.name], 5300))
    }

    fn hello(&self) -> Hello {
        Hello::new(vec![self.name; 10]).unwrap()
    }

    fn wall(now: Time) -> Duration {
        WALL + now.since(Time::ZERO)
    }

    fn initiate(&mut self, now: Time) -> Vec<u8> {
        self.initiate_at(now, Self::wall(now))
    }

    /// The same when its clock says `wall`.
    fn initiate_at(&mut self, now: Time, wall: Duration) -> Vec<u8> {
        let (hello, rng) = (self.hello(), &mut self.rng);
        { &mut self.sessions }.initiate(now, wall, self.peer, Way::new(self.trusted), &hello, rng)
    }

    fn handle(&mut self, now: Time, source: SocketAddr, datagram: &[u8]) -> HandshakeOutcome {
        let hello = self.hello();
        let arrived = Arrived {
            path: 0,
            trusted: self.trusted,
            from: source,
            peer_there: self.knows_place.then_some(self.peer),
            under_load: self.under_load,
        };
        let outcome = self
            .sessions
            .handle(now, arrived, datagram, |_| hello, &mut self.rng);
        let reply = outcome.reply.as_ref().map_or(0, Vec::len);
        assert!(
            reply <= datagram.len(),
            "an answer is never larger than its request"
        );
        outcome
    }

    fn timeout(&mut self, now: Time) -> Vec<Vec<u8>> {
        let due = self.sessions.handle_timeout(now);
        due.iter().map(|_| self.initiate(now)).collect()
    }

    /// A datagram of data, if there is a session to send it by.
    fn data(&mut self, now: Time) -> Option<Vec<u8>> {
        let session = self.sessions.sending(now, self.peer)?;
        let mut datagram = vec![0; OVERHEAD + 4];
        self.seq += 1;
        session
            .seal(&mut datagram, PathId::new(0), self.seq, 4, false)
            .unwrap();
        Some(datagram)
    }

    fn current(&mut self, now: Time) -> Option<SessionId> {
        self.sessions
            .sending(now, self.peer)
            .map(|session| session.id())
    }

    /// Takes any datagram, as a node does; returns what is to be sent back.
    fn receive(&mut self, now: Time, source: SocketAddr, datagram: &[u8]) -> Option<Vec<u8>> {
        if !message::is_handshake(datagram) {
            let mut datagram = datagram.to_vec();
            self.not_opened
                .extend(self.sessions.open(now, &mut datagram).err());
            return None;
        }
        let outcome = self.handle(now, source, datagram);
        self.dropped.extend(outcome.dropped);
        let initiated = outcome
            .established
            .as_ref()
            .is_some_and(|e| e.role == Role::Initiator);
        self.established.extend(outcome.established);
        outcome
            .reply
            .or_else(|| if initiated { self.data(now) } else { None })
    }
}

struct Options {
    suite: Suite,
    integrity: [Integrity; 2],
    psk: [Option<u8>; 2],
    limits: KeyLimits,
    handshake: [Handshake; 2],
    seed: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            suite: Suite::Aes256Gcm,
            integrity: [Integrity::On; 2],
            psk: [None; 2],
            limits: KeyLimits::default(),
            handshake: [Handshake::Trusted; 2],
            seed: 1,
        }
    }
}

/// Two nodes that know each other; the first has the smaller public key.
fn pair_with(options: &Options) -> [Node; 2] {
    let mut keys = [[11; 32], [22; 32]].map(StaticSecret::from);
    keys.sort_by_key(|key| PublicKey::from(key).to_bytes());
    let public = [PublicKey::from(&keys[0]), PublicKey::from(&keys[1])];
    let mut end = 0;
    keys.map(|private| {
        let this = end;
        end += 1;
        let mut rng = SeededRandom::new([options.seed.wrapping_mul(2) + this as u8; 32]);
        let integrity = options.integrity[this];
        let config = Config {
            private: Box::new(private),
            suite: options.suite,
            integrity,
            handshake: options.handshake[this],
        };
        let mut sessions =
            Sessions::new(config, Time::ZERO, &mut rng).with_key_limits(options.limits);
        let psk = options.psk[this].map(|byte| Box::new(Secret::new([byte; 32])));
        let peer = sessions.add_peer(public[1 - this], psk).unwrap();
        Node::new(this as u8 + 1, sessions, peer, rng)
    })
}

/// A session whose keys are good for sixteen datagrams.
fn short_lived() -> [Node; 2] {
    let [mut a, mut b] = pair_with(&Options {
        limits: KeyLimits {
            per_phase: 4,
            phases: 4,
            previous_kept: 2,
        },
        ..Options::default()
    });
    connect(at(0), &mut a, &mut b);
    [a, b]
}

fn pair() -> [Node; 2] {
    pair_with(&Options::default())
}

/// Runs the whole handshake and the datagram that confirms it.
fn connect(now: Time, from: &mut Node, to: &mut Node) {
    let first = from.initiate(now);
    let second = to.receive(now, from.source(), &first).expect("message 2");
    let data = from
        .receive(now, to.source(), &second)
        .expect("the confirming datagram");
    assert_eq!(to.receive(now, from.source(), &data), None);
    assert_eq!(from.current(now), to.current(now));
    assert!(from.current(now).is_some());
}

/// What a forger can always do who knows whom the message is for.
fn with_mac1(mut message: Vec<u8>, to: &Node) -> Vec<u8> {
    let end = if message.len() == INITIATION_LEN {
        INITIATION_LEN - 32
    } else {
        message.len() - 16
    };
    let mac1 = to.sessions.macs.mac1(&message[..end]);
    message[end..end + 16].copy_from_slice(&mac1);
    message
}

#[test]
fn a_handshake_gives_both_the_same_session() {
    for suite in [Suite::Aes256Gcm, Suite::ChaCha20Poly1305] {
        for psk in [None, Some(7)] {
            let options = Options {
                suite,
                psk: [psk; 2],
                ..Options::default()
            };
            let [mut a, mut b] = pair_with(&options);
            let first = a.initiate(at(0));
            assert_eq!(a.sessions.state(at(0), a.peer), PeerState::Connecting);
            let answered = b.handle(at(0), a.source(), &first);
            let at_b = answered.established.unwrap();
            assert_eq!((at_b.peer, at_b.role), (b.peer, Role::Responder));
            assert!(at_b.hello == a.hello());

            let finished = a.handle(at(0), b.source(), &answered.reply.unwrap());
            let at_a = finished.established.unwrap();
            assert_eq!((at_a.session, at_a.role), (at_b.session, Role::Initiator));
            assert!(at_a.hello == b.hello());
            let epoch =
                |e: &Established, d| e.epochs.epoch_key(d, FlowId::new(1), 2, 3).initial_mac();
            use crate::session::Direction::{Incoming, Outgoing};
            assert_eq!(epoch(&at_a, Outgoing), epoch(&at_b, Incoming));
            assert_eq!(epoch(&at_a, Incoming), epoch(&at_b, Outgoing));

            assert!(
                b.data(at(0)).is_none(),
                "nothing is sent by an unconfirmed session"
            );
            assert_eq!(b.sessions.state(at(0), b.peer), PeerState::Connecting);
            let mut data = a.data(at(0)).unwrap();
            let received = b.sessions.open(at(0), &mut data).ok().unwrap();
            assert!(received.confirmed && received.session == at_a.session);
            let mut data = b.data(at(0)).unwrap();
            let received = a.sessions.open(at(0), &mut data).ok().unwrap();
            assert!(!received.confirmed && received.peer == a.peer);
            assert_eq!(b.sessions.sending(at(0), b.peer).unwrap().suite(), suite);
            for node in [&a, &b] {
                assert_eq!(
                    node.sessions.state(at(0), node.peer),
                    PeerState::Established
                );
                assert_eq!(node.sessions.indices.len(), 1);
            }
        }
    }
}

#[test]
fn hellos_of_any_allowed_length_fit() {
    for length in [0, 1, MAX_HELLO] {
        let [mut a, mut b] = pair();
        let hello = Hello::new(vec![9; length]).unwrap();
        let first =
            { &mut a.sessions }.initiate(at(0), WALL, a.peer, Way::new(true), &hello, &mut a.rng);
        assert_eq!(first.len(), INITIATION_LEN);
        let arrived = Arrived {
            path: 0,
            trusted: true,
            from: a.source(),
            peer_there: None,
            under_load: false,
        };
        let outcome = b
            .sessions
            .handle(at(0), arrived, &first, |_| hello.clone(), &mut b.rng);
        assert!(outcome.established.unwrap().hello == hello);
        let reply = outcome.reply.unwrap();
        assert!(reply.len() <= first.len());
        let outcome = a.handle(at(0), b.source(), &reply);
        assert!(outcome.established.unwrap().hello == hello);
    }
}

#[test]
fn replayed_messages_are_refused() {
    let [mut a, mut b] = pair();
    let older = a.initiate(at(0));
    let first = a.initiate(at(1));
    let second = b.handle(at(1), a.source(), &first).reply.unwrap();
    for replayed in [&first, &older] {
        let outcome = b.handle(at(2), a.source(), replayed);
        assert_eq!(outcome.dropped, Some(Dropped::Replayed));
        assert!(outcome.reply.is_none() && outcome.established.is_none());
    }
    assert!(a.handle(at(2), b.source(), &second).established.is_some());
    assert_eq!(
        a.handle(at(2), b.source(), &second).dropped,
        Some(Dropped::UnknownIndex)
    );
}

#[test]
fn a_clock_set_back_does_not_lock_us_out() {
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    let first = a.initiate_at(at(1), WALL - Duration::from_secs(3600));
    assert!(b.handle(at(1), a.source(), &first).established.is_some());
}

/// The other end restarted, so nothing but the clock says that its call is later.
#[test]
fn a_clock_set_back_over_a_restart_is_told_of() {
    let [_, mut b] = pair();
    let mut call = |seconds: u64, back: u64| {
        let wall = WALL + Duration::from_secs(seconds) - Duration::from_secs(back);
        // Of another instance each time.
        let [mut a, _] = pair();
        let first = a.initiate_at(at(seconds), wall);
        b.handle(at(seconds), a.source(), &first)
    };
    assert!(call(0, 0).established.is_some());
    let refused = call(10, 3610);
    assert_eq!(refused.dropped, Some(Dropped::Replayed));
    let (_, behind) = refused.outdated.unwrap();
    assert_eq!(behind, Duration::from_secs(3600));
    assert!(call(11, 3611).outdated.is_none(), "told a moment ago");
    assert!(call(40, 3640).outdated.is_some());
    // Two calls that overtake each other are nothing to be told.
    assert!(call(90, 91).outdated.is_none());
    assert!(call(91, 0).established.is_some());
}

#[test]
fn a_message_of_before_a_restart_does_no_harm() {
    let [mut a, mut b] = pair();
    let recorded = a.initiate(at(0));
    let second = b.receive(at(0), a.source(), &recorded).unwrap();
    a.receive(at(0), b.source(), &second);
    let [_, mut restarted] = pair_with(&Options {
        seed: 9,
        ..Options::default()
    });
    let call = restarted.initiate(at(10));

    // The replay is answered, for nobody remembers it, but goes no further.
    let reply = restarted.receive(at(10), a.source(), &recorded).unwrap();
    assert_eq!(
        a.handle(at(10), restarted.source(), &reply).dropped,
        Some(Dropped::UnknownIndex)
    );
    assert_eq!(restarted.current(at(10)), None);
    assert!(a.current(at(10)).is_some(), "the old session stays");

    // The call that gave way to it is taken up again.
    let due = restarted.sessions.poll_timeout().unwrap();
    assert!(due <= at(12));
    let again = restarted.timeout(due);
    assert_eq!(again.len(), 1);
    assert_ne!(again[0], call);
    let reply = a.receive(due, restarted.source(), &again[0]).unwrap();
    let data = restarted.receive(due, a.source(), &reply).unwrap();
    a.receive(due, restarted.source(), &data);
    assert_eq!(a.current(due), restarted.current(due));
}

#[test]
fn strangers_and_disagreements_are_refused_by_name() {
    let drop_of = |options: &Options| {
        let [mut a, mut b] = pair_with(options);
        let first = a.initiate(at(0));
        b.handle(at(0), a.source(), &first).dropped
    };
    let differ = [Integrity::On, Integrity::Off];
    let options = Options {
        integrity: differ,
        ..Options::default()
    };
    assert_eq!(drop_of(&options), Some(Dropped::IntegrityMismatch));

    let [mut a, mut b] = pair();
    let first = a.initiate(at(0));
    let changed = |at: usize, to: u8| {
        let mut message = first.clone();
        message[at] = to;
        with_mac1(message, &b)
    };
    let (version, suite, other) = (changed(1, 2), changed(2, 9), changed(2, 2));
    let mut unsigned = first.clone();
    unsigned[20] ^= 1;
    for (message, reason) in [
        (version, Dropped::Version),
        (suite, Dropped::Suite),
        (other, Dropped::Unauthentic),
        (unsigned, Dropped::Mac1),
        (vec![1; 100], Dropped::Malformed),
    ] {
        assert_eq!(b.handle(at(0), a.source(), &message).dropped, Some(reason));
    }
    let mut rng = SeededRandom::new([9; 32]);
    let config = Config {
        private: Box::new(StaticSecret::from([33; 32])),
        suite: Suite::Aes256Gcm,
        integrity: Integrity::On,
        handshake: Handshake::Trusted,
    };
    let mut stranger = Sessions::new(config, Time::ZERO, &mut rng);
    let to_b = stranger.add_peer(*b.sessions.public_key(), None).unwrap();
    let call = stranger.initiate(at(0), WALL, to_b, Way::new(true), &a.hello(), &mut rng);
    assert_eq!(
        b.handle(at(0), a.source(), &call).dropped,
        Some(Dropped::UnknownPeer)
    );
    assert_eq!(b.sessions.state(at(0), b.peer), PeerState::Down);
}

#[test]
fn another_preshared_key_gives_no_session() {
    let options = Options {
        psk: [Some(1), Some(2)],
        ..Options::default()
    };
    let [mut a, mut b] = pair_with(&options);
    let first = a.initiate(at(0));
    let second = b.handle(at(0), a.source(), &first).reply.unwrap();
    assert_eq!(
        a.handle(at(0), b.source(), &second).dropped,
        Some(Dropped::Unauthentic)
    );
    assert!(a.current(at(0)).is_none() && b.current(at(0)).is_none());
}

#[test]
fn peers_have_keys_of_their_own() {
    let [mut a, b] = pair();
    let own = *a.sessions.public_key();
    assert_eq!(a.sessions.add_peer(own, None), Err(AddPeerError::OwnKey));
    let known = *b.sessions.public_key();
    assert_eq!(
        a.sessions.add_peer(known, None),
        Err(AddPeerError::DuplicateKey)
    );
    assert_eq!(a.sessions.peer_by_key(&known), Some(a.peer));
}

#[test]
fn under_load_an_address_is_proved_by_a_cookie() {
    let [mut a, mut b] = pair();
    b.under_load = true;
    let first = a.initiate(at(0));
    let outcome = b.handle(at(0), a.source(), &first);
    assert_eq!(outcome.dropped, Some(Dropped::CookieDemanded));
    assert!(outcome.established.is_none());
    let cookie = outcome.reply.unwrap();

    let mut forged = cookie.clone();
    *forged.last_mut().unwrap() ^= 1;
    assert_eq!(
        a.handle(at(0), b.source(), &forged).dropped,
        Some(Dropped::Unauthentic)
    );
    assert_eq!(a.handle(at(0), b.source(), &cookie).dropped, None);

    let retry_at = a.sessions.poll_timeout().unwrap();
    let retry = a.timeout(retry_at).remove(0);
    let elsewhere = SocketAddr::from(([192, 0, 2, 1], 5301));
    assert_eq!(
        b.handle(retry_at, elsewhere, &retry).dropped,
        Some(Dropped::CookieDemanded)
    );
    assert!(b.handle(retry_at, a.source(), &retry).established.is_some());
    assert_eq!(
        a.handle(retry_at, b.source(), &cookie).dropped,
        Some(Dropped::UnknownIndex)
    );
}

#[test]
fn forged_answers_are_read_at_a_bounded_rate() {
    let [mut a, mut b] = pair();
    let first = a.initiate(at(0));
    let second = b.handle(at(0), a.source(), &first).reply.unwrap();
    let mut forged = second.clone();
    forged[20] ^= 1;
    let forged = with_mac1(forged, &a);
    let reasons: Vec<_> = (0..65)
        .map(|_| a.handle(at(0), b.source(), &forged).dropped.unwrap())
        .collect();
    let (read, rest) = reasons.split_at(64);
    assert!(read.iter().all(|reason| *reason == Dropped::Unauthentic));
    assert_eq!(rest, [Dropped::Overload]);
    assert!(
        a.handle(ms(5), b.source(), &second).established.is_some(),
        "and the true one stands all of them"
    );
}

#[test]
fn calls_are_repeated_with_growing_pauses() {
    pauses_grow(pair(), [250, 500, 1000, 2000, 2000, 2000, 2000, 2000]);
    // A peer that was quick to answer is called more often.
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    pauses_grow([a, b], [250, 500, 500, 500, 500, 500, 500, 500]);
}

fn pauses_grow([mut a, _]: [Node; 2], leasts: [u128; 8]) {
    a.initiate(at(0));
    let known = a.sessions.indices.len();
    let mut last = at(0);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let due = a.sessions.poll_timeout().unwrap();
        assert!(a.timeout(due - Duration::from_nanos(1)).is_empty());
        assert_eq!(a.timeout(due).len(), 1);
        pauses.push(due.since(last).as_millis());
        last = due;
        assert_eq!(
            a.sessions.indices.len(),
            known,
            "the index of the one before is free"
        );
    }
    for (pause, least) in pauses.iter().zip(leasts) {
        assert!((least..least * 5 / 4 + 1).contains(pause), "{pauses:?}");
    }
    assert!(
        pauses.iter().any(|pause| pause % 250 != 0),
        "jitter: {pauses:?}"
    );
}

#[test]
fn an_endpoint_that_hears_nothing_answers_after_the_tie_break() {
    // Ours, which would stand, does not get through: the peer's next calls are answered.
    let [mut smaller, mut greater] = pair();
    smaller.initiate(at(0));
    let crossed = greater.initiate(ms(100));
    let outcome = smaller.handle(ms(110), greater.source(), &crossed);
    assert_eq!(outcome.dropped, Some(Dropped::Crossed));
    let later = greater.initiate(ms(2100));
    assert!(
        smaller
            .handle(ms(2110), greater.source(), &later)
            .established
            .is_some()
    );
}

/// Two daemons start one after the other: the first call of one is lost, that of the other is refused.
#[test]
fn who_is_called_while_its_own_call_stands_calls_again() {
    let [mut smaller, mut greater] = pair();
    smaller.initiate(ms(0));
    let crossed = greater.initiate(ms(100));
    let outcome = smaller.handle(ms(110), greater.source(), &crossed);
    assert_eq!(outcome.dropped, Some(Dropped::Crossed));
    assert_eq!(smaller.sessions.poll_timeout(), Some(ms(110)));
    let again = smaller.timeout(ms(110)).remove(0);
    let outcome = greater.handle(ms(120), smaller.source(), &again);
    assert!(outcome.established.is_some());

    // Recordings do not make it call ever more often.
    let before = smaller.sessions.poll_timeout();
    let crossed = greater.initiate(ms(300));
    smaller.handle(ms(301), greater.source(), &crossed);
    assert_eq!(smaller.sessions.poll_timeout(), before);
}

#[test]
fn sessions_end_when_no_new_one_comes() {
    let [mut a, mut b] = pair();
    connect(at(0), &mut a, &mut b);
    let mut late = a.data(at(179)).unwrap();
    let end = at(0) + REJECT_AFTER;
    assert!(a.data(end).is_none());
    assert!(matches!(
        b.sessions.open(end, &mut late),
        Err(OpenError::Expired)
    ));
    a.timeout(end);
    assert_eq!(
        a.sessions.state(end, a.peer),
        PeerState::Connecting,
        "the rekey goes on"
    );
    assert_eq!(a.sessions.indices.len(), 1);
}

#[test]
fn a_session_half_used_up_is_followed_by_another() {
    let [_, mut b] = short_lived();
    for _ in 0..8 {
        b.data(at(1));
    }
    assert!(b.timeout(at(1)).is_empty());
    b.data(at(1));
    assert_eq!(b.sessions.poll_timeout(), Some(Time::ZERO));
    assert_eq!(b.timeout(at(1)).len(), 1);
}

/// Both ends and a network that delays, reorders and loses, in virtual time.
struct Link {
    nodes: [Node; 2],
    now: Time,
    /// Due time, order of sending, receiver.
    flying: BTreeMap<(Time, u64), (usize, Vec<u8>)>,
    sent: u64,
    delays: SeededRandom,
    loss_percent: u64,
    max_delay: Duration,
}

impl Link {
    fn new(seed: u8, loss_percent: u64, max_delay: Duration) -> Self {
        Self {
            nodes: pair_with(&Options {
                seed,
                ..Options::default()
            }),
            now: Time::ZERO,
            flying: BTreeMap::new(),
            sent: 0,
            delays: SeededRandom::new([seed; 32]),
            loss_percent,
            max_delay,
        }
    }

    fn send(&mut self, to: usize, datagram: Vec<u8>) {
        let mut draw = [0; 1];
        self.delays.fill(&mut draw);
        let delay = random::jitter(&mut self.delays, self.max_delay);
        if u64::from(draw[0]) * 100 / 256 >= self.loss_percent {
            self.sent += 1;
            self.flying
                .insert((self.now + delay, self.sent), (to, datagram));
        }
    }

    fn initiate(&mut self, from: usize) {
        let message = self.nodes[from].initiate(self.now);
        self.send(1 - from, message);
    }

    /// Each end sends a datagram, as one with traffic does.
    fn chat(&mut self) {
        for from in 0..2 {
            if let Some(data) = self.nodes[from].data(self.now) {
                self.send(1 - from, data);
            }
        }
    }

    /// Delivers and times out until `end`.
    fn run_until(&mut self, end: Time) {
        loop {
            let arrival = self.flying.keys().next().map(|(due, _)| *due);
            let timers = self
                .nodes
                .iter()
                .filter_map(|node| node.sessions.poll_timeout());
            let Some(next) = timers.chain(arrival).min().filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            if arrival == Some(next) {
                let (_, (to, datagram)) = self.flying.pop_first().unwrap();
                let source = self.nodes[1 - to].source();
                if let Some(reply) = self.nodes[to].receive(self.now, source, &datagram) {
                    self.send(1 - to, reply);
                }
            } else {
                for from in 0..2 {
                    for datagram in self.nodes[from].timeout(self.now) {
                        self.send(1 - from, datagram);
                    }
                }
            }
        }
        self.now = end;
    }

    fn currents(&mut self) -> [Option<SessionId>; 2] {
        let now = self.now;
        self.nodes.each_mut().map(|node| node.current(now))
    }
}

#[test]
fn rekeying_goes_unnoticed() {
    let mut link = Link::new(3, 0, Duration::from_millis(20));
    link.initiate(0);
    link.run_until(at(1));
    let mut seen = std::collections::BTreeSet::new();
    for tick in 10..6000 {
        let now = ms(tick * 100);
        for from in 0..2 {
            // In flight across whatever happens next.
            let mut data = link.nodes[from]
                .data(now)
                .expect("always a session to send by");
            link.run_until(now + Duration::from_millis(30));
            let opened = link.nodes[1 - from].sessions.open(link.now, &mut data);
            assert!(opened.is_ok(), "at {now:?}: {:?}", opened.err());
        }
        seen.extend(link.currents());
    }
    assert!(
        (5..=6).contains(&seen.len()),
        "one each 110 to 120 s: {}",
        seen.len()
    );
    for node in &link.nodes {
        assert!(node.sessions.indices.len() <= 3);
        assert!(node.dropped.is_empty(), "{:?}", node.dropped);
        let roles: Vec<_> = node.established.iter().map(|e| e.role).collect();
        assert!(
            roles.iter().all(|role| *role == roles[0]),
            "the initiator stays it"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn crossed_calls_converge_to_one_session(
        seed in any::<u8>(),
        apart in 0..1500u64,
        first in 0..2usize,
        loss in 0..40u64,
        delay in prop_oneof![Just(10u64), Just(300), Just(900)],
    ) {
        let mut link = Link::new(seed, loss, Duration::from_millis(delay));
        link.initiate(first);
        link.run_until(ms(apart));
        link.initiate(1 - first);
        for second in 2..40 {
            link.chat();
            link.run_until(at(second));
        }
        // What still flies after the last loss is settled, and one more word is said.
        link.loss_percent = 0;
        for second in 40..55 {
            link.chat();
            link.run_until(at(second));
        }
        // Calls that both went on for long may both have been answered: then each end sends by its
        // own, until one of them calls again.
        for end in 55..200 {
            link.chat();
            link.run_until(at(end));
            prop_assert!(link.currents().iter().all(Option::is_some));
        }
        let [a, b] = link.currents();
        prop_assert_eq!(a, b);
        for node in &link.nodes {
            prop_assert!(node.sessions.state(link.now, node.peer) == PeerState::Established);
            prop_assert!(node.sessions.peers[0].initiation.is_none());
            prop_assert!(node.not_opened.is_empty(), "{:?}", node.not_opened);
        }
    }

    /// However many messages are lost, neither end is ever without a session that works.
    #[test]
    fn rekeying_stands_loss(seed in any::<u8>(), loss in 0..50u64, delay in 1..800u64) {
        let mut link = Link::new(seed, loss, Duration::from_millis(delay));
        link.initiate(0);
        let mut connected = false;
        for second in 1..500 {
            link.chat();
            link.run_until(at(second));
            let currents = link.currents();
            connected |= currents.iter().all(Option::is_some);
            prop_assert!(!connected || currents.iter().all(Option::is_some), "at {second} s");
        }
        prop_assert!(connected);
        for node in &link.nodes {
            prop_assert!(node.not_opened.is_empty(), "{:?}", node.not_opened);
            prop_assert!(node.sessions.indices.len() <= 5);
        }
    }

    #[test]
    fn a_tampered_message_1_is_refused(at_byte in 1..INITIATION_LEN - 32, bit in 0..8u8) {
        let [mut a, mut b] = pair();
        let first = a.initiate(at(0));
        let mut tampered = first.clone();
        tampered[at_byte] ^= 1 << bit;
        let signed = with_mac1(tampered.clone(), &b);
        for message in [tampered, signed] {
            let outcome = b.handle(at(0), a.source(), &message);
            prop_assert!(outcome.dropped.is_some() && outcome.reply.is_none());
            prop_assert!(outcome.established.is_none());
        }
        prop_assert!(b.handle(at(0), a.source(), &first).established.is_some());
    }

    #[test]
    fn a_tampered_message_2_is_refused(position in any::<prop::sample::Index>(), bit in 0..8u8) {
        let [mut a, mut b] = pair();
        let first = a.initiate(at(0));
        let second = b.handle(at(0), a.source(), &first).reply.unwrap();
        let mut tampered = second.clone();
        tampered[position.index(second.len() - 16)] ^= 1 << bit;
        let signed = with_mac1(tampered.clone(), &a);
        for message in [tampered, signed] {
            let outcome = a.handle(at(0), b.source(), &message);
            prop_assert!(outcome.dropped.is_some() && outcome.established.is_none());
        }
        prop_assert!(a.handle(at(0), b.source(), &second).established.is_some());
    }

    #[test]
    fn a_node_stands_any_bytes(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..1300),
        kind in 0..8u8,
        resize in prop_oneof![Just(None), Just(Some(INITIATION_LEN)), Just(Some(64usize))],
        under_load in any::<bool>(),
        sign in any::<bool>(),
    ) {
        let [mut a, mut b] = pair();
        b.under_load = under_load;
        let first = a.initiate(at(0));
        let index = first[4..8].to_vec();
        if let Some(length) = resize {
            bytes.resize(length, 0);
        }
        if bytes.len() >= 16 {
            bytes[0] = kind;
            match kind {
                1 => bytes[..4].copy_from_slice(&first[..4]),
                2 | 3 => bytes[1..4].fill(0),
                _ => {}
            }
            bytes[4..8].copy_from_slice(&index);
            if sign && (bytes.len() == INITIATION_LEN || kind == 2) {
                let to = if kind == 1 { &b } else { &a };
                bytes = with_mac1(bytes, to);
            }
        }
        for (node, source) in [(&mut a, [192, 0, 2, 2]), (&mut b, [192, 0, 2, 1])] {
            let outcome = node.handle(at(0), SocketAddr::from((source, 1)), &bytes);
            prop_assert!(outcome.established.is_none() && outcome.dropped.is_some());
            prop_assert!(node.sessions.open(at(0), &mut bytes.clone()).is_err());
        }
    }
}
