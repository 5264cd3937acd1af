//! What goes on by itself: news of the data path and of peers' daemons, changes of the host, connections
//! that end, steering that others undo, the watchdog.

use std::collections::{HashSet, VecDeque};
use std::convert::Infallible;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use dibs_core::node::Event;
use dibs_policy::{BumpId, Watch};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, interval_at, sleep, timeout};

use crate::conns::{Pair, Version};
use crate::daemon::{Daemon, Hand, Handed, Steered};
use crate::driver::Notice;
use crate::live::Live;
use crate::messages::{Body, Message, Named, Outcome};
use crate::paths::Link;
use crate::startup::is_our_tun;
use crate::switching::{Mark, Marked, ROUND};

/// Questions of peers that wait for their turn; as many again may have come since the last was taken, and
/// those beyond are not answered. A peer that moves many connections asks a dozen at once.
const QUESTIONS: usize = 256;
/// What changes together is looked at together.
const SETTLE: Duration = Duration::from_millis(50);
/// Between two looks for connections that ended.
const SWEEP: Duration = Duration::from_secs(2);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Sweeps between two looks for what no event tells of; with iptables-legacy each is one.
const SWEEPS_PER_CHECK: u32 = 15;

/// A question of a peer's daemon.
struct Asked {
    peer: usize,
    request: u32,
    /// Anything but an answer.
    question: Body,
}

/// Follows the data path until it ends.
pub async fn follow_data_path(daemon: Rc<Daemon>, mut notices: mpsc::Receiver<Notice>) {
    let (asked, questions) = mpsc::channel(QUESTIONS);
    tokio::task::spawn_local(answer_peers(Rc::clone(&daemon), questions));
    while let Some(notice) = notices.recv().await {
        match notice {
            Notice::Node(Event::Control { peer, bytes }) => {
                take_message(&daemon, peer, &bytes, &asked);
            }
            Notice::Node(event) => note(&daemon, event),
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

fn note(daemon: &Rc<Daemon>, event: Event) {
    daemon.sessions_due.notify_one();
    match event {
        Event::PeerUp { peer, restarted } => {
            {
                let state = &mut daemon.state.borrow_mut().peers[peer];
                state.since = Some(crate::daemon::wall());
                state.outdated = None;
                if restarted {
                    state.want = 0;
                    state.devices.clear();
                }
            }
            let name = daemon.peer_name(peer).to_owned();
            let how = if restarted { " anew: it restarted" } else { "" };
            daemon.tell(
                "session_up",
                format!("the session with peer {name} is established{how}"),
                &[("peer", name)],
            );
            let daemon = Rc::clone(daemon);
            tokio::task::spawn_local(async move {
                // How late it was when we called.
                daemon.note("save", daemon.save());
                daemon.tell_lacks(peer).await;
                if let Err(error) = daemon.recover(peer).await {
                    tracing::warn!("connections go on late: {error:#}");
                }
                daemon.resync(peer).await;
            });
        }
        Event::PeerDown { peer } => {
            daemon.state.borrow_mut().peers[peer].since = None;
            let name = daemon.peer_name(peer).to_owned();
            daemon.tell(
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
        Event::KeysExhausted { peer } => {
            let name = daemon.peer_name(peer).to_owned();
            daemon.tell(
                "keys_exhausted",
                format!(
                    "the keys of the session with peer {name} are used up: nothing is sent until \
                     a new session is agreed"
                ),
                &[("peer", name)],
            );
        }
        Event::Path { peer, path, state } => {
            let name = daemon.config.paths[path].name.clone();
            let peer = daemon.peer_name(peer).to_owned();
            daemon.tell(
                "path",
                format!("path {name} to peer {peer} is {state}"),
                &[("path", name), ("peer", peer), ("state", state.to_owned())],
            );
        }
        Event::Opened { peer, bump, tuple } => {
            let peer = daemon.peer_name(peer);
            tracing::debug!(peer, bump, ?tuple, "connection seen on its bump");
        }
        Event::Control { .. } | Event::Drained { .. } => {
            unreachable!("messages and ends of drains are taken before")
        }
    }
}

/// Why the calls of a peer come to nothing, and what helps.
pub(crate) fn outdated(behind: Duration) -> String {
    format!(
        "its calls are refused, for they are {} s older than its latest: if its clock was set back, set it \
         right, or restart dibsd here, which then remembers no latest call; otherwise somebody repeats old ones",
        behind.as_secs()
    )
}

/// Sorts a message of a peer's daemon.
fn take_message(daemon: &Daemon, peer: usize, bytes: &[u8], asked: &mpsc::Sender<Asked>) {
    let Ok(Message { request, body }) = Message::decode(bytes) else {
        daemon.messages_malformed.update(|count| count + 1);
        tracing::debug!(peer = daemon.peer_name(peer), "message dropped: malformed");
        return;
    };
    let question = match daemon.in_our_numbers(peer, body) {
        Body::Answer(outcomes) => return daemon.answered(peer, request, outcomes),
        question => question,
    };
    let question = Asked {
        peer,
        request,
        question,
    };
    if asked.try_send(question).is_err() {
        daemon.messages_dropped.update(|count| count + 1);
        tracing::debug!(peer = daemon.peer_name(peer), "message dropped: too many");
    }
}

/// Deals with questions one after the other; SWITCHes of a peer that say the same of many connections, and
/// came together, at once.
async fn answer_peers(daemon: Rc<Daemon>, mut questions: mpsc::Receiver<Asked>) {
    let mut waiting = VecDeque::new();
    loop {
        if waiting.is_empty() {
            let Some(asked) = questions.recv().await else {
                return;
            };
            waiting.push_back(asked);
        }
        while waiting.len() < QUESTIONS
            && let Ok(asked) = questions.try_recv()
        {
            waiting.push_back(asked);
        }
        let Asked {
            peer,
            request,
            question,
        } = waiting.pop_front().expect("it was just filled");
        match question {
            Body::Want {
                sequence, bumps, ..
            } => {
                let outcome = on_want(&daemon, peer, sequence, bumps).await;
                answer(&daemon, peer, request, vec![(outcome, 0)]).await;
            }
            Body::Switch {
                bump,
                explicit,
                ready,
                mut conns,
            } => {
                let mut parts = vec![(request, conns.len())];
                while conns.len() < ROUND
                    && let Some((request, more)) =
                        next_of(&mut waiting, peer, bump, explicit, ready)
                {
                    parts.push((request, more.len()));
                    conns.extend(more);
                }
                let outcomes = daemon.on_switch(peer, bump, explicit, ready, conns).await;
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

/// The next question that waits, if it is a SWITCH of this peer that says this.
fn next_of(
    waiting: &mut VecDeque<Asked>,
    of: usize,
    to: u8,
    by_choice: bool,
    whether: bool,
) -> Option<(u32, Vec<(Named, Version)>)> {
    let next = waiting.pop_front()?;
    match next {
        Asked {
            peer,
            request,
            question:
                Body::Switch {
                    bump,
                    explicit,
                    ready,
                    conns,
                },
        } if (peer, bump, explicit, ready) == (of, to, by_choice, whether) => {
            Some((request, conns))
        }
        other => {
            waiting.push_front(other);
            None
        }
    }
}

async fn answer(daemon: &Daemon, peer: usize, request: u32, outcomes: Vec<(Outcome, u64)>) {
    let body = Body::Answer(outcomes);
    if let Err(error) = daemon.post(peer, Message { request, body }).await {
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

async fn restore_tun(daemon: &Daemon, bump: u8, name: &str, error: &std::io::Error) {
    daemon.tell(
        "tun_lost",
        format!("device {name} is gone ({error}); making it again"),
        &[("device", name.to_owned())],
    );
    if let Some(id) = BumpId::new(bump) {
        daemon.steerer.lock().await.tun_lost(id);
    }
    if let Err(error) = daemon.steer().await {
        tracing::error!("cannot restore {name}: {error:#}");
    }
}

/// Follows interfaces and addresses, and puts back steering that others undid.
pub async fn follow_host(daemon: Rc<Daemon>) {
    loop {
        let Err(error) = follow_host_once(&daemon).await;
        tracing::warn!("cannot follow the host's interfaces: {error:#}");
        sleep(RETRY).await;
    }
}

async fn follow_host_once(daemon: &Daemon) -> anyhow::Result<Infallible> {
    let own = daemon.backstop.lock().await.port();
    let mut watch = Watch::open(own)?;
    // What changed before, while the daemon started or this failed, nobody told of.
    if refresh_interfaces(daemon).await? {
        repair(daemon, false).await;
    }
    loop {
        let failed = daemon.state.borrow().links.iter().any(Link::has_failed);
        // No event tells of whoever has the port, a lock, or all the descriptors, that he lets go.
        let again = failed || daemon.amiss().is_some();
        tokio::select! {
            changed = watch.changed() => changed?,
            () = sleep(RETRY), if again => {}
            () = daemon.amiss_noted.notified() => continue,
        }
        sleep(SETTLE).await;
        let moved = refresh_interfaces(daemon).await?;
        repair(daemon, !moved).await;
    }
}

/// Has the kernel brought to what is wanted, if anything is. `undone`: what is amiss was there before.
async fn repair(daemon: &Daemon, undone: bool) {
    let before = daemon.amiss();
    let none = daemon.state.borrow().installed.is_empty();
    if none && before.is_none() {
        return;
    }
    let undone = undone && !none && daemon.is_settled();
    match daemon.steer().await {
        Ok(Steered { steps }) if steps > 0 && undone => {
            daemon.restored.set(daemon.restored.get() + steps);
            daemon.tell(
                "steering_restored",
                format!("another program changed the steering: put {steps} thing(s) back"),
                &[("steps", steps.to_string())],
            );
        }
        Ok(_) => {}
        Err(_) => {
            let now = daemon.amiss();
            if let Some(why) = now.as_ref().filter(|_| now != before) {
                tracing::error!("steering: {why}");
            }
        }
    }
}

/// Looks at the interfaces again, and tells the data path what is new. Whether the host's addresses are.
pub(crate) async fn refresh_interfaces(daemon: &Daemon) -> anyhow::Result<bool> {
    let fresh = daemon.interfaces.list().await?;
    let before = std::mem::replace(&mut daemon.state.borrow_mut().inventory, fresh.clone());
    daemon.follow_links(false).await?;
    daemon.tell_devices(&before, &fresh);
    daemon.tell_own_addresses();
    let old = daemon.state.borrow().addresses.clone();
    let changed = keep_addresses(daemon, &old).await?;
    if changed && !daemon.state.borrow().installed.is_empty() {
        daemon.save()?;
    }
    Ok(changed)
}

/// Notes the host's addresses, and those of `old` that connections still use: they outlive the interface
/// whose address it was. Whether that is news.
pub(crate) async fn keep_addresses(daemon: &Daemon, old: &[IpAddr]) -> anyhow::Result<bool> {
    let inventory = daemon.state.borrow().inventory.clone();
    let mut addresses = inventory.host_addresses(is_our_tun);
    if old.iter().any(|address| !addresses.contains(address)) {
        let lives = daemon.sockets().await?;
        let used: HashSet<_> = lives.iter().map(|live| live.pair.local.ip()).collect();
        addresses.extend(old.iter().filter(|address| used.contains(address)));
        addresses.sort_unstable();
        addresses.dedup();
    }
    let changed = daemon.state.borrow().addresses != addresses;
    if changed {
        daemon.driver.set_addresses(addresses.clone())?;
        daemon.state.borrow_mut().addresses = addresses;
    }
    Ok(changed)
}

/// Forgets what was chosen for connections that ended, and bumps that nobody uses.
pub async fn sweep(daemon: Rc<Daemon>) {
    // At the start there is more urgent work.
    let mut ticks = interval_at(Instant::now() + SWEEP, SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round = 0;
    loop {
        ticks.tick().await;
        if daemon.unsaved.get() {
            daemon.note("save", daemon.save());
        }
        let idle = {
            let state = daemon.state.borrow();
            state.installed.is_empty() && state.choices.is_empty() && state.leaving.is_empty()
        };
        if idle {
            continue;
        }
        daemon.note("look for connections that ended", sweep_once(&daemon).await);
        let cleared = daemon.steerer.lock().await.clear_others().await;
        daemon.note("remove what an earlier run left", cleared);
        round = (round + 1) % SWEEPS_PER_CHECK;
        if round == 0 || !daemon.steerer.lock().await.is_told().await {
            repair(&daemon, true).await;
        }
    }
}

async fn sweep_once(daemon: &Daemon) -> anyhow::Result<()> {
    // That one of these fails is no reason to leave out the others.
    let forgotten = forget_ended(daemon).await;
    let followed = daemon.let_follow().await;
    let retired = daemon.retire().await;
    forgotten.and(followed.map_err(Into::into)).and(retired)
}

/// Forgets connections that ended, and takes their marks: another one of the same ends is not to inherit them.
/// One that is there already gets what is chosen for it.
async fn forget_ended(daemon: &Daemon) -> anyhow::Result<()> {
    {
        let state = daemon.state.borrow();
        let marked =
            !(state.choices.is_empty() && state.handed.is_empty() && state.written.is_empty());
        if !marked && state.names.is_empty() {
            return Ok(());
        }
    }
    let (gone, taken) = {
        let _turn = daemon.looking.lock().await;
        let named = |live: Live| Some((live.pair, live.socket));
        let mut alive = daemon.sockets_as(named).await?;
        alive.sort_unstable();
        let socket_of = |pair: &Pair| {
            let at = alive.binary_search_by_key(pair, |(pair, _)| *pair).ok()?;
            Some(alive[at].1)
        };
        // What becomes of those is told by events.
        let passing: HashSet<Pair> = {
            let state = daemon.state.borrow();
            let chosen = state.choices.iter().map(|(pair, _)| pair);
            let others = state.handed.keys().chain(state.written.keys()).copied();
            let known = chosen.chain(others);
            known.filter(|pair| daemon.may_live(pair)).collect()
        };
        let lives = |pair: &Pair| socket_of(pair).is_some() || passing.contains(pair);
        let mut state = daemon.state.borrow_mut();
        state.handed.retain(|pair, _| lives(pair));
        state.written.retain(|pair, _| lives(pair));
        state.ended.retain(|pair| socket_of(pair).is_some());
        let is_there = |pair: &Pair, socket| socket_of(pair) == Some(socket);
        state.names.sweep(is_there);
        let gone = state.choices.sweep(|pair, _| lives(pair));
        let known = state.choices.iter();
        let taken = known
            .filter(|(pair, choice)| !is_there(pair, choice.socket) && !passing.contains(pair));
        (gone, taken.map(|(pair, _)| pair).collect::<Vec<_>>())
    };
    let chosen = match daemon.mark_choices(&taken).await.into_values().next() {
        Some(error) => Err(error.into()),
        None => Ok(()),
    };
    let cleared = {
        let _turn = daemon.marking.lock().await;
        let none: Vec<Mark> = gone.iter().copied().map(Mark::none).collect();
        let marked = daemon.write(&none).await;
        marked.into_iter().collect::<Marked>()
    };
    let saved = match gone.is_empty() {
        true => Ok(()),
        false => daemon.save(),
    };
    chosen.and(cleared.map_err(Into::into)).and(saved)
}

/// Tells systemd that we live, as long as the data path answers.
pub async fn watchdog(daemon: Rc<Daemon>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = interval(limit / 3);
    loop {
        ticks.tick().await;
        match timeout(limit / 3, daemon.driver.ping()).await {
            Ok(Ok(())) => {
                // Systemd is there, or it would not have set the limit.
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
            }
            _ => tracing::error!("the data path does not answer"),
        }
    }
}
