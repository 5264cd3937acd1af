//! Tasks of a daemon.

use dibs_settings::BumpId;
use dibs_switch::conns::Meant;
use dibs_switch::engine::{
    Goal, choices, knocks, locks, matches, rules, stands_on, switches, wants,
};
use dibs_switch::messages::{Body, Message, Outcome};
use dibs_switch::telling::TELL_AGAIN;

use super::host::Host;
use super::machine::Live;
use super::ruling::{Rule, Selected};
use crate::coverage::Seen;

impl Host {
    /// A user moves a connection.
    pub(super) async fn choose(&self, conn: Meant, bump: Option<BumpId>) {
        let _turn = self.turn().await;
        if !self.is_there(&conn) {
            return;
        }
        let (live, force) = (Live(conn), self.forces);
        let origin = stands_on(self, &live);
        match choices::choose(self, &[live], Goal { bump, force }, |_, _| ()).await {
            Err(_) => self.note(Seen::FailedHere),
            Ok(_) if bump != origin && bump.is_some() && origin.is_some() => {
                self.note(Seen::BumpToBump);
            }
            Ok(_) => {}
        }
    }

    /// Users have these rules from now on.
    pub(super) async fn change_rules(&self, rules: Vec<Rule>) {
        let _turn = self.turn().await;
        self.note(Seen::RulesChanged);
        let gone: Vec<Rule> = {
            let daemon = self.daemon();
            let known = daemon.rules.iter();
            let stays =
                |rule: &&Rule| rules.contains(rule) || matches!(rule.meant, Selected::One(_));
            known.filter(|rule| !stays(rule)).cloned().collect()
        };
        let gone = rules::Gone {
            rules: &gone,
            force: self.forces,
        };
        let wanted = Some(rules.clone());
        let replaced = rules::replace(self, rules, gone, &self.speaking()).await;
        let mut change_at = self.now.get();
        if replaced.is_err() {
            self.note(Seen::FailedHere);
            change_at += TELL_AGAIN;
        } else if *self.wanted.borrow() == wanted {
            self.wanted.take();
        }
        self.daemon().change_at = Some(change_at);
    }

    /// The peer has a session now, or none: rules that prefer their bump ask for it.
    pub(super) async fn follow_session(&self, answers: bool) {
        let _turn = self.turn().await;
        self.chains.borrow_mut().answers = answers;
        let prefers = self.daemon().prefers();
        if answers && prefers {
            rules::follow_ruled(self, &self.speaking()).await;
        }
    }

    /// Deals with the peer's questions, one after the other.
    pub(super) async fn serve(&self) {
        loop {
            let next = self.daemon().questions.pop_front();
            let Some(Message { request, body }) = next else {
                self.daemon().serving = false;
                return;
            };
            let outcomes = match body {
                Body::Switch { switch, conns } => switches::answer(self, 0, switch, conns).await,
                Body::Confirm { bump, conns } => locks::answer(self, 0, bump, &conns).await,
                Body::Knock(conns) => knocks::answer(self, 0, &conns).await,
                Body::Want {
                    sequence, bumps, ..
                } => vec![(wants::answer(self, 0, sequence, bumps).await, 0)],
                Body::Match(conns) => matches::answer(self, 0, &conns).await,
                // The simulator's hosts have no firewall.
                Body::Silent { .. } | Body::Measure { .. } => vec![(Outcome::Done, 0)],
                Body::Answer(_) => unreachable!("answers are taken before"),
            };
            let body = Body::Answer(outcomes);
            self.post(Message { request, body });
        }
    }
}
