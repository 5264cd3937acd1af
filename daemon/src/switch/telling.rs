//! Peers are told of choices, and asked again for what rules moved, when that is due.

use std::rc::Rc;

use dibs_switch::engine::{rules, tells};

use crate::host::clock::{instant, now};
use crate::host::log::or_warn;
use crate::switch::Daemon;
use crate::switch::wakers::Task;

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
                // Nobody changes rules meanwhile.
                let _turn = daemon.users.own_turn().await;
                or_warn(rules::follow_again(&*daemon, moved).await);
            });
        }
        for (peer, due) in tells::take_due(&*daemon, None) {
            let daemon = Rc::clone(&daemon);
            tokio::task::spawn_local(async move {
                // What it does not answer it is told again.
                let _ = tells::tell_choices(&*daemon, peer, due).await;
            });
        }
    }
}
