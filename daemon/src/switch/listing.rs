//! Listings for users: the daemon, its peers, paths, bumps and connections, and what requests name of these.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::Duration;

use dibs_config::BuiltIn;
use dibs_control::{
    BumpInfo, ConnInfo, ConnPathInfo, EndpointInfo, ErrorKind, Failure, PathInfo, PathState,
    PeerInfo, PeerState, PlainInfo, Status,
};
use dibs_core::node::{ConnSnapshot, PathSnapshot, PeerSnapshot};
use dibs_core::preference::Unused;
use dibs_policy::sockets;
use dibs_settings::{BumpId, Handshake};
use dibs_wire::FlowKey;

use crate::control::{Caller, refused};
use crate::data::bumps::Carried;
use crate::data::{Gone, Snapshot};
use crate::host::live::Live;
use crate::host::process::{now, wall};
use crate::kernel::{backstop_info, connections};
use crate::rulebook::rules::Rule;
use crate::switch::sessions::{UNJOINED, UNSECURED, outdated, peer_state};
use crate::switch::{Daemon, sessions, startup};

pub(crate) async fn status(daemon: &Daemon, caller: Caller) -> anyhow::Result<Status> {
    let lives = lives(daemon).await?;
    let connections = lives.iter().filter(|live| caller.sees(live)).count() as u64;
    let on_bumps = on_bumps(daemon, lives);
    let snapshot = daemon.driver.snapshot().await?;
    let mut warnings = daemon.preferences.borrow().warnings(&daemon.config);
    warnings.extend(connections::faults(&daemon.config));
    warnings.extend(sessions::silence_warnings(daemon));
    warnings.extend(
        daemon
            .state
            .borrow()
            .rules
            .listed()
            .filter(|rule| caller.may(rule.only_user()))
            .filter_map(Rule::warning),
    );
    warnings.extend(daemon.host.own_addresses());
    for bump in daemon.state.borrow().installed.keys() {
        if let Some(warning) = daemon.bumps.get(*bump).and_then(|bump| bump.warning)
            && !warnings.iter().any(|known| known == warning)
        {
            warnings.push(warning.to_owned());
        }
    }
    let mut counters: BTreeMap<String, u64> = snapshot
        .counters
        .iter()
        .map(|(name, count)| ((*name).to_owned(), *count))
        .collect();
    let dropped = daemon.kernel.dropped().await;
    let unknown = dropped.unknown;
    warnings.extend(unknown.map(|why| format!("what iptables dropped is not known: {why}")));
    warnings.extend(daemon.kernel.amiss().map(|why| format!("steering: {why}")));
    let refused = daemon.state.borrow().refused;
    let [copies_left_out, copies_unfit] = daemon.host.copies.get();
    let of_choices = [
        ("match_copies_left_out", copies_left_out),
        ("match_copies_unfit", copies_unfit),
        ("steering_restored", daemon.kernel.restored()),
        ("choice_generation_refused", refused.generations),
        ("choice_host_refused", refused.hosts),
        ("join_token_refused", refused.tokens),
    ];
    let of_owners = { of_choices.into_iter() }
        .chain(daemon.rpc.counters())
        .chain(daemon.users.counters())
        .chain(daemon.peer_warnings.counters())
        .chain(dropped.counts);
    counters.extend(of_owners.map(|(name, count)| (name.to_owned(), count)));
    Ok(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime: daemon.started.elapsed().as_secs(),
        integrity: daemon.config.daemon.integrity,
        warnings,
        peers: peers_of(daemon, &snapshot, &on_bumps),
        paths: paths_of(daemon, &snapshot),
        silent_ports: sessions::silence_infos(daemon, &snapshot.peers),
        bumps: bump_infos(daemon, &on_bumps),
        connections,
        counters,
        backstop: backstop_info(&daemon.kernel.standing().await),
        counted: dropped.at,
    })
}

pub(crate) async fn peer_list(daemon: &Daemon) -> anyhow::Result<Vec<PeerInfo>> {
    let on_bumps = on_bumps(daemon, lives(daemon).await?);
    let snapshot = daemon.driver.snapshot().await?;
    Ok(peers_of(daemon, &snapshot, &on_bumps))
}

pub(crate) async fn path_list(daemon: &Daemon) -> Result<Vec<PathInfo>, Gone> {
    Ok(paths_of(daemon, &daemon.driver.snapshot().await?))
}

pub(crate) async fn bump_list(daemon: &Daemon) -> anyhow::Result<Vec<BumpInfo>> {
    Ok(bump_infos(daemon, &on_bumps(daemon, lives(daemon).await?)))
}

fn bump_infos(daemon: &Daemon, on_bumps: &[(Live, BumpId)]) -> Vec<BumpInfo> {
    let inventory = daemon.host.inventory();
    let default = daemon.config.daemon.default_bump.as_ref();
    let on = |number: BumpId| move |(_, bump): &&(Live, BumpId)| *bump == number;
    let info = |bump: &dibs_config::BumpConfig| {
        let carried = daemon
            .bumps
            .all()
            .iter()
            .find(|known| known.name == bump.name);
        let number = carried.map(|known| known.id);
        let connections = number.map_or(0, |number| on_bumps.iter().filter(on(number)).count());
        let device = bump.device();
        let answers = number.filter(|_| device.is_some()).and_then(|number| {
            let lives = on_bumps.iter().filter(on(number));
            daemon
                .answers
                .borrow()
                .of(number, lives.map(|(live, _)| live))
        });
        let shares = bump.built_in().filter(|_| carried.is_some());
        let shares = shares.and_then(BuiltIn::shares);
        let is_up = |device: &str| {
            inventory
                .named(device)
                .is_some_and(|interface| interface.up)
        };
        BumpInfo {
            name: bump.name.clone(),
            kind: bump.kind().to_owned(),
            device: device.map(str::to_owned),
            needed: shares.map(|(needed, _)| needed),
            shares: shares.map(|(_, shares)| shares),
            default: default == Some(&bump.name),
            connections: connections as u64,
            answers,
            reason: match daemon.config.lack(bump) {
                Some(lack) => Some(format!("it {lack}")),
                None if device.is_some_and(|device| !is_up(device)) => {
                    Some("its device does not exist, or is down".to_owned())
                }
                None => None,
            },
        }
    };
    daemon.config.bumps.iter().map(info).collect()
}

/// Those of all connections that are alive and on bumps, with these. The data path also knows of ended ones, for a while.
fn on_bumps(daemon: &Daemon, lives: Vec<Live>) -> Vec<(Live, BumpId)> {
    let lives = lives.into_iter().filter(|live| !live.over);
    let on = |live| Some((live, daemon.bump_of(&live)?));
    lives.filter_map(on).collect()
}

fn peers_of(daemon: &Daemon, snapshot: &Snapshot, on_bumps: &[(Live, BumpId)]) -> Vec<PeerInfo> {
    let peers = daemon.config.peers.iter().zip(&snapshot.peers).enumerate();
    peers
        .map(|(index, (peer, seen))| {
            let paths = || snapshot.paths.iter().filter(|path| path.peer == index);
            let state = peer_state(seen);
            let established = state == PeerState::Established;
            PeerInfo {
                name: peer.name.clone(),
                state,
                public_key: peer.public_key.to_string(),
                addresses: peer.addresses.clone(),
                accept: peer.accept.iter().map(ToString::to_string).collect(),
                since: daemon.state.borrow().peers[index]
                    .since
                    .filter(|_| established),
                bytes_sent: paths().map(|path| path.stats.bytes_sent).sum(),
                bytes_received: paths().map(|path| path.bytes_received).sum(),
                connections: on_bumps
                    .iter()
                    .filter(|(live, _)| live.peer == index)
                    .count() as u64,
                keys: seen.keys,
                endpoints: endpoints_of(daemon, index),
                reason: peer_reason(daemon, index, seen),
            }
        })
        .collect()
}

fn peer_reason(daemon: &Daemon, index: usize, seen: &PeerSnapshot) -> Option<String> {
    if peer_state(seen) == PeerState::Established {
        return None;
    }
    if let Some(behind) = daemon.state.borrow().peers[index].outdated {
        return Some(outdated(behind));
    }
    let endpoints = endpoints_of(daemon, index);
    let trusted = |name: &str| {
        let path = daemon.config.paths.iter().find(|path| path.name == name);
        path.is_some_and(|path| path.trust == dibs_config::Trust::Trusted)
    };
    let any = seen.by_untrusted;
    let callable = || { endpoints.iter() }.filter(|endpoint| any || trusted(&endpoint.path));
    let up = |name: &str| {
        let path = { daemon.config.paths.iter() }.position(|path| path.name == name);
        path.is_some_and(|path| daemon.host.lack_of_path(path).is_none())
    };
    let waits =
        daemon.config.daemon.handshake == Handshake::Chained && !any && { endpoints.iter() }
            .any(|endpoint| !trusted(&endpoint.path) && up(&endpoint.path));
    if callable().next().is_none() {
        return Some(match (waits, any) {
            (true, _) => format!("it has no endpoint on a trusted path, and {UNSECURED}"),
            (false, true) => "it has no endpoint here, so it has to contact this host".to_owned(),
            (false, false) => {
                "it has no endpoint on a trusted path, so it has to contact this host".to_owned()
            }
        });
    }
    let (up, down): (Vec<&EndpointInfo>, Vec<&EndpointInfo>) =
        callable().partition(|endpoint| up(&endpoint.path));
    let called: Vec<String> = { up.iter() }
        .flat_map(|endpoint| {
            let path = &endpoint.path;
            let addresses = endpoint.addresses.iter();
            addresses.map(move |to| format!("{to} over {path}"))
        })
        .collect();
    let nobody = match (called.is_empty(), any) {
        (true, true) if up.is_empty() => Some("no path to it is up on this host".to_owned()),
        (true, false) if up.is_empty() => {
            Some("no trusted path to it is up on this host".to_owned())
        }
        (true, _) => None,
        (false, _) => {
            let answers = format!("no answer from {}", called.join(", "));
            let joins = startup::own_ticket(&daemon.config, index).is_some();
            Some(answers + if joins { UNJOINED } else { "" })
        }
    };
    let faults = up.into_iter().chain(down).filter_map(|endpoint| {
        let (path, fault) = (&endpoint.path, endpoint.fault.as_ref()?);
        Some(format!("path {path}: {fault}"))
    });
    let reasons: Vec<String> = nobody.into_iter().chain(faults).collect();
    let reasons = reasons.join("; ");
    Some(match waits {
        true => format!("{reasons}, and {UNSECURED}"),
        false => reasons,
    })
}

fn endpoints_of(daemon: &Daemon, peer: usize) -> Vec<EndpointInfo> {
    let inventory = daemon.host.inventory();
    daemon.endpoints.infos(&daemon.config, &inventory, peer)
}

/// Each path of the file, to each peer that it leads to.
fn paths_of(daemon: &Daemon, snapshot: &Snapshot) -> Vec<PathInfo> {
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

/// Why a path has a state, as the event of it says.
pub(crate) fn because(daemon: &Daemon, path: usize, state: &str) -> String {
    if !["suspect", "down"].contains(&state) {
        return String::new();
    }
    let forbidden = daemon.preferences.borrow().forbids(path);
    let why = forbidden.map(|why| why.reason().to_owned());
    let silent = || format!("{SILENT} (no Internet there, UDP is blocked, or the peer is away)");
    let why = why.or_else(|| daemon.host.lack_of_path(path));
    format!(": {}", why.unwrap_or_else(silent))
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

/// What the user is shown of connections, in the same order.
pub(crate) async fn describe(daemon: &Daemon, lives: &[Live]) -> anyhow::Result<Vec<ConnInfo>> {
    let (_, conns) = daemon.driver.conns().await?;
    let mut carried: HashMap<FlowKey, Vec<ConnSnapshot>> = HashMap::new();
    for conn in conns {
        carried.entry(conn.tuple).or_default().push(conn);
    }
    let inodes: HashSet<u64> = lives.iter().map(|live| live.inode).collect();
    // It reads all of /proc.
    let processes = tokio::task::spawn_blocking(move || sockets::processes(&inodes)).await?;
    let now = wall();
    let mut infos = Vec::with_capacity(lives.len());
    for live in lives {
        let bump = daemon.bump_of(live);
        let (id, since) = daemon.registry.borrow_mut().note(live, bump, now);
        let process = processes.get(&live.inode);
        let on_bumps = carried.get(&live.pair).map_or(&[][..], Vec::as_slice);
        let theirs = on_bumps.first().map_or(live.pair, |conn| conn.theirs);
        let other = |there: SocketAddr, here: SocketAddr| (there != here).then_some(there);
        infos.push(ConnInfo {
            id,
            peer: daemon.peer_name(live.peer).to_owned(),
            local: live.pair.source(),
            remote: live.pair.destination(),
            local_there: other(theirs.source(), live.pair.source()),
            remote_there: other(theirs.destination(), live.pair.destination()),
            plain: bump.and_then(|_| plain_of(daemon, &live.pair, now)),
            bump: daemon.bumps.name_of(bump).to_owned(),
            process: process.map(|process| process.name.clone()),
            pid: process.map(|process| process.pid),
            uid: live.uid,
            mptcp: live.mptcp,
            since,
            bytes_sent: on_bumps.iter().map(|conn| conn.stats.bytes_sent).sum(),
            bytes_received: on_bumps.iter().map(|conn| conn.stats.bytes_received).sum(),
            retransmissions: live.counts.retransmissions.into(),
            paths: by_path(daemon, on_bumps),
            reason: sessions::silence_reason(daemon, live, bump),
        });
    }
    Ok(infos)
}

/// State of the ordinary route of a connection that is shown there.
fn plain_of(daemon: &Daemon, pair: &FlowKey, wall: f64) -> Option<PlainInfo> {
    let at = now();
    daemon.host.matched().get(pair)?;
    let (open, heard) = daemon.host.shadows.borrow().get(pair)?.plain(at);
    let heard = wall - at.since(heard).as_secs_f64();
    Some(PlainInfo { open, heard })
}

/// The part that each path had in a connection's bytes.
fn by_path(daemon: &Daemon, conns: &[ConnSnapshot]) -> Vec<ConnPathInfo> {
    let mut infos: BTreeMap<usize, ConnPathInfo> = BTreeMap::new();
    for (path, bytes) in conns.iter().flat_map(|conn| conn.by_path.iter()) {
        let info = infos.entry(path).or_insert_with(|| ConnPathInfo {
            name: daemon.config.paths[path].name.clone(),
            bytes_sent: 0,
            bytes_received: 0,
        });
        info.bytes_sent += bytes.sent;
        info.bytes_received += bytes.received;
    }
    infos.into_values().collect()
}

/// Forgets the numbers of connections that are gone.
pub(crate) fn forget_gone(daemon: &Daemon, lives: &[Live]) {
    let alive: HashSet<FlowKey> = lives.iter().map(|live| live.pair).collect();
    daemon.registry.borrow_mut().retain(&alive);
}

/// All connections to peers.
pub(crate) async fn lives(daemon: &Daemon) -> anyhow::Result<Vec<Live>> {
    let all = daemon.connections().await?;
    forget_gone(daemon, &all);
    Ok(all)
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

/// The bump of that name, or the default.
pub(crate) fn bump_for<'a>(daemon: &'a Daemon, name: Option<&str>) -> anyhow::Result<&'a Carried> {
    let name = name
        .or(daemon.config.daemon.default_bump.as_deref())
        .ok_or_else(|| refused("the configuration has no default_bump: name one with --bump"))?;
    if let Some(bump) = daemon.bumps.all().iter().find(|bump| bump.name == name) {
        return Ok(bump);
    }
    match daemon.config.bump(name) {
        Some(bump) => {
            let lack = daemon.config.lack(bump).unwrap_or_default();
            Err(refused(format!("the bump \"{name}\" {lack}")).into())
        }
        None => {
            let known = daemon.bumps.all().iter().map(|bump| &*bump.name);
            Err(Failure::unknown("bump", name, known).into())
        }
    }
}

pub(crate) fn check_peer(daemon: &Daemon, name: Option<&str>) -> anyhow::Result<()> {
    match name {
        Some(name) if !daemon.config.peers.iter().any(|peer| peer.name == name) => {
            let known = daemon.config.peers.iter().map(|peer| &*peer.name);
            Err(Failure::unknown("peer", name, known).into())
        }
        _ => Ok(()),
    }
}

pub(crate) fn no_session(daemon: &Daemon, lives: &[Live]) -> Failure {
    let peers: BTreeSet<&str> = lives
        .iter()
        .map(|live| daemon.peer_name(live.peer))
        .collect();
    let peers: Vec<&str> = peers.into_iter().collect();
    Failure::new(
        ErrorKind::NoSession,
        format!(
            "there is no session with peer {}, so nothing was changed: see dibsctl peer list",
            peers.join(", ")
        ),
    )
}

/// The live connections that the caller may see.
pub(crate) async fn visible_lives(daemon: &Daemon, caller: Caller) -> anyhow::Result<Vec<Live>> {
    let all = lives(daemon).await?.into_iter();
    Ok(all.filter(|live| caller.sees(live)).collect())
}

/// The same, with what is told of them.
pub(crate) async fn visible(
    daemon: &Daemon,
    caller: Caller,
) -> anyhow::Result<Vec<(Live, ConnInfo)>> {
    let lives = visible_lives(daemon, caller).await?;
    let infos = describe(daemon, &lives).await?;
    Ok(lives.into_iter().zip(infos).collect())
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
