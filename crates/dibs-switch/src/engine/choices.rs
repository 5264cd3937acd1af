//! Choices of users here.

use dibs_wire::FlowKey;
use std::collections::BTreeMap;
use std::fmt;

use futures_util::future::join_all;

use super::asks::{self, Move, ROUND};
use super::{Goal, Live as _, Machine, News, Task, or_warn, stands_on, switches, update};
use crate::asking::{Conclusion, Negotiation};
use crate::messages::{Answer, Unanswered};
use crate::table::Conn;

/// Outcome of a choice for one connection.
#[derive(Clone, Debug)]
pub enum Outcome<W, F> {
    /// Choice in force.
    Moved,
    /// Choice in force that the kernel did not take.
    NotMarked(F),
    /// Reason why the connection cannot move.
    Refused(W),
    /// Another choice that was made meanwhile.
    Superseded,
    /// Answer of the peer.
    Answered(Answer),
    /// End of the connection.
    Ended,
}

/// Outcome of a choice on this machine.
pub type Came<M> = Outcome<<M as Machine>::Why, <M as Machine>::MarkFault>;

/// Outcomes of a choice, in the order of the connections.
pub type Outcomes<M> = Vec<(<M as Machine>::Live, Came<M>)>;

impl<W: fmt::Display, F: fmt::Display> Outcome<W, F> {
    /// Reason why it is not in force, in words for a log.
    pub fn fault(&self) -> Option<String> {
        match self {
            Self::Moved => None,
            Self::NotMarked(fault) => Some(fault.to_string()),
            Self::Refused(why) => Some(why.to_string()),
            Self::Superseded => {
                Some("somebody else moved it meanwhile: repeat the command".to_owned())
            }
            Self::Answered(Ok((outcome, _))) => Some(format!("the peer answers {outcome:?}")),
            Self::Answered(Err(error)) => Some(error.to_string()),
            Self::Ended => Some("it has ended".to_owned()),
        }
    }
}

/// Moves connections, as a user here chose; returns what came of it for each, in the same order. `progress` is told how
/// many more are dealt with, of how many.
///
/// # Errors
/// Nothing was changed: the system could not.
pub async fn choose<M: Machine>(
    m: &M,
    lives: &[M::Live],
    goal: Goal,
    progress: impl Fn(usize, usize),
) -> Result<Outcomes<M>, M::Fault> {
    let bump = goal.bump;
    let mut by_peer: BTreeMap<usize, Vec<Move<M>>> = BTreeMap::new();
    let refused = m.refused(lives, goal).await?;
    let able = |live: &&M::Live| !refused.contains_key(&live.pair());
    for live in lives.iter().filter(able) {
        if let Some(asked) = propose(m, live, goal) {
            by_peer.entry(live.peer()).or_default().push((*live, asked));
        }
    }
    let mut outcomes: BTreeMap<FlowKey, Came<M>> = { refused.into_iter() }
        .map(|(pair, why)| (pair, Outcome::Refused(why)))
        .collect();
    let of = by_peer.values().map(Vec::len).sum();
    progress(0, of);
    if let Err(fault) = switches::prepare(m).await {
        m.conns(|conns| {
            let moves = by_peer.values().flatten();
            moves.for_each(|(_, asked)| asked.withdraw(conns));
        });
        // Or the next start would find them in the file.
        or_warn(m, m.save());
        return Err(fault);
    }
    if !m.is_outside(bump) {
        let moves = by_peer.values().flatten();
        m.expect_rates(&moves.map(|(live, _)| *live).collect::<Vec<_>>());
    }
    let done = |more| progress(more, of);
    let moved = { by_peer.iter_mut() }.map(|(peer, moves)| move_all(m, *peer, moves, &done));
    outcomes.extend(join_all(moved).await.into_iter().flatten());
    m.save()?;
    // What came back for want of an answer, too.
    m.wake(Task::Confirm);
    // The peer may not know of those yet.
    let opening = lives.iter().filter(|live| m.is_opening(*live));
    let opening: Vec<FlowKey> = opening.map(|live| live.pair()).collect();
    if !opening.is_empty() {
        let tell = |conn: &mut Conn| conn.telling.tell_later(conn.in_force(), m.now());
        m.conns(|conns| conns.update_each(&opening, tell));
        m.wake(Task::Tell);
    }
    if bump.is_some() {
        let is_moved = |(_, outcome): &(&FlowKey, &_)| matches!(outcome, Outcome::Moved);
        let moved = outcomes.iter().filter(is_moved);
        switches::solicit(m, moved.map(|(pair, _)| pair), bump);
    }
    let outcome = |live: &M::Live| outcomes.remove(&live.pair()).unwrap_or(Outcome::Ended);
    Ok({ lives.iter() }
        .map(outcome)
        .zip(lives)
        .map(|(outcome, live)| (*live, outcome))
        .collect())
}

fn propose<M: Machine>(m: &M, live: &M::Live, goal: Goal) -> Option<Negotiation> {
    let (origin, own) = (stands_on(m, live), m.hosts(live.peer()).own);
    if origin.is_none() && goal.bump.is_some() {
        update(m, &live.pair(), |conn| conn.place.note_plain(m.now()));
    }
    let asked = |conns: &mut _| Negotiation::choose(conns, live.meant(), goal.bump, origin, own);
    m.conns(asked).map(|asked| asked.on_ground(goal.ground))
}

/// Moves a peer's connections, a [`ROUND`] at a time: each is decided here as soon as the peer has done its part. Once
/// the peer does not answer, it is not asked for the others.
async fn move_all<M: Machine>(
    m: &M,
    peer: usize,
    moves: &mut [Move<M>],
    done: &impl Fn(usize),
) -> Vec<(FlowKey, Came<M>)> {
    let mut outcomes = Vec::with_capacity(moves.len());
    let mut answers_none = false;
    for moves in moves.chunks_mut(ROUND) {
        if answers_none {
            let moves = moves.iter_mut();
            moves.for_each(|(_, asked)| asked.handle_unasked());
        }
        let mut failed = asks::carry_out(m, peer, moves).await;
        let is_silent = |(_, asked): &Move<M>| matches!(asked.answer(), Err(Unanswered::Silent));
        answers_none |= moves.iter().all(is_silent);
        outcomes.extend(moves.iter().map(|(live, asked)| {
            let fault = failed.remove(&live.pair());
            (live.pair(), outcome(m, asked, fault))
        }));
        done(moves.len());
    }
    outcomes
}

/// Outcome of a choice, of which the kernel did not take the mark for this `fault`.
fn outcome<M: Machine>(m: &M, asked: &Negotiation, fault: Option<M::MarkFault>) -> Came<M> {
    let conclusion = asked.conclusion();
    match (conclusion, fault) {
        (Some(Conclusion::InForce), None) => return Outcome::Moved,
        (Some(Conclusion::InForce), Some(fault)) => return Outcome::NotMarked(fault),
        (_, Some(fault)) => m.tell(News::Fault(&fault.to_string())),
        (_, None) => {}
    }
    match conclusion {
        Some(Conclusion::Superseded) => Outcome::Superseded,
        _ => Outcome::Answered(asked.answer()),
    }
}
