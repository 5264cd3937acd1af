//! LOCKED in the kernel, by [`dibs_switch::locks`].

use dibs_core::Time;
use dibs_switch::conns::{Meant, Pair};
use dibs_switch::locks::{self, Here};
use dibs_switch::messages::{Answer, Named, Outcome};
use dibs_switch::naming::Query;

use super::{About, Ask, At, LOOK_EVERY, Steering, tuple};
use crate::coverage::Seen;

impl Steering {
    fn stays_on(&mut self, pair: &Pair) -> Option<u8> {
        let on = Some(self.mark(pair).bump).filter(|bump| *bump != 0);
        let is_required = self.requires(pair).is_some();
        locks::stays_on(on, self.choice(pair), is_required)
    }

    /// Asks the peer about connections that are not locked yet; again from time to time. Only about chosen ones: the
    /// daemon puts marks of others back as well when they are lost (`daemon/src/tracking.rs`), which is not modelled, and
    /// locked they would wait for them.
    pub(super) fn ask_confirmations(&mut self, at: &mut At<'_>) {
        let chosen: Vec<_> = self.daemon().conns.choices().collect();
        self.daemon().look_at = None;
        for (pair, choice) in chosen {
            let Some(bump) = self.stays_on(&pair) else {
                continue;
            };
            let daemon = self.daemon();
            if daemon.conns.get(&pair).lock.locked() == Some(bump) {
                continue;
            }
            // Also of one that may come about yet.
            daemon.look_at = Some(at.now + LOOK_EVERY);
            let asks =
                |ask: &Ask| ask.query.conn().pair == pair && matches!(ask.about, About::Confirm(_));
            let waits = daemon.asks.values().any(asks);
            let wants = !waits && daemon.conns.get(&pair).lock.wants_asking(bump, at.now);
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
        let stays_on = self.stays_on(&pair);
        self.update(&pair, |conn| {
            conn.lock.handle_answer(bump, answer, stays_on, at.now)
        });
    }

    /// Whether a connection that the peer asks about, by the name of its socket here, is on the bump.
    pub(super) fn on_confirm(&mut self, at: &At<'_>, bump: u8, named: &Named) -> (Outcome, u64) {
        let pair = named.pair.reversed();
        let here = at.socket(&pair).map(|socket| Here {
            socket,
            stays_on: self.stays_on(&pair),
        });
        let answer = locks::answer(bump, named, here);
        if answer.0 == Outcome::Done {
            self.update(&pair, |conn| conn.lock.confirm(bump, at.now));
        }
        answer
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
        daemon.conns.lock_due(now, is_on);
        for (pair, mark) in marks.iter_mut() {
            if !mark.locked && daemon.conns.get(pair).lock.locked() == Some(mark.bump) {
                mark.locked = true;
                seen.note(Seen::Locked);
            }
        }
        let on = |pair: &Pair| marks.get(pair).map(|mark| mark.bump);
        daemon.conns.sweep_locks(|_| true, on);
    }

    /// Lets a connection take what comes otherwise, before it leaves its bump for another or for plain.
    pub(super) fn unlock_leaving(&mut self, pair: &Pair, bump: u8) {
        if self.daemon().conns.get(pair).lock.holds_back(bump) {
            self.unlock(pair);
        }
    }

    pub(super) fn unlock(&mut self, pair: &Pair) {
        if let Some(daemon) = &mut self.daemon {
            daemon.conns.update(pair, |conn| conn.lock.release());
        }
        self.note_lock(pair);
    }

    /// The kernel has LOCKED as our record says for the bump that a connection is on.
    pub(super) fn note_lock(&mut self, pair: &Pair) {
        let bump = self.mark(pair).bump;
        let locked = bump != 0 && self.daemon().conns.get(pair).lock.locked() == Some(bump);
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
