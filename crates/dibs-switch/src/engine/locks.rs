//! Connections that are on a bump at both ends, by both ends' word: those are locked.

use dibs_wire::FlowKey;
use std::collections::BTreeMap;

use dibs_core::Time;
use dibs_settings::BumpId;

use super::asks::{self, ROUND};
use super::{Live as _, Machine, News, Task, rules, tasks, update};
use crate::conns::Meant;
use crate::locks::{self, Here};
use crate::messages::{Answer, Body, Named, Outcome};
use crate::table::{Conn, ConnTable};
use crate::tracked::{Entry, Mend, Tracked};

/// Looks of which one is at all entries, also those that nothing is known of.
const LOOKS_PER_WHOLE: u32 = 30;

/// Looks at the locks of a host, one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    next: Time,
    count: u32,
}

impl Looks {
    /// Time at which the next one is due.
    pub(super) fn due(&self, conns: &ConnTable) -> Time {
        { conns.next_lock() }.map_or(self.next, |due| due.min(self.next))
    }

    /// Locks what is due, and corrects now and then what others did to locks.
    pub(super) async fn look<M: Machine>(&mut self, m: &M) -> Result<(), M::Fault> {
        if m.now() < self.next {
            return lock_due(m).await;
        }
        let whole = self.count.is_multiple_of(LOOKS_PER_WHOLE);
        self.count = self.count.wrapping_add(1);
        let began = m.now();
        let kept = mend(m, whole).await;
        self.next = m.now() + tasks::rest(m, began);
        kept
    }
}

/// A peer restarted: it is asked again about what is locked.
pub fn handle_restart<M: Machine>(m: &M, peer: usize) {
    let of_peer = |pair: &FlowKey| m.peer_of(pair) == Some(peer);
    m.conns(|conns| {
        conns.update_all(|pair, conn| {
            if of_peer(pair) {
                conn.lock.handle_restart();
            }
        });
    });
    m.wake(Task::Confirm);
}

/// Locks what is due.
async fn lock_due<M: Machine>(m: &M) -> Result<(), M::Fault> {
    let now = m.now();
    let due: Vec<FlowKey> = m.conns(|conns| conns.locks_due(now).collect());
    let (lives, tracked) = m.look_up(&due).await?;
    let is_on = |pair: &FlowKey, bump| lives.contains_key(pair) && tracked.bump(pair) == Some(bump);
    let locked = m.conns(|conns| conns.lock_due(now, is_on)).into_iter();
    let mends: Vec<_> = locked
        .map(|(pair, bump)| (pair, Mend::Lock(bump)))
        .collect();
    m.mend(&mends).await
}

/// Brings LOCKED in the kernel to what is due, and mends what was done to the entries: of connections that are known to be on bumps
/// or locked, or of the `whole` table.
async fn mend<M: Machine>(m: &M, whole: bool) -> Result<(), M::Fault> {
    if !m.is_steering() {
        return Ok(());
    }
    let now = m.now();
    // Before the sockets: what is locked and has none has ended.
    let known: Vec<FlowKey> = m.conns(|conns| conns.lockable().collect());
    if known.is_empty() && !whole {
        return Ok(());
    }
    let (mut lives, tracked) = m.survey((!whole).then_some(&known)).await?;
    lives.sort_unstable();
    let lives = |pair: &FlowKey| {
        let at = lives.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
        Some(lives[at].1)
    };
    if whole {
        // Some entries no event told of.
        let is_missed = |(pair, entry): &&(FlowKey, Entry)| {
            let is_on = entry.mark.bump.is_some() && lives(pair).is_some();
            is_on && m.conns(|conns| conns.get(pair).place.followed().is_none())
        };
        for (pair, _) in tracked.iter().filter(is_missed) {
            // It may have left since.
            if let Some(Entry { mark, .. }) = m.entry(pair).await? {
                m.note_followed(&[*pair, pair.reversed()], mark.bump).await;
            }
        }
    }
    let passes = |pair: &FlowKey| m.passes(pair);
    let mends = m.conns(|conns| conns.mend_locks(now, &known, &tracked, lives, passes));
    m.mend(&mends).await
}

/// Connections of a peer that it is to be asked about, by the bump that they are on here.
type Unconfirmed = BTreeMap<BumpId, Vec<Meant>>;

/// Finds out which peers are to be asked about which connections by now.
pub(super) async fn unconfirmed<M: Machine>(
    m: &M,
) -> Result<BTreeMap<usize, Unconfirmed>, M::Fault> {
    let mut asking: BTreeMap<usize, Unconfirmed> = BTreeMap::new();
    if !m.locks() {
        return Ok(asking);
    }
    let unconfirmed: Vec<FlowKey> = m.conns(|conns| conns.unconfirmed(m.now()).collect());
    if unconfirmed.is_empty() {
        return Ok(asking);
    }
    let (lives, tracked) = m.look_up(&unconfirmed).await?;
    for live in unconfirmed.iter().filter_map(|pair| lives.get(pair)) {
        let Some(bump) = stays_on(m, live, &tracked) else {
            continue;
        };
        let lock = m.conns(|conns| conns.get(&live.pair()).lock);
        if lock.wants_asking(bump, m.now()) {
            let of_peer = asking.entry(live.peer()).or_default();
            of_peer.entry(bump).or_default().push(live.meant());
        }
    }
    Ok(asking)
}

/// Asks one peer, until it does not answer, and notes which connections are on their bumps there, too.
pub(super) async fn ask<M: Machine>(
    m: &M,
    peer: usize,
    asked: &Unconfirmed,
) -> Result<(), M::Fault> {
    for (bump, conns) in asked {
        for conns in conns.chunks(ROUND) {
            // The peer takes the question for a word that they are there: some have begun to move while it was asked
            // about others.
            let rests = |conn: &&Meant| m.conns(|known| known.get(&conn.pair).rests());
            let conns: Vec<Meant> = conns.iter().filter(rests).copied().collect();
            for Meant { pair, .. } in &conns {
                update(m, pair, |conn| conn.lock.ask(*bump));
            }
            let body = |named: &[(usize, Named)]| Body::Confirm {
                bump: *bump,
                conns: named.iter().map(|(_, named)| *named).collect(),
            };
            let answers = asks::ask_about(m, peer, &conns, body).await;
            let answers_none = answers.iter().any(Result::is_err);
            note_answers(m, *bump, &conns, &answers).await?;
            bring_together(m, *bump, &conns, &answers).await?;
            if answers_none {
                break;
            }
        }
    }
    Ok(())
}

/// Has the peer follow to where connections are here that it has elsewhere, twice in a row, unless a choice decides: they stay because
/// plain does not carry them, or both hosts moved them at once. Where a rule decides, the kernel took its bump, and the peer's did not
/// follow what came by that, because it had just left: the kernel here speaks once more.
async fn bring_together<M: Machine>(
    m: &M,
    bump: BumpId,
    conns: &[Meant],
    answers: &[Answer],
) -> Result<(), M::Fault> {
    let apart: Vec<FlowKey> = m.conns(|known| {
        let is_apart = |(conn, answer): (&Meant, &Answer)| {
            let apart = matches!(answer, Ok((Outcome::Older, _)));
            let again = known.update(&conn.pair, |conn| conn.note_apart(apart));
            again.then_some(conn.pair)
        };
        conns.iter().zip(answers).filter_map(is_apart).collect()
    });
    if apart.is_empty() {
        return Ok(());
    }
    let (found, tracked) = m.look_up(&apart).await?;
    let is_unchosen = |live: &&M::Live| {
        let stays = stays_on(m, live, &tracked) == Some(bump);
        // It may have begun to follow the peer since that was asked.
        let rests = |conn: &Conn| conn.rests() && conn.choice.get().is_none();
        stays && m.conns(|conns| rests(conns.get(&live.pair())))
    };
    let lives = apart.iter().filter_map(|pair| found.get(pair));
    let lives = lives.filter(is_unchosen).copied();
    let is_ruled = |live: &M::Live| m.ruling(live, |ruling| ruling.deciding().is_some());
    let (ruled, lives) = lives.partition::<Vec<M::Live>, _>(is_ruled);
    { ruled.iter() }.for_each(|live| m.solicit(&live.pair(), Some(bump)));
    if !lives.is_empty() {
        rules::follow(m, &lives, Some(bump).into()).await;
    }
    Ok(())
}

/// Notes what a peer answered that was asked whether it has connections on `bump`.
async fn note_answers<M: Machine>(
    m: &M,
    bump: BumpId,
    conns: &[Meant],
    answers: &[Answer],
) -> Result<(), M::Fault> {
    let answers = conns.iter().zip(answers);
    let is_confirmed = |(_, answer): &(_, &Answer)| matches!(answer, Ok((Outcome::Done, _)));
    // It may have left while the peer was asked.
    let confirmed = answers.clone().filter(is_confirmed);
    let confirmed: Vec<FlowKey> = confirmed.map(|(conn, _)| conn.pair).collect();
    let (lives, tracked) = match confirmed.is_empty() {
        true => Default::default(),
        false => m.look_up(&confirmed).await?,
    };
    let mut unlocked = Vec::new();
    for (Meant { pair, socket }, answer) in answers {
        let live = lives
            .get(pair)
            .filter(|live| live.meant().socket == *socket);
        let stays_on = live.and_then(|live| stays_on(m, live, &tracked));
        let now = m.now();
        let goes = update(m, pair, |conn| {
            conn.lock.handle_answer(bump, *answer, stays_on, now)
        });
        unlocked.extend(goes.then_some(*pair));
    }
    if !unlocked.is_empty() {
        m.unlock(&unlocked).await;
    }
    m.wake(Task::Lock);
    Ok(())
}

/// Answers a peer whether connections are on a bump here; those that are, the peer just said, are so at both ends.
pub(super) async fn answer<M: Machine>(
    m: &M,
    peer: usize,
    bump: BumpId,
    conns: &[Named],
) -> Vec<(Outcome, u64)> {
    let pairs: Vec<FlowKey> = conns.iter().map(|named| named.pair.reversed()).collect();
    let (lives, tracked) = match m.look_up(&pairs).await {
        Ok(found) => found,
        Err(fault) => {
            let why = &format!("{fault:#}");
            m.tell(News::Peer { peer, why });
            return vec![(Outcome::Failed, 0); pairs.len()];
        }
    };
    let answer = |(pair, named): (&FlowKey, &Named)| {
        let live = lives.get(pair).filter(|live| live.peer() == peer);
        let here = live.map(|live| Here {
            socket: live.meant().socket,
            stays_on: stays_on(m, live, &tracked),
        });
        let answer = locks::answer(bump, named, here);
        if answer.0 == Outcome::Done && m.locks() {
            let now = m.now();
            update(m, pair, |conn| conn.lock.confirm(bump, now));
            m.wake(Task::Lock);
        }
        answer
    };
    pairs.iter().zip(conns).map(answer).collect()
}

/// The bump that a connection is on, unless it is about to leave it or not there yet.
fn stays_on<M: Machine>(m: &M, live: &M::Live, tracked: &Tracked) -> Option<BumpId> {
    let on = tracked.bump(&live.pair());
    let on = on.filter(|_| !live.is_over() && !live.is_bound());
    m.ruling(live, |ruling| ruling.stays_on(on))
}
