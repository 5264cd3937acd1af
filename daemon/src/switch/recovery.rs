//! Connections go on at once after an outage, and not when TCP tries again by itself. How is told in
//! `dibs_core::node::Node::solicit`.

use dibs_settings::BumpId;

use crate::host::live::Live;
use crate::kernel::connections;
use crate::switch::Daemon;

/// Takes up the connections that were on bumps before this daemon started. To be called once the
/// kernel steers, and before any path is up.
pub(crate) async fn take_up(daemon: &Daemon) -> anyhow::Result<()> {
    for (live, bump) in bumped(daemon).await? {
        let outstanding = live.counts.outstanding;
        daemon.driver.resume(bump, live.pair, outstanding)?;
    }
    Ok(())
}

/// Has this host's kernel tell the peer's where the connections between them stand.
pub(crate) async fn recover(daemon: &Daemon, peer: usize) -> anyhow::Result<()> {
    for (live, bump) in bumped(daemon).await? {
        if live.peer == peer {
            daemon.driver.solicit(bump, live.pair)?;
        }
    }
    Ok(())
}

/// The connections that the data path carries, with their bumps.
async fn bumped(daemon: &Daemon) -> anyhow::Result<Vec<(Live, BumpId)>> {
    let lives = connections::all(daemon).await?.into_iter();
    let lives = lives.filter(|live| !live.over && !live.bound);
    let inside = |live| {
        let bump = connections::bump_of(daemon, &live);
        Some((live, daemon.bumps.inside(bump)?))
    };
    Ok(lives.filter_map(inside).collect())
}
