//! Proof that plain carries connections before they leave their bumps for plain, here and for peers that ask.

use dibs_wire::FlowKey;
use std::collections::BTreeMap;

use futures_util::future::try_join_all;

use super::rules::Kept;
use super::{Live as _, Machine, News, ROUND, stands_on, update};
use crate::knock::{Numbers, Refusal};
use crate::messages::{Named, Outcome, Unanswered};

/// Acknowledgements that a peer sends in plain, by the connection as this host sends, and whether that is on a bump here.
pub type Heard = BTreeMap<FlowKey, (Numbers, bool)>;

/// Finds the connections of these that cannot leave their bumps for plain, and why. Those that are on no bump, and those on
/// another program's device, are not looked at.
///
/// # Errors
/// The system cannot find out.
pub async fn refusals<M: Machine>(m: &M, lives: &[M::Live]) -> Result<Kept, M::Fault> {
    let mut by_peer: BTreeMap<usize, Vec<M::Live>> = BTreeMap::new();
    for live in lives.iter().filter(|live| !live.is_over()) {
        if !m.is_outside(stands_on(m, live)) {
            by_peer.entry(live.peer()).or_default().push(*live);
        }
    }
    let asked = by_peer.iter().map(async |(peer, lives)| {
        let mut refused = Kept::new();
        let mut answers_none = false;
        for lives in lives.chunks(ROUND) {
            if answers_none {
                let why = Refusal::Peer(Err(Unanswered::NotAsked));
                refused.extend(lives.iter().map(|live| (live.pair(), why)));
                continue;
            }
            let some = m.knock(*peer, lives).await?;
            let heard = lives.iter().map(|live| live.pair());
            note_plain(m, heard.filter(|pair| !some.contains_key(pair)));
            let is_silent = |why: &Refusal| *why == Refusal::Peer(Err(Unanswered::Silent));
            answers_none = some.len() == lives.len() && some.values().all(is_silent);
            refused.extend(some);
        }
        Ok(refused)
    });
    let asked = try_join_all(asked).await?;
    Ok(asked.into_iter().flatten().collect())
}

/// Notes that plain carries these connections.
fn note_plain<M: Machine>(m: &M, pairs: impl Iterator<Item = FlowKey>) {
    pairs.for_each(|pair| update(m, &pair, |conn| conn.place.note_plain(m.now())));
}

/// Answers a peer that knocks: whether the acknowledgements arrive that it sends in plain. This host sends its own.
pub async fn answer<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(Named, Numbers)],
) -> Vec<(Outcome, u64)> {
    let failed = (Outcome::Failed, 0);
    let answered = async {
        let pairs: Vec<FlowKey> = { conns.iter() }
            .map(|(named, _)| named.pair.reversed())
            .collect();
        let (lives, tracked) = m.look_up(&pairs).await?;
        let judge = |named: &Named| {
            let live = lives.get(&named.pair.reversed());
            let Some(live) = live.filter(|live| live.peer() == peer) else {
                return Some((Outcome::NoConnection, 0));
            };
            let socket = live.meant().socket;
            if socket != named.socket {
                return Some((Outcome::OtherSocket, socket.0.into()));
            }
            None
        };
        let judged: Vec<_> = conns.iter().map(|(named, _)| judge(named)).collect();
        let meant = { judged.iter() }.zip(&pairs).zip(conns);
        let meant = meant.filter(|((judged, _), _)| judged.is_none());
        let meant = meant.map(|((_, pair), (_, theirs))| {
            let is_bumped = tracked.bump(pair).is_some();
            (*pair, (*theirs, is_bumped))
        });
        let replies = m.hear_knocks(meant.collect()).await?;
        let heard = { replies.iter() }.filter(|(_, (outcome, _))| *outcome == Outcome::Done);
        note_plain(m, heard.map(|(pair, _)| *pair));
        let reply = |pair: &FlowKey| replies.get(pair).copied().unwrap_or(failed);
        let answers = judged.into_iter().zip(&pairs);
        let answers = answers.map(|(judged, pair)| judged.unwrap_or_else(|| reply(pair)));
        Ok::<_, M::Fault>(answers.collect())
    };
    answered.await.unwrap_or_else(|fault| {
        let why =
            format!("cannot find out whether the network carries connections in plain: {fault:#}");
        m.tell(News::Fault(&why));
        vec![failed; conns.len()]
    })
}
