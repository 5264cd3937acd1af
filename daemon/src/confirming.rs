//! Peers are asked whether connections that are on a bump here are on it there too: those are locked.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_switch::conns::Meant;
use dibs_switch::locks::{self, Here};
use dibs_switch::messages::{Answer, Body, Named, Outcome};
use dibs_switch::tracked::Tracked;
use dibs_wire::FlowKey;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::live::Live;
use crate::switching::asking;
use crate::switching::asking::ROUND;
use crate::wakers::Task;
use crate::{connections, locking};

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Peers that are being asked. True: a look passed over one meanwhile.
type Busy = Rc<RefCell<BTreeMap<usize, bool>>>;

/// Has peers asked about connections that are on a bump here.
async fn ask_confirmations(daemon: &Rc<Daemon>, busy: &Busy) -> anyhow::Result<()> {
    if !locking::locks(daemon) || daemon.state.borrow().installed.is_empty() {
        return Ok(());
    }
    let mut asking: BTreeMap<usize, BTreeMap<BumpId, Vec<Meant>>> = BTreeMap::new();
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
        for (peer, bump, conn) in connections::sockets_as(daemon, wants_asking).await? {
            let of_peer = asking.entry(peer).or_default();
            of_peer.entry(bump).or_default().push(conn);
        }
    }
    for (peer, asked) in asking {
        let of_task = Rc::clone(daemon);
        let ask = async move {
            for (bump, conns) in asked {
                let confirmed = ask_confirmation(&of_task, peer, bump, &conns).await;
                of_task.events.note("lock what peers confirmed", confirmed);
            }
        };
        let of_task = Rc::clone(daemon);
        ask_apart(busy, peer, ask, move || of_task.wakers.wake(Task::Confirm));
    }
    Ok(())
}

/// Has a peer asked by a task of its own, so that one that does not answer holds up no other. One that is still being
/// asked is passed over; `look_again` is called when that is over.
fn ask_apart(
    busy: &Busy,
    peer: usize,
    ask: impl Future<Output = ()> + 'static,
    look_again: impl FnOnce() + 'static,
) {
    if let Some(passed_over) = busy.borrow_mut().get_mut(&peer) {
        *passed_over = true;
        return;
    }
    busy.borrow_mut().insert(peer, false);
    let busy = Rc::clone(busy);
    tokio::task::spawn_local(async move {
        ask.await;
        if busy.borrow_mut().remove(&peer) == Some(true) {
            look_again();
        }
    });
}

/// Asks one peer, until it does not answer, and notes which connections are on the bump there, too.
async fn ask_confirmation(
    daemon: &Daemon,
    peer: usize,
    bump: BumpId,
    conns: &[Meant],
) -> anyhow::Result<()> {
    for conns in conns.chunks(ROUND) {
        let body = |named: &[(usize, Named)]| Body::Confirm {
            bump,
            conns: named.iter().map(|(_, named)| *named).collect(),
        };
        let answers = asking::ask_about(daemon, peer, conns, body).await;
        let answers_none = answers.iter().any(Result::is_err);
        note_answers(daemon, bump, conns.iter().zip(answers)).await?;
        if answers_none {
            break;
        }
    }
    Ok(())
}

/// Notes what a peer answered that was asked whether it has connections on `bump`.
async fn note_answers(
    daemon: &Daemon,
    bump: BumpId,
    answers: impl Iterator<Item = (&Meant, Answer)> + Clone,
) -> anyhow::Result<()> {
    let confirmed = answers.clone();
    let confirmed = confirmed.filter(|(_, answer)| matches!(answer, Ok((Outcome::Done, _))));
    // It may have left while the peer was asked.
    let confirmed: Vec<FlowKey> = confirmed.map(|(conn, _)| conn.pair).collect();
    let (lives, tracked) = match confirmed.is_empty() {
        true => Default::default(),
        false => locking::looked_up(daemon, &confirmed).await?,
    };
    for (Meant { pair, socket }, answer) in answers {
        let live = lives.get(pair).filter(|live| live.socket == *socket);
        let stays_on = live.and_then(|live| stays_on(daemon, live, &tracked));
        daemon.update(pair, |conn| {
            conn.lock.handle_answer(bump, answer, stays_on, now());
        });
    }
    daemon.wakers.wake(Task::Lock);
    Ok(())
}

/// Answers whether connections are on a bump here; those that are, the peer just said, are so at both
/// ends.
pub(crate) async fn on_confirm(
    daemon: &Daemon,
    peer: usize,
    bump: BumpId,
    conns: Vec<Named>,
) -> Vec<(Outcome, u64)> {
    let pairs: Vec<FlowKey> = conns.iter().map(|named| named.pair.reversed()).collect();
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
    let busy = Busy::default();
    loop {
        let woken = daemon.wakers.woken(Task::Confirm);
        let _ = tokio::time::timeout(LOOK_EVERY, woken).await;
        daemon.events.note(
            "ask peers to confirm",
            ask_confirmations(&daemon, &busy).await,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::Notify;
    use tokio::task::LocalSet;

    use super::*;

    /// Peer 0 says nothing, look after look; peer 1 is asked and answers at each of them.
    #[tokio::test]
    async fn a_silent_peer_keeps_nobody_from_being_asked() {
        let tasks = LocalSet::new();
        let silence = Rc::new(Notify::new());
        let [asked, looks] = [(); 2].map(|()| Rc::new(Cell::new([0, 0])));
        let busy = Busy::default();
        let look = || {
            for peer in [0, 1] {
                let (silence, asked) = (Rc::clone(&silence), Rc::clone(&asked));
                let ask = async move {
                    asked.update(|mut counts| {
                        counts[peer] += 1;
                        counts
                    });
                    if peer == 0 {
                        silence.notified().await;
                    }
                };
                let looks = Rc::clone(&looks);
                ask_apart(&busy, peer, ask, move || {
                    looks.update(|mut counts: [u32; 2]| {
                        counts[peer] += 1;
                        counts
                    });
                });
            }
        };
        let step = || tasks.run_until(async { tokio::task::yield_now().await });
        for round in 1..=3 {
            tasks.run_until(async { look() }).await;
            step().await;
            assert_eq!(asked.get(), [1, round]);
            assert_eq!(looks.get(), [0, 0]);
        }
        // It is asked again, once it has answered, about what came meanwhile.
        silence.notify_waiters();
        step().await;
        step().await;
        assert_eq!(looks.get(), [1, 0]);
        tasks.run_until(async { look() }).await;
        step().await;
        assert_eq!(asked.get(), [2, 4]);
    }
}
