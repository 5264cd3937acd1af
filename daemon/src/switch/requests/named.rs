//! What requests name: bumps, peers, connections that the caller may see.

use std::collections::BTreeSet;

use dibs_control::{ConnInfo, ErrorKind, Failure};

use crate::control::{Caller, refused};
use crate::data::bumps::Carried;
use crate::host::live::Live;
use crate::switch::{Daemon, listing};

/// The bump of that name, or the default.
pub(super) fn bump_for<'a>(daemon: &'a Daemon, name: Option<&str>) -> anyhow::Result<&'a Carried> {
    let name = name
        .or(daemon.config.daemon.default_bump.as_deref())
        .ok_or_else(|| refused("the configuration has no default_bump: name one with --bump"))?;
    if let Some(bump) = daemon.bumps.all().iter().find(|bump| bump.name == name) {
        return Ok(bump);
    }
    match daemon.config.bump(name) {
        Some(bump) => {
            let lack = daemon.config.lack(bump).unwrap_or_default();
            Err(refused(format!("the bump \"{name}\" {lack}")).into())
        }
        None => {
            Err(Failure::new(ErrorKind::NotFound, format!("there is no bump \"{name}\"")).into())
        }
    }
}

pub(super) fn check_peer(daemon: &Daemon, name: Option<&str>) -> anyhow::Result<()> {
    match name {
        Some(name) if !daemon.config.peers.iter().any(|peer| peer.name == name) => {
            Err(Failure::new(ErrorKind::NotFound, format!("there is no peer \"{name}\"")).into())
        }
        _ => Ok(()),
    }
}

pub(super) fn no_session(daemon: &Daemon, lives: &[Live]) -> Failure {
    let peers: BTreeSet<&str> = lives
        .iter()
        .map(|live| daemon.peer_name(live.peer))
        .collect();
    let peers: Vec<&str> = peers.into_iter().collect();
    Failure::new(
        ErrorKind::NoSession,
        format!(
            "there is no session with peer {}: nothing was changed",
            peers.join(", ")
        ),
    )
}

/// The live connections that the caller may see.
pub(super) async fn visible_lives(daemon: &Daemon, caller: Caller) -> anyhow::Result<Vec<Live>> {
    let all = listing::lives(daemon).await?.into_iter();
    Ok(all.filter(|live| caller.sees(live)).collect())
}

/// The same, with what is told of them.
pub(super) async fn visible(
    daemon: &Daemon,
    caller: Caller,
) -> anyhow::Result<Vec<(Live, ConnInfo)>> {
    let lives = visible_lives(daemon, caller).await?;
    let infos = listing::describe(daemon, &lives).await?;
    Ok(lives.into_iter().zip(infos).collect())
}
