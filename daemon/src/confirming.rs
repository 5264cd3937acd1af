//! Peers are asked whether connections that are on a bump here are on it there too: those are locked.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dibs_switch::engine::locks;

use crate::daemon::Daemon;
use crate::wakers::Task;

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Peers that are being asked. True: a look passed over one meanwhile.
type Busy = Rc<RefCell<BTreeMap<usize, bool>>>;

/// Has peers asked about connections that are on a bump here. Each is asked by a task of its own, so that one that does
/// not answer holds up no other; one that is still being asked waits for the next look.
async fn ask_confirmations(daemon: &Rc<Daemon>, busy: &Busy) -> anyhow::Result<()> {
    for (peer, asked) in locks::unconfirmed(&**daemon).await? {
        if let Some(passed_over) = busy.borrow_mut().get_mut(&peer) {
            *passed_over = true;
            continue;
        }
        busy.borrow_mut().insert(peer, false);
        let (daemon, busy) = (Rc::clone(daemon), Rc::clone(busy));
        tokio::task::spawn_local(async move {
            let confirmed = locks::ask(&*daemon, peer, &asked).await;
            daemon.events.note("lock what peers confirmed", confirmed);
            if busy.borrow_mut().remove(&peer) == Some(true) {
                daemon.wakers.wake(Task::Confirm);
            }
        });
    }
    Ok(())
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
