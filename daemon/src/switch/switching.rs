//! `enable` and `disable`: choices of users here, in their words. How connections move is decided by
//! [`dibs_switch::engine`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::bail;
use dibs_control::{Changed, ConnInfo, ErrorKind, Failure, RuleOrigin, Selector, Skipped};
use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::engine::choices::{self, Outcome};
use dibs_switch::engine::{Goal, Machine as _, knocks, matches, renumbered, stands_on};
use dibs_switch::messages::{Answer, Ground, Outcome as Said};
use dibs_wire::FlowKey;

use crate::control::{Caller, Progress, refused};
use crate::host::live::{Heard, Live};
use crate::kernel::connections::Refused;
use crate::kernel::{connections, devices};
use crate::rulebook::rules::Rule;
use crate::switch::listing::{check_peer, no_session, visible};
use crate::switch::marking::MarkError;
use crate::switch::{Daemon, entries, listing, marking, sessions};

/// How long `enable` waits for a connection that has something to send to be seen on the bump.
const SEEN_WITHIN: Duration = Duration::from_secs(1);
/// What is sent by a bump is acknowledged sooner, as a rule: a retransmission may lie between.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(1200);
/// Time after which the kernel is asked again where a connection stands. As a rule it answers at once. Strange numbers it answers
/// twice a second at most (`net.ipv4.tcp_invalid_ratelimit`).
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(600);
/// A connection that moves no byte for as long is taken to be idle: what the kernel answers then is compared.
const IDLE_AFTER: Duration = Duration::from_millis(900);
/// Time between two looks at what is acknowledged.
const LOOK_AGAIN: Duration = Duration::from_millis(150);
/// Words for a connection that the peer moved on before this host saw anything of it.
const TAKEN_BACK: &str = "the peer moved it elsewhere at the same time; if it does so again, something between the two hosts changes \
     TCP's sequence numbers, as dibsctl events says there";
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
    let lives = entries::unbind(daemon, lives, goal.bump).await?;
    let outcomes = choices::choose(daemon, &lives, goal, note).await?;
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
            ground: Ground::Proved,
        } => { knocks::refusals(daemon, lives).await?.into_iter() }
            .map(|(pair, why)| (pair, format!("{why} (--force moves it, and it may break)")))
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
            "the device of this bump sends its own packets over this connection"
        } else if live.bound {
            "its socket is bound to a device, so it cannot move: start its program without that option"
        } else if marking::is_moving(daemon, live) {
            "it is moving already: repeat the command when that is done"
        } else {
            continue;
        };
        refused.insert(live.pair, why.to_owned());
    }
    connections::spread(lives, &mut refused);
    Ok(refused)
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
        Outcome::Answered(Ok((Said::NoConnection, _)))
            if bump.is_none() && daemon.bump_of(live).is_none() =>
        {
            let why = "it is on plain, and stays there: the peer does not know it by these addresses, as a router translates them";
            Err(why.to_owned())
        }
        Outcome::Answered(answer) => Err(refusal(daemon, &live.pair, bump, answer)),
        other => Err(other.fault().unwrap_or_default()),
    }
}

/// Reason why a connection does not move to a bump, or to plain, for the user.
fn refusal(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>, answer: Answer) -> String {
    let outcome = match answer {
        Ok((outcome, _)) => outcome,
        Err(error) => return error.to_string(),
    };
    let why = match outcome {
        Said::NoBump => return not_carried_by(daemon, pair, bump),
        Said::Done | Said::Older => "the peer moved it at the same time: repeat the command",
        Said::NoConnection | Said::OtherSocket => {
            "the peer does not know this connection: it has just ended there, or a nat rule of the peer leads its port to \
             another one of its own (REDIRECT)"
        }
        Said::NotHeard if bump.is_none() => {
            "a router or firewall on the way has not followed all of what went by the bump yet, and could end it: repeat the \
             command (--force moves it, and it may break)"
        }
        Said::NotHeard | Said::Renumbered | Said::Ambiguous => not_found(outcome),
        Said::OwnRule if bump.is_none() => {
            "a rule of the peer wants it on a bump, or the peer has not seen that plain carries it: delete the rule, or repeat \
             the command"
        }
        Said::OwnRule => "a rule of the peer wants it on another bump: delete that rule first",
        Said::NoDevice => {
            "the peer's device of this bump does not exist, or is not ready: see the log of dibsd there"
        }
        Said::Bound => "its socket at the peer is bound to a device, so it cannot move",
        Said::Failed => "the peer failed to move it: see the log of dibsd there",
    };
    why.to_owned()
}

/// Reason why a peer does not find a connection in plain.
fn not_found(why: Said) -> &'static str {
    match why {
        Said::NotHeard => {
            "the peer knows it by other addresses, and its packets do not arrive there as they were sent: a proxy or filter \
             on the way changes them"
        }
        Said::Ambiguous => {
            "several connections at the peer look like it, so dibs cannot find out which it is"
        }
        _ => {
            "a firewall, a proxy or SYNPROXY on the way changes its sequence numbers, or answers in place of the other end"
        }
    }
}

/// Sentence about a connection that a rule is for, and that the peer does not find.
pub(crate) fn unfound(pair: &FlowKey, why: Said) -> String {
    let why = not_found(why);
    format!("{pair} stays in plain, though a rule is for it: {why}")
}

fn not_carried_by(daemon: &Daemon, pair: &FlowKey, bump: Option<BumpId>) -> String {
    let peer = daemon.host.peer_of(pair);
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
        tokio::time::sleep(LOOK_AGAIN).await;
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

/// Waits until connections are seen on the bump, both ways, and their numbers were compared. Idle ones are not waited for longer than
/// [`IDLE_AFTER`].
async fn wait_seen(daemon: &Daemon, lives: &[&Live], bump: BumpId) -> anyhow::Result<()> {
    let start = tokio::time::Instant::now();
    let mut is_asked = false;
    let mut waiting: HashMap<FlowKey, (u64, u64)> =
        lives.iter().map(|live| (live.pair, moved(live))).collect();
    while !waiting.is_empty() && start.elapsed() < SEEN_WITHIN {
        tokio::time::sleep(LOOK_EVERY).await;
        let tuples = waiting.keys().copied().collect();
        for tuple in daemon.driver.seen(bump, tuples).await? {
            waiting.remove(&tuple);
        }
        if start.elapsed() >= ASK_AGAIN_AFTER && !is_asked {
            is_asked = true;
            let mut silent = waiting.keys();
            silent.try_for_each(|tuple| daemon.driver.solicit(bump, *tuple))?;
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

/// Why a connection cannot leave the bump of a rule.
fn required_by(rule: &Rule) -> String {
    let (id, bump) = (rule.id, &rule.bump);
    match rule.origin {
        RuleOrigin::User => format!("rule {id} requires {bump}: delete the rule first"),
        RuleOrigin::Config => {
            format!("rule {id} requires {bump}: change it in the configuration file")
        }
    }
}

/// `enable` and `disable` (no bump).
pub(crate) async fn change(
    daemon: &Daemon,
    caller: Caller,
    selector: &Selector,
    goal: Goal,
    progress: &Progress,
) -> anyhow::Result<Changed> {
    let bump = goal.bump;
    let strange = match bump {
        Some(_) => seek(daemon, caller, selector).await?,
        None => 0,
    };
    let matching = selected(daemon, caller, selector, strange).await?;
    let peers = daemon.driver.snapshot().await?.peers;
    let (held, matching): (Vec<_>, Vec<_>) = {
        let state = daemon.state.borrow();
        let tell = |live: &Live| match state.ruling(live).requirement() {
            Some(rule) if rule.bump_id() != bump => Some(required_by(rule)),
            _ => sessions::lacks(daemon, &peers[live.peer], live.peer, bump),
        };
        let told = { matching.iter() }.filter_map(|live| Some((live.pair, tell(live)?)));
        let mut refused: Refused = told.collect();
        connections::spread(&matching, &mut refused);
        let told = matching.into_iter();
        let told = told.map(|live| (live, refused.get(&live.pair).cloned()));
        told.partition(|(_, why)| why.is_some())
    };
    let up = sessions::sessions(daemon).await?;
    let (able, unable): (Vec<Live>, Vec<Live>) = matching
        .into_iter()
        .map(|(live, _)| live)
        .partition(|live| up[live.peer] || bump.is_none());
    if able.is_empty() && !unable.is_empty() {
        bail!(no_session(daemon, &unable));
    }
    let addresses = able.iter().map(|live| live.pair.src);
    if let Some(why) = devices::device_fault(&daemon.host, &daemon.bumps, bump, addresses).await? {
        bail!(refused(format!("{why}: nothing was changed")));
    }
    marking::overrule(daemon, &able).await?;
    let origins: HashMap<FlowKey, Option<BumpId>> = able
        .iter()
        .map(|live| (live.pair, stands_on(daemon, live)))
        .collect();
    let mut moved = choose(daemon, &able, goal, progress).await?;
    take_back_renumbered(daemon, &mut moved, bump).await?;
    put_torn_back(daemon, &mut moved, &origins, progress).await?;
    let unasked = match bump.filter(|bump| daemon.bumps.device_of(*bump).is_some()) {
        Some(bump) => hear_or_undo(daemon, bump, &moved, &origins, progress).await?,
        None => false,
    };
    let no_session = |live: &Live| {
        let peer = daemon.peer_name(live.peer);
        (*live, Err(format!("there is no session with peer {peer}")))
    };
    let mut outcomes: Vec<Moved> = moved
        .into_iter()
        .chain(unable.iter().map(no_session))
        .chain(
            held.into_iter()
                .filter_map(|(live, why)| Some((live, Err(why?)))),
        )
        .collect();
    let stuck = match daemon.bumps.is_outside(bump) {
        true => 0,
        false => {
            let moved = outcomes.iter().filter(|(_, outcome)| outcome.is_ok());
            let moved: HashSet<FlowKey> = moved.map(|(live, _)| live.pair).collect();
            unacknowledged(daemon, &moved).await?
        }
    };
    let lives: Vec<Live> = outcomes.iter().map(|(live, _)| *live).collect();
    let infos = listing::describe(daemon, &lives).await?;
    // The data path here, or the peer, may have taken some of them back meanwhile.
    if let Some(bump) = daemon.bumps.inside(bump) {
        note_taken_back(daemon, &mut outcomes, bump);
    }
    let mut changed = changed(daemon, bump, infos.into_iter().zip(outcomes));
    let without = lives.iter().map(|live| live.peer);
    let without = without.filter(|peer| bump.is_none() && !up[*peer]);
    let warnings = warnings(daemon, bump, unasked, stuck, without.collect());
    changed.warnings.extend(warnings);
    let uids = changed.connections.iter().map(|info| info.uid);
    daemon.events.tell_of_conns(
        uids,
        if bump.is_none() {
            "disabled"
        } else {
            "enabled"
        },
        |count| format!("{count} connection(s) moved to {}", changed.bump),
        &[("bump", changed.bump.clone())],
    );
    Ok(changed)
}

/// Has peers show connections that a selector matches and that this host knows by addresses of routers. Returns the number of those
/// that are no peer's.
async fn seek(daemon: &Daemon, caller: Caller, selector: &Selector) -> anyhow::Result<usize> {
    let mut all: BTreeMap<usize, Vec<Live>> = BTreeMap::new();
    for live in daemon.strangers().await? {
        if caller.sees(&live) {
            all.entry(live.peer).or_default().push(live);
        }
    }
    let mut strange = BTreeSet::new();
    for (peer, mut lives) in all {
        // Others of them were another peer's behind the same router.
        lives.retain(|live| !daemon.is_matched(&live.pair));
        if lives.is_empty() {
            continue;
        }
        let infos = listing::describe(daemon, &lives).await?;
        let meant = lives.iter().zip(&infos);
        let meant = meant.filter(|(_, info)| selector.matches(info));
        let meant: Vec<FlowKey> = meant.map(|(live, _)| live.pair).collect();
        let ports = meant.iter().map(|pair| pair.sport).collect();
        matches::seek(daemon, peer, &ports).await;
        strange.extend(meant);
    }
    strange.retain(|pair| !daemon.is_matched(pair));
    Ok(strange.len())
}

/// The connections that a selector matches, of those that a caller may see. `strange`: the number of those that come from a peer's
/// router, and are no peer's.
async fn selected(
    daemon: &Daemon,
    caller: Caller,
    selector: &Selector,
    strange: usize,
) -> anyhow::Result<Vec<Live>> {
    if let Selector::Match(wanted) = selector {
        check_peer(daemon, wanted.peer.as_deref())?;
    }
    let (lives, infos): (Vec<Live>, Vec<ConnInfo>) =
        visible(daemon, caller).await?.into_iter().unzip();
    let found = lives.iter().zip(&infos);
    let found: HashSet<FlowKey> = { found.filter(|(_, info)| selector.matches(info)) }
        .map(|(live, _)| live.pair)
        .collect();
    let matching = connections::united(&lives, |live| found.contains(&live.pair));
    let matching: Vec<Live> = matching.into_iter().copied().collect();
    if matching.is_empty() {
        let why = match strange {
            0 => why_none(daemon, caller, selector).await?,
            _ => format!(
                "{strange} connection(s) come from the address of a peer's router, and the peer does not know them: they are \
                 others' behind it, or something on the way changes them"
            ),
        };
        let text = format!("no live connection to a peer matches {selector}: {why}");
        bail!(Failure::new(ErrorKind::NoMatch, text));
    }
    Ok(matching)
}

/// Reason why no connection matches a selector.
async fn why_none(daemon: &Daemon, caller: Caller, selector: &Selector) -> anyhow::Result<String> {
    let mut lives = connections::through_nat64(&daemon.kernel).await?;
    lives.retain(|live| caller.sees(live));
    let infos = listing::describe(daemon, &lives).await?;
    let why = match infos.iter().filter(|info| selector.matches(info)).count() {
        0 => "see dibsctl conn list; dport is the far end's port, sport this host's".to_owned(),
        count => format!(
            "{count} connection(s) reach a peer through NAT64 (64:ff9b::/96), and dibs cannot move these: use the peer's own address"
        ),
    };
    Ok(why)
}

/// Takes connections that just came to a bump back to plain if no bump can carry them. Those at rest whose kernels were asked, and still
/// stand apart, are taken to be such.
async fn take_back_renumbered(
    daemon: &Daemon,
    moved: &mut [Moved],
    bump: Option<BumpId>,
) -> anyhow::Result<()> {
    let Some(bump) = daemon.bumps.inside(bump) else {
        return Ok(());
    };
    let (_, conns) = daemon.driver.conns().await?;
    let renumbered = conns
        .iter()
        .filter(|conn| (conn.renumbered || conn.apart) && conn.bump == bump);
    let renumbered: HashSet<FlowKey> = renumbered.map(|conn| conn.tuple).collect();
    let found = moved
        .iter()
        .filter(|(live, _)| renumbered.contains(&live.pair));
    for (live, _) in found.filter(|(_, outcome)| outcome.is_ok()) {
        renumbered::take_back(daemon, bump, live).await?;
    }
    note_taken_back(daemon, moved, bump);
    Ok(())
}

/// Notes the reason for each connection that came to a bump which does not carry it, or is there no more.
fn note_taken_back(daemon: &Daemon, moved: &mut [Moved], bump: BumpId) {
    let conns = &daemon.state.borrow().conns;
    for (live, outcome) in moved.iter_mut().filter(|(_, outcome)| outcome.is_ok()) {
        let conn = conns.get(&live.pair);
        if conn.is_renumbered(live.socket) {
            *outcome = Err(marking::RENUMBERED.to_owned());
        } else if conn.place.marked() != Some(bump) {
            *outcome = Err(TAKEN_BACK.to_owned());
        }
    }
}

/// Puts subflows of MPTCP connections back to where they were of which others could not move.
async fn put_torn_back(
    daemon: &Daemon,
    moved: &mut [Moved],
    origins: &HashMap<FlowKey, Option<BumpId>>,
    progress: &Progress,
) -> anyhow::Result<()> {
    for (live, why) in connections::torn(moved) {
        let bump = origins.get(&live.pair).copied().flatten();
        // It was in plain a moment ago.
        let back = Goal {
            bump,
            ground: Ground::Forced,
        };
        let put_back = choose(daemon, &[live], back, progress).await?;
        let stuck = put_back.into_iter().find_map(|(_, outcome)| outcome.err());
        let outcome = match stuck {
            None => why,
            Some(stuck) => format!("{why}; it could not go back either: {stuck}"),
        };
        let known = moved.iter_mut().find(|(known, _)| known.pair == live.pair);
        known.expect("it was just found there").1 = Err(outcome);
    }
    Ok(())
}

/// What became of connections that were to move to a bump.
fn changed(
    daemon: &Daemon,
    bump: Option<BumpId>,
    outcomes: impl Iterator<Item = (ConnInfo, Moved)>,
) -> Changed {
    let mut changed = Changed {
        bump: daemon.bumps.name_of(bump).to_owned(),
        connections: Vec::new(),
        skipped: Vec::new(),
        warnings: { daemon.bumps.get(bump).and_then(|bump| bump.warning) }
            .map(str::to_owned)
            .into_iter()
            .collect(),
    };
    for (info, (_, outcome)) in outcomes {
        match outcome {
            Ok(()) => changed.connections.push(info),
            Err(reason) => changed.skipped.push(Skipped {
                id: info.id,
                local: info.local,
                remote: info.remote,
                reason,
            }),
        }
    }
    changed
}

/// Waits until something came back by the device of `bump` of what moved there; if nothing does, puts that back to
/// where it was, and says so. Whether nobody knows.
async fn hear_or_undo(
    daemon: &Daemon,
    bump: BumpId,
    moved: &[Moved],
    origins: &HashMap<FlowKey, Option<BumpId>>,
    progress: &Progress,
) -> anyhow::Result<bool> {
    let moved = moved.iter().filter(|(_, outcome)| outcome.is_ok());
    let moved: Vec<Live> = moved.map(|(live, _)| *live).collect();
    if moved.is_empty() {
        return Ok(false);
    }
    match devices::hear(&daemon.kernel, &daemon.answers, bump, &moved).await? {
        Heard::Something => return Ok(false),
        Heard::Unasked => return Ok(true),
        Heard::Nothing => {}
    }
    let mut stuck = 0;
    let mut back: BTreeMap<Option<BumpId>, Vec<Live>> = BTreeMap::new();
    for live in &moved {
        let origin = origins.get(&live.pair).copied().flatten();
        back.entry(origin).or_default().push(*live);
    }
    // Those that were there before stay.
    let stayed = back.remove(&Some(bump)).unwrap_or_default().len();
    for (origin, lives) in back {
        let put_back = choose(daemon, &lives, origin.into(), progress).await;
        let put_back = put_back?.into_iter();
        stuck += put_back.filter(|(_, outcome)| outcome.is_err()).count();
    }
    let why = devices::nothing_back_by(&daemon.bumps, bump);
    let where_now = match stuck + stayed {
        0 => "the connections are back where they were".to_owned(),
        count => {
            format!("{count} connection(s) are still on it: dibsctl disable takes them off")
        }
    };
    Err(Failure::new(ErrorKind::Failed, format!("{why}; {where_now}")).into())
}

/// What the user should hear of connections that moved to a bump: whether nobody knows that anything comes back
/// (`unasked`), how many had nothing acknowledged, and the peers that are to follow later.
fn warnings(
    daemon: &Daemon,
    bump: Option<BumpId>,
    unasked: bool,
    stuck: usize,
    without: BTreeSet<usize>,
) -> Vec<String> {
    let name = daemon.bumps.name_of(bump);
    let mut warnings = Vec::new();
    if unasked {
        warnings.push(format!(
            "none of these connections has sent anything on {name} yet: dibsctl bump list shows whether answers \
             come back"
        ));
    }
    if let Some(id) = bump.filter(|_| stuck > 0) {
        warnings.push(format!(
            "{stuck} connection(s) got no acknowledgement on {} so far: if that does not change, check whether a \
             firewall, here or at the peer, drops what arrives on {}",
            name,
            id.tun_name()
        ));
    }
    let without = without.into_iter().map(|peer| daemon.peer_name(peer));
    warnings.extend(without.map(|peer| {
        format!("there is no session with peer {peer}: the peer is told when there is one")
    }));
    warnings
}
