//! Paths as they change while the daemon runs: names of endpoints are looked up, by the system's resolver and away from this
//! thread; what paths carry whose volume is limited is followed; users have paths used otherwise, and measured. And what they are
//! told of paths.

use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::bail;
use dibs_config::{PathConfig, Rate, Volume};
use dibs_control::{
    EndpointInfo, ErrorKind, Failure, Measure, Measured, PathChange, PathCount, PathInfo,
    PathState, Preferences,
};
use dibs_core::node::PathSnapshot;
use dibs_core::preference::Unused;
use dibs_settings::Role;
use dibs_switch::messages::{Body, Outcome, Unanswered};
use tokio::net::lookup_host;
use tokio::time::{sleep_until, timeout};

use crate::control::refused;
use crate::data::{Gone, Outcomes, Snapshot};
use crate::host::endpoints::Lookup;
use crate::host::volumes::{Stage, Turn, write};
use crate::switch::{Daemon, Task};

/// Begins each error of the standard library's.
const PREFIX: &str = "failed to lookup address information: ";

/// Looks names up when that is due, until the data path ends.
pub(crate) async fn follow_names(daemon: Rc<Daemon>) {
    if daemon.endpoints.are_addresses() {
        return;
    }
    while look_up(&daemon).await.is_ok() {
        let now = Instant::now();
        match daemon.endpoints.due(now) {
            Some(due) => tokio::select! {
                () = daemon.wakers.woken(Task::Names) => {}
                () = sleep_until(due.into()) => {}
            },
            None => daemon.wakers.woken(Task::Names).await,
        }
    }
}

/// Sees which peers are silent, and begins the lookups that are due.
async fn look_up(daemon: &Rc<Daemon>) -> Result<(), Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let now = Instant::now();
    daemon.endpoints.note_silence(now, |peer, path| {
        let is_usable = daemon.host.lack_of_path(path).is_none()
            && daemon.preferences.borrow().forbids(path).is_none();
        let mut there = { snapshot.paths.iter() }.filter(|of| (of.peer, of.local) == (peer, path));
        is_usable && !there.any(|path| path.state == "active")
    });
    while let Some(lookup) = daemon.endpoints.poll_lookup(now) {
        let daemon = Rc::clone(daemon);
        tokio::task::spawn_local(async move {
            let answer = resolved(&lookup).await;
            let now = Instant::now();
            daemon.endpoints.note_answer(now, lookup.number, answer);
            // Without the data path there is nobody to be told.
            let _ = tell_endpoints(&daemon);
            daemon.wakers.wake(Task::Names);
        });
    }
    tell_endpoints(daemon)
}

/// Tells the data path where peers listen, and the user what is wrong with names.
fn tell_endpoints(daemon: &Daemon) -> Result<(), Gone> {
    let (config, inventory) = (&daemon.config, daemon.host.inventory());
    for news in daemon.endpoints.tell(config, &inventory, &daemon.driver)? {
        tracing::info!("{news}");
    }
    let faults = daemon.endpoints.faults(config, &inventory);
    daemon.events.warn_while("names of endpoints", faults);
    Ok(())
}

/// The resolver's answer.
async fn resolved(lookup: &Lookup) -> Result<Vec<IpAddr>, String> {
    let Lookup { host, port, .. } = lookup;
    match lookup_host((host.as_str(), *port)).await {
        Ok(found) => Ok(found.map(|address| address.ip()).collect()),
        Err(error) => {
            let why = error.to_string();
            Err(why.strip_prefix(PREFIX).unwrap_or(&why).to_owned())
        }
    }
}

/// Between two looks at what was carried.
const VOLUMES_EVERY: Duration = Duration::from_secs(1);

/// Follows what is carried, for good.
pub(crate) async fn follow_volumes(daemon: Rc<Daemon>) {
    loop {
        let due = daemon.wakers.woken(Task::Volumes);
        if daemon.preferences.borrow().limits_volumes() {
            let _ = timeout(VOLUMES_EVERY, due).await;
        } else {
            due.await;
        }
        if look_at_volumes(&daemon, false).await.is_err() {
            return;
        }
    }
}

/// Counts what was carried, and does what comes of it. `at_once`: writes it down whenever that was last done.
pub(crate) async fn look_at_volumes(daemon: &Daemon, at_once: bool) -> Result<(), Gone> {
    let snapshot = daemon.driver.snapshot().await?;
    let turns = {
        let mut preferences = daemon.preferences.borrow_mut();
        let turns = preferences.count_carried(&daemon.config, &snapshot);
        for turn in &turns {
            preferences.tell_usage(&daemon.driver, turn.path)?;
        }
        turns
    };
    turns.iter().for_each(|turn| tell_turn(daemon, turn));
    let due = {
        let mut preferences = daemon.preferences.borrow_mut();
        preferences.volumes().due(at_once || !turns.is_empty())
    };
    if let Some((file, text)) = due {
        // A disk may be slow, and users are not to wait for it.
        let written = tokio::task::spawn_blocking(move || write(&file, &text)).await;
        let written = written.map_err(anyhow::Error::from).and_then(|done| done);
        if written.is_err() {
            daemon.preferences.borrow_mut().volumes().note_unwritten();
        }
        let what = "keep what paths carried this month";
        daemon.events.note(what, written);
    }
    Ok(())
}

/// Tells of a path that has used another part of its volume.
fn tell_turn(daemon: &Daemon, turn: &Turn) {
    let name = &daemon.config.paths[turn.path].name;
    let volume = daemon.preferences.borrow().usage(turn.path).volume;
    let (Some(volume), true) = (volume, turn.now != turn.before) else {
        return;
    };
    let text = match turn.now {
        Stage::Spent => format!(
            "path {name} has used up its data cap of {volume}: it carries no data until the month ends"
        ),
        Stage::Near if turn.before == Stage::Free => {
            format!("path {name} has used 90 % of its data cap of {volume}")
        }
        _ => format!("path {name} has data left of its data cap of {volume} again"),
    };
    const KIND: &str = "path_volume";
    let fields = [
        ("path", name.clone()),
        ("volume", volume.bytes().to_string()),
    ];
    if turn.now > turn.before {
        tracing::warn!(dibs.event = KIND, dibs.path = name, "{text}");
        daemon.events.announce(KIND, text, &fields);
    } else {
        daemon.events.tell(KIND, text, &fields);
    }
}

/// Has paths used otherwise, now and after a restart.
pub(crate) async fn change(daemon: &Daemon, change: PathChange) -> anyhow::Result<Preferences> {
    // What was carried until now was carried under the limits that held.
    look_at_volumes(daemon, false).await?;
    let config = &daemon.config;
    let (before, told) = {
        let mut preferences = daemon.preferences.borrow_mut();
        let wishes = preferences.changed(config, &change)?;
        let told = preferences.warnings(config);
        (preferences.replace_wishes(wishes), told)
    };
    if let Err(error) = daemon.save() {
        daemon.preferences.borrow_mut().replace_wishes(before);
        return Err(error);
    }
    let (turns, mut info) = {
        let mut preferences = daemon.preferences.borrow_mut();
        let turns = preferences.apply(config, &daemon.driver)?;
        let mut info = preferences.info(config);
        info.warnings = preferences.warnings(config);
        (turns, info)
    };
    info.warnings.retain(|warning| !told.contains(warning));
    let (kind, text, fields) = news(&change, &info);
    daemon.events.tell(kind, text, &fields);
    for warning in &info.warnings {
        tracing::warn!("{warning}");
    }
    for turn in &turns {
        tell_turn(daemon, turn);
    }
    daemon.wakers.wake(Task::Volumes);
    Ok(info)
}

/// How long a peer has to answer a measurement, which asks it many times.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(4);

/// Puts load on paths, or has the peer do so, and tells what they have carried.
pub(crate) async fn measure(daemon: &Daemon, wanted: Measure) -> anyhow::Result<Measured> {
    let peers = daemon.config.peers.iter().map(|peer| &*peer.name);
    let Some(peer) = peers.clone().position(|name| name == wanted.peer) else {
        bail!(Failure::unknown("peer", &wanted.peer, peers));
    };
    let name = |path: &PathSnapshot| daemon.config.paths[path.local].name.clone();
    let mut snapshot = daemon.driver.snapshot().await?;
    // A path that is suspect for a moment has still carried what it has.
    (snapshot.paths).retain(|path| path.peer == peer && wanted.paths.contains(&name(path)));
    // Several may lead to one peer from one interface.
    (snapshot.paths).sort_by_key(|path| (path.local, path.state != "active"));
    snapshot.paths.dedup_by_key(|path| path.local);
    let ids = snapshot.paths.iter().map(|path| path.id).collect();
    let (here, paths) = match wanted.down {
        true => (Vec::new(), ids),
        false => (ids, Vec::new()),
    };
    let Measure { run, named, .. } = wanted;
    let busy = |host: &str| {
        let why = format!("{host} is measuring already: try again when that is done");
        Failure::new(ErrorKind::Failed, why)
    };
    if !daemon.driver.measure(peer, run, here).await? {
        bail!(busy("this host"));
    }
    let body = Body::Measure { run, named, paths };
    let asked = daemon.rpc.ask_within(MEASURE_TIMEOUT, peer, body);
    let outcomes = match asked.await {
        Ok(outcomes) => outcomes,
        Err(Unanswered::Silent) => bail!(
            "peer {} did not answer within {} s: it is away, or its dibsd is older than this one and cannot measure",
            wanted.peer,
            MEASURE_TIMEOUT.as_secs()
        ),
        Err(why) => bail!(why),
    };
    let there: Vec<u64> = match outcomes.split_first() {
        Some(((Outcome::Done, _), trips)) => trips.iter().map(|(_, trip)| *trip).collect(),
        Some(((Outcome::OwnRule, _), _)) => bail!(refused(
            "the peer spares it, because it has a data cap there or is a backup: name it with --path"
        )),
        _ => bail!(busy(&format!("peer {}", wanted.peer))),
    };
    let count = |(at, path): (usize, &PathSnapshot)| PathCount {
        name: name(path),
        bytes: match wanted.down {
            true => path.bytes_received,
            false => path.stats.bytes_acked,
        },
        srtt_us: match wanted.down {
            true => there.get(at).copied().unwrap_or_default(),
            false => path.stats.srtt.as_micros() as u64,
        },
    };
    Ok(Measured {
        at: snapshot.now.as_nanos() as f64 * 1e-9,
        paths: snapshot.paths.iter().enumerate().map(count).collect(),
    })
}

/// Puts load on paths that a peer measures. Those that are spared here have to be named by its user.
pub(crate) async fn answer_measure(
    daemon: &Daemon,
    peer: usize,
    (run, named): (u64, bool),
    paths: Vec<u8>,
) -> Outcomes {
    let failed = vec![(Outcome::Failed, 0)];
    let Ok(snapshot) = daemon.driver.snapshot().await else {
        return failed;
    };
    let of_peer = || snapshot.paths.iter().filter(|path| path.peer == peer);
    let is_spared = |path: &PathSnapshot| {
        let usage = daemon.preferences.borrow().usage(path.local);
        usage.volume.is_some() || usage.role == Role::Backup
    };
    if !named && of_peer().any(|path| paths.contains(&path.id) && is_spared(path)) {
        return vec![(Outcome::OwnRule, 0)];
    }
    let trip = |id: &u8| {
        let path = of_peer().find(|path| path.id == *id);
        path.map_or(0, |path| path.stats.srtt.as_micros() as u64)
    };
    let trips = paths.iter().map(|id| (Outcome::Done, trip(id))).collect();
    match daemon.driver.measure(peer, run, paths).await {
        Ok(true) => [vec![(Outcome::Done, 0)], trips].concat(),
        Ok(false) => vec![(Outcome::Older, 0)],
        Err(Gone) => failed,
    }
}

/// What happened, for those who follow: a word, a sentence, and what it is about.
type News = (&'static str, String, Vec<(&'static str, String)>);

/// What a change came to.
fn news(change: &PathChange, now: &Preferences) -> News {
    let usage = |name: &String| now.paths.iter().find(|path| path.name == *name);
    match change {
        PathChange::Prefer { path, .. } => {
            let text = format!("new data prefers path {path} while it works well");
            ("path_preference", text, vec![("path", path.clone())])
        }
        PathChange::Unprefer => (
            "path_preference",
            "no path is preferred".to_owned(),
            Vec::new(),
        ),
        PathChange::Scheduler { name } => {
            let text = format!("the scheduler is {name}");
            ("path_scheduler", text, vec![("scheduler", name.clone())])
        }
        PathChange::Role { path, role } => {
            let text = format!("the role of path {path} is {role}");
            let fields = vec![("path", path.clone()), ("role", role.clone())];
            ("path_role", text, fields)
        }
        PathChange::Limit { path, .. } => {
            let usage = usage(path);
            let rate = usage.and_then(|usage| Rate::new(usage.rate_limit?).ok());
            let volume = usage.and_then(|usage| Volume::new(usage.volume?).ok());
            let none = || "none".to_owned();
            let fields = vec![
                ("path", path.clone()),
                ("rate", rate.map_or_else(none, |rate| rate.to_string())),
                (
                    "volume",
                    volume.map_or_else(none, |volume| volume.to_string()),
                ),
            ];
            let (rate, volume) = (&fields[1].1, &fields[2].1);
            let text = format!("the limits of path {path} are rate {rate}, data cap {volume}");
            ("path_limit", text, fields)
        }
        PathChange::Reset => {
            let text = "paths are used as the configuration file says".to_owned();
            ("path_reset", text, Vec::new())
        }
    }
}

/// Endpoints of a peer.
pub(crate) fn endpoints_of(daemon: &Daemon, peer: usize) -> Vec<EndpointInfo> {
    let inventory = daemon.host.inventory();
    daemon.endpoints.infos(&daemon.config, &inventory, peer)
}

/// Each path of the file, to each peer that it leads to.
pub(crate) fn infos(daemon: &Daemon, snapshot: &Snapshot) -> Vec<PathInfo> {
    let mut infos = Vec::new();
    let peers = 0..daemon.config.peers.len();
    let peers: Vec<Vec<EndpointInfo>> = peers.map(|peer| endpoints_of(daemon, peer)).collect();
    for (local, path) in daemon.config.paths.iter().enumerate() {
        for (index, endpoints) in peers.iter().enumerate() {
            let seen =
                { snapshot.paths.iter() }.filter(|seen| seen.local == local && seen.peer == index);
            let mut seen = one_each(seen, |seen| (seen.remote, seen.state))
                .into_iter()
                .peekable();
            let mut endpoints = endpoints
                .iter()
                .filter(|endpoint| endpoint.path == path.name);
            if seen.peek().is_none()
                && let Some(endpoint) = endpoints.next()
            {
                let remote = endpoint.addresses.first();
                infos.push(absent_path(daemon, local, index, remote.copied()));
            }
            infos.extend(seen.map(|seen| path_info(daemon, seen, snapshot)));
        }
    }
    infos
}

fn absent_path(daemon: &Daemon, local: usize, peer: usize, remote: Option<SocketAddr>) -> PathInfo {
    let path = &daemon.config.paths[local];
    let inventory = daemon.host.inventory();
    let (_, mtu) = inventory.path_state(path);
    let bound = inventory.of_path(path).map(|found| found.name.clone());
    let lack = daemon.host.lack_of_path(local);
    let forbidden = daemon.preferences.borrow().forbids(local);
    let unused = match (forbidden, &lack) {
        (Some(why), _) => why,
        (None, Some(_)) => Unused::InterfaceDown,
        (None, None) => Unused::Joining,
    };
    let mut info = PathInfo {
        name: path.name.clone(),
        peer: daemon.peer_name(peer).to_owned(),
        trust: trust(path.trust == dibs_config::Trust::Trusted),
        state: PathState::Down,
        interface: { path.interface.clone() }.map(|name| bound.unwrap_or(name)),
        remote,
        srtt_us: None,
        min_rtt_us: None,
        rttvar_us: None,
        loss: 0.0,
        lost: 0,
        marked: 0,
        bytes_sent: 0,
        bytes_received: 0,
        mtu: mtu.into(),
        cwnd: 0,
        in_flight: 0,
        pacing_rate: None,
        gso: false,
        preferred: false,
        role: String::new(),
        rate_limit: None,
        volume: None,
        volume_used: None,
        scheduler: String::new(),
        unused: Some(unused.reason().to_owned()),
        reason: match forbidden {
            Some(why) => Some(why.reason().to_owned()),
            None => lack
                .or_else(|| fault_of(daemon, peer, local))
                .or_else(|| Some("there is no session with the peer".to_owned())),
        },
    };
    daemon
        .preferences
        .borrow()
        .describe(&daemon.config, local, &mut info);
    info
}

/// Fault of the name that leads to a peer by a path, by index of both.
fn fault_of(daemon: &Daemon, peer: usize, path: usize) -> Option<String> {
    let inventory = daemon.host.inventory();
    daemon
        .endpoints
        .fault(&daemon.config, &inventory, peer, path)
}

/// Reason for a path's state, as its event gives it.
fn because(daemon: &Daemon, path: usize, state: &str) -> String {
    if !["suspect", "down"].contains(&state) {
        return String::new();
    }
    let forbidden = daemon.preferences.borrow().forbids(path);
    let why = forbidden.map(|why| why.reason().to_owned());
    let silent = || format!("{SILENT} (no Internet there, UDP is blocked, or the peer is away)");
    let why = why.or_else(|| daemon.host.lack_of_path(path));
    format!(": {}", why.unwrap_or_else(silent))
}

/// Tells the user the state of a path to a peer.
pub(crate) fn tell_state(daemon: &Daemon, peer: usize, path: usize, state: &str) {
    let name = daemon.config.paths[path].name.clone();
    let peer = daemon.peer_name(peer).to_owned();
    let because = because(daemon, path, state);
    daemon.events.tell(
        "path",
        format!("path {name} to peer {peer} is {state}{because}"),
        &[("path", name), ("peer", peer), ("state", state.to_owned())],
    );
}

/// Tells the user why a trusted path does not open.
pub(crate) fn tell_misdirected(daemon: &Daemon, peer: usize, path: usize, to: IpAddr) {
    let name = daemon.config.paths[path].name.clone();
    let why = misdirected(daemon, path, to);
    let peer = daemon.peer_name(peer).to_owned();
    daemon.events.tell(
        "path_misdirected",
        format!("peer {peer}: {why}"),
        &[("path", name), ("peer", peer)],
    );
}

/// Reason why a trusted path does not open that a peer asks for at this address.
pub(crate) fn misdirected(daemon: &Daemon, path: usize, to: IpAddr) -> String {
    let inventory = daemon.host.inventory();
    let is_at = |path: &PathConfig| {
        let own = inventory.of_path(path);
        path.public.contains(&to) || own.is_some_and(|own| own.addresses.contains(&to))
    };
    let (own, paths) = (&daemon.config.paths[path], &daemon.config.paths);
    let of: Vec<&str> = { paths.iter().filter(|path| is_at(path)) }
        .map(|path| path.name.as_str())
        .collect();
    let whose = match of[..] {
        [] => format!(
            "no address of it: if a router or cloud translates that, write public = [\"{to}\"] in its [[path]]"
        ),
        [other] => format!("an address of path {other}: something on the way leads it astray"),
        _ => format!(
            "an address of the paths {}: write in [[peer]] at which endpoint the peer is",
            of.join(" and ")
        ),
    };
    format!(
        "trusted path {} does not open: the peer asks for it at {to}, {whose}",
        own.name
    )
}

/// Said of a path whose peer is silent.
const SILENT: &str = "nothing comes back over it";
/// The same, if the peer answers over another one.
const SILENT_ALONE: &str =
    "nothing comes back over it: no Internet there, or UDP is blocked (captive portal?)";

fn path_info(daemon: &Daemon, seen: &PathSnapshot, snapshot: &Snapshot) -> PathInfo {
    let socket = &snapshot.sockets[seen.local];
    let lack = daemon.host.lack_of_path(seen.local);
    let state = match seen.state {
        "active" => PathState::Up,
        "joining" => PathState::Validating,
        _ => PathState::Down,
    };
    let forbidden = daemon.preferences.borrow().forbids(seen.local);
    let mut active = snapshot.paths.iter().filter(|path| path.state == "active");
    let elsewhere = active.any(|path| path.peer == seen.peer);
    let reason = match (seen.state, &lack) {
        _ if forbidden.is_some() => forbidden.map(Unused::reason),
        (_, Some(lack)) => Some(lack.as_str()),
        ("active", _) if seen.held_by_trust => {
            Some("data waits for this trusted path, although another could carry it")
        }
        ("active", _) if seen.short_of_paths => {
            Some("data waits: there are fewer paths than its shares need")
        }
        ("active", _) => None,
        ("joining", _) => Some("the peer has not answered over this path yet"),
        _ if elsewhere => Some(SILENT_ALONE),
        _ => Some(SILENT),
    };
    let stats = &seen.stats;
    let measured = |duration: Duration| {
        (stats.received > 0 && !duration.is_zero()).then_some(duration.as_micros() as u64)
    };
    PathInfo {
        trust: trust(seen.trusted),
        state,
        srtt_us: measured(stats.srtt),
        min_rtt_us: measured(stats.min_rtt),
        rttvar_us: measured(stats.rttvar),
        loss: stats.loss,
        lost: stats.lost,
        marked: stats.marked,
        bytes_sent: stats.bytes_sent,
        bytes_received: seen.bytes_received,
        mtu: stats.mtu.into(),
        cwnd: stats.cwnd,
        in_flight: stats.in_flight,
        pacing_rate: (stats.pacing_rate > 0).then_some(stats.pacing_rate),
        gso: match seen.remote.is_ipv4() {
            true => socket.gso_v4,
            false => socket.gso_v6,
        },
        unused: seen.unused.map(|why| why.reason().to_owned()),
        reason: match fault_of(daemon, seen.peer, seen.local) {
            Some(fault) if state == PathState::Down => {
                Some(Vec::from_iter(reason.into_iter().chain([fault.as_str()])).join("; "))
            }
            _ => reason.map(str::to_owned),
        },
        ..absent_path(daemon, seen.local, seen.peer, Some(seen.remote))
    }
}

/// One path for each of the peer's addresses, by address and state: one that does not answer stays while it
/// is opened anew beside it.
fn one_each<T>(
    seen: impl Iterator<Item = T>,
    of: impl Fn(&T) -> (SocketAddr, &'static str),
) -> Vec<T> {
    let rank = |path: &T| match of(path).1 {
        "active" => 0,
        "suspect" => 1,
        "down" => 2,
        _ => 3,
    };
    let mut kept: Vec<T> = Vec::new();
    for path in seen {
        match kept.iter_mut().find(|other| of(other).0 == of(&path).0) {
            Some(other) if rank(&path) < rank(other) => *other = path,
            Some(_) => {}
            None => kept.push(path),
        }
    }
    kept
}

fn trust(trusted: bool) -> dibs_control::Trust {
    if trusted {
        dibs_control::Trust::Trusted
    } else {
        dibs_control::Trust::Untrusted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_opened_anew_is_listed_once() {
        let [one, other] = ["10.0.1.2:5300", "10.0.1.3:5300"].map(|to| to.parse().unwrap());
        let seen = [
            (one, "down"),
            (other, "joining"),
            (one, "joining"),
            (other, "active"),
        ];
        let listed = one_each(seen.into_iter(), |path| *path);
        assert_eq!(listed, [(one, "down"), (other, "active")]);
    }
}
