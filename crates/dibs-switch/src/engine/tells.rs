//! Choices that peers are told, of many connections at once, and told again: which and when is said by
//! [`Telling`](crate::telling::Telling).

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dibs_settings::BumpId;

use super::asks::{ROUND, ask_switch};
use super::{Live as _, Machine, News, Task, choices, or_warn, switches, update};
use crate::conns::{Choice, Meant, Version};
use crate::messages::{Ground, Outcome, Switch, Unanswered};
use crate::table::Conn;
use crate::telling::TELL_AGAIN;

/// Time after which a kernel says again where a connection stands. Linux does so twice a second.
const SPEAKS_AGAIN: Duration = Duration::from_millis(1100);

/// Choices that a peer is to be told.
pub type Due = Vec<(FlowKey, Choice)>;

/// Takes what peers, or only this one, are to be told by now.
pub fn take_due<M: Machine>(m: &M, only: Option<usize>) -> BTreeMap<usize, Due> {
    let meant = |pair: &FlowKey| only.is_none() || m.peer_of(pair) == only;
    let mut by_peer: BTreeMap<usize, Due> = BTreeMap::new();
    for (pair, choice) in m.conns(|conns| conns.take_tellings(m.now(), meant)) {
        if let Some(peer) = m.peer_of(&pair) {
            by_peer.entry(peer).or_default().push((pair, choice));
        }
    }
    by_peer
}

/// Tells a peer of choices. Returns those for connections that it does not know.
///
/// # Errors
/// The peer does not answer: it is told again.
pub async fn tell_choices<M: Machine>(
    m: &M,
    peer: usize,
    due: Due,
) -> Result<Vec<(FlowKey, Version)>, Unanswered> {
    let mut chosen = BTreeMap::<_, Vec<_>>::new();
    for (pair, choice) in due {
        let socket = choice.socket;
        let group = chosen.entry((choice.bump, choice.version.host));
        let conns = group.or_default();
        conns.push((Meant { pair, socket }, choice.version));
    }
    let (mut told, mut unknown) = (Ok(()), Vec::new());
    for ((bump, _), conns) in chosen {
        let switch = Switch {
            bump,
            explicit: true,
            ready: false,
            ground: Ground::Proved,
        };
        for conns in conns.chunks(ROUND) {
            let opening = opening(m, conns).await;
            let answers = match told {
                Ok(()) => ask_switch(m, peer, conns, switch).await,
                // It is not asked for the others.
                Err(error) => vec![Err(error); conns.len()],
            };
            for ((conn, version), answer) in conns.iter().zip(answers) {
                told = told.and(answer.map(drop));
                let is_unknown = matches!(answer, Ok((Outcome::NoConnection, _)));
                if is_unknown {
                    unknown.push((conn.pair, *version));
                }
                let now = m.now();
                let handle = |known: &mut Conn| {
                    if is_unknown && opening.contains(&conn.pair) {
                        known.telling.tell_later(known.in_force(), now);
                    }
                    // It was taken back while the peer was told.
                    let stands = known.choice.get();
                    if stands.is_some_and(|stands| stands.version < *version) {
                        known.telling.tell_all(now);
                    }
                    known.telling.handle_answer(*version, answer, now)
                };
                if let Some(own) = update(m, &conn.pair, handle) {
                    switches::give_in(m, peer, conn.pair, *version, own).await;
                }
            }
            m.wake(Task::Tell);
        }
    }
    told.map(|()| unknown)
}

/// Connections whose SYN may not have arrived: a peer that does not know them will.
async fn opening<M: Machine>(m: &M, conns: &[(Meant, Version)]) -> BTreeSet<FlowKey> {
    let pairs: Vec<FlowKey> = conns.iter().map(|(conn, _)| conn.pair).collect();
    let found = or_warn(m, m.find(&pairs).await).unwrap_or_default();
    let opening = found.values().filter(|live| m.is_opening(*live));
    opening.map(|live| live.pair()).collect()
}

/// Tells a peer, whose session is new, which bumps rules here use, and what was chosen for connections with it. Returns choices
/// for those that it does not know.
///
/// # Errors
/// The peer does not answer.
async fn tell_all<M: Machine>(m: &M, peer: usize) -> Result<Vec<(FlowKey, Version)>, Unanswered> {
    super::wants::send(m, peer).await?;
    let of_peer = |pair: &FlowKey| m.peer_of(pair) == Some(peer);
    m.conns(|conns| conns.tell_all(m.now(), of_peer));
    m.wake(Task::Tell);
    let due = take_due(m, Some(peer)).remove(&peer).unwrap_or_default();
    if !due.is_empty() {
        m.tell(News::ToldAgain);
    }
    tell_choices(m, peer, due).await
}

/// Tells a peer, whose session is new, all that concerns it, until it has answered; then carries out what rules here say
/// of the connections with it.
pub async fn resync<M: Machine>(m: &M, peer: usize) {
    recover(m, peer).await;
    let unknown = loop {
        match tell_all(m, peer).await {
            Ok(unknown) => break unknown,
            Err(Unanswered::Silent | Unanswered::Full) => m.sleep(TELL_AGAIN).await,
            // It is told with the next session.
            Err(_) => return,
        }
    };
    choose_again(m, peer).await;
    or_warn(m, super::rules::follow_at_peer(m, peer).await);
    recover(m, peer).await;
    // A peer that began anew does not know what a silent end is called behind a router until that speaks.
    m.sleep(SPEAKS_AGAIN).await;
    recover(m, peer).await;
    if unknown.is_empty() {
        return;
    }
    // By then this host knows by which names.
    m.sleep(SPEAKS_AGAIN).await;
    m.conns(|conns| {
        for (pair, version) in unknown {
            conns.update(&pair, |conn| conn.telling.tell(version, m.now()));
        }
    });
    m.wake(Task::Tell);
}

/// Makes choices again that an earlier run of the daemon did not bring to an end.
async fn choose_again<M: Machine>(m: &M, peer: usize) {
    if !m.conns(|conns| conns.iter().any(|(_, conn)| conn.phase.is_cut_short())) {
        return;
    }
    // What a user chooses meanwhile is later.
    let _turn = m.turn().await;
    let lives = or_warn(m, m.lives().await).unwrap_or_default();
    let mut cut_short: BTreeMap<Option<BumpId>, Vec<M::Live>> = BTreeMap::new();
    for live in lives.into_iter().filter(|live| live.peer() == peer) {
        let Meant { pair, socket } = live.meant();
        if let Some(choice) = update(m, &pair, |conn| conn.take_cut_short(socket)) {
            cut_short.entry(choice.bump).or_default().push(live);
        }
    }
    for (bump, lives) in cut_short {
        let chosen = choices::choose(m, &lives, bump.into(), |_, _| ()).await;
        let outcomes = or_warn(m, chosen).unwrap_or_default().into_iter();
        if let Some(why) = outcomes.filter_map(|(_, it)| it.fault()).next() {
            let why = format!("what an earlier run began to move stays: {why}");
            m.tell(News::Peer { peer, why: &why });
        }
    }
}

/// Has this host's kernel tell a peer's where the connections between them stand.
async fn recover<M: Machine>(m: &M, peer: usize) {
    let lives = or_warn(m, m.lives().await).unwrap_or_default();
    for live in lives
        .iter()
        .filter(|live| live.peer() == peer && !live.is_over())
    {
        // Not where a rule of this host or of the peer is about to have it: that would take it there unprepared.
        let known = || m.conns(|conns| conns.get(&live.pair()).place.was());
        m.solicit(&live.pair(), m.marked(live).or_else(known));
    }
}
