//! What stands beside single choices: what rules want, and what other programs did to marks.

use std::collections::BTreeMap;

use crate::daemon::Daemon;
use crate::live::Live;
use crate::rules::Rule;
use crate::state_file::SavedRule;
use crate::switching::Progress;
use crate::wakers::Task;
use crate::wants;
use dibs_switch::marks::Hand;

impl Daemon {
    /// Has these rules, and of them those that users made, take the place of all there are. Connections follow them; those
    /// of rules that are `gone` and that nothing else keeps go back to plain.
    ///
    /// # Errors
    /// The kernel does not take them, or they cannot be saved: what was there before stands again.
    pub(crate) async fn replace_rules(
        &self,
        (rules, user_rules): (Vec<Rule>, Vec<SavedRule>),
        gone: &[Rule],
        lives: &[Live],
    ) -> anyhow::Result<()> {
        let put = |rules, user_rules| {
            let mut state = self.state.borrow_mut();
            let before = std::mem::replace(&mut state.rules, rules);
            state.rules.sort_by_key(Rule::order);
            (before, std::mem::replace(&mut state.user_rules, user_rules))
        };
        let before = put(rules, user_rules);
        // Peers first: what comes to them by a bump finds it there.
        wants::send_all(self).await;
        let carried_out = async {
            self.save()?;
            self.steer().await
        };
        if let Err(error) = carried_out.await {
            put(before.0, before.1);
            // Or the next start would find them in the file.
            self.save_or_warn();
            // Some of it may be in the kernel.
            if let Err(error) = self.steer().await {
                tracing::warn!("cannot take back what rules were to be: {error:#}");
            }
            wants::send_all(self).await;
            return Err(error);
        }
        self.follow_changed_rules(gone, lives).await;
        self.wakers.wake(Task::Hours);
        self.wakers.wake(Task::Sessions);
        Ok(())
    }

    /// Has connections follow the rules as they are by now; of those that held and are `gone`, back to plain.
    pub(crate) async fn follow_changed_rules(&self, gone: &[Rule], lives: &[Live]) {
        self.enforce(lives).await;
        for rule in gone {
            let freed = self.freed(rule, lives);
            self.follow_rules(&freed, 0).await;
        }
        for (bump, lives) in self.ruled(lives) {
            self.follow_rules(&lives, bump).await;
        }
    }

    /// Where a choice stands against what a rule requires, chooses that: the peer would not follow the
    /// rule against the choice.
    pub(crate) async fn enforce(&self, lives: &[Live]) {
        let required = by_bump(lives, |live| {
            let state = self.state.borrow();
            let bump = state.requirement(live)?.bump_id().get();
            let choice = state.conns.get(&live.pair).choice.of(live.socket)?;
            (choice.bump != bump).then_some(bump)
        });
        for (bump, lives) in required {
            match self.choose(&lives, bump, &Progress::default()).await {
                // What the peer refuses is blocked by the rule.
                Ok(moved) => moved
                    .into_iter()
                    .filter_map(|(_, outcome)| outcome.err())
                    .for_each(|why| tracing::warn!("a required connection waits: {why}")),
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
    }

    /// The connections that are on a bump by the hand of another program here.
    pub(crate) fn followed_here(&self, lives: &[Live]) -> BTreeMap<u8, Vec<Live>> {
        by_bump(lives, |live| {
            let handed = self.state.borrow().conns.get(&live.pair).handed()?;
            (handed.by == Hand::Other).then_some(handed.bump)
        })
    }

    /// The connections that rules decide over, by the bump of the first rule that matches.
    pub(crate) fn ruled(&self, lives: &[Live]) -> BTreeMap<u8, Vec<Live>> {
        by_bump(lives, |live| {
            let state = self.state.borrow();
            let chosen = state.conns.get(&live.pair).choice.of(live.socket);
            state.ruled_bump(live).filter(|_| chosen.is_none())
        })
    }
}

/// Those of these connections that go on, by the bump that each is meant to be on, if any.
fn by_bump(lives: &[Live], bump: impl Fn(&Live) -> Option<u8>) -> BTreeMap<u8, Vec<Live>> {
    let mut meant: BTreeMap<u8, Vec<Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.over) {
        if let Some(bump) = bump(live) {
            meant.entry(bump).or_default().push(*live);
        }
    }
    meant
}
