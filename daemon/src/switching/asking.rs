//! Peers are asked about many connections at once: a driver of the machines that know what each is asked, and what
//! follows from its answer ([`dibs_switch::asking`], [`dibs_switch::naming`]).

use std::collections::HashSet;
use std::time::Duration;

use dibs_switch::asking::{Negotiation, Step};
use dibs_switch::conns::{Meant, Version};
use dibs_switch::messages::{Answer, Body, MAX_ENTRIES, Named, Switch, Unanswered};
use dibs_switch::naming::{Next, Query};
use dibs_wire::FlowKey;

use crate::clock::now;
use crate::daemon::{Daemon, State};
use crate::live::Live;
use crate::log::or_warn;
use crate::marking::{Failed, Mark, warn_of};
use crate::switching::by_rule;
use crate::wakers::Task;
use crate::{connections, locking, marking};

/// A connection whose kernel has sent no byte for as long sends nothing now.
const SENDS_WITHIN: Duration = Duration::from_millis(200);
/// Connections that move at once: between the first word about one and the last its two ends are apart, so
/// it is not to wait for many others. As many messages as a peer takes at once, and not more than chains
/// whose start it can hold back.
pub(crate) const ROUND: usize = 12 * MAX_ENTRIES;

/// A connection that moves, and what its peer is asked for that.
pub(crate) type Move = (Live, Negotiation);

/// Carries up to [`ROUND`] moves with a peer out, all to one bump: as it agrees. What the kernel did not take of
/// choices, and why.
pub(crate) async fn carry_out(daemon: &Daemon, peer: usize, moves: &mut [Move]) -> Failed {
    let mut failed = Failed::new();
    while let Some(step) = moves
        .iter()
        .map(|(_, negotiation)| negotiation.next())
        .min()
    {
        let turn = |(_, negotiation): &&mut Move| negotiation.next() == step;
        let mut turn: Vec<&mut Move> = moves.iter_mut().filter(turn).collect();
        let pairs: Vec<FlowKey> = turn.iter().map(|(live, _)| live.pair).collect();
        let switch = turn[0].1.switch(false);
        match step {
            Step::Unlock => locking::unlock_leaving(daemon, &pairs, switch.bump).await,
            Step::Look => {
                let sending = match daemon.bumps.is_outside(switch.bump) {
                    true => sending(daemon).await,
                    false => HashSet::new(),
                };
                for (live, negotiation) in &mut turn {
                    negotiation.handle_look(sending.contains(&live.pair));
                }
            }
            Step::Save => save_versions(daemon, &mut turn),
            Step::Ask { ready } => {
                let switch = Switch { ready, ..switch };
                ask_for_part(daemon, peer, &mut turn, switch).await;
            }
            Step::Drain => marking::silence(daemon, turn.iter().map(|(live, _)| live)).await,
            Step::Leave => leave(daemon, &mut turn, switch).await,
            Step::Conclude => {
                let conns = &mut daemon.state.borrow_mut().conns;
                for (_, negotiation) in &mut turn {
                    negotiation.conclude(conns, now());
                }
                daemon.wakers.wake(Task::Tell);
            }
            Step::PutBack(bump) => {
                let back = pairs.into_iter().map(|pair| (pair, bump));
                marking::put_back(daemon, back.collect()).await;
            }
            Step::Mark => {
                failed.extend(marking::mark_choices(daemon, &pairs).await);
                let conns = &mut daemon.state.borrow_mut().conns;
                for (_, negotiation) in &mut turn {
                    negotiation.handle_marked(conns, now());
                }
                daemon.wakers.wake(Task::Tell);
            }
            Step::GiveIn(own) => {
                for (live, negotiation) in &turn {
                    match negotiation.stood() {
                        Some(version) => {
                            by_rule::give_in(daemon, peer, live.pair, version, own).await
                        }
                        None => by_rule::follow_peer(daemon, peer, &live.pair, own).await,
                    }
                }
            }
            Step::Move => warn_of(&marking::mark_moved(daemon, &pairs, switch.bump).await),
            Step::Done => break,
        }
        // Of what else was done there is nothing to say.
        let same = turn
            .into_iter()
            .filter(|(_, negotiation)| negotiation.next() == step);
        same.for_each(|(_, negotiation)| negotiation.handle_done());
    }
    failed
}

fn save_versions(daemon: &Daemon, moves: &mut [&mut Move]) {
    let saved = daemon.save();
    let conns = &mut daemon.state.borrow_mut().conns;
    for (_, negotiation) in moves {
        negotiation.handle_saved(conns, saved.is_ok());
    }
    or_warn(saved);
}

async fn ask_for_part(daemon: &Daemon, peer: usize, moves: &mut [&mut Move], switch: Switch) {
    let conns: Vec<(Meant, Version)> = { moves.iter() }
        .map(|(_, negotiation)| (negotiation.conn(), negotiation.version()))
        .collect();
    let answers = ask_switch(daemon, peer, &conns, switch).await;
    let State { conns, refused, .. } = &mut *daemon.state.borrow_mut();
    for ((_, negotiation), answer) in moves.iter_mut().zip(answers) {
        if let Err(why) = negotiation.handle_answer(conns, answer) {
            refused.note(why);
        }
    }
}

/// Has connections that fell silent leave their bump, but those of which the peer chose otherwise meanwhile.
async fn leave(daemon: &Daemon, moves: &mut [&mut Move], switch: Switch) {
    let Switch { bump, explicit, .. } = switch;
    let conns: Vec<Meant> = moves.iter().map(|(live, _)| live.into()).collect();
    let still = still_there(daemon, &conns).await;
    let _turn = daemon.kernel.marking().await;
    let mut leaving = Vec::new();
    {
        let conns = &daemon.state.borrow().conns;
        for (live, negotiation) in moves {
            let is_there = still.contains(&live.pair);
            if negotiation.handle_silent(conns, is_there) {
                leaving.push(live.pair);
            } else if is_there {
                marking::end_drains(daemon, &live.pair);
            }
        }
    }
    warn_of(&match explicit {
        true => {
            let chosen = leaving.iter().map(|pair| Mark::chosen(*pair, bump));
            marking::mark(daemon, &chosen.collect::<Vec<_>>()).await
        }
        false => marking::mark_leaving(daemon, &leaving, bump).await,
    });
}

/// Those of these connections that are not over.
async fn still_there(daemon: &Daemon, conns: &[Meant]) -> HashSet<FlowKey> {
    let pairs: Vec<FlowKey> = conns.iter().map(|conn| conn.pair).collect();
    let Some(lives) = or_warn(connections::sockets_of(daemon, &pairs).await) else {
        return HashSet::new();
    };
    let is_there = |conn: &&Meant| {
        let live = lives.get(&conn.pair);
        live.is_some_and(|live| live.socket == conn.socket)
    };
    conns
        .iter()
        .filter(is_there)
        .map(|conn| conn.pair)
        .collect()
}

/// The connections whose kernels here send by a bump now.
async fn sending(daemon: &Daemon) -> HashSet<FlowKey> {
    // Without the data path nothing is under way.
    let Ok((now, conns)) = daemon.driver.conns().await else {
        return HashSet::new();
    };
    let sends = |spoke| now.since(spoke) < SENDS_WITHIN;
    conns
        .iter()
        .filter(|conn| conn.spoke.is_some_and(sends))
        .map(|conn| conn.tuple)
        .collect()
}

/// Asks with SWITCHes, of up to [`ROUND`] connections; the answer for each.
pub(super) async fn ask_switch(
    daemon: &Daemon,
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
    ask_about(daemon, peer, &meant, body).await
}

/// Asks about up to [`ROUND`] connections, by the names that the peer gives its sockets. `body` has the
/// question from the names, with the index of each.
pub(crate) async fn ask_about(
    daemon: &Daemon,
    peer: usize,
    conns: &[Meant],
    body: impl Fn(&[(usize, Named)]) -> Body,
) -> Vec<Answer> {
    let ask_some = async |indices: &[usize]| -> Vec<Answer> {
        let named: Vec<(usize, Named)> = {
            let known = &daemon.state.borrow().conns;
            { indices.iter() }
                .map(|index| (*index, known.named(&conns[*index])))
                .collect()
        };
        match daemon.rpc.ask(peer, body(&named)).await {
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
            let answers = futures_util::future::join_all(asked).await.concat();
            for (index, answer) in asking.into_iter().zip(answers) {
                queries[index].handle_answer(answer);
            }
        } else if !looking.is_empty() {
            let meant: Vec<Meant> = looking.iter().map(|index| conns[*index]).collect();
            let still = still_there(daemon, &meant).await;
            let known = &mut daemon.state.borrow_mut().conns;
            for index in looking {
                let is_there = still.contains(&conns[index].pair);
                queries[index].handle_look(known, is_there);
            }
        } else {
            return queries.iter().filter_map(Query::answer).collect();
        }
    }
}
