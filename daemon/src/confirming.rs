//! Peers are asked whether connections that are on a bump here are on it there too: those are locked.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_switch::conns::{Meant, Pair};
use dibs_switch::locks::{self, Here};
use dibs_switch::messages::{Answer, Body, Named, Outcome};
use dibs_switch::tracked::Tracked;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::live::Live;
use crate::switching::asking;
use crate::switching::asking::ROUND;
use crate::wakers::Task;
use crate::{connections, locking};

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Connections that peers are asked about at one look; the others wait for the next.
const MOST_ASKED: usize = 512;

/// Asks peers about connections that are on a bump here, and notes which are there too.
async fn ask_confirmations(daemon: &Daemon) -> anyhow::Result<()> {
    if !locking::locks(daemon) || daemon.state.borrow().installed.is_empty() {
        return Ok(());
    }
    let mut asking: BTreeMap<(usize, BumpId), Vec<Meant>> = BTreeMap::new();
    {
        let _turn = daemon.kernel.looking().await;
        let pairs = connections::sockets_as(daemon, |live| Some(live.pair)).await?;
        let tracked = locking::tracked_of(daemon, &pairs).await?;
        let now = now();
        let wants_asking = |live: Live| {
            let bump = stays_on(daemon, &live, &tracked)?;
            let state = daemon.state.borrow();
            let wants = state.conns.get(&live.pair).lock.wants_asking(bump, now);
            wants.then(|| (live.peer, bump, Meant::from(&live)))
        };
        let mut wanting = connections::sockets_as(daemon, wants_asking).await?;
        wanting.truncate(MOST_ASKED);
        for (peer, bump, conn) in wanting {
            asking.entry((peer, bump)).or_default().push(conn);
        }
    }
    let asked = asking
        .iter()
        .map(|((peer, bump), conns)| ask_confirmation(daemon, *peer, *bump, conns));
    let answers = futures_util::future::join_all(asked).await.concat();
    let confirmed = { answers.iter() }
        .filter(|(.., answer)| matches!(answer, Ok((Outcome::Done, _))))
        .map(|(_, conn, _)| conn.pair);
    // It may have left while the peer was asked.
    let confirmed: Vec<Pair> = confirmed.collect();
    let (lives, tracked) = match confirmed.is_empty() {
        true => Default::default(),
        false => locking::looked_up(daemon, &confirmed).await?,
    };
    for (bump, Meant { pair, socket }, answer) in answers {
        let live = lives.get(&pair).filter(|live| live.socket == socket);
        let stays_on = live.and_then(|live| stays_on(daemon, live, &tracked));
        daemon.update(&pair, |conn| {
            conn.lock.handle_answer(bump, answer, stays_on, now());
        });
    }
    daemon.wakers.wake(Task::Lock);
    Ok(())
}

/// Asks one peer, until it does not answer.
async fn ask_confirmation(
    daemon: &Daemon,
    peer: usize,
    bump: BumpId,
    conns: &[Meant],
) -> Vec<(BumpId, Meant, Answer)> {
    let mut answers = Vec::new();
    for conns in conns.chunks(ROUND) {
        let body = |named: &[(usize, Named)]| Body::Confirm {
            bump,
            conns: named.iter().map(|(_, named)| *named).collect(),
        };
        let some = asking::ask_about(daemon, peer, conns, body).await;
        let answers_none = some.iter().any(Result::is_err);
        let some = conns.iter().zip(some);
        answers.extend(some.map(|(conn, answer)| (bump, *conn, answer)));
        if answers_none {
            break;
        }
    }
    answers
}

/// Answers whether connections are on a bump here; those that are, the peer just said, are so at both
/// ends.
pub(crate) async fn on_confirm(
    daemon: &Daemon,
    peer: usize,
    bump: BumpId,
    conns: Vec<Named>,
) -> Vec<(Outcome, u64)> {
    let pairs: Vec<Pair> = conns.iter().map(|named| named.pair.reversed()).collect();
    let (lives, tracked) = match locking::looked_up(daemon, &pairs).await {
        Ok(found) => found,
        Err(error) => {
            daemon.warn_of_peer(peer, &format!("{error:#}"));
            return vec![(Outcome::Failed, 0); pairs.len()];
        }
    };
    let mut outcomes = Vec::with_capacity(pairs.len());
    for (pair, named) in pairs.into_iter().zip(conns) {
        let live = lives.get(&pair).filter(|live| live.peer == peer);
        let here = live.map(|live| Here {
            socket: live.socket,
            stays_on: stays_on(daemon, live, &tracked),
        });
        let answer = locks::answer(bump, &named, here);
        if answer.0 == Outcome::Done && locking::locks(daemon) {
            daemon.update(&pair, |conn| conn.lock.confirm(bump, now()));
            daemon.wakers.wake(Task::Lock);
        }
        outcomes.push(answer);
    }
    outcomes
}

/// The bump that a connection is on, unless it is about to leave it or not there yet.
fn stays_on(daemon: &Daemon, live: &Live, tracked: &Tracked) -> Option<BumpId> {
    let on = tracked.bump(&live.pair);
    let on = on.filter(|_| !live.over && !live.bound);
    daemon.state.borrow().ruling(live).stays_on(on)
}

/// Asks peers to confirm, after each switch and from time to time.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        let woken = daemon.wakers.woken(Task::Confirm);
        let _ = tokio::time::timeout(LOOK_EVERY, woken).await;
        daemon
            .events
            .note("ask peers to confirm", ask_confirmations(&daemon).await);
    }
}
