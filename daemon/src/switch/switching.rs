//! `enable` and `disable`: choices of users here, in their words. How connections move is decided by
//! [`dibs_switch::engine`].

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::engine::Goal;
use dibs_switch::engine::choices::{self, Outcome};
use dibs_switch::messages::{Answer, Outcome as Said};
use dibs_wire::FlowKey;

use crate::control::Progress;
use crate::host::live::Live;
use crate::kernel::connections::Refused;
use crate::kernel::{connections, devices};
use crate::switch::marking::MarkError;
use crate::switch::{Daemon, knocking};

/// How long `enable` waits for a connection that has something to send to be seen on the bump.
const SEEN_WITHIN: Duration = Duration::from_secs(1);
/// What is sent by a bump is acknowledged sooner, as a rule: a retransmission may lie between.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(1200);
/// A connection that moves no byte for as long is taken to be idle.
const IDLE_AFTER: Duration = Duration::from_millis(150);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Outcome of a choice for one connection: moved, or why not.
pub(crate) type Moved = (Live, Result<(), String>);

/// The same, before it is said in words.
type Chosen = Outcome<String, MarkError>;

/// Moves connections, as a user here chose. What comes of it for each, in the same order.
pub(crate) async fn choose(
    daemon: &Daemon,
    lives: &[Live],
    goal: Goal,
    progress: &Progress,
) -> anyhow::Result<Vec<Moved>> {
    let note = |more, of| progress.note(more, of);
    let outcomes = choices::choose(daemon, lives, goal, note).await?;
    if let Some(bump) = daemon.bumps.inside(goal.bump) {
        let is_moved = |(_, outcome): &&(Live, Chosen)| matches!(outcome, Outcome::Moved);
        let moved: Vec<&Live> = { outcomes.iter().filter(is_moved) }
            .map(|(live, _)| live)
            .collect();
        wait_seen(daemon, &moved, bump).await?;
    }
    let said = |(live, outcome): (Live, Chosen)| {
        let said = in_words(daemon, &live, goal.bump, outcome);
        (live, said)
    };
    Ok(outcomes.into_iter().map(said).collect())
}

/// Why connections cannot move, as far as this host knows, or finds out before it asks the peer to follow.
pub(crate) async fn refused_here(
    daemon: &Daemon,
    lives: &[Live],
    goal: Goal,
) -> anyhow::Result<Refused> {
    let bump = goal.bump;
    let translated = match bump {
        None => HashMap::new(),
        Some(_) => connections::translated(&daemon.kernel, lives).await?,
    };
    let carriers = devices::carriers(&daemon.host, &daemon.bumps, bump, lives).await?;
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
        Some(_) => connections::out_of_reach(&daemon.host, lives).await?,
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
    connections::spread(lives, &mut refused);
    Ok(refused)
}

fn is_moving(daemon: &Daemon, live: &Live) -> bool {
    let state = daemon.state.borrow();
    let choice = state.conns.get(&live.pair).choice.of(live.socket);
    choice.is_some_and(|choice| choice.pending)
}

/// Outcome of a choice, for the user.
fn in_words(
    daemon: &Daemon,
    live: &Live,
    bump: Option<BumpId>,
    outcome: Chosen,
) -> Result<(), String> {
    match outcome {
        Outcome::Moved => Ok(()),
        Outcome::Answered(answer) => Err(refusal(daemon, &live.pair, bump, answer)),
        other => Err(other.fault().unwrap_or_default()),
    }
}

/// Why a choice is not in force, for the user.
fn refusal(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>, answer: Answer) -> String {
    let outcome = match answer {
        Ok((outcome, _)) => outcome,
        Err(error) => return error.to_string(),
    };
    let why = match outcome {
        Said::NoBump => return not_carried_by(daemon, pair, bump),
        Said::Done | Said::Older => "the other end chose otherwise at the same time",
        Said::NoConnection | Said::OtherSocket => {
            "the peer has no such connection, or knows it by other addresses"
        }
        Said::OwnRule => "a rule of the peer wants it on its bump",
        Said::NoDevice => {
            "the device of this bump at the peer is not there or not ready; see its log"
        }
        Said::Bound => "its socket at the peer is bound to a device and cannot be steered",
        Said::Failed | Said::NotHeard => "the peer's daemon could not; see its log",
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
        anyhow::Ok(
            connections::sockets_as(&daemon.kernel, sent)
                .await?
                .into_iter(),
        )
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
            let now = connections::sockets_of(&daemon.kernel, &pairs).await?;
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
