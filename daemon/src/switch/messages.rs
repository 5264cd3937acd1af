//! News of the data path, and messages between the daemons. Each peer has a desk of its own, where its questions are dealt with one after the other:
//! however much one asks, and however long that takes, those of the others go on. Peers are told of choices, and asked
//! whether connections that are on a bump here are on it there too: those are locked.
//!
//! A question that waits has a place in the node (`dibs_core::node::Node::control_done`); what comes while all of a peer's
//! places are taken is not acknowledged, and comes again. Answers give theirs back at once, so they pass by the
//! questions that wait. No question of a peer is dealt with by asking that peer and waiting, so places always come free:
//! two daemons that ask each other more than either has places for still both get their answers.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use dibs_core::node::Event;
use dibs_settings::BumpId;
use dibs_switch::engine::{ROUND, knocks, locks, matches, rules, switches, tells, wants};
use dibs_switch::messages::{Body, Message, Outcome};
use tokio::sync::Notify;

use crate::data::{Notice, Notices};
use crate::host::process::{instant, now, or_warn, wall};
use crate::switch::sessions::{Resyncs, UNSECURED, outdated};
use crate::switch::{Daemon, Task, listing, marking, paths, sessions, startup, steering};

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

    /// Connections of the next question, if it waits, and `conns` takes them out of it.
    fn next_like<T>(
        &self,
        daemon: &Daemon,
        conns: impl Fn(&mut Body) -> Option<Vec<T>>,
    ) -> Option<(u32, Vec<T>)> {
        let next = {
            let mut waiting = self.waiting.borrow_mut();
            let asked = waiting.front_mut()?;
            let next = (asked.request, conns(&mut asked.question)?);
            waiting.pop_front();
            next
        };
        daemon.driver.control_done(self.peer);
        Some(next)
    }

    /// Questions like the `first` one that came with it, up to a round: how many connections each is about, and these.
    fn gather<T>(
        &self,
        daemon: &Daemon,
        first: (u32, Vec<T>),
        like: impl Fn(&mut Body) -> Option<Vec<T>>,
    ) -> (Vec<(u32, usize)>, Vec<T>) {
        let (request, mut conns) = first;
        let mut parts = vec![(request, conns.len())];
        while conns.len() < ROUND
            && let Some((request, more)) = self.next_like(daemon, &like)
        {
            parts.push((request, more.len()));
            conns.extend(more);
        }
        (parts, conns)
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
/// came together, and with KNOCKs and MATCHes that did.
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
            Body::Switch { switch, conns } => {
                let (parts, conns) = desk.gather(&daemon, (request, conns), |body| match body {
                    Body::Switch { switch: s, conns } if *s == switch => Some(take(conns)),
                    _ => None,
                });
                let outcomes = switches::answer(&*daemon, peer, switch, conns).await;
                answer_parts(&daemon, peer, parts, outcomes).await;
            }
            Body::Knock(conns) => {
                let (parts, conns) = desk.gather(&daemon, (request, conns), |body| match body {
                    Body::Knock(conns) => Some(take(conns)),
                    _ => None,
                });
                let outcomes = knocks::answer(&*daemon, peer, &conns).await;
                answer_parts(&daemon, peer, parts, outcomes).await;
            }
            Body::Match(conns) => {
                let (parts, conns) = desk.gather(&daemon, (request, conns), |body| match body {
                    Body::Match(conns) => Some(take(conns)),
                    _ => None,
                });
                let outcomes = matches::answer(&*daemon, peer, &conns).await;
                answer_parts(&daemon, peer, parts, outcomes).await;
            }
            Body::Silent { sequence, ports } => {
                sessions::handle_message(&daemon, peer, sequence, ports);
                let done = vec![(Outcome::Done, 0)];
                daemon.rpc.answer(peer, request, done).await;
            }
            Body::Measure { run, named, paths } => {
                let outcomes = paths::answer_measure(&daemon, peer, (run, named), paths).await;
                daemon.rpc.answer(peer, request, outcomes).await;
            }
            Body::Answer(_) => unreachable!("answers are taken before"),
            Body::Confirm { bump, conns } => {
                let outcomes = locks::answer(&*daemon, peer, bump, &conns).await;
                daemon.rpc.answer(peer, request, outcomes).await;
            }
        }
    }
}

/// Tells peers what they are to be told, when it is due; one that does not answer holds up no other.
pub(crate) async fn keep_telling(daemon: Rc<Daemon>) {
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

/// Between two looks that nothing gave cause for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Peers that are being asked. True: a look passed over one meanwhile.
type Busy = Rc<RefCell<BTreeMap<usize, bool>>>;

/// Has peers asked about connections that are on a bump here.
async fn ask_confirmations(daemon: &Rc<Daemon>, busy: &Busy) -> anyhow::Result<()> {
    for (peer, asked) in locks::unconfirmed(&**daemon).await? {
        let of_task = Rc::clone(daemon);
        let ask = async move {
            let confirmed = locks::ask(&*of_task, peer, &asked).await;
            of_task.events.note("lock what peers confirmed", confirmed);
        };
        let of_task = Rc::clone(daemon);
        ask_apart(busy, peer, ask, move || of_task.wakers.wake(Task::Confirm));
    }
    Ok(())
}

/// Has a peer asked by a task of its own, so that one that does not answer holds up no other. One that is still being
/// asked is passed over; `look_again` is called when that is over.
fn ask_apart(
    busy: &Busy,
    peer: usize,
    ask: impl Future<Output = ()> + 'static,
    look_again: impl FnOnce() + 'static,
) {
    if let Some(passed_over) = busy.borrow_mut().get_mut(&peer) {
        *passed_over = true;
        return;
    }
    busy.borrow_mut().insert(peer, false);
    let busy = Rc::clone(busy);
    tokio::task::spawn_local(async move {
        ask.await;
        if busy.borrow_mut().remove(&peer) == Some(true) {
            look_again();
        }
    });
}

/// Asks peers to confirm, after each switch and from time to time.
pub(crate) async fn keep_asking(daemon: Rc<Daemon>) {
    let busy = Busy::default();
    loop {
        let woken = daemon.wakers.woken(Task::Confirm);
        let _ = tokio::time::timeout(LOOK_EVERY, woken).await;
        daemon.events.note(
            "ask peers to confirm",
            ask_confirmations(&daemon, &busy).await,
        );
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
        Event::Path { peer, path, state } => {
            let name = daemon.config.paths[path].name.clone();
            let peer = daemon.peer_name(peer).to_owned();
            let because = listing::because(daemon, path, state);
            daemon.events.tell(
                "path",
                format!("path {name} to peer {peer} is {state}{because}"),
                &[("path", name), ("peer", peer), ("state", state.to_owned())],
            );
        }
        Event::Renumbered { bump, tuple } => {
            let daemon = Rc::clone(daemon);
            tokio::task::spawn_local(async move {
                if let Err(error) = marking::leave_renumbered(&daemon, bump, tuple).await {
                    tracing::warn!("{tuple} cannot leave a bump that does not carry it: {error:#}");
                }
            });
        }
        Event::SilentPorts { peer, ports } => sessions::handle_report(daemon, peer, &ports),
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::Notify;
    use tokio::task::LocalSet;

    use super::*;

    /// Peer 0 says nothing, look after look; peer 1 is asked and answers at each of them.
    #[tokio::test]
    async fn a_silent_peer_keeps_nobody_from_being_asked() {
        let tasks = LocalSet::new();
        let silence = Rc::new(Notify::new());
        let [asked, looks] = [(); 2].map(|()| Rc::new(Cell::new([0, 0])));
        let busy = Busy::default();
        let look = || {
            for peer in [0, 1] {
                let (silence, asked) = (Rc::clone(&silence), Rc::clone(&asked));
                let ask = async move {
                    asked.update(|mut counts| {
                        counts[peer] += 1;
                        counts
                    });
                    if peer == 0 {
                        silence.notified().await;
                    }
                };
                let looks = Rc::clone(&looks);
                ask_apart(&busy, peer, ask, move || {
                    looks.update(|mut counts: [u32; 2]| {
                        counts[peer] += 1;
                        counts
                    });
                });
            }
        };
        let step = || tasks.run_until(async { tokio::task::yield_now().await });
        for round in 1..=3 {
            tasks.run_until(async { look() }).await;
            step().await;
            assert_eq!(asked.get(), [1, round]);
            assert_eq!(looks.get(), [0, 0]);
        }
        // It is asked again, once it has answered, about what came meanwhile.
        silence.notify_waiters();
        step().await;
        step().await;
        assert_eq!(looks.get(), [1, 0]);
        tasks.run_until(async { look() }).await;
        step().await;
        assert_eq!(asked.get(), [2, 4]);
    }
}
