//! What peers ask for: a SWITCH is carried out, or refused for what stands against it here.

use std::collections::{BTreeSet, HashMap, HashSet};

use dibs_switch::answering::{Following, Refusal, Step, Wanted};
use dibs_switch::conns::Version;
use dibs_switch::conns::host_id;
use dibs_switch::messages::{Named, Outcome, Switch};
use dibs_switch::plausible::Hosts;
use dibs_wire::FlowKey;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::live::Live;
use crate::marking::all_of;
use crate::wakers::Task;
use crate::{connections, devices, locking, marking, reconcile, recovery};

/// Whether a connection follows.
type Judged = Result<Following, Refusal>;

/// Carries out a SWITCH of a peer.
pub(crate) async fn on_switch(
    daemon: &Daemon,
    peer: usize,
    switch: Switch,
    conns: Vec<(Named, Version)>,
) -> Vec<(Outcome, u64)> {
    let bump = switch.bump;
    let wanted = wanted(daemon, peer, switch, &conns).await;
    let meant: Vec<FlowKey> = conns
        .iter()
        .map(|(named, _)| named.pair.reversed())
        .collect();
    let lives = match connections::sockets_of(daemon, &meant).await {
        Ok(lives) => lives,
        Err(error) => {
            daemon.warn_of_peer(peer, &error.to_string());
            return vec![(Outcome::Failed, 0); conns.len()];
        }
    };
    let mut judged = judge(daemon, peer, &wanted, conns, &lives);
    let carried_out = carry_out(daemon, peer, &mut judged, switch, &lives).await;
    let outcomes = { judged.iter() }
        .map(|one| one.map_or_else(Refusal::answer, |following| following.answer()));
    let outcomes = outcomes.collect();
    if switch.ready || judged.iter().all(Result::is_err) {
        return outcomes;
    }
    // The peer asks again and again for what it was told.
    if let Err(error) = carried_out {
        daemon.warn_of_peer(peer, &format!("cannot follow its switch: {error:#}"));
    }
    daemon.wakers.wake(Task::Confirm);
    let name = daemon.peer_name(peer).to_owned();
    let bump = daemon.bumps.name_of(bump).to_owned();
    let news = judged.iter().flatten().filter(|following| following.is_new);
    daemon.events.tell_of_conns(
        news.map(|following| lives[&following.pair].uid),
        "switched",
        |count| format!("peer {name} moved {count} connection(s) to {bump}"),
        &[("peer", name.clone()), ("bump", bump.clone())],
    );
    outcomes
}

/// Has those connections follow that may, all of one SWITCH: so they take the same steps together.
async fn carry_out(
    daemon: &Daemon,
    peer: usize,
    judged: &mut [Judged],
    switch: Switch,
    lives: &HashMap<FlowKey, Live>,
) -> anyhow::Result<()> {
    let (bump, mut reasons) = (switch.bump, BTreeSet::new());
    let is_outside = daemon.bumps.is_outside(bump);
    let mut moving: Vec<&mut Following> = judged.iter_mut().flatten().collect();
    while let Some(step) = moving.first().and_then(|following| following.next()) {
        let pairs: Vec<FlowKey> = moving.iter().map(|following| following.pair).collect();
        let meant = pairs.iter().map(|pair| &lives[pair]);
        let mut failed: HashSet<FlowKey> = HashSet::new();
        match step {
            Step::Unlock => locking::unlock_leaving(daemon, &pairs, bump).await,
            Step::Drain if is_outside => marking::silence(daemon, meant).await,
            Step::Drain => {}
            Step::Save => {
                let saved = async {
                    daemon.save()?;
                    reconcile::install(daemon).await
                };
                if let Err(error) = saved.await {
                    reasons.insert(format!("{error:#}"));
                    failed.extend(&pairs);
                }
                if !is_outside {
                    marking::expect_rates(daemon, meant);
                }
            }
            Step::Mark => {
                let faults = match switch.explicit {
                    true => marking::mark_choices(daemon, &pairs).await,
                    false => marking::mark_moved(daemon, &pairs, bump).await,
                };
                reasons.extend(faults.values().map(ToString::to_string));
                failed.extend(faults.into_keys());
                let marked = meant.filter(|live| !failed.contains(&live.pair));
                marked.for_each(|live| recovery::wake(daemon, live, bump));
            }
            Step::Undo => undo(daemon, peer, &pairs).await,
        }
        let conns = &mut daemon.state.borrow_mut().conns;
        moving.retain_mut(|following| {
            following.handle_done(conns, !failed.contains(&following.pair));
            following.next().is_some()
        });
    }
    let reasons = Vec::from_iter(reasons).join("; ");
    anyhow::ensure!(reasons.is_empty(), reasons);
    Ok(())
}

/// What a peer wants by a SWITCH, and what all of it is refused with.
async fn wanted(
    daemon: &Daemon,
    peer: usize,
    switch: Switch,
    conns: &[(Named, Version)],
) -> Wanted {
    let bump = switch.bump;
    let known = bump.is_none_or(|bump| daemon.bumps.get(bump).is_some());
    let addresses = conns.iter().map(|(named, _)| named.pair.dst);
    let fault = match devices::device_fault(daemon, bump, addresses).await {
        Ok(fault) => fault,
        Err(error) => Some(format!("{error:#}")),
    };
    if let Some(why) = &fault {
        daemon.warn_of_peer(peer, &format!("cannot follow its switch: {why}"));
    }
    let refusal = match (fault, known) {
        (_, false) => Some(Refusal::NoBump),
        (Some(_), true) => Some(Refusal::NoDevice),
        (None, true) => None,
    };
    let hosts = Hosts {
        own: daemon.host_id,
        peer: host_id(daemon.config.peers[peer].public_key.as_bytes()),
    };
    Wanted {
        switch,
        hosts,
        refusal,
    }
}

/// Which connections of a SWITCH may move; they are not marked yet.
fn judge(
    daemon: &Daemon,
    peer: usize,
    wanted: &Wanted,
    conns: Vec<(Named, Version)>,
    lives: &HashMap<FlowKey, Live>,
) -> Vec<Judged> {
    let mut state = daemon.state.borrow_mut();
    let judge = |(named, version): (Named, Version)| {
        let live = lives.get(&named.pair.reversed());
        let live = live.filter(|live| live.peer == peer);
        let here = live.map(|live| state.ruling(live).here(live.bound));
        let judged = wanted.judge(&mut state.conns, (named, version), here, now());
        match judged {
            Err(Refusal::Implausible(why)) => state.refused.note(why),
            Err(Refusal::Older(_)) => daemon.wakers.wake(Task::Tell),
            _ => {}
        }
        judged
    };
    conns.into_iter().map(judge).collect()
}

/// Puts connections back to where they were whose switches could not be carried out.
async fn undo(daemon: &Daemon, peer: usize, pairs: &[FlowKey]) {
    daemon.save_or_warn();
    // The kernel has not taken the new marks: what it has says where they were.
    match locking::bumps_of(daemon, pairs).await {
        Ok(back) => marking::put_back(daemon, back).await,
        Err(error) => daemon.warn_of_peer(peer, &error.to_string()),
    }
    if let Err(error) = all_of(marking::mark_choices(daemon, pairs).await) {
        daemon.warn_of_peer(peer, &error.to_string());
    }
    pairs
        .iter()
        .for_each(|pair| marking::end_drains(daemon, pair));
}
