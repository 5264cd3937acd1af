//! Which peers have a session, and what they lack for a bump.

use std::time::Duration;

use dibs_control::{KeyOrigin, PeerState};
use dibs_core::node::PeerSnapshot;
use dibs_core::session;
use dibs_settings::BumpId;
use dibs_switch::engine;

use crate::data::Gone;
use crate::data::bumps::of_mask;
use crate::switch::Daemon;

/// How a peer stands: a session alone does not mean that it answers.
pub(crate) fn peer_state(peer: &PeerSnapshot) -> PeerState {
    match peer.state {
        session::PeerState::Established if peer.reachable => PeerState::Established,
        session::PeerState::Established | session::PeerState::Connecting => PeerState::Connecting,
        session::PeerState::Down => PeerState::Down,
    }
}

/// Why the calls of a peer come to nothing, and what helps.
pub(crate) fn outdated(behind: Duration) -> String {
    format!(
        "its calls are refused, for they are {} s older than its latest: if its clock was set back, set it \
         right, or restart dibsd here, which then remembers no latest call; otherwise somebody repeats old ones",
        behind.as_secs()
    )
}

/// Why no keys are agreed with a peer by an untrusted path, and what helps.
pub(crate) const UNSECURED: &str = "nothing secures a handshake by an untrusted path: there is no earlier session to \
     follow, and no preshared key; repair the trusted path, or at both ends give the peer a preshared_key_file, or set \
     handshake = \"any\" in [daemon]";

/// Origin of a session's keys, as the user hears of it.
pub(crate) const fn key_origin(keys: session::KeyOrigin) -> KeyOrigin {
    match keys {
        session::KeyOrigin::Trusted => KeyOrigin::Trusted,
        session::KeyOrigin::Chained => KeyOrigin::Chained,
        session::KeyOrigin::Preshared => KeyOrigin::Preshared,
        session::KeyOrigin::Untrusted => KeyOrigin::Untrusted,
    }
}

/// Which peers have a session and answer, by index.
pub(crate) async fn sessions(daemon: &Daemon) -> Result<Vec<bool>, Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let up = |peer| peer_state(peer) == PeerState::Established;
    Ok(snapshot.peers.iter().map(up).collect())
}

/// Why a peer that has a session cannot have a connection on this bump.
pub(crate) fn lacks(
    daemon: &Daemon,
    peer: &PeerSnapshot,
    index: usize,
    bump: Option<BumpId>,
) -> Option<String> {
    let bump = bump?;
    let own = daemon.bumps.split_of(bump)?;
    if peer_state(peer) != PeerState::Established {
        return None;
    }
    let name = daemon.peer_name(index);
    let carried = daemon.bumps.name_of(bump);
    let Some(theirs) = peer.bumps.iter().find(|other| other.number == bump.get()) else {
        return Some(format!("peer {name} does not carry the bump \"{carried}\""));
    };
    (theirs.shares != own).then(|| {
        let say = |shares: Option<(u8, u8)>| {
            let (needed, shares) = shares.unwrap_or_default();
            format!("{needed} of {shares} shares")
        };
        format!(
            "peer {name} needs {}, this host {}: list {carried} with the same shares and \
             needed as a [[bump]] at both",
            say(theirs.shares),
            say(own)
        )
    })
}

/// Tells of bumps that our rules put connections of a peer into, and that it cannot follow.
pub(crate) async fn tell_lacks(daemon: &Daemon, peer: usize) {
    let Ok(snapshot) = daemon.driver.snapshot().await else {
        return;
    };
    let wanted = engine::wants::wanted_of(daemon, peer);
    let seen = &snapshot.peers[peer];
    for bump in of_mask(wanted) {
        if let Some(why) = lacks(daemon, seen, peer, Some(bump)) {
            let name = daemon.bumps.name_of(bump).to_owned();
            daemon.events.tell("bump_refused", why, &[("bump", name)]);
        }
    }
}

/// Why no peer that a rule could be for and that has a session can have its connections on this
/// bump.
pub(crate) async fn lacking(
    daemon: &Daemon,
    peer: Option<&str>,
    bump: BumpId,
) -> Result<Option<String>, Gone> {
    let seen = daemon.driver.snapshot().await?.peers;
    let meant = |index: &usize| peer.is_none_or(|name| daemon.peer_name(*index) == name);
    let meant = (0..seen.len())
        .filter(meant)
        .filter(|index| peer_state(&seen[*index]) == PeerState::Established);
    let mut whys: Vec<_> = meant
        .map(|index| lacks(daemon, &seen[index], index, Some(bump)))
        .collect();
    let all = whys.iter().all(Option::is_some);
    Ok(whys.pop().flatten().filter(|_| all))
}
