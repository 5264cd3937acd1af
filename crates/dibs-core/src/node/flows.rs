//! The connections of a peer: by addresses and bump, by our flow number and by the peer's.

use std::collections::HashMap;
use std::hash::BuildHasher;

use dibs_settings::{BumpId, Scheduler};
use dibs_wire::frame::{FlowId, Open};
use dibs_wire::packet::{Segment, flags};
use dibs_wire::{FlowKey, SeqNumber};
use hashbrown::HashTable;
use siphasher::sip::SipHasher13;
use smallvec::SmallVec;

use super::name_table::{MovedPort, Names};
use super::silence::{self, Call, Heard};
use crate::bump::Bumps;
use crate::flow::conn::{Conn, Incoming, Outgoing};
use crate::flow::tsval_floor::TsvalFloor;
use crate::slab::{Key, Slab};
use crate::time::Time;

/// Connections of a peer, at most; beyond, the longest idle one of a few is forgotten, those of which
/// the local kernel knows nothing first. To look at all would let a peer keep us busy.
pub(super) const MAX_CONNS: usize = 65_536;
const EVICTION_SAMPLE: usize = 64;
/// Both slabs have each connection.
const ENDS: &str = "a connection has ends";

/// Seeds the hash tables: what a peer chooses must not make them slow.
#[derive(Clone)]
struct Hashing(u64, u64);

impl BuildHasher for Hashing {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        SipHasher13::new_with_keys(self.0, self.1)
    }
}

/// What a connection has on whichever bump it is.
struct Ends {
    /// As the local host sends.
    tuple: FlowKey,
    /// The bumps that it was on, as far as they are not forgotten.
    lanes: SmallVec<[(BumpId, Key); 1]>,
    /// The bump that the local kernel sent by last.
    sent_by: Option<BumpId>,
    floor: TsvalFloor,
    /// Number of the local kernel's first segment since the connection came from plain, and what that acknowledges: so much went in
    /// plain.
    entered: Option<(SeqNumber, SeqNumber)>,
    /// The peer's last SYN, while the local kernel has not answered it.
    call: Option<Call>,
}

/// See the module. A connection has an entry for each bump that it was on.
pub(super) struct FlowTable {
    conns: Slab<Conn>,
    ends: Slab<Ends>,
    /// By their tuples, which stand there.
    by_tuple: HashTable<Key>,
    hashing: Hashing,
    /// By the peer's flow numbers.
    incoming: HashMap<FlowId, Key, Hashing>,
    /// The entry of `incoming` that was used last: the next datagram is likely of the same flow.
    last_incoming: Option<(FlowId, Key)>,
    /// By ours.
    outgoing: HashMap<FlowId, Key, Hashing>,
    /// Names of those that the peer calls otherwise.
    names: Names<Hashing>,
    next_flow: u32,
}

impl FlowTable {
    pub(super) fn new(hash_keys: (u64, u64)) -> Self {
        let hashing = Hashing(hash_keys.0, hash_keys.1);
        Self {
            conns: Slab::default(),
            ends: Slab::default(),
            by_tuple: HashTable::new(),
            hashing: hashing.clone(),
            incoming: HashMap::with_hasher(hashing.clone()),
            last_incoming: None,
            outgoing: HashMap::with_hasher(hashing.clone()),
            names: Names::new(hashing),
            next_flow: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.conns.len()
    }

    pub(super) fn get(&self, key: Key) -> Option<&Conn> {
        self.conns.get(key)
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut Conn> {
        self.conns.get_mut(key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, &Conn)> {
        self.conns.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Key, &mut Conn)> {
        self.conns.iter_mut()
    }

    /// The connection of this tuple, as the local host sends, on this bump.
    pub(super) fn find(&self, tuple: FlowKey, bump: BumpId) -> Option<Key> {
        let ends = self.ends.get(self.ends_of(&tuple)?)?;
        let lane = ends.lanes.iter().find(|(number, _)| *number == bump);
        lane.map(|(_, key)| *key)
    }

    /// True if the connection of this tuple, as the local host sends, is known on any bump.
    pub(super) fn knows(&self, tuple: &FlowKey) -> bool {
        self.ends_of(tuple).is_some()
    }

    fn ends_of(&self, tuple: &FlowKey) -> Option<Key> {
        let is = |key: &Key| self.ends.get(*key).is_some_and(|ends| ends.tuple == *tuple);
        let hash = self.hashing.hash_one(tuple);
        self.by_tuple.find(hash, is).copied()
    }

    /// Name here of the connection that the peer calls `theirs`, if that is another one.
    pub(super) fn ours_of(&self, theirs: &FlowKey) -> Option<FlowKey> {
        self.names.ours_of(theirs)
    }

    /// Name at the peer of the connection `ours`, if that is another one.
    pub(super) fn theirs_of(&self, ours: &FlowKey) -> Option<FlowKey> {
        self.names.theirs_of(ours)
    }

    /// Notes that the peer calls a connection `theirs`, which is called otherwise here.
    pub(super) fn name(&mut self, key: Key, theirs: FlowKey) {
        let ours = self.tuple_of(self.conns.get(key).expect("the caller has it"));
        self.note_name(ours, theirs);
    }

    /// As [`name`](Self::name), of a connection of which nothing else needs to be known.
    pub(super) fn note_name(&mut self, ours: FlowKey, theirs: FlowKey) {
        let earliest = self.names.note_seen(ours, theirs);
        if let Some(earliest) = earliest.filter(|earliest| !self.knows(earliest)) {
            self.names.forget(&earliest);
        }
    }

    /// All connections that have another port here than at the peer, if they are others than before.
    pub(super) fn poll_moved(&mut self) -> Option<Vec<MovedPort>> {
        self.names.poll_moved()
    }

    /// True if the connection `ours` was [matched](Self::match_names) to one of the peer.
    pub(super) fn is_matched(&self, ours: &FlowKey) -> bool {
        self.names.is_matched(ours)
    }

    /// Notes that the connection `ours` is the one that the peer calls `theirs`, until that is [forgotten](Self::forget_match). Returns
    /// what the peer had opened by that name for an earlier connection, which is called otherwise here. It is to open that anew.
    pub(super) fn match_names(&mut self, ours: FlowKey, theirs: FlowKey) -> Vec<Incoming> {
        let before = self.ours_of(&theirs).filter(|before| *before != ours);
        let ends = before.and_then(|before| self.ends.get(self.ends_of(&before)?));
        let lanes = ends.map(|ends| ends.lanes.clone()).unwrap_or_default();
        let opened = { lanes.iter() }.filter_map(|(_, key)| self.conns.get_mut(*key)?.inc.take());
        let opened: Vec<Incoming> = opened.collect();
        for inc in &opened {
            self.incoming.remove(&inc.flow);
        }
        self.last_incoming = None;
        self.names.note_matched(ours, theirs);
        opened
    }

    /// Forgets that the connection `ours` was matched, because it is over.
    pub(super) fn forget_match(&mut self, ours: &FlowKey) {
        self.names.forget(ours);
    }

    /// A connection, and what it has on all of its bumps: its addresses, as the local host sends, and the TSval floor.
    pub(super) fn with_ends(&mut self, key: Key) -> Option<(&mut Conn, FlowKey, &mut TsvalFloor)> {
        let conn = self.conns.get_mut(key)?;
        let ends = self.ends.get_mut(conn.ends)?;
        Some((conn, ends.tuple, &mut ends.floor))
    }

    /// Time of the last packet of a connection by this bump, if the local kernel has gone on by another one since.
    pub(super) fn left_at(&self, key: Key) -> Option<Time> {
        let conn = self.conns.get(key)?;
        let by = self.ends.get(conn.ends)?.sent_by?;
        (by != conn.bump).then_some(conn.last_seen)
    }

    /// Notes what the local kernel sent.
    pub(super) fn note_sent(&mut self, key: Key, segment: &Segment<'_>) -> &mut Conn {
        let conn = self.conns.get_mut(key).expect(ENDS);
        let ends = self.ends.get_mut(conn.ends).expect(ENDS);
        conn.note_sent(segment, &mut ends.entered);
        let by = conn.bump;
        ends.sent_by = Some(by);
        // The peer sends by another bump if rules of both hosts contradict each other.
        for (_, lane) in ends.lanes.iter().filter(|(_, lane)| *lane != key) {
            let lane = self.conns.get_mut(*lane).expect(ENDS);
            if segment.has(flags::SYN) {
                // What still comes there is of an earlier connection of these ends.
                lane.skip_comparison();
            } else {
                lane.note_numbers(segment, by);
            }
        }
        self.conns.get_mut(key).expect(ENDS)
    }

    /// Entries of the same ends on the other bumps.
    pub(super) fn elsewhere(&self, key: Key) -> SmallVec<[Key; 2]> {
        let conn = self.conns.get(key).expect(ENDS);
        let lanes = &self.ends.get(conn.ends).expect(ENDS).lanes;
        let keys = lanes.iter().map(|(_, lane)| *lane);
        keys.filter(|lane| *lane != key).collect()
    }

    /// Number of the first segment that the local kernel sent since a connection came from plain, and what that acknowledges.
    pub(super) fn entered(&self, conn: &Conn) -> Option<(SeqNumber, SeqNumber)> {
        self.ends.get(conn.ends)?.entered
    }

    /// A connection is about to come from plain to a bump. Returns those of which what waits is of an earlier time.
    pub(super) fn leave_plain(
        &mut self,
        now: Time,
        tuple: &FlowKey,
        bump: BumpId,
    ) -> SmallVec<[Key; 1]> {
        let mut earlier = SmallVec::new();
        if let Some(ends) = self.ends_of(tuple).and_then(|key| self.ends.get_mut(key)) {
            ends.entered = None;
            for (of, key) in &ends.lanes {
                let lane = self.conns.get_mut(*key).expect(ENDS);
                if lane.come_from_plain(now) {
                    earlier.push(*key);
                }
                if *of != bump {
                    // What still comes there is of an earlier connection of these ends.
                    lane.skip_comparison();
                }
            }
        }
        earlier
    }

    /// A SYN of the peer goes to the local kernel.
    pub(super) fn call(&mut self, now: Time, key: Key, bump: BumpId, seq: SeqNumber) -> Heard {
        match self.ends_mut(key) {
            Some(ends) => silence::hear(&mut ends.call, now, bump, seq),
            None => Heard::Early,
        }
    }

    /// The local kernel answers, by whichever bump: the one that the peer's SYN came by, if one waited for that.
    pub(super) fn answer(&mut self, key: Key) -> Option<BumpId> {
        Some(self.ends_mut(key)?.call.take()?.bump())
    }

    /// The local host rejects the peer's SYN of this tuple, as the local host sends: the bump that it came by, and
    /// what that means, if there was one.
    pub(super) fn reject(&mut self, tuple: &FlowKey) -> Option<(BumpId, Heard)> {
        let call = self.ends.get_mut(self.ends_of(tuple)?)?.call.as_mut()?;
        Some((call.bump(), call.fail()))
    }

    fn ends_mut(&mut self, key: Key) -> Option<&mut Ends> {
        self.ends.get_mut(self.conns.get(key)?.ends)
    }

    /// A connection's addresses, as the local host sends.
    pub(super) fn tuple_of(&self, conn: &Conn) -> FlowKey {
        self.ends.get(conn.ends).expect(ENDS).tuple
    }

    /// The frame that opens a connection's outgoing flow, while the peer has not confirmed it.
    pub(super) fn open_frame(&self, key: Key) -> Option<Open> {
        let conn = self.conns.get(key)?;
        conn.open_frame(|| {
            let ours = self.tuple_of(conn);
            self.theirs_of(&ours).unwrap_or(ours)
        })
    }

    /// Chooses anew how the new data of each is shared out.
    pub(super) fn set_schedulers(&mut self, of: impl Fn(&FlowKey) -> Option<Scheduler>) {
        for (_, conn) in self.conns.iter_mut() {
            conn.out.schedule.own = of(&self.ends.get(conn.ends).expect(ENDS).tuple);
        }
    }

    /// Those of which this holds.
    pub(super) fn which(&self, holds: impl Fn(&Conn) -> bool) -> Vec<Key> {
        let those = self.iter().filter(|(_, conn)| holds(conn));
        those.map(|(key, _)| key).collect()
    }

    /// The peer does not know this flow of ours.
    pub(super) fn on_unknown(&mut self, flow: FlowId, incarnation: u16) {
        if let Some(out) = self.by_own_number(flow, incarnation) {
            out.begin_anew();
        }
    }

    /// The peer cannot restore this epoch of a flow of ours.
    pub(super) fn on_broken(&mut self, flow: FlowId, incarnation: u16, epoch: u32) {
        if let Some(out) = self.by_own_number(flow, incarnation)
            && out.stream.is_current(epoch)
        {
            out.stream.break_chain();
            if out.stream.is_worn() {
                out.begin_anew();
            }
        }
    }

    /// The flow that this number of ours names, if this is its incarnation.
    fn by_own_number(&mut self, flow: FlowId, incarnation: u16) -> Option<&mut Outgoing> {
        let key = *self.outgoing.get(&flow)?;
        self.incarnation(key, incarnation).map(|conn| &mut conn.out)
    }

    /// The connection, if this is the incarnation of its outgoing flow.
    fn incarnation(&mut self, key: Key, incarnation: u16) -> Option<&mut Conn> {
        let conn = self.conns.get_mut(key);
        conn.filter(|conn| conn.out.stream.incarnation() == incarnation)
    }

    /// The peer has what opens this incarnation of a flow of ours.
    pub(super) fn confirm(&mut self, key: Key, incarnation: u16) {
        if let Some(conn) = self.incarnation(key, incarnation) {
            conn.out.confirm();
        }
    }

    /// The peer has a share of a set that opens it.
    pub(super) fn confirm_share(&mut self, bumps: &Bumps, key: Key, incarnation: u16, set: u32) {
        if let Some(conn) = self.incarnation(key, incarnation)
            && let Some(split) = bumps.of(conn.bump).split()
        {
            conn.out.confirm_share(set, split.needed());
        }
    }

    /// The connection that this flow number of the peer's names.
    pub(super) fn by_peers_number(&mut self, flow: FlowId) -> Option<Key> {
        let known = match self.last_incoming {
            Some((last, key)) if last == flow => Some(key),
            _ => self.incoming.get(&flow).copied(),
        };
        self.last_incoming = known.map(|key| (flow, key));
        known
    }

    /// The one to forget before another is added, if there are too many; `random` chooses among whom.
    pub(super) fn surplus(&self, random: impl FnOnce() -> u64) -> Option<Key> {
        if self.conns.len() < MAX_CONNS {
            return None;
        }
        let some = self.conns.some(random() as usize, EVICTION_SAMPLE);
        let oldest = some.min_by_key(|(_, c)| (c.sent_end.is_some(), c.last_seen));
        // A full table has no holes.
        let (oldest, _) = oldest.expect("the table is full");
        Some(oldest)
    }

    /// Adds a connection that is not [there](Self::find).
    pub(super) fn add(&mut self, now: Time, tuple: FlowKey, bump: BumpId) -> Key {
        let flow = FlowId::new(self.next_flow);
        self.next_flow = self.next_flow.wrapping_add(1);
        let ends = self.ends_of(&tuple).unwrap_or_else(|| self.add_ends(tuple));
        let key = self.conns.insert(Conn::new(now, ends, bump, flow));
        let ends = self.ends.get_mut(ends).expect(ENDS);
        ends.lanes.push((bump, key));
        self.outgoing.insert(flow, key);
        key
    }

    fn add_ends(&mut self, tuple: FlowKey) -> Key {
        let key = self.ends.insert(Ends {
            tuple,
            lanes: SmallVec::new(),
            sent_by: None,
            floor: TsvalFloor::default(),
            entered: None,
            call: None,
        });
        let Self { ends, hashing, .. } = self;
        let hash_of = |key: &Key| hashing.hash_one(ends.get(*key).expect(ENDS).tuple);
        self.by_tuple.insert_unique(hash_of(&key), key, hash_of);
        key
    }

    /// Forgets a connection.
    pub(super) fn remove(&mut self, key: Key) -> Option<Conn> {
        let conn = self.conns.remove(key)?;
        let ends = self.ends.get_mut(conn.ends).expect(ENDS);
        ends.lanes.retain(|(_, lane)| *lane != key);
        if ends.lanes.is_empty() {
            let hash = self.hashing.hash_one(ends.tuple);
            let entry = self.by_tuple.find_entry(hash, |ends| *ends == conn.ends);
            entry.expect("a tuple leads to its connection").remove();
            let tuple = ends.tuple;
            self.ends.remove(conn.ends);
            self.names.note_end(&tuple);
        }
        self.outgoing.remove(&conn.out.flow);
        if let Some(inc) = &conn.inc {
            self.incoming.remove(&inc.flow);
            self.last_incoming = None;
        }
        Some(conn)
    }

    /// The peer opened its direction of a connection; returns what there was of it before, and of the one that the peer's number of
    /// the flow was of, if its ends have another name here now.
    pub(super) fn open_incoming(&mut self, key: Key, incoming: Incoming) -> [Option<Incoming>; 2] {
        let conn = self.conns.get_mut(key).expect("the caller has it");
        let flow = incoming.flow;
        let old = conn.inc.replace(incoming);
        if let Some(old) = &old {
            self.incoming.remove(&old.flow);
        }
        let other = { self.incoming.insert(flow, key) }.filter(|other| *other != key);
        let other = other.and_then(|other| self.conns.get_mut(other)?.inc.take());
        self.last_incoming = None;
        [old, other]
    }

    /// The peer restarted: its numbers mean nothing any more.
    pub(super) fn forget_incoming(&mut self) {
        self.incoming.clear();
        self.last_incoming = None;
    }
}
