//! Which peer a packet or a datagram is for, and whose turn it is to send.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_settings::{BumpId, left_out};
use dibs_wire::packet::{self, FlowKey, Packet};
use dibs_wire::virtio::{self, VirtioHdr};

use super::association::{self, Association, Ticket};
use super::config::NodeConfig;
use super::deadline::{Deadline, Reason};
use super::hosts::Hosts;
use super::inner;
use super::notice::Event;
use super::out::{Out, Source};
use super::paths::{Arrival, PathSet};
use super::peer::{Peer, Taken};
use super::shared::{Journal, Own, Policy, Shared};
use crate::buffer::Buffer;
use crate::counters::Counter;
use crate::flow::inject::{Injection, Injector};
use crate::path_index::PathIndex;
use crate::session::{
    Arrived, Bucket, Config as SessionConfig, Dropped, Hurry, KeyLimits, OpenError, Rate,
    SeededRandom, Sessions, Way, is_handshake,
};
use crate::time::Time;

/// A send for a socket: datagrams of `segment` bytes each, the last one may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Transmit<'a> {
    /// Index of the local path whose socket it leaves by.
    pub path: usize,
    /// Destination.
    pub to: SocketAddr,
    /// Length of each datagram.
    pub segment: usize,
    /// ECN: they say ECT(0) in their IP header.
    pub ect: bool,
    /// The datagrams, one behind the other.
    pub bytes: &'a [u8],
}

/// Everything that one daemon knows; see the [module](super) for how to drive it.
pub struct Node {
    pub(super) shared: Shared,
    pub(super) sessions: Sessions,
    pub(super) peers: Vec<Peer>,
    /// Handshake messages and answers to strangers.
    pub(super) outbox: Outbox,
    pub(super) outbox_head: Vec<u8>,
    /// Budget of answers to strangers, by local path.
    pub(super) cookies: Vec<Bucket>,
    /// The peer that is asked first for something to send.
    pub(super) turn: usize,
    /// When we were last called.
    pub(super) awake: Time,
    #[cfg(feature = "observe")]
    pub(super) taps: VecDeque<crate::session::Tap>,
}

/// An owner that does not come back for so long, and comes back so much later than it was to, slept, or its host did.
const SLEEP: Duration = Duration::from_millis(1500);
const LATE: Duration = Duration::from_millis(500);

/// Handshake messages that wait to be sent, by which path and where to.
type Outbox = VecDeque<(PathIndex, SocketAddr, Vec<u8>)>;

/// Handshake messages that wait to be sent by one path, at most.
const OUTBOX: usize = 64;
/// Taps of sessions that nobody has asked for yet, at most.
#[cfg(feature = "observe")]
const TAPS: usize = 16;
/// Cookies for addresses where no peer is known to be. Where nobody is at all, the kernel keeps what
/// it cannot deliver for seconds, at the expense of the path's own datagrams.
const COOKIES: Rate = Rate {
    burst: 16,
    each: Duration::from_millis(50),
};

impl Node {
    /// A node that has sent nothing yet. `seed` is the source of all its randomness but for the pads, which have
    /// one of their own in `config`.
    ///
    /// # Errors
    /// A peer's key is this host's own, or another peer's.
    pub fn new(
        now: Time,
        config: NodeConfig,
        seed: [u8; 32],
    ) -> Result<Self, crate::session::AddPeerError> {
        let mut rng = SeededRandom::new(seed);
        let session_config = SessionConfig {
            private: config.private,
            suite: config.suite,
            integrity: config.integrity,
            handshake: config.handshake,
        };
        let mut sessions = Sessions::new(session_config, now, &mut rng);
        let cookies = vec![Bucket::default(); config.paths.len()];
        let behind = config.peers.iter().flat_map(|peer| &peer.prefixes);
        let own = Own {
            addresses: config.addresses,
            reachable: config.reachable,
            closed: left_out(&config.exit)
                .iter()
                .chain(behind)
                .copied()
                .collect(),
            gateway: config.gateway,
            exit: config.exit,
        };
        let policy = Policy {
            trusted_share: config.trusted_share,
            hold_without_trusted: config.hold_without_trusted,
            scheduler: config.scheduler,
            flow_schedulers: Vec::new(),
            hint: config.hint,
        };
        let bumps = (config.bumps, config.pads);
        let shared = Shared::new(rng, config.paths, bumps, own, policy);
        let own = *sessions.public_key();
        let mut peers = Vec::with_capacity(config.peers.len());
        for peer in config.peers {
            let id = sessions.add_peer(peer.public, peer.preshared)?;
            let smaller_key = own.as_bytes() < peer.public.as_bytes();
            let endpoints = peer.endpoints.into_iter();
            let endpoints = endpoints.map(|(path, to)| (PathIndex::new(path), to));
            peers.push(Peer::new(
                now,
                id,
                Hosts::new(peer.prefixes, peer.accept, peer.appears_as),
                PathSet::new(now, id, endpoints.collect(), smaller_key),
                &shared.setup,
            ));
        }
        for at in 0..peers.len() {
            let others = peers.iter().enumerate().filter(|(other, _)| *other != at);
            let foreign = others.flat_map(|(_, other)| other.hosts.prefixes().iter().copied());
            let foreign = foreign.collect();
            peers[at].hosts.set_foreign(foreign);
        }
        Ok(Self {
            shared,
            sessions,
            peers,
            outbox: VecDeque::new(),
            outbox_head: Vec::new(),
            cookies,
            turn: 0,
            awake: now,
            #[cfg(feature = "observe")]
            taps: VecDeque::new(),
        })
    }

    /// The same with other limits for the keys of its sessions.
    #[must_use]
    pub fn with_key_limits(mut self, limits: KeyLimits) -> Self {
        self.sessions = self.sessions.with_key_limits(limits);
        self
    }

    /// Tap that opens copies of all that a new session sends.
    #[cfg(feature = "observe")]
    pub fn poll_tap(&mut self) -> Option<crate::session::Tap> {
        self.taps.pop_front()
    }

    /// A buffer to read a TUN packet into.
    pub fn tun_buffer(&mut self) -> Buffer {
        self.shared.pool.take()
    }

    /// Takes a packet read from the TUN of `bump`: virtio header and packet stand in
    /// `buffer[..len]`.
    pub fn handle_tun(&mut self, now: Time, bump: BumpId, mut buffer: Buffer, len: usize) {
        let Self {
            shared,
            sessions,
            peers,
            ..
        } = self;
        let Some((header, bytes)) = buffer[..len].split_first_chunk_mut::<{ virtio::LEN }>() else {
            shared.count(Counter::TunMalformed);
            return shared.pool.give(buffer);
        };
        let Ok(header) = VirtioHdr::decode(header) else {
            shared.count(Counter::TunMalformed);
            return shared.pool.give(buffer);
        };
        let Ok(parsed) = packet::parse(bytes) else {
            shared.count(Counter::TunMalformed);
            return shared.pool.give(buffer);
        };
        // What a checksum is taken over, and what an opaque packet carries.
        let len = virtio::LEN + parsed.own_len();
        let peer = match &parsed {
            Packet::Tcp(segment) => route_conn(peers, &segment.tuple),
            Packet::Opaque(opaque) => route(peers, opaque.dst),
        };
        let Some(peer) = peer else {
            shared.count(Counter::TunNoPeer);
            return shared.pool.give(buffer);
        };
        sessions.hurry(now, peer.id, Hurry::Wanted);
        let session = sessions.sending(now, peer.id).map(|session| &*session);
        match parsed {
            Packet::Tcp(segment) => {
                let taken =
                    peer.take_segment(now, shared, session, bump, &segment, header.gso_size);
                match taken {
                    Taken::Done => shared.pool.give(buffer),
                    Taken::Queue(payload) => {
                        let queued = (buffer, peer.paths.turn());
                        let flows = &mut peer.flows;
                        peer.queues.fq.enqueue(now, shared, flows, payload, queued);
                    }
                    Taken::Opaque => peer.take_whole(shared, bump, header, (buffer, len)),
                }
            }
            Packet::Opaque(packet) if !peer.hosts.may_go(&shared.setup, &packet) => {
                shared.count(Counter::TunRefused);
                shared.pool.give(buffer);
            }
            Packet::Opaque(packet) => {
                let is_up = session.is_some();
                if let Some(tuple) = inner::rejected(&packet) {
                    let (receiver, mut cx) = peer.receiving(now, shared);
                    receiver.on_local_rejection(&mut cx, &tuple.reversed());
                }
                if is_up {
                    return peer.take_whole(shared, bump, header, (buffer, len));
                }
                shared.count(Counter::TunNoSession);
                shared.pool.give(buffer);
            }
        }
    }

    /// Takes one datagram that came in by the socket of local path `path` from `from`. It is
    /// decrypted in place.
    pub fn handle_datagram(
        &mut self,
        now: Time,
        path: usize,
        from: SocketAddr,
        datagram: &mut [u8],
    ) {
        let path = PathIndex::new(path);
        let marked = false;
        self.handle_arrival(now, Arrival { path, from, marked }, datagram);
    }

    /// The same for one that a router has marked for congestion: CE in its IP header (RFC 3168).
    pub fn handle_marked_datagram(
        &mut self,
        now: Time,
        path: usize,
        from: SocketAddr,
        datagram: &mut [u8],
    ) {
        let path = PathIndex::new(path);
        let marked = true;
        self.handle_arrival(now, Arrival { path, from, marked }, datagram);
    }

    fn handle_arrival(&mut self, now: Time, arrival: Arrival, datagram: &mut [u8]) {
        let Arrival { path, from, .. } = arrival;
        self.wake(now);
        if is_handshake(datagram) {
            return self.handle_handshake(now, path, from, datagram);
        }
        let Self {
            shared,
            sessions,
            peers,
            ..
        } = self;
        let received = match sessions.peek(datagram) {
            Ok(claim) if !peers[claim.peer.index()].expects(claim.path, path) => {
                return shared.count(Counter::WrongPath);
            }
            Ok(claim) => sessions.open_claimed(now, claim, datagram),
            Err(error) => Err(error),
        };
        match received {
            Ok(ref received) => {
                let index = received.peer.index();
                if received.opened.authenticated {
                    sessions.hurry(now, received.peer, Hurry::Reachable);
                }
                peers[index].receive(now, shared, arrival, received);
            }
            Err(error) => shared.count(match error {
                OpenError::Malformed => Counter::DatagramMalformed,
                OpenError::UnknownIndex => Counter::DatagramUnknownIndex,
                OpenError::Expired => Counter::DatagramExpired,
                OpenError::Replayed => Counter::DatagramReplayed,
                OpenError::Unauthentic => Counter::DatagramUnauthentic,
                OpenError::BareRefused => Counter::BareRefused,
            }),
        }
    }

    fn handle_handshake(&mut self, now: Time, path: PathIndex, from: SocketAddr, datagram: &[u8]) {
        let Self {
            shared,
            sessions,
            peers,
            outbox,
            cookies,
            #[cfg(feature = "observe")]
            taps,
            ..
        } = self;
        let trusted = shared.setup.local[path].trusted;
        if !trusted && !sessions.reads_untrusted() {
            return shared.count(Counter::HandshakeUntrusted);
        }
        // The answer would leave by it.
        if !shared.setup.local[path].is_usable() {
            return shared.count(Counter::HandshakeUnused);
        }
        let mut at_place = peers.iter().filter(|p| p.paths.is_place((path, from)));
        let arrived = Arrived {
            path: path.get(),
            trusted,
            from,
            peer_there: at_place.next().map(|peer| peer.id),
            under_load: waiting(outbox, path) > OUTBOX / 4,
        };
        let own = association::hello(&shared.setup, &Ticket::default());
        let hello = |_| own.clone();
        let outcome = sessions.handle(now, arrived, datagram, hello, &mut shared.dice.rng);
        let stranger = || !peers.iter().any(|peer| peer.paths.is_at(from.ip()));
        if outcome.dropped == Some(Dropped::CookieDemanded)
            && stranger()
            && !cookies[path.get()].take(now, COOKIES)
        {
            return shared.count(Counter::HandshakeOverload);
        }
        if let Some(reply) = outcome.reply {
            enqueue(&mut shared.journal, outbox, (path, from, reply));
        }
        if let Some(peer) = outcome.cookie_from {
            peers[peer.index()].association.call_there_again();
            sessions.hurry(now, peer, Hurry::Reachable);
        }
        if let Some((peer, behind)) = outcome.outdated {
            let peer = peer.index();
            shared.journal.events.push(Event::Outdated { peer, behind });
        }
        if let Some(peer) = outcome.unsecured {
            let peer = peer.index();
            shared.journal.events.push(Event::Unsecured { peer });
        }
        if let Some((key, hello)) = outcome.stranger
            && let Some(ticket) = Ticket::read(&hello)
        {
            let event = Event::Stranger { key, ticket };
            shared.journal.events.push(event);
        }
        if let Some(reason) = outcome.dropped {
            shared.count(counter_of(reason));
        }
        if let Some(established) = outcome.established {
            shared.count(Counter::Sessions);
            #[cfg(feature = "observe")]
            let established = {
                let mut established = established;
                while taps.len() >= TAPS {
                    taps.pop_front();
                }
                taps.extend(established.tap.take());
                established
            };
            let index = established.peer.index();
            peers[index].on_established(now, shared, established);
        }
    }

    /// Notes that time goes on, or that it did while we slept.
    fn wake(&mut self, now: Time) {
        let away = now.since(std::mem::replace(&mut self.awake, now));
        if away < SLEEP
            || self
                .poll_timeout()
                .is_none_or(|due| now.since(due.at) < LATE)
        {
            return;
        }
        let links = self.peers.iter_mut().flat_map(|peer| peer.paths.iter_mut());
        links.for_each(|link| link.path.on_sleep(now));
    }

    /// Deadline of the next [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<Deadline> {
        let of_peers = self.peers.iter().flat_map(|peer| {
            let renewal = Reason::Renewal.at(self.renewal_at(peer));
            [renewal, peer.poll_timeout(&self.shared.setup)]
        });
        let handshake = Reason::Handshake.at(self.sessions.poll_timeout());
        of_peers.flatten().chain(handshake).min()
    }

    /// When keys that were agreed by an untrusted path are to be agreed anew by a trusted one.
    fn renewal_at(&self, peer: &Peer) -> Option<Time> {
        let has_trusted = peer.paths.has_trusted(&self.shared.setup);
        has_trusted.then(|| self.sessions.renewal_at(peer.id))?
    }

    /// Does what is due. `wall` is the time since the Unix epoch.
    pub fn handle_timeout(&mut self, now: Time, wall: Duration) {
        self.wake(now);
        for index in 0..self.peers.len() {
            let renews = self.renewal_at(&self.peers[index]);
            let Self {
                shared,
                sessions,
                peers,
                ..
            } = self;
            let peer = &mut peers[index];
            if sessions.poll_exhausted(peer.id) {
                let peer = peer.id.index();
                shared.journal.events.push(Event::KeysExhausted { peer });
            }
            let state = sessions.state(now, peer.id);
            if sessions.sending(now, peer.id).is_none() {
                peer.on_down(shared);
            }
            let allowed = (state, sessions.may_go_by_untrusted(peer.id));
            let Peer {
                association, paths, ..
            } = peer;
            // A call that has begun goes on by itself.
            let wants = association.wants_call(now, &shared.setup, paths, allowed)
                && sessions.calling_since(peer.id).is_none();
            if association.poll_stranded(now, &shared.setup, paths, allowed)
                && sessions.tell_unsecured(now, peer.id)
            {
                let peer = peer.id.index();
                shared.journal.events.push(Event::Unsecured { peer });
            }
            if wants || renews.is_some_and(|at| at <= now) {
                self.call(now, wall, index);
            }
            self.peers[index].handle_timeout(now, &mut self.shared);
        }
        for peer in self.sessions.handle_timeout(now) {
            self.call(now, wall, peer.index());
        }
    }

    /// Calls a peer, at the next place where it may be. Where that is by no path now, the call waits like one that is
    /// not answered.
    fn call(&mut self, now: Time, wall: Duration, index: usize) {
        let Self {
            shared,
            sessions,
            peers,
            outbox,
            ..
        } = self;
        let Peer {
            id,
            association,
            paths,
            ..
        } = &mut peers[index];
        let since = sessions.calling_since(*id);
        let any = sessions.may_go_by_untrusted(*id)
            && Association::is_past_trusted(now, &shared.setup, paths, since);
        let called = association.next_call(&shared.setup, paths, any);
        let way = match called {
            Some((place, turns)) => Way {
                trusted: shared.setup.local[place.0].trusted,
                round_trip: paths.round_trip(place),
                turns,
            },
            None => Way::new(true),
        };
        let hello = association::hello(&shared.setup, &association.ticket);
        let message = sessions.initiate(now, wall, *id, way, &hello, &mut shared.dice.rng);
        if let Some(((path, to), _)) = called {
            enqueue(&mut shared.journal, outbox, (path, to, message));
        }
    }

    /// Notes if the caller has more packets of a TUN, and hands them over as soon as everything that is ready was sent.
    /// A short last send then waits for them.
    pub const fn set_more_comes(&mut self, more: bool) {
        self.shared.more_comes = more;
    }

    /// The next send, or `None` if there is nothing that may go now.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit<'_>> {
        if let Some((path, to, bytes)) = self.outbox.pop_front() {
            self.outbox_head = bytes;
            let bytes = &self.outbox_head[..];
            return Some(Transmit {
                path: path.get(),
                to,
                segment: bytes.len(),
                ect: false,
                bytes,
            });
        }
        let count = self.peers.len();
        for step in 0..count {
            let index = (self.turn + step) % count;
            let peer = &mut self.peers[index];
            let Some(session) = self.sessions.sending(now, peer.id) else {
                continue;
            };
            let Some(out) = peer.poll_transmit(now, &mut self.shared, session) else {
                continue;
            };
            self.turn = (index + 1) % count;
            let Out {
                path,
                to,
                segment,
                ect,
                source,
            } = out;
            let len = match &source {
                Source::Scratch => self.shared.scratch.datagrams.len(),
                Source::Once(_, len) | Source::Batch(_, len) => *len,
            };
            self.shared.journal.note_carried(path, len as u64);
            let bytes = match source {
                Source::Scratch => &self.shared.scratch.datagrams[..],
                Source::Once(buffer, len) => {
                    self.shared
                        .scratch
                        .keep_once(&mut self.shared.pool, buffer, len)
                }
                Source::Batch(key, len) => &self.peers[index].in_flight.batch(key)[..len],
            };
            return Some(Transmit {
                path: path.get(),
                to,
                segment,
                ect,
                bytes,
            });
        }
        None
    }

    /// Finishes the packet being built: nothing more has arrived that could join it.
    pub fn flush_injections(&mut self) {
        self.shared.injector.flush();
    }

    /// The next packet for a TUN; give it back with [`recycle`](Self::recycle).
    pub fn poll_injection(&mut self) -> Option<Injection> {
        let injection = self.shared.injector.pop()?;
        self.shared.count(Counter::Injected);
        Some(injection)
    }

    /// Gives the memory of an injected packet back.
    pub fn recycle(&mut self, injection: Injection) {
        Injector::recycle(&mut self.shared.pool, injection);
    }

    /// The next thing that the owner should know. What it does not ask for waits, within bounds.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.journal.events.pop()
    }
}

/// The peer that has the other end of the connection `tuple`, as this host sends.
pub(super) fn route_conn<'a>(peers: &'a mut [Peer], tuple: &FlowKey) -> Option<&'a mut Peer> {
    match peers.iter().position(|peer| peer.flows.is_matched(tuple)) {
        Some(matched) => peers.get_mut(matched),
        None => route(peers, tuple.dst),
    }
}

/// The peer that speaks for a host: by the longest prefix of all.
pub(super) fn route(peers: &mut [Peer], destination: IpAddr) -> Option<&mut Peer> {
    let best = peers
        .iter_mut()
        .filter_map(|peer| peer.hosts.matches(destination).map(|len| (len, peer)))
        .max_by_key(|(len, _)| *len);
    let best = best.filter(|(_, peer)| !peer.hosts.leaves_out(destination));
    best.map(|(_, peer)| peer)
}

/// How many handshake messages wait for a path.
fn waiting(outbox: &Outbox, path: PathIndex) -> usize {
    outbox.iter().filter(|(by, ..)| *by == path).count()
}

/// Queues a handshake message, as long as there are not too many.
fn enqueue(journal: &mut Journal, outbox: &mut Outbox, message: (PathIndex, SocketAddr, Vec<u8>)) {
    if waiting(outbox, message.0) >= OUTBOX {
        return journal.count(Counter::HandshakeOverload);
    }
    outbox.push_back(message);
}

const fn counter_of(reason: Dropped) -> Counter {
    match reason {
        Dropped::Malformed | Dropped::Version | Dropped::Suite => Counter::HandshakeMalformed,
        Dropped::IntegrityMismatch => Counter::HandshakeIntegrity,
        Dropped::Mac1 => Counter::HandshakeMac1,
        Dropped::CookieDemanded => Counter::HandshakeCookie,
        Dropped::Unauthentic => Counter::HandshakeUnauthentic,
        Dropped::UnknownPeer => Counter::HandshakeUnknownPeer,
        Dropped::Untrusted => Counter::HandshakeUntrusted,
        Dropped::Unsecured => Counter::HandshakeUnsecured,
        Dropped::Replayed => Counter::HandshakeReplayed,
        Dropped::Crossed => Counter::HandshakeCrossed,
        Dropped::UnknownIndex => Counter::HandshakeUnknownIndex,
        Dropped::Overload => Counter::HandshakeOverload,
    }
}
