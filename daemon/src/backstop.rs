//! What the backstop is told: which connections are on bumps, by choice or because they follow.

use dibs_policy::conntrack::Connection;
use dibs_policy::{Backstop, Desired, Ends, Known, Place};
use nix::libc;

use crate::conns::Pair;
use crate::daemon::{Daemon, State};
use crate::locking::ends;
use crate::startup::marks;

fn tuple(pair: &Pair) -> Ends {
    (pair.local.into(), pair.remote.into())
}

impl State {
    /// The connections that the backstop knows by name.
    pub(crate) fn known(&self) -> Known {
        let mut known = Known::default();
        for (pair, choice) in self.choices.iter().filter(|(_, choice)| !choice.pending) {
            let place = match choice.bump {
                0 => &mut known.plain,
                _ => &mut known.bumped,
            };
            place.insert(tuple(&pair));
        }
        for pair in self.followed.keys() {
            if !known.plain.contains(&tuple(pair)) {
                known.bumped.insert(tuple(pair));
            }
        }
        known
    }
}

impl Daemon {
    /// Brings the backstop to `wish`; whether others had undone it. Steering works without it, so it is
    /// only missed, loudly.
    pub(crate) async fn set_backstop(&self, wish: &Desired) -> bool {
        let mut backstop = self.backstop.lock().await;
        let known = Known {
            locked: self.locked_passing(),
            ..self.state.borrow().known()
        };
        let before = backstop.strength();
        let undone = backstop.set(wish, &known).await.unwrap_or_else(|error| {
            tracing::warn!("{error}: what others flush may let connections go on in plain");
            false
        });
        match backstop.strength() {
            Some(strength) if before != Some(strength) => {
                tracing::info!("the table of nftables {strength}");
            }
            _ => {}
        }
        undone
    }

    /// Tells the backstop where connections are; its caller holds it while the marks change too.
    pub(crate) async fn note_places(&self, backstop: &mut Backstop, places: &[(Pair, Place)]) {
        let places: Vec<(Ends, Place)> = {
            let choices = &self.state.borrow().choices;
            let decided = |(pair, place): &&(Pair, Place)| {
                *place != Place::Elsewhere || choices.get(pair).is_none()
            };
            let known = places.iter().filter(decided);
            known.map(|(pair, place)| (tuple(pair), *place)).collect()
        };
        if let Err(error) = backstop.note(&places).await {
            tracing::warn!("{error}");
        }
    }

    /// Notes where the kernel has put a connection, by rules here or because the peer began it.
    pub(crate) async fn note_followed(&self, entry: &Connection) {
        let Some(pair) = self.ours(entry) else { return };
        let mut backstop = self.backstop.lock().await;
        let place = {
            let mut state = self.state.borrow_mut();
            match marks(&self.config).bump_of(entry.mark) {
                Some(bump) if state.followed.insert(pair, bump).is_none() => Place::Bumped,
                None if state.followed.remove(&pair).is_some() => Place::Elsewhere,
                _ => return,
            }
        };
        if self.state.borrow().choices.get(&pair).is_none() {
            self.note_places(&mut backstop, &[(pair, place)]).await;
        }
    }

    /// A connection that followed has ended.
    pub(crate) async fn forget_followed(&self, pair: &Pair) {
        let mut backstop = self.backstop.lock().await;
        self.state.borrow_mut().followed.remove(pair);
        let place = (*pair, Place::Elsewhere);
        self.note_places(&mut backstop, &[place]).await;
    }

    /// Looks for connections that follow: an earlier daemon's, or those of which no event told.
    pub(crate) async fn find_followed(&self) -> Result<(), dibs_policy::Error> {
        for entry in self.conntrack()?.list(Some).await? {
            self.note_followed(&entry).await;
        }
        Ok(())
    }

    /// A TCP connection of this host, or of a host behind it, to a host behind a peer, as it sends.
    fn ours(&self, entry: &Connection) -> Option<Pair> {
        if i32::from(entry.original.protocol) != libc::IPPROTO_TCP {
            return None;
        }
        let state = self.state.borrow();
        let is_ours = |pair: &Pair| {
            state.addresses.contains(&pair.local.ip()) && self.peer_of(pair.remote.ip()).is_some()
        };
        let is_ours = |pair: &Pair| is_ours(pair) || self.passes(pair);
        ends(entry).into_iter().find(is_ours)
    }

    /// What `status` tells of steering, by name.
    pub(crate) async fn steering_counters(&self) -> [(&'static str, u64); 4] {
        let dropped = self.backstop.lock().await.dropped().await;
        let dropped = dropped.unwrap_or_else(|error| {
            tracing::debug!("{error}");
            0
        });
        [
            ("steering_restored", self.restored.get()),
            ("plain_dropped", dropped),
            ("messages_malformed", self.messages_malformed.get()),
            ("messages_dropped", self.messages_dropped.get()),
        ]
    }
}
