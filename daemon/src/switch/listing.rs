//! Listings for users: the daemon, its peers, paths, bumps and connections, and what requests name of these.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;

use dibs_config::BuiltIn;
use dibs_control::{
    BumpInfo, ConnInfo, ConnPathInfo, EndpointInfo, ErrorKind, Failure, PathInfo, PeerInfo,
    PeerState, PlainInfo, Status,
};
use dibs_core::node::{ConnSnapshot, PeerSnapshot};
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
use crate::switch::{Daemon, paths, sessions, startup};

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
        paths: paths::infos(daemon, &snapshot),
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
    Ok(paths::infos(daemon, &daemon.driver.snapshot().await?))
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
                endpoints: paths::endpoints_of(daemon, index),
                reason: peer_reason(daemon, index, seen),
            }
        })
        .collect()
}

fn peer_reason(daemon: &Daemon, index: usize, seen: &PeerSnapshot) -> Option<String> {
    if peer_state(seen) == PeerState::Established {
        let misdirected = seen.misdirected.iter();
        let reasons = misdirected.map(|(path, to)| paths::misdirected(daemon, *path, *to));
        return reasons.reduce(|before, next| format!("{before}; {next}"));
    }
    if let Some(behind) = daemon.state.borrow().peers[index].outdated {
        return Some(outdated(behind));
    }
    let endpoints = paths::endpoints_of(daemon, index);
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

/// What the user is shown of connections, in the same order.
pub(crate) async fn describe(daemon: &Daemon, lives: &[Live]) -> anyhow::Result<Vec<ConnInfo>> {
    let (at, conns) = daemon.driver.conns().await?;
    let now = wall();
    let mut carried: HashMap<FlowKey, Vec<ConnSnapshot>> = HashMap::new();
    for conn in conns {
        carried.entry(conn.tuple).or_default().push(conn);
    }
    let inodes: HashSet<u64> = lives.iter().map(|live| live.inode).collect();
    // It reads all of /proc.
    let processes = tokio::task::spawn_blocking(move || sockets::processes(&inodes)).await?;
    let mut infos = Vec::with_capacity(lives.len());
    for live in lives {
        let bump = daemon.bump_of(live);
        let (id, since) = daemon.registry.borrow_mut().note(live, bump, now);
        let process = processes.get(&live.inode);
        let on_bumps = carried.get(&live.pair).map_or(&[][..], Vec::as_slice);
        let came = on_bumps.iter().find(|conn| Some(conn.bump) == bump);
        let came = came.map(|conn| now - at.since(conn.since).as_secs_f64());
        let theirs = on_bumps.first().map_or(live.pair, |conn| conn.theirs);
        let other = |there: SocketAddr, here: SocketAddr| (there != here).then_some(there);
        infos.push(ConnInfo {
            id,
            peer: daemon.peer_name(live.peer).to_owned(),
            local: live.local(),
            remote: live.pair.destination(),
            local_there: other(theirs.source(), live.local()),
            remote_there: other(theirs.destination(), live.pair.destination()),
            plain: bump.and_then(|_| plain_of(daemon, &live.pair, now)),
            bump: daemon.bumps.name_of(bump).to_owned(),
            process: process.map(|process| process.name.clone()),
            pid: process.map(|process| process.pid),
            uid: live.uid,
            mptcp: live.mptcp,
            since: came.unwrap_or(since),
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
