//! What is known of each connection, and what is under way with it: an entry for each of which there is anything to
//! say.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use crate::conns::{Choice, Chosen, Meant, Socket};
use crate::locks::Lock;
use crate::marks::{Foreign, Hand, Handed, NewMark, STRAGGLERS, SeenMark, Written};
use crate::messages::{Answer, Named};
use crate::plausible::Implausible;
use crate::telling::Telling;
use crate::tracked::{Entry, Mend, Tracked};

/// All connections. Inputs are [`update`](Self::update) and its like, which make and remove entries as they need it;
/// outputs are [`take_tellings`](Self::take_tellings), [`take_moved`](Self::take_moved) and [`lock_due`](Self::lock_due), at
/// [`next_telling`](Self::next_telling), [`next_moved`](Self::next_moved) and [`next_lock`](Self::next_lock).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnTable(BTreeMap<FlowKey, Conn>);

/// A connection. What this host decides now may be ahead of its mark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conn {
    /// Choice for it.
    pub choice: Chosen,
    /// Lock: it takes nothing in plain.
    pub lock: Lock,
    /// Dues to the peer: it is still to be told of the choice, or asked again.
    pub telling: Telling,
    /// Its socket here, and how the other end names its own.
    name: Option<(Socket, Socket)>,
    /// It is on a bump neither by choice nor by a rule of ours.
    handed: Option<Handed>,
    written: Option<Written>,
    /// Another program chose this bump, which is in use, and we have not taken it up yet.
    awaited: Option<BumpId>,
    /// It left its bump for plain, not by choice, a moment ago: its mark says that what still comes by a bump does
    /// not pull it back.
    left: Option<Time>,
    /// The kernel has it on this bump without a choice: by rules, here or at the peer.
    followed: Option<BumpId>,
    /// A peer moves it to a bump, and the kernel does not know yet: what it sent before is still to come in plain.
    pub(crate) arriving: bool,
    /// Move by no choice that is under way: the mark is ahead of our record, or behind it.
    pub moving: Option<Moving>,
    /// Time at which plain carried it, as far as that is known.
    plain: Option<Time>,
    /// Word of the peer, when it was last asked, that it has the connection elsewhere.
    apart: bool,
    /// End of a connection that passed this host was seen. Nobody knows it of others without an entry in conntrack.
    pub ended: bool,
}

/// Move by no choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moving {
    /// The bump; none: to plain.
    pub bump: Option<BumpId>,
    /// A rule here has it go there. Otherwise the peer's word ends the move.
    pub ruled: bool,
}

/// Time for which a peer is believed that a connection is to go to plain after plain was seen to carry it: with many
/// connections the first ones wait until all are looked at.
const PROVED: Duration = Duration::from_secs(120);

static NOTHING: LazyLock<Conn> = LazyLock::new(Conn::default);

impl Conn {
    /// The other end's name of its socket, while this end has the socket `own`, or [`UNKNOWN`](Socket::UNKNOWN).
    pub fn name(&self, own: Socket) -> Socket {
        let known = self.name.filter(|(of, _)| *of == own);
        known.map_or(Socket::UNKNOWN, |(_, theirs)| theirs)
    }

    /// The other end named its socket `theirs` while this end had the socket `own`.
    pub fn learn_name(&mut self, own: Socket, theirs: Socket) {
        self.name = Some((own, theirs));
    }

    /// Place where neither a choice nor a rule of ours put it.
    pub fn handed(&self) -> Option<Handed> {
        self.handed
    }

    /// Notes where neither a choice nor a rule of ours puts it from now on; none: it is there no more.
    pub fn hand_over(&mut self, to: Option<Handed>) {
        self.handed = to;
    }

    /// Forgets where the peer had it: the peer has given that up for this move.
    pub fn take_from_peer(&mut self, Moving { bump, ruled }: Moving) {
        let by = Hand::Other;
        if self
            .handed
            .is_some_and(|to| to.by == Hand::Peer && Some(to.bump) != bump)
        {
            self.handed = bump.filter(|_| !ruled).map(|bump| Handed { bump, by });
        }
    }

    /// Notes that the connection was to go to plain by rules, and stays on this bump, because of this answer of the peer.
    /// The peer is asked [again](crate::telling) if the answer said nothing about plain.
    pub fn keep_on(&mut self, bump: BumpId, answer: Answer, now: Time) {
        let by = Hand::Kept;
        self.handed = self.handed.or(Some(Handed { bump, by }));
        self.telling.handle_moved(None, answer, now);
    }

    /// Notes what its mark says from now on.
    pub fn note_mark(&mut self, bump: Option<BumpId>, chosen: bool, now: Time) {
        let left = match (self.marked(), bump) {
            (Some(_), None) => Some(now),
            (None, None) => self.written.and_then(|mark| mark.left),
            (_, Some(_)) => None,
        };
        self.written = Some(Written { bump, chosen, left });
    }

    /// Notes that plain carries it now.
    pub fn note_plain(&mut self, now: Time) {
        self.plain = Some(now);
    }

    /// True if plain was seen to carry it a short time ago.
    pub fn has_proof(&self, now: Time) -> bool {
        self.plain.is_some_and(|at| now.since(at) < PROVED)
    }

    /// True if nothing here is about to move it.
    pub fn rests(&self) -> bool {
        self.moving.is_none() && !self.choice.get().is_some_and(|choice| choice.pending)
    }

    /// Notes whether the peer has it elsewhere; returns whether it had so before, too. One that is just moving is not.
    pub fn note_apart(&mut self, apart: bool) -> bool {
        std::mem::replace(&mut self.apart, apart) && apart
    }

    /// Bump that this host wrote into its mark last, if it did.
    pub fn written(&self) -> Option<Option<BumpId>> {
        self.written.map(|mark| mark.bump)
    }

    /// The bump that its mark says, as far as is known.
    pub fn marked(&self) -> Option<BumpId> {
        let handed = self.handed.map(|handed| handed.bump);
        { self.written }.map_or(self.followed.or(handed), |mark| mark.bump)
    }

    /// Moves the record to a mark of this bump, or of none, by choice if `explicit`; returns the mark.
    pub fn move_to_mark(&mut self, bump: Option<BumpId>, explicit: bool, now: Time) -> NewMark {
        if bump.is_some() || explicit {
            self.left = None;
        }
        let new = NewMark {
            chosen: explicit || self.left.is_some(),
            locked: bump.is_some() && self.lock.locked() == bump,
            was: self.marked(),
        };
        self.note_mark(bump, new.chosen, now);
        if bump.is_none() {
            self.followed = None;
        }
        let is_left = |to: &Handed| to.by == Hand::Kept && Some(to.bump) != bump;
        self.handed = self.handed.filter(|to| !is_left(to));
        new
    }

    /// True if a mark is as our record has it, or as the kernel's rules make it.
    pub fn knows(&self, mark: SeenMark) -> bool {
        let moves = self.moving.is_some() && self.choice.get().is_none();
        if moves && !self.is_chosen_elsewhere(mark) {
            return true;
        }
        let written = self
            .written
            .is_some_and(|written| written.bump == mark.bump);
        match (self.choice.get(), mark.chosen) {
            // What stood before, while the peer is asked.
            (Some(choice), false) => choice.pending,
            // Another choice than these is another program's, and later.
            (Some(choice), true) => written || mark.bump == choice.bump && !choice.pending,
            (None, true) => mark.bump.is_none() && self.left.is_some(),
            (None, false) if written => true,
            (None, false) => match (mark.bump, self.handed) {
                (None, handed) => !mark.told || handed.is_none(),
                (Some(bump), handed) => handed.is_some_and(|handed| handed.bump == bump),
            },
        }
    }

    /// True if this mark takes it off a bump, and that is not our own doing.
    pub fn is_taken_off(&self, mark: SeenMark) -> bool {
        let is_ours = self.moving.is_some() || self.choice.get().is_some();
        mark.bump.is_none() && !mark.chosen && !is_ours
    }

    /// True if a mark is a choice of another program that we have not taken up yet: neither the known mark nor the one
    /// that is to be.
    pub fn is_chosen_elsewhere(&self, mark: SeenMark) -> bool {
        let written = { self.written }.is_some_and(|w| w.chosen && w.bump == mark.bump);
        let chosen = { self.choice.get() }.is_some_and(|choice| choice.bump == mark.bump);
        mark.chosen && mark.carried && !written && !chosen
    }

    /// Takes a mark that our record does not [know](Self::knows). `by`: who puts connections on its bump, if no rule
    /// of ours does.
    pub fn handle_mark(&mut self, mark: SeenMark, by: Option<Hand>, now: Time) -> Foreign {
        let has_left = |written: Written| {
            written
                .left
                .is_some_and(|left| now.since(left) < STRAGGLERS)
        };
        let handed = self.handed.map(|handed| handed.bump);
        let had = self
            .written
            .map_or(handed.or(self.followed), |written| written.bump);
        let is_elsewhere = had.is_some() && had != mark.bump;
        // The kernel follows what comes by a bump from plain alone.
        let by = by.map(|by| match by {
            Hand::Peer if is_elsewhere => Hand::Other,
            by => by,
        });
        let ruled = matches!(by, None | Some(Hand::Rule));
        if mark.chosen {
            return Foreign::Chosen;
        }
        if self.choice.get().is_some() {
            return Foreign::Lost;
        }
        let Some(bump) = mark.bump else {
            self.handed = None;
            return Foreign::News;
        };
        if !ruled && self.written.is_some_and(has_left) {
            Foreign::Straggler
        } else {
            self.handed = by.map(|by| Handed { bump, by }).or(self.handed);
            match by {
                None if is_elsewhere => Foreign::News,
                None | Some(Hand::Peer) => Foreign::Known,
                Some(Hand::Rule | Hand::Other | Hand::Kept) => Foreign::News,
            }
        }
    }

    /// An earlier run of the daemon left it with this mark, while it has this socket, if any. `by`: as of
    /// [`handle_mark`](Self::handle_mark).
    pub fn adopt_mark(
        &mut self,
        mark: SeenMark,
        socket: Option<Socket>,
        by: Option<Hand>,
        now: Time,
    ) {
        if mark.chosen {
            // What an earlier run wrote is not the choice of another program.
            self.note_mark(mark.bump, true, now);
        }
        match mark.bump {
            // OVERRIDE that nobody chose: the daemon was killed before it lifted that.
            None if mark.chosen && self.choice.get().is_none() => self.move_to_left(now),
            None => {}
            Some(bump) => {
                let Some(socket) = socket else { return };
                if mark.locked {
                    self.lock.adopt(bump);
                }
                if let Some(by) = by.filter(|_| !mark.chosen && self.choice.of(socket).is_none()) {
                    self.handed = Some(Handed { bump, by });
                }
            }
        }
    }

    /// The entry of the connection, which passes this host, is gone. If it goes on, its next entry has another name;
    /// otherwise nothing of the next one with its ends is dropped for it.
    pub fn lose_entry(&mut self, goes_on: bool) {
        self.plain = None;
        if goes_on {
            self.choice.rename(Socket::UNKNOWN);
        } else {
            self.ended |= self.is_marked();
            self.lock.release();
        }
    }

    /// Moves it from its bump to plain, not by choice.
    pub fn move_to_left(&mut self, now: Time) {
        self.left = Some(now);
    }

    /// True if it left its bump for plain a moment ago.
    pub fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// True if it left long enough ago to follow again.
    pub fn may_follow(&self, now: Time) -> bool {
        self.left.is_some_and(|left| now.since(left) >= STRAGGLERS)
    }

    /// Takes the time at which it left: it may follow again.
    pub fn take_left(&mut self) -> Option<Time> {
        self.left.take()
    }

    /// Another program chose this bump.
    pub fn move_to_awaited(&mut self, bump: Option<BumpId>) {
        self.awaited = bump;
    }

    /// Ends the wait for a choice of another program, which was taken up or was not; what it chose since still waits.
    pub fn end_awaited(&mut self, bump: Option<BumpId>) {
        self.awaited = self.awaited.filter(|awaited| Some(*awaited) != bump);
    }

    /// Bump on which the kernel has it without a choice.
    pub fn followed(&self) -> Option<BumpId> {
        self.followed
    }

    /// The kernel has it there. Where it had it before.
    pub fn handle_followed(&mut self, bump: Option<BumpId>) -> Option<BumpId> {
        std::mem::replace(&mut self.followed, bump)
    }

    /// Bump that its entry had, if it was on one, and whether that was a choice: a choice for which the peer is still asked
    /// is not there yet.
    pub fn had(&self) -> Option<(Option<BumpId>, bool)> {
        let waits = self.choice.get().is_some_and(|choice| choice.pending);
        let chosen = self.written.filter(|written| waits && written.chosen);
        let chosen = chosen.map(|written| (written.bump, true));
        // A mark of another program may stand above ours, and not be followed yet.
        let written = self.written.and_then(|written| written.bump);
        chosen.or_else(|| self.followed.or(written).map(|bump| (Some(bump), false)))
    }

    /// True if anything is known of it that stands in its mark.
    pub fn is_marked(&self) -> bool {
        self.choice.get().is_some() || self.handed.is_some() || self.written.is_some()
    }

    /// True if anything is known of it that does not outlive it, see [`ConnTable::sweep`].
    pub fn is_swept(&self) -> bool {
        self.is_marked() || self.name.is_some() || self.plain.is_some()
    }

    /// The choice for it, once it is in force and the kernel knows.
    pub fn settled(&self) -> Option<Choice> {
        let choice = self.choice.get().filter(|choice| !choice.pending);
        choice.filter(|_| !self.arriving)
    }

    /// The bumps that it needs.
    pub fn bumps(&self) -> impl Iterator<Item = BumpId> {
        let chosen = self.choice.get().and_then(|choice| choice.bump);
        let handed = self.handed.map(|handed| handed.bump);
        [chosen, handed, self.awaited].into_iter().flatten()
    }
}

impl ConnTable {
    /// Record of a connection.
    pub fn get(&self, pair: &FlowKey) -> &Conn {
        self.0.get(pair).unwrap_or(&NOTHING)
    }

    /// Record of the connection between two ends, whichever of them is ours.
    pub fn either(&self, ends: &[FlowKey; 2]) -> &Conn {
        let known = ends.iter().find_map(|pair| self.0.get(pair));
        known.unwrap_or(&NOTHING)
    }

    /// All that anything is known of, ordered.
    pub fn iter(&self) -> impl Iterator<Item = (&FlowKey, &Conn)> {
        self.0.iter()
    }

    /// All choices, ordered.
    pub fn choices(&self) -> impl Iterator<Item = (FlowKey, Choice)> {
        { self.0.iter() }.filter_map(|(pair, conn)| Some((*pair, conn.choice.get()?)))
    }

    /// Connections that are on a bump only because plain does not carry them, and that bump.
    pub fn kept(&self) -> impl Iterator<Item = (&FlowKey, BumpId)> {
        self.0.iter().filter_map(|(pair, conn)| {
            let kept = conn.handed.filter(|handed| handed.by == Hand::Kept)?;
            Some((pair, kept.bump))
        })
    }

    /// How a question names a connection.
    pub fn named(&self, conn: &Meant) -> Named {
        Named {
            pair: conn.pair,
            socket: self.get(&conn.pair).name(conn.socket),
        }
    }

    /// Changes what is known of a connection.
    pub fn update<R>(&mut self, pair: &FlowKey, change: impl FnOnce(&mut Conn) -> R) -> R {
        let conn = self.0.entry(*pair).or_default();
        let changed = change(conn);
        if *conn == Conn::default() {
            self.0.remove(pair);
        }
        changed
    }

    /// Changes what is known of these connections.
    pub fn update_each<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = &'a FlowKey>,
        mut change: impl FnMut(&mut Conn),
    ) {
        for pair in pairs {
            self.update(pair, &mut change);
        }
    }

    /// Changes what is known of all connections of which anything is.
    pub fn update_all(&mut self, mut change: impl FnMut(&FlowKey, &mut Conn)) {
        self.0.retain(|pair, conn| {
            change(pair, conn);
            *conn != Conn::default()
        });
    }

    /// Gives choices out of a file versions that can be overruled, see [`Chosen::make_plausible`]; which and why.
    pub fn make_plausible(&mut self, own: u64, peers: &[u64]) -> Vec<(FlowKey, Implausible)> {
        let mut found = Vec::new();
        self.update_all(|pair, conn| {
            let why = conn.choice.make_plausible(own, peers);
            found.extend(why.map(|why| (*pair, why)));
        });
        found
    }

    /// The peer of the connections that are `meant` has a new session: it is told what stands for them, and asked
    /// for what waited for that.
    pub fn tell_all(&mut self, now: Time, meant: impl Fn(&FlowKey) -> bool) {
        self.update_all(|pair, conn| {
            if !meant(pair) {
                return;
            }
            conn.telling.handle_session(now);
            if conn.choice.get().is_some() {
                conn.telling.tell_all(now);
            }
        });
    }

    /// When a peer is to be told next.
    pub fn next_telling(&self) -> Option<Time> {
        self.0.values().filter_map(|conn| conn.telling.due()).min()
    }

    /// Dues of peers by now, of the connections that are `meant`.
    pub fn take_tellings(
        &mut self,
        now: Time,
        meant: impl Fn(&FlowKey) -> bool,
    ) -> Vec<(FlowKey, Choice)> {
        let mut told = Vec::new();
        self.update_all(|pair, conn| {
            if meant(pair) {
                let choice = conn.telling.take_due(conn.choice.get(), now);
                told.extend(choice.map(|choice| (*pair, choice)));
            }
        });
        told
    }

    /// When a peer is to be asked again next for its part where rules moved a connection.
    pub fn next_moved(&self) -> Option<Time> {
        { self.0.values() }
            .filter_map(|conn| conn.telling.moved_due())
            .min()
    }

    /// Connections that rules moved, and where to, if peers are to be asked again for their part by now.
    pub fn take_moved(&mut self, now: Time) -> Vec<(FlowKey, Option<BumpId>)> {
        let mut moved = Vec::new();
        self.update_all(|pair, conn| {
            let bump = conn.telling.take_moved(conn.choice.get(), now);
            moved.extend(bump.map(|bump| (*pair, bump)));
        });
        moved
    }

    /// All that are locked.
    pub fn locked(&self) -> impl Iterator<Item = FlowKey> {
        let locked = self
            .0
            .iter()
            .filter(|(_, conn)| conn.lock.locked().is_some());
        locked.map(|(pair, _)| *pair)
    }

    /// When one is to be locked next.
    pub fn next_lock(&self) -> Option<Time> {
        self.0.values().filter_map(|conn| conn.lock.due()).min()
    }

    /// Connections that are to be locked by now.
    pub fn locks_due(&self, now: Time) -> impl Iterator<Item = FlowKey> {
        let due = move |conn: &Conn| conn.lock.due().is_some_and(|due| due <= now);
        let due = self.0.iter().filter(move |(_, conn)| due(conn));
        due.map(|(pair, _)| *pair)
    }

    /// Locks what is due and still on its bump, and returns it.
    pub fn lock_due(
        &mut self,
        now: Time,
        is_on: impl Fn(&FlowKey, BumpId) -> bool,
    ) -> Vec<(FlowKey, BumpId)> {
        let mut locked = Vec::new();
        self.update_all(|pair, conn| {
            let bump = conn.lock.lock_due(now, |bump| is_on(pair, bump));
            locked.extend(bump.map(|bump| (*pair, bump)));
        });
        locked
    }

    /// Brings locks to what is due, and forgets those of what is gone, and of what is not on its bump any more, by its
    /// mark, nor chosen to be: the entry of a choice is made again where it was lost. What is to be done then about
    /// what conntrack has. `lives`: see [`Lock::mend`]; what `passes` this host has no socket here.
    pub fn mend_locks(
        &mut self,
        now: Time,
        tracked: &Tracked,
        lives: impl Fn(&FlowKey) -> Option<bool>,
        passes: impl Fn(&FlowKey) -> bool,
    ) -> Vec<(FlowKey, Mend)> {
        let is_on =
            |pair: &FlowKey, bump| lives(pair).is_some() && tracked.bump(pair) == Some(bump);
        self.lock_due(now, is_on);
        self.update_all(|pair, conn| {
            let stays = lives(pair).is_some() || passes(pair) && !conn.ended;
            let chosen = conn.choice.get().and_then(|choice| choice.bump);
            if !(stays && conn.lock.is_for([tracked.bump(pair), chosen])) {
                conn.lock.release();
            }
        });
        let mend = |(pair, entry): &(FlowKey, Entry)| match (lives(pair), lives(&pair.reversed())) {
            // It is that of the other end, which is ours as well.
            (None, Some(_)) => None,
            (lives, _) => Some((*pair, self.get(pair).lock.mend(*entry, lives)?)),
        };
        tracked.iter().filter_map(mend).collect()
    }

    /// Forgets what was decided for connections that are gone: those that have no socket here, nor pass. Returns those
    /// of them for which something was chosen; and those whose choice was for an earlier one of the same ends.
    pub fn sweep(
        &mut self,
        socket: impl Fn(&FlowKey) -> Option<Socket>,
        passes: impl Fn(&FlowKey) -> bool,
    ) -> (Vec<FlowKey>, Vec<FlowKey>) {
        let (mut gone, mut taken) = (Vec::new(), Vec::new());
        self.update_all(|pair, conn| {
            let (socket, choice) = (socket(pair), conn.choice.get());
            conn.ended &= socket.is_some();
            conn.name = conn.name.filter(|(own, _)| socket == Some(*own));
            if passes(pair) {
                return;
            }
            if socket.is_none() {
                gone.extend(choice.map(|_| *pair));
                (conn.choice, conn.handed, conn.written) = (Chosen::default(), None, None);
                (conn.telling, conn.apart, conn.plain) = (Telling::default(), false, None);
            } else if choice.is_some_and(|choice| socket != Some(choice.socket)) {
                taken.push(*pair);
            }
        });
        (gone, taken)
    }

    /// Forgets a connection that is gone.
    pub fn forget(&mut self, pair: &FlowKey) {
        self.0.remove(pair);
    }

    /// Forgets what was decided, and what was known of marks.
    pub fn clear(&mut self) {
        self.update_all(|_, conn| {
            (conn.choice, conn.lock) = (Chosen::default(), Lock::default());
            conn.telling = Telling::default();
            (conn.handed, conn.written, conn.left) = (None, None, None);
        });
    }
}

#[cfg(test)]
mod tests;
