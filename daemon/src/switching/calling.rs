//! Telling peers of choices that they may not know of. One that did not answer may have moved a connection all the
//! same, and is to put it back; one that asks for what is older than what stands here has to learn of that.

use std::rc::Rc;

use super::rules::TELL_AGAIN;
use crate::asking::Unanswered;
use crate::conns::{Choice, Pair};
use crate::daemon::Daemon;
use crate::messages::{Outcome, Switch};
use crate::naming::Meant;

/// A choice that a peer is to be told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) pair: Pair,
    pub(crate) choice: Choice,
    /// Not at once.
    pub(crate) later: bool,
}

impl Daemon {
    /// Has the peer told of a choice until it has answered; nobody waits for it.
    pub(super) fn call_back(&self, pair: Pair, choice: Choice) {
        let later = false;
        self.begin_call(Call {
            pair,
            choice,
            later,
        });
    }

    /// The peer does not know of the choice that is in force here: it is told, unless a later one comes of what
    /// it asks.
    pub(super) fn tell_later(&self, pair: Pair) {
        let known = self.state.borrow().choices.get(&pair);
        if let Some(choice) = known.filter(|choice| !choice.pending) {
            let later = true;
            self.begin_call(Call {
                pair,
                choice,
                later,
            });
        }
    }

    fn begin_call(&self, call: Call) {
        let named = (call.pair, call.choice.version);
        if self.calling.borrow_mut().insert(named) {
            self.calls.borrow_mut().push(call);
            self.calls_due.notify_one();
        }
    }

    /// Tells a peer of a choice, as long as it stands, or waits behind one that may come to nothing.
    async fn call(&self, call: Call) {
        let Call {
            pair,
            choice: told,
            later,
        } = call;
        let Some(peer) = self.peer_of(pair.remote.ip()) else {
            return;
        };
        let socket = told.socket;
        let conns = [(Meant { pair, socket }, told.version)];
        let switch = Switch {
            bump: told.bump,
            explicit: true,
            ready: false,
        };
        if later {
            tokio::time::sleep(TELL_AGAIN).await;
        }
        loop {
            let known = self.state.borrow().choices.of(&pair, socket);
            match known {
                Some(choice) if choice.version == told.version => {
                    let answers = self.ask_switch(peer, &conns, switch).await;
                    match answers.first() {
                        // What it knows of may come to nothing, and what it could not do it may do later.
                        Some(
                            Ok((Outcome::Older | Outcome::Failed, _))
                            | Err(Unanswered::Silent | Unanswered::Full),
                        ) => {}
                        Some(Ok((Outcome::OwnRule, own))) => {
                            return self.give_in(peer, pair, told.version, *own).await;
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
            tokio::task::spawn_local(async move {
                daemon.call(call).await;
                let named = (call.pair, call.choice.version);
                daemon.calling.borrow_mut().remove(&named);
            });
        }
    }
}
