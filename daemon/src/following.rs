//! What stands beside single choices: what rules require, and what other programs did to marks.

use std::collections::BTreeMap;

use crate::daemon::{Daemon, Hand};
use crate::live::Live;
use crate::switching::Progress;

impl Daemon {
    /// Where a choice stands against what a rule requires, chooses that: the peer would not follow the
    /// rule against the choice.
    pub(crate) async fn enforce(&self, lives: &[Live], peer: Option<usize>) {
        let mut required: BTreeMap<u8, Vec<Live>> = BTreeMap::new();
        {
            let state = self.state.borrow();
            for live in lives.iter().filter(|live| !live.over) {
                let meant = peer.is_none_or(|peer| live.peer == peer);
                if let Some(rule) = state.requirement(live).filter(|_| meant)
                    && let Some(choice) = state.choices.of(&live.pair, live.socket)
                    && choice.bump != rule.bump_id().get()
                {
                    let bump = rule.bump_id().get();
                    required.entry(bump).or_default().push(*live);
                }
            }
        }
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

    /// The connections of a peer that are on a bump by the hand of another program here.
    pub(crate) fn followed_here(&self, lives: &[Live], peer: usize) -> BTreeMap<u8, Vec<Live>> {
        let state = self.state.borrow();
        let mut followed: BTreeMap<u8, Vec<Live>> = BTreeMap::new();
        for live in lives.iter().filter(|live| live.peer == peer && !live.over) {
            if let Some(known) = state.handed.get(&live.pair).filter(|f| f.by == Hand::Other) {
                followed.entry(known.bump).or_default().push(*live);
            }
        }
        followed
    }
}
