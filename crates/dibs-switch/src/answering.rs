//! What a peer's SWITCH is answered for one connection, and what it changes here.
//!
//! [`Wanted::judge`] notes what the peer wants, unless something stands against it. The connection falls
//! silent then if it leaves its bump; and unless the peer only asks whether it would, its mark is set. What
//! could not be carried out is taken back. [`Following::next`] says which of it is to be done.

use dibs_core::Time;
use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use crate::conns::{Choice, Socket, Version};
use crate::marks::{Hand, Handed};
use crate::messages::{Ground, Named, Outcome, Switch, Unanswered};
use crate::phase::Moving;
use crate::plausible::{Hosts, Implausible};
use crate::table::{Conn, ConnTable};

/// Request of a peer's SWITCH.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// As the peer says it.
    pub switch: Switch,
    /// This host and that peer.
    pub hosts: Hosts,
    /// Refusal of all of it.
    pub refusal: Option<Refusal>,
}

/// Knowledge of this host about a connection that a SWITCH names.
#[derive(Clone, Copy, Debug)]
pub struct Here {
    /// Its socket.
    pub socket: Socket,
    /// The socket is bound to a device.
    pub bound: bool,
    /// The bump of the data path that it is on, as far as is known.
    pub on: Option<BumpId>,
    /// The bump that a rule requires.
    pub required: Option<BumpId>,
    /// The bump of the rule that decides over it where nothing is chosen.
    pub ruled: Option<BumpId>,
}

/// Why a connection does not follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such connection.
    NoConnection,
    /// It has another socket than the one named: this.
    OtherSocket(Socket),
    /// This host does not carry the bump.
    NoBump,
    /// The bump's device is not there, or not ready.
    NoDevice,
    /// Its socket is bound to a device and cannot be steered.
    Bound,
    /// Nobody can have made a choice of this version.
    Implausible(Implausible),
    /// A rule wants it on this bump.
    OwnRule(BumpId),
    /// Plain was not seen to carry it: it stays on this bump.
    Unproved(BumpId),
    /// A later choice stands, of this generation.
    Older(u64),
    /// A choice waits for the peer, and may come to nothing.
    Undecided,
    /// Routers on the way have not heard of all that it sent by its bump.
    Behind,
}

impl Refusal {
    /// As the peer is told.
    pub fn answer(self) -> (Outcome, u64) {
        match self {
            Self::NoConnection => (Outcome::NoConnection, 0),
            Self::OtherSocket(socket) => (Outcome::OtherSocket, socket.0.into()),
            Self::NoBump => (Outcome::NoBump, 0),
            Self::NoDevice => (Outcome::NoDevice, 0),
            Self::Bound => (Outcome::Bound, 0),
            Self::Implausible(_) | Self::Undecided => (Outcome::Failed, 0),
            Self::OwnRule(bump) | Self::Unproved(bump) => (Outcome::OwnRule, bump.get().into()),
            Self::Older(generation) => (Outcome::Older, generation),
            Self::Behind => (Outcome::NotHeard, 0),
        }
    }
}

/// A connection that follows a peer's SWITCH.
#[derive(Clone, Copy, Debug)]
pub struct Following {
    /// As this host sends.
    pub pair: FlowKey,
    /// Nobody here knew that it would be there.
    pub is_new: bool,
    /// Request of the peer.
    pub switch: Switch,
    version: Version,
    /// What stood for it.
    choice: Option<Choice>,
    handed: Option<Handed>,
    /// Bump that this host had written into its mark, if it had.
    written: Option<Option<BumpId>>,
    next: Option<Step>,
    /// It does not follow, but is not to stay locked.
    refusal: Option<Refusal>,
    failed: bool,
}

/// Step that is to be done for a [`Following`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// What is locked to where it is and is about to leave is to be unlocked.
    Unlock,
    /// If it leaves its bump, what it sent by that is to arrive, and nothing new to be sent.
    Drain,
    /// The choices are to be saved.
    Save,
    /// The kernel is to be told of the choice that stands, or where the peer's rules have it.
    Mark,
    /// That was taken back: what stands now is to be saved, and the connection to be where it was.
    Undo,
}

impl Wanted {
    /// Takes what a peer wants of one connection, of which this is known `here`, if there is one. What
    /// follows is noted, unless the peer only asks whether it would.
    ///
    /// # Errors
    /// What stands against it; nothing has changed.
    pub fn judge(
        &self,
        conns: &mut ConnTable,
        (named, version): (Named, Version),
        here: Option<Here>,
        now: Time,
    ) -> Result<Following, Refusal> {
        let pair = named.pair.reversed();
        let here = here.ok_or(Refusal::NoConnection)?;
        if here.socket != named.socket {
            return Err(Refusal::OtherSocket(here.socket));
        }
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        conns.update(&pair, |conn| {
            let judged = self.judge_one(conn, (pair, version), here, now);
            let keeps_own = matches!(judged, Err(Refusal::OwnRule(_) | Refusal::Unproved(_)));
            if self.switch.explicit && keeps_own {
                // The peer gives up what it chose, and may have given up or forgotten this one before.
                let is_older = |choice: &Choice| choice.version < version;
                (conn.telling).tell_later(conn.in_force().filter(is_older), now);
            }
            if matches!(judged, Err(Refusal::Older(_))) {
                match here.required.filter(|_| !self.switch.explicit) {
                    None => conn.telling.tell_later(conn.in_force(), now),
                    // What is chosen is overruled here: the peer did not say so before, for a rule of its own.
                    required => {
                        (conn.telling).handle_moved(required, Err(Unanswered::NotAsked), now)
                    }
                }
            }
            judged
        })
    }

    fn judge_one(
        &self,
        conn: &mut Conn,
        (pair, version): (FlowKey, Version),
        here: Here,
        now: Time,
    ) -> Result<Following, Refusal> {
        let (switch, socket) = (self.switch, here.socket);
        if here.bound && switch.bump.is_some() {
            return Err(Refusal::Bound);
        }
        let plausible = conn.choice.check(socket, version, self.hosts);
        plausible.map_err(Refusal::Implausible)?;
        let (choice, handed) = (conn.choice.of(socket), conn.place.handed());
        if switch.ground == Ground::Renumbered && switch.bump.is_none() {
            conn.renumbered = Some(socket);
        }
        let is_stuck = conn.is_renumbered(socket);
        // A choice that stands here is above a rule that does not require its bump. What the peer's rules want is not:
        // the kernel has the connection where ours do with the next packet.
        let has_it = |choice: Choice| choice.version >= version || choice.bump == switch.bump;
        let ruled = here.ruled.filter(|_| match switch.explicit {
            true => switch.bump.is_none() && !choice.is_some_and(has_it) && !is_stuck,
            false => choice.is_none(),
        });
        let is_proved =
            switch.bump.is_some() || switch.ground != Ground::Proved || conn.place.has_proof(now);
        let unproved = here.on.filter(|_| !is_proved);
        // Of two moves that cross a rule's stands; of two that no rule has a part in, one: which, both ends know.
        let crosses = |moving: &Moving| !moving.ruled && moving.bump != switch.bump;
        let crossed = conn.phase.moving().filter(crosses);
        let is_word = !switch.explicit && !switch.ready;
        let is_free = here.ruled.is_none() && unproved.is_none();
        if let Some(moving) = crossed.filter(|_| is_word && is_free) {
            match version.generation {
                0 if self.hosts.own > self.hosts.peer => return Err(Refusal::Older(0)),
                0 => conn.phase.end_moving(moving),
                _ => conn.phase.overrule(moving),
            }
        }
        let own = here
            .required
            .or(ruled)
            .filter(|own| Some(*own) != switch.bump);
        let mut following = Following {
            pair,
            is_new: false,
            switch,
            version,
            choice,
            handed,
            written: conn.place.written(),
            next: Some(Step::Unlock),
            refusal: own.map(Refusal::OwnRule),
            failed: false,
        };
        if let Some(refusal) = following.refusal {
            // Once the rule here is gone it goes where a rule of the peer wants it.
            let is_word = is_word || !switch.explicit && switch.bump.is_none();
            let is_free = |to: Handed| matches!(to.by, Hand::Peer | Hand::Kept);
            if is_word && handed.is_none_or(is_free) {
                let wanted = switch.bump.filter(|_| version.generation > 0);
                conn.place.hand_over(Hand::Peer.on(wanted));
                conn.phase.contradict();
            }
            // The peer goes there all the same: what it sends is not to be dropped for a lock.
            let leaves = !switch.explicit && !switch.ready && switch.bump.is_some();
            return match leaves && conn.lock.holds_back(switch.bump) {
                true => Ok(following),
                false => Err(refusal),
            };
        }
        let stands = match (switch.explicit, switch.ready) {
            (false, _) => choice,
            (true, asks) if asks || unproved.is_some() => {
                choice.filter(|choice| choice.version > version)
            }
            (true, _) => {
                let accepted = conn.choice.accept(socket, switch.bump, version);
                // The peer was asked about it, and tells it back.
                accepted.map(|()| conn.phase.end_asked(version)).err()
            }
        };
        if let Some(stands) = stands {
            if conn.phase.asked() == Some(stands.version) && !switch.explicit {
                return Err(Refusal::Undecided);
            }
            return Err(Refusal::Older(stands.version.generation));
        }
        // No rule of the peer has it there, and one of ours is about to.
        let by_us = here.ruled.filter(|_| version.generation == 0);
        let was = match switch.explicit {
            true => choice.map(|choice| choice.bump),
            false => Some(by_us.or(handed.map(|handed| handed.bump))),
        };
        if let Some(bump) = unproved {
            // The peer does not want it there any more.
            let by_peer = conn.place.handed().is_none_or(|to| to.by == Hand::Peer);
            if !switch.explicit && by_peer {
                conn.place.hand_over(Hand::Kept.on(bump));
            }
            return Err(Refusal::Unproved(bump));
        }
        if switch.bump.is_some() && conn.place.marked().is_none() {
            conn.place.note_plain(now);
        }
        following.is_new = !switch.ready && was != Some(switch.bump);
        if following.is_new && !switch.explicit {
            conn.place.hand_over(Hand::Peer.on(switch.bump));
        }
        following.note(conn);
        Ok(following)
    }
}

impl Following {
    /// Step that is to be done next; none: the peer is to be [answered](Self::answer).
    pub fn next(&self) -> Option<Step> {
        self.next
    }

    /// That is done, or could not be.
    pub fn handle_done(&mut self, conns: &mut ConnTable, done: bool) {
        let pair = self.pair;
        self.failed |= !done;
        conns.update(&pair, |conn| {
            self.next = match self.next {
                Some(Step::Unlock) if self.refusal.is_none() => Some(Step::Drain),
                Some(Step::Drain) if !self.switch.ready => Some(Step::Save),
                // A rule here moves it meanwhile, or has, of which the peer was told later than it asked.
                Some(Step::Save) if done && self.is_overtaken(conn) => {
                    self.refusal = Some(Refusal::Older(0));
                    None
                }
                // For what was chosen meanwhile the kernel is told otherwise.
                Some(Step::Save) if done => {
                    let stands = self.switch.explicit || conn.choice.get().is_none();
                    stands.then_some(Step::Mark)
                }
                Some(Step::Save | Step::Mark) if !done => {
                    self.take_back(conn).then_some(Step::Undo)
                }
                _ => None,
            };
            self.note(conn);
        });
    }

    /// Notes how far it has come.
    fn note(&self, conn: &mut Conn) {
        let follows = !self.switch.ready && self.next.is_some();
        conn.phase.move_to_arriving(self.is_arriving());
        conn.phase.move_to_following(follows);
    }

    /// Routers on the way have not heard of all that the connection sent: it would not follow to plain.
    pub fn handle_behind(&mut self) {
        self.refusal = Some(Refusal::Behind);
    }

    /// True while what it follows is not carried out.
    fn is_arriving(&self) -> bool {
        let moves = matches!(self.next, Some(Step::Save | Step::Mark));
        let begins = matches!(self.next, Some(Step::Unlock | Step::Drain));
        match self.switch.explicit {
            true => moves || begins && !self.switch.ready,
            false => moves && self.switch.bump.is_some(),
        }
    }

    /// True if it does not follow a choice, and this host has moved it since it was judged, or a rule is about to.
    fn is_overtaken(&self, conn: &Conn) -> bool {
        let leaves = |moving: Moving| moving.ruled && moving.bump != self.switch.bump;
        let moved = conn.place.written() != self.written || conn.phase.moving().is_some_and(leaves);
        !self.switch.explicit && moved
    }

    /// Takes back what was noted, which could not be carried out: the peer takes its choice back, and neither is
    /// to come up later. False if another choice stands by now, for which the connection falls silent, or moves.
    fn take_back(&self, conn: &mut Conn) -> bool {
        if self.switch.explicit {
            return conn.choice.take_back(self.version, self.choice);
        }
        conn.place.hand_over(self.handed);
        true
    }

    /// Answer to the peer.
    pub fn answer(&self) -> (Outcome, u64) {
        if let Some(refusal) = self.refusal {
            return refusal.answer();
        }
        let outcome = match self.failed {
            true => Outcome::Failed,
            false => Outcome::Done,
        };
        (outcome, self.version.generation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::{bump, pair};
    use crate::telling::TELL_AGAIN;

    const SOCKET: Socket = Socket(77);
    const NOW: Time = Time::from_nanos(1_000_000_000_000);
    const HOSTS: Hosts = Hosts { own: 7, peer: 8 };
    const HERE: Here = Here {
        socket: SOCKET,
        bound: false,
        on: None,
        required: None,
        ruled: None,
    };

    fn judge(
        conns: &mut ConnTable,
        switch: Switch,
        generation: u64,
        here: Option<Here>,
    ) -> Result<Following, Refusal> {
        let wanted = Wanted {
            switch,
            hosts: HOSTS,
            refusal: None,
        };
        let named = Named {
            pair: pair().reversed(),
            socket: SOCKET,
        };
        let host = HOSTS.peer;
        wanted.judge(conns, (named, Version { generation, host }), here, NOW)
    }

    fn chosen(number: u8) -> Switch {
        Switch {
            bump: BumpId::new(number),
            explicit: true,
            ready: false,
            ground: Ground::Proved,
        }
    }

    fn ruled(number: u8) -> Switch {
        Switch {
            explicit: false,
            ..chosen(number)
        }
    }

    fn whether(switch: Switch) -> Switch {
        Switch {
            ready: true,
            ..switch
        }
    }

    #[test]
    fn what_stands_against_a_switch_changes_nothing() {
        let here = Some(HERE);
        let other = here.map(|here| Here {
            socket: Socket(78),
            ..here
        });
        let bound = here.map(|here| Here {
            bound: true,
            ..here
        });
        let required = here.map(|here| Here {
            required: BumpId::new(2),
            ..here
        });
        let decided = here.map(|here| Here {
            ruled: BumpId::new(2),
            ..here
        });
        let far = Refusal::Implausible(Implausible::Generation);
        for (switch, generation, here, refusal) in [
            (chosen(1), 1, None, Refusal::NoConnection),
            (chosen(1), 1, other, Refusal::OtherSocket(Socket(78))),
            (chosen(1), 1, bound, Refusal::Bound),
            (chosen(1), u64::MAX, here, far),
            (chosen(0), 1, required, Refusal::OwnRule(bump(2))),
            (ruled(1), 0, required, Refusal::OwnRule(bump(2))),
            (ruled(1), 1, required, Refusal::OwnRule(bump(2))),
            (ruled(0), 0, decided, Refusal::OwnRule(bump(2))),
            (ruled(1), 0, decided, Refusal::OwnRule(bump(2))),
            (chosen(0), 1, decided, Refusal::OwnRule(bump(2))),
        ] {
            let mut conns = ConnTable::default();
            let judged = judge(&mut conns, switch, generation, here);
            assert_eq!(judged.err(), Some(refusal), "{switch:?}");
            // Only where the peer's rules want it is noted.
            let by_peer = |bump| Handed {
                bump,
                by: Hand::Peer,
            };
            let is_ruled = !switch.explicit && generation > 0;
            let wants = switch.bump.filter(|_| is_ruled).map(by_peer);
            assert_eq!(conns.get(&pair()).place.handed(), wants);
            conns.update(&pair(), |conn| conn.place.hand_over(None));
            assert_eq!(conns, ConnTable::default());
        }
        // Only a rule that requires its bump stands above a choice for another one; a bound socket may be plain.
        for (switch, here) in [
            (chosen(1), decided),
            (chosen(2), required),
            (chosen(0), bound),
        ] {
            let judged = judge(&mut ConnTable::default(), switch, 1, here);
            assert!(judged.is_ok(), "{switch:?}: {judged:?}");
        }
    }

    #[test]
    fn a_choice_that_stands_here_is_above_a_rule_that_does_not_require_its_bump() {
        let decided = Some(Here {
            ruled: BumpId::new(2),
            ..HERE
        });
        let mut conns = ConnTable::default();
        let judged = judge(&mut conns, chosen(0), 3, Some(HERE));
        assert!(judged.is_ok());
        // It is told again; it is made again; and what the peer did not know of is no rule's.
        for (generation, refusal) in [(3, None), (4, None), (2, Some(Refusal::Older(4)))] {
            let judged = judge(&mut conns, chosen(0), generation, decided);
            assert_eq!(judged.err(), refusal, "{generation}");
        }
        let judged = judge(&mut conns, ruled(3), 0, decided);
        assert_eq!(judged.err(), Some(Refusal::Older(4)));
        let judged = judge(&mut conns, chosen(1), 5, decided);
        assert!(judged.is_ok());
        let judged = judge(&mut conns, chosen(0), 6, decided);
        assert_eq!(judged.err(), Some(Refusal::OwnRule(bump(2))));
        // Unless no bump carries it, as the peer has found out; this host knows then, too. It is a word about plain only.
        let renumbered = Switch {
            ground: Ground::Renumbered,
            ..chosen(0)
        };
        let required = Some(Here {
            required: BumpId::new(2),
            ..HERE
        });
        let elsewhere = Switch {
            bump: BumpId::new(2),
            ..renumbered
        };
        assert!(judge(&mut conns, whether(elsewhere), 6, decided).is_ok());
        assert!(!conns.get(&pair()).is_renumbered(HERE.socket));
        let judged = judge(&mut conns, renumbered, 6, required);
        assert_eq!(judged.err(), Some(Refusal::OwnRule(bump(2))));
        assert!(judge(&mut conns, renumbered, 6, decided).is_ok());
        assert!(judge(&mut conns, chosen(0), 7, decided).is_ok());
    }

    /// The peer is where our rule has it, and asks this host to follow: once that rule ends, the peer does not keep it there.
    #[test]
    fn where_a_rule_here_has_it_only_a_rule_of_the_peer_keeps_it() {
        for (generation, by_us, by) in [
            (0, BumpId::new(1), None),
            (0, None, Some(Hand::Peer)),
            (1, BumpId::new(1), Some(Hand::Peer)),
        ] {
            let ruled_here = Here {
                ruled: by_us,
                ..HERE
            };
            let mut conns = ConnTable::default();
            let judged = judge(&mut conns, ruled(1), generation, Some(ruled_here));
            assert_eq!(judged.map(|it| it.is_new), Ok(by.is_some()));
            let handed = conns.get(&pair()).place.handed();
            assert_eq!(handed.map(|to| to.by), by, "{generation} {by_us:?}");
        }
    }

    /// Both ends had it locked on 2, and the peer goes to where a rule of its own wants it.
    #[test]
    fn who_does_not_follow_a_rule_of_the_peer_does_not_stay_locked() {
        let here = Some(Here {
            required: BumpId::new(2),
            ..HERE
        });
        let mut conns = ConnTable::default();
        conns.update(&pair(), |conn| conn.lock.adopt(bump(2)));
        for switch in [chosen(1), whether(ruled(1)), ruled(0)] {
            let judged = judge(&mut conns, switch, 1, here);
            assert_eq!(judged.err(), Some(Refusal::OwnRule(bump(2))), "{switch:?}");
        }
        let following = judge(&mut conns, ruled(1), 1, here).expect("it is unlocked");
        assert!(!following.is_new);
        let followed = follow(&mut conns, following, None);
        assert_eq!(followed, (vec![Step::Unlock], Outcome::OwnRule));
        let (bump, by) = (bump(1), Hand::Peer);
        assert_eq!(conns.get(&pair()).place.handed(), Some(Handed { bump, by }));
    }

    /// Both hosts move a connection, which other programs put on different bumps.
    #[test]
    fn of_two_moves_that_cross_one_stands() {
        let (bump, ruled_here) = (BumpId::new(2), false);
        let moving = Some(Moving {
            bump,
            ruled: ruled_here,
        });
        let moves = |hosts, generation, moving: Option<Moving>| {
            let mut conns = ConnTable::default();
            moving.into_iter().for_each(|moving| {
                conns.update(&pair(), |conn| conn.phase.move_to_moving(moving));
            });
            let wanted = Wanted {
                switch: ruled(1),
                hosts,
                refusal: None,
            };
            let (pair, socket) = (pair().reversed(), SOCKET);
            let host = hosts.peer;
            let version = Version { generation, host };
            let named = Named { pair, socket };
            let judged = wanted.judge(&mut conns, (named, version), Some(HERE), NOW);
            (judged.err(), conns.get(&pair.reversed()).phase.moving())
        };
        let higher = Hosts { own: 8, peer: 7 };
        let stays = (Some(Refusal::Older(0)), moving);
        assert_eq!(moves(HOSTS, 0, moving), (None, None));
        assert_eq!(moves(higher, 0, moving), stays);
        // A rule of the peer has it go there.
        assert_eq!(moves(higher, 1, moving), (None, None));
        assert_eq!(moves(higher, 0, None), (None, None));
    }

    #[test]
    fn who_only_asks_whether_learns_the_same_and_changes_nothing() {
        let mut conns = ConnTable::default();
        for switch in [chosen(0), ruled(0)] {
            let judged = judge(&mut conns, whether(switch), 1, Some(HERE));
            assert!(judged.is_ok_and(|following| !following.is_new));
            assert_eq!(conns, ConnTable::default());
        }
        let judged = judge(&mut conns, chosen(1), 3, Some(HERE));
        assert!(judged.is_ok_and(|following| following.is_new));
        for switch in [whether(chosen(0)), chosen(0), whether(ruled(0)), ruled(0)] {
            let judged = judge(&mut conns, switch, 2, Some(HERE));
            assert_eq!(judged.err(), Some(Refusal::Older(3)), "{switch:?}");
        }
    }

    /// Plain did not carry it, and a rule has come here since (seed 340001792).
    #[test]
    fn a_rule_of_the_peer_is_noted_beside_a_rule_here() {
        let mut conns = ConnTable::default();
        let [kept, wanted] = [(2, Hand::Kept), (1, Hand::Peer)].map(|(number, by)| Handed {
            bump: bump(number),
            by,
        });
        conns.update(&pair(), |conn| conn.place.hand_over(Some(kept)));
        let here = Here {
            ruled: Some(kept.bump),
            ..HERE
        };
        let judged = judge(&mut conns, ruled(1), 1, Some(here));
        assert_eq!(judged.err(), Some(Refusal::OwnRule(kept.bump)));
        assert_eq!(conns.get(&pair()).place.handed(), Some(wanted));
    }

    /// Rules of both hosts want one bump by now, and the choice for another was made before (seed 320002143).
    #[test]
    fn a_choice_is_to_go_that_a_rule_overrules_and_the_peer_does_not_know() {
        let later = Some(NOW + TELL_AGAIN);
        for (required, due, told) in [(None, None, later), (BumpId::new(3), later, None)] {
            let mut conns = ConnTable::default();
            assert!(judge(&mut conns, chosen(1), 3, Some(HERE)).is_ok());
            let here = Here { required, ..HERE };
            let judged = judge(&mut conns, ruled(3), 1, Some(here));
            assert_eq!(judged.err(), Some(Refusal::Older(3)));
            let telling = &conns.get(&pair()).telling;
            assert_eq!((telling.moved_due(), telling.due()), (due, told));
        }
    }

    /// The peer took the earlier choice back, whose question came here late, or has forgotten it (histories 50000036228, 51000045763).
    #[test]
    fn a_choice_that_a_rule_refuses_to_give_up_is_told_back() {
        let later = Some(NOW + TELL_AGAIN);
        for (before, explicit, told) in [(3, true, later), (0, true, None), (3, false, None)] {
            let mut conns = ConnTable::default();
            if before > 0 {
                let earlier = judge(&mut conns, chosen(1), before, Some(HERE)).unwrap();
                follow(&mut conns, earlier, None);
            }
            let here = Here {
                required: BumpId::new(1),
                ..HERE
            };
            let switch = Switch {
                explicit,
                ..chosen(0)
            };
            let judged = judge(&mut conns, switch, 4, Some(here));
            assert_eq!(judged.err(), Some(Refusal::OwnRule(bump(1))));
            assert_eq!(conns.get(&pair()).telling.due(), told);
        }
    }

    /// Has a connection follow; what is done for that. `fails`: what cannot be.
    fn follow(
        conns: &mut ConnTable,
        mut following: Following,
        fails: Option<Step>,
    ) -> (Vec<Step>, Outcome) {
        let mut steps = Vec::new();
        while let Some(step) = following.next() {
            steps.push(step);
            following.handle_done(conns, Some(step) != fails);
            let is_over = matches!(following.next(), None | Some(Step::Undo));
            let Switch {
                bump,
                explicit,
                ready,
                ..
            } = following.switch;
            let by_rule = step != Step::Unlock && bump.is_some();
            let arriving = !is_over && !ready && (explicit || by_rule);
            assert_eq!(conns.get(&pair()).phase.is_arriving(), arriving);
        }
        (steps, following.answer().0)
    }

    #[test]
    fn who_follows_falls_silent_is_saved_and_only_then_marked() {
        use Step::*;
        for (switch, fails, steps) in [
            (chosen(1), None, vec![Unlock, Drain, Save, Mark]),
            (whether(chosen(1)), None, vec![Unlock, Drain]),
            (chosen(1), Some(Save), vec![Unlock, Drain, Save, Undo]),
            (ruled(1), Some(Mark), vec![Unlock, Drain, Save, Mark, Undo]),
        ] {
            let mut conns = ConnTable::default();
            let following = judge(&mut conns, switch, 1, Some(HERE)).expect("it follows");
            let outcome = match fails {
                Some(_) => Outcome::Failed,
                None => Outcome::Done,
            };
            let followed = follow(&mut conns, following, fails);
            assert_eq!(followed, (steps, outcome), "{switch:?}");
            let stands = !switch.ready && fails.is_none();
            assert_eq!(conns.get(&pair()).is_marked(), stands);
        }
    }

    #[test]
    fn nothing_leaves_its_bump_for_plain_unless_plain_was_seen_to_carry_it() {
        for (switch, forced, kept) in [
            (ruled(0), false, Some(Hand::Kept)),
            (whether(ruled(0)), false, Some(Hand::Kept)),
            (chosen(0), false, None),
            (whether(chosen(0)), false, None),
            (ruled(0), true, None),
            (chosen(0), true, None),
        ] {
            let switch = Switch {
                ground: Ground::forced(forced),
                ..switch
            };
            let mut conns = ConnTable::default();
            // The kernel has it on a bump, by no doing of ours.
            let here = Some(Here {
                on: BumpId::new(2),
                ..HERE
            });
            conns.update(&pair(), |conn| conn.place.handle_followed(BumpId::new(2)));
            let unproved = conns.clone();
            let judged = judge(&mut conns, switch, 1, here).map(drop);
            let refused = Err(Refusal::Unproved(bump(2)));
            assert_eq!(judged, if forced { Ok(()) } else { refused }, "{switch:?}");
            if !forced {
                let conn = conns.get(&pair());
                assert_eq!(conn.choice.get(), None);
                assert_eq!(conn.place.handed().map(|to| to.by), kept, "{switch:?}");
            }
            // A knock was heard, or it has just come from plain.
            for (since, follows) in [(119, true), (121, false)] {
                let mut conns = unproved.clone();
                let at = Time::from_nanos(NOW.as_nanos() - since * 1_000_000_000);
                conns.update(&pair(), |conn| conn.place.note_plain(at));
                let judged = judge(&mut conns, switch, 1, here);
                assert_eq!(judged.is_ok(), follows || forced, "{switch:?}");
            }
        }
        let mut conns = ConnTable::default();
        assert!(judge(&mut conns, ruled(2), 0, Some(HERE)).is_ok());
        let on = BumpId::new(2);
        conns.update(&pair(), |conn| conn.place.handle_followed(on));
        assert!(judge(&mut conns, ruled(0), 0, Some(Here { on, ..HERE })).is_ok());
        // Nobody asks of what another program's device carries.
        let mut conns = ConnTable::default();
        conns.update(&pair(), |conn| conn.place.handle_followed(BumpId::new(9)));
        assert!(judge(&mut conns, ruled(0), 0, Some(HERE)).is_ok());
    }

    #[test]
    fn a_choice_that_waits_has_the_peer_ask_again_for_a_rule() {
        let mut conns = ConnTable::default();
        let version = conns.update(&pair(), |conn| {
            let choice = conn.choice.propose(SOCKET, None, HOSTS.own, 0);
            conn.phase.move_to_asked(choice.version, None);
            choice.version
        });
        let refusal = judge(&mut conns, ruled(1), 1, Some(HERE)).err();
        assert_eq!(refusal, Some(Refusal::Undecided));
        assert_eq!(Refusal::Undecided.answer().0, Outcome::Failed);
        conns.update(&pair(), |conn| conn.phase.end_asked(version));
        let refusal = judge(&mut conns, ruled(1), 1, Some(HERE)).err();
        assert_eq!(refusal, Some(Refusal::Older(version.generation)));
    }

    #[test]
    fn what_is_chosen_while_it_falls_silent_for_a_rule_of_the_peer_keeps_its_mark() {
        let mut conns = ConnTable::default();
        let following = judge(&mut conns, ruled(1), 0, Some(HERE)).expect("it follows");
        let judged = judge(&mut conns, chosen(3), 1, Some(HERE));
        assert!(judged.is_ok());
        let (steps, outcome) = follow(&mut conns, following, None);
        assert_eq!(steps, [Step::Unlock, Step::Drain, Step::Save]);
        assert_eq!(outcome, Outcome::Done);
    }

    #[test]
    fn what_could_not_be_carried_out_is_taken_back() {
        use Step::*;
        let mut conns = ConnTable::default();
        let first = judge(&mut conns, chosen(1), 1, Some(HERE)).expect("it is taken");
        let stood = conns.get(&pair()).choice.get();
        let second = judge(&mut conns, chosen(0), 2, Some(HERE)).expect("it is later");
        let (steps, outcome) = follow(&mut conns, first, Some(Save));
        assert_eq!(
            (steps, outcome),
            (vec![Unlock, Drain, Save], Outcome::Failed)
        );
        let (steps, outcome) = follow(&mut conns, second, Some(Save));
        assert_eq!(
            (steps, outcome),
            (vec![Unlock, Drain, Save, Undo], Outcome::Failed)
        );
        assert_eq!(conns.get(&pair()).choice.get(), stood);

        let mut conns = ConnTable::default();
        for (number, before) in [(1, None), (3, BumpId::new(1)), (0, BumpId::new(3))] {
            let following = judge(&mut conns, ruled(number), 0, Some(HERE)).expect("it follows");
            assert!(following.is_new);
            let after = conns.clone();
            follow(&mut conns, following, Some(Mark));
            let handed = conns.get(&pair()).place.handed();
            assert_eq!(handed.map(|handed| handed.bump), before);
            conns = after;
        }
    }
}
