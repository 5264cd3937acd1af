//! SWITCHes of peers, which are carried out, or refused for what stands against them here; and what rules of a peer imply.

use dibs_wire::FlowKey;
use std::collections::BTreeSet;

use dibs_settings::BumpId;

use super::{
    Failed, Found, Live as _, Machine, Mark, News, Task, or_warn, shadows, stands_on, update,
    warn_of,
};
use crate::answering::{Following, Here, Refusal, Step, Wanted};
use crate::conns::Version;
use crate::marks::Hand;
use crate::messages::{Named, Outcome, Switch};

/// A verdict on whether a connection follows.
type Judged = Result<Following, Refusal>;

/// Carries out a SWITCH of a peer; returns what it is answered.
pub async fn answer<M: Machine>(
    m: &M,
    peer: usize,
    switch: Switch,
    conns: Vec<(Named, Version)>,
) -> Vec<(Outcome, u64)> {
    let bump = switch.bump;
    let meant: Vec<FlowKey> = { conns.iter() }
        .map(|(named, _)| named.pair.reversed())
        .collect();
    let wanted = Wanted {
        switch,
        hosts: m.hosts(peer),
        refusal: m.unfit(peer, bump, &meant).await,
    };
    let lives = match m.find(&meant).await {
        Ok(lives) => lives,
        Err(fault) => {
            tell_of(m, peer, &fault.to_string());
            return vec![(Outcome::Failed, 0); conns.len()];
        }
    };
    let mut judged = judge(m, peer, &wanted, conns, &lives);
    let carried_out = carry_out(m, peer, &mut judged, switch, &lives).await;
    let outcomes = { judged.iter() }
        .map(|one| one.map_or_else(Refusal::answer, |following| following.answer()));
    let outcomes = outcomes.collect();
    if switch.ready || judged.iter().all(Result::is_err) {
        return outcomes;
    }
    // The peer asks again and again for what it was told.
    if let Err(why) = carried_out {
        tell_of(
            m,
            peer,
            &format!("cannot move connections as it asked: {why}"),
        );
    }
    m.wake(Task::Confirm);
    let news = judged.iter().flatten().filter(|following| following.is_new);
    let conns: Vec<M::Live> = news.map(|following| lives[&following.pair]).collect();
    if !conns.is_empty() {
        let conns = &conns;
        m.tell(News::Switched { peer, bump, conns });
    }
    outcomes
}

fn tell_of<M: Machine>(m: &M, peer: usize, why: &str) {
    m.tell(News::Peer { peer, why });
}

/// Finds out which connections of a SWITCH may move; they are not marked yet.
fn judge<M: Machine>(
    m: &M,
    peer: usize,
    wanted: &Wanted,
    conns: Vec<(Named, Version)>,
    lives: &Found<M>,
) -> Vec<Judged> {
    let judge = |(named, version): (Named, Version)| {
        let live = lives.get(&named.pair.reversed());
        let live = live.filter(|live| live.peer() == peer);
        let here = live.map(|live| {
            let on = m.conns(|conns| conns.get(&live.pair()).place.marked());
            let on = on.filter(|on| !m.is_outside(Some(*on)));
            let here = m.ruling(live, |ruling| ruling.here(live.is_bound()));
            Here { on, ..here }
        });
        let judged = m.conns(|conns| wanted.judge(conns, (named, version), here, m.now()));
        if let Err(refusal) = judged {
            m.tell(News::Refused(refusal));
            // The peer may be to hear what stands here.
            if matches!(
                refusal,
                Refusal::Older(_) | Refusal::OwnRule(_) | Refusal::Unproved(_)
            ) {
                m.wake(Task::Tell);
            }
        }
        judged
    };
    conns.into_iter().map(judge).collect()
}

/// Has those connections follow that may, all of one SWITCH: so they take the same steps together.
///
/// # Errors
/// The reasons why some could not.
async fn carry_out<M: Machine>(
    m: &M,
    peer: usize,
    judged: &mut [Judged],
    switch: Switch,
    lives: &Found<M>,
) -> Result<(), String> {
    let (bump, mut reasons) = (switch.bump, BTreeSet::new());
    let is_outside = m.is_outside(bump);
    let mut moving: Vec<&mut Following> = judged.iter_mut().flatten().collect();
    while let Some(step) = moving.first().and_then(|following| following.next()) {
        let pairs: Vec<FlowKey> = moving.iter().map(|following| following.pair).collect();
        let meant: Vec<M::Live> = pairs.iter().map(|pair| lives[pair]).collect();
        let mut failed: BTreeSet<FlowKey> = BTreeSet::new();
        match step {
            Step::Unlock => unlock_leaving(m, &pairs, bump).await,
            Step::Drain => {
                m.tell(News::Follows(switch));
                if is_outside {
                    // One in plain has nothing under way by a bump, and may be about to come to one.
                    let is_bumped = |live: &&M::Live| !m.is_outside(stands_on(m, *live));
                    let bumped: Vec<M::Live> = meant.iter().filter(is_bumped).copied().collect();
                    let behind = shadows::silence(m, &bumped, 0, false).await;
                    // Asked to follow, it does: the peer has left.
                    if switch.ready && switch.needs_plain() {
                        keep_back(m, &mut moving, &behind);
                    }
                }
            }
            Step::Save => {
                if let Err(fault) = prepare(m).await {
                    reasons.insert(format!("{fault:#}"));
                    failed.extend(&pairs);
                }
                if !is_outside {
                    m.expect_rates(&meant);
                }
            }
            Step::Mark => {
                let faults = match switch.explicit {
                    true => mark_agreed(m, &pairs, bump).await,
                    false => mark_moved(m, &pairs, bump).await,
                };
                reasons.extend(faults.values().map(ToString::to_string));
                failed.extend(faults.into_keys());
                let marked = pairs.iter().filter(|pair| !failed.contains(pair));
                solicit(m, marked, bump);
                if bump.is_none() {
                    shadows::part(m, &pairs).await;
                }
            }
            Step::Undo => undo(m, peer, &pairs).await,
        }
        m.conns(|conns| {
            moving.retain_mut(|following| {
                following.handle_done(conns, !failed.contains(&following.pair));
                following.next().is_some()
            });
        });
    }
    match reasons.is_empty() {
        true => Ok(()),
        false => Err(Vec::from_iter(reasons).join("; ")),
    }
}

/// Asks kernels of peers where connections stand that are on this bump. One that has left it since it was marked is not asked: that would
/// take it there again.
pub(super) fn solicit<'a, M: Machine>(
    m: &M,
    pairs: impl Iterator<Item = &'a FlowKey>,
    bump: Option<BumpId>,
) {
    let is_there = |pair: &&FlowKey| m.conns(|conns| conns.get(pair).place.was() == bump);
    pairs
        .filter(is_there)
        .for_each(|pair| m.solicit(pair, bump));
}

/// Connections `behind` go on by their bumps, because routers have not heard of all that they sent.
fn keep_back<M: Machine>(m: &M, moving: &mut [&mut Following], behind: &BTreeSet<FlowKey>) {
    for following in moving {
        if behind.contains(&following.pair) {
            following.handle_behind();
            m.end_drains(&following.pair);
            m.tell(News::Behind);
        }
    }
}

/// Saves what is to outlive the daemon, and has what is in use installed.
///
/// # Errors
/// One of them cannot be done.
pub(super) async fn prepare<M: Machine>(m: &M) -> Result<(), M::Fault> {
    m.save()?;
    m.install().await
}

/// Puts connections back to where they were whose switches could not be carried out.
async fn undo<M: Machine>(m: &M, peer: usize, pairs: &[FlowKey]) {
    m.tell(News::Undone(pairs));
    or_warn(m, m.save());
    // The kernel has not taken the new marks: what it has says where they were.
    match m.look_up(pairs).await {
        Ok((_, tracked)) => {
            let back = tracked.iter().map(|(pair, entry)| (*pair, entry.mark.bump));
            put_back(m, back).await;
        }
        Err(fault) => tell_of(m, peer, &fault.to_string()),
    }
    if let Some(fault) = m.mark_choices(pairs).await.into_values().next() {
        tell_of(m, peer, &fault.to_string());
    }
    pairs.iter().for_each(|pair| m.end_drains(pair));
}

/// Lets connections that are about to leave their bump for another or for plain take what comes otherwise.
pub(super) async fn unlock_leaving<M: Machine>(m: &M, pairs: &[FlowKey], bump: Option<BumpId>) {
    let leaving: Vec<FlowKey> = m.conns(|conns| {
        let holds_back = |pair: &&FlowKey| conns.get(pair).lock.holds_back(bump);
        let leaving: Vec<FlowKey> = pairs.iter().filter(holds_back).copied().collect();
        conns.update_each(&leaving, |conn| conn.lock.release());
        leaving
    });
    if !leaving.is_empty() {
        m.unlock(&leaving).await;
    }
}

/// Marks connections by a choice of the peer, which may have gone there already. A later one of this host for the same bump, of which the
/// peer is still asked, keeps none of them where it was.
async fn mark_agreed<M: Machine>(m: &M, pairs: &[FlowKey], bump: Option<BumpId>) -> Failed<M> {
    let mut failed = m.mark_choices(pairs).await;
    let marks = || {
        m.conns(|conns| {
            let is_same = |pair: &&FlowKey| {
                let conn = conns.get(pair);
                conn.is_asked() && conn.choice.get().is_some_and(|choice| choice.bump == bump)
            };
            let same = pairs.iter().filter(is_same);
            same.map(|pair| Mark::new(*pair, bump, true)).collect()
        })
    };
    failed.extend(m.mark(marks).await);
    failed
}

/// Marks connections, by no choice, but those for which one has come. What leaves for plain is kept there by OVERRIDE while the far
/// end's packets may still come by the bump: each end would pull the other back.
pub async fn mark_moved<M: Machine>(m: &M, pairs: &[FlowKey], bump: Option<BumpId>) -> Failed<M> {
    let leaves = true;
    let mark = |pair: &FlowKey| Mark {
        leaves,
        ..Mark::moved(*pair, bump)
    };
    let marks = || {
        m.conns(|conns| {
            let unchosen = |pair: &&FlowKey| conns.get(pair).in_force().is_none();
            pairs.iter().filter(unchosen).map(mark).collect()
        })
    };
    m.mark(marks).await
}

/// Puts connections where they were, by no choice, unless one has been made for them meanwhile.
pub(super) async fn put_back<M: Machine>(
    m: &M,
    back: impl Iterator<Item = (FlowKey, Option<BumpId>)>,
) {
    let marks = || {
        m.conns(|conns| {
            let unchosen = |(pair, _): &(FlowKey, _)| conns.get(pair).choice.get().is_none();
            let back = back.filter(unchosen);
            back.map(|(pair, bump)| Mark::moved(pair, bump)).collect()
        })
    };
    warn_of(m, &m.mark(marks).await);
}

/// Keeps a connection on the bump that a rule of the peer wants it on, of number `own`: of what this host sent in plain
/// the peer would take nothing, or answer it by the bump.
pub(super) async fn follow_peer<M: Machine>(m: &M, peer: usize, pair: FlowKey, own: u64) {
    let bump = u8::try_from(own).ok().and_then(BumpId::new);
    let Some(bump) = bump.filter(|bump| m.carries(*bump)) else {
        let why = "a rule of the peer wants a bump that this host does not have";
        return tell_of(m, peer, why);
    };
    update(m, &pair, |conn| conn.place.hand_over(Hand::Peer.on(bump)));
    let fault = match m.install().await {
        Err(fault) => Some(format!("{fault:#}")),
        Ok(()) => {
            let failed = m.mark(|| vec![Mark::moved(pair, Some(bump))]).await;
            failed.into_values().next().map(|fault| fault.to_string())
        }
    };
    if let Some(fault) = fault {
        tell_of(
            m,
            peer,
            &format!("cannot follow a rule of the peer: {fault}"),
        );
    }
}

/// Gives up a choice that the peer refuses for a rule of its own, having heard of it only now.
pub(super) async fn give_in<M: Machine>(
    m: &M,
    peer: usize,
    pair: FlowKey,
    version: Version,
    own: u64,
) {
    if update(m, &pair, |conn| conn.choice.take_back(version, None)) {
        or_warn(m, m.save());
        follow_peer(m, peer, pair, own).await;
        let conn = or_warn(m, m.find(&[pair]).await).and_then(|found| found.get(&pair).copied());
        m.tell(News::GivenUp { peer, pair, conn });
    }
}
