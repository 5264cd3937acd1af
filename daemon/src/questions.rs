//! What peers' daemons ask: each peer has a desk of its own, where its questions are dealt with one after the other.
//! However much one asks, and however long that takes, those of the others go on.
//!
//! A question that waits has a place in the node (`dibs_core::node::Node::control_done`); what comes while all of a peer's
//! places are taken is not acknowledged, and comes again. Answers give theirs back at once, so they pass by the
//! questions that wait. No question of a peer is dealt with by asking that peer and waiting, so places always come free:
//! two daemons that ask each other more than either has places for still both get their answers.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::Notify;

use crate::daemon::Daemon;
use crate::switching::ROUND;
use dibs_switch::asking::Unanswered;
use dibs_switch::conns::{Pair, Version};
use dibs_switch::hands::{Hand, Handed};
use dibs_switch::messages::{Body, Message, Named, Outcome, Switch};

/// A question of a peer's daemon.
struct Asked {
    request: u32,
    /// Anything but an answer.
    question: Body,
}

/// Where one peer's questions wait for their turn.
struct Desk {
    peer: usize,
    /// No more than the node gives a peer places for.
    waiting: RefCell<VecDeque<Asked>>,
    asked: Notify,
}

/// Those of all peers, by index.
pub(crate) struct Desks(Vec<Rc<Desk>>);

impl Desks {
    /// Has questions answered from now on.
    pub(crate) fn open(daemon: &Rc<Daemon>) -> Self {
        let open = |peer| {
            let desk = Rc::new(Desk {
                peer,
                waiting: RefCell::default(),
                asked: Notify::new(),
            });
            tokio::task::spawn_local(answer_peer(Rc::clone(daemon), Rc::clone(&desk)));
            desk
        };
        Self((0..daemon.config.peers.len()).map(open).collect())
    }

    /// Sorts a message of a peer's daemon.
    pub(crate) fn take(&self, daemon: &Daemon, peer: usize, bytes: &[u8]) {
        let Ok(Message { request, body }) = Message::decode(bytes) else {
            daemon.messages_malformed.update(|count| count + 1);
            tracing::debug!(peer = daemon.peer_name(peer), "message dropped: malformed");
            return daemon.driver.control_done(peer);
        };
        match daemon.in_our_numbers(peer, body) {
            Body::Answer(outcomes) => {
                daemon.answered(peer, request, outcomes);
                daemon.driver.control_done(peer);
            }
            question => {
                let desk = &self.0[peer];
                let asked = Asked { request, question };
                desk.waiting.borrow_mut().push_back(asked);
                desk.asked.notify_one();
            }
        }
    }
}

impl Desk {
    /// The next question, whose place is free then.
    async fn next(&self, daemon: &Daemon) -> Asked {
        loop {
            let next = self.waiting.borrow_mut().pop_front();
            if let Some(asked) = next {
                daemon.driver.control_done(self.peer);
                return asked;
            }
            self.asked.notified().await;
        }
    }

    /// The next question, if it waits, and is a SWITCH that says this.
    fn next_switch(&self, daemon: &Daemon, wanted: Switch) -> Option<(u32, Vec<(Named, Version)>)> {
        let same = |asked: &mut Asked| match &asked.question {
            Body::Switch { switch, .. } => *switch == wanted,
            _ => false,
        };
        let asked = self.waiting.borrow_mut().pop_front_if(same)?;
        daemon.driver.control_done(self.peer);
        match asked.question {
            Body::Switch { conns, .. } => Some((asked.request, conns)),
            _ => unreachable!("it was just seen to be a SWITCH"),
        }
    }
}

/// Deals with a peer's questions one after the other; SWITCHes that say the same of many connections, and came
/// together, at once.
async fn answer_peer(daemon: Rc<Daemon>, desk: Rc<Desk>) {
    let peer = desk.peer;
    loop {
        let Asked { request, question } = desk.next(&daemon).await;
        match question {
            Body::Want {
                sequence, bumps, ..
            } => {
                let outcome = on_want(&daemon, peer, sequence, bumps).await;
                answer(&daemon, peer, request, vec![(outcome, 0)]).await;
            }
            Body::Switch { switch, mut conns } => {
                let mut parts = vec![(request, conns.len())];
                while conns.len() < ROUND
                    && let Some((request, more)) = desk.next_switch(&daemon, switch)
                {
                    parts.push((request, more.len()));
                    conns.extend(more);
                }
                let outcomes = daemon.on_switch(peer, switch, conns).await;
                let mut outcomes = outcomes.into_iter();
                for (request, count) in parts {
                    let part = outcomes.by_ref().take(count).collect();
                    answer(&daemon, peer, request, part).await;
                }
            }
            Body::Answer(_) => unreachable!("answers are taken before"),
            Body::Confirm { bump, conns } => {
                let outcomes = daemon.on_confirm(peer, bump, conns).await;
                answer(&daemon, peer, request, outcomes).await;
            }
        }
    }
}

async fn answer(daemon: &Daemon, peer: usize, request: u32, outcomes: Vec<(Outcome, u64)>) {
    let body = Body::Answer(outcomes);
    if let Err(error) = daemon.post(peer, Message { request, body }).await {
        if error == Unanswered::Full {
            daemon.messages_dropped.update(|count| count + 1);
        }
        tracing::debug!(peer = daemon.peer_name(peer), "no answer sent: {error}");
    }
}

/// Makes ready what a peer's rules need here.
async fn on_want(daemon: &Daemon, peer: usize, sequence: u64, bumps: u16) -> Outcome {
    let carried = daemon
        .carried()
        .iter()
        .fold(0, |all, bump| all | 1 << bump.id.get());
    {
        let mut state = daemon.state.borrow_mut();
        let known = &mut state.peers[peer];
        if sequence <= known.want {
            return Outcome::Older;
        }
        known.want = sequence;
        if known.engaged == bumps & carried {
            return Outcome::Done;
        }
        known.engaged = bumps & carried;
        // What its rules had put there has nothing left that keeps it there.
        let kept = |pair: &Pair, followed: &Handed| {
            let of_peer = daemon.peer_of(pair.remote.ip()) == Some(peer);
            !of_peer || followed.by != Hand::Peer || bumps & 1 << followed.bump != 0
        };
        state.handed.retain(|pair, followed| kept(pair, followed));
    }
    let ready = async {
        daemon.save()?;
        daemon.steer().await.map(drop)
    };
    match ready.await {
        Ok(()) if bumps & !carried != 0 => Outcome::NoBump,
        Ok(()) => Outcome::Done,
        Err(error) => {
            tracing::warn!("cannot make ready for a peer's rules: {error:#}");
            Outcome::Failed
        }
    }
}
