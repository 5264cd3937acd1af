//! What a peer is told whose session is new.

use dibs_switch::conns::Pair;
use dibs_switch::messages::Unanswered;
use dibs_switch::telling::TELL_AGAIN;

use crate::clock::now;
use crate::daemon::Daemon;
use crate::switching::telling;
use crate::wakers::Task;
use crate::{connections, following, recovery, wants};

/// Tells a peer, whose session is new, all that concerns it, until it has answered; what it cannot do yet it is told
/// [again](crate::switching::telling).
pub(crate) async fn resync(daemon: &Daemon, peer: usize) {
    let turn = {
        let known = &mut daemon.state.borrow_mut().peers[peer];
        known.told += 1;
        known.told
    };
    while let Err(error) = tell_all(daemon, peer).await {
        tracing::debug!(peer = daemon.peer_name(peer), "resync: {error}");
        // It is told with the next session.
        if !matches!(error, Unanswered::Silent | Unanswered::Full) {
            return;
        }
        tokio::time::sleep(TELL_AGAIN).await;
        if daemon.state.borrow().peers[peer].told != turn {
            return;
        }
    }
    enforce_all(daemon, peer).await;
    if let Err(error) = recovery::recover(daemon, peer).await {
        tracing::warn!("connections go on late: {error:#}");
    }
}

/// Tells a peer which bumps our rules use, and what was chosen for connections with it.
async fn tell_all(daemon: &Daemon, peer: usize) -> Result<(), Unanswered> {
    wants::send(daemon, peer).await?;
    {
        let conns = &mut daemon.state.borrow_mut().conns;
        let of_peer = |pair: &Pair| daemon.peer_of(pair.remote.ip()) == Some(peer);
        conns.tell_all(now(), of_peer);
    }
    daemon.wakers.wake(Task::Tell);
    let due = telling::take_due(daemon, Some(peer))
        .remove(&peer)
        .unwrap_or_default();
    telling::tell_choices(daemon, peer, due).await
}

/// Carries out what rules here say of all connections with a peer.
async fn enforce_all(daemon: &Daemon, peer: usize) {
    match connections::all(daemon).await {
        Ok(mut lives) => {
            lives.retain(|live| live.peer == peer);
            following::enforce(daemon, &lives).await;
            let ruled = following::ruled(daemon, &lives).into_iter();
            for (bump, lives) in ruled.chain(following::followed_here(daemon, &lives)) {
                following::follow_rules(daemon, &lives, Some(bump).into()).await;
            }
        }
        Err(error) => tracing::warn!("{error:#}"),
    }
}
