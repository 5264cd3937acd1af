//! Proof which connections peers call by other addresses, here and for peers that ask.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use dibs_wire::{FlowKey, SeqNumber};
use futures_util::future::{Either, join_all, select};

use super::{
    Live as _, Machine, News, Plain, ROUND, Task, asks, entries, or_warn, stands_on, switches,
    update, warn_of,
};
use crate::conns::Socket;
use crate::knock::{Knock, Numbers};
use crate::matching::{Carrying, GRACE, Matched, Search, Stand, WITHIN};
use crate::messages::Outcome::{Ambiguous, NotHeard, Renumbered};
use crate::messages::{Answer, Body, MAX_MATCHES, MAX_SOUGHT, Outcome, Unanswered};
use crate::shadow::Shadow;

/// Time in which a peer shows the next of what it said that it would.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);

/// A connection of which both names are known now.
struct Found {
    pair: FlowKey,
    socket: Socket,
    /// State in plain.
    stand: Stand,
}

/// Has a peer find connections in plain that it calls by other addresses. Returns what it answers, of those of which the
/// kernel here says where they stand.
///
/// # Errors
/// The system cannot.
pub(super) async fn ask<M: Machine>(
    m: &M,
    peer: usize,
    lives: &[M::Live],
) -> Result<BTreeMap<FlowKey, Answer>, M::Fault> {
    let pairs = lives.iter().map(|live| live.pair()).collect();
    let stands = m.stands(&pairs).await?;
    if stands.is_empty() {
        return Ok(BTreeMap::new());
    }
    let conns: Vec<(FlowKey, Stand)> = stands.iter().map(|(pair, at)| (*pair, *at)).collect();
    let ask = async |conns: &[(FlowKey, Stand)]| -> Vec<Answer> {
        match m.ask(peer, Body::Match(conns.to_vec())).await {
            Ok(outcomes) => { outcomes.into_iter().map(Ok) }
                .chain(iter::repeat(Err(Unanswered::Silent)))
                .take(conns.len())
                .collect(),
            Err(error) => vec![Err(error); conns.len()],
        }
    };
    let mut asked = pin!(join_all(conns.chunks(MAX_MATCHES).map(ask)));
    let plain = m.plain(stands.keys().copied())?;
    let begin = m.now();
    let show = |stand: &Stand| {
        let (seq, ack) = (SeqNumber::new(stand.seq), SeqNumber::new(stand.ack));
        Knock::ask(begin, Numbers::of(seq, ack).into())
    };
    let mut shows: Vec<Knock> = stands.values().map(show).collect();
    let answers = loop {
        let at = m.now();
        for ((pair, stand), show) in stands.iter().zip(&mut shows) {
            while show.poll_send(at).is_some() {
                plain.send(pair, &stand.shown().packet(pair));
            }
        }
        let due = shows.iter().filter_map(Knock::due).min();
        if let Either::Left((answers, _)) = select(&mut asked, pin!(plain.hear(due))).await {
            break answers;
        }
    };
    let answers: BTreeMap<FlowKey, Answer> = { stands.keys().copied() }
        .zip(answers.into_iter().flatten())
        .collect();
    let is_found =
        |live: &&M::Live| matches!(answers.get(&live.pair()), Some(Ok((Outcome::Done, _))));
    for live in lives.iter().filter(is_found) {
        let pair = live.pair();
        let found = Found {
            pair,
            socket: live.meant().socket,
            stand: stands[&pair],
        };
        // Over the wire it has the name that it has here.
        note(m, peer, &found, pair)?;
    }
    or_warn(m, m.save());
    Ok(answers)
}

/// Has a peer show its connections in plain to these ports of this host, which knows them by addresses of a router. What the peer shows is
/// [matched](Machine::is_matched) afterwards.
pub async fn seek<M: Machine>(m: &M, peer: usize, ports: &BTreeSet<u16>) {
    let before = BTreeSet::from_iter(m.matched());
    let ports = Vec::from_iter(ports.iter().copied());
    let ask = async |ports: &[u16]| m.ask(peer, Body::Seek(ports.to_vec())).await;
    let answers = join_all(ports.chunks(MAX_SOUGHT).map(ask)).await;
    let answers = answers.into_iter().filter_map(Result::ok).flatten();
    // The peer may say any number.
    let shown = { answers.filter(|(outcome, _)| *outcome == Outcome::Done) }
        .fold(0_u64, |shown, (_, count)| shown.saturating_add(count));
    let is_new = |pair: &&FlowKey| !before.contains(pair) && m.peer_of(pair) == Some(peer);
    while (m.matched().iter().filter(is_new).count() as u64) < shown {
        let late = pin!(m.sleep(SHOWN_WITHIN));
        if let Either::Left(_) = select(late, pin!(m.woken(Task::Match))).await {
            break;
        }
    }
}

/// Connections that are being shown to a peer: however often it asks, each is shown once at a time.
pub(super) type Shown = Rc<RefCell<BTreeSet<FlowKey>>>;

/// Answers a peer that knows connections to these ports of it by addresses of a router. They are shown to it then.
pub(super) async fn show<M: Machine + 'static>(
    m: &Rc<M>,
    peer: usize,
    ports: &[u16],
    shown: &Shown,
) -> (Outcome, u64) {
    let Some(mut lives) = or_warn(&**m, m.lives().await) else {
        return (Outcome::Failed, 0);
    };
    lives.retain(|live| {
        let is_plain = !live.is_over() && stands_on(&**m, live).is_none();
        live.peer() == peer && is_plain && m.lacks_plain(&live.pair()).is_none()
    });
    let is_named = |live: &M::Live| ports.contains(&live.pair().dport);
    // Otherwise a router leads to these ports from others.
    if lives.iter().any(is_named) {
        lives.retain(is_named);
    }
    if lives.is_empty() {
        return (Outcome::NoConnection, 0);
    }
    let unmatched = lives.iter().filter(|live| !m.is_matched(&live.pair()));
    let answer = (Outcome::Done, unmatched.count() as u64);
    lives.retain(|live| shown.borrow_mut().insert(live.pair()));
    if lives.is_empty() {
        return answer;
    }
    let (own, shown) = (Rc::clone(m), Rc::clone(shown));
    // The peer has its answer meanwhile, so that it deals with questions.
    m.spawn(async move {
        for lives in lives.chunks(ROUND) {
            let answers = or_warn(&*own, ask(&*own, peer, lives).await).unwrap_or_default();
            let found = answers.into_iter();
            let found = found.filter(|(_, answer)| matches!(answer, Ok((Outcome::Done, _))));
            let found: Vec<FlowKey> = found.map(|(pair, _)| pair).collect();
            // Of what was chosen here before the peer knew of it.
            let now = own.now();
            own.conns(|conns| conns.update_each(&found, |conn| conn.telling.tell_all(now)));
            own.wake(Task::Tell);
            for live in lives {
                shown.borrow_mut().remove(&live.pair());
            }
        }
    });
    answer
}

/// Has peers find connections in plain that rules are about to bring to bumps, and that they know by other addresses: a peer's kernel
/// answers with a reset what comes by a name that it does not know. Those that are not found for a reason stay in plain, by choice;
/// they are returned.
pub(super) async fn introduce<M: Machine>(m: &M, lives: &[M::Live]) -> BTreeMap<FlowKey, Outcome> {
    let (mut stay, mut unfound) = (Vec::new(), BTreeMap::new());
    let unmatched = lives.iter().filter(|live| !m.is_matched(&live.pair()));
    for (peer, lives) in asks::by_peer::<M>(unmatched.copied()) {
        let answers = asks::ask_whether(m, peer, &lives).await.into_iter();
        let unknown = answers.filter(|(_, it)| matches!(it, Ok((Outcome::NoConnection, _))));
        let unknown: Vec<M::Live> = unknown.map(|(live, _)| live).collect();
        if unknown.is_empty() {
            continue;
        }
        let found = or_warn(m, ask(m, peer, &unknown).await).unwrap_or_default();
        for live in unknown {
            let why = found.get(&live.pair()).and_then(|answer| answer.ok());
            if let Some((why @ (NotHeard | Renumbered | Ambiguous), _)) = why {
                m.tell(News::Unfound { conn: &live, why });
                unfound.insert(live.pair(), why);
                stay.push(live);
            }
        }
    }
    if !stay.is_empty() && or_warn(m, switches::prepare(m).await).is_some() {
        // The peer has no part in it.
        for live in &stay {
            let (conn, host) = (live.meant(), m.hosts(live.peer()).own);
            update(m, &conn.pair, |known| {
                known.choice.propose(conn.socket, None, host, 0);
            });
        }
        or_warn(m, m.save());
        let pairs: Vec<FlowKey> = stay.iter().map(|live| live.pair()).collect();
        warn_of(m, &m.mark_choices(&pairs).await);
    }
    unfound
}

/// Notes a match. `theirs`: its name over the wire.
fn note<M: Machine>(m: &M, peer: usize, found: &Found, theirs: FlowKey) -> Result<(), M::Fault> {
    let Found {
        pair,
        socket,
        stand,
    } = *found;
    if m.keeps_plain_open() {
        let shadow = Shadow::new(Some(stand.into()), m.now());
        m.shadows(|shadows| shadows.insert(pair, shadow));
    }
    let known = Matched {
        peer,
        theirs,
        socket,
    };
    m.match_names(pair, known)
}

/// Answers a peer that shows these connections, which it calls so, in plain: whether one here is each of them.
pub async fn answer<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> Vec<(Outcome, u64)> {
    let found = match look_for(m, peer, conns).await {
        Ok(found) => found,
        Err(fault) => {
            let why = &format!("cannot look for its connections: {fault:#}");
            m.tell(News::Peer { peer, why });
            return vec![(Outcome::Failed, 0); conns.len()];
        }
    };
    let mut new = Vec::new();
    let mut note = |found: Result<Found, Outcome>, theirs: FlowKey| {
        let found = found?;
        new.extend(Some(found.pair).filter(|pair| !m.is_matched(pair)));
        note(m, peer, &found, theirs).map_err(|_| Outcome::Failed)
    };
    let noted = { found.into_iter() }
        .zip(conns)
        .map(|(found, (theirs, _))| note(found, theirs.reversed()));
    let outcomes = noted.map(|noted| (noted.err().unwrap_or(Outcome::Done), 0));
    let outcomes = outcomes.collect();
    if !new.is_empty() {
        m.wake(Task::Match);
        or_warn(m, entries::take_up(m, &new).await);
        or_warn(m, m.save());
        if m.is_steering() {
            or_warn(m, m.steer().await);
        }
        or_warn(m, follow_rules(m, &new).await);
    }
    outcomes
}

/// Has connections whose names are new follow rules of this host soon, unless the peer has chosen a bump for them by then.
async fn follow_rules<M: Machine>(m: &M, new: &[FlowKey]) -> Result<(), M::Fault> {
    for live in m.find(new).await?.values() {
        if let Some(bump) = m.ruling(live, |ruling| ruling.moves_to()) {
            let (unasked, now) = (Err(Unanswered::NotAsked), m.now());
            update(m, &live.pair(), |conn| {
                conn.telling.handle_moved(Some(bump), unasked, now);
            });
        }
    }
    m.wake(Task::Tell);
    Ok(())
}

/// Looks for connections that a peer shows. What comes from an address that the peer's datagrams come from, too, is
/// translated by nobody, and is looked for in vain.
async fn look_for<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> Result<Vec<Result<Found, Outcome>>, M::Fault> {
    let own = m.addresses_of(peer).await?;
    let is_translated = |(pair, _): &&(FlowKey, Stand)| !own.contains(&pair.src);
    let shown: Vec<(FlowKey, Stand)> = conns.iter().filter(is_translated).copied().collect();
    let mut found = match shown.is_empty() {
        true => Vec::new(),
        false => find_shown(m, peer, &shown).await?,
    }
    .into_iter();
    let each = |conn: &(FlowKey, Stand)| match is_translated(&conn) {
        true => found.next().expect("each that is shown is looked for"),
        false => Err(Outcome::NoConnection),
    };
    Ok(conns.iter().map(each).collect())
}

/// Connections here that a peer shows; or why there is none.
async fn find_shown<M: Machine>(
    m: &M,
    peer: usize,
    conns: &[(FlowKey, Stand)],
) -> Result<Vec<Result<Found, Outcome>>, M::Fault> {
    let mut search = Search::new(conns.iter().map(|(_, stand)| stand.shown()).collect());
    let plain = m.plain_by_numbers(conns)?;
    let mut end = m.now() + WITHIN;
    let mut is_complete = false;
    while m.now() < end {
        let heard = plain.hear(Some(end)).await;
        if let Some((pair, stand)) = heard.and_then(|bytes| Stand::read(&bytes)) {
            search.handle_heard(pair, &stand);
        }
        if !is_complete && search.is_complete() {
            // Another address may show the same.
            is_complete = true;
            end = end.min(m.now() + GRACE);
        }
    }
    let candidates: Vec<FlowKey> = { search.candidates().into_iter() }
        .filter(|pair| m.peer_of(pair).is_none_or(|known| known == peer))
        .collect();
    let stands = m
        .stands(&m.sockets(&candidates).await?.into_keys().collect())
        .await?;
    // They have carried no less than when their kernel spoke.
    let sockets = m.sockets(&Vec::from_iter(stands.keys().copied())).await?;
    let known = |(pair, stand)| Some((pair, (stand, *sockets.get(&pair)?)));
    let here = stands.into_iter().filter_map(known).collect();
    let find = |(index, (_, asking)): (usize, &(FlowKey, Stand))| {
        let pair = search.name(index, asking, &here)?;
        let (stand, Carrying { socket, .. }) = here[&pair];
        Ok(Found {
            pair,
            socket,
            stand,
        })
    };
    let found: Vec<Result<Found, Outcome>> = conns.iter().enumerate().map(find).collect();
    let names: BTreeSet<FlowKey> = found.iter().flatten().map(|found| found.pair).collect();
    m.note_copies(search.copies(&names));
    Ok(found)
}
