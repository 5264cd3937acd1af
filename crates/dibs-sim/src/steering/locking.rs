//! LOCKED in the kernel, by [`dibs_switch::locks`].

use dibs_core::Time;
use dibs_settings::BumpId;
use dibs_switch::conns::{Meant, Socket};
use dibs_switch::locks::{self, Here};
use dibs_switch::messages::{Body, Named, Outcome};
use dibs_switch::naming::Query;
use dibs_switch::tracked::{Entry, Tracked};
use dibs_wire::FlowKey;

use super::{About, Ask, At, LOOK_EVERY, Mark, Steering};
use crate::coverage::Seen;

/// The bump that a connection is on, and is to be on.
pub(super) fn stays_on(steering: &mut Steering, pair: &FlowKey, socket: Socket) -> Option<BumpId> {
    let on = steering.mark(pair).bump;
    steering.daemon().ruling(pair, socket).stays_on(on)
}

/// Lets connections that left their bumps a while ago follow again.
pub(super) fn let_follow(steering: &mut Steering, now: Time) {
    let conns = &steering.daemon().conns;
    let left = conns.iter().filter(|(_, conn)| conn.may_follow(now));
    for pair in left.map(|(pair, _)| *pair).collect::<Vec<_>>() {
        let chosen = steering.update(&pair, |conn| {
            conn.take_left();
            conn.choice.get().is_some()
        });
        if !chosen {
            steering.update(&pair, |conn| conn.note_mark(None, false, now));
            steering.marks.entry(pair).or_default().chosen = false;
        }
    }
}

/// Asks the peer about connections that are not locked yet; again from time to time. Only about those that are chosen
/// or ruled here: the daemon puts marks of others back as well when they are lost (`daemon/src/tracking.rs`), which is
/// not modelled, and locked they would wait for them.
pub(super) fn ask_confirmations(steering: &mut Steering, at: &mut At<'_>) {
    let daemon = steering.daemon();
    // Also of those that have not begun here.
    let any_left = daemon.conns.iter().any(|(_, conn)| conn.has_left());
    daemon.look_at = any_left.then_some(at.now + LOOK_EVERY);
    for Meant { pair, socket } in at.lives() {
        let daemon = steering.daemon();
        let conn = daemon.conns.get(&pair);
        let ruled = daemon.ruling(&pair, socket).deciding().is_some();
        let is_known = ruled || conn.choice.get().is_some();
        let Some(bump) = stays_on(steering, &pair, socket).filter(|_| is_known) else {
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
        if wants && at.kernel.speaks(&pair) {
            let query = Query::new(Meant { pair, socket });
            steering.ask(at, query, About::Confirm(bump));
        }
    }
}

/// Whether the connections that the peer asks about, by the names of their sockets here, are on the bump.
pub(super) fn on_confirm(
    steering: &mut Steering,
    at: &At<'_>,
    bump: BumpId,
    conns: &[Named],
) -> Body {
    let answer = |named: &Named| {
        let pair = named.pair.reversed();
        // Before the first packet there is only who listens.
        let speaks = at.kernel.speaks(&pair);
        let here = at.socket(&pair).filter(|_| speaks).map(|socket| Here {
            socket,
            stays_on: stays_on(steering, &pair, socket),
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
    let entry = |(pair, mark): (&FlowKey, &Mark)| {
        let (mark, closed) = (mark.seen(), false);
        (*pair, Entry { mark, closed })
    };
    let tracked = Tracked::new(steering.marks.iter().map(entry).collect());
    let lives = |pair: &FlowKey| at.socket(pair).map(|_| true);
    let conns = &mut steering.daemon().conns;
    for (pair, _) in conns.mend_locks(at.now, &tracked, lives, |_| false) {
        note_lock(steering, &pair);
    }
}

/// Lets a connection take what comes otherwise, before it leaves its bump for another or for plain.
pub(super) fn unlock_leaving(steering: &mut Steering, pair: &FlowKey, bump: Option<BumpId>) {
    if steering.daemon().conns.get(pair).lock.holds_back(bump) {
        unlock(steering, pair);
    }
}

pub(super) fn unlock(steering: &mut Steering, pair: &FlowKey) {
    steering.update(pair, |conn| conn.lock.release());
    note_lock(steering, pair);
}

/// The kernel has LOCKED as our record says for the bump that a connection is on.
pub(super) fn note_lock(steering: &mut Steering, pair: &FlowKey) {
    let bump = steering.mark(pair).bump;
    let locked = bump.is_some() && steering.daemon().conns.get(pair).lock.locked() == bump;
    if let Some(mark) = steering.marks.get_mut(pair)
        && std::mem::replace(&mut mark.locked, locked) != locked
    {
        steering.seen.note(match locked {
            true => Seen::Locked,
            false => Seen::Unlocked,
        });
    }
}
