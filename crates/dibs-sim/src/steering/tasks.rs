//! Tasks of a daemon.

use std::rc::Rc;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_switch::conns::Meant;
use dibs_switch::engine::{Goal, Machine as _, choices, matches, rules, stands_on, tells};
use dibs_switch::messages::Ground;
use dibs_switch::telling::TELL_AGAIN;

use super::host::Host;
use super::machine::Live;
use super::ruling::{Rule, are_turned};
use crate::coverage::Seen;

/// Time between looks at rules that nobody needs any more.
const SWEEP: Duration = Duration::from_secs(2);

impl Host {
    /// A user moves a connection.
    pub(super) async fn choose(&self, conn: Meant, bump: Option<BumpId>) {
        let _turn = self.turn().await;
        let is_strange = || self.peer_of(&conn.pair).is_none();
        if bump.is_some() && is_strange() && self.socket(&conn.pair) == Some(conn.socket) {
            matches::seek(self, 0, &[conn.pair.sport].into()).await;
            if !is_strange() {
                self.note(Seen::Sought);
            }
        }
        if !self.is_there(&conn) {
            return;
        }
        let (live, ground) = (Live(conn), Ground::forced(self.forces));
        // What a user chooses is later than what another program chose before.
        let taken = self.taken(&self.chains.borrow(), &conn.pair);
        if let Some(bump) = taken {
            let conns = &mut self.daemon().conns;
            conns.update(&conn.pair, |conn| conn.place.move_to_chosen(bump));
        }
        let origin = stands_on(self, &live);
        match choices::choose(self, &[live], Goal { bump, ground }, |_, _| ()).await {
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
        let known = self
            .daemon()
            .rules
            .iter()
            .filter(|rule| !rule.is_of_one())
            .cloned()
            .collect::<Vec<_>>();
        let turned = are_turned(&rules, &known);
        let gone: Vec<Rule> = { known.into_iter() }
            .filter(|rule| rule.holds && !rules.contains(rule))
            .collect();
        let gone = rules::Gone {
            rules: &gone,
            force: self.forces && !turned,
        };
        let (wanted, lives) = (Some(rules.clone()), self.speaking());
        let replaced = if turned {
            self.note(Seen::RulesTurned);
            let turned = rules::turn(self, rules, gone, &lives).await;
            // The next daemon looks at the time, too.
            let file = &mut *self.file.borrow_mut();
            file.rules.clone_from(&self.daemon().rules);
            turned
        } else {
            self.note(Seen::RulesChanged);
            rules::replace(self, rules, gone, &lives).await
        };
        let mut change_at = self.now.get();
        if replaced.is_err() {
            self.note(Seen::FailedHere);
            change_at += TELL_AGAIN;
        } else if *self.wanted.borrow() == wanted {
            self.wanted.take();
        }
        self.daemon().change_at = Some(change_at);
    }

    /// Deals with the peer's questions, one after the other.
    pub(super) async fn serve(self: &Rc<Self>) {
        loop {
            let questions = self.until(|| self.daemon().questions.take()).await;
            for answer in questions.answer(self, 0).await {
                self.post(answer);
            }
        }
    }

    /// Brings rules of single connections up to date.
    pub(super) async fn keep_pinned(&self) {
        loop {
            self.sleep(SWEEP).await;
            self.kernel_mut().pinned = self.daemon().conns.pins();
        }
    }

    /// Tells the peer all that concerns it, whenever a session is new.
    pub(super) async fn greet(&self) {
        loop {
            let is_new = || std::mem::take(&mut self.daemon().is_new).then_some(());
            self.until(is_new).await;
            tells::resync(self, 0).await;
        }
    }
}
