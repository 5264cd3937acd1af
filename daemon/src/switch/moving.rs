//! `enable` and `disable`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use anyhow::bail;
use dibs_control::{Changed, ConnInfo, ErrorKind, Failure, RuleOrigin, Selector, Skipped};
use dibs_settings::BumpId;
use dibs_switch::engine::{Goal, stands_on};
use dibs_wire::FlowKey;

use crate::control::{Caller, Progress, refused};
use crate::host::live::{Heard, Live};
use crate::kernel::connections::Refused;
use crate::kernel::{connections, devices};
use crate::rulebook::rules::Rule;
use crate::switch::listing::{check_peer, no_session, visible};
use crate::switch::switching::Moved;
use crate::switch::{Daemon, listing, marking, sessions, switching};

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
    let matching = selected(daemon, caller, selector).await?;
    let peers = daemon.driver.snapshot().await?.peers;
    let (held, matching): (Vec<_>, Vec<_>) = {
        let state = daemon.state.borrow();
        let tell = |live: &Live| match state.ruling(live).requirement() {
            Some(rule) if Some(rule.bump_id()) != bump => Some(required_by(rule)),
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
    let mut moved = switching::choose(daemon, &able, goal, progress).await?;
    put_torn_back(daemon, &mut moved, &origins, progress).await?;
    let unasked = match bump.filter(|bump| daemon.bumps.device_of(*bump).is_some()) {
        Some(bump) => hear_or_undo(daemon, bump, &moved, &origins, progress).await?,
        None => false,
    };
    let no_session = |live: &Live| {
        let peer = daemon.peer_name(live.peer);
        (*live, Err(format!("there is no session with peer {peer}")))
    };
    let outcomes: Vec<(Live, Result<(), String>)> = moved
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
            switching::unacknowledged(daemon, &moved).await?
        }
    };
    let lives: Vec<Live> = outcomes.iter().map(|(live, _)| *live).collect();
    let infos = listing::describe(daemon, &lives).await?;
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

/// The connections that a selector matches, of those that a caller may see.
async fn selected(
    daemon: &Daemon,
    caller: Caller,
    selector: &Selector,
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
        bail!(Failure::new(
            ErrorKind::NoMatch,
            format!("no live connection to a peer matches {selector}"),
        ));
    }
    Ok(matching)
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
        let back = Goal { bump, force: true };
        let put_back = switching::choose(daemon, &[live], back, progress).await?;
        let stuck = put_back.into_iter().find_map(|(_, outcome)| outcome.err());
        let outcome = match stuck {
            None => why,
            Some(stuck) => format!("{why}; and it could not go back: {stuck}"),
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
        let put_back = switching::choose(daemon, &lives, origin.into(), progress).await;
        let put_back = put_back?.into_iter();
        stuck += put_back.filter(|(_, outcome)| outcome.is_err()).count();
    }
    let why = devices::nothing_back_by(&daemon.bumps, bump);
    let where_now = match stuck + stayed {
        0 => "the connections are back where they were".to_owned(),
        count => {
            format!("{count} connection(s) are still on it, and \"disable\" takes them off")
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
            "none of these connections has sent anything by {name} so far, so nobody knows whether anything \
             comes back by its device: \"bump list\" will say"
        ));
    }
    if let Some(id) = bump.filter(|_| stuck > 0) {
        warnings.push(format!(
            "nothing of what {stuck} connection(s) sent by {} has been acknowledged so far: if that \
             stays so, see whether a firewall, here or at the peer, drops what comes in by the bump's \
             device ({})",
            name,
            id.tun_name()
        ));
    }
    let without = without.into_iter().map(|peer| daemon.peer_name(peer));
    warnings.extend(
        without.map(|peer| {
            format!("there is no session with peer {peer}: it follows when there is one")
        }),
    );
    warnings
}
