//! WANT: the bumps that rules need at the other end, said to peers, and made ready for them.

use dibs_wire::FlowKey;
use futures_util::future::join_all;

use super::{Machine, News};
use crate::messages::{Outcome, Unanswered};

/// The bumps that rules here put connections of a peer into, or are about to, and those that some stay on because plain does not
/// carry them; bit n for number n.
pub fn wanted_of<M: Machine>(m: &M, peer: usize) -> u16 {
    let kept = m.conns(|conns| {
        let of_peer = |(pair, _): &(&FlowKey, _)| m.peer_of(pair) == Some(peer);
        let kept = conns.kept().filter(of_peer);
        kept.fold(0, |bumps, (_, bump)| bumps | 1 << bump.get())
    });
    let coming = m.coming(peer, |bumps| *bumps);
    m.rules_want(peer) | coming | kept
}

/// The same for all peers, by index.
pub fn wanted<M: Machine>(m: &M) -> Vec<u16> {
    (0..m.peers()).map(|peer| wanted_of(m, peer)).collect()
}

/// Notes what rules that are about to be in force need at each peer, by index; none: they are in force, or will not be. A WANT that
/// anything else sends meanwhile says so too.
pub(super) fn note_coming<M: Machine>(m: &M, needs: impl Fn(usize) -> u16) {
    for peer in 0..m.peers() {
        let needed = needs(peer);
        m.coming(peer, |bumps| *bumps = needed);
    }
}

/// Has a peer's daemon make ready what rules here need there; waits until it has.
///
/// # Errors
/// The peer does not answer.
pub async fn send<M: Machine>(m: &M, peer: usize) -> Result<(), Unanswered> {
    let want = m.want(wanted_of(m, peer));
    m.ask(peer, want).await.map(drop)
}

/// As [`send`], to all peers with a session at once.
pub async fn send_all<M: Machine>(m: &M) {
    let asked = (0..m.peers()).map(|peer| async move {
        match send(m, peer).await {
            // It hears of it as soon as there is a session.
            Ok(()) | Err(Unanswered::NoSession) => {}
            Err(error) => {
                let why = &error.to_string();
                m.tell(News::Peer { peer, why });
            }
        }
    });
    join_all(asked).await;
}

/// Makes ready what a peer's rules need here; returns what it is answered.
pub async fn answer<M: Machine>(m: &M, peer: usize, sequence: u64, bumps: u16) -> Outcome {
    let is_carried =
        |number: &u8| dibs_settings::BumpId::new(*number).is_some_and(|b| m.carries(b));
    let carried = (1..16).filter(is_carried);
    let carried = carried.fold(0, |bumps: u16, number| bumps | 1 << number);
    let of_peer = |pair: &FlowKey| m.peer_of(pair) == Some(peer);
    let known = m.wants(peer, |wants, conns| {
        wants.handle_want(conns, sequence, bumps & carried, of_peer)
    });
    match known {
        // They were to be ready before, which may have failed.
        Some(Outcome::Done) => {}
        Some(outcome) => return outcome,
        None => m.tell(News::Wanted),
    }
    let ready = async {
        let saved = known.map_or_else(|| m.save(), |_| Ok(()));
        m.install().await?;
        saved
    };
    match ready.await {
        Ok(()) if bumps & !carried != 0 => Outcome::NoBump,
        Ok(()) => Outcome::Done,
        Err(fault) => {
            let why = &format!("cannot prepare for rules of the peer: {fault:#}");
            m.tell(News::Peer { peer, why });
            Outcome::Failed
        }
    }
}
