//! What a rule of a peer implies here.

use dibs_switch::conns::Version;
use dibs_switch::marks::{Hand, Handed};
use dibs_wire::FlowKey;

use crate::daemon::Daemon;
use crate::events::Audience;
use crate::marking::Mark;
use crate::{connections, marking, reconcile};

/// Keeps a connection on the bump that a rule of the peer wants it on: of what we sent in plain the
/// peer would take nothing, or answer it by the bump.
pub(super) async fn follow_peer(daemon: &Daemon, peer: usize, pair: &FlowKey, own: u64) {
    let mut carried = daemon.bumps.all().iter().map(|bump| bump.id);
    let Some(bump) = carried.find(|bump| u64::from(bump.get()) == own) else {
        let why = "a rule there wants a bump that this host does not carry";
        return daemon.warn_of_peer(peer, why);
    };
    let by = Hand::Peer;
    daemon.update(pair, |conn| conn.hand_over(Some(Handed { bump, by })));
    let followed = async {
        reconcile::install(daemon).await?;
        let _turn = daemon.kernel.marking().await;
        marking::mark_one(daemon, Mark::moved(*pair, Some(bump))).await?;
        anyhow::Ok(())
    };
    if let Err(error) = followed.await {
        daemon.warn_of_peer(peer, &format!("cannot follow a rule there: {error:#}"));
    }
}

/// A choice that the peer refuses for a rule of its own, having heard of it only now.
pub(super) async fn give_in(
    daemon: &Daemon,
    peer: usize,
    pair: FlowKey,
    version: Version,
    own: u64,
) {
    if !daemon.update(&pair, |conn| conn.choice.give_up(version)) {
        return;
    }
    daemon.save_or_warn();
    follow_peer(daemon, peer, &pair, own).await;
    let name = daemon.peer_name(peer).to_owned();
    let lives = connections::sockets_of(daemon, &[pair])
        .await
        .unwrap_or_default();
    daemon.events.tell_of(
        Audience::of(lives.get(&pair).and_then(|live| live.uid)),
        "choice_refused",
        format!(
            "a rule of peer {name} wants a connection on its bump, and not where it was chosen to be"
        ),
        &[("peer", name)],
    );
}
