//! One peer: what is known of it, and what the local kernel has for it.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_wire::frame::TcpFields;
use dibs_wire::packet::{Segment, flags};
use dibs_wire::virtio::{self, VirtioHdr};
use dibs_wire::{SeqNumber, Tuple};
use siphasher::sip::SipHasher13;

use super::config::Bump;
use super::handover::Drain;
use super::links::Link;
use super::notice::Event;
use super::opaque::{OpaqueQueue, Reassembly};
use super::{LocalPath, Shared, short_hello};
use crate::buffer::{Buffer, SMALL_LEN};
use crate::chunk::{Content, Unacknowledged};
use crate::counters::Counter;
use crate::flow::conn::Conn;
use crate::flow::fields::{self, OwnedFields};
use crate::flow::queue::Full;
use crate::flow::resume::Resume;
use crate::prefix::Prefix;
use crate::session::{
    EpochSecrets, Established, Hello, PeerId, PeerState, Role, Session, SessionId,
};
use crate::slab::{Key, Slab};
use crate::stream::rx::Store;
use crate::time::Time;

/// Bytes that a peer may make us hold out of order; told to it in the hello.
const STORE_LIMIT: usize = 32 << 20;
/// Connections of a peer, at most; beyond, the longest idle one of a few is forgotten, those of which
/// the local kernel knows nothing first. To look at all would let a peer keep us busy.
pub(super) const MAX_CONNS: usize = 65_536;
const EVICTION_SAMPLE: usize = 64;
/// A connection that was silent as long is forgotten; it opens again when it speaks.
const CONN_IDLE: Duration = Duration::from_secs(15 * 60);
/// A silent connection holds nothing longer than this.
const GAP_PATIENCE: Duration = Duration::from_secs(60);
/// How often idle connections are looked for.
const SWEEP: Duration = Duration::from_secs(30);
/// Messages to the peer that wait for their turn, at most.
pub(super) const MAX_CONTROLS: usize = 256;
/// What a peer is believed to hold out of order, at most: it bounds what we remember of what we sent.
const STORE_BELIEVED: usize = 256 << 20;
/// Sessions whose epoch secrets are kept, for flows opened under them.
const SECRETS_KEPT: usize = 4;
/// Bytes that wait in the queues of a peer's flows, at most.
pub(super) const MAX_BACKLOG: usize = 64 << 20;
/// Packets that wait in the queues of a peer's flows, at most: a short one has a buffer of its own too.
pub(super) const MAX_QUEUED: usize = MAX_BACKLOG / SMALL_LEN;
/// Segments without payload that wait to be sent, at most.
const MAX_SEGMENTS: usize = 4096;
/// An idle path is asked whether it is still there.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(1);
/// Silence on all paths after which the peer is called anew, and how often.
const PATIENCE: Duration = Duration::from_millis(400);
const RECALL: Duration = Duration::from_millis(500);
/// The wait before a path that could not be had is asked for again.
const REDIAL: Duration = Duration::from_secs(1);

/// What became of a segment from the TUN.
pub(crate) enum Taken {
    /// Dealt with.
    Done,
    /// To be queued at the place.
    Queue(Place),
    /// Not to be cut: as it is.
    Opaque,
}

/// Where a segment's payload goes.
pub(crate) struct Place {
    conn: Key,
    payload_at: usize,
    end: usize,
    mss: usize,
}

/// A segment without payload that waits to be sent.
pub(super) struct EmptyOut {
    pub(super) conn: Key,
    pub(super) seq: SeqNumber,
    pub(super) tcp: OwnedFields,
}

impl EmptyOut {
    /// Whether `later` says all that this says: both only acknowledge, and it acknowledges more.
    /// Equal ones are no repetitions for TCP, which counts them.
    fn is_surpassed_by(&self, later: &Self) -> bool {
        let only_acknowledges = |tcp: &TcpFields<'_>| {
            tcp.flags == flags::ACK && tcp.options.is_none() && tcp.urgent.is_none()
        };
        let (one, other) = (self.tcp.get(), later.tcp.get());
        self.conn == later.conn
            && self.seq == later.seq
            && only_acknowledges(&one)
            && only_acknowledges(&other)
            && other.ack.is_after(one.ack)
    }
}

/// Something that waits to be sent, other than as new data.
#[derive(Clone, Copy)]
pub(super) struct Delayed {
    pub(super) key: Key,
    /// The path that lost it; none if it has not been sent.
    pub(super) lost_by: Option<u8>,
}

/// Where the bytes of a send lie.
pub(crate) enum Source {
    /// In the shared scratch buffer.
    Scratch,
    /// In a batch, its first bytes.
    Batch(Key, usize),
}

/// A send.
pub(crate) struct Out {
    pub(crate) path: usize,
    pub(crate) to: SocketAddr,
    pub(crate) segment: usize,
    pub(crate) source: Source,
}

/// Seeds the hash tables: what a peer chooses must not make them slow.
#[derive(Clone)]
pub(super) struct Hashing(u64, u64);

impl BuildHasher for Hashing {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.0, self.1)
    }
}

/// What a call said whose session has not been used.
struct Unconfirmed {
    instance: u64,
    store: usize,
    epochs: EpochSecrets,
}

/// What the node knows of a peer.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(super) prefixes: Vec<Prefix>,
    /// Those of the other peers: what a longer one of these holds is not this peer's.
    pub(super) foreign: Vec<Prefix>,
    endpoints: Vec<(usize, SocketAddr)>,
    next_endpoint: usize,
    /// The endpoint that was called last.
    called: usize,
    /// Ties between the two ends go our way.
    smaller_key: bool,
    /// The running instance of its daemon.
    instance: Option<u64>,
    /// Sessions that the peer has not used yet. Its call may have been a recording, so they change
    /// nothing before that.
    unconfirmed: VecDeque<Unconfirmed>,
    /// There is a session to send by.
    pub(super) up: bool,
    /// Those of each session that still counts, with the instance of the peer; newest last.
    pub(super) secrets: VecDeque<(u64, EpochSecrets)>,
    pub(super) links: Vec<Link>,
    next_path_id: u8,
    /// Where the numbers of a path id go on if it is opened again: a nonce serves once.
    next_seq: Box<[u64; 256]>,
    redial_at: Time,
    /// Since when no path has been active.
    silent_since: Option<Time>,
    recall_at: Time,
    pub(super) conns: Slab<Conn>,
    pub(super) by_tuple: HashMap<(Tuple, u8), Key, Hashing>,
    /// By the peer's flow numbers.
    pub(super) incoming: HashMap<u32, Key, Hashing>,
    /// The entry of `incoming` that was used last: the next datagram is likely of the same flow.
    pub(super) last_incoming: Option<(u32, Key)>,
    /// By ours.
    pub(super) outgoing: HashMap<u32, Key, Hashing>,
    next_flow: u32,
    pub(crate) waiting: Unacknowledged,
    /// What was lost, or left out of a run, by who may carry it.
    pub(super) delayed_trusted: VecDeque<Delayed>,
    pub(super) delayed_any: VecDeque<Delayed>,
    /// Flows with something queued: those that just began, and the others.
    pub(super) new_flows: VecDeque<Key>,
    pub(super) old_flows: VecDeque<Key>,
    /// Bytes and packets in all queues.
    pub(super) backlog: usize,
    pub(super) queued: usize,
    pub(super) segments: VecDeque<EmptyOut>,
    pub(super) opaque: OpaqueQueue,
    pub(super) reassembly: Reassembly,
    /// Connections that leave their bump, and those whose start is held back.
    pub(super) drains: Vec<Drain>,
    pub(super) gates: Vec<(Key, Time)>,
    pub(super) control_out: VecDeque<Box<[u8]>>,
    pub(super) next_control: u32,
    /// Messages that wait for acknowledgement.
    pub(super) controls_waiting: usize,
    /// Odd numbers name chunks in pieces, even ones opaque packets.
    pub(super) next_fragmented: u32,
    pub(super) control_seen: VecDeque<u32>,
    /// Frames that tell the peer of flows and epochs; they may be lost.
    pub(super) notices: Vec<u8>,
    pub(super) store: Store,
    /// What the peer says it can hold.
    pub(super) peer_store: usize,
    /// When a pacer lets the next data go.
    pub(super) paced_until: Option<Time>,
    /// Trust keeps data waiting that an untrusted path could carry.
    pub(super) held_by_trust: bool,
    sweep_at: Time,
    pub(super) acked: Vec<u64>,
    pub(super) lost: Vec<u64>,
}

/// What we say of ourselves in a handshake: version, instance, what we hold out of order in KiB.
pub(crate) fn hello(instance: u64) -> Hello {
    let mut bytes = vec![1];
    bytes.extend_from_slice(&instance.to_be_bytes());
    bytes.extend_from_slice(&((STORE_LIMIT / 1024) as u32).to_be_bytes());
    short_hello(bytes)
}

fn read_hello(hello: &Hello) -> Option<(u64, usize)> {
    let bytes: &[u8; 13] = hello.as_bytes().first_chunk()?;
    let instance = u64::from_be_bytes(bytes[1..9].try_into().expect("eight bytes"));
    let store = u32::from_be_bytes(bytes[9..13].try_into().expect("four bytes"));
    (bytes[0] == 1).then_some((instance, (store as usize).saturating_mul(1024)))
}

impl Peer {
    pub(crate) fn new(
        now: Time,
        id: PeerId,
        prefixes: Vec<Prefix>,
        endpoints: Vec<(usize, SocketAddr)>,
        smaller_key: bool,
        shared: &mut Shared,
    ) -> Self {
        let hashing = Hashing(shared.hash_keys.0, shared.hash_keys.1);
        Self {
            id,
            prefixes,
            foreign: Vec::new(),
            endpoints,
            next_endpoint: 0,
            called: 0,
            smaller_key,
            instance: None,
            unconfirmed: VecDeque::new(),
            up: false,
            secrets: VecDeque::new(),
            links: Vec::new(),
            next_path_id: u8::from(!smaller_key),
            next_seq: Box::new([0; 256]),
            redial_at: now,
            silent_since: None,
            recall_at: now,
            conns: Slab::default(),
            by_tuple: HashMap::with_hasher(hashing.clone()),
            incoming: HashMap::with_hasher(hashing.clone()),
            last_incoming: None,
            outgoing: HashMap::with_hasher(hashing),
            next_flow: 0,
            waiting: Unacknowledged::default(),
            delayed_trusted: VecDeque::new(),
            delayed_any: VecDeque::new(),
            new_flows: VecDeque::new(),
            old_flows: VecDeque::new(),
            backlog: 0,
            queued: 0,
            segments: VecDeque::new(),
            opaque: OpaqueQueue::default(),
            reassembly: Reassembly::default(),
            drains: Vec::new(),
            gates: Vec::new(),
            control_out: VecDeque::new(),
            next_control: 0,
            controls_waiting: 0,
            next_fragmented: 1,
            control_seen: VecDeque::new(),
            notices: Vec::new(),
            store: Store::new(STORE_LIMIT),
            peer_store: 0,
            paced_until: None,
            held_by_trust: false,
            sweep_at: now + SWEEP,
            acked: Vec::new(),
            lost: Vec::new(),
        }
    }

    /// Length of the longest prefix of this peer that `addr` lies in.
    pub(crate) fn matches(&self, addr: IpAddr) -> Option<u8> {
        self.prefixes
            .iter()
            .filter(|p| p.contains(addr))
            .map(Prefix::len)
            .max()
    }

    /// Whether an inner address is one of this peer's hosts: by the longest prefix of all peers, so
    /// that none speaks for another (SECURITY 6).
    pub(super) fn owns(&self, addr: IpAddr) -> bool {
        let Some(len) = self.matches(addr) else {
            return false;
        };
        let longer = |p: &Prefix| p.len() > len && p.contains(addr);
        !self.foreign.iter().any(longer)
    }

    /// Whether a datagram of path `id` may come by this local path.
    pub(super) fn expects(&self, id: u8, local: usize) -> bool {
        let known = self.links.iter().find(|l| l.id == id);
        // Somebody may have brought the first question here by another interface. And who has
        // restarted numbers its paths anew; that it has, only what it sends now proves.
        let restarts = |u: &Unconfirmed| self.instance.is_some_and(|known| known != u.instance);
        known.is_none_or(|l| l.local == local || l.is_accepting())
            || self.unconfirmed.iter().any(restarts)
    }

    /// Whether a session should be asked for: there is none, or nobody has answered by it for a
    /// while on any path, as after a restart of the peer.
    pub(crate) fn wants_call(&mut self, now: Time, shared: &Shared, state: PeerState) -> bool {
        let answered = self.links.iter().any(|l| l.is_active(shared));
        if answered {
            self.silent_since = None;
        }
        let silent = !answered && now.since(*self.silent_since.get_or_insert(now)) >= PATIENCE;
        let recall = silent && now >= self.recall_at;
        if recall {
            self.recall_at = now + RECALL;
        }
        let due = match state {
            PeerState::Down => now >= self.redial_at,
            PeerState::Established => recall,
            // The call goes on by itself.
            PeerState::Connecting => false,
        };
        due && self
            .endpoints
            .iter()
            .any(|(local, _)| is_callable(&shared.local[*local]))
    }

    /// The session has expired.
    pub(crate) fn on_down(&mut self, shared: &mut Shared) {
        if std::mem::take(&mut self.up) {
            shared.events.push_back(Event::PeerDown {
                peer: self.id.index(),
            });
        }
    }

    /// The trusted endpoint to send the next handshake message to; without any, where the peer
    /// has proved to be.
    pub(crate) fn next_call(&mut self, shared: &Shared) -> Option<(usize, SocketAddr)> {
        let count = self.endpoints.len();
        for step in 0..count {
            let at = (self.next_endpoint + step) % count;
            let (local, to) = self.endpoints[at];
            if is_callable(&shared.local[local]) {
                self.called = at;
                self.next_endpoint = at + 1;
                return Some((local, to));
            }
        }
        let mut proved = self.links.iter().filter(|l| l.is_open());
        let there = proved.find(|l| is_callable(&shared.local[l.local]))?;
        Some((there.local, there.remote))
    }

    /// Whether the peer is, or may be, at this address.
    pub(super) fn is_at(&self, addr: IpAddr) -> bool {
        self.endpoints.iter().any(|(_, to)| to.ip() == addr)
            || self
                .links
                .iter()
                .any(|l| l.is_open() && l.remote.ip() == addr)
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
        let Some((instance, store)) = read_hello(&established.hello) else {
            return shared.count(Counter::PeerContradiction);
        };
        match established.role {
            // The answer proves that the peer is there now.
            Role::Initiator => {
                self.keep_secrets(instance, established.epochs);
                self.on_instance(now, shared, instance, store);
            }
            Role::Responder => {
                self.unconfirmed.push_back(Unconfirmed {
                    instance,
                    store,
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
    pub(super) fn on_used(
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
        let Unconfirmed {
            instance,
            store,
            epochs,
        } = self.unconfirmed.remove(at).expect("it was just found");
        if confirmed {
            self.keep_secrets(instance, epochs);
            self.on_instance(now, shared, instance, store);
        } else if self.instance == Some(instance) {
            self.keep_secrets(instance, epochs);
        }
    }

    /// Whether there are sessions that the peer has not used yet.
    pub(super) fn has_unconfirmed(&self) -> bool {
        !self.unconfirmed.is_empty()
    }

    fn keep_secrets(&mut self, instance: u64, epochs: EpochSecrets) {
        self.secrets.push_back((instance, epochs));
        if self.secrets.len() > SECRETS_KEPT {
            self.secrets.pop_front();
        }
    }

    fn on_instance(&mut self, now: Time, shared: &mut Shared, instance: u64, store: usize) {
        self.peer_store = store.min(STORE_BELIEVED);
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
            shared.events.push_back(Event::PeerUp {
                peer: self.id.index(),
                restarted,
            });
        }
        self.redial_at = now;
        // The new session is to be used at once, so that the peer confirms it.
        match self.links.iter_mut().find(|l| l.is_open()) {
            Some(link) => link.probe = true,
            None => self.dial(now, shared),
        }
    }

    /// The peer restarted: it knows nothing of what we had with it.
    fn forget(&mut self, shared: &mut Shared) {
        while !self.links.is_empty() {
            self.remove_link(0);
        }
        self.segments.clear();
        self.delayed_trusted.clear();
        self.delayed_any.clear();
        // A message that the old instance had not taken is for the new one.
        for pending in self.waiting.drain(&mut shared.pool).into_iter().rev() {
            if let Content::Control { bytes, .. } = pending.content {
                self.control_out.push_front(bytes);
            }
        }
        self.controls_waiting = 0;
        self.incoming.clear();
        self.last_incoming = None;
        self.control_seen.clear();
        self.reassembly = Reassembly::default();
        self.notices.clear();
        for (_, conn) in self.conns.iter_mut() {
            conn.out.stream.reincarnate();
            conn.out.secrets = None;
            conn.out.confirmed = false;
            conn.resume = conn.tsval.map(|tsval| Box::new(Resume::after(tsval)));
            if let Some(mut inc) = conn.inc.take() {
                inc.stream.clear(&mut self.store);
            }
        }
    }

    /// A local interface came or went.
    pub(crate) fn on_local_change(&mut self, now: Time, shared: &mut Shared, local: usize) {
        self.redial_at = now;
        let peer = self.id.index();
        let up = shared.local[local].up;
        let mut lost = std::mem::take(&mut self.lost);
        for at in 0..self.links.len() {
            let link = &mut self.links[at];
            if link.local != local {
                continue;
            }
            if up {
                link.on_up(now);
            } else {
                // What is on its way there goes by the others at once.
                link.path.abandon(&mut lost);
            }
            let id = link.id;
            link.note_state(shared, peer);
            self.take_lost(shared, id, &mut lost);
        }
        self.lost = lost;
    }

    /// Asks for a path over every endpoint that has none.
    fn dial(&mut self, now: Time, shared: &mut Shared) {
        self.redial_at = now + REDIAL;
        for at in 0..self.endpoints.len() {
            let (local, remote) = self.endpoints[at];
            let known = self.links.iter().any(|l| l.local == local && !l.is_lost());
            if known || !shared.local[local].up {
                continue;
            }
            let id = self.next_path_id;
            self.next_path_id = self.next_path_id.wrapping_add(2);
            self.add_link(Link::join(now, shared, id, local, remote));
        }
    }

    /// Whether a path that the peer opens goes before one that we ask for between the same places:
    /// both ends called.
    pub(super) fn resolve_crossed(&mut self, local: usize, remote: SocketAddr) -> bool {
        let ours = |l: &Link| l.local == local && l.remote == remote && l.is_joining();
        let Some(at) = self.links.iter().position(ours) else {
            return true;
        };
        if !self.smaller_key {
            self.remove_link(at);
        }
        !self.smaller_key
    }

    /// Whether a path id is one of those that this end gives: the smaller key's are even.
    pub(super) const fn numbers(&self, id: u8) -> bool {
        id.is_multiple_of(2) == self.smaller_key
    }

    pub(super) fn add_link(&mut self, link: Link) {
        let seq = self.next_seq[usize::from(link.id)];
        self.links.push(link.starting_at(seq));
    }

    pub(super) fn remove_link(&mut self, at: usize) -> Link {
        let link = self.links.remove(at);
        self.next_seq[usize::from(link.id)] = link.path.next_seq();
        link
    }

    /// A path has been proved: what there was between the same places is of no use any more, and
    /// what it carried goes by the others.
    pub(super) fn supersede(&mut self, shared: &mut Shared, id: u8) {
        let Some(link) = self.links.iter().find(|l| l.id == id) else {
            return;
        };
        let (local, remote) = (link.local, link.remote);
        let older = |l: &Link| l.id != id && l.local == local && l.remote == remote;
        while let Some(at) = self.links.iter().position(older) {
            let mut link = self.remove_link(at);
            let mut lost = std::mem::take(&mut self.lost);
            link.path.abandon(&mut lost);
            self.take_lost(shared, link.id, &mut lost);
            self.lost = lost;
        }
    }

    /// Whether anything can be sent by this local path.
    fn may_use(&self, shared: &Shared, local: usize) -> bool {
        self.up && shared.local[local].up
    }

    pub(crate) fn poll_timeout(&self, shared: &Shared) -> Option<Time> {
        let usable = self.links.iter().filter(|l| self.may_use(shared, l.local));
        let links = usable.flat_map(|l| {
            [
                l.timer(),
                l.path.poll_timeout(),
                l.path.next_ack_time(),
                l.path.next_ping(KEEPALIVE),
            ]
        });
        let rest = [
            self.paced_until,
            Some(self.sweep_at),
            (!self.endpoints.is_empty()).then_some(self.redial_at),
            self.silent_since.map(|t| self.recall_at.max(t + PATIENCE)),
            self.reassembly.expires_at(),
            self.handover_due(shared),
        ];
        links.chain(rest).flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time, shared: &mut Shared) {
        if self.paced_until.is_some_and(|t| t <= now) {
            self.paced_until = None;
        }
        let peer = self.id.index();
        for at in 0..self.links.len() {
            if !self.may_use(shared, self.links[at].local) {
                continue;
            }
            let link = &mut self.links[at];
            link.on_timer(now, shared);
            if link.path.poll_timeout().is_some_and(|t| t <= now) {
                let mut lost = std::mem::take(&mut self.lost);
                if link.path.on_timeout(now, &mut lost) == crate::path::TimeoutAction::Probe {
                    link.probe = true;
                }
                let id = link.id;
                self.take_lost(shared, id, &mut lost);
                self.lost = lost;
            }
            let link = &mut self.links[at];
            if link.is_open() && link.path.wants_ping(now, KEEPALIVE) {
                link.probe = true;
            }
            link.note_state(shared, peer);
        }
        if now >= self.redial_at && !self.endpoints.is_empty() {
            if self.up {
                self.dial(now, shared);
            } else {
                self.redial_at = now + REDIAL;
            }
        }
        self.reassembly.expire(now, shared);
        self.handle_handover(now, shared);
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep(now, shared);
        }
    }

    /// Forgets connections that have long been silent, and what others hold for a gap that nobody
    /// closes any more, as when the connection left the bump.
    fn sweep(&mut self, now: Time, shared: &mut Shared) {
        let idle: Vec<Key> = self
            .conns
            .iter()
            .filter(|(_, c)| now.since(c.last_seen) > CONN_IDLE && c.out.queue.is_empty())
            .map(|(key, _)| key)
            .collect();
        for key in idle {
            self.remove_conn(shared, key);
        }
        for (_, conn) in self.conns.iter_mut() {
            let silent = now.since(conn.last_seen);
            if silent > GAP_PATIENCE
                && let Some(inc) = &mut conn.inc
            {
                inc.stream.give_up(&mut self.store);
            }
            if silent > SWEEP {
                conn.shrink();
            }
        }
        let abandoned = self.store.take_abandoned();
        shared.counters.add(Counter::EpochEnded, abandoned);
    }

    fn remove_conn(&mut self, shared: &mut Shared, key: Key) {
        let Some(mut conn) = self.conns.remove(key) else {
            return;
        };
        self.by_tuple.remove(&(conn.tuple, conn.bump));
        self.outgoing.remove(&conn.out.flow);
        self.backlog -= conn.out.queue.bytes();
        self.queued -= conn.out.queue.len();
        while let Some(waiting) = conn.out.queue.pop() {
            shared.pool.give(waiting.buffer);
        }
        if let Some(mut inc) = conn.inc {
            inc.stream.clear(&mut self.store);
            self.incoming.remove(&inc.flow);
            self.last_incoming = None;
        }
    }

    /// The connection of this tuple in this bump, made if it is new.
    pub(super) fn conn(&mut self, now: Time, shared: &mut Shared, tuple: Tuple, bump: u8) -> Key {
        if let Some(&key) = self.by_tuple.get(&(tuple, bump)) {
            return key;
        }
        if self.conns.len() >= MAX_CONNS {
            let from = shared.random_u64() as usize;
            let some = self.conns.some(from, EVICTION_SAMPLE);
            let oldest = some.min_by_key(|(_, c)| (c.sent_end.is_some(), c.last_seen));
            // A full table has no holes.
            let (oldest, _) = oldest.expect("the table is full");
            self.remove_conn(shared, oldest);
            shared.count(Counter::FlowEvicted);
        }
        let flow = self.next_flow;
        self.next_flow = self.next_flow.wrapping_add(1);
        let mut conn = Conn::new(now, tuple, bump, flow);
        // A switch from another bump must not take TSval back.
        conn.tsval_floor = self.floor_of_others(tuple);
        let key = self.conns.insert(conn);
        self.by_tuple.insert((tuple, bump), key);
        self.outgoing.insert(flow, key);
        key
    }

    fn floor_of_others(&self, tuple: Tuple) -> Option<u32> {
        (1..15).find_map(|bump| {
            let key = self.by_tuple.get(&(tuple, bump))?;
            self.conns.get(*key)?.tsval_floor
        })
    }

    /// Takes a TCP segment of the local kernel.
    pub(crate) fn take_segment(
        &mut self,
        now: Time,
        shared: &mut Shared,
        session: Option<&Session>,
        bump: u8,
        segment: &Segment<'_>,
        gso_size: u16,
    ) -> Taken {
        if Bump::from_wire(bump).is_none() {
            return Taken::Opaque;
        }
        let key = self.conn(now, shared, segment.tuple, bump);
        let conn = self.conns.get_mut(key).expect("it was just found");
        conn.last_seen = now;
        if let Some((_, tsecr)) = segment.timestamps
            && segment.has(flags::ACK)
        {
            conn.echoed(tsecr);
        }
        if let Some((tsval, _)) = segment.timestamps {
            conn.tsval = Some(tsval);
        }
        if let Some(resume) = &mut conn.resume {
            resume.note(segment);
        }
        let syn = segment.has(flags::SYN);
        if syn {
            conn.acked = None;
            conn.sent_end = None;
            conn.out.stream.reincarnate();
            // What is left of an older connection between the same ports is of no use.
            self.backlog -= conn.out.queue.bytes();
            self.queued -= conn.out.queue.len();
            while let Some(waiting) = conn.out.queue.pop() {
                shared.pool.give(waiting.buffer);
            }
        }
        match session {
            Some(session) if syn || conn.out.secrets.is_none() => {
                conn.open(session.epoch_secrets().clone(), segment.meta);
            }
            // It waits, and is opened by the session that it goes by.
            None if syn || conn.out.secrets.is_none() => {
                conn.out.meta = segment.meta;
                conn.out.secrets = None;
            }
            _ => {}
        }
        // The stream's first byte follows the SYN. Whatever opens the flow tells the base.
        conn.out.stream.begin_at(segment.seq.add(u32::from(syn)));
        if segment.has(flags::ACK) {
            self.note_local_ack(now, shared, key, segment.ack);
        }
        let conn = self.conns.get_mut(key).expect("it was just found");
        conn.note_sent(segment);
        if segment.payload.is_empty() {
            // FIN and RST keep their place behind the bytes before them.
            let in_stream = segment.flags & (flags::FIN | flags::RST) != 0
                && !syn
                && (conn.out.stream.base().is_some() || !conn.out.queue.is_empty());
            if !in_stream {
                let tcp = OwnedFields::new(&fields::of_segment(segment, conn.out.meta));
                let empty = EmptyOut {
                    conn: key,
                    seq: segment.seq,
                    tcp,
                };
                if let Some(last) = self.segments.back_mut()
                    && last.is_surpassed_by(&empty)
                {
                    *last = empty;
                    return Taken::Done;
                }
                if self.segments.len() >= MAX_SEGMENTS {
                    self.segments.pop_front();
                    shared.count(Counter::QueueFull);
                }
                self.segments.push_back(empty);
                return Taken::Done;
            }
        } else if syn {
            // TCP fast open: rare, and not worth a stream that begins twice.
            return Taken::Opaque;
        }
        conn.stats.bytes_sent += segment.payload.len() as u64;
        conn.spoke = Some(now);
        if let Some(drain) = self.drains.iter_mut().find(|d| d.is_of(key)) {
            drain.hear(now);
        }
        let payload_at = virtio::LEN + segment.payload_at;
        Taken::Queue(Place {
            conn: key,
            payload_at,
            end: payload_at + segment.payload.len(),
            mss: if gso_size == 0 {
                segment.payload.len().max(1)
            } else {
                usize::from(gso_size)
            },
        })
    }

    /// What the local kernel acknowledges may prove that a gap was filled past us.
    fn note_local_ack(&mut self, now: Time, shared: &mut Shared, key: Key, ack: SeqNumber) {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        if conn.acked.is_none_or(|before| ack.is_after(before)) {
            conn.acked = Some(ack);
        }
        let Some(inc) = &mut conn.inc else { return };
        if !inc.stream.is_waiting() {
            return;
        }
        let offset = inc.offset_of(ack);
        if let Some(epoch) = inc.stream.local_ack(offset, &mut self.store) {
            self.complain(now, shared, key, epoch);
        } else if inc.stream.gate().is_some_and(|start| offset >= start) {
            self.open_gate(now, shared, key);
        }
    }

    /// Queues a segment's payload.
    pub(crate) fn enqueue(&mut self, now: Time, shared: &mut Shared, place: Place, buffer: Buffer) {
        let Place {
            conn: key,
            payload_at,
            end,
            mss,
        } = place;
        let conn = self
            .conns
            .get_mut(key)
            .expect("the place is of a connection");
        // A short packet that has to wait must not pin a large buffer.
        let buffer = if end <= SMALL_LEN {
            let mut small = shared.pool.take_for(end);
            small[..end].copy_from_slice(&buffer[..end]);
            shared.pool.give(buffer);
            small
        } else {
            buffer
        };
        let full = self.backlog + (end - payload_at) > MAX_BACKLOG || self.queued >= MAX_QUEUED;
        let pushed = match full {
            true => Err(Full(buffer)),
            false => conn.out.queue.push(now, buffer, payload_at, end, mss),
        };
        if let Err(Full(buffer)) = pushed {
            conn.out.stream.note_drop();
            shared.count(Counter::QueueFull);
            return shared.pool.give(buffer);
        }
        self.backlog += end - payload_at;
        self.queued += 1;
        if !conn.out.scheduled {
            conn.out.scheduled = true;
            conn.out.deficit = 0;
            self.new_flows.push_back(key);
        }
    }

    /// Takes a packet that is not cut.
    pub(crate) fn take_opaque(
        &mut self,
        shared: &mut Shared,
        bump: u8,
        header: VirtioHdr,
        mut buffer: Buffer,
        len: usize,
    ) {
        let packet = &mut buffer[virtio::LEN..len];
        let complete = header.gso_size == 0
            && (!header.needs_csum || dibs_wire::emit::complete_checksum(&header, packet));
        if !complete || !self.opaque.push(bump, packet) {
            shared.count(Counter::OpaqueQueueFull);
        }
        shared.pool.give(buffer);
    }
}

/// Whether a handshake may go by this local path.
fn is_callable(local: &LocalPath) -> bool {
    local.up && local.trusted
}
