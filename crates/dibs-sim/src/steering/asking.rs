//! What users choose, what the peer is asked, and what comes of it: `daemon/src/switching.rs` and `asking.rs`.

use dibs_switch::asking::{Asked, Conclusion, Verdict};
use dibs_switch::conns::{Choice, Pair, Socket, Version};
use dibs_switch::messages::{Body, Message, Named, Outcome, Switch};

use super::{
    Ask, At, Mark, PATIENCE, SENDS_WITHIN, Steering, TELL_AGAIN, Waiter, end_drains, tuple,
};
use crate::coverage::Seen;

impl Steering {
    /// A user here moves a connection to a bump, or to plain.
    pub fn choose(&mut self, at: &mut At<'_>, pair: Pair, socket: Socket, bump: u8) {
        if self
            .requires(&pair)
            .is_some_and(|required| required != bump)
        {
            return self.seen.note(Seen::RequiredKept);
        }
        let host = self.host;
        let before = self.daemon().choices.get(&pair);
        if before.is_some_and(|choice| choice.pending) {
            return self.seen.note(Seen::BusyRefused);
        }
        if self.is_unable(at.now) {
            return self.seen.note(Seen::FailedHere);
        }
        let choice = self.daemon().choices.propose(pair, socket, bump, host, 0);
        self.save(at.now);
        let origin = self.mark(&pair).bump;
        self.unlock_leaving(&pair, bump);
        if bump != origin && bump != 0 && origin != 0 {
            self.seen.note(Seen::BumpToBump);
        }
        let mut ready = false;
        if bump == 0 {
            let conns = at.node.conns();
            let mut spoke = conns.iter().filter(|c| c.tuple == tuple(&pair));
            ready = spoke.any(|c| c.spoke.is_some_and(|t| at.now.since(t) < SENDS_WITHIN));
        }
        let ask = Ask {
            pair,
            socket,
            version: choice.version,
            bump,
            ready,
            before: Some(before),
            origin,
            left: false,
            again: false,
            until: at.now,
        };
        self.ask(at, ask);
    }

    /// This host's daemon is not what it should be, and says that a choice was made, by whomever and as the latest of
    /// all.
    pub fn outbid(&mut self, at: &mut At<'_>, pair: Pair, socket: Socket, bump: u8, host: u64) {
        let socket = self.daemon().names.get(&pair, socket);
        let version = Version {
            generation: if host == self.host { u64::MAX } else { 2 },
            host,
        };
        let request = self.next_request();
        let switch = Switch {
            bump,
            explicit: true,
            ready: false,
        };
        let body = Body::Switch {
            switch,
            conns: vec![(Named { pair, socket }, version)],
        };
        self.post(at, request, body);
    }

    pub(super) fn ask(&mut self, at: &mut At<'_>, ask: Ask) {
        let request = self.next_request();
        let ask = Ask {
            until: at.now + PATIENCE,
            ..ask
        };
        let named = Named {
            pair: ask.pair,
            socket: self.daemon().names.get(&ask.pair, ask.socket),
        };
        let switch = Switch {
            bump: ask.bump,
            explicit: true,
            ready: ask.ready,
        };
        let body = Body::Switch {
            switch,
            conns: vec![(named, ask.version)],
        };
        if self.post(at, request, body) {
            self.daemon().asks.insert(request, ask);
        } else if ask.before.is_some() {
            self.seen.note(Seen::NoSession);
            self.conclude(at, ask, Verdict::NoSession, 0);
        }
    }

    /// Tells the peer of a choice that is in force.
    pub(super) fn tell(&mut self, at: &mut At<'_>, pair: Pair, choice: Choice) {
        let ask = Ask {
            pair,
            socket: choice.socket,
            version: choice.version,
            bump: choice.bump,
            ready: false,
            before: None,
            origin: 0,
            left: false,
            again: false,
            until: at.now,
        };
        self.ask(at, ask);
    }

    pub(super) fn post(&mut self, at: &mut At<'_>, request: u32, body: Body) -> bool {
        let bytes = Message { request, body }.encode();
        let sent = at.node.send_control(at.now, 0, &bytes).is_ok();
        if sent {
            self.sent.push(bytes);
        }
        sent
    }

    /// What came of a question; the number belongs to the outcome.
    pub(super) fn conclude(&mut self, at: &mut At<'_>, ask: Ask, verdict: Verdict, number: u64) {
        let (pair, host) = (ask.pair, self.host);
        let Some(before) = ask.before else {
            return self.conclude_telling(at, ask, verdict, number);
        };
        let named = self.daemon().names.get(&pair, ask.socket) != Socket::UNKNOWN;
        let asked = Asked {
            socket: ask.socket,
            bump: ask.bump,
            version: ask.version,
            before,
            origin: ask.origin,
            left: ask.left,
            named,
        };
        let choices = &mut self.daemon().choices;
        let conclusion = choices.conclude(pair, asked, verdict, host);
        self.save(at.now);
        // Another one that stands is marked by whom it came from, once it is carried out.
        if conclusion != Conclusion::Superseded {
            self.mark_choice(at, pair);
        }
        match conclusion {
            Conclusion::InForce => {}
            Conclusion::Superseded => self.seen.note(Seen::Superseded),
            Conclusion::TakenBack => {
                self.seen.note(Seen::Refused);
                // While it waited, nobody spoke of the one before.
                if let (Verdict::Silence, Some(before)) = (verdict, before) {
                    self.tell(at, pair, before);
                }
            }
            Conclusion::PutBack(bump) => {
                self.seen.note(Seen::PutBack);
                let mark = self.marks.entry(pair).or_default();
                (mark.bump, mark.chosen) = (bump, false);
            }
            Conclusion::BroughtBack(back) => {
                self.seen.note(Seen::Unanswered);
                self.tell(at, pair, back);
            }
        }
        let stays = matches!(
            conclusion,
            Conclusion::TakenBack | Conclusion::PutBack(_) | Conclusion::BroughtBack(_)
        );
        if ask.bump == 0 && stays {
            // It stays where it was, and nobody waits for its silence.
            end_drains(at, &pair);
        }
        // Nor may it go back to a choice that the peer has refused, or is about to.
        if let (Verdict::Answer(Outcome::OwnRule), Some(before)) = (verdict, before)
            && u64::from(before.bump) != number
        {
            self.give_in(at, pair, before.version, number);
        }
    }

    /// What came of telling a choice that is in force: what the peer refuses stays as it is there. A rule
    /// that requires the bump is the stronger one, and holds for both directions.
    fn conclude_telling(&mut self, at: &mut At<'_>, ask: Ask, verdict: Verdict, number: u64) {
        let Ask { pair, version, .. } = ask;
        if let Verdict::Answer(Outcome::Older | Outcome::Failed) = verdict {
            // If it still stands by then.
            let telling = (at.now + TELL_AGAIN, pair, version);
            return self.daemon().tellings.push(telling);
        }
        let known = self.daemon().choices.get(&pair);
        let Some(choice) = known.filter(|choice| choice.version == version) else {
            return;
        };
        match verdict {
            Verdict::Answer(Outcome::OwnRule) => self.give_in(at, pair, version, number),
            Verdict::Silence => {
                // Its part of it may not have got there.
                self.seen.note(Seen::ToldAgain);
                self.tell(at, pair, choice);
            }
            Verdict::Answer(_) | Verdict::NoSession | Verdict::NotAsked => {}
        }
    }

    /// A choice stands against a rule of the peer.
    fn give_in(&mut self, at: &mut At<'_>, pair: Pair, version: Version, own: u64) {
        if !self.daemon().choices.give_up(&pair, version) {
            return;
        }
        self.seen.note(Seen::OwnRule);
        self.daemon().leaving.remove(&pair);
        self.highest.remove(&pair);
        let mark = Mark {
            bump: own as u8,
            ..Mark::default()
        };
        self.marks.insert(pair, mark);
        self.note_lock(&pair);
        end_drains(at, &pair);
        self.save(at.now);
    }

    pub(super) fn on_answer(
        &mut self,
        at: &mut At<'_>,
        ask: Ask,
        outcome: Outcome,
        generation: u64,
    ) {
        let host = self.host;
        if let (Outcome::OtherSocket, Ok(theirs)) = (outcome, u32::try_from(generation)) {
            // What was asked for a connection that is gone has gone with it.
            let names = &mut self.daemon().names;
            names.learn(ask.pair, ask.socket, Socket(theirs));
            return self.ask(at, ask);
        }
        // Or the next daemon would give the version that the peer knows to another choice.
        let saves = !self.is_unable(at.now);
        let choices = &mut self.daemon().choices;
        let stands = choices.get(&ask.pair).map(|c| c.version) == Some(ask.version);
        let near = choices.may_be(&ask.pair, ask.socket, generation);
        if outcome == Outcome::Older && !near {
            self.seen.note(Seen::VersionRefused);
            return self.conclude(at, ask, Verdict::Answer(outcome), generation);
        }
        if outcome == Outcome::Older && ask.before.is_some() && stands && !ask.again && saves {
            let later = choices.propose(ask.pair, ask.socket, ask.bump, host, generation);
            self.save(at.now);
            self.seen.note(Seen::AskedAgain);
            let (version, again) = (later.version, true);
            return self.ask(
                at,
                Ask {
                    version,
                    again,
                    ..ask
                },
            );
        }
        if ask.ready && outcome == Outcome::Done {
            return self.silence(at, ask.pair, Waiter::Us(ask));
        }
        self.conclude(at, ask, Verdict::Answer(outcome), generation);
    }

    /// A new session with the peer: all that concerns it is told.
    pub fn on_peer_up(&mut self, at: &mut At<'_>) {
        let settled = |(_, choice): &(Pair, Choice)| !choice.pending;
        let known: Vec<_> = self.daemon().choices.iter().filter(settled).collect();
        for (pair, choice) in known {
            self.seen.note(Seen::ToldAgain);
            self.tell(at, pair, choice);
        }
    }
}
