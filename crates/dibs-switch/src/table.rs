//! What is known of each connection, and what is under way with it: an entry for each of which there is anything to
//! say.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use dibs_core::Time;
use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use crate::conns::{Choice, Chosen, Meant, Socket};
use crate::locks::Lock;
use crate::marks::{Foreign, Hand, Mark, NewMark, SeenMark};
use crate::messages::{Answer, Named};
use crate::phase::Phase;
use crate::place::Place;
use crate::plausible::Implausible;
use crate::telling::Telling;
use crate::tracked::{Entry, Mend, Tracked};

/// Connections that may have a rule of their own: each costs the packets of all others a comparison.
const PINS: usize = 32;

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
    /// Place: what its mark says.
    pub place: Place,
    /// Phase: what is under way with it.
    pub phase: Phase,
    /// Lock: it takes nothing in plain.
    pub lock: Lock,
    /// Dues to the peer: it is still to be told of the choice, or asked again.
    pub telling: Telling,
    /// Its socket here, and how the other end names its own.
    name: Option<(Socket, Socket)>,
    /// Socket here of a connection whose numbers something in plain changes, so that no bump carries it.
    pub(crate) renumbered: Option<Socket>,
    /// Word of the peer, when it was last asked, that it has the connection elsewhere.
    apart: bool,
    /// End of a connection that passed this host was seen. Nobody knows it of others without an entry in conntrack.
    ended: bool,
}

/// Record of a choice that outlives the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Choice.
    pub choice: Choice,
    /// True if the peer was asked for its part in it.
    pub asked: bool,
    /// Choice that stood before, if so.
    pub stood: Option<Choice>,
}

/// Connection that was known before anybody looked for those that have ended, with its choice and its place then.
pub type Known = (FlowKey, Option<Choice>, Place);

/// Connections for which something is to be done after a [sweep](ConnTable::sweep).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Gone, and their marks have OVERRIDE.
    pub gone: Vec<FlowKey>,
    /// There, but the choice for them was for an earlier one of the same ends.
    pub taken: Vec<FlowKey>,
}

static NOTHING: LazyLock<Conn> = LazyLock::new(Conn::default);

impl Conn {
    /// The other end's name of its socket, while this end has the socket `own`, or [`UNKNOWN`](Socket::UNKNOWN).
    pub fn name(&self, own: Socket) -> Socket {
        let known = self.name.filter(|(of, _)| *of == own);
        known.map_or(Socket::UNKNOWN, |(_, theirs)| theirs)
    }

    /// True if something in plain changes the numbers of the connection of this socket here.
    pub fn is_renumbered(&self, own: Socket) -> bool {
        self.renumbered == Some(own)
    }

    /// The other end named its socket `theirs` while this end had the socket `own`.
    pub fn learn_name(&mut self, own: Socket, theirs: Socket) {
        self.name = Some((own, theirs));
    }

    /// Notes that the connection was to go to plain by rules, and stays on this bump, because of this answer of the peer.
    /// The peer is asked [again](crate::telling) if the answer said nothing about plain.
    pub fn keep_on(&mut self, bump: BumpId, answer: Answer, now: Time) {
        let handed = self.place.handed().or(Hand::Kept.on(bump));
        self.place.hand_over(handed);
        self.telling.handle_moved(None, answer, now);
    }

    /// True if the peer is asked for its part in the choice.
    pub fn is_asked(&self) -> bool {
        self.choice.get().is_some() && self.in_force().is_none()
    }

    /// The choice, unless the peer is asked for its part in it.
    pub fn in_force(&self) -> Option<Choice> {
        let asked = self.phase.asked();
        { self.choice.get() }.filter(|choice| asked != Some(choice.version))
    }

    /// True if nothing here is about to move it.
    pub fn rests(&self) -> bool {
        self.phase.moving().is_none() && !self.phase.follows() && !self.is_asked()
    }

    /// Notes whether the peer has it elsewhere; returns whether it had so before, too. One that is just moving is not.
    pub fn note_apart(&mut self, apart: bool) -> bool {
        std::mem::replace(&mut self.apart, apart) && apart
    }

    /// Moves the record to this mark; returns what it says then.
    pub fn move_to_mark(&mut self, mark: &Mark, now: Time) -> NewMark {
        NewMark {
            was: self.place.was_before(mark.bump),
            locked: mark.bump.is_some() && self.lock.locked() == mark.bump,
            chosen: self.place.move_to_mark(mark, now),
        }
    }

    /// True if a mark is as our record has it, or as the kernel's rules make it.
    pub fn knows(&self, mark: SeenMark) -> bool {
        let moves = self.phase.moving().is_some() && self.choice.get().is_none();
        if moves && !self.is_chosen_elsewhere(mark) {
            return true;
        }
        let written = self.place.written() == Some(mark.bump);
        match (self.choice.get(), mark.chosen) {
            // What stood before, while the peer is asked.
            (Some(_), false) => {
                self.is_asked() && (mark.bump.is_some() || self.place.marked().is_none())
            }
            // Another choice than these is another program's, and later.
            (Some(choice), true) => {
                let is_ours = mark.bump == choice.bump && !self.is_asked();
                is_ours || self.place.is_chosen(mark.bump)
            }
            (None, true) => mark.bump.is_none() && self.place.has_left(),
            (None, false) if written => true,
            (None, false) => match (mark.bump, self.place.handed()) {
                (None, handed) => !mark.told || handed.is_none(),
                (Some(bump), handed) => handed.is_some_and(|handed| handed.bump == bump),
            },
        }
    }

    /// True if this mark takes it off a bump, and that is not our own doing.
    pub fn is_taken_off(&self, mark: SeenMark) -> bool {
        let is_ours = match self.is_asked() {
            // It leaves before its choice is in force if its kernel sends.
            true => self.place.written() == Some(None),
            false => self.choice.get().is_some(),
        };
        mark.bump.is_none() && !mark.chosen && !is_ours && self.phase.moving().is_none()
    }

    /// True if a mark is a choice of another program that we have not taken up yet: neither the known mark nor the one
    /// that is to be.
    pub fn is_chosen_elsewhere(&self, mark: SeenMark) -> bool {
        let chosen = { self.choice.get() }.is_some_and(|choice| choice.bump == mark.bump);
        mark.chosen && mark.carried && !self.place.is_chosen(mark.bump) && !chosen
    }

    /// Puts back what an earlier run saved.
    pub fn restore(&mut self, saved: &Saved) {
        self.choice.restore(saved.choice);
        if saved.asked {
            let version = saved.choice.version;
            // Whatever the file says, what comes later can be later than that.
            let stood = saved.stood.filter(|stood| stood.version < version);
            self.phase.move_to_asked(version, stood);
        }
    }

    /// The answer to what an earlier run asked comes to nobody. Its choice stands only if the kernel has the connection there, `on`
    /// this bump: the peer may not have found it, and takes nothing by bumps of a connection that it does not know. Otherwise it is
    /// [made again](Self::take_cut_short) once the peer can be asked.
    pub(crate) fn end_question(&mut self, on: Option<BumpId>) {
        let Some(version) = self.phase.asked() else {
            return;
        };
        let stood = self.phase.stood();
        self.phase.end_asked(version);
        if let Some(choice) = { self.choice.get() }.filter(|choice| choice.bump != on)
            && self.choice.take_back(version, stood)
        {
            self.phase.move_to_cut_short(choice, stood);
        }
    }

    /// Record for the next daemon, if there is a choice, or [was](Self::restore) one.
    fn saved(&self) -> Option<Saved> {
        let (known, asked) = (self.choice.get(), self.is_asked());
        let cut_short = self.phase.cut_short(known).filter(|_| !asked);
        let stood = match asked {
            true => self.phase.stood(),
            false => known.filter(|_| cut_short.is_some()),
        };
        Some(Saved {
            choice: cut_short.or(known)?,
            asked: asked || cut_short.is_some(),
            stood,
        })
    }

    /// Takes the choice for this socket here that an earlier run did not bring to an end, if nobody has chosen since.
    pub(crate) fn take_cut_short(&mut self, socket: Socket) -> Option<Choice> {
        let cut = self.phase.take_cut_short(self.choice.get());
        cut.filter(|cut| cut.socket == socket)
    }

    /// Takes a mark that our record does not [know](Self::knows). `by`: who puts connections on its bump, if no rule
    /// of ours does.
    pub fn handle_mark(&mut self, mark: SeenMark, by: Option<Hand>, now: Time) -> Foreign {
        if mark.chosen {
            Foreign::Chosen
        } else if self.choice.get().is_some() {
            Foreign::Lost
        } else {
            self.place.handle_mark(mark.bump, by, now)
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
            self.place.move_to_chosen(mark.bump);
        }
        match mark.bump {
            // OVERRIDE that nobody chose: the daemon was killed before it lifted that.
            None if mark.chosen && self.choice.get().is_none() => self.place.move_to_left(now),
            None => {}
            Some(bump) => {
                let Some(socket) = socket else { return };
                if mark.locked {
                    self.lock.adopt(bump);
                }
                if let Some(by) = by.filter(|_| !mark.chosen && self.choice.of(socket).is_none()) {
                    self.place.hand_over(by.on(bump));
                }
            }
        }
    }

    /// The entry of the connection, which passes this host, is gone. If it goes on, its next entry has another name;
    /// otherwise nothing of the next one with its ends is dropped for it.
    pub fn lose_entry(&mut self, goes_on: bool) {
        self.place.forget_plain();
        if goes_on {
            self.choice.rename(Socket::UNKNOWN);
        } else {
            self.ended = self.is_marked();
            self.lock.release();
        }
    }

    /// Notes that both ends of the connection, which passes this host, have finished: its entry is not made again once it is gone.
    pub(crate) fn finish(&mut self) {
        self.ended = true;
    }

    /// Notes that the kernel has it nowhere any more: its end is of interest only as long as anything is known of its mark.
    pub(crate) fn forget_end(&mut self) {
        self.ended &= self.is_marked();
    }

    /// Notes that it has an entry, and goes on.
    pub(crate) fn begin(&mut self) {
        self.ended = false;
    }

    /// True if it passed this host and has ended.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Bumps that its mark may say, as far as is known.
    fn marked_on(&self) -> impl Iterator<Item = BumpId> {
        let bumps = [self.place.marked(), self.place.followed()];
        bumps.into_iter().flatten()
    }

    /// True if anything is known of it that stands in its mark.
    pub fn is_marked(&self) -> bool {
        self.choice.get().is_some() || self.place.is_marked()
    }

    /// True if anything is known of it that does not outlive it, see [`ConnTable::sweep`].
    pub fn is_swept(&self) -> bool {
        let has_chosen = self.choice.get().is_some() || self.phase.is_cut_short();
        has_chosen || self.name.is_some() || self.place.is_swept()
    }

    /// Bump that its entry had, if it was on one, and whether that was a choice: one that the one that is not
    /// [settled](Self::settled) has not replaced, or one of another program that waits for its turn.
    pub fn had(&self) -> Option<(Option<BumpId>, bool)> {
        let is_chosen = self.choice.get().is_some();
        let awaited = self.phase.awaited().filter(|_| !is_chosen);
        let awaited = awaited.filter(|bump| self.place.followed() == Some(*bump));
        let had = self.place.had(is_chosen && self.settled().is_none());
        awaited.map(|bump| (Some(bump), true)).or(had)
    }

    /// The choice for it, once it is in force and the kernel knows.
    pub fn settled(&self) -> Option<Choice> {
        self.in_force().filter(|_| !self.phase.is_arriving())
    }

    /// The bumps that it needs.
    pub fn bumps(&self) -> impl Iterator<Item = BumpId> {
        let chosen = self.choice.get().and_then(|choice| choice.bump);
        let handed = self.place.handed().map(|handed| handed.bump);
        [chosen, handed, self.phase.awaited()].into_iter().flatten()
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

    /// Connections on a bump by choice that get a rule of their own, and that bump: where the kernel loses the entry that holds their mark,
    /// no packet leaves in plain until it is made again.
    pub fn pins(&self) -> BTreeMap<FlowKey, BumpId> {
        let chosen =
            { self.0.iter() }.filter_map(|(pair, conn)| Some((*pair, conn.settled()?.bump?)));
        chosen.take(PINS).collect()
    }

    /// Records of all choices, for the next daemon, ordered.
    pub fn saved(&self) -> impl Iterator<Item = (FlowKey, Saved)> {
        { self.0.iter() }.filter_map(|(pair, conn)| Some((*pair, conn.saved()?)))
    }

    /// Connections that are on a bump only because plain does not carry them, and that bump.
    pub fn kept(&self) -> impl Iterator<Item = (&FlowKey, BumpId)> {
        let kept = |conn: &Conn| conn.place.handed_by(Hand::Kept);
        { self.0.iter() }.filter_map(move |(pair, conn)| Some((pair, kept(conn)?)))
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
                let choice = conn
                    .telling
                    .take_due(conn.choice.get(), conn.is_asked(), now);
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
            let bump = conn.telling.take_moved(conn.is_asked(), now);
            moved.extend(bump.map(|bump| (*pair, bump)));
        });
        moved
    }

    /// Connections on bumps, as far as is known, that the peer is to be asked about by now.
    pub fn unconfirmed(&self, now: Time) -> impl Iterator<Item = FlowKey> {
        let wants = move |conn: &Conn| {
            let mut bumps = conn.marked_on();
            bumps.any(|bump| conn.lock.wants_asking(bump, now))
        };
        let unconfirmed = self.0.iter().filter(move |(_, conn)| wants(conn));
        unconfirmed.map(|(pair, _)| *pair)
    }

    /// Connections that are on bumps, as far as is known, or that anything is known of about locking them.
    pub fn lockable(&self) -> impl Iterator<Item = FlowKey> {
        let lockable = |conn: &Conn| conn.lock.bump().or(conn.marked_on().next()).is_some();
        let lockable = self.0.iter().filter(move |(_, conn)| lockable(conn));
        lockable.map(|(pair, _)| *pair)
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
    /// what conntrack has. `known`: connections that were known before anybody looked at these. `lives`: see [`Lock::mend`]; what
    /// `passes` this host has no socket here.
    pub fn mend_locks(
        &mut self,
        now: Time,
        known: &[FlowKey],
        tracked: &Tracked,
        lives: impl Fn(&FlowKey) -> Option<bool>,
        passes: impl Fn(&FlowKey) -> bool,
    ) -> Vec<(FlowKey, Mend)> {
        let is_on =
            |pair: &FlowKey, bump| lives(pair).is_some() && tracked.bump(pair) == Some(bump);
        self.lock_due(now, is_on);
        let mut mends = Vec::new();
        for pair in known {
            self.update(pair, |conn| {
                let stays = lives(pair).is_some() || passes(pair) && !conn.ended;
                let chosen = conn.choice.get().and_then(|choice| choice.bump);
                if !(stays && conn.lock.is_for([tracked.bump(pair), chosen])) {
                    // Another program may have taken it elsewhere with the lock (seed 55000040036).
                    let went = stays && conn.lock.locked().and(tracked.bump(pair)).is_some();
                    mends.extend(went.then_some((*pair, Mend::Unlock)));
                    conn.lock.release();
                }
            });
        }
        let mend = |(pair, entry): &(FlowKey, Entry)| match (lives(pair), lives(&pair.reversed())) {
            // It is that of the other end, which is ours as well.
            (None, Some(_)) => None,
            (lives, _) => Some((*pair, self.get(pair).lock.mend(*entry, lives)?)),
        };
        mends.extend(tracked.iter().filter_map(mend));
        mends
    }

    /// Connections that `are_meant`, for a [sweep](Self::sweep) after a look for those of them that have ended.
    pub fn known(
        &self,
        are_meant: impl Fn(&FlowKey, &Conn) -> bool,
    ) -> impl Iterator<Item = Known> {
        let known = self
            .0
            .iter()
            .filter(move |(pair, conn)| are_meant(pair, conn));
        known.map(|(pair, conn)| (*pair, conn.choice.get(), conn.place))
    }

    /// Forgets what was decided for connections that are gone: those that have no socket here, nor pass and go on. `known`:
    /// connections that were known before anybody looked for these; what came meanwhile was not looked for. That may have the ends of
    /// one that has ended.
    pub fn sweep(
        &mut self,
        known: &[Known],
        socket: impl Fn(&FlowKey) -> Option<Socket>,
        goes_on: impl Fn(&FlowKey, &Conn) -> bool,
    ) -> Swept {
        let mut swept = Swept::default();
        for (pair, before, place) in known {
            self.update(pair, |conn| {
                let (socket, choice) = (socket(pair), conn.choice.get());
                let is_others = |of: Choice| before.is_none_or(|before| before.socket != of.socket);
                if conn.place != *place || choice.is_some_and(is_others) {
                    return;
                }
                let goes_on = goes_on(pair, conn);
                conn.ended &= socket.is_some();
                conn.name = conn.name.filter(|(own, _)| socket == Some(*own));
                conn.renumbered = conn.renumbered.filter(|own| socket == Some(*own));
                if goes_on {
                    return;
                }
                if socket.is_none() {
                    let is_gone = choice.is_some() || conn.place.has_left();
                    swept.gone.extend(is_gone.then_some(*pair));
                    (conn.choice, conn.telling) = (Chosen::default(), Telling::default());
                    conn.phase.end_cut_short();
                    conn.apart = false;
                    conn.place.forget();
                } else if choice.is_some_and(|choice| socket != Some(choice.socket)) {
                    swept.taken.push(*pair);
                }
            });
        }
        swept
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
            conn.phase.end_cut_short();
            conn.place.forget();
        });
    }
}

#[cfg(test)]
mod tests;
