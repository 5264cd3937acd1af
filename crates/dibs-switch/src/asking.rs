//! What a peer is asked for its part in a switch of one connection, who leaves first, and what becomes of it.

use std::time::Duration;

use dibs_core::Time;
use dibs_settings::BumpId;

use crate::conns::{Choice, Meant, Socket, Version};
use crate::messages::{Answer, Ground, Outcome, Switch, Unanswered};
use crate::phase::Moving;
use crate::plausible::Implausible;
use crate::table::{Conn, ConnTable};

/// Attempts to have routers hear of all that a connection sent by its bump: on a busy host many at once take longer than one does.
const ATTEMPTS: u32 = 5;
/// Rest before the second attempt; each one is twice as long as the one before.
const REST: Duration = Duration::from_millis(100);

/// The switch of one connection, of which its peer is asked for its part.
///
/// [`next`](Self::next) says what is to be done, and a `handle_*` what came of that, until it is
/// [done](Step::Done). If its bump carries something of it, or may at any moment, this host leaves first,
/// when the peer has said that it would follow.
#[derive(Clone, Copy, Debug)]
pub struct Negotiation {
    conn: Meant,
    /// Where it goes; none: to plain.
    bump: Option<BumpId>,
    /// By choice.
    explicit: bool,
    /// A rule of this host has it go there.
    ruled: bool,
    /// If it goes to plain: why it may.
    ground: Ground,
    /// The version that it was asked with last.
    version: Version,
    /// What had been chosen before.
    before: Option<Choice>,
    /// The bump that the connection was on, by whatever reason.
    origin: Option<BumpId>,
    /// It has left there already, and the kernel was told of that: the peer had said that it would follow.
    left: bool,
    /// Attempts to leave that came to nothing, as routers had not heard of all that went by the bump.
    attempts: u32,
    /// True if the move by no choice still stood when the peer answered: what ends it after that is a later word of the peer.
    stood_at_answer: bool,
    phase: Phase,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// It may be locked to where it is.
    Locked,
    /// Nobody has looked yet whether its bump carries something of it.
    Unlocked,
    /// The peer is asked for its part; only whether it would follow, if `ready`. `again`: it knew of a later
    /// choice.
    Asking { ready: bool, again: bool },
    /// It is asked again, for a choice that is later than what `stood`, once that is saved: or the next
    /// daemon would give the version that the peer knows to another choice.
    Saving { ready: bool, stood: Choice },
    /// The peer would follow, and the connection falls silent.
    Draining,
    /// It has.
    Silent,
    /// Rest before the next attempt, in which it goes on.
    Resting,
    /// This came of it.
    Answered(Answer),
    /// And this of that, of which so much is done.
    Concluded(Answer, Conclusion, Option<Step>),
}

/// Step that is to be done for a [`Negotiation`]. Of many that move together the ones with the least step go first. A
/// connection without part in a step then does not wait for a silent peer, and a peer that is ready does not wait for a
/// question about another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// What is locked to where it is and is about to leave is to be unlocked.
    Unlock,
    /// [Look](Negotiation::handle_look) at the bump that it leaves, which may carry something of it now.
    Look,
    /// The choices are to be [saved](Negotiation::handle_saved).
    Save,
    /// The peer is to be asked, by the version that it has [by then](Negotiation::version).
    Ask {
        /// Only whether it would follow.
        ready: bool,
    },
    /// What the connection sent by its bump is to arrive, and nothing new to be sent.
    Drain,
    /// It is to leave its bump, if it still [may](Negotiation::handle_silent).
    Leave,
    /// It is to be [concluded](Negotiation::conclude).
    Conclude,
    /// It is to be on this bump again, by no choice.
    PutBack(Option<BumpId>),
    /// The kernel is to be [told](Negotiation::handle_marked) of the choice that stands.
    Mark,
    /// A rule of the peer wants it on this bump, for which the choice that [stood](Negotiation::stood) is given up.
    GiveIn(u64),
    /// The kernel is to be told where the rules have it.
    Move,
    /// Time for which it is to go on by its bump, while others move.
    Rest(Duration),
    /// It is over.
    Done,
}

/// Conclusion of a choice: what it came to, and who has to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// It is in force.
    InForce,
    /// Another one has been made meanwhile, here or by the peer, and stands. Whom that one came from tells the
    /// kernel, once it is carried out.
    Superseded,
    /// What stood before stands again.
    TakenBack,
    /// The same, and that was no choice: the kernel, which was told of this one, is to put the connection on this
    /// bump again, by no choice.
    PutBack(Option<BumpId>),
    /// This one is in force, later than what the peer was asked for: it puts the connection back to where
    /// it was, whether the peer had moved it or not. The peer is to be told.
    BroughtBack(Choice),
}

impl Negotiation {
    /// Chooses a bump for a connection that is on `origin` as `host`, unless the peer is being asked about an earlier
    /// choice: what stood before this one could not be told from what the peer knows then.
    pub fn choose(
        conns: &mut ConnTable,
        conn: Meant,
        bump: Option<BumpId>,
        origin: Option<BumpId>,
        host: u64,
    ) -> Option<Self> {
        let before = conns.get(&conn.pair).choice.of(conn.socket);
        if conns.get(&conn.pair).phase.asked().is_some() {
            return None;
        }
        Some(Self {
            explicit: true,
            version: propose(conns, conn, bump, (host, 0)),
            before,
            origin,
            ..Self::by_rule(conn, Moving { bump, ruled: false }, host)
        })
    }

    /// Moves a connection by no choice of `host`, which its record says as well.
    pub fn by_rule(conn: Meant, Moving { bump, ruled }: Moving, host: u64) -> Self {
        let generation = u64::from(ruled);
        Self {
            conn,
            bump,
            explicit: false,
            ruled,
            ground: Ground::Proved,
            version: Version { generation, host },
            before: None,
            origin: None,
            left: false,
            attempts: 0,
            stood_at_answer: false,
            phase: Phase::Locked,
        }
    }

    /// The same move, if it is to plain on this ground.
    pub fn on_ground(self, ground: Ground) -> Self {
        Self { ground, ..self }
    }

    /// Takes the choice back before anybody was asked.
    pub fn withdraw(&self, conns: &mut ConnTable) {
        conns.update(&self.conn.pair, |conn| {
            conn.phase.end_asked(self.version);
            conn.choice.take_back(self.version, self.before);
        });
    }

    /// The peer did not answer for others, and is not asked for this one.
    pub fn handle_unasked(&mut self) {
        self.phase = Phase::Answered(Err(Unanswered::NotAsked));
    }

    /// Notes that the step is done, if nothing more is to be said of it.
    pub fn handle_done(&mut self) {
        self.phase = match self.phase {
            Phase::Locked => Phase::Unlocked,
            Phase::Draining => Phase::Silent,
            Phase::Resting => Phase::Asking {
                ready: true,
                again: false,
            },
            Phase::Concluded(answer, conclusion, _) => {
                Phase::Concluded(answer, conclusion, Some(self.next()))
            }
            phase => phase,
        };
    }

    /// Takes what a look showed: true if the bump that it leaves carries something of it, or may at any moment.
    pub fn handle_look(&mut self, is_active: bool) {
        let (ready, again) = (is_active, false);
        self.phase = Phase::Asking { ready, again };
    }

    /// The connection.
    pub fn conn(&self) -> Meant {
        self.conn
    }

    /// The choice that stood before.
    pub fn stood(&self) -> Option<Version> {
        self.before.map(|before| before.version)
    }

    /// The version that the peer is asked with.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Attempts to leave for plain that came to nothing, as routers had not heard of all.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Request that the peer is asked, or [would be](Step::Ask).
    pub fn switch(&self, ready: bool) -> Switch {
        Switch {
            bump: self.bump,
            explicit: self.explicit,
            ready,
            ground: self.ground,
        }
    }

    /// Answer of the peer, so far.
    pub fn answer(&self) -> Answer {
        match self.phase {
            Phase::Answered(answer) | Phase::Concluded(answer, ..) => answer,
            _ => Err(Unanswered::NotAsked),
        }
    }

    /// Conclusion, once it is known.
    pub fn conclusion(&self) -> Option<Conclusion> {
        match self.phase {
            Phase::Concluded(_, conclusion, _) => Some(conclusion),
            _ => None,
        }
    }

    /// Step that is to be done next.
    pub fn next(&self) -> Step {
        match self.phase {
            Phase::Locked => Step::Unlock,
            Phase::Unlocked => Step::Look,
            Phase::Asking { ready, .. } => Step::Ask { ready },
            Phase::Saving { .. } => Step::Save,
            Phase::Draining => Step::Drain,
            Phase::Silent => Step::Leave,
            Phase::Resting => Step::Rest(REST * (1 << (self.attempts - 1))),
            Phase::Answered(_) => Step::Conclude,
            Phase::Concluded(answer, conclusion, done) => {
                let steps = self.rest(answer, conclusion).into_iter().flatten();
                let next = steps.filter(|step| Some(*step) > done).min();
                next.unwrap_or(Step::Done)
            }
        }
    }

    /// The peer has answered, or not.
    ///
    /// # Errors
    /// It claims to know of a choice that nobody can have made, and is not believed.
    pub fn handle_answer(
        &mut self,
        conns: &mut ConnTable,
        answer: Answer,
    ) -> Result<(), Implausible> {
        let Phase::Asking { ready, again } = self.phase else {
            return Ok(());
        };
        let Meant { pair, socket } = self.conn;
        self.phase = Phase::Answered(answer);
        self.stood_at_answer = self.is_moving(conns);
        match answer {
            Ok((Outcome::Done, _)) if ready => self.phase = Phase::Draining,
            Ok((Outcome::NotHeard, _)) if ready => self.handle_behind(),
            Ok((Outcome::Older, generation)) if self.explicit && !again => {
                let choice = &conns.get(&pair).choice;
                if !choice.may_be(socket, generation) {
                    return Err(Implausible::Generation);
                }
                // Unless that later choice has come here meanwhile: then it stands.
                let stood = choice.of(socket);
                if let Some(stood) = stood.filter(|stood| stood.version == self.version) {
                    let above = (self.version.host, generation);
                    self.version = propose(conns, self.conn, self.bump, above);
                    self.phase = Phase::Saving { ready, stood };
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Routers on the way have not heard of all that an end of the connection sent: it stays on its bump, and goes on for a while before
    /// the next attempt, unless this was the last one.
    pub fn handle_behind(&mut self) {
        self.attempts += 1;
        self.phase = match self.attempts < ATTEMPTS {
            true => Phase::Resting,
            false => Phase::Answered(Ok((Outcome::NotHeard, 0))),
        };
    }

    /// The choices are saved, or could not be.
    pub fn handle_saved(&mut self, conns: &mut ConnTable, saved: bool) {
        let Phase::Saving { ready, stood } = self.phase else {
            return self.handle_done();
        };
        if saved {
            let again = true;
            self.phase = Phase::Asking { ready, again };
        } else {
            conns.update(&self.conn.pair, |conn| {
                if conn.choice.take_back(self.version, Some(stood)) {
                    conn.phase.move_to_asked(stood.version, self.before);
                }
            });
            self.version = stood.version;
            let older = (Outcome::Older, stood.version.generation);
            self.phase = Phase::Answered(Ok(older));
        }
    }

    /// The connection has fallen silent, or is not there any more. True if it leaves its bump now, before the peer is
    /// asked to follow: the peer may have chosen otherwise meanwhile.
    pub fn handle_silent(&mut self, conns: &ConnTable, is_there: bool) -> bool {
        let choice = conns.get(&self.conn.pair).choice.of(self.conn.socket);
        let stands = match self.explicit {
            true => choice.is_some_and(|choice| choice.bump == self.bump),
            false => choice.is_none() && self.is_moving(conns),
        };
        self.left = is_there && stands;
        self.handle_look(false);
        if !self.explicit && self.is_overtaken(conns) {
            self.handle_unasked();
        }
        self.left
    }

    /// True if nothing has ended a move by no choice.
    fn is_moving(&self, conns: &ConnTable) -> bool {
        conns.get(&self.conn.pair).phase.moving() == Some(self.moving())
    }

    /// True if the next move ended a move by no choice.
    fn is_overtaken(&self, conns: &ConnTable) -> bool {
        { conns.get(&self.conn.pair).phase }.is_overtaken(self.moving())
    }

    fn moving(&self) -> Moving {
        let (bump, ruled) = (self.bump, self.ruled);
        Moving { bump, ruled }
    }

    /// Decides what becomes of it. A peer that could not follow a rule is asked [again](crate::telling).
    pub fn conclude(&mut self, conns: &mut ConnTable, now: Time) -> Conclusion {
        let answer = self.answer();
        let conclusion = match self.explicit {
            true => conns.update(&self.conn.pair, |conn| self.conclude_with(conn)),
            false if self.is_moving(conns) && self.is_behind(answer) => {
                let keep = |conn: &mut Conn| {
                    if let Some(bump) = conn.place.marked() {
                        conn.keep_on(bump, Ok((Outcome::Failed, 0)), now);
                    }
                };
                conns.update(&self.conn.pair, keep);
                Conclusion::TakenBack
            }
            false => match conns.get(&self.conn.pair).choice.of(self.conn.socket) {
                // A move of the peer crosses it and stands, of which this host knows or is about to hear.
                None if self.is_crossed(answer) => Conclusion::Superseded,
                None if self.is_moving(conns) || self.follows(conns, answer) => {
                    let note = |conn: &mut Conn| {
                        let is_latest = !conn.phase.is_overruled(self.moving());
                        if matches!(answer, Ok((Outcome::Done, _))) && is_latest {
                            conn.place.take_from_peer(self.moving());
                        }
                        conn.telling.handle_moved(self.bump, answer, now);
                    };
                    conns.update(&self.conn.pair, note);
                    Conclusion::InForce
                }
                None if self.is_overtaken(conns) && matches!(answer, Ok((Outcome::Done, _))) => {
                    // The peer may have done this after what it was asked since.
                    let ask_again = |conn: &mut Conn| {
                        let next = conn.phase.moving().map(|next| next.bump);
                        let bump = next.unwrap_or(conn.place.was());
                        let answer = Err(Unanswered::NotAsked);
                        conn.telling.handle_moved(bump, answer, now);
                    };
                    conns.update(&self.conn.pair, ask_again);
                    Conclusion::Superseded
                }
                _ => Conclusion::Superseded,
            },
        };
        self.phase = Phase::Concluded(answer, conclusion, None);
        conclusion
    }

    /// True if the peer has gone there although the move had ended here: it is followed, unless it has gone elsewhere since.
    fn follows(&self, conns: &ConnTable, answer: Answer) -> bool {
        let phase = &conns.get(&self.conn.pair).phase;
        matches!(answer, Ok((Outcome::Done, _)))
            && !self.stood_at_answer
            && !phase.is_overruled(self.moving())
            && !phase.is_overtaken(self.moving())
    }

    /// True if a move of the peer stands against this one, in which no rule here has a part.
    fn is_crossed(&self, answer: Answer) -> bool {
        !self.ruled && matches!(answer, Ok((Outcome::Older, 0)))
    }

    /// True if it stays where it is, as routers have not heard of all that an end sent.
    fn is_behind(&self, answer: Answer) -> bool {
        self.bump.is_none() && matches!(answer, Ok((Outcome::NotHeard, _)))
    }

    /// What is left to do then, in whatever order.
    fn rest(&self, answer: Answer, conclusion: Conclusion) -> [Option<Step>; 4] {
        let own = match answer {
            Ok((Outcome::OwnRule, own)) => Some(own),
            _ => None,
        };
        if !self.explicit {
            let own = own.filter(|_| !self.ruled).map(Step::GiveIn);
            // What the peer takes no part in goes one way only, as rules allow.
            let step = own.or(Some(Step::Move));
            return [
                step.filter(|_| conclusion == Conclusion::InForce),
                None,
                None,
                None,
            ];
        }
        // The choice that stood was made without a session, and the rule stands against it, too: one that does not
        // require its bump stands against plain alone.
        let gives_in = |own: &u64| {
            let number = |bump: Option<BumpId>| bump.map_or(0, |bump| bump.get().into());
            let stands_against =
                |bump| number(bump) != *own && (bump.is_none() || self.bump.is_some());
            { self.before }.is_some_and(|before| stands_against(before.bump))
        };
        [
            matches!(conclusion, Conclusion::BroughtBack(_)).then_some(Step::Save),
            match conclusion {
                Conclusion::PutBack(bump) => Some(Step::PutBack(bump)),
                _ => None,
            },
            (conclusion != Conclusion::Superseded).then_some(Step::Mark),
            own.filter(gives_in).map(Step::GiveIn),
        ]
    }

    /// The kernel was told of what stands, or could not be; then the peer is, where it may have moved the connection.
    pub fn handle_marked(&mut self, conns: &mut ConnTable, now: Time) {
        if let Some(Conclusion::BroughtBack(back)) = self.conclusion() {
            conns.update(&self.conn.pair, |conn| conn.telling.tell(back.version, now));
        }
        self.handle_done();
    }

    fn conclude_with(&self, conn: &mut Conn) -> Conclusion {
        let (socket, version) = (self.conn.socket, self.version);
        let agreed = match self.answer() {
            Ok((outcome, _)) => outcome == Outcome::Done,
            // The peer's part waits for a session: the choice is sent again then.
            Err(Unanswered::NoSession) => self.bump.is_none(),
            Err(_) => false,
        };
        let is_told_back = !conn.phase.end_asked(version);
        let known = conn.choice.of(socket);
        if known.is_none_or(|known| known.version != version) {
            let ours = Choice {
                bump: self.bump,
                socket,
                version,
            };
            let stands = if agreed || is_told_back {
                Some(ours)
            } else {
                self.before
            };
            conn.choice.overtake(version, stands);
            return Conclusion::Superseded;
        }
        // Or it was told back, by a peer that agreed and restarted before its answer got here.
        if agreed || is_told_back {
            return Conclusion::InForce;
        }
        conn.choice.take_back(version, self.before);
        // Without the name of its socket the peer does nothing.
        let is_named = conn.name(socket) != Socket::UNKNOWN;
        if self.answer() != Err(Unanswered::Silent) || !is_named {
            return match self.before {
                None if self.left => Conclusion::PutBack(self.origin),
                _ => Conclusion::TakenBack,
            };
        }
        let bump = self.before.map_or(self.origin, |choice| choice.bump);
        let (host, above) = (version.host, version.generation);
        Conclusion::BroughtBack(conn.choice.propose(socket, bump, host, above))
    }
}

/// Makes a choice of a host that is later than a generation, too; the peer is to be asked about it.
fn propose(
    conns: &mut ConnTable,
    Meant { pair, socket }: Meant,
    bump: Option<BumpId>,
    (host, above): (u64, u64),
) -> Version {
    conns.update(&pair, |conn| {
        let known = conn.choice.of(socket);
        let stood = match conn.is_asked() {
            true => conn.phase.stood(),
            false => known,
        };
        // The peer may know the one that an earlier run asked about.
        let above = above.max(conn.phase.cut_short_at());
        let version = conn.choice.propose(socket, bump, host, above).version;
        conn.phase.move_to_asked(version, stood);
        version
    })
}

#[cfg(test)]
mod tests;
