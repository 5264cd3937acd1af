//! What users choose, what the peer is asked, and what comes of it: a driver of [`dibs_switch::asking`].

use dibs_settings::BumpId;
use dibs_switch::asking::{Conclusion, Negotiation, Step};
use dibs_switch::conns::{Meant, Socket, Version};
use dibs_switch::marks::{Hand, Handed};
use dibs_switch::messages::{ANSWER_TIMEOUT, Answer, Body, Message, Named, Switch, Unanswered};
use dibs_switch::naming::{Next, Query};
use dibs_wire::FlowKey;

use super::knocking::Cause;
use super::{About, Ask, At, SENDS_WITHIN, Steering, Waiter, end_drains, locking};
use crate::coverage::Seen;

impl Steering {
    /// Moves a connection to a bump, or to plain, as a user here chose.
    pub(super) fn choose(&mut self, at: &mut At<'_>, conn: Meant, bump: Option<BumpId>) {
        let Meant { pair, socket } = conn;
        let (mark, forces) = (self.mark(&pair), self.forces);
        let daemon = self.daemon();
        let ruling = daemon.ruling(&pair, socket);
        if ruling
            .requirement()
            .is_some_and(|rule| Some(rule.bump) != bump)
        {
            return self.seen.note(Seen::RequiredKept);
        }
        let origin = ruling.stands_on(mark.bump);
        if daemon.knocking.asks(&pair) {
            return self.seen.note(Seen::BusyRefused);
        }
        if bump.is_none() && origin.is_some() && !forces {
            return self.knock(at, conn, Cause::Choice);
        }
        self.choose_proved(at, conn, bump);
    }

    /// The same, where plain carries the connection if it is to go there.
    pub(super) fn choose_proved(&mut self, at: &mut At<'_>, conn: Meant, bump: Option<BumpId>) {
        let Meant { pair, socket } = conn;
        let (host, mark) = (self.host, self.mark(&pair));
        let daemon = self.daemon();
        let origin = daemon.ruling(&pair, socket).stands_on(mark.bump);
        let Some(negotiation) = Negotiation::choose(&mut daemon.conns, conn, bump, origin, host)
        else {
            return self.seen.note(Seen::BusyRefused);
        };
        if !self.save(at.now) {
            negotiation.withdraw(&mut self.daemon().conns);
            self.save(at.now);
            return self.seen.note(Seen::FailedHere);
        }
        if bump != origin && bump.is_some() && origin.is_some() {
            self.seen.note(Seen::BumpToBump);
        }
        self.carry_on(at, negotiation);
    }

    /// This host's daemon is not what it should be, and says that a choice was made, by whomever and as the latest of
    /// all.
    pub fn outbid(
        &mut self,
        at: &mut At<'_>,
        pair: FlowKey,
        socket: Socket,
        bump: Option<BumpId>,
        host: u64,
    ) {
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
                    let mut spoke = conns.iter().filter(|c| c.tuple == pair);
                    let sends =
                        spoke.any(|c| c.spoke.is_some_and(|t| at.now.since(t) < SENDS_WITHIN));
                    negotiation.handle_look(bump.is_none() && sends);
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
                        match negotiation.switch(false).explicit {
                            true => self.write(at, pair, bump, true),
                            false => self.move_to(at, pair, bump),
                        }
                    } else {
                        end_drains(at, &pair);
                    }
                }
                Step::Conclude => self.conclude(at, &mut negotiation),
                Step::PutBack(bump) => self.put_back(at, pair, bump),
                Step::Mark => {
                    self.mark_choice(at, pair);
                    negotiation.handle_marked(&mut self.daemon().conns, at.now);
                }
                Step::GiveIn(own) => match negotiation.stood() {
                    Some(version) => self.give_in(at, pair, version, own),
                    None => self.follow_peer(at, pair, own),
                },
                Step::Move => self.move_to(at, pair, bump),
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
            About::Knock(numbers) => Body::Knock(vec![(named, numbers)]),
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
                let stays_on = locking::stays_on(self, &conn.pair, conn.socket);
                self.update(&conn.pair, |conn| {
                    conn.lock.handle_answer(bump, answer, stays_on, at.now)
                });
            }
            About::Knock(_) => self.handle_knocked(at, &conn.pair, answer),
        }
    }

    /// Notes what came of a switch of ours.
    fn conclude(&mut self, at: &At<'_>, negotiation: &mut Negotiation) {
        match negotiation.conclude(&mut self.daemon().conns, at.now) {
            Conclusion::InForce => {}
            Conclusion::Superseded => self.seen.note(Seen::Superseded),
            Conclusion::TakenBack => self.seen.note(Seen::Refused),
            Conclusion::PutBack(_) => self.seen.note(Seen::PutBack),
            Conclusion::BroughtBack(_) => self.seen.note(Seen::Unanswered),
        }
        self.save(at.now);
    }

    /// A choice stands against a rule of the peer.
    fn give_in(&mut self, at: &mut At<'_>, pair: FlowKey, version: Version, own: u64) {
        if !self.update(&pair, |conn| conn.choice.give_up(version)) {
            return;
        }
        self.seen.note(Seen::OwnRule);
        self.highest.remove(&pair);
        self.save(at.now);
        self.follow_peer(at, pair, own);
    }

    /// A rule of the peer wants a connection on its bump.
    fn follow_peer(&mut self, at: &mut At<'_>, pair: FlowKey, own: u64) {
        let bump = BumpId::new(own as u8).expect("a rule's bump");
        let by = Hand::Peer;
        self.update(&pair, |conn| conn.hand_over(Some(Handed { bump, by })));
        self.write(at, pair, Some(bump), false);
    }

    /// Puts a connection where it was, by no choice, unless one has been made for it meanwhile.
    pub(super) fn put_back(&mut self, at: &mut At<'_>, pair: FlowKey, bump: Option<BumpId>) {
        if self.choice(&pair).is_none() {
            self.write(at, pair, bump, false);
        }
    }

    /// The peer, whose session is new, is told what was chosen.
    pub(super) fn tell_all(&mut self, at: &mut At<'_>) {
        let conns = &mut self.daemon().conns;
        conns.tell_all(at.now, |_| true);
        if conns.next_telling().is_some() {
            self.seen.note(Seen::ToldAgain);
        }
        self.tell_due(at);
    }
}
