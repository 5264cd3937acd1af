//! What peers ask for: a SWITCH is carried out, or refused for what stands against it here.

use std::collections::{BTreeSet, HashMap};

use super::marking::{MarkError, warn_of};
use crate::clock::now;
use crate::daemon::{Daemon, State};
use crate::live::Live;
use crate::wakers::Task;
use dibs_switch::answering::{Following, Refusal, Wanted};
use dibs_switch::conns::{Pair, Version};
use dibs_switch::messages::{Named, Outcome, Switch};
use dibs_switch::plausible::Hosts;

/// What is answered of each connection of a SWITCH, and what moves.
#[derive(Default)]
struct Judged {
    outcomes: Vec<(Outcome, u64)>,
    /// By the place of its outcome.
    moving: Vec<(usize, Following)>,
    /// Owners of those of which nobody knew.
    news: Vec<Option<u32>>,
}

impl Daemon {
    /// Carries out a SWITCH of a peer.
    pub(crate) async fn on_switch(
        &self,
        peer: usize,
        switch: Switch,
        conns: Vec<(Named, Version)>,
    ) -> Vec<(Outcome, u64)> {
        let bump = switch.bump;
        let wanted = self.wanted(peer, switch, &conns).await;
        let meant: Vec<Pair> = conns
            .iter()
            .map(|(named, _)| named.pair.reversed())
            .collect();
        let lives = match self.sockets_of(&meant).await {
            Ok(lives) => lives,
            Err(error) => {
                tracing::warn!("{error}");
                return vec![(Outcome::Failed, 0); conns.len()];
            }
        };
        let Judged {
            mut outcomes,
            moving,
            news,
        } = self.judge(peer, &wanted, conns, &lives);
        if moving.is_empty() {
            return outcomes;
        }
        let pairs: Vec<Pair> = moving.iter().map(|(_, following)| following.pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        if self.bumps.is_outside(bump) {
            self.silence(pairs.iter().map(|pair| &lives[pair])).await;
        }
        if switch.ready {
            return outcomes;
        }
        if bump != 0 {
            self.update_each(&pairs, |conn| conn.arriving = true);
        }
        let prepared = async {
            self.save()?;
            self.install().await
        };
        let prepared = prepared.await;
        if !self.bumps.is_outside(bump) {
            self.expect_rates(pairs.iter().map(|pair| &lives[pair]));
        }
        let failed = self.mark_followed(&pairs, switch, prepared).await;
        let reasons: BTreeSet<&str> = failed.values().map(String::as_str).collect();
        let reasons: Vec<&str> = reasons.into_iter().collect();
        // The peer asks again and again for what it was told.
        self.events.note(
            "follow the peer's switch",
            match reasons.is_empty() {
                true => Ok(()),
                false => Err(anyhow::anyhow!(reasons.join("; "))),
            },
        );
        let mut undone = Vec::new();
        for (index, following) in moving {
            let pair = following.pair;
            let carried_out = !failed.contains_key(&pair);
            outcomes[index] = following.answer(carried_out);
            match carried_out {
                true => self.wake(&lives[&pair], bump),
                false => undone.push(following),
            }
        }
        if !undone.is_empty() {
            self.undo(&undone).await;
        }
        self.update_each(&pairs, |conn| conn.arriving = false);
        self.wakers.wake(Task::Confirm);
        let name = self.peer_name(peer).to_owned();
        let bump = self.bumps.name_of(bump).to_owned();
        self.events.tell_of_conns(
            news.into_iter(),
            "switched",
            |count| format!("peer {name} moved {count} connection(s) to {bump}"),
            &[("peer", name.clone()), ("bump", bump.clone())],
        );
        outcomes
    }

    /// What a peer wants by a SWITCH, and what all of it is refused with.
    async fn wanted(&self, peer: usize, switch: Switch, conns: &[(Named, Version)]) -> Wanted {
        let bump = switch.bump;
        let known = bump == 0 || self.bumps.get(bump).is_some();
        let addresses = conns.iter().map(|(named, _)| named.pair.remote.ip());
        let fault = match self.device_fault(bump, addresses).await {
            Ok(fault) => fault,
            Err(error) => Some(format!("{error:#}")),
        };
        if let Some(why) = &fault {
            tracing::warn!("cannot follow the peer's switch: {why}");
        }
        let refusal = match (fault, known) {
            (_, false) => Some(Refusal::NoBump),
            (Some(_), true) => Some(Refusal::NoDevice),
            (None, true) => None,
        };
        let hosts = Hosts {
            own: self.host,
            peer: crate::host_id(&self.config.peers[peer].public_key),
        };
        Wanted {
            switch,
            hosts,
            refusal,
        }
    }

    /// Which connections of a SWITCH may move, and what is answered of each; what moves is not marked yet.
    fn judge(
        &self,
        peer: usize,
        wanted: &Wanted,
        conns: Vec<(Named, Version)>,
        lives: &HashMap<Pair, Live>,
    ) -> Judged {
        let mut judged = Judged::default();
        let mut state = self.state.borrow_mut();
        for (named, version) in conns {
            let pair = named.pair.reversed();
            let live = lives.get(&pair).filter(|live| live.peer == peer);
            let here = live.map(|live| state.here(live));
            let State { conns, refused, .. } = &mut *state;
            let answer = match wanted.judge(conns, (named, version), here) {
                Ok(following) => {
                    if following.is_new {
                        judged.news.extend(live.map(|live| live.uid));
                    }
                    judged.moving.push((judged.outcomes.len(), following));
                    following.answer(true)
                }
                Err(refusal) => {
                    match refusal {
                        Refusal::Implausible(why) => refused.note(why),
                        Refusal::Older(_) if wanted.switch.explicit => {
                            conns.tell_later(&pair, now());
                            self.wakers.wake(Task::Tell);
                        }
                        _ => {}
                    }
                    refusal.answer()
                }
            };
            judged.outcomes.push(answer);
        }
        judged
    }

    /// Sets the marks of connections that follow a peer, if all was `prepared`; why that failed, where it did.
    async fn mark_followed(
        &self,
        pairs: &[Pair],
        switch: Switch,
        prepared: anyhow::Result<()>,
    ) -> HashMap<Pair, String> {
        if let Err(error) = prepared {
            let why = |pair: &Pair| (*pair, format!("{error:#}"));
            return pairs.iter().map(why).collect();
        }
        let failed = match switch.explicit {
            true => self.mark_choices(pairs).await,
            false => self.mark_moved(pairs, switch.bump).await,
        };
        let why = |(pair, error): (Pair, MarkError)| (pair, error.to_string());
        failed.into_iter().map(why).collect()
    }

    /// Puts connections back to where they were whose switches could not be carried out.
    async fn undo(&self, failed: &[Following]) {
        let pairs: Vec<Pair> = {
            let conns = &mut self.state.borrow_mut().conns;
            let undone = failed.iter().filter(|following| following.undo(conns));
            undone.map(|following| following.pair).collect()
        };
        self.save_or_warn();
        // The kernel has not taken the new marks: what it has says where they were.
        match self.bumps_of(&pairs).await {
            Ok(back) => self.put_back(back).await,
            Err(error) => tracing::warn!("{error}"),
        }
        warn_of(&self.mark_choices(&pairs).await);
        pairs.iter().for_each(|pair| self.end_drains(pair));
    }
}
