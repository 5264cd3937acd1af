//! LOCKED, by the daemon's own record of it: `daemon/src/locking.rs`.

use dibs_core::Time;
use dibs_switch::asking::Answer;
use dibs_switch::conns::{Pair, Socket};
use dibs_switch::messages::{Named, Outcome};
use dibs_switch::naming::{Meant, Query};

use super::{About, Ask, At, LOOK_EVERY, Steering, tuple};
use crate::coverage::Seen;

impl Steering {
    /// The chosen bump that a connection is on, unless it is about to leave it or not there yet.
    fn stays_on(&mut self, pair: &Pair) -> Option<u8> {
        let bump = self.mark(pair).bump;
        let choice = self.daemon().choices.get(pair)?;
        (bump != 0 && choice.bump == bump && !choice.pending).then_some(bump)
    }

    /// Asks the peer about connections that are not locked yet; again from time to time.
    pub(super) fn ask_confirmations(&mut self, at: &mut At<'_>) {
        let chosen: Vec<_> = self.daemon().choices.iter().collect();
        self.daemon().look_at = None;
        for (pair, choice) in chosen {
            let Some(bump) = self.stays_on(&pair) else {
                continue;
            };
            let daemon = self.daemon();
            if daemon.locks.is_locked(&pair, bump) {
                continue;
            }
            // Also of one that may come about yet.
            daemon.look_at = Some(at.now + LOOK_EVERY);
            let asks =
                |ask: &Ask| ask.query.conn().pair == pair && matches!(ask.about, About::Confirm(_));
            let waits = daemon.asks.values().any(asks);
            let wants = !waits && daemon.locks.wants_asking(&pair, bump, at.now);
            if wants && at.kernel.speaks(&tuple(&pair)) {
                let socket = choice.socket;
                let query = Query::new(Meant { pair, socket });
                self.ask(at, query, About::Confirm(bump));
            }
        }
    }

    /// The peer has answered whether it has a connection on the bump.
    pub(super) fn on_confirmed(&mut self, at: &At<'_>, conn: Meant, bump: u8, answer: Answer) {
        let pair = conn.pair;
        match answer {
            // It may have left while the peer was asked.
            Ok((Outcome::Done, _)) if self.stays_on(&pair) == Some(bump) => {
                self.daemon().locks.confirm(pair, bump, at.now);
            }
            Ok((Outcome::Done, _)) => {}
            Ok(_) => self.daemon().locks.refuse(pair, bump, at.now),
            // Without a session there is nobody to confirm anything.
            Err(_) => {}
        }
    }

    /// Whether a connection that the peer asks about, by the name of its socket here, is on the bump.
    pub(super) fn on_confirm(
        &mut self,
        at: &At<'_>,
        bump: u8,
        named: &Named,
        socket: Option<Socket>,
    ) -> (Outcome, u64) {
        let pair = named.pair.reversed();
        match socket {
            None => (Outcome::NoConnection, 0),
            Some(socket) if socket != named.socket => (Outcome::OtherSocket, socket.0.into()),
            Some(_) if self.stays_on(&pair) == Some(bump) => {
                self.daemon().locks.confirm(pair, bump, at.now);
                (Outcome::Done, 0)
            }
            Some(_) => (Outcome::Older, 0),
        }
    }

    /// Brings LOCKED in the kernel to what is due.
    pub(super) fn set_locks(&mut self, now: Time) {
        let Self {
            daemon: Some(daemon),
            marks,
            seen,
            ..
        } = self
        else {
            return;
        };
        let is_on = |pair: &Pair, bump| marks.get(pair).is_some_and(|mark| mark.bump == bump);
        daemon.locks.take_due(now, is_on);
        for (pair, mark) in marks.iter_mut() {
            if !mark.locked && daemon.locks.is_locked(pair, mark.bump) {
                mark.locked = true;
                seen.note(Seen::Locked);
            }
        }
        let choices = &daemon.choices;
        daemon.locks.retain(|pair, bump| {
            let entry = marks.get(pair).map(|mark| mark.bump);
            let chosen = choices.get(pair).map(|choice| choice.bump);
            [entry, chosen].contains(&Some(bump))
        });
    }

    /// Lets a connection take what comes otherwise, before it leaves its bump for another or for plain.
    pub(super) fn unlock_leaving(&mut self, pair: &Pair, bump: u8) {
        if bump == 0 || self.daemon().locks.is_elsewhere(pair, bump) {
            self.unlock(pair);
        }
    }

    pub(super) fn unlock(&mut self, pair: &Pair) {
        if let Some(daemon) = &mut self.daemon {
            daemon.locks.release(pair);
        }
        self.note_lock(pair);
    }

    /// The kernel has LOCKED as our record says for the bump that a connection is on.
    pub(super) fn note_lock(&mut self, pair: &Pair) {
        let bump = self.mark(pair).bump;
        let locked = bump != 0 && self.daemon().locks.is_locked(pair, bump);
        if let Some(mark) = self.marks.get_mut(pair)
            && std::mem::replace(&mut mark.locked, locked) != locked
        {
            self.seen.note(match locked {
                true => Seen::Locked,
                false => Seen::Unlocked,
            });
        }
    }
}
