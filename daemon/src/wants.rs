//! WANT: the bumps that rules need at the other end, said to peers, and made ready for them.

use dibs_switch::messages::{Body, Outcome, Unanswered};
use dibs_switch::rules;
use dibs_wire::FlowKey;
use ipnet::IpNet;

use crate::daemon::{Daemon, State};
use crate::reconcile;
use crate::rules::Rule;

/// The bumps that our rules put connections of a peer into, and those that some stay on because plain does not carry
/// them; bit n for number n.
pub(crate) fn wanted_of(daemon: &Daemon, peer: usize) -> u16 {
    let concerns = |rule: &&Rule| {
        let mut to = rule.classes.iter().map(|class| class.destination);
        to.any(|to| to.is_none_or(|to| leads_to(daemon, peer, to)))
    };
    let state = daemon.state.borrow();
    let is_of_peer = |pair: &FlowKey| daemon.peer_of(pair.dst) == Some(peer);
    let kept = state.conns.kept().filter(|(pair, _)| is_of_peer(pair));
    let kept = kept.fold(0, |bumps, (_, bump)| bumps | 1 << bump.get());
    rules::wanted(state.rules.in_force().filter(concerns)) | kept
}

/// The same for all peers, by index.
pub(crate) fn wanted(daemon: &Daemon) -> Vec<u16> {
    let peers = 0..daemon.config.peers.len();
    peers.map(|peer| wanted_of(daemon, peer)).collect()
}

/// True if some of these addresses are behind a peer.
pub(crate) fn leads_to(daemon: &Daemon, peer: usize, to: IpNet) -> bool {
    let mut behind = daemon.config.peers[peer].addresses.iter();
    behind.any(|net| net.contains(&to) || to.contains(net))
}

/// Has a peer's daemon make ready what our rules need there; waits until it has.
pub(crate) async fn send(daemon: &Daemon, peer: usize) -> Result<(), Unanswered> {
    send_beside(daemon, peer, 0).await
}

async fn send_beside(daemon: &Daemon, peer: usize, more: u16) -> Result<(), Unanswered> {
    let want = Body::Want {
        sequence: daemon.rpc.next_sequence(),
        bumps: wanted_of(daemon, peer) | more,
        devices: daemon.bumps.device_names().into_iter().collect(),
    };
    daemon.rpc.ask(peer, want).await.map(drop)
}

/// As [`send`], to all peers with a session at once.
pub(crate) async fn send_all(daemon: &Daemon) {
    let none = vec![0; daemon.config.peers.len()];
    send_all_beside(daemon, &none).await;
}

/// The same, with bumps that each is to keep ready as well for now.
pub(crate) async fn send_all_beside(daemon: &Daemon, more: &[u16]) {
    let peers = more.iter().enumerate();
    let asked = peers.map(|(peer, more)| async move {
        match send_beside(daemon, peer, *more).await {
            // It hears of it as soon as there is a session.
            Ok(()) | Err(Unanswered::NoSession) => {}
            Err(error) => {
                daemon.warn_of_peer(peer, &error.to_string());
            }
        }
    });
    futures_util::future::join_all(asked).await;
}

/// Makes ready what a peer's rules need here.
pub(crate) async fn answer(daemon: &Daemon, peer: usize, sequence: u64, bumps: u16) -> Outcome {
    let carried = daemon.bumps.mask();
    {
        let mut state = daemon.state.borrow_mut();
        let State { conns, peers, .. } = &mut *state;
        let is_of_peer = |pair: &FlowKey| daemon.peer_of(pair.dst) == Some(peer);
        let wants = &mut peers[peer].wants;
        let known = wants.handle_want(conns, sequence, bumps & carried, is_of_peer);
        if let Some(outcome) = known {
            return outcome;
        }
    }
    let ready = async {
        daemon.save()?;
        reconcile::steer(daemon).await.map(drop)
    };
    match ready.await {
        Ok(()) if bumps & !carried != 0 => Outcome::NoBump,
        Ok(()) => Outcome::Done,
        Err(error) => {
            let why = format!("cannot make ready for its rules: {error:#}");
            daemon.warn_of_peer(peer, &why);
            Outcome::Failed
        }
    }
}
