//! One peer: what is known of it, and what the local kernel has for it.

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dibs_wire::Tuple;
use siphasher::sip::SipHasher13;

use super::Shared;
use super::accept::Opening;
use super::fq::FairQueue;
use super::handover::Drain;
use super::opaque::{OpaqueQueue, Reassembly};
use super::paths::{Link, PathSet};
use super::receive::incoming;
use super::sets::Sets;
use crate::buffer::Buffer;
use crate::chunk::Unacknowledged;
use crate::counters::Counter;
use crate::flow::conn::Conn;
use crate::prefix::Prefix;
use crate::session::{EpochSecrets, PeerId};
use crate::slab::{Key, Slab};
use crate::stream::rx::Store;
use crate::time::Time;

mod calls;
pub(super) mod conns;

pub use calls::CarriedBump;
pub(super) use calls::hello;
use calls::{PATIENCE, Unconfirmed};
pub(super) use conns::EmptyOut;
pub(super) use conns::Taken;

/// Bytes that a peer may make us hold out of order; told to it in the hello.
const STORE_LIMIT: usize = 32 << 20;
/// A connection that was silent as long is forgotten; it opens again when it speaks.
const CONN_IDLE: Duration = Duration::from_secs(15 * 60);
/// Nothing is held longer for a gap, nor by a silent connection; looked at every [`SWEEP`].
const GAP_PATIENCE: Duration = Duration::from_secs(60);
/// How often idle connections are looked for.
const SWEEP: Duration = Duration::from_secs(30);
/// Messages to the peer that wait for their turn, at most.
pub(super) const MAX_CONTROLS: usize = 256;
/// Between two messages that were lost more than once and are sent again.
const CONTROL_AGAIN: Duration = Duration::from_millis(25);
/// Messages of the peer's daemon that the owner has not dealt with, at most: what comes beyond is not taken, so
/// not acknowledged, and the peer sends it again. As many as an honest daemon has waiting at once.
pub(super) const MAX_CONTROLS_TAKEN: usize = 256;

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
    /// In a buffer of its own, its first bytes.
    Once(Buffer, usize),
}

/// A send.
pub(crate) struct Out {
    pub(crate) path: usize,
    pub(crate) to: SocketAddr,
    pub(crate) segment: usize,
    pub(crate) ect: bool,
    pub(crate) source: Source,
}

impl Out {
    pub(super) fn by(link: &Link, segment: usize, source: Source) -> Self {
        Self {
            path: link.local,
            to: link.remote,
            segment,
            ect: link.path.is_ect(),
            source,
        }
    }
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

/// What the node knows of a peer.
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(super) prefixes: Vec<Prefix>,
    /// Those of the other peers: what a longer one of these holds is not this peer's.
    pub(super) foreign: Vec<Prefix>,
    /// Where it may begin connections to.
    pub(super) accept: Vec<Opening>,
    next_endpoint: usize,
    /// The endpoint that was called last.
    called: usize,
    /// The running instance of its daemon.
    instance: Option<u64>,
    /// Sessions that the peer has not used yet. Its call may have been a recording, so they change
    /// nothing before that.
    unconfirmed: VecDeque<Unconfirmed>,
    /// There is a session to send by.
    pub(super) up: bool,
    /// Those of each session that still counts, with the instance of the peer; newest last.
    pub(super) secrets: VecDeque<(u64, EpochSecrets)>,
    pub(super) paths: PathSet,
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
    /// Sends of what was split, of which others have gone.
    pub(super) splits: VecDeque<Out>,
    /// Number of the next set of shares.
    pub(super) next_set: u64,
    pub(super) sets: Sets,
    /// There are too few paths for what should be split.
    pub(super) short_of_paths: bool,
    pub(super) fq: FairQueue,
    pub(super) segments: VecDeque<EmptyOut>,
    /// Those of flows that are split.
    pub(super) split_segments: VecDeque<EmptyOut>,
    /// Packets that are not cut, by who may carry them.
    pub(super) opaque: OpaqueQueue,
    pub(super) opaque_sealed: OpaqueQueue,
    pub(super) opaque_split: OpaqueQueue,
    pub(super) reassembly: Reassembly,
    /// Connections that leave their bump, and those whose start is held back.
    pub(super) drains: Vec<Drain>,
    pub(super) gates: Vec<(Key, Time)>,
    pub(super) control_out: VecDeque<Box<[u8]>>,
    pub(super) next_control: u32,
    /// Messages that wait for acknowledgement.
    pub(super) controls_waiting: usize,
    /// Those of them that were lost more than once, and when the next one is sent again.
    pub(super) controls_again: VecDeque<Delayed>,
    control_again_at: Time,
    /// Odd numbers name chunks in pieces, even ones opaque packets.
    pub(super) next_fragmented: u32,
    pub(super) control_seen: VecDeque<u32>,
    /// Messages that the owner was given and has not dealt with.
    pub(super) controls_taken: usize,
    /// Frames that tell the peer of flows and epochs; they may be lost.
    pub(super) notices: Vec<u8>,
    pub(super) store: Store,
    /// What the peer says it can hold, and which bumps it carries.
    pub(super) peer_store: usize,
    /// The oldest of what waits for an acknowledgement when what waits for a path was put behind it last.
    pub(super) postponed: Option<Key>,
    pub(super) carried: Vec<CarriedBump>,
    /// Trust keeps data waiting that an untrusted path could carry.
    pub(super) held_by_trust: bool,
    sweep_at: Time,
    pub(super) acked: Vec<u64>,
    pub(super) lost: Vec<u64>,
}

impl Peer {
    pub(crate) fn new(
        now: Time,
        id: PeerId,
        prefixes: Vec<Prefix>,
        endpoints: Vec<(usize, SocketAddr)>,
        accept: Vec<Opening>,
        smaller_key: bool,
        shared: &mut Shared,
    ) -> Self {
        let hashing = Hashing(shared.hash_keys.0, shared.hash_keys.1);
        Self {
            id,
            prefixes,
            foreign: Vec::new(),
            accept,
            next_endpoint: 0,
            called: 0,
            instance: None,
            unconfirmed: VecDeque::new(),
            up: false,
            secrets: VecDeque::new(),
            paths: PathSet::new(now, endpoints, smaller_key),
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
            splits: VecDeque::new(),
            next_set: 0,
            sets: Sets::default(),
            short_of_paths: false,
            fq: FairQueue::default(),
            segments: VecDeque::new(),
            split_segments: VecDeque::new(),
            opaque: OpaqueQueue::new(0),
            opaque_sealed: OpaqueQueue::new(1),
            opaque_split: OpaqueQueue::new(2),
            reassembly: Reassembly::default(),
            drains: Vec::new(),
            gates: Vec::new(),
            control_out: VecDeque::new(),
            next_control: 0,
            controls_waiting: 0,
            controls_again: VecDeque::new(),
            control_again_at: now,
            next_fragmented: 1,
            control_seen: VecDeque::new(),
            controls_taken: 0,
            notices: Vec::new(),
            store: Store::new(STORE_LIMIT),
            peer_store: 0,
            postponed: None,
            carried: Vec::new(),
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
    /// that none speaks for another (docs/threat-model.md, "The peer").
    pub(super) fn owns(&self, addr: IpAddr) -> bool {
        let Some(len) = self.matches(addr) else {
            return false;
        };
        let longer = |p: &Prefix| p.len() > len && p.contains(addr);
        !self.foreign.iter().any(longer)
    }

    /// Whether a datagram of path `id` may come by this local path.
    pub(super) fn expects(&self, id: u8, local: usize) -> bool {
        let known = self.paths.iter().find(|l| l.id == id);
        // Somebody may have brought the first question here by another interface. And who has
        // restarted numbers its paths anew; that it has, only what it sends now proves.
        let restarts = |u: &Unconfirmed| self.instance.is_some_and(|known| known != u.instance());
        known.is_none_or(|l| l.local == local || l.is_accepting())
            || self.unconfirmed.iter().any(restarts)
    }

    /// A local interface came or went.
    pub(crate) fn on_local_change(&mut self, now: Time, shared: &mut Shared, local: usize) {
        self.paths.dial_at_once(now);
        let peer = self.id.index();
        let up = shared.local[local].is_usable();
        let mut lost = std::mem::take(&mut self.lost);
        for at in 0..self.paths.len() {
            let link = &mut self.paths[at];
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

    /// What paths carried that were given up goes by the others.
    pub(super) fn abandon(
        &mut self,
        shared: &mut Shared,
        given_up: impl IntoIterator<Item = Link>,
    ) {
        for mut link in given_up {
            let mut lost = std::mem::take(&mut self.lost);
            link.path.abandon(&mut lost);
            self.take_lost(shared, link.id, &mut lost);
            self.lost = lost;
            // What it had lost before can go nowhere now.
            for key in link.shares {
                self.lose_share(shared, key);
            }
        }
    }

    /// Whether anything can be sent by this local path.
    fn may_use(&self, shared: &Shared, local: usize) -> bool {
        self.up && shared.local[local].is_usable()
    }

    pub(crate) fn poll_timeout(&self, shared: &Shared) -> Option<Time> {
        let due = [
            self.paths.poll_timeout(shared, self.up),
            Some(self.sweep_at),
            self.silent_since.map(|t| self.recall_at.max(t + PATIENCE)),
            self.reassembly.expires_at(),
            self.sets.expires_at(),
            self.handover_due(shared),
            self.fq.poll_timeout(),
            (!self.controls_again.is_empty()).then_some(self.control_again_at),
        ];
        due.into_iter().flatten().min()
    }

    pub(crate) fn handle_timeout(&mut self, now: Time, shared: &mut Shared) {
        self.paths.release(now);
        let peer = self.id.index();
        for at in 0..self.paths.len() {
            if !self.may_use(shared, self.paths[at].local) {
                continue;
            }
            let mut lost = std::mem::take(&mut self.lost);
            self.paths.handle_timeout(now, shared, at, &mut lost);
            let id = self.paths[at].id;
            self.take_lost(shared, id, &mut lost);
            self.lost = lost;
            self.paths[at].note_state(shared, peer);
        }
        if now >= self.paths.dials_at() && !self.paths.endpoints().is_empty() {
            if self.up {
                let given_up = self.paths.dial(now, shared);
                self.abandon(shared, given_up);
            } else {
                self.paths.put_off_dialling(now);
            }
        }
        self.repeat_control(now, shared);
        let quantum = self.flow_quantum();
        self.fq
            .handle_timeout(now, shared, &mut self.conns, quantum);
        self.reassembly.expire(now, shared);
        self.sets.expire(now, shared);
        self.handle_handover(now, shared);
        if now >= self.sweep_at {
            self.sweep_at = now + SWEEP;
            self.sweep(now, shared);
        }
    }

    /// Sends a message again that was lost more than once. The peer may have no room for it: that is not to take
    /// the path from data, nor is data to wait because this is the oldest that the peer has not got.
    fn repeat_control(&mut self, now: Time, shared: &mut Shared) {
        if now >= self.control_again_at
            && let Some(mut message) = self.controls_again.pop_front()
        {
            self.control_again_at = now + CONTROL_AGAIN;
            if self.postpone(shared, &mut message.key) {
                self.delayed_trusted.push_back(message);
            }
        }
    }

    /// Forgets connections that have long been silent, and what others hold for a gap that nobody
    /// closes any more, as when the connection left the bump or its bytes were lost here.
    fn sweep(&mut self, now: Time, shared: &mut Shared) {
        let idle: Vec<Key> = self
            .conns
            .iter()
            // A kernel whose connection lives says so more often, also where all that it says has to wait here.
            .filter(|(_, c)| now.since(c.last_seen) > CONN_IDLE)
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
        let waits = |conn: &Conn| conn.inc.as_ref().is_some_and(|i| i.stream.is_waiting());
        let waiting = self.conns.iter().filter(|(_, c)| waits(c));
        let waiting: Vec<Key> = waiting.map(|(key, _)| key).collect();
        for key in waiting {
            self.give_up_gaps(now, shared, key);
        }
        let abandoned = self.store.take_abandoned();
        shared.counters.add(Counter::EpochEnded, abandoned);
    }

    /// Gives up the old gaps of a connection whose kernel says by another way, if at all, what it has.
    fn give_up_gaps(&mut self, now: Time, shared: &mut Shared, key: Key) {
        self.meet_floor(key);
        while let Some(conn) = self.conns.get_mut(key)
            && let Some((stream, _, mut sink)) = incoming(now, shared, key, conn)
            && let Some(epoch) = stream.give_up_gaps(now, GAP_PATIENCE, &mut self.store, &mut sink)
        {
            self.complain(now, shared, key, epoch);
        }
    }
}
