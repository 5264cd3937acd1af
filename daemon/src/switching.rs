//! Moving live connections: what users here choose. What peers ask for is in [`answering`], what a rule of theirs
//! implies in [`by_rule`], what the kernel is told in [`marking`](crate::marking), and what peers are asked in [`asking`].
//!
//! Nothing leaves its bump for plain unless plain was just seen to carry it, or the user wants that all the same
//! ([`knocking`]).
//!
//! Into a bump: TUN and chains first, then the peer, whose packets may come by the bump from then on,
//! then our own mark. Back to plain: each end falls silent before it leaves, or TCP would take what is
//! overtaken for lost. Its kernel falls silent by the acknowledgements that it gets by the bump, so whoever
//! sends leaves first: the peer, or, when we send, we, once the peer has agreed.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::asking::{Conclusion, Negotiation};
use dibs_switch::messages::{Answer, Outcome, Unanswered};
use dibs_wire::FlowKey;

use crate::daemon::Daemon;
use crate::live::Live;
use crate::subflows::{self, Refused};
use crate::wakers::Task;
use crate::{connections, devices, knocking, marking, reconcile, recovery, translated};

pub(crate) mod answering;
pub(crate) mod asking;
pub(crate) mod by_rule;
pub(crate) mod telling;

use asking::{Move, ROUND};

/// How long `enable` waits for a connection that has something to send to be seen on the bump.
const SEEN_WITHIN: Duration = Duration::from_secs(1);
/// What is sent by a bump is acknowledged sooner, as a rule: a retransmission may lie between.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(1200);
/// A connection that moves no byte for as long is taken to be idle.
const IDLE_AFTER: Duration = Duration::from_millis(150);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// What came of a choice for one connection: moved, or why not.
pub(crate) type Moved = (Live, Result<(), String>);

/// How far a change of many connections is, for whoever waits for it.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    of: Cell<usize>,
    done: Cell<usize>,
}

impl Progress {
    /// Number of connections that were dealt with, and of all.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.done.get() as u64, self.of.get() as u64)
    }
}

/// Goal of connections that move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Goal {
    /// None: to plain.
    pub(crate) bump: Option<BumpId>,
    /// To plain whether that carries them or not.
    pub(crate) force: bool,
}

impl From<Option<BumpId>> for Goal {
    /// To plain only where that carries them.
    fn from(bump: Option<BumpId>) -> Self {
        let force = false;
        Self { bump, force }
    }
}

/// Moves connections, as a user here chose. What comes of it for each, in the same order.
pub(crate) async fn choose(
    daemon: &Daemon,
    lives: &[Live],
    goal: Goal,
    progress: &Progress,
) -> anyhow::Result<Vec<Moved>> {
    let bump = goal.bump;
    let mut outcomes: HashMap<FlowKey, Result<(), String>> = HashMap::new();
    let mut by_peer: BTreeMap<usize, Vec<Move>> = BTreeMap::new();
    let refused = refused_here(daemon, lives, goal).await?;
    for live in lives
        .iter()
        .filter(|live| !refused.contains_key(&live.pair))
    {
        if let Some(negotiation) = propose(daemon, live, bump) {
            let moves = by_peer.entry(live.peer).or_default();
            moves.push((*live, negotiation));
        }
    }
    outcomes.extend(refused.into_iter().map(|(pair, why)| (pair, Err(why))));
    progress.of.set(by_peer.values().map(Vec::len).sum());
    let prepared = async {
        daemon.save()?;
        reconcile::install(daemon).await
    };
    if let Err(error) = prepared.await {
        {
            let conns = &mut daemon.state.borrow_mut().conns;
            for (_, negotiation) in by_peer.values().flatten() {
                negotiation.withdraw(conns);
            }
        }
        // Or the next start would find them in the file.
        daemon.save_or_warn();
        return Err(error);
    }
    if !daemon.bumps.is_outside(bump) {
        marking::expect_rates(daemon, by_peer.values().flatten().map(|(live, _)| live));
    }
    let moved =
        { by_peer.iter_mut() }.map(|(peer, moves)| move_all(daemon, *peer, moves, bump, progress));
    let moved = futures_util::future::join_all(moved).await;
    outcomes.extend(moved.into_iter().flatten());
    daemon.save()?;
    // What came back for want of an answer, too.
    daemon.wakers.wake(Task::Confirm);
    if let Some(bump) = daemon.bumps.inside(bump) {
        let moved: Vec<&Live> = lives
            .iter()
            .filter(|live| outcomes.get(&live.pair) == Some(&Ok(())))
            .collect();
        moved
            .iter()
            .for_each(|live| recovery::wake(daemon, live, Some(bump)));
        wait_seen(daemon, &moved, bump).await?;
    }
    let outcome = |live: &Live| {
        let missing = || Err("it has ended".to_owned());
        outcomes.get(&live.pair).cloned().unwrap_or_else(missing)
    };
    Ok(lives.iter().map(|live| (*live, outcome(live))).collect())
}

/// Why connections cannot move, as far as this host knows, or finds out before it asks the peer to follow.
async fn refused_here(daemon: &Daemon, lives: &[Live], goal: Goal) -> anyhow::Result<Refused> {
    let bump = goal.bump;
    let translated = match bump {
        None => HashMap::new(),
        Some(_) => translated::translated(daemon, lives).await?,
    };
    let carriers = devices::carriers(daemon, bump, lives).await?;
    let stuck: HashMap<FlowKey, String> = match goal {
        Goal {
            bump: None,
            force: false,
        } => { knocking::refusals(daemon, lives).await?.into_iter() }
            .map(|(pair, why)| (pair, format!("{why} (--force moves it all the same)")))
            .collect(),
        _ => HashMap::new(),
    };
    let mut refused = match bump {
        None => Refused::new(),
        Some(_) => subflows::out_of_reach(daemon, lives).await?,
    };
    for live in lives {
        let why: &str = if let Some(why) = translated.get(&live.pair).or(stuck.get(&live.pair)) {
            why
        } else if carriers.iter().any(|carrier| carrier.pair == live.pair) {
            "what goes by this bump's device goes by this connection"
        } else if live.bound {
            "its socket is bound to a device and cannot be steered"
        } else if is_moving(daemon, live) {
            "it is being moved already"
        } else {
            continue;
        };
        refused.insert(live.pair, why.to_owned());
    }
    subflows::spread(lives, &mut refused);
    Ok(refused)
}

fn is_moving(daemon: &Daemon, live: &Live) -> bool {
    let state = daemon.state.borrow();
    let choice = state.conns.get(&live.pair).choice.of(live.socket);
    choice.is_some_and(|choice| choice.pending)
}

fn propose(daemon: &Daemon, live: &Live, bump: Option<BumpId>) -> Option<Negotiation> {
    let origin = connections::stands_on(daemon, live);
    let conns = &mut daemon.state.borrow_mut().conns;
    Negotiation::choose(conns, live.into(), bump, origin, daemon.host_id)
}

/// Moves a peer's connections, a [`ROUND`] at a time: each is decided here as soon as the peer has done
/// its part. Once the peer does not answer, it is not asked for the others.
async fn move_all(
    daemon: &Daemon,
    peer: usize,
    moves: &mut [Move],
    bump: Option<BumpId>,
    progress: &Progress,
) -> Vec<(FlowKey, Result<(), String>)> {
    let mut outcomes = Vec::with_capacity(moves.len());
    let mut answers_none = false;
    for moves in moves.chunks_mut(ROUND) {
        if answers_none {
            moves
                .iter_mut()
                .for_each(|(_, asked)| asked.handle_unasked());
        }
        let failed = asking::carry_out(daemon, peer, moves).await;
        let is_silent = |(_, asked): &Move| matches!(asked.answer(), Err(Unanswered::Silent));
        answers_none |= moves.iter().all(is_silent);
        outcomes.extend(moves.iter().map(|(live, asked)| {
            let fault = failed.get(&live.pair).map(ToString::to_string);
            (live.pair, outcome(daemon, &live.pair, bump, asked, fault))
        }));
        progress.done.update(|done| done + moves.len());
    }
    outcomes
}

/// What came of a choice, for the user. `fault`: what the kernel did not take of what stands.
fn outcome(
    daemon: &Daemon,
    pair: &FlowKey,
    bump: Option<BumpId>,
    asked: &Negotiation,
    fault: Option<String>,
) -> Result<(), String> {
    let conclusion = asked.conclusion();
    if conclusion == Some(Conclusion::InForce) {
        return fault.map_or(Ok(()), Err);
    }
    if let Some(why) = fault {
        tracing::warn!("{why}");
    }
    Err(match conclusion {
        Some(Conclusion::Superseded) => "another choice was made for it meanwhile".to_owned(),
        _ => refusal(daemon, pair, bump, asked.answer()),
    })
}

/// Why a choice is not in force, for the user.
fn refusal(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>, answer: Answer) -> String {
    let outcome = match answer {
        Ok((outcome, _)) => outcome,
        Err(error) => return error.to_string(),
    };
    let why = match outcome {
        Outcome::NoBump => return not_carried_by(daemon, pair, bump),
        Outcome::Done | Outcome::Older => "the other end chose otherwise at the same time",
        Outcome::NoConnection | Outcome::OtherSocket => {
            "the peer has no such connection, or knows it by other addresses"
        }
        Outcome::OwnRule => "a rule of the peer wants it on its bump",
        Outcome::NoDevice => {
            "the device of this bump at the peer is not there or not ready; see its log"
        }
        Outcome::Bound => "its socket at the peer is bound to a device and cannot be steered",
        Outcome::Failed | Outcome::NotHeard => "the peer's daemon could not; see its log",
    };
    why.to_owned()
}

fn not_carried_by(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>) -> String {
    let peer = daemon.peer_of(pair.dst);
    let peer = peer.map_or("", |peer| daemon.peer_name(peer));
    let bump = daemon.bumps.name_of(bump);
    format!("peer {peer} does not carry the bump \"{bump}\"")
}

/// How many of these connections, which have just come to a bump, have had nothing acknowledged of what
/// they sent since, and nothing at all for a while. That is what a firewall looks like that drops what
/// comes out of a TUN, here or at the peer: neither daemon sees more than that the kernels do not answer.
pub(crate) async fn unacknowledged(
    daemon: &Daemon,
    lives: &HashSet<FlowKey>,
) -> anyhow::Result<usize> {
    struct Unanswered {
        /// Bytes that it had sent by then.
        before: u64,
        acked: u64,
        since: Instant,
    }
    let start = Instant::now();
    let sending = async || {
        let sent = |live: Live| {
            let meant = live.counts.outstanding > 0 && lives.contains(&live.pair);
            meant.then_some((live.pair, live.counts))
        };
        anyhow::Ok(connections::sockets_as(daemon, sent).await?.into_iter())
    };
    let unanswered = |(pair, counts): (FlowKey, TcpCounts)| {
        let before = counts.bytes_acked + u64::from(counts.outstanding);
        let (acked, since) = (counts.bytes_acked, start);
        let unanswered = Unanswered {
            before,
            acked,
            since,
        };
        (pair, unanswered)
    };
    let mut waiting: HashMap<FlowKey, Unanswered> = sending().await?.map(unanswered).collect();
    while !waiting.is_empty() && start.elapsed() < ACKNOWLEDGED_WITHIN {
        tokio::time::sleep(IDLE_AFTER).await;
        let now: HashMap<FlowKey, TcpCounts> = sending().await?.collect();
        waiting.retain(|pair, known| {
            let Some(counts) = now.get(pair) else {
                return false;
            };
            if counts.bytes_acked != known.acked {
                known.acked = counts.bytes_acked;
                known.since = Instant::now();
            }
            known.acked <= known.before
        });
    }
    let silent = |known: &&Unanswered| known.since.elapsed() >= ACKNOWLEDGED_WITHIN / 2;
    Ok(waiting.values().filter(silent).count())
}

/// Waits until those connections that have something to send are seen on the bump, both ways.
async fn wait_seen(daemon: &Daemon, lives: &[&Live], bump: BumpId) -> anyhow::Result<()> {
    let start = tokio::time::Instant::now();
    let mut waiting: HashMap<FlowKey, (u64, u64)> =
        lives.iter().map(|live| (live.pair, moved(live))).collect();
    while !waiting.is_empty() && start.elapsed() < SEEN_WITHIN {
        tokio::time::sleep(LOOK_EVERY).await;
        let tuples = waiting.keys().copied().collect();
        for tuple in daemon.driver.opened(bump, tuples).await? {
            waiting.remove(&tuple);
        }
        if start.elapsed() >= IDLE_AFTER && !waiting.is_empty() {
            let pairs: Vec<FlowKey> = waiting.keys().copied().collect();
            let now = connections::sockets_of(daemon, &pairs).await?;
            // What moved nothing so far is idle, or ended.
            waiting.retain(|pair, before| now.get(pair).is_some_and(|live| moved(live) != *before));
        }
    }
    Ok(())
}

/// Bytes that a connection moved, either way.
fn moved(live: &Live) -> (u64, u64) {
    (live.counts.bytes_acked, live.counts.bytes_received)
}
