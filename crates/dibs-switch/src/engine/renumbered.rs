//! Connections whose numbers something in plain changes, so that no bump can carry them.

use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::FlowKey;

use super::choices::{self, Outcome};
use super::{Goal, Live as _, Machine, update};
use crate::messages::Ground;

/// Time that a move may take that is in the way of another one.
const MOVED_WITHIN: Duration = Duration::from_secs(5);
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Outcome of an attempt to take a connection back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Came {
    /// On that bump no more.
    Left,
    /// On it, because a rule requires that or the peer does not follow.
    Stays,
    /// On it, because the peer does not answer, or a move that takes long is in the way.
    Waits,
}

/// Takes a connection that the data path found to be renumbered back to plain, if it is still there: it gets on by no bump, however
/// long its peer does not answer or another move takes. Returns the connection, and true if it is on that bump no more.
///
/// # Errors
/// The system cannot.
pub async fn leave<M: Machine>(
    m: &M,
    bump: BumpId,
    pair: FlowKey,
) -> Result<Option<(M::Live, bool)>, M::Fault> {
    let Some(live) = m.find(&[pair]).await?.get(&pair).copied() else {
        return Ok(None);
    };
    let mut came = attempt(m, bump, &live).await?;
    while came == Came::Waits {
        let known = m.find(&[pair]).await?;
        let is_live = |known: &M::Live| known.meant() == live.meant() && !known.is_over();
        if !known.get(&pair).is_some_and(is_live) {
            break;
        }
        came = attempt(m, bump, &live).await?;
    }
    Ok(Some((live, came == Came::Left)))
}

/// Takes a renumbered connection from this bump, to which it came from plain a moment ago, back there, unless a rule requires the
/// bump; true if it is there no more.
///
/// # Errors
/// The system cannot.
pub async fn take_back<M: Machine>(m: &M, bump: BumpId, live: &M::Live) -> Result<bool, M::Fault> {
    Ok(attempt(m, bump, live).await? == Came::Left)
}

async fn attempt<M: Machine>(m: &M, bump: BumpId, live: &M::Live) -> Result<Came, M::Fault> {
    let pair = live.pair();
    // Only plain changes numbers, and nothing gets on by a bump once they are changed.
    update(m, &pair, |conn| {
        conn.renumbered = Some(live.meant().socket);
        conn.place.note_plain(m.now());
    });
    let is_there = || m.conns(|conns| conns.get(&pair).place.marked() == Some(bump));
    // A new rule may have it there already in the kernel, before it is moved here.
    let is_settled = || {
        m.conns(|conns| {
            let conn = conns.get(&pair);
            conn.rests() && (conn.place.marked() == Some(bump) || conn.choice.get().is_some())
        })
    };
    let is_required = || m.ruling(live, |ruling| ruling.requirement().is_some());
    // If both hosts take it back at the same moment, neither follows: one of them tries again first.
    let hosts = m.hosts(live.peer());
    let pause = match hosts.own < hosts.peer {
        true => LOOK_EVERY,
        false => MOVED_WITHIN / 4,
    };
    let end = m.now() + MOVED_WITHIN;
    let mut stays = Came::Waits;
    loop {
        while !is_settled() && m.now() < end {
            m.sleep(LOOK_EVERY).await;
        }
        if !is_there() {
            return Ok(Came::Left);
        }
        if is_required() {
            return Ok(Came::Stays);
        }
        if m.now() >= end {
            return Ok(stays);
        }
        let plain = Goal {
            bump: None,
            ground: Ground::Renumbered,
        };
        let outcomes = choices::choose(m, &[*live], plain, |_, _| {}).await?;
        let is_unanswered = |(_, came): &(_, _)| matches!(came, Outcome::Answered(Err(_)));
        stays = match outcomes.iter().any(is_unanswered) {
            true => Came::Waits,
            false => Came::Stays,
        };
        if is_there() {
            m.sleep(pause).await;
        }
    }
}
