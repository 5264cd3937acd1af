//! Peers are asked whether connections that are on a bump here are on it there too: those are locked.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dibs_switch::engine::locks;

use crate::switch::Daemon;
use crate::switch::wakers::Task;

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Peers that are being asked. True: a look passed over one meanwhile.
type Busy = Rc<RefCell<BTreeMap<usize, bool>>>;

/// Has peers asked about connections that are on a bump here.
async fn ask_confirmations(daemon: &Rc<Daemon>, busy: &Busy) -> anyhow::Result<()> {
    for (peer, asked) in locks::unconfirmed(&**daemon).await? {
        let of_task = Rc::clone(daemon);
        let ask = async move {
            let confirmed = locks::ask(&*of_task, peer, &asked).await;
            of_task.events.note("lock what peers confirmed", confirmed);
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
