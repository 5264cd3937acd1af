//! WANT: the bumps that rules need at the other end, said to peers, and made ready for them.

use dibs_policy::Prefix;
use dibs_switch::conns::Pair;
use dibs_switch::messages::{Body, Outcome, Unanswered};
use dibs_switch::rules;

use crate::daemon::{Daemon, State};
use crate::reconcile;
use crate::rules::Rule;
use crate::terms::policy_prefix;

/// The bumps that our rules put connections of a peer into, bit n for number n.
pub(crate) fn wanted_of(daemon: &Daemon, peer: usize) -> u16 {
    let concerns = |rule: &&Rule| {
        let mut to = rule.classes.iter().map(|class| class.destination);
        to.any(|to| to.is_none_or(|to| leads_to(daemon, peer, to)))
    };
    let state = daemon.state.borrow();
    rules::wanted(state.rules.in_force().filter(concerns))
}

/// Whether some of these addresses are behind a peer.
pub(crate) fn leads_to(daemon: &Daemon, peer: usize, to: Prefix) -> bool {
    let mut behind = daemon.config.peers[peer]
        .addresses
        .iter()
        .map(policy_prefix);
    behind.any(|net| net.contains(to) || to.contains(net))
}

/// Has a peer's daemon make ready what our rules need there; waits until it has.
pub(crate) async fn send(daemon: &Daemon, peer: usize) -> Result<(), Unanswered> {
    let want = Body::Want {
        sequence: daemon.rpc.next_sequence(),
        bumps: wanted_of(daemon, peer),
        devices: daemon.bumps.device_names().into_iter().collect(),
    };
    daemon.rpc.ask(peer, want).await.map(drop)
}

/// As [`send`], to all peers with a session at once.
pub(crate) async fn send_all(daemon: &Daemon) {
    let peers = 0..daemon.config.peers.len();
    let asked = peers.map(|peer| async move {
        match send(daemon, peer).await {
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
        let is_of_peer = |pair: &Pair| daemon.peer_of(pair.remote.ip()) == Some(peer);
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
