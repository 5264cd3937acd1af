//! Questions to a peer about many connections at once, and moves that it has a part in.

use dibs_settings::BumpId;
use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::join_all;

use super::{
    Failed, Live as _, Machine, Mark, News, Task, matches, or_warn, shadows, stands_on, switches,
    warn_of,
};
use crate::asking::{Conclusion, Negotiation, Step};
use crate::conns::{Meant, Version};
use crate::messages::{Answer, Body, Ground, MAX_ENTRIES, Named, Outcome, Switch, Unanswered};
use crate::naming::{Next, Query};

/// Connections that move at once: between the first word about one and the last its two ends are apart, so it is not to
/// wait for many others. As many messages as a peer takes at once, and not more than chains whose start it can hold
/// back.
pub const ROUND: usize = 12 * MAX_ENTRIES;

/// Time in which what a peer still sent by a bump has come: it would take a connection there again that may follow.
const LATE: Duration = Duration::from_secs(1);

/// A connection that moves, and what its peer is asked for that.
pub type Move<M> = (<M as Machine>::Live, Negotiation);

/// Carries up to [`ROUND`] moves with a peer out, all to one bump, as it agrees. Returns what the kernel did not take of
/// choices, and why.
pub async fn carry_out<M: Machine>(m: &M, peer: usize, moves: &mut [Move<M>]) -> Failed<M> {
    let mut failed = Failed::<M>::new();
    let mut loosened = BTreeSet::new();
    while let Some(step) = moves.iter().map(|(_, asked)| asked.next()).min() {
        let turn = |(_, asked): &&mut Move<M>| asked.next() == step;
        let mut turn: Vec<&mut Move<M>> = moves.iter_mut().filter(turn).collect();
        let pairs: Vec<FlowKey> = turn.iter().map(|(live, _)| live.pair()).collect();
        let switch = turn[0].1.switch(false);
        match step {
            Step::Unlock => switches::unlock_leaving(m, &pairs, switch.bump).await,
            Step::Look => {
                let mut active = match m.is_outside(switch.bump) {
                    true => m.active(&pairs).await,
                    false => BTreeSet::new(),
                };
                // One that routers follow may send any moment: what it sends by the bump after the peer has left they do not know.
                if switch.needs_plain() {
                    let bumped = { turn.iter().map(|(live, _)| live) }
                        .filter(|live| !m.is_outside(stands_on(m, live)));
                    let bumped: Vec<FlowKey> = bumped.map(|live| live.pair()).collect();
                    active.extend(shadows::outrun(m, &bumped).await);
                    let shown = bumped.iter().filter(|pair| shadows::is_shown(m, pair));
                    active.extend(shown);
                    shadows::listen(m, bumped.into_iter().filter(|pair| active.contains(pair)));
                }
                for (live, asked) in &mut turn {
                    asked.handle_look(active.contains(&live.pair()));
                }
            }
            Step::Save => save_versions(m, &mut turn),
            Step::Ask { ready } => {
                let switch = Switch { ready, ..switch };
                if let Some(bump) = switch.bump.filter(|bump| !m.is_outside(Some(*bump))) {
                    let lives: Vec<M::Live> = turn.iter().map(|(live, _)| *live).collect();
                    loosened.extend(loosen(m, &lives, bump).await);
                }
                ask_for_part(m, peer, &mut turn, switch).await;
            }
            Step::Drain => {
                let lives: Vec<M::Live> = turn.iter().map(|(live, _)| *live).collect();
                let behind =
                    shadows::silence(m, &lives, turn[0].1.attempts(), switch.needs_plain()).await;
                if switch.needs_plain() {
                    keep_behind(m, &mut turn, &behind);
                }
            }
            Step::Leave => leave(m, &mut turn, switch).await,
            Step::Conclude => {
                let concluded: Vec<Conclusion> = m.conns(|conns| {
                    let turn = turn.iter_mut();
                    turn.map(|(_, asked)| asked.conclude(conns, m.now()))
                        .collect()
                });
                { concluded.into_iter() }.for_each(|it| m.tell(News::Concluded(it)));
                m.wake(Task::Tell);
            }
            Step::PutBack(bump) => {
                switches::put_back(m, pairs.iter().map(|pair| (*pair, bump))).await;
            }
            Step::Mark => {
                failed.extend(m.mark_choices(&pairs).await);
                m.conns(|conns| {
                    for (_, asked) in &mut turn {
                        asked.handle_marked(conns, m.now());
                    }
                });
                m.wake(Task::Tell);
            }
            Step::GiveIn(own) => {
                for (live, asked) in &turn {
                    match asked.stood() {
                        Some(version) => {
                            switches::give_in(m, peer, live.pair(), version, own).await;
                        }
                        None => switches::follow_peer(m, peer, live.pair(), own).await,
                    }
                }
            }
            Step::Move => warn_of(m, &switches::mark_moved(m, &pairs, switch.bump).await),
            Step::Rest(time) => m.sleep(time).await,
            Step::Done => break,
        }
        if switch.bump.is_none() && matches!(step, Step::Mark | Step::Move) {
            shadows::part(m, &pairs).await;
        }
        // Of what else was done there is nothing to say.
        let same = turn.into_iter().filter(|(_, asked)| asked.next() == step);
        same.for_each(|(_, asked)| asked.handle_done());
    }
    let is_in_force = |(_, asked): &&Move<M>| asked.conclusion() == Some(Conclusion::InForce);
    for (live, _) in moves.iter().filter(is_in_force) {
        loosened.remove(&live.pair());
    }
    // Of what is chosen meanwhile the peer is still asked.
    let is_plain = |pair: &FlowKey| {
        m.conns(|conns| { conns.get(pair).in_force() }.is_some_and(|choice| choice.bump.is_none()))
    };
    loosened.retain(is_plain);
    if !loosened.is_empty() {
        warn_of(m, &m.mark_choices(&Vec::from_iter(loosened)).await);
    }
    failed
}

/// Lets connections in plain that routers translate follow what comes by a bump, those that were chosen to be in plain as well: the peer
/// goes there first. A router that translates answers with a reset what acknowledges in plain what it has not seen. Returns those that were chosen.
async fn loosen<M: Machine>(m: &M, lives: &[M::Live], bump: BumpId) -> Vec<FlowKey> {
    // A rule that is new says the bump already.
    let is_plain = |live: &&M::Live| {
        let known = m.conns(|conns| conns.get(&live.pair()).place.marked());
        known.or(m.marked(live)).is_none()
    };
    // Of others no router translates what goes in plain, or they began on a bump.
    let translated = || -> Vec<FlowKey> {
        let plain = { lives.iter().filter(is_plain) }.map(|live| live.pair());
        plain.filter(|pair| m.is_matched(pair)).collect()
    };
    let plain = translated();
    let left = { plain.iter() }.filter_map(|pair| m.conns(|conns| conns.get(pair).place.left()));
    if let Some(left) = left.max() {
        m.sleep((left + LATE).since(m.now())).await;
    }
    // A rule that is left of an earlier choice would have it on that bump before the peer is.
    if or_warn(m, m.unpin(&plain).await).is_none() {
        return Vec::new();
    }
    // Some may have come to a bump meanwhile, where they are not to begin anew.
    let plain = translated();
    plain.iter().for_each(|pair| m.expect(pair, bump));
    let mut chosen = Vec::new();
    let marks = || {
        let is_chosen = |pair: &&FlowKey| m.conns(|conns| conns.get(pair).place.is_chosen(None));
        chosen.extend(plain.iter().filter(is_chosen));
        // One that has just left a bump by a rule is held in plain.
        m.conns(|conns| conns.update_each(&chosen, |conn| conn.place.end_hold()));
        let marks = chosen.iter();
        marks.map(|pair| Mark::moved(*pair, None)).collect()
    };
    warn_of(m, &m.mark(marks).await);
    m.conns(|conns| conns.update_each(&plain, |conn| conn.place.expect(bump)));
    chosen
}

fn save_versions<M: Machine>(m: &M, moves: &mut [&mut Move<M>]) {
    let saved = m.save();
    m.conns(|conns| {
        for (_, asked) in moves {
            asked.handle_saved(conns, saved.is_ok());
        }
    });
    or_warn(m, saved);
}

async fn ask_for_part<M: Machine>(m: &M, peer: usize, moves: &mut [&mut Move<M>], switch: Switch) {
    let conns: Vec<(Meant, Version)> = { moves.iter() }
        .map(|(_, asked)| (asked.conn(), asked.version()))
        .collect();
    let mut answers = ask_switch(m, peer, &conns, switch).await;
    if !m.is_outside(switch.bump) {
        let lives: Vec<M::Live> = moves.iter().map(|(live, _)| *live).collect();
        match_and_ask(m, (peer, &lives), &conns, switch, &mut answers).await;
    }
    let mut implausible = Vec::new();
    let mut again = false;
    m.conns(|conns| {
        for ((_, asked), answer) in moves.iter_mut().zip(answers) {
            implausible.extend(asked.handle_answer(conns, answer).err());
            again |= asked.next() == Step::Save && asked.conclusion().is_none();
        }
    });
    { implausible.into_iter() }.for_each(|why| m.tell(News::Implausible(why)));
    if again {
        m.tell(News::AskedAgain);
    }
}

/// Asks again about connections in plain that the peer did not find, once it has found them by other addresses.
async fn match_and_ask<M: Machine>(
    m: &M,
    (peer, lives): (usize, &[M::Live]),
    conns: &[(Meant, Version)],
    switch: Switch,
    answers: &mut [Answer],
) {
    let is_unknown = |answer: &Answer| matches!(answer, Ok((Outcome::NoConnection, _)));
    let unknown = { lives.iter().zip(answers.iter()) }
        .filter(|(live, answer)| is_unknown(answer) && stands_on(m, live).is_none());
    let unknown: Vec<M::Live> = unknown.map(|(live, _)| *live).collect();
    if unknown.is_empty() {
        return;
    }
    let matched = or_warn(m, matches::ask(m, peer, &unknown).await).unwrap_or_default();
    let mut again = Vec::new();
    for (index, (conn, _)) in conns.iter().enumerate() {
        match matched.get(&conn.pair) {
            Some(Ok((Outcome::Done, _))) => again.push(index),
            Some(Ok((why, _))) => answers[index] = Ok((*why, 0)),
            // The peer did not say, or the kernel here did not.
            Some(Err(_)) | None => {}
        }
    }
    if again.is_empty() {
        return;
    }
    let conns: Vec<(Meant, Version)> = again.iter().map(|index| conns[*index]).collect();
    let answered = ask_switch(m, peer, &conns, switch).await;
    for (index, answer) in again.into_iter().zip(answered) {
        answers[index] = answer;
    }
}

/// Has connections `behind` go on by their bumps for a while.
fn keep_behind<M: Machine>(m: &M, moves: &mut [&mut Move<M>], behind: &BTreeSet<FlowKey>) {
    for (live, asked) in moves {
        if behind.contains(&live.pair()) {
            m.end_drains(&live.pair());
            asked.handle_behind();
            m.tell(News::Behind);
        }
    }
}

/// Has connections that fell silent leave their bump, but those of which the peer chose otherwise meanwhile, and those of which more
/// went by the bump on a busy machine than routers have heard of.
async fn leave<M: Machine>(m: &M, moves: &mut [&mut Move<M>], switch: Switch) {
    let Switch { bump, explicit, .. } = switch;
    let conns: Vec<Meant> = moves.iter().map(|(live, _)| live.meant()).collect();
    let still = still_there(m, &conns).await;
    if switch.needs_plain() {
        let pairs: Vec<FlowKey> = still.iter().copied().collect();
        let behind = shadows::behind(m, &pairs, m.now()).await;
        keep_behind(m, moves, &behind);
    }
    let leaving = || {
        let (mut leaving, mut staying) = (Vec::new(), Vec::new());
        m.conns(|conns| {
            let silent = { moves.iter_mut() }.filter(|(_, asked)| asked.next() == Step::Leave);
            for (live, asked) in silent {
                let pair = live.pair();
                if asked.handle_silent(conns, still.contains(&pair)) {
                    // What it acknowledged in plain would open the peer's window, and routers have not seen what the
                    // peer sends by the bump.
                    leaving.push(Mark {
                        leaves: true,
                        leads: true,
                        ..Mark::new(pair, bump, explicit)
                    });
                } else if still.contains(&pair) {
                    staying.push(pair);
                }
            }
        });
        staying.iter().for_each(|pair| m.end_drains(pair));
        leaving.iter().for_each(|_| m.tell(News::LeftFirst));
        leaving
    };
    warn_of(m, &m.mark(leaving).await);
}

/// Connections of these that are not over.
async fn still_there<M: Machine>(m: &M, conns: &[Meant]) -> BTreeSet<FlowKey> {
    let pairs: Vec<FlowKey> = conns.iter().map(|conn| conn.pair).collect();
    let Some(lives) = or_warn(m, m.find(&pairs).await) else {
        return BTreeSet::new();
    };
    let is_there = |conn: &&Meant| {
        let live = lives.get(&conn.pair);
        live.is_some_and(|live| live.meant().socket == conn.socket)
    };
    let there = conns.iter().filter(is_there);
    there.map(|conn| conn.pair).collect()
}

/// Asks whether the peer would have these connections go to plain; returns the answer for each.
pub(super) async fn ask_whether<M: Machine>(
    m: &M,
    peer: usize,
    lives: &[M::Live],
) -> Vec<(M::Live, Answer)> {
    let switch = Switch {
        bump: None,
        explicit: false,
        ready: true,
        ground: Ground::Proved,
    };
    let (generation, host) = (0, m.hosts(peer).own);
    let mut answered = Vec::new();
    for lives in lives.chunks(ROUND) {
        let version = Version { generation, host };
        let conns: Vec<(Meant, Version)> =
            lives.iter().map(|live| (live.meant(), version)).collect();
        let answers = ask_switch(m, peer, &conns, switch).await;
        answered.extend(lives.iter().copied().zip(answers));
    }
    answered
}

/// Connections by their peers.
pub(super) fn by_peer<M: Machine>(
    lives: impl Iterator<Item = M::Live>,
) -> BTreeMap<usize, Vec<M::Live>> {
    let mut by_peer: BTreeMap<usize, Vec<M::Live>> = BTreeMap::new();
    for live in lives {
        by_peer.entry(live.peer()).or_default().push(live);
    }
    by_peer
}

/// Asks with SWITCHes, of up to [`ROUND`] connections; returns the answer for each.
pub(super) async fn ask_switch<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(Meant, Version)],
    switch: Switch,
) -> Vec<Answer> {
    let meant: Vec<Meant> = conns.iter().map(|(conn, _)| *conn).collect();
    let body = |named: &[(usize, Named)]| Body::Switch {
        switch,
        conns: { named.iter() }
            .map(|(index, named)| (*named, conns[*index].1))
            .collect(),
    };
    ask_about(m, peer, &meant, body).await
}

/// Asks about up to [`ROUND`] connections, by the names that the peer gives its sockets. `body` has the question from
/// the names, with the index of each.
pub async fn ask_about<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[Meant],
    body: impl Fn(&[(usize, Named)]) -> Body,
) -> Vec<Answer> {
    let ask_some = async |indices: &[usize]| -> Vec<Answer> {
        let named: Vec<(usize, Named)> = m.conns(|known| {
            let named = indices.iter();
            named
                .map(|index| (*index, known.named(&conns[*index])))
                .collect()
        });
        match m.ask(peer, body(&named)).await {
            // An answer that is too short is no answer for the rest.
            Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                .chain(std::iter::repeat(Err(Unanswered::Silent)))
                .take(indices.len())
                .collect(),
            Err(error) => vec![Err(error); indices.len()],
        }
    };
    let mut queries: Vec<Query> = conns.iter().copied().map(Query::new).collect();
    loop {
        let wants = |next| {
            let wants = queries.iter().enumerate();
            let wants = wants.filter(move |(_, query)| query.next() == next);
            wants.map(|(index, _)| index).collect::<Vec<usize>>()
        };
        let (asking, looking) = (wants(Next::Ask), wants(Next::Look));
        if !asking.is_empty() {
            let asked = asking.chunks(MAX_ENTRIES).map(&ask_some);
            let answers = join_all(asked).await.concat();
            for (index, answer) in asking.into_iter().zip(answers) {
                queries[index].handle_answer(answer);
            }
        } else if !looking.is_empty() {
            let meant: Vec<Meant> = looking.iter().map(|index| conns[*index]).collect();
            let still = still_there(m, &meant).await;
            m.conns(|known| {
                for index in looking {
                    let is_there = still.contains(&conns[index].pair);
                    queries[index].handle_look(known, is_there);
                }
            });
        } else {
            return queries.iter().filter_map(Query::answer).collect();
        }
    }
}
