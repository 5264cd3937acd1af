//! LOCKED in the kernel, by [`dibs_switch::locks`].

use dibs_switch::conns::{Meant, Pair};
use dibs_switch::locks::{self, Here};
use dibs_switch::messages::{Body, Named, Outcome};
use dibs_switch::naming::Query;
use dibs_switch::tracked::{Entry, Tracked};

use super::{About, Ask, At, LOOK_EVERY, Mark, Steering, tuple};
use crate::coverage::Seen;

/// The bump that a connection is on, and is to be on.
pub(super) fn stays_on(steering: &Steering, pair: &Pair) -> Option<u8> {
    let on = Some(steering.mark(pair).bump).filter(|bump| *bump != 0);
    let is_required = steering.requires(pair).is_some();
    locks::stays_on(on, steering.choice(pair), is_required)
}

/// Asks the peer about connections that are not locked yet; again from time to time. Only about chosen ones: the
/// daemon puts marks of others back as well when they are lost (`daemon/src/tracking.rs`), which is not modelled, and
/// locked they would wait for them.
pub(super) fn ask_confirmations(steering: &mut Steering, at: &mut At<'_>) {
    let chosen: Vec<_> = steering.daemon().conns.choices().collect();
    steering.daemon().look_at = None;
    for (pair, choice) in chosen {
        let Some(bump) = stays_on(steering, &pair) else {
            continue;
        };
        let daemon = steering.daemon();
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
            steering.ask(at, query, About::Confirm(bump));
        }
    }
}

/// Whether the connections that the peer asks about, by the names of their sockets here, are on the bump.
pub(super) fn on_confirm(steering: &mut Steering, at: &At<'_>, bump: u8, conns: &[Named]) -> Body {
    let answer = |named: &Named| {
        let pair = named.pair.reversed();
        let here = at.socket(&pair).map(|socket| Here {
            socket,
            stays_on: stays_on(steering, &pair),
        });
        let answer = locks::answer(bump, named, here);
        if answer.0 == Outcome::Done {
            steering.update(&pair, |conn| conn.lock.confirm(bump, at.now));
        }
        answer
    };
    Body::Answer(conns.iter().map(answer).collect())
}

/// Brings LOCKED in the kernel to what is due.
pub(super) fn set_locks(steering: &mut Steering, at: &At<'_>) {
    let entry = |(pair, mark): (&Pair, &Mark)| {
        let (mark, closed) = (mark.seen(), false);
        (*pair, Entry { mark, closed })
    };
    let tracked = Tracked::new(steering.marks.iter().map(entry).collect());
    let lives = |pair: &Pair| at.socket(pair).map(|_| true);
    let conns = &mut steering.daemon().conns;
    for (pair, _) in conns.mend_locks(at.now, &tracked, lives, |_| false) {
        note_lock(steering, &pair);
    }
}

/// Lets a connection take what comes otherwise, before it leaves its bump for another or for plain.
pub(super) fn unlock_leaving(steering: &mut Steering, pair: &Pair, bump: u8) {
    if steering.daemon().conns.get(pair).lock.holds_back(bump) {
        unlock(steering, pair);
    }
}

pub(super) fn unlock(steering: &mut Steering, pair: &Pair) {
    steering.update(pair, |conn| conn.lock.release());
    note_lock(steering, pair);
}

/// The kernel has LOCKED as our record says for the bump that a connection is on.
pub(super) fn note_lock(steering: &mut Steering, pair: &Pair) {
    let bump = steering.mark(pair).bump;
    let locked = bump != 0 && steering.daemon().conns.get(pair).lock.locked() == Some(bump);
    if let Some(mark) = steering.marks.get_mut(pair)
        && std::mem::replace(&mut mark.locked, locked) != locked
    {
        steering.seen.note(match locked {
            true => Seen::Locked,
            false => Seen::Unlocked,
        });
    }
}
