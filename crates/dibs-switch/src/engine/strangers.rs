//! Rules for connections in plain that come from a peer's router: the peer shows which of them are its own.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use dibs_core::Time;

use super::tasks::Busy;
use super::{Live as _, Machine, asks, matches};
use crate::conns::Meant;

/// Time after which a peer is asked again for a connection that was none of its own.
const ASK_AGAIN: Duration = Duration::from_secs(60);

/// Connections that peers were asked for.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    /// Times from which on a peer is asked again.
    asked: BTreeMap<(usize, Meant), Time>,
    busy: Rc<Busy>,
}

impl Strangers {
    /// Looks for connections that a rule would bring to a bump if they were a peer's, and asks the peer for them.
    ///
    /// # Errors
    /// The system does not say which connections there are.
    pub(super) async fn look<M: Machine + 'static>(&mut self, m: &Rc<M>) -> Result<(), M::Fault> {
        if (0..m.peers()).all(|peer| m.rules_want(peer) == 0) {
            self.asked.clear();
            return Ok(());
        }
        let found = m.strangers().await?;
        let name = |live: &M::Live| (live.peer(), live.meant());
        let there: BTreeSet<(usize, Meant)> = found.iter().map(name).collect();
        self.asked.retain(|asked, _| there.contains(asked));
        let now = m.now();
        let ruled = found.into_iter().filter(|live| {
            let is_due = { self.asked.get(&name(live)) }.is_none_or(|again| now >= *again);
            is_due && m.ruling(live, |ruling| ruling.moves_to()).is_some()
        });
        for (peer, lives) in asks::by_peer::<M>(ruled) {
            if !self.busy.begin(peer) {
                continue;
            }
            let again = lives.iter().map(|live| (name(live), now + ASK_AGAIN));
            self.asked.extend(again);
            let ports = lives.iter().map(|live| live.pair().sport).collect();
            let (own, busy) = (Rc::clone(m), Rc::clone(&self.busy));
            // Rules have those follow that the peer shows.
            m.spawn(async move {
                matches::seek(&*own, peer, &ports).await;
                busy.end(peer);
            });
        }
        Ok(())
    }
}
