//! What peers ask for: a SWITCH is carried out, or refused for what stands against it here.

use std::collections::{BTreeSet, HashMap};

use super::Marked;
use crate::conns::{Choice, Pair, Version};
use crate::daemon::{Daemon, Hand, Handed};
use crate::live::Live;
use crate::messages::{Named, Outcome, Switch};
use crate::plausible::Hosts;

/// What stood for a connection before a peer's switch.
#[derive(Clone, Copy)]
struct Before {
    choice: Option<Choice>,
    handed: Option<Handed>,
}

/// What a SWITCH asks for.
struct Wanted {
    bump: u8,
    explicit: bool,
    ready: bool,
    /// What all of it is refused with.
    refusal: Option<Outcome>,
}

/// What is answered of each connection of a SWITCH, and what moves.
#[derive(Default)]
struct Judged {
    outcomes: Vec<(Outcome, u64)>,
    /// By the place of its outcome, with where it stood before.
    moving: Vec<(usize, Pair, Version, Before)>,
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
        let (bump, explicit, ready) = (switch.bump, switch.explicit, switch.ready);
        let known = bump == 0 || self.bump(bump).is_some();
        let addresses = conns.iter().map(|(named, _)| named.pair.remote.ip());
        let fault = match self.device_fault(bump, addresses).await {
            Ok(fault) => fault,
            Err(error) => Some(format!("{error:#}")),
        };
        if let Some(why) = &fault {
            tracing::warn!("cannot follow the peer's switch: {why}");
        }
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
        let refusal = match (&fault, known) {
            (_, false) => Some(Outcome::NoBump),
            (Some(_), true) => Some(Outcome::NoDevice),
            (None, true) => None,
        };
        let wanted = Wanted {
            bump,
            explicit,
            ready,
            refusal,
        };
        let Judged {
            mut outcomes,
            moving,
            news,
        } = self.judge(peer, &wanted, conns, &lives);
        if moving.is_empty() {
            return outcomes;
        }
        let pairs: Vec<Pair> = moving.iter().map(|(_, pair, ..)| *pair).collect();
        self.unlock_leaving(&pairs, bump).await;
        if self.is_outside(bump) {
            self.silence(moving.iter().map(|(_, pair, ..)| &lives[pair]))
                .await;
        }
        if ready {
            return outcomes;
        }
        if bump != 0 {
            self.state.borrow_mut().arriving.extend(&pairs);
        }
        let prepared = async {
            self.save()?;
            self.install().await
        };
        let prepared = prepared.await;
        if !self.is_outside(bump) {
            self.expect_rates(moving.iter().map(|(_, pair, ..)| &lives[pair]));
        }
        let failed = self.mark_followed(&pairs, bump, explicit, &prepared).await;
        let reasons: BTreeSet<&str> = failed.values().map(String::as_str).collect();
        let reasons: Vec<&str> = reasons.into_iter().collect();
        // The peer asks again and again for what it was told.
        self.note(
            "follow the peer's switch",
            match reasons.is_empty() {
                true => Ok(()),
                false => Err(anyhow::anyhow!(reasons.join("; "))),
            },
        );
        let mut undone = Vec::new();
        for (index, pair, version, before) in moving {
            if failed.contains_key(&pair) {
                outcomes[index].0 = Outcome::Failed;
                undone.push((pair, version, before));
            } else {
                self.wake(&lives[&pair], bump);
            }
        }
        if !undone.is_empty() {
            self.undo(undone, explicit).await;
        }
        {
            let mut state = self.state.borrow_mut();
            pairs.iter().for_each(|pair| {
                state.arriving.remove(pair);
            });
        }
        self.confirmations_due.notify_one();
        let name = self.peer_name(peer).to_owned();
        let bump = self.bump_name(bump).to_owned();
        self.tell_of_conns(
            news.into_iter(),
            "switched",
            |count| format!("peer {name} moved {count} connection(s) to {bump}"),
            &[("peer", name.clone()), ("bump", bump.clone())],
        );
        outcomes
    }

    /// Which connections of a SWITCH may move, and what is answered of each; what moves is not marked yet.
    fn judge(
        &self,
        peer: usize,
        wanted: &Wanted,
        conns: Vec<(Named, Version)>,
        lives: &HashMap<Pair, Live>,
    ) -> Judged {
        let Wanted {
            bump,
            explicit,
            ready,
            refusal,
        } = *wanted;
        let mut judged = Judged::default();
        for (named, version) in conns {
            let pair = named.pair.reversed();
            let live = lives.get(&pair).filter(|live| live.peer == peer);
            let before = live.map(|live| self.stands(live));
            let verdict = match (live, refusal) {
                (None, _) => Err((Outcome::NoConnection, 0)),
                (Some(live), _) if live.socket != named.socket => {
                    Err((Outcome::OtherSocket, live.socket.0.into()))
                }
                (Some(_), Some(refusal)) => Err((refusal, 0)),
                (Some(live), None) if live.bound && bump != 0 => Err((Outcome::Bound, 0)),
                (Some(live), None) => self.take_switch(live, bump, explicit, ready, version),
            };
            judged.outcomes.push(match verdict {
                Ok(is_new) => {
                    if is_new {
                        judged.news.extend(lives.get(&pair).map(|live| live.uid));
                    }
                    let before = before.expect("there is such a connection");
                    let index = judged.outcomes.len();
                    judged.moving.push((index, pair, version, before));
                    (Outcome::Done, version.generation)
                }
                Err(refused) => {
                    if explicit && refused.0 == Outcome::Older {
                        self.tell_later(pair);
                    }
                    refused
                }
            });
        }
        judged
    }

    /// Sets the marks of connections that follow a peer, if all was `prepared`; why that failed, where it did.
    async fn mark_followed(
        &self,
        pairs: &[Pair],
        bump: u8,
        explicit: bool,
        prepared: &anyhow::Result<()>,
    ) -> HashMap<Pair, String> {
        match prepared {
            Ok(()) if explicit => {
                let failed = self.mark_choices(pairs).await.into_iter();
                failed
                    .map(|(pair, error)| (pair, error.to_string()))
                    .collect()
            }
            Ok(()) => {
                let marked = self.mark_moved(pairs, bump).await;
                let fault =
                    |(pair, marked): (&Pair, Marked)| Some((*pair, marked.err()?.to_string()));
                pairs.iter().zip(marked).filter_map(fault).collect()
            }
            Err(error) => { pairs.iter() }
                .map(|pair| (*pair, format!("{error:#}")))
                .collect(),
        }
    }

    fn stands(&self, live: &Live) -> Before {
        let state = self.state.borrow();
        Before {
            choice: state.choices.of(&live.pair, live.socket),
            handed: state.handed.get(&live.pair).copied(),
        }
    }

    /// Puts connections back to where they were whose switches could not be carried out: the peer takes its
    /// choices back, and neither is to come up later.
    async fn undo(&self, failed: Vec<(Pair, Version, Before)>, explicit: bool) {
        let pairs: Vec<Pair> = {
            let mut state = self.state.borrow_mut();
            let undone = failed.into_iter().filter(|(pair, version, before)| {
                if explicit {
                    // Otherwise it falls silent, or moves, for the one that stands by now.
                    return state.choices.refuse(pair, *version, before.choice);
                }
                match before.handed {
                    Some(handed) => state.handed.insert(*pair, handed),
                    None => state.handed.remove(pair),
                };
                true
            });
            undone.map(|(pair, ..)| pair).collect()
        };
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
        }
        // The kernel has not taken the new marks: what it has says where they were.
        match self.bumps_of(&pairs).await {
            Ok(back) => self.put_back(back).await,
            Err(error) => tracing::warn!("{error}"),
        }
        for error in self.mark_choices(&pairs).await.values() {
            tracing::warn!("{error}");
        }
        pairs.iter().for_each(|pair| self.end_drains(pair));
    }

    /// Notes a peer's wish for one connection if it is to be carried out, unless the peer only asks
    /// whether it would be: then whether it is news.
    fn take_switch(
        &self,
        live: &Live,
        bump: u8,
        explicit: bool,
        ready: bool,
        version: Version,
    ) -> Result<bool, (Outcome, u64)> {
        let hosts = Hosts {
            own: self.host,
            peer: crate::host_id(&self.config.peers[live.peer].public_key),
        };
        let mut state = self.state.borrow_mut();
        if let Err(why) = { &state.choices }.check(&live.pair, live.socket, version, hosts) {
            state.refused.note(why);
            return Err((Outcome::Failed, 0));
        }
        let ruled = state.ruling(live).filter(|_| bump == 0);
        let own = state.requirement(live).or(ruled);
        let own = own.map(|rule| rule.bump_id().get());
        if let Some(own) = own.filter(|own| *own != bump) {
            return Err((Outcome::OwnRule, own.into()));
        }
        let before = state.choices.of(&live.pair, live.socket);
        if !explicit {
            if let Some(choice) = before {
                return Err((Outcome::Older, choice.version.generation));
            }
            let was = state.handed.get(&live.pair).map_or(0, |known| known.bump);
            if ready {
                return Ok(false);
            }
            if bump == 0 {
                state.handed.remove(&live.pair);
            } else if was != bump {
                let by = Hand::Peer;
                state.handed.insert(live.pair, Handed { bump, by });
            }
            return Ok(was != bump);
        }
        if ready {
            return match before {
                Some(known) if known.version > version => {
                    Err((Outcome::Older, known.version.generation))
                }
                _ => Ok(false),
            };
        }
        match { &mut state.choices }.accept(live.pair, live.socket, bump, version) {
            Ok(()) => Ok(before.is_none_or(|before| before.bump != bump)),
            Err(known) => Err((Outcome::Older, known.version.generation)),
        }
    }
}
