//! Telling peers of choices, of many connections at once, and asking them again: which and when
//! [`Telling`](dibs_switch::telling::Telling) says.

use std::collections::BTreeMap;
use std::rc::Rc;

use dibs_switch::conns::{Choice, Meant};
use dibs_switch::messages::{Switch, Unanswered};
use dibs_wire::FlowKey;

use super::asking::ROUND;
use crate::clock::{instant, now};
use crate::daemon::Daemon;
use crate::following;
use crate::log::or_warn;
use crate::switching::{asking, by_rule};
use crate::wakers::Task;

/// What a peer is to be told.
type Due = Vec<(FlowKey, Choice)>;

/// What peers, or only this one, are to be told by now.
pub(crate) fn take_due(daemon: &Daemon, only: Option<usize>) -> BTreeMap<usize, Due> {
    let conns = &mut daemon.state.borrow_mut().conns;
    let peer_of = |pair: &FlowKey| daemon.peer_of(pair.dst);
    let meant = |pair: &FlowKey| only.is_none() || peer_of(pair) == only;
    let mut by_peer: BTreeMap<usize, Due> = BTreeMap::new();
    for (pair, choice) in conns.take_tellings(now(), meant) {
        if let Some(peer) = peer_of(&pair) {
            by_peer.entry(peer).or_default().push((pair, choice));
        }
    }
    by_peer
}

/// Tells a peer of choices.
pub(crate) async fn tell_choices(daemon: &Daemon, peer: usize, due: Due) -> Result<(), Unanswered> {
    let mut chosen = BTreeMap::<_, Vec<_>>::new();
    for (pair, choice) in due {
        let socket = choice.socket;
        let group = chosen.entry((choice.bump, choice.version.host));
        let conns = group.or_default();
        conns.push((Meant { pair, socket }, choice.version));
    }
    let mut told = Ok(());
    for ((bump, _), conns) in chosen {
        let switch = Switch {
            bump,
            explicit: true,
            ready: false,
        };
        for conns in conns.chunks(ROUND) {
            let answers = match told {
                Ok(()) => asking::ask_switch(daemon, peer, conns, switch).await,
                // It is not asked for the others.
                Err(error) => vec![Err(error); conns.len()],
            };
            for ((conn, version), answer) in conns.iter().zip(answers) {
                told = told.and(answer.map(drop));
                let own = daemon.update(&conn.pair, |conn| {
                    conn.telling.handle_answer(*version, answer, now())
                });
                if let Some(own) = own {
                    by_rule::give_in(daemon, peer, conn.pair, *version, own).await;
                }
            }
            daemon.wakers.wake(Task::Tell);
        }
    }
    told
}

/// Tells peers what they are to be told, when it is due; one that does not answer holds up no other.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        let due = {
            let conns = &daemon.state.borrow().conns;
            conns
                .next_telling()
                .into_iter()
                .chain(conns.next_moved())
                .min()
        };
        let told = daemon.wakers.woken(Task::Tell);
        match due {
            None => {
                told.await;
                continue;
            }
            Some(due) => {
                if tokio::time::timeout_at(instant(due), told).await.is_ok() {
                    continue;
                }
            }
        }
        let moved = daemon.state.borrow_mut().conns.take_moved(now());
        if !moved.is_empty() {
            let daemon = Rc::clone(&daemon);
            tokio::task::spawn_local(async move {
                or_warn(following::follow_again(&daemon, moved).await);
            });
        }
        for (peer, due) in take_due(&daemon, None) {
            let daemon = Rc::clone(&daemon);
            tokio::task::spawn_local(async move {
                // What it does not answer it is told again.
                let _ = tell_choices(&daemon, peer, due).await;
            });
        }
    }
}
