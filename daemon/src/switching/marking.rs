//! What the kernel and the data path are told of a connection that moves.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Instant;

use dibs_policy::conntrack::{Conntrack, Tuple};
use dibs_policy::{BumpId, Place};

use crate::conns::{Choice, Pair};
use crate::daemon::{Daemon, Written};
use crate::live::Live;
use crate::startup::marks;
use crate::tracking::STRAGGLERS;

impl Daemon {
    /// Whether a connection's mark is a choice of another program that we have not taken up yet: neither what
    /// it is known to have, nor what is to be.
    pub(crate) fn is_chosen_elsewhere(&self, pair: &Pair, mark: u32) -> bool {
        let marks = marks(&self.config);
        let bump = marks.bump_of(mark).map_or(0, BumpId::get);
        if mark & marks.override_bit() == 0 || (bump != 0 && self.bump(bump).is_none()) {
            return false;
        }
        let state = self.state.borrow();
        let written = state.written.get(pair);
        let known = written.is_some_and(|mark| mark.chosen && mark.bump == bump);
        let chosen = state.choices.get(pair);
        !known && chosen.is_none_or(|choice| choice.bump != bump)
    }

    /// Notes what a connection's mark says from now on.
    pub(crate) fn note_mark(&self, pair: &Pair, bump: u8, chosen: bool) -> Option<Written> {
        let at = Instant::now();
        let written = &mut self.state.borrow_mut().written;
        written.insert(*pair, Written { bump, chosen, at })
    }

    /// What a user chooses here is later than what other programs chose before.
    pub(crate) async fn overrule(&self, lives: &[Live]) -> Result<(), dibs_policy::Error> {
        let _turn = self.marking.lock().await;
        let mut conntrack = Conntrack::open()?;
        for Live { pair, .. } in lives {
            let entry = conntrack.get(&Tuple::tcp(pair.local, pair.remote)).await?;
            if let Some(entry) = entry.filter(|found| self.is_chosen_elsewhere(pair, found.mark)) {
                let bump = marks(&self.config).bump_of(entry.mark);
                self.note_mark(pair, bump.map_or(0, BumpId::get), true);
            }
        }
        Ok(())
    }

    /// As [`mark`](Self::mark), not by choice. What leaves for plain is kept there by OVERRIDE while the far
    /// end's packets may still come by the bump: each end would pull the other back.
    pub(crate) async fn mark_moved(&self, pair: &Pair, bump: u8) -> Result<(), dibs_policy::Error> {
        let _turn = self.marking.lock().await;
        self.mark_leaving(pair, bump).await
    }

    /// The same, in [`marking`](Self::marking)'s turn.
    pub(super) async fn mark_leaving(
        &self,
        pair: &Pair,
        bump: u8,
    ) -> Result<(), dibs_policy::Error> {
        if bump == 0 {
            let now = Instant::now();
            self.state.borrow_mut().leaving.insert(*pair, now);
        }
        self.mark(pair, bump, false).await
    }

    /// Lets connections that left their bumps a while ago follow again.
    pub(crate) async fn let_follow(&self) -> Result<(), dibs_policy::Error> {
        let left: Vec<Pair> = {
            let state = self.state.borrow();
            let leaving = state.leaving.iter();
            let left = leaving.filter(|(_, since)| since.elapsed() >= STRAGGLERS);
            left.map(|(pair, _)| *pair).collect()
        };
        let chosen = marks(&self.config).override_bit();
        for pair in left {
            let _turn = self.marking.lock().await;
            // It may have been moved meanwhile.
            let leaves = self.state.borrow_mut().leaving.remove(&pair).is_some();
            if leaves && self.state.borrow().choices.get(&pair).is_none() {
                let tuple = Tuple::tcp(pair.local, pair.remote);
                let mut conntrack = Conntrack::open()?;
                if !self.is_taken(&mut conntrack, &pair).await? {
                    conntrack.set_mark(&tuple, 0, chosen).await?;
                    self.note_mark(&pair, 0, false);
                }
            }
        }
        Ok(())
    }

    /// Whether another program chose for a connection: that is to be taken up, and not written over. Its
    /// event comes, or waits for its turn.
    async fn is_taken(
        &self,
        conntrack: &mut Conntrack,
        pair: &Pair,
    ) -> Result<bool, dibs_policy::Error> {
        let entry = conntrack.get(&Tuple::tcp(pair.local, pair.remote)).await?;
        Ok(entry.is_some_and(|entry| self.is_chosen_elsewhere(pair, entry.mark)))
    }

    /// As [`write`](Self::write), unless another program has chosen otherwise by now. In
    /// [`marking`](Self::marking)'s turn, or what another task of ours writes meanwhile looks like that.
    pub(crate) async fn mark(
        &self,
        pair: &Pair,
        bump: u8,
        explicit: bool,
    ) -> Result<(), dibs_policy::Error> {
        if self.is_taken(&mut Conntrack::open()?, pair).await? {
            tracing::debug!(?pair, bump, "another program has chosen otherwise");
            self.end_drains(pair);
            return Ok(());
        }
        self.write(pair, bump, explicit).await
    }

    /// Sets the bump of one connection in its ctmark, which is made if it is not tracked. One that
    /// leaves its bump goes on.
    pub(crate) async fn write(
        &self,
        pair: &Pair,
        bump: u8,
        explicit: bool,
    ) -> Result<(), dibs_policy::Error> {
        let marks = marks(&self.config);
        let leaves = {
            let leaving = &mut self.state.borrow_mut().leaving;
            if bump != 0 || explicit {
                leaving.remove(pair);
            }
            leaving.contains_key(pair)
        };
        let tuple = Tuple::tcp(pair.local, pair.remote);
        let mut conntrack = Conntrack::open()?;
        let mut backstop = self.backstop.lock().await;
        let locked = self.state.borrow().locks.is_locked(pair, bump);
        let (value, mask) = marks.whole(BumpId::new(bump), explicit || leaves, locked);
        let was = self.note_mark(pair, bump, explicit || leaves);
        let was = was.map(|mark| mark.bump).or_else(|| {
            let followed = self.state.borrow().followed.get(pair).copied();
            followed.map(BumpId::get)
        });
        let elsewhere = self.device_of(bump).is_none();
        if elsewhere && was.is_some_and(|was| self.device_of(was).is_some()) {
            self.forget_mtus();
        }
        if bump == 0 {
            self.state.borrow_mut().followed.remove(pair);
            let place = if explicit {
                Place::Plain
            } else {
                Place::Elsewhere
            };
            self.note_place(&mut backstop, pair, place).await;
            let marked = conntrack.set_mark(&tuple, value, mask).await;
            self.end_drains(pair);
            return marked.map(drop);
        }
        let installed = !self.state.borrow().installed.is_empty();
        let marked = conntrack.set_mark(&tuple, value, mask).await?;
        if !marked && installed {
            if conntrack.adopt(&tuple, value).await? {
                self.rename(pair, bump).await?;
            } else {
                conntrack.set_mark(&tuple, value, mask).await?;
            }
        }
        self.note_place(&mut backstop, pair, Place::Bumped).await;
        if self.is_outside(bump) {
            self.end_drains(pair);
        }
        Ok(())
    }

    /// Lets a connection go on that was to fall silent.
    pub(super) fn end_drains(&self, pair: &Pair) {
        for bump in self.carried() {
            // Without the data path nothing is held back.
            let _ = self.driver.end_drain(bump.id.get(), ends(pair));
        }
    }

    /// Puts the choice for one connection into the kernel, if there is one that is not pending. One at a
    /// time, and whichever is in force by then: so the last one that the kernel is told is the latest.
    /// One that was for an earlier connection of the same ends is forgotten instead.
    pub(crate) async fn mark_choice(&self, pair: &Pair) -> Result<(), dibs_policy::Error> {
        let _turn = self.marking.lock().await;
        let choice = self.state.borrow().choices.get(pair);
        let Some(choice) = choice.filter(|choice| !choice.pending) else {
            return Ok(());
        };
        let lives = self.sockets_of(&[*pair]).await?;
        let taken = { lives.get(pair) }.is_some_and(|live| self.has_taken(live, choice));
        match taken {
            true => self.forget_choice(pair, choice).await,
            false => self.mark(pair, choice.bump, true).await,
        }
    }

    /// Another connection has taken the ends of one that something was chosen for: it inherits neither
    /// that nor the lock. Where it is by its own rules it stays.
    async fn forget_choice(&self, pair: &Pair, choice: Choice) -> Result<(), dibs_policy::Error> {
        {
            let mut state = self.state.borrow_mut();
            if !state.choices.give_up(pair, choice.version) {
                return Ok(());
            }
            state.locks.release(pair);
        }
        if let Err(error) = self.save() {
            tracing::warn!("{error:#}");
        }
        let tuple = Tuple::tcp(pair.local, pair.remote);
        let entry = Conntrack::open()?.get(&tuple).await?;
        let (value, mask) = marks(&self.config).choice(BumpId::new(choice.bump));
        if entry.is_some_and(|entry| entry.mark & mask == value) {
            return self.write(pair, 0, false).await;
        }
        let mut backstop = self.backstop.lock().await;
        self.note_place(&mut backstop, pair, Place::Elsewhere).await;
        Ok(())
    }

    /// Puts all choices into the kernel again.
    pub(crate) async fn mark_choices(&self) {
        let choices: Vec<_> = self.state.borrow().choices.iter().collect();
        for (pair, _) in choices {
            if let Err(error) = self.mark_choice(&pair).await {
                tracing::warn!("{error}");
            }
        }
    }

    /// Tells the paths that connections come from, in plain, what these sent by them: the path's own
    /// congestion control has had nothing to learn from.
    pub(super) fn expect_rates<'a>(&self, lives: impl Iterator<Item = &'a Live>) {
        let state = self.state.borrow();
        let mut rates: HashMap<(usize, IpAddr), u64> = HashMap::new();
        for live in lives {
            let local = live.pair.local.ip();
            let path = self.config.paths.iter().position(|path| {
                let interface = state.inventory.of_path(path);
                interface.is_some_and(|interface| interface.addresses.contains(&local))
            });
            if let Some(path) = path {
                let to = live.pair.remote.ip();
                *rates.entry((path, to)).or_default() += live.counts.delivery_rate;
            }
        }
        for ((path, to), rate) in rates {
            // Without the data path nothing is sent.
            let _ = self.driver.expect_rate(path, to, rate);
        }
    }

    /// Waits until nothing that connections sent by their bumps can be overtaken any more: in plain,
    /// what follows may be quicker. Their kernels send nothing new until they are [marked](Self::mark).
    pub(super) async fn silence(&self, lives: impl Iterator<Item = &Live>) {
        let drains = lives.flat_map(|live| {
            self.carried().iter().map(|bump| {
                let scale = live.counts.window_scale;
                self.driver.drain(bump.id.get(), ends(&live.pair), scale)
            })
        });
        // Without the data path nothing is under way.
        let _ = futures_util::future::join_all(drains).await;
    }
}

/// The connection as the core names it.
pub(crate) fn ends(pair: &Pair) -> dibs_wire::Tuple {
    dibs_wire::Tuple {
        src: pair.local.ip(),
        dst: pair.remote.ip(),
        sport: pair.local.port(),
        dport: pair.remote.port(),
    }
}
