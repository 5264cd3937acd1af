//! Calls to a peer, the sessions that come of them, and what a new one says of the peer.
//!
//! In go handshakes, uses of sessions, and times; out come whether and where to call, which sessions count, what the peer
//! carries and holds, and [`News`] of it.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;
use zeroize::Zeroizing;

use super::config::LocalPath;
use super::paths::{PathSet, PeerPlace};
use super::shared::{Journal, Setup};
use crate::bump::Bump;
use crate::counters::Counter;
use crate::session::{EpochSecrets, Established, Hello, MAX_HELLO, PeerState, Role, SessionId};
use crate::stream::rx::STORE_LIMIT;
use crate::time::Time;

/// What a peer is believed to hold out of order, at most: it bounds what we remember of what we sent.
const STORE_BELIEVED: usize = 256 << 20;
/// Sessions whose epoch secrets are kept, for flows opened under them.
const SECRETS_KEPT: usize = 4;
/// A peer that has not answered by trusted paths for so long is called by others, too, if the user allows that.
const TRUSTED_ALONE: Duration = Duration::from_secs(5);
/// Silence on all paths after which the peer is called anew, and how often.
const PATIENCE: Duration = Duration::from_millis(400);
const RECALL: Duration = Duration::from_millis(500);

/// Bytes of a hello before the list of bumps.
const HELLO_FIXED: usize = 13;

/// What we say of ourselves in a handshake: version, instance, what we hold out of order in KiB, and the
/// bumps that we carry, each with how many of how many shares it needs (0 of 0: it does not split); and a ticket.
pub(super) fn hello(setup: &Setup, ticket: &Ticket) -> Hello {
    let mut bytes = Vec::with_capacity(MAX_HELLO);
    bytes.push(1);
    bytes.extend_from_slice(&setup.instance.to_be_bytes());
    bytes.extend_from_slice(&((STORE_LIMIT / 1024) as u32).to_be_bytes());
    let carried: Vec<_> = setup.bumps.iter().map(CarriedBump::of).collect();
    bytes.push(carried.len() as u8);
    for bump in carried {
        let (needed, shares) = bump.shares.unwrap_or_default();
        bytes.extend_from_slice(&[bump.number, needed, shares]);
    }
    bytes.extend_from_slice(&ticket.0);
    Hello::new(bytes).expect("our hello is a few hundred bytes long")
}

/// Ticket by which a peer that does not know this host yet may take it, at the end of a hello. The node does not look into
/// it; it is a secret.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Ticket(Zeroizing<Vec<u8>>);

/// The longest ticket, in bytes.
pub const MAX_TICKET: usize = 128;

impl Ticket {
    /// Takes these bytes, up to [`MAX_TICKET`].
    pub fn new(bytes: Zeroizing<Vec<u8>>) -> Option<Self> {
        (bytes.len() <= MAX_TICKET).then_some(Self(bytes))
    }

    /// Ticket in a stranger's hello, if there is one.
    pub(super) fn read(hello: &Hello) -> Option<Self> {
        let (_, rest) = hello.as_bytes().split_at_checked(HELLO_FIXED)?;
        let (count, rest) = rest.split_first()?;
        let (_, ticket) = rest.split_at_checked(3 * usize::from(*count))?;
        Self::new(ticket.to_vec().into()).filter(|ticket| !ticket.0.is_empty())
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

/// A bump as a hello names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CarriedBump {
    /// Its number.
    pub number: u8,
    /// If it splits, how many shares of how many it needs.
    pub shares: Option<(u8, u8)>,
}

impl CarriedBump {
    fn of(bump: &Bump) -> Self {
        Self {
            number: bump.number.get(),
            shares: bump.shares(),
        }
    }
}

/// What a peer says of itself in a handshake.
#[derive(Clone)]
struct Said {
    instance: u64,
    store: usize,
    bumps: Vec<CarriedBump>,
}

impl Said {
    fn read(hello: &Hello) -> Option<Self> {
        let (fixed, rest) = hello.as_bytes().split_first_chunk::<HELLO_FIXED>()?;
        let instance = u64::from_be_bytes(fixed[1..9].try_into().expect("eight bytes"));
        let store = u32::from_be_bytes(fixed[9..13].try_into().expect("four bytes"));
        let (count, rest) = rest.split_first().unwrap_or((&0, &[]));
        let listed = rest.get(..3 * usize::from(*count))?;
        let carried = |[number, needed, shares]: &[u8; 3]| CarriedBump {
            number: *number,
            shares: (*shares > 0).then_some((*needed, *shares)),
        };
        (fixed[0] == 1).then(|| Self {
            instance,
            store: (store as usize).saturating_mul(1024),
            bumps: listed.as_chunks().0.iter().map(carried).collect(),
        })
    }
}

/// What a call said whose session has not been used.
struct Unconfirmed {
    said: Said,
    epochs: EpochSecrets,
}

/// What a session says of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct News {
    /// It is another instance than before: it knows nothing of what we had with it.
    pub(super) restarted: bool,
    /// There was no session, or none with this instance.
    pub(super) is_up: bool,
}

/// See the module.
pub(super) struct Association {
    /// The running instance of the peer's daemon.
    instance: Option<u64>,
    /// There is a session to send by.
    up: bool,
    /// Sessions that the peer has not used yet. Its call may have been a recording, so they change
    /// nothing before that.
    unconfirmed: VecDeque<Unconfirmed>,
    /// Those of each session that still counts, with the instance of the peer; newest last.
    secrets: VecDeque<(u64, EpochSecrets)>,
    /// Place where the peer was called last, and whether it is to be called there once more.
    called: Option<PeerPlace>,
    call_again: bool,
    /// Since when there has been no session, and no way to call for one: a trusted path would be needed.
    stranded_since: Option<Time>,
    stranded: bool,
    /// Since when no path has been active.
    silent_since: Option<Time>,
    recall_at: Time,
    /// What the peer says it can hold, in bytes, and which bumps it carries.
    store: usize,
    carried: Vec<CarriedBump>,
    /// Goes with our calls until there is a session: the peer has taken us then.
    pub(super) ticket: Ticket,
}

impl Association {
    pub(super) fn new(now: Time) -> Self {
        Self {
            instance: None,
            up: false,
            unconfirmed: VecDeque::new(),
            secrets: VecDeque::new(),
            called: None,
            call_again: false,
            stranded_since: None,
            stranded: false,
            silent_since: None,
            recall_at: now,
            store: 0,
            carried: Vec::new(),
            ticket: Ticket::default(),
        }
    }

    /// True if there is a session to send by.
    pub(super) const fn is_up(&self) -> bool {
        self.up
    }

    /// Bytes out of order that the peer holds for us.
    pub(super) const fn store(&self) -> usize {
        self.store
    }

    #[cfg(test)]
    pub(super) fn set_store(&mut self, bytes: usize) {
        self.store = bytes;
    }

    /// The bumps that the peer carries.
    pub(super) fn carried(&self) -> &[CarriedBump] {
        &self.carried
    }

    /// True if this session counts: what an instance that is gone left on the way speaks of paths that are gone.
    pub(super) fn counts(&self, session: SessionId) -> bool {
        self.secrets.iter().any(|(_, s)| s.session() == session)
    }

    /// The secrets of a session that counts, by its number in the opening of a flow.
    pub(super) fn secrets(&self, session: u64) -> Option<&EpochSecrets> {
        let mut all = self.secrets.iter().map(|(_, secrets)| secrets);
        all.find(|secrets| secrets.session().as_u64() == session)
    }

    #[cfg(test)]
    pub(super) fn newest_secrets(&self) -> &EpochSecrets {
        let (_, secrets) = self.secrets.back().expect("there is a session");
        secrets
    }

    /// True if the peer may have restarted, as it says itself: only what it sends now proves it.
    pub(super) fn may_have_restarted(&self) -> bool {
        let is_another =
            |u: &Unconfirmed| self.instance.is_some_and(|known| known != u.said.instance);
        self.unconfirmed.iter().any(is_another)
    }

    /// True if a session should be asked for: there is none, or nobody has answered by it for a while on any path, as
    /// after a restart of the peer. `any` says whether untrusted paths may be called by.
    pub(super) fn wants_call(
        &mut self,
        now: Time,
        setup: &Setup,
        paths: &PathSet,
        (state, any): (PeerState, bool),
    ) -> bool {
        let is_up = state == PeerState::Established;
        let answered = !is_up || paths.iter().any(|link| link.is_alive(setup));
        if answered {
            self.silent_since = None;
        }
        let silent = !answered && now.since(*self.silent_since.get_or_insert(now)) >= PATIENCE;
        let recall = silent && now >= self.recall_at;
        if recall {
            self.recall_at = now + RECALL;
        }
        let due = match state {
            PeerState::Down => now >= paths.dials_at(),
            PeerState::Established => recall,
            // The call goes on by itself.
            PeerState::Connecting => false,
        };
        let mut endpoints = paths.endpoints().iter();
        due && endpoints.any(|(local, _)| is_callable(&setup.local[*local], any))
    }

    /// True if the peer should be called by untrusted paths, too, if the user allows that: it has been called for a
    /// while, or no trusted path leads to it.
    pub(super) fn is_past_trusted(
        now: Time,
        setup: &Setup,
        paths: &PathSet,
        calling_since: Option<Time>,
    ) -> bool {
        let is_long = calling_since.is_some_and(|since| now.since(since) >= TRUSTED_ALONE);
        let mut places = paths.places();
        is_long || !places.any(|(local, _)| setup.local[local].trusted)
    }

    /// True once, when there has been no session for a while although an untrusted path leads to the peer, which must not
    /// be called by such, because nothing would secure that.
    pub(super) fn poll_stranded(
        &mut self,
        now: Time,
        setup: &Setup,
        paths: &PathSet,
        (state, any): (PeerState, bool),
    ) -> bool {
        let mut places = paths.places();
        let strands = state != PeerState::Established
            && !any
            && places
                .any(|(local, _)| !setup.local[local].trusted && setup.local[local].is_usable());
        if !strands {
            self.stranded_since = None;
            self.stranded = false;
            return false;
        }
        let since = *self.stranded_since.get_or_insert(now);
        let is_long = now.since(since) >= TRUSTED_ALONE;
        is_long && !std::mem::replace(&mut self.stranded, is_long)
    }

    /// When [`wants_call`](Self::wants_call) may change, beside what paths say.
    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.silent_since.map(|t| self.recall_at.max(t + PATIENCE))
    }

    /// The session has expired; true if there was one.
    pub(super) fn on_down(&mut self) -> bool {
        std::mem::take(&mut self.up)
    }

    /// The next place to send a handshake message to, of all those in turn where the peer may be; by untrusted paths
    /// only if `any` path will do. And how many there are, and how many of them on one path at most.
    pub(super) fn next_call(
        &mut self,
        setup: &Setup,
        paths: &PathSet,
        any: bool,
    ) -> Option<(PeerPlace, (u32, u32))> {
        let places = paths.places();
        let places = places.filter(|(local, _)| is_callable(&setup.local[*local], any));
        let places: SmallVec<[PeerPlace; 8]> = places.collect();
        let last = places.iter().position(|at| Some(*at) == self.called);
        let again = std::mem::take(&mut self.call_again);
        let next = last.map_or(0, |at| at + usize::from(!again));
        self.called = places.get(next).or(places.first()).copied();
        let on_path = |of: &PeerPlace| places.iter().filter(|at| at.0 == of.0).count();
        let on_one = places.iter().map(on_path).max()?;
        Some((self.called?, (places.len() as u32, on_one as u32)))
    }

    /// Notes that the place that was called last gave a cookie, which is of use only there.
    pub(super) fn call_there_again(&mut self) {
        self.call_again = true;
    }

    /// A session came about.
    pub(super) fn on_established(
        &mut self,
        journal: &mut Journal,
        established: Established,
    ) -> Option<News> {
        let Some(said) = Said::read(&established.hello) else {
            journal.count(Counter::PeerContradiction);
            return None;
        };
        match established.role {
            // The answer proves that the peer is there now.
            Role::Initiator => {
                self.keep_secrets(said.instance, established.epochs);
                Some(self.on_instance(journal, said))
            }
            Role::Responder => {
                self.unconfirmed.push_back(Unconfirmed {
                    said,
                    epochs: established.epochs,
                });
                if self.unconfirmed.len() > SECRETS_KEPT {
                    self.unconfirmed.pop_front();
                }
                None
            }
        }
    }

    /// The initiator used a session that we answered; it is the one to send by if that `confirmed`
    /// it, and one that was overtaken if not.
    pub(super) fn on_used(
        &mut self,
        journal: &mut Journal,
        session: SessionId,
        confirmed: bool,
    ) -> Option<News> {
        let mut waiting = self.unconfirmed.iter();
        let at = waiting.position(|u| u.epochs.session() == session)?;
        let Unconfirmed { said, epochs } = self.unconfirmed.remove(at).expect("it was just found");
        if confirmed {
            self.keep_secrets(said.instance, epochs);
            return Some(self.on_instance(journal, said));
        }
        if self.instance == Some(said.instance) {
            self.keep_secrets(said.instance, epochs);
        }
        None
    }

    fn keep_secrets(&mut self, instance: u64, epochs: EpochSecrets) {
        self.secrets.push_back((instance, epochs));
        if self.secrets.len() > SECRETS_KEPT {
            self.secrets.pop_front();
        }
    }

    fn on_instance(&mut self, journal: &mut Journal, said: Said) -> News {
        let instance = said.instance;
        self.store = said.store.min(STORE_BELIEVED);
        self.carried = said.bumps;
        self.ticket = Ticket::default();
        let old = self.instance.replace(instance);
        let restarted = old.is_some_and(|known| known != instance);
        if restarted {
            journal.count(Counter::PeerRestarts);
            // What was agreed with that one means nothing to this one.
            self.secrets.retain(|(of, _)| Some(*of) != old);
        }
        // Its paths have yet to be opened: that is no silence of the peer.
        self.silent_since = None;
        let was_up = std::mem::replace(&mut self.up, true);
        News {
            restarted,
            is_up: restarted || !was_up,
        }
    }
}

/// True if a handshake may go by this local path, or by `any`.
fn is_callable(local: &LocalPath, any: bool) -> bool {
    local.is_usable() && (any || local.trusted)
}
