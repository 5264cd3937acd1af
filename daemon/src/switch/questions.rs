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

use dibs_switch::conns::Version;
use dibs_switch::engine::{ROUND, locks, switches, wants};
use dibs_switch::knock::Numbers;
use dibs_switch::messages::{Body, Message, Named, Outcome, Switch};
use tokio::sync::Notify;

use crate::switch::Daemon;
use crate::switch::{knocking, silence};

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
        let Some(Message { request, body }) = daemon.rpc.receive(peer, bytes) else {
            return daemon.driver.control_done(peer);
        };
        let body = {
            let devices = &mut daemon.state.borrow_mut().peers[peer].devices;
            daemon.bumps.in_our_numbers(devices, body)
        };
        match body {
            Body::Answer(outcomes) => {
                daemon.rpc.handle_answer(peer, request, outcomes);
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

    /// The next question, if it waits, and is one like these.
    fn next_like(&self, daemon: &Daemon, is_like: impl Fn(&Body) -> bool) -> Option<Asked> {
        let is_like = |asked: &mut Asked| is_like(&asked.question);
        let asked = self.waiting.borrow_mut().pop_front_if(is_like)?;
        daemon.driver.control_done(self.peer);
        Some(asked)
    }

    /// The next question, if it waits, and is a SWITCH that says this.
    fn next_switch(&self, daemon: &Daemon, wanted: Switch) -> Option<(u32, Vec<(Named, Version)>)> {
        let same = |body: &Body| matches!(body, Body::Switch { switch, .. } if *switch == wanted);
        let asked = self.next_like(daemon, same)?;
        match asked.question {
            Body::Switch { conns, .. } => Some((asked.request, conns)),
            _ => unreachable!("it was just seen to be a SWITCH"),
        }
    }

    /// The next question, if it waits, and is a KNOCK.
    fn next_knock(&self, daemon: &Daemon) -> Option<(u32, Vec<(Named, Numbers)>)> {
        let asked = self.next_like(daemon, |body| matches!(body, Body::Knock(_)))?;
        match asked.question {
            Body::Knock(conns) => Some((asked.request, conns)),
            _ => unreachable!("it was just seen to be a KNOCK"),
        }
    }
}

/// Answers questions that were dealt with at once, by their numbers and how many connections each was about.
async fn answer_parts(
    daemon: &Daemon,
    peer: usize,
    parts: Vec<(u32, usize)>,
    outcomes: Vec<(Outcome, u64)>,
) {
    let mut outcomes = outcomes.into_iter();
    for (request, count) in parts {
        let part = outcomes.by_ref().take(count).collect();
        daemon.rpc.answer(peer, request, part).await;
    }
}

/// Deals with a peer's questions one after the other; at once with SWITCHes that say the same of many connections and
/// came together, and with KNOCKs that did.
async fn answer_peer(daemon: Rc<Daemon>, desk: Rc<Desk>) {
    let peer = desk.peer;
    loop {
        let Asked { request, question } = desk.next(&daemon).await;
        match question {
            Body::Want {
                sequence, bumps, ..
            } => {
                let outcome = wants::answer(&*daemon, peer, sequence, bumps).await;
                daemon.rpc.answer(peer, request, vec![(outcome, 0)]).await;
            }
            Body::Switch { switch, mut conns } => {
                let mut parts = vec![(request, conns.len())];
                while conns.len() < ROUND
                    && let Some((request, more)) = desk.next_switch(&daemon, switch)
                {
                    parts.push((request, more.len()));
                    conns.extend(more);
                }
                let outcomes = switches::answer(&*daemon, peer, switch, conns).await;
                answer_parts(&daemon, peer, parts, outcomes).await;
            }
            Body::Knock(mut conns) => {
                let mut parts = vec![(request, conns.len())];
                while conns.len() < ROUND
                    && let Some((request, more)) = desk.next_knock(&daemon)
                {
                    parts.push((request, more.len()));
                    conns.extend(more);
                }
                let outcomes = knocking::on_knock(&daemon, peer, conns).await;
                answer_parts(&daemon, peer, parts, outcomes).await;
            }
            Body::Silent { sequence, ports } => {
                silence::handle_message(&daemon, peer, sequence, ports);
                let done = vec![(Outcome::Done, 0)];
                daemon.rpc.answer(peer, request, done).await;
            }
            Body::Answer(_) => unreachable!("answers are taken before"),
            Body::Confirm { bump, conns } => {
                let outcomes = locks::answer(&*daemon, peer, bump, &conns).await;
                daemon.rpc.answer(peer, request, outcomes).await;
            }
        }
    }
}
