//! What the peer asks for, a driver of [`dibs_switch::answering`], and how a connection falls silent.

use dibs_settings::BumpId;
use dibs_switch::answering::{Following, Refusal, Step, Wanted};
use dibs_switch::conns::Version;
use dibs_switch::messages::{Body, Message, Named, Outcome, Switch, Unanswered};
use dibs_switch::plausible::Hosts;
use dibs_wire::FlowKey;

use super::{At, CARRIED, LOOK_EVERY, Steering, Waiter, end_drains, locking, ruling};
use crate::coverage::Seen;

impl Steering {
    /// A message of the peer's daemon. False if it is none of ours.
    pub fn on_message(&mut self, at: &mut At<'_>, bytes: &[u8]) -> bool {
        let Ok(message) = Message::decode(bytes) else {
            return false;
        };
        match message.body {
            Body::Answer(outcomes) => {
                let want = outcomes
                    .first()
                    .map_or(Err(Unanswered::Silent), |it| Ok(*it));
                if ruling::handle_answer(self, at, message.request, want) {
                    ruling::take_turns(self, at);
                    return true;
                }
                let ask = self.daemon().asks.remove(&message.request);
                if let Some((ask, outcome)) = ask.zip(outcomes.first()) {
                    self.handle_answer(at, ask, Ok(*outcome));
                } else {
                    self.seen.note(Seen::LateAnswer);
                }
            }
            _ => {
                self.daemon().waiting.push_back(message);
                self.serve(at);
            }
        }
        ruling::take_turns(self, at);
        true
    }

    /// Deals with the peer's questions, one after the other.
    pub(super) fn serve(&mut self, at: &mut At<'_>) {
        while self.daemon().serving.is_none()
            && let Some(Message { request, body }) = self.daemon().waiting.pop_front()
        {
            match body {
                Body::Switch { switch, conns } => {
                    for conn in conns {
                        self.on_switch(at, (request, switch), conn);
                    }
                }
                Body::Confirm { bump, conns } => {
                    let answer = locking::on_confirm(self, at, bump, &conns);
                    self.post(at, request, answer);
                }
                Body::Knock(conns) => {
                    for conn in conns {
                        self.on_knock(at, request, conn);
                    }
                }
                Body::Want {
                    sequence, bumps, ..
                } => {
                    let outcome = ruling::on_want(self, at.now, sequence, bumps);
                    self.post(at, request, Body::Answer(vec![(outcome, 0)]));
                }
                // The simulator's hosts have no firewall.
                Body::Silent { .. } => {
                    self.post(at, request, Body::Answer(vec![(Outcome::Done, 0)]));
                }
                Body::Answer(_) => unreachable!("answers are taken before"),
            }
        }
    }

    fn on_switch(
        &mut self,
        at: &mut At<'_>,
        (request, switch): (u32, Switch),
        (named, version): (Named, Version),
    ) {
        let pair = named.pair.reversed();
        let daemon = self.daemon();
        let here = at.socket(&pair);
        let here = here.map(|socket| daemon.ruling(&pair, socket).here(false));
        let hosts = Hosts {
            own: self.host,
            peer: self.peer,
        };
        let wanted = Wanted {
            switch,
            hosts,
            refusal: None,
        };
        let conns = &mut self.daemon().conns;
        match wanted.judge(conns, (named, version), here, at.now) {
            Ok(following) => self.follow(at, request, following),
            Err(refusal) => {
                self.seen.note(match refusal {
                    Refusal::OtherSocket(_) => Seen::SocketNamed,
                    Refusal::Implausible(_) => Seen::VersionRefused,
                    Refusal::Older(_) => Seen::OlderRefused,
                    _ => Seen::SwitchRefused,
                });
                self.post(at, request, Body::Answer(vec![refusal.answer()]));
            }
        }
    }

    /// Does what comes next where the peer has switched a connection, as far as that waits for nothing.
    fn follow(&mut self, at: &mut At<'_>, request: u32, mut following: Following) {
        let (pair, switch) = (following.pair, following.switch);
        while let Some(step) = following.next() {
            let mut done = true;
            match step {
                Step::Unlock => locking::unlock_leaving(self, &pair, switch.bump),
                Step::Drain if switch.bump.is_none() => {
                    self.seen.note(match switch.ready {
                        true => Seen::GotReady,
                        false => Seen::SwitchedOut,
                    });
                    self.daemon().serving = Some(pair);
                    self.silence(at, pair, Waiter::Peer(request, following));
                    // If nothing comes of it, it is locked again.
                    self.daemon().look_at = Some(at.now + LOOK_EVERY);
                    return;
                }
                Step::Drain => self.seen.note(Seen::SwitchedIn),
                Step::Save => done = self.save(at.now),
                Step::Mark if switch.explicit => self.mark_choice(at, pair),
                Step::Mark => {
                    self.seen.note(Seen::RuleFollowed);
                    self.move_to(at, pair, switch.bump);
                    if let Some(bump) = switch.bump {
                        at.node.solicit(bump, pair);
                    }
                }
                Step::Undo => {
                    self.seen.note(Seen::Failed);
                    self.save(at.now);
                    self.put_back(at, pair, self.mark(&pair).bump);
                    self.highest.remove(&pair);
                    self.mark_choice(at, pair);
                    end_drains(at, &pair);
                }
            }
            following.handle_done(&mut self.daemon().conns, done);
        }
        self.post(at, request, Body::Answer(vec![following.answer()]));
    }

    /// Has a connection fall silent.
    pub(super) fn silence(&mut self, at: &mut At<'_>, pair: FlowKey, waiter: Waiter) {
        locking::unlock(self, &pair);
        let leaving = self.daemon().leaving.entry(pair).or_default();
        leaving.waiters.push(waiter);
        leaving.bumps.extend(CARRIED);
        let scale = at.kernel.window_scale(&pair);
        for bump in CARRIED {
            at.node.drain(at.now, bump, pair, scale);
        }
    }

    /// What a connection sent by a bump has arrived.
    pub fn on_drained(&mut self, at: &mut At<'_>, bump: BumpId, pair: FlowKey) {
        let Some(leaving) = self.daemon().leaving.get_mut(&pair) else {
            return;
        };
        leaving.bumps.remove(&bump);
        if !leaving.bumps.is_empty() {
            return;
        }
        let leaving = self.daemon().leaving.remove(&pair).expect("it is there");
        for waiter in leaving.waiters {
            self.seen.note(Seen::Drained);
            match waiter {
                Waiter::Us(mut negotiation) => {
                    negotiation.handle_done();
                    self.carry_on(at, negotiation);
                }
                Waiter::Peer(request, mut following) => {
                    self.daemon().serving = None;
                    following.handle_done(&mut self.daemon().conns, true);
                    self.follow(at, request, following);
                }
            }
        }
        self.serve(at);
        ruling::take_turns(self, at);
    }
}
