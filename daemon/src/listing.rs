//! What users are shown of the daemon, its peers, paths and bumps.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dibs_config::BuiltIn;
use dibs_control::{
    BumpInfo, ErrorKind, Failure, PathInfo, PathState, PeerInfo, PeerState, Status,
};
use dibs_core::node::{PathSnapshot, PeerSnapshot};
use dibs_core::preference::Unused;
use dibs_core::session;
use tokio::time::timeout;

use crate::background::outdated;
use crate::caller::{Caller, is_visible};
use crate::clock::wall;
use crate::daemon::Daemon;
use crate::driver::{Gone, Snapshot};
use crate::gateway;
use crate::interfaces::own_addresses;
use crate::live::Live;
use crate::rules::Rule;

/// Who asks for the status is told without what iptables does not say within this time.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);

/// What the kernel dropped for us.
#[derive(Clone, Debug, Default)]
pub(crate) struct Dropped {
    /// By reason.
    counts: BTreeMap<&'static str, u64>,
    /// When that was counted, in seconds since 1970.
    at: Option<f64>,
    /// Why it is not known what iptables dropped lately.
    unknown: Option<String>,
}

impl Daemon {
    pub(crate) async fn status(&self, caller: Caller) -> Result<Status, Failure> {
        let failed = |error: Gone| Failure::new(ErrorKind::Failed, error.to_string());
        let lives = self.lives().await?;
        let connections = lives.iter().filter(|live| is_visible(live, caller)).count() as u64;
        let on_bumps = self.on_bumps(lives);
        let snapshot = self.driver.snapshot().await.map_err(failed)?;
        let mut warnings = self.preferences.borrow().warnings(&self.config);
        warnings.extend(gateway::faults(&self.config));
        warnings.extend(
            self.state
                .borrow()
                .rules_in_force()
                .filter(|rule| caller.sees(rule))
                .filter_map(Rule::warning),
        );
        warnings.extend(own_addresses(&self.config, &self.state.borrow().inventory));
        for bump in self.state.borrow().installed.keys() {
            if let Some(warning) = self.bumps.get(bump.get()).and_then(|bump| bump.warning)
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
        let find = async |before| self.count_dropped(before).await;
        let dropped = self.dropped.get(Instant::now(), find).await;
        let unknown = dropped.unknown;
        warnings.extend(unknown.map(|why| format!("what iptables dropped is not known: {why}")));
        warnings.extend(self.amiss().map(|why| format!("steering: {why}")));
        let refused = self.state.borrow().refused;
        let of_choices = [
            ("steering_restored", self.restored.get()),
            ("choice_generation_refused", refused.generations),
            ("choice_host_refused", refused.hosts),
        ];
        let of_owners = { of_choices.into_iter() }
            .chain(self.rpc.counters())
            .chain(self.users.counters())
            .chain(dropped.counts);
        counters.extend(of_owners.map(|(name, count)| (name.to_owned(), count)));
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime: self.started.elapsed().as_secs(),
            integrity: match self.config.daemon.integrity {
                dibs_config::Integrity::On => dibs_control::Integrity::On,
                dibs_config::Integrity::Off => dibs_control::Integrity::Off,
            },
            warnings,
            peers: self.peers_of(&snapshot, &on_bumps),
            paths: self.paths_of(&snapshot),
            bumps: self.bump_infos(&on_bumps),
            connections,
            counters,
            backstop: self.backstop_info().await,
            counted: dropped.at,
        })
    }

    /// Has the kernel's counters read, while others may steer: what a chain counted that is written anew in that
    /// moment is missing, so that no count is taken for less than it was `before`.
    async fn count_dropped(&self, before: Option<Dropped>) -> Dropped {
        let mut dropped = before.unwrap_or_default();
        let at = wall();
        let counted = timeout(COUNTED_WITHIN, async {
            let counting = self.steerer.lock().await.counting();
            counting.drops().await
        });
        let mut note = |name, count: u64| {
            let known = dropped.counts.entry(name).or_default();
            *known = count.max(*known);
        };
        let unknown = match counted.await {
            Ok(Ok(drops)) => {
                drops.iter().for_each(|(name, count)| note(name, count));
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("iptables is busy".to_owned()),
        };
        note("plain_dropped", self.plain_dropped().await);
        if unknown.is_none() {
            dropped.at = Some(at);
        }
        dropped.unknown = unknown;
        dropped
    }

    pub(crate) async fn peer_list(&self) -> Result<Vec<PeerInfo>, Failure> {
        let on_bumps = self.on_bumps(self.lives().await?);
        let snapshot = self.driver.snapshot().await;
        let snapshot =
            snapshot.map_err(|error| Failure::new(ErrorKind::Failed, error.to_string()))?;
        Ok(self.peers_of(&snapshot, &on_bumps))
    }

    pub(crate) async fn path_list(&self) -> Result<Vec<PathInfo>, Gone> {
        Ok(self.paths_of(&self.driver.snapshot().await?))
    }

    pub(crate) async fn bump_list(&self) -> Result<Vec<BumpInfo>, Failure> {
        Ok(self.bump_infos(&self.on_bumps(self.lives().await?)))
    }

    fn bump_infos(&self, on_bumps: &[(Live, u8)]) -> Vec<BumpInfo> {
        let inventory = self.state.borrow().inventory.clone();
        let default = self.config.daemon.default_bump.as_ref();
        let on = |number: u8| move |(_, bump): &&(Live, u8)| *bump == number;
        let info = |bump: &dibs_config::BumpConfig| {
            let carried = self
                .bumps
                .all()
                .iter()
                .find(|known| known.name == bump.name);
            let number = carried.map(|known| known.id.get());
            let connections = number.map_or(0, |number| on_bumps.iter().filter(on(number)).count());
            let device = bump.device();
            let answers = number.filter(|_| device.is_some()).and_then(|number| {
                let lives = on_bumps.iter().filter(on(number));
                self.answers(number, lives.map(|(live, _)| live))
            });
            let shares = bump.built_in().filter(|_| carried.is_some());
            let shares = shares.and_then(BuiltIn::shares);
            let is_up = |device: &str| {
                let found = inventory.0.iter().find(|found| found.name == device);
                found.is_some_and(|interface| interface.up)
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
                reason: match self.config.lack(bump) {
                    Some(lack) => Some(format!("it {lack}")),
                    None if device.is_some_and(|device| !is_up(device)) => {
                        Some("its device is not there, or not up".to_owned())
                    }
                    None => None,
                },
            }
        };
        self.config.bumps.iter().map(info).collect()
    }

    /// Those of all connections that are alive and on bumps, with these. The data path also knows of ended ones, for a while.
    fn on_bumps(&self, lives: Vec<Live>) -> Vec<(Live, u8)> {
        let lives = lives.into_iter().filter(|live| !live.over);
        let bumps = lives.map(|live| (live, self.bump_of(&live)));
        bumps.filter(|(_, bump)| *bump != 0).collect()
    }

    fn peers_of(&self, snapshot: &Snapshot, on_bumps: &[(Live, u8)]) -> Vec<PeerInfo> {
        let peers = self.config.peers.iter().zip(&snapshot.peers).enumerate();
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
                    since: self.state.borrow().peers[index]
                        .since
                        .filter(|_| established),
                    bytes_sent: paths().map(|path| path.stats.bytes_sent).sum(),
                    bytes_received: paths().map(|path| path.bytes_received).sum(),
                    connections: on_bumps
                        .iter()
                        .filter(|(live, _)| live.peer == index)
                        .count() as u64,
                    reason: self.peer_reason(index, state),
                }
            })
            .collect()
    }

    fn peer_reason(&self, index: usize, state: PeerState) -> Option<String> {
        if state == PeerState::Established {
            return None;
        }
        if let Some(behind) = self.state.borrow().peers[index].outdated {
            return Some(outdated(behind));
        }
        let peer = &self.config.peers[index];
        let trusted = |name: &str| {
            let path = self.config.paths.iter().find(|path| path.name == name);
            path.is_some_and(|path| path.trust == dibs_config::Trust::Trusted)
        };
        let mut callable = peer
            .endpoints
            .iter()
            .filter(|(path, _)| trusted(path))
            .peekable();
        if callable.peek().is_none() {
            return Some("it has no endpoint on a trusted path, so it has to call".to_owned());
        }
        let up = |name: &str| {
            let path = { self.config.paths.iter() }.position(|path| path.name == name);
            path.is_some_and(|path| self.lack_of_path(path).is_none())
        };
        let called: Vec<String> = callable
            .filter(|(path, _)| up(path))
            .map(|(path, to)| format!("{to} by {path}"))
            .collect();
        Some(if called.is_empty() {
            "no trusted path to it is up on this host".to_owned()
        } else {
            format!("nobody answers at {}", called.join(", "))
        })
    }

    /// Each path of the file, to each peer that it leads to.
    fn paths_of(&self, snapshot: &Snapshot) -> Vec<PathInfo> {
        let mut infos = Vec::new();
        for (local, path) in self.config.paths.iter().enumerate() {
            for (index, peer) in self.config.peers.iter().enumerate() {
                let seen = { snapshot.paths.iter() }
                    .filter(|seen| seen.local == local && seen.peer == index);
                let mut seen = one_each(seen, |seen| (seen.remote, seen.state))
                    .into_iter()
                    .peekable();
                let endpoint = peer.endpoints.iter().find(|(name, _)| *name == path.name);
                if seen.peek().is_none() && endpoint.is_some() {
                    infos.push(self.absent_path(local, index, endpoint.map(|(_, to)| *to)));
                }
                infos.extend(seen.map(|seen| self.path_info(seen, snapshot)));
            }
        }
        infos
    }

    /// Why this host cannot use a path, if so.
    fn lack_of_path(&self, index: usize) -> Option<String> {
        let state = self.state.borrow();
        state.links[index].lack(&self.config.paths[index], &state.inventory)
    }

    fn absent_path(&self, local: usize, peer: usize, remote: Option<SocketAddr>) -> PathInfo {
        let path = &self.config.paths[local];
        let (_, mtu) = self.state.borrow().inventory.path_state(path);
        let lack = self.lack_of_path(local);
        let forbidden = self.preferences.borrow().forbids(local);
        let unused = match (forbidden, &lack) {
            (Some(why), _) => why,
            (None, Some(_)) => Unused::InterfaceDown,
            (None, None) => Unused::Joining,
        };
        let mut info = PathInfo {
            name: path.name.clone(),
            peer: self.peer_name(peer).to_owned(),
            trust: trust(path.trust == dibs_config::Trust::Trusted),
            state: PathState::Down,
            interface: path.interface.clone(),
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
                None => lack.or_else(|| Some("there is no session with the peer".to_owned())),
            },
        };
        self.preferences
            .borrow()
            .describe(&self.config, local, &mut info);
        info
    }

    fn path_info(&self, seen: &PathSnapshot, snapshot: &Snapshot) -> PathInfo {
        let path = &self.config.paths[seen.local];
        let socket = &snapshot.sockets[seen.local];
        let lack = self.lack_of_path(seen.local);
        let state = match seen.state {
            "active" => PathState::Up,
            "joining" => PathState::Validating,
            _ => PathState::Down,
        };
        let forbidden = self.preferences.borrow().forbids(seen.local);
        let reason = match (seen.state, &lack) {
            _ if forbidden.is_some() => forbidden.map(Unused::reason),
            (_, Some(lack)) => Some(lack.as_str()),
            ("active", _) if seen.held_by_trust => {
                Some("data waits for this trusted path, though another could carry it")
            }
            ("active", _) if seen.short_of_paths => {
                Some("data waits: there are fewer paths than its shares need")
            }
            ("active", _) => None,
            ("joining", _) => Some("the peer has not answered by this path yet"),
            ("suspect", _) => Some("it stopped answering a moment ago"),
            _ => Some("it does not answer"),
        };
        let stats = &seen.stats;
        let measured = |duration: Duration| {
            (stats.received > 0 && !duration.is_zero()).then_some(duration.as_micros() as u64)
        };
        let mut info = PathInfo {
            name: path.name.clone(),
            peer: self.peer_name(seen.peer).to_owned(),
            trust: trust(seen.trusted),
            state,
            interface: path.interface.clone(),
            remote: Some(seen.remote),
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
            gso: if seen.remote.is_ipv4() {
                socket.gso_v4
            } else {
                socket.gso_v6
            },
            preferred: false,
            role: String::new(),
            rate_limit: None,
            volume: None,
            volume_used: None,
            scheduler: String::new(),
            unused: seen.unused.map(|why| why.reason().to_owned()),
            reason: reason.map(str::to_owned),
        };
        self.preferences
            .borrow()
            .describe(&self.config, seen.local, &mut info);
        info
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

/// How a peer stands: a session alone does not mean that it answers.
pub(crate) fn peer_state(peer: &PeerSnapshot) -> PeerState {
    match peer.state {
        session::PeerState::Established if peer.reachable => PeerState::Established,
        session::PeerState::Established | session::PeerState::Connecting => PeerState::Connecting,
        session::PeerState::Down => PeerState::Down,
    }
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
