//! News of the data path, and messages between the daemons. Each peer has a desk of its own, where its questions are dealt with one after the other:
//! however much one asks, and however long that takes, those of the others go on.
//!
//! A question that waits has a place in the node (`dibs_core::node::Node::control_done`); what comes while all of a peer's
//! places are taken is not acknowledged, and comes again. Answers give theirs back at once, so they pass by the
//! questions that wait. No question of a peer is dealt with by asking that peer and waiting, so places always come free:
//! two daemons that ask each other more than either has places for still both get their answers.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use dibs_core::node::Event;
use dibs_settings::BumpId;
use dibs_switch::engine::locks;
use dibs_switch::engine::questions::{self, Questions};
use dibs_switch::messages::{Body, Message};
use tokio::sync::Notify;

use crate::data::{Notice, Notices};
use crate::host::process::wall;
use crate::switch::sessions::{Resyncs, UNSECURED, outdated};
use crate::switch::{Daemon, Task, marking, paths, sessions, startup, steering};

/// Where one peer's questions wait for their turn.
struct Desk {
    peer: usize,
    /// No more than the node gives a peer places for.
    waiting: RefCell<questions::Desk>,
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
    pub(crate) fn take(&self, daemon: &Daemon, peer: usize, message: Option<Message>) {
        let Some(Message { request, body }) = message else {
            daemon.rpc.count_malformed(peer);
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
            body => {
                let desk = &self.0[peer];
                desk.waiting.borrow_mut().push(Message { request, body });
                desk.asked.notify_one();
            }
        }
    }
}

impl Desk {
    /// Questions that are next, whose places are free then.
    async fn next(&self, daemon: &Daemon) -> Questions {
        loop {
            let next = self.waiting.borrow_mut().take();
            if let Some(questions) = next {
                (0..questions.count()).for_each(|_| daemon.driver.control_done(self.peer));
                return questions;
            }
            self.asked.notified().await;
        }
    }
}

/// Deals with a peer's questions one after the other.
async fn answer_peer(daemon: Rc<Daemon>, desk: Rc<Desk>) {
    loop {
        let questions = desk.next(&daemon).await;
        for answer in questions.answer(&daemon, desk.peer).await {
            daemon.rpc.answer(desk.peer, answer).await;
        }
    }
}

/// Follows the data path until it ends.
pub(crate) async fn follow_data_path(daemon: Rc<Daemon>, file: PathBuf, mut notices: Notices) {
    let (desks, resyncs) = (Desks::open(&daemon), Resyncs::open(&daemon));
    while let Some(notice) = notices.next().await {
        match notice {
            Notice::Message { peer, message } => desks.take(&daemon, peer, message),
            Notice::Node(Event::Stranger { key, ticket }) => {
                startup::admit(&daemon, &file, *key.as_bytes(), ticket.as_bytes());
            }
            Notice::Node(event) => note(&daemon, &resyncs, event),
            Notice::TunLost { bump, tun, error } => {
                let name = tun.name().to_owned();
                // Closed first, so that the name is free.
                drop(tun);
                let daemon = Rc::clone(&daemon);
                tokio::task::spawn_local(async move {
                    restore_tun(&daemon, bump, &name, &error).await;
                });
            }
        }
    }
}

fn note(daemon: &Rc<Daemon>, resyncs: &Resyncs, event: Event) {
    daemon.wakers.wake(Task::Sessions);
    daemon.wakers.wake(Task::Names);
    match event {
        Event::PeerUp { peer, restarted } => {
            {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                state.since = Some(wall());
                state.outdated = None;
                if restarted {
                    state.wants.handle_restart();
                    state.silent_here.handle_restart();
                    state.silent_there.handle_restart();
                    state.devices.clear();
                }
            }
            if restarted {
                locks::handle_restart(&**daemon, peer);
            }
            startup::forget_ticket(daemon, peer);
            let name = daemon.peer_name(peer).to_owned();
            let how = if restarted {
                " again: the peer restarted"
            } else {
                ""
            };
            daemon.events.tell(
                "session_up",
                format!("the session with peer {name} is established{how}"),
                &[("peer", name)],
            );
            sessions::tell_silence(daemon, peer);
            resyncs.begin(peer);
        }
        Event::PeerDown { peer } => {
            daemon.state.borrow_mut().peers[peer].since = None;
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "session_down",
                format!("the session with peer {name} is down"),
                &[("peer", name)],
            );
        }
        Event::Outdated { peer, behind } => {
            let news = {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                // Somebody repeats an old call of a peer that is there.
                !state.answers && state.outdated.replace(behind).is_none()
            };
            if news {
                tracing::warn!("peer {}: {}", daemon.peer_name(peer), outdated(behind));
            }
        }
        Event::Unsecured { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "handshake_unsecured",
                format!("no session with peer {name}: it does not answer over a trusted path, and {UNSECURED}"),
                &[("peer", name)],
            );
        }
        Event::KeysExhausted { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.events.tell(
                "keys_exhausted",
                format!(
                    "the keys of the session with peer {name} are used up: nothing is sent until there is a new session"
                ),
                &[("peer", name)],
            );
        }
        Event::Path { peer, path, state } => paths::tell_state(daemon, peer, path, state),
        Event::Misdirected { peer, path, to } => paths::tell_misdirected(daemon, peer, path, to),
        Event::Renumbered { bump, tuple } => {
            let daemon = Rc::clone(daemon);
            tokio::task::spawn_local(async move {
                if let Err(error) = marking::leave_renumbered(&daemon, bump, tuple).await {
                    tracing::warn!("{tuple} cannot leave a bump that does not carry it: {error:#}");
                }
            });
        }
        Event::SilentPorts { peer, ports } => sessions::handle_report(daemon, peer, &ports),
        Event::MovedPorts { peer, ports } => {
            daemon.state.borrow_mut().peers[peer].moved_ports = ports;
            daemon.save_or_warn();
        }
        Event::Control { .. } | Event::Drained { .. } | Event::Stranger { .. } => {
            unreachable!("messages, ends of drains and strangers are taken before")
        }
    }
}

async fn restore_tun(daemon: &Daemon, bump: BumpId, name: &str, error: &std::io::Error) {
    daemon.events.tell(
        "tun_lost",
        format!("device {name} is gone ({error}): dibsd makes it again"),
        &[("device", name.to_owned())],
    );
    daemon.kernel.steerer().await.tun_lost(bump);
    if let Err(error) = steering::steer(daemon).await {
        tracing::error!("cannot restore {name}: {error:#}");
    }
}
