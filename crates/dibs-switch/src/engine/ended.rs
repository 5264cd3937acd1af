//! Connections that ended: what was decided for them is forgotten.

use dibs_wire::FlowKey;

use super::{Machine, all_of, wants};
use crate::table::{Conn, Known};

/// Forgets connections that ended, and takes their marks: another one of the same ends is not to inherit them. One that is there
/// already gets what is chosen for it.
///
/// # Errors
/// The system does not say, or does not take the marks.
pub async fn forget<M: Machine>(m: &M) -> Result<(), M::Fault> {
    // Events tell what becomes of one that passes this host.
    let goes_on =
        |pair: &FlowKey, conn: &Conn| conn.is_marked() && !conn.has_ended() && m.passes(pair);
    let known: Vec<Known> = m.conns(|conns| {
        let is_any = conns.iter().any(|(_, conn)| conn.is_swept());
        let looked_for = conns.known(|pair, conn| !goes_on(pair, conn));
        looked_for.filter(|_| is_any).collect()
    });
    if known.is_empty() {
        return Ok(());
    }
    let pairs: Vec<FlowKey> = known.iter().map(|(pair, ..)| *pair).collect();
    let mut alive = m.alive(&pairs).await?;
    alive.sort_unstable();
    let socket = |pair: &FlowKey| {
        let at = alive.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
        Some(alive[at].1)
    };
    let (swept, frees) = m.conns(|conns| {
        let kept = conns.kept().count();
        let swept = conns.sweep(&known, socket, goes_on);
        (swept, conns.kept().count() < kept)
    });
    let chosen = all_of::<M>(m.mark_choices(&swept.taken).await);
    // One of the same ends may have begun meanwhile.
    let is_gone = |pair: &&FlowKey| m.conns(|conns| !conns.get(pair).is_marked());
    let gone = || swept.gone.iter().filter(is_gone).copied().collect();
    let cleared = all_of::<M>(m.clear(gone).await);
    let saved = match swept.gone.is_empty() {
        true => Ok(()),
        false => m.save(),
    };
    if frees {
        wants::send_all(m).await;
    }
    chosen.and(cleared).and(saved)
}
