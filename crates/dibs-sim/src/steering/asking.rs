//! What users choose, what the peer is asked, and what comes of it: a driver of [`dibs_switch::asking`].

use dibs_switch::asking::{Conclusion, Negotiation, Step};
use dibs_switch::conns::{Meant, Pair, Socket, Version};
use dibs_switch::messages::{ANSWER_TIMEOUT, Answer, Body, Message, Named, Switch, Unanswered};
use dibs_switch::naming::{Next, Query};

use super::{About, Ask, At, Mark, SENDS_WITHIN, Steering, Waiter, end_drains, locking, tuple};
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
        let (host, origin) = (self.host, self.mark(&pair).bump);
        let conn = Meant { pair, socket };
        let conns = &mut self.daemon().conns;
        let Some(negotiation) = Negotiation::choose(conns, conn, bump, origin, host) else {
            return self.seen.note(Seen::BusyRefused);
        };
        if !self.save(at.now) {
            negotiation.withdraw(&mut self.daemon().conns);
            self.save(at.now);
            return self.seen.note(Seen::FailedHere);
        }
        if bump != origin && bump != 0 && origin != 0 {
            self.seen.note(Seen::BumpToBump);
        }
        self.carry_on(at, negotiation);
    }

    /// This host's daemon is not what it should be, and says that a choice was made, by whomever and as the latest of
    /// all.
    pub fn outbid(&mut self, at: &mut At<'_>, pair: Pair, socket: Socket, bump: u8, host: u64) {
        let socket = self.daemon().conns.get(&pair).name(socket);
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

    /// Does what comes next in a switch of ours, as far as that waits for nothing.
    pub(super) fn carry_on(&mut self, at: &mut At<'_>, mut negotiation: Negotiation) {
        let Meant { pair, .. } = negotiation.conn();
        let bump = negotiation.switch(false).bump;
        loop {
            let step = negotiation.next();
            match step {
                Step::Unlock => locking::unlock_leaving(self, &pair, bump),
                Step::Look => {
                    let conns = at.node.conns();
                    let mut spoke = conns.iter().filter(|c| c.tuple == tuple(&pair));
                    let sends =
                        spoke.any(|c| c.spoke.is_some_and(|t| at.now.since(t) < SENDS_WITHIN));
                    negotiation.handle_look(bump == 0 && sends);
                }
                Step::Save => {
                    let saved = self.save(at.now);
                    if saved && negotiation.conclusion().is_none() {
                        self.seen.note(Seen::AskedAgain);
                    }
                    negotiation.handle_saved(&mut self.daemon().conns, saved);
                }
                Step::Ask { .. } => {
                    let query = Query::new(negotiation.conn());
                    return self.ask(at, query, About::Switch(negotiation));
                }
                Step::Drain => return self.silence(at, pair, Waiter::Us(negotiation)),
                Step::Leave => {
                    let is_there = at.is_there(&negotiation.conn());
                    if negotiation.handle_silent(&self.daemon().conns, is_there) {
                        self.seen.note(Seen::LeftFirst);
                        self.leave(at, pair);
                    } else {
                        end_drains(at, &pair);
                    }
                }
                Step::Conclude => self.conclude(at, &mut negotiation),
                Step::PutBack(bump) => {
                    let mark = self.marks.entry(pair).or_default();
                    (mark.bump, mark.chosen) = (bump, false);
                }
                Step::Mark => {
                    self.mark_choice(at, pair);
                    negotiation.handle_marked(&mut self.daemon().conns, at.now);
                }
                Step::GiveIn(own) => {
                    let choice = negotiation.stood().expect("rules move nothing here");
                    self.give_in(at, pair, choice, own);
                }
                Step::Move => unreachable!("rules move nothing here"),
                Step::Done => return,
            }
            if negotiation.next() == step {
                negotiation.handle_done();
            }
        }
    }

    /// Asks the peer.
    pub(super) fn ask(&mut self, at: &mut At<'_>, query: Query, about: About) {
        let request = self.next_request();
        let named = self.daemon().conns.named(&query.conn());
        let switch = |switch, version| Body::Switch {
            switch,
            conns: vec![(named, version)],
        };
        let body = match about {
            About::Switch(negotiation) => {
                let ready = negotiation.next() == Step::Ask { ready: true };
                switch(negotiation.switch(ready), negotiation.version())
            }
            About::Telling(choice) => {
                let chosen = Switch {
                    bump: choice.bump,
                    explicit: true,
                    ready: false,
                };
                switch(chosen, choice.version)
            }
            About::Confirm(bump) => {
                let conns = vec![named];
                Body::Confirm { bump, conns }
            }
        };
        let until = at.now + ANSWER_TIMEOUT;
        let ask = Ask {
            query,
            about,
            until,
        };
        if self.post(at, request, body) {
            self.daemon().asks.insert(request, ask);
        } else {
            self.handle_answer(at, ask, Err(Unanswered::NoSession));
        }
    }

    /// Tells the peer what it is to be told by now.
    pub(super) fn tell_due(&mut self, at: &mut At<'_>) {
        for (pair, choice) in self.daemon().conns.take_tellings(at.now, |_| true) {
            let socket = choice.socket;
            let query = Query::new(Meant { pair, socket });
            self.ask(at, query, About::Telling(choice));
        }
    }

    pub(super) fn post(&mut self, at: &mut At<'_>, request: u32, body: Body) -> bool {
        let bytes = Message { request, body }.encode();
        let sent = at.node.send_control(at.now, 0, &bytes).is_ok();
        if sent {
            self.sent.push(bytes);
        }
        sent
    }

    /// The peer has answered, or not.
    pub(super) fn handle_answer(&mut self, at: &mut At<'_>, ask: Ask, answer: Answer) {
        let Ask {
            mut query, about, ..
        } = ask;
        query.handle_answer(answer);
        if query.next() == Next::Look {
            let is_there = at.is_there(&query.conn());
            query.handle_look(&mut self.daemon().conns, is_there);
        }
        let Some(answer) = query.answer() else {
            return self.ask(at, query, about);
        };
        let conn = query.conn();
        match about {
            About::Switch(mut negotiation) => {
                let conns = &mut self.daemon().conns;
                if negotiation.handle_answer(conns, answer).is_err() {
                    self.seen.note(Seen::VersionRefused);
                }
                if answer == Err(Unanswered::NoSession) {
                    self.seen.note(Seen::NoSession);
                }
                self.carry_on(at, negotiation);
            }
            About::Telling(choice) => {
                let (pair, version) = (conn.pair, choice.version);
                if let Some(own) = self.update(&pair, |conn| {
                    conn.telling.handle_answer(version, answer, at.now)
                }) {
                    self.give_in(at, pair, version, own);
                }
            }
            About::Confirm(bump) => {
                let stays_on = locking::stays_on(self, &conn.pair);
                self.update(&conn.pair, |conn| {
                    conn.lock.handle_answer(bump, answer, stays_on, at.now)
                });
            }
        }
    }

    /// Notes what came of a switch of ours.
    fn conclude(&mut self, at: &At<'_>, negotiation: &mut Negotiation) {
        match negotiation.conclude(&mut self.daemon().conns) {
            Conclusion::InForce => {}
            Conclusion::Superseded => self.seen.note(Seen::Superseded),
            Conclusion::TakenBack => self.seen.note(Seen::Refused),
            Conclusion::PutBack(_) => self.seen.note(Seen::PutBack),
            Conclusion::BroughtBack(_) => self.seen.note(Seen::Unanswered),
        }
        self.save(at.now);
    }

    /// A choice stands against a rule of the peer.
    fn give_in(&mut self, at: &mut At<'_>, pair: Pair, version: Version, own: u64) {
        if !self.update(&pair, |conn| conn.choice.give_up(version)) {
            return;
        }
        self.seen.note(Seen::OwnRule);
        self.highest.remove(&pair);
        let mark = Mark {
            bump: own as u8,
            ..Mark::default()
        };
        self.marks.insert(pair, mark);
        locking::note_lock(self, &pair);
        end_drains(at, &pair);
        self.save(at.now);
    }

    /// A new session with the peer: all that concerns it is told.
    pub fn on_peer_up(&mut self, at: &mut At<'_>) {
        let conns = &mut self.daemon().conns;
        conns.tell_all(at.now, |_| true);
        if conns.next_telling().is_some() {
            self.seen.note(Seen::ToldAgain);
        }
        self.tell_due(at);
    }
}
