//! The handshakes by which sessions come about: Noise IKpsk2, with WireGuard's rules for timestamps, cookies,
//! rekeying and confirmation (docs/protocol.md, 2).

use core::net::SocketAddr;
use core::time::Duration;
use thiserror::Error;
use x25519_dalek::PublicKey;

use super::cookie::{self, COOKIE_LIFETIME, Mac, NONCE_LEN};
use super::established::{Agreement, Session};
use super::keys::{EpochSecrets, Role, SessionId, Suite};
use super::message::{self, Answer, Call, Hello, Message, Prologue, Timestamp, VERSION};
use super::noise::Noise;
use super::peer::{Initiation, PeerId, SentInitiation};
use super::random::{self, Random};
use super::secured::{chain_secret, origin, set_psk};
use super::sessions::{Config, Sessions};
use crate::time::Time;

/// Wait for an answer to the first message 1; doubled each time.
const FIRST_RETRY: Duration = Duration::from_millis(250);
/// The longest such wait at first, if the peer is known to answer in half of it.
const NEAR_RETRY: Duration = Duration::from_millis(500);
/// The longest if it is not. An answer counts only until the next message 1, so this has to be more than any
/// round trip.
pub(super) const FAR_RETRY: Duration = Duration::from_secs(2);
/// A peer that has not answered for long is called less often by each path: after this part of that time, and after so
/// long at most with what is added at random. One that is back is found within a small part of its absence, and one that is
/// gone costs a path less than 3 MB a day.
const RETRY_SHARE: u32 = 32;
const LONGEST_RETRY: Duration = Duration::from_secs(37);
const LONGEST_JITTER: Duration = Duration::from_secs(3);
/// The same part of the time since there was [cause to hurry](Sessions::hurry).
const HURRIED_SHARE: u32 = 2;

/// Age at which the initiator of a session begins the next one.
const INITIATOR_REKEY: Duration = Duration::from_secs(120);
/// Age at which its responder does, if the initiator has not.
const RESPONDER_REKEY: Duration = Duration::from_secs(150);
const REKEY_JITTER: Duration = Duration::from_secs(10);

/// A call that is older than the latest by less is one that was overtaken, or cures itself as soon.
const OUTDATED: Duration = Duration::from_secs(10);
/// Between two times that it is told: a recorded call may be repeated at will.
const TELL_OUTDATED: Duration = Duration::from_secs(10);

/// Why a handshake datagram had no effect. All are a peer's or a stranger's doing, or the
/// network's; counted by name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Error)]
pub enum Dropped {
    /// Not a handshake message.
    #[error("malformed handshake message")]
    Malformed,
    /// Another version of the protocol.
    #[error("another protocol version")]
    Version,
    /// A suite that we do not know.
    #[error("unknown cipher suite")]
    Suite,
    /// The peer's `integrity` is not ours.
    #[error("the two ends differ in `integrity`")]
    IntegrityMismatch,
    /// The sender does not know whom it calls.
    #[error("wrong mac1")]
    Mac1,
    /// Under load and without proof of its address: told so by a cookie reply.
    #[error("address to be proved first")]
    CookieDemanded,
    /// Does not decrypt: forged, or meant for other keys, or another preshared key.
    #[error("handshake message failed authentication")]
    Unauthentic,
    /// Authentic, from a key that is no peer's.
    #[error("unknown peer")]
    UnknownPeer,
    /// Not newer than the latest message 1 of this peer.
    #[error("replayed handshake message")]
    Replayed,
    /// By a path that an end calls untrusted, where only trusted ones are taken.
    #[error("handshake by an untrusted path")]
    Untrusted,
    /// The same with neither a secret of an earlier handshake nor a preshared key in it, where one of these is wanted.
    #[error("nothing secures the handshake by an untrusted path")]
    Unsecured,
    /// Both called at once, and our own call stands.
    #[error("crossed by our own handshake message")]
    Crossed,
    /// An answer to nothing that we wait for.
    #[error("unknown receiver index")]
    UnknownIndex,
    /// More than is read of a proved address, or after too many forged answers.
    #[error("too many handshake messages")]
    Overload,
}

/// Outcome of a handshake datagram.
#[derive(Default)]
pub struct HandshakeOutcome {
    /// To be sent to where the datagram came from, never longer than it.
    pub reply: Option<Vec<u8>>,
    /// A new session.
    pub established: Option<Established>,
    /// A peer wants our address proved: the next message to it, from the same place, will do so.
    pub cookie_from: Option<PeerId>,
    /// A message 1 of a peer, its own by all that is known, is older than its latest by so much: it was
    /// recorded then, or the peer's clock was set back. Told from time to time.
    pub outdated: Option<(PeerId, Duration)>,
    /// A handshake with this peer came to nothing, for [nothing secures it](Dropped::Unsecured). Told from time to time.
    pub unsecured: Option<PeerId>,
    /// Key and hello of an [unknown peer](Dropped::UnknownPeer), which has the private key.
    pub stranger: Option<(PublicKey, Hello)>,
    /// Why nothing else came of it.
    pub dropped: Option<Dropped>,
}

impl From<Dropped> for HandshakeOutcome {
    fn from(reason: Dropped) -> Self {
        Self {
            dropped: Some(reason),
            ..Self::default()
        }
    }
}

/// How a call goes out.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// How this end labels the path.
    pub trusted: bool,
    /// The path's round trip, as far as it is known.
    pub round_trip: Option<Duration>,
    /// Number of places that are called in turn, and how many of them are on one path at most.
    pub turns: (u32, u32),
}

impl Way {
    /// By a path of that label of which nothing more is known.
    pub const fn new(trusted: bool) -> Self {
        Self {
            trusted,
            round_trip: None,
            turns: (1, 1),
        }
    }
}

/// How a handshake datagram came in.
#[derive(Clone, Copy, Debug)]
pub struct Arrived {
    /// The local path, by its index.
    pub path: usize,
    /// How this end labels it.
    pub trusted: bool,
    /// Its sender's address, which may be anybody's.
    pub from: SocketAddr,
    /// The peer that is there, by that path, as far as is known.
    pub peer_there: Option<PeerId>,
    /// Everybody is to prove their address first, as in a flood.
    pub under_load: bool,
}

/// A session that came about.
///
/// As the initiator, send a datagram by it now. As the responder, wait with all that the hello
/// asks for until [`Received::confirmed`]: a message 1 recorded before our last start would
/// get this far too.
pub struct Established {
    /// With whom.
    pub peer: PeerId,
    /// The session's name.
    pub session: SessionId,
    /// Role of this end.
    pub role: Role,
    /// Hello of the peer.
    pub hello: Hello,
    /// The roots of its epoch keys.
    pub epochs: EpochSecrets,
    /// Opens copies of what we send by it.
    #[cfg(feature = "observe")]
    pub tap: Option<super::tap::Tap>,
}

impl Sessions {
    /// Calls a peer: returns the message 1 to send.
    ///
    /// The call goes on, by [`handle_timeout`](Self::handle_timeout), until a session is
    /// confirmed. `wall` is the time since the Unix epoch.
    pub fn initiate(
        &mut self,
        now: Time,
        wall: Duration,
        id: PeerId,
        way: Way,
        hello: &Hello,
        rng: &mut dyn Random,
    ) -> Vec<u8> {
        let peer = &mut self.peers[id.index()];
        self.last_wall = wall.max(self.last_wall + Duration::from_nanos(1));

        let initiation = peer.initiation.get_or_insert(Initiation {
            started: now,
            hurried: now,
            attempts: 0,
            repeated: false,
            retry_at: now,
            sent: None,
        });
        if let Some(unanswered) = initiation.sent.take() {
            self.indices.free(unanswered.local_index);
        }
        let backoff = FIRST_RETRY * (1 << initiation.attempts.min(8));
        let trusted = way.trusted;
        let answered = peer.answered_within[usize::from(trusted)];
        let longest = match answered.or(way.round_trip) {
            Some(time) => (2 * time).clamp(NEAR_RETRY, FAR_RETRY),
            None => FAR_RETRY,
        };
        let silence = now.since(initiation.started) / RETRY_SHARE;
        let hurry = now.since(initiation.hurried) / HURRIED_SHARE;
        let (places, on_one_path) = way.turns;
        let patience = silence.min(hurry).min(LONGEST_RETRY) * on_one_path / places;
        let backoff = backoff.min(longest.max(patience));
        let jitter = random::jitter(rng, (backoff / 4).min(LONGEST_JITTER));
        initiation.retry_at = now + backoff + jitter;
        initiation.attempts += 1;

        let local_index = self.indices.allocate(id, rng);
        let Config {
            private,
            suite,
            integrity,
            ..
        } = &self.config;
        let prologue = Prologue::new(*suite, *integrity, local_index);
        let ephemeral = random::secret(rng);
        let mut noise = Noise::initiator(private, &peer.public, &prologue.bytes(), ephemeral);
        let (began, named) = peer.chain.name();
        let call = Call {
            timestamp: Timestamp::new(self.last_wall),
            hello: hello.clone(),
            trusted,
            named: named.iter().map(|secret| secret.id()).collect(),
        };
        let cookie = peer
            .cookie
            .filter(|(came, _)| now.since(*came) < COOKIE_LIFETIME);
        let mut mac1 = Mac::default();
        let datagram = message::emit_initiation(
            prologue,
            &call,
            |payload, out| noise.write(payload, out),
            |message| {
                mac1 = peer.macs.mac1(message);
                mac1
            },
            |message| cookie.map_or(Mac::default(), |(_, cookie)| cookie::mac2(&cookie, message)),
        );
        initiation.sent = Some(SentInitiation {
            at: now,
            local_index,
            noise,
            trusted,
            named,
            began,
            mac1,
        });
        datagram
    }

    /// Takes a handshake datagram. `hello_for` is what we say to a peer that calls.
    pub fn handle(
        &mut self,
        now: Time,
        arrived: Arrived,
        datagram: &[u8],
        hello_for: impl FnOnce(PeerId) -> Hello,
        rng: &mut dyn Random,
    ) -> HandshakeOutcome {
        match Message::parse(datagram) {
            Some(Message::Initiation(message)) => {
                if let Err(reason) = self.check_initiation(&message) {
                    return reason.into();
                }
                let Arrived { path, from, .. } = arrived;
                if arrived.under_load || !self.limiter.admit_anyone(now, path) {
                    let (text, mac2) = (message.before_mac2, message.mac2);
                    if !self.jar.verify(now, from, text, mac2, rng) {
                        return self.demand_cookie(now, from, &message, rng);
                    }
                    let own = |id: PeerId| self.peers[id.index()].admit_own(now);
                    if !self.limiter.admit_proved(now, path, from)
                        && !arrived.peer_there.is_some_and(own)
                    {
                        return Dropped::Overload.into();
                    }
                }
                self.on_initiation(now, arrived.trusted, &message, hello_for, rng)
                    .unwrap_or_else(HandshakeOutcome::from)
            }
            Some(Message::Response(message)) => self
                .on_response(now, arrived, &message, rng)
                .unwrap_or_else(HandshakeOutcome::from),
            Some(Message::CookieReply(message)) => match self.on_cookie_reply(now, &message) {
                Ok(peer) => HandshakeOutcome {
                    cookie_from: Some(peer),
                    ..HandshakeOutcome::default()
                },
                Err(reason) => reason.into(),
            },
            None => Dropped::Malformed.into(),
        }
    }

    /// What can be said of a message 1 without expense.
    fn check_initiation(&self, message: &message::Initiation<'_>) -> Result<(), Dropped> {
        if message.prologue.version != VERSION {
            return Err(Dropped::Version);
        }
        if !self.macs.verify_mac1(message.before_mac1, message.mac1) {
            return Err(Dropped::Mac1);
        }
        if message.prologue.integrity != self.config.integrity as u8 {
            return Err(Dropped::IntegrityMismatch);
        }
        Ok(())
    }

    fn demand_cookie(
        &mut self,
        now: Time,
        source: SocketAddr,
        message: &message::Initiation<'_>,
        rng: &mut dyn Random,
    ) -> HandshakeOutcome {
        let cookie = self.jar.cookie(now, source, rng);
        let mut nonce = [0; NONCE_LEN];
        rng.fill(&mut nonce);
        let sealed = self.macs.seal_cookie(&nonce, message.mac1, &cookie);
        HandshakeOutcome {
            reply: Some(message::emit_cookie_reply(
                message.prologue.sender,
                &nonce,
                &sealed,
            )),
            dropped: Some(Dropped::CookieDemanded),
            ..HandshakeOutcome::default()
        }
    }

    fn on_initiation(
        &mut self,
        now: Time,
        trusted: bool,
        message: &message::Initiation<'_>,
        hello_for: impl FnOnce(PeerId) -> Hello,
        rng: &mut dyn Random,
    ) -> Result<HandshakeOutcome, Dropped> {
        let suite = Suite::from_wire(message.prologue.suite).ok_or(Dropped::Suite)?;
        let prologue = message.prologue.bytes();
        let mut noise = Noise::responder(&self.config.private, &prologue, random::secret(rng));
        let payload = noise
            .read(message.noise)
            .map_err(|_| Dropped::Unauthentic)?;
        let remote = noise
            .remote_static()
            .expect("message 1 names the initiator");
        let known = self.peer_by_key(&remote);
        let Call {
            timestamp,
            hello,
            trusted: by_their_label,
            named,
        } = message::parse_initiation_payload(&payload).ok_or(Dropped::Malformed)?;
        let Some(id) = known else {
            return Ok(HandshakeOutcome {
                stranger: Some((remote, hello)),
                ..HandshakeOutcome::from(Dropped::UnknownPeer)
            });
        };
        let peer = &mut self.peers[id.index()];
        if let Some(latest) = peer.latest.filter(|latest| *latest >= timestamp) {
            let behind = latest.since(timestamp);
            let known = peer
                .outdated
                .is_some_and(|told| now.since(told) < TELL_OUTDATED);
            let tells = behind >= OUTDATED && !known;
            if tells {
                peer.outdated = Some(now);
            }
            return Ok(HandshakeOutcome {
                outdated: tells.then_some((id, behind)),
                ..HandshakeOutcome::from(Dropped::Replayed)
            });
        }
        peer.latest = Some(timestamp);

        let trusted_here = trusted;
        let trusted = trusted_here && by_their_label;
        let used = peer.chain.take_named(&named);
        if let Some(reason) = self.refusal(trusted, &self.peers[id.index()], used.as_deref()) {
            return Ok(self.refused(now, id, reason));
        }
        let peer = &mut self.peers[id.index()];
        let smaller = self.public.as_bytes() < remote.as_bytes();
        peer.give_way(now, smaller, &mut self.indices)?;

        set_psk(&mut noise, &peer.psk, used.as_deref());
        let number = used.as_ref().and_then(|used| {
            let at = named.iter().position(|id| *id == used.id())?;
            Some(at as u8 + 1)
        });
        let local_index = self.indices.allocate(id, rng);
        let reply = message::emit_response(
            message.prologue.sender,
            number.unwrap_or(0),
            &Answer {
                sender: local_index,
                trusted: trusted_here,
                hello: hello_for(id),
            },
            |payload, out| noise.write(payload, out),
            |message| peer.macs.mac1(message),
        );
        let agreement = Agreement {
            role: Role::Responder,
            suite,
            integrity: self.config.integrity,
            origin: origin(trusted, peer.has_psk, used.as_deref()),
            local_index,
            remote_index: message.prologue.sender,
        };
        let rekey_at = now + (RESPONDER_REKEY - random::jitter(rng, REKEY_JITTER));
        let keys = noise.finish();
        let session = Session::new(now, rekey_at, agreement, &keys, self.limits);
        let established = established(id, &session, hello);
        let left = chain_secret(&keys, agreement.origin);
        peer.chain.on_answered(left, session.id());
        peer.sessions
            .install_answered(now, session, &mut self.indices);
        Ok(HandshakeOutcome {
            reply: Some(reply),
            established: Some(established),
            ..HandshakeOutcome::default()
        })
    }

    fn on_response(
        &mut self,
        now: Time,
        arrived: Arrived,
        message: &message::Response<'_>,
        rng: &mut dyn Random,
    ) -> Result<HandshakeOutcome, Dropped> {
        let Self {
            indices,
            peers,
            macs,
            limiter,
            ..
        } = self;
        let (id, peer) = indices
            .owner(peers, message.receiver)
            .ok_or(Dropped::UnknownIndex)?;
        let psk = &*peer.psk;
        let call = peer.initiation.as_mut();
        let sent = call.and_then(|call| call.awaiting(message.receiver));
        let sent = sent.ok_or(Dropped::UnknownIndex)?;
        if !macs.verify_mac1(message.before_mac1, message.mac1) {
            return Err(Dropped::Mac1);
        }
        if !limiter.admit_answer(now, arrived.path) {
            return Err(Dropped::Overload);
        }
        // What the answer says in clear of the secret that is in it shows as wrong by the key that follows from it.
        let used = match message.used.checked_sub(1) {
            None => None,
            Some(at) => Some(sent.named.get(usize::from(at)).ok_or(Dropped::Malformed)?),
        };
        let used = used.cloned();
        set_psk(&mut sent.noise, psk, used.as_deref());
        let Ok(payload) = sent.noise.read(message.noise) else {
            limiter.note_forgery(now, arrived.path);
            return Err(Dropped::Unauthentic);
        };
        let answer = message::parse_response_payload(&payload).ok_or(Dropped::Malformed)?;
        let trusted = sent.trusted && arrived.trusted && answer.trusted;
        let peer = &self.peers[id.index()];
        let refused = self.refusal(trusted, peer, used.as_deref());
        let peer = &mut self.peers[id.index()];
        if let Some(reason) = refused {
            // It is answered, and cannot be answered once more; the call goes on.
            let sent = peer.initiation.as_mut().and_then(|call| call.sent.take());
            let sent = sent.expect("the answered message was found there");
            self.indices.free(sent.local_index);
            return Ok(self.refused(now, id, reason));
        }
        let sent = peer
            .initiation
            .take()
            .and_then(|initiation| initiation.sent);
        let sent = sent.expect("the answered message was found there");
        peer.answered_within[usize::from(sent.trusted)] = Some(now.since(sent.at));

        let agreement = Agreement {
            role: Role::Initiator,
            suite: self.config.suite,
            integrity: self.config.integrity,
            origin: origin(trusted, peer.has_psk, used.as_deref()),
            local_index: sent.local_index,
            remote_index: answer.sender,
        };
        let rekey_at = now + (INITIATOR_REKEY - random::jitter(rng, REKEY_JITTER));
        let keys = sent.noise.finish();
        let session = Session::new(now, rekey_at, agreement, &keys, self.limits);
        let established = established(id, &session, answer.hello);
        let left = chain_secret(&keys, agreement.origin);
        let used = used.map(|used| used.id());
        peer.chain.on_finished(sent.began, used, left, session.id());
        peer.sessions.install_initiated(session, &mut self.indices);
        Ok(HandshakeOutcome {
            established: Some(established),
            ..HandshakeOutcome::default()
        })
    }

    fn on_cookie_reply(
        &mut self,
        now: Time,
        message: &message::CookieReply<'_>,
    ) -> Result<PeerId, Dropped> {
        let Self { indices, peers, .. } = self;
        let (id, peer) = indices
            .owner(peers, message.receiver)
            .ok_or(Dropped::UnknownIndex)?;
        let mac1 = peer
            .awaiting(message.receiver)
            .ok_or(Dropped::UnknownIndex)?
            .mac1;
        let cookie = peer.macs.open_cookie(message.nonce, &mac1, message.sealed);
        peer.cookie = Some((now, cookie.ok_or(Dropped::Unauthentic)?));
        Ok(id)
    }
}

fn established(peer: PeerId, session: &Session, hello: Hello) -> Established {
    Established {
        peer,
        session: session.id(),
        role: session.role(),
        hello,
        epochs: session.epoch_secrets().clone(),
        #[cfg(feature = "observe")]
        tap: Some(session.tap()),
    }
}

#[cfg(test)]
mod tests;
