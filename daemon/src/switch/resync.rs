//! What a peer is told whose session is new.
//!
//! A peer may begin a session with each handshake. So that is done for one session of a peer at a time, and once a
//! second at most; sessions that begin meanwhile are dealt with together.

use std::rc::Rc;
use std::time::Duration;

use dibs_switch::engine::tells;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::switch::Daemon;
use crate::switch::{recovery, sessions};

/// Least time between the sessions of a peer that are dealt with.
const SPACING: Duration = Duration::from_secs(1);

/// New sessions of all peers, by index.
pub(crate) struct Resyncs(Vec<Rc<Notify>>);

impl Resyncs {
    /// Has new sessions dealt with from now on.
    pub(crate) fn open(daemon: &Rc<Daemon>) -> Self {
        let open = |peer| {
            let (daemon, begun) = (Rc::clone(daemon), Rc::new(Notify::new()));
            let asked = Rc::clone(&begun);
            tokio::task::spawn_local(async move {
                merged(&asked, async || take_up(&daemon, peer).await).await;
            });
            begun
        };
        Self((0..daemon.config.peers.len()).map(open).collect())
    }

    /// A peer has a new session.
    pub(crate) fn begin(&self, peer: usize) {
        self.0[peer].notify_one();
    }
}

/// Does the work each time that it is asked for: never twice at once, once in [`SPACING`] at most, and once for all
/// that asked meanwhile.
async fn merged(asked: &Notify, mut work: impl AsyncFnMut()) {
    loop {
        asked.notified().await;
        let begin = Instant::now();
        work().await;
        sleep_until(begin + SPACING).await;
    }
}

/// Takes up what there is with a peer whose session is new.
async fn take_up(daemon: &Daemon, peer: usize) {
    // How late it was when we called.
    daemon.events.note("save", daemon.save());
    sessions::tell_lacks(daemon, peer).await;
    if let Err(error) = recovery::recover(daemon, peer).await {
        daemon.warn_of_peer(peer, &format!("connections go on late: {error:#}"));
    }
    tells::resync(daemon, peer).await;
    if let Err(error) = recovery::recover(daemon, peer).await {
        daemon.warn_of_peer(peer, &format!("connections go on late: {error:#}"));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::sleep;

    use super::*;

    /// A peer restarts 1000 times within ten seconds, and telling it takes 300 ms.
    #[tokio::test(flavor = "current_thread", start_paused = true)]
    async fn sessions_that_begin_meanwhile_are_one() {
        let (asked, begun, under_way) = (Notify::new(), Cell::new(0), Cell::new(0));
        let work = async || {
            begun.update(|count| count + 1);
            under_way.update(|count| count + 1);
            assert_eq!(under_way.get(), 1, "one at a time");
            sleep(Duration::from_millis(300)).await;
            under_way.update(|count| count - 1);
        };
        let restarts = async {
            for _ in 0..1000 {
                asked.notify_one();
                sleep(Duration::from_millis(10)).await;
            }
            sleep(3 * SPACING).await;
        };
        tokio::select! {
            () = merged(&asked, work) => unreachable!("it goes on"),
            () = restarts => {}
        }
        assert_eq!(begun.get(), 11, "one a second, and one for the last");
        // The next one does not wait.
        let next = async {
            asked.notify_one();
            sleep(Duration::from_millis(1)).await;
        };
        tokio::select! {
            () = merged(&asked, async || begun.set(0)) => unreachable!("it goes on"),
            () = next => assert_eq!(begun.get(), 0),
        }
    }
}
