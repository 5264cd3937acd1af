//! What peers ask for: a SWITCH is carried out, or refused for what stands against it here.

use std::collections::{BTreeSet, HashMap};

use dibs_switch::answering::{Following, Refusal, Wanted};
use dibs_switch::conns::{Pair, Version};
use dibs_switch::messages::{Named, Outcome, Switch};
use dibs_switch::plausible::Hosts;

use crate::clock::now;
use crate::daemon::{Daemon, State};
use crate::live::Live;
use crate::log::or_warn;
use crate::marking::{MarkError, warn_of};
use crate::wakers::Task;
use crate::{connections, devices, locking, marking, reconcile, recovery};

/// What is answered of each connection of a SWITCH, and what moves.
#[derive(Default)]
struct Judged {
    outcomes: Vec<(Outcome, u64)>,
    /// By the place of its outcome.
    moving: Vec<(usize, Following)>,
    /// Owners of those of which nobody knew.
    news: Vec<Option<u32>>,
}

/// Carries out a SWITCH of a peer.
pub(crate) async fn on_switch(
    daemon: &Daemon,
    peer: usize,
    switch: Switch,
    conns: Vec<(Named, Version)>,
) -> Vec<(Outcome, u64)> {
    let bump = switch.bump;
    let wanted = wanted(daemon, peer, switch, &conns).await;
    let meant: Vec<Pair> = conns
        .iter()
        .map(|(named, _)| named.pair.reversed())
        .collect();
    let lives = match connections::sockets_of(daemon, &meant).await {
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
    } = judge(daemon, peer, &wanted, conns, &lives);
    if moving.is_empty() {
        return outcomes;
    }
    let pairs: Vec<Pair> = moving.iter().map(|(_, following)| following.pair).collect();
    locking::unlock_leaving(daemon, &pairs, bump).await;
    if daemon.bumps.is_outside(bump) {
        marking::silence(daemon, pairs.iter().map(|pair| &lives[pair])).await;
    }
    if switch.ready {
        return outcomes;
    }
    if bump != 0 {
        daemon.update_each(&pairs, |conn| conn.arriving = true);
    }
    let prepared = async {
        daemon.save()?;
        reconcile::install(daemon).await
    };
    let prepared = prepared.await;
    if !daemon.bumps.is_outside(bump) {
        marking::expect_rates(daemon, pairs.iter().map(|pair| &lives[pair]));
    }
    let failed = mark_followed(daemon, &pairs, switch, prepared).await;
    let reasons: BTreeSet<&str> = failed.values().map(String::as_str).collect();
    let reasons: Vec<&str> = reasons.into_iter().collect();
    // The peer asks again and again for what it was told.
    daemon.events.note(
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
            true => recovery::wake(daemon, &lives[&pair], bump),
            false => undone.push(following),
        }
    }
    if !undone.is_empty() {
        undo(daemon, &undone).await;
    }
    daemon.update_each(&pairs, |conn| conn.arriving = false);
    daemon.wakers.wake(Task::Confirm);
    let name = daemon.peer_name(peer).to_owned();
    let bump = daemon.bumps.name_of(bump).to_owned();
    daemon.events.tell_of_conns(
        news.into_iter(),
        "switched",
        |count| format!("peer {name} moved {count} connection(s) to {bump}"),
        &[("peer", name.clone()), ("bump", bump.clone())],
    );
    outcomes
}

/// What a peer wants by a SWITCH, and what all of it is refused with.
async fn wanted(
    daemon: &Daemon,
    peer: usize,
    switch: Switch,
    conns: &[(Named, Version)],
) -> Wanted {
    let bump = switch.bump;
    let known = bump == 0 || daemon.bumps.get(bump).is_some();
    let addresses = conns.iter().map(|(named, _)| named.pair.remote.ip());
    let fault = match devices::device_fault(daemon, bump, addresses).await {
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
        own: daemon.host_id,
        peer: crate::terms::host_id(&daemon.config.peers[peer].public_key),
    };
    Wanted {
        switch,
        hosts,
        refusal,
    }
}

/// Which connections of a SWITCH may move, and what is answered of each; what moves is not marked yet.
fn judge(
    daemon: &Daemon,
    peer: usize,
    wanted: &Wanted,
    conns: Vec<(Named, Version)>,
    lives: &HashMap<Pair, Live>,
) -> Judged {
    let mut judged = Judged::default();
    let mut state = daemon.state.borrow_mut();
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
                        daemon.wakers.wake(Task::Tell);
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
    daemon: &Daemon,
    pairs: &[Pair],
    switch: Switch,
    prepared: anyhow::Result<()>,
) -> HashMap<Pair, String> {
    if let Err(error) = prepared {
        let why = |pair: &Pair| (*pair, format!("{error:#}"));
        return pairs.iter().map(why).collect();
    }
    let failed = match switch.explicit {
        true => marking::mark_choices(daemon, pairs).await,
        false => marking::mark_moved(daemon, pairs, switch.bump).await,
    };
    let why = |(pair, error): (Pair, MarkError)| (pair, error.to_string());
    failed.into_iter().map(why).collect()
}

/// Puts connections back to where they were whose switches could not be carried out.
async fn undo(daemon: &Daemon, failed: &[Following]) {
    let pairs: Vec<Pair> = {
        let conns = &mut daemon.state.borrow_mut().conns;
        let undone = failed.iter().filter(|following| following.undo(conns));
        undone.map(|following| following.pair).collect()
    };
    daemon.save_or_warn();
    // The kernel has not taken the new marks: what it has says where they were.
    if let Some(back) = or_warn(locking::bumps_of(daemon, &pairs).await) {
        marking::put_back(daemon, back).await;
    }
    warn_of(&marking::mark_choices(daemon, &pairs).await);
    pairs
        .iter()
        .for_each(|pair| marking::end_drains(daemon, pair));
}
