//! Calls to a peer, the sessions that come of them, and what a new one says of the peer.

use std::net::SocketAddr;
use std::time::Duration;

use super::{Peer, STORE_LIMIT};
use crate::bump::Bump;
use crate::counters::Counter;
use crate::flow::resume::Resume;
use crate::node::notice::Event;
use crate::node::opaque::Reassembly;
use crate::node::sets::Sets;
use crate::node::{LocalPath, Shared, short_hello};
use crate::session::{EpochSecrets, Established, Hello, PeerState, Role, SessionId};
use crate::time::Time;

/// What a peer is believed to hold out of order, at most: it bounds what we remember of what we sent.
const STORE_BELIEVED: usize = 256 << 20;
/// Sessions whose epoch secrets are kept, for flows opened under them.
const SECRETS_KEPT: usize = 4;
/// Silence on all paths after which the peer is called anew, and how often.
pub(super) const PATIENCE: Duration = Duration::from_millis(400);
const RECALL: Duration = Duration::from_millis(500);

/// What we say of ourselves in a handshake: version, instance, what we hold out of order in KiB, and the
/// bumps that we carry, each with how many of how many shares it needs (0 of 0: it does not split).
pub(crate) fn hello(shared: &Shared) -> Hello {
    let mut bytes = vec![1];
    bytes.extend_from_slice(&shared.instance.to_be_bytes());
    bytes.extend_from_slice(&((STORE_LIMIT / 1024) as u32).to_be_bytes());
    let carried: Vec<_> = shared.bumps.iter().map(CarriedBump::of).collect();
    bytes.push(carried.len() as u8);
    for bump in carried {
        let (needed, shares) = bump.shares.unwrap_or_default();
        bytes.extend_from_slice(&[bump.number, needed, shares]);
    }
    short_hello(bytes)
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
            number: bump.number,
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
        let (fixed, rest) = hello.as_bytes().split_first_chunk::<13>()?;
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
pub(super) struct Unconfirmed {
    said: Said,
    epochs: EpochSecrets,
}

impl Unconfirmed {
    /// The instance of the peer that it is with.
    pub(super) const fn instance(&self) -> u64 {
        self.said.instance
    }
}

impl Peer {
    /// Whether a session should be asked for: there is none, or nobody has answered by it for a
    /// while on any path, as after a restart of the peer.
    pub(crate) fn wants_call(&mut self, now: Time, shared: &Shared, state: PeerState) -> bool {
        let answered = self.paths.active(shared).next().is_some();
        if answered {
            self.silent_since = None;
        }
        let silent = !answered && now.since(*self.silent_since.get_or_insert(now)) >= PATIENCE;
        let recall = silent && now >= self.recall_at;
        if recall {
            self.recall_at = now + RECALL;
        }
        let due = match state {
            PeerState::Down => now >= self.paths.dials_at(),
            PeerState::Established => recall,
            // The call goes on by itself.
            PeerState::Connecting => false,
        };
        due && self
            .paths
            .endpoints()
            .iter()
            .any(|(local, _)| is_callable(&shared.local[*local]))
    }

    /// The session has expired.
    pub(crate) fn on_down(&mut self, shared: &mut Shared) {
        if std::mem::take(&mut self.up) {
            shared.events.push(Event::PeerDown {
                peer: self.id.index(),
            });
        }
    }

    /// The trusted endpoint to send the next handshake message to; without any, where the peer
    /// has proved to be.
    pub(crate) fn next_call(&mut self, shared: &Shared) -> Option<(usize, SocketAddr)> {
        let count = self.paths.endpoints().len();
        for step in 0..count {
            let at = (self.next_endpoint + step) % count;
            let (local, to) = self.paths.endpoints()[at];
            if is_callable(&shared.local[local]) {
                self.called = at;
                self.next_endpoint = at + 1;
                return Some((local, to));
            }
        }
        let mut proved = self.paths.iter().filter(|l| l.is_open());
        let there = proved.find(|l| is_callable(&shared.local[l.local]))?;
        Some((there.local, there.remote))
    }

    /// The endpoint that was called last gave a cookie, which is of use only there.
    pub(crate) fn call_there_again(&mut self) {
        self.next_endpoint = self.called;
    }

    /// A session came about.
    pub(crate) fn on_established(
        &mut self,
        now: Time,
        shared: &mut Shared,
        _from: (usize, SocketAddr),
        established: Established,
    ) {
        let Some(said) = Said::read(&established.hello) else {
            return shared.count(Counter::PeerContradiction);
        };
        match established.role {
            // The answer proves that the peer is there now.
            Role::Initiator => {
                self.keep_secrets(said.instance, established.epochs);
                self.on_instance(now, shared, said);
            }
            Role::Responder => {
                self.unconfirmed.push_back(Unconfirmed {
                    said,
                    epochs: established.epochs,
                });
                if self.unconfirmed.len() > SECRETS_KEPT {
                    self.unconfirmed.pop_front();
                }
            }
        }
    }

    /// The initiator used a session that we answered; it is the one to send by if that `confirmed`
    /// it, and one that was overtaken if not.
    pub(in crate::node) fn on_used(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: SessionId,
        confirmed: bool,
    ) {
        let mut waiting = self.unconfirmed.iter();
        let Some(at) = waiting.position(|u| u.epochs.session() == session) else {
            return;
        };
        let Unconfirmed { said, epochs } = self.unconfirmed.remove(at).expect("it was just found");
        if confirmed {
            self.keep_secrets(said.instance, epochs);
            self.on_instance(now, shared, said);
        } else if self.instance == Some(said.instance) {
            self.keep_secrets(said.instance, epochs);
        }
    }

    /// Whether there are sessions that the peer has not used yet.
    pub(in crate::node) fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.is_empty()
    }

    fn keep_secrets(&mut self, instance: u64, epochs: EpochSecrets) {
        self.secrets.push_back((instance, epochs));
        if self.secrets.len() > SECRETS_KEPT {
            self.secrets.pop_front();
        }
    }

    fn on_instance(&mut self, now: Time, shared: &mut Shared, said: Said) {
        let instance = said.instance;
        self.peer_store = said.store.min(STORE_BELIEVED);
        self.carried = said.bumps;
        let restarted = self.instance.is_some_and(|known| known != instance);
        if restarted {
            shared.count(Counter::PeerRestarts);
            self.forget(shared);
        }
        if let Some(old) = self.instance.replace(instance)
            && old != instance
        {
            // What was agreed with it means nothing to this one.
            self.secrets.retain(|(of, _)| *of != old);
        }
        if restarted || !self.up {
            self.up = true;
            shared.events.push(Event::PeerUp {
                peer: self.id.index(),
                restarted,
            });
        }
        self.paths.dial_at_once(now);
        // Its paths have yet to be opened: that is no silence of the peer.
        self.silent_since = None;
        let given_up = self.paths.use_session(now, shared);
        self.abandon(shared, given_up);
    }

    /// The peer restarted: it knows nothing of what we had with it.
    fn forget(&mut self, shared: &mut Shared) {
        self.paths.clear();
        self.segments.clear();
        self.split_segments.clear();
        self.delayed_trusted.clear();
        self.delayed_any.clear();
        self.splits.clear();
        self.sets = Sets::default();
        self.next_set = 0;
        // A message that the old instance had not taken is for the new one.
        for message in self.waiting.drain(&mut shared.pool).into_iter().rev() {
            self.control_out.push_front(message.bytes);
        }
        self.controls_waiting = 0;
        self.controls_again.clear();
        self.incoming.clear();
        self.last_incoming = None;
        self.control_seen.clear();
        self.reassembly = Reassembly::default();
        self.notices.clear();
        for (_, conn) in self.conns.iter_mut() {
            conn.out.stream.reincarnate();
            conn.out.secrets = None;
            conn.out.unconfirm();
            conn.resume = conn.tsval.map(|tsval| Box::new(Resume::after(tsval)));
            if let Some(mut inc) = conn.inc.take() {
                inc.stream.clear(&mut self.store);
            }
        }
    }
}

/// Whether a handshake may go by this local path.
fn is_callable(local: &LocalPath) -> bool {
    local.is_usable() && local.trusted
}
