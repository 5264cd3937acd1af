//! Calling connections back whose peer did not answer: it may have moved them all the same.

use std::rc::Rc;

use super::Meant;
use super::asking::Switch;
use super::rules::TELL_AGAIN;
use crate::conns::{Choice, Pair};
use crate::daemon::{Daemon, Unanswered};
use crate::messages::Outcome;

/// The choice that puts a connection back to where it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) pair: Pair,
    pub(crate) back: Choice,
}

impl Daemon {
    /// Has the peer told of a choice until it has answered; nobody waits for it.
    pub(super) fn call_back(&self, pair: Pair, back: Choice) {
        self.calls.borrow_mut().push(Call { pair, back });
        self.calls_due.notify_one();
    }

    /// Tells a peer of a choice, as long as it stands, or waits behind one that may come to nothing.
    async fn call(&self, Call { pair, back }: Call) {
        let Some(peer) = self.peer_of(pair.remote.ip()) else {
            return;
        };
        let socket = back.socket;
        let conns = [(Meant { pair, socket }, back.version)];
        let switch = Switch {
            bump: back.bump,
            explicit: true,
            ready: false,
        };
        loop {
            let known = self.state.borrow().choices.of(&pair, socket);
            match known {
                Some(choice) if choice.version == back.version => {
                    let answers = self.ask_switch(peer, &conns, switch).await;
                    match answers.first() {
                        // What it knows of may come to nothing, and what it could not do it may do later.
                        Some(
                            Ok((Outcome::Older | Outcome::Failed, _))
                            | Err(Unanswered::Silent | Unanswered::Full),
                        ) => {}
                        Some(Ok((Outcome::OwnRule, own))) => {
                            return self.give_in(peer, pair, back.version, *own).await;
                        }
                        // Without a session it is told with the next one.
                        _ => return,
                    }
                }
                Some(choice) if choice.pending => {}
                _ => return,
            }
            tokio::time::sleep(TELL_AGAIN).await;
        }
    }
}

/// Carries out the calls.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        daemon.calls_due.notified().await;
        for call in daemon.calls.take() {
            let daemon = Rc::clone(&daemon);
            tokio::task::spawn_local(async move { daemon.call(call).await });
        }
    }
}
