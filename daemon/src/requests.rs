//! What users ask for over the control socket.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use dibs_control::{
    Changed, ConnInfo, ErrorKind, Failure, PeerState, Reply, Request, RuleOrigin, Selector, Skipped,
};
use dibs_core::node::PeerSnapshot;
use dibs_policy::BumpId;

use crate::bumps::Carried;
use crate::caller::{Caller, is_visible};
use crate::daemon::Daemon;
use crate::devices::Heard;
use crate::listing::peer_state;
use crate::live::Live;
use crate::rules::Rule;
use crate::switching::{Moved, Progress};
use crate::terms::tun_name;
use crate::wants;
use dibs_switch::conns::Pair;

/// Something that should work did not.
fn failed(error: impl Into<anyhow::Error>) -> Failure {
    let error: anyhow::Error = error.into();
    Failure::new(ErrorKind::Failed, format!("{error:#}"))
}

fn refused(message: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Refused, message)
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

mod ruling;

impl Daemon {
    /// Does what a user asks for; [`Request::Events`] is the socket's business.
    pub(crate) async fn serve(
        &self,
        caller: Caller,
        request: Request,
        progress: &Progress,
    ) -> Result<Reply, Failure> {
        let changes = match &request {
            Request::Enable { .. }
            | Request::Disable { .. }
            | Request::RuleAdd(_)
            | Request::RuleDel { .. } => true,
            Request::Cleanup if !caller.is_root() => {
                return Err(Failure::new(ErrorKind::Denied, "only root may clean up"));
            }
            Request::PathChange(_) if !caller.is_root() => {
                let why = "only root may change how paths are used, for that concerns everybody";
                return Err(Failure::new(ErrorKind::Denied, why));
            }
            Request::Cleanup | Request::PathChange(_) => true,
            _ => false,
        };
        let _turn = self.users.admit(caller, changes).await?;
        match request {
            Request::Status => self.status(caller).await.map(Reply::Status),
            Request::ConnList => {
                let conns = self.visible(caller).await?;
                Ok(Reply::Conns(
                    conns.into_iter().map(|(_, info)| info).collect(),
                ))
            }
            Request::Enable { selector, bump } => {
                let bump = self.bump_for(bump.as_deref())?;
                self.change(caller, &selector, bump.id.get(), progress)
                    .await
                    .map(Reply::Changed)
            }
            Request::Disable { selector } => self
                .change(caller, &selector, 0, progress)
                .await
                .map(Reply::Changed),
            Request::RuleAdd(rule) => self.rule_add(caller, rule).await.map(Reply::Rule),
            Request::RuleList => {
                let state = self.state.borrow();
                let seen = state.rules_in_force().filter(|rule| caller.sees(rule));
                Ok(Reply::Rules(seen.map(Rule::info).collect()))
            }
            Request::RuleDel { id } => self.rule_del(caller, id).await.map(|()| Reply::Done),
            Request::PathList => self.path_list().await.map(Reply::Paths).map_err(failed),
            Request::PathPreferences => Ok(Reply::Preferences(self.path_preferences())),
            Request::PathChange(change) => self.change_paths(change).await.map(Reply::Preferences),
            Request::PeerList => self.peer_list().await.map(Reply::Peers),
            Request::BumpList => self.bump_list().await.map(Reply::Bumps),
            Request::Events => Ok(Reply::Following),
            Request::Cleanup => self.cleanup().await.map(|()| Reply::Done),
        }
    }

    /// The bump of that name, or the default.
    fn bump_for(&self, name: Option<&str>) -> Result<&Carried, Failure> {
        let name = name
            .or(self.config.daemon.default_bump.as_deref())
            .ok_or_else(|| {
                refused("the configuration has no default_bump: name one with --bump")
            })?;
        if let Some(bump) = self.bumps.all().iter().find(|bump| bump.name == name) {
            return Ok(bump);
        }
        match self.config.bump(name) {
            Some(bump) => {
                let lack = self.config.lack(bump).unwrap_or_default();
                Err(refused(format!("the bump \"{name}\" {lack}")))
            }
            None => Err(Failure::new(
                ErrorKind::NotFound,
                format!("there is no bump \"{name}\""),
            )),
        }
    }

    /// All connections to peers.
    pub(crate) async fn lives(&self) -> Result<Vec<Live>, Failure> {
        let all = self.connections().await.map_err(failed)?;
        self.forget_gone(&all);
        Ok(all)
    }

    /// The live connections that the caller may see.
    async fn visible_lives(&self, caller: Caller) -> Result<Vec<Live>, Failure> {
        let all = self.lives().await?.into_iter();
        Ok(all.filter(|live| is_visible(live, caller)).collect())
    }

    /// The same, with what is told of them.
    async fn visible(&self, caller: Caller) -> Result<Vec<(Live, ConnInfo)>, Failure> {
        let lives = self.visible_lives(caller).await?;
        let infos = self.describe(&lives).await.map_err(failed)?;
        Ok(lives.into_iter().zip(infos).collect())
    }

    /// Which peers have a session and answer, by index.
    pub(crate) async fn sessions(&self) -> Result<Vec<bool>, Failure> {
        let snapshot = self.driver.snapshot().await.map_err(failed)?;
        let up = |peer| peer_state(peer) == PeerState::Established;
        Ok(snapshot.peers.iter().map(up).collect())
    }

    /// `enable` and `disable` (bump 0).
    async fn change(
        &self,
        caller: Caller,
        selector: &Selector,
        bump: u8,
        progress: &Progress,
    ) -> Result<Changed, Failure> {
        let matching = self.selected(caller, selector).await?;
        let peers = self.driver.snapshot().await.map_err(failed)?.peers;
        let (held, matching): (Vec<_>, Vec<_>) = {
            let state = self.state.borrow();
            let tell = |live: &Live| match state.requirement(live) {
                Some(rule) if rule.bump_id().get() != bump => Some(required_by(rule)),
                _ => self.lacks(&peers[live.peer], live.peer, bump),
            };
            let told = matching.into_iter().map(|live| (live, tell(&live)));
            told.partition(|(_, why)| why.is_some())
        };
        let up = self.sessions().await?;
        let (able, unable): (Vec<Live>, Vec<Live>) = matching
            .into_iter()
            .map(|(live, _)| live)
            .partition(|live| up[live.peer] || bump == 0);
        if able.is_empty() && !unable.is_empty() {
            return Err(self.no_session(&unable));
        }
        let addresses = able.iter().map(|live| live.pair.local.ip());
        if let Some(why) = self.device_fault(bump, addresses).await.map_err(failed)? {
            return Err(refused(format!("{why}: nothing was changed")));
        }
        self.overrule(&able).await.map_err(failed)?;
        let origins: HashMap<Pair, u8> = able
            .iter()
            .map(|live| (live.pair, self.stands_on(live)))
            .collect();
        let moved = self.choose(&able, bump, progress).await.map_err(failed)?;
        let unasked = match self.bumps.device_of(bump) {
            Some(_) => self.hear_or_undo(bump, &moved, &origins, progress).await?,
            None => false,
        };
        let no_session = |live: &Live| {
            let peer = self.peer_name(live.peer);
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
        let stuck = match self.bumps.is_outside(bump) {
            true => 0,
            false => {
                let moved = outcomes.iter().filter(|(_, outcome)| outcome.is_ok());
                let moved: HashSet<Pair> = moved.map(|(live, _)| live.pair).collect();
                self.unacknowledged(&moved).await.map_err(failed)?
            }
        };
        let lives: Vec<Live> = outcomes.iter().map(|(live, _)| *live).collect();
        let infos = self.describe(&lives).await.map_err(failed)?;
        let mut changed = self.changed(bump, infos.into_iter().zip(outcomes));
        if unasked {
            changed.warnings.push(format!(
                "none of these connections has sent anything by {} so far, so nobody knows whether anything \
                 comes back by its device: \"bump list\" will say",
                changed.bump
            ));
        }
        if let Some(id) = BumpId::new(bump).filter(|_| stuck > 0) {
            changed.warnings.push(format!(
                "nothing of what {stuck} connection(s) sent by {} has been acknowledged so far: if that \
                 stays so, see whether a firewall, here or at the peer, drops what comes in by the bump's \
                 device ({})",
                changed.bump,
                tun_name(id)
            ));
        }
        let without = lives.iter().map(|live| live.peer);
        let without: BTreeSet<usize> = without.filter(|peer| bump == 0 && !up[*peer]).collect();
        let without = without.into_iter().map(|peer| self.peer_name(peer));
        changed.warnings.extend(without.map(|peer| {
            format!("there is no session with peer {peer}: it follows when there is one")
        }));
        let uids = changed.connections.iter().map(|info| info.uid);
        self.events.tell_of_conns(
            uids,
            if bump == 0 { "disabled" } else { "enabled" },
            |count| format!("{count} connection(s) moved to {}", changed.bump),
            &[("bump", changed.bump.clone())],
        );
        Ok(changed)
    }

    /// The connections that a selector matches, of those that a caller may see.
    async fn selected(&self, caller: Caller, selector: &Selector) -> Result<Vec<Live>, Failure> {
        if let Selector::Match(wanted) = selector {
            self.check_peer(wanted.peer.as_deref())?;
        }
        let matching: Vec<Live> = self
            .visible(caller)
            .await?
            .into_iter()
            .filter(|(_, info)| selector.matches(info))
            .map(|(live, _)| live)
            .collect();
        if matching.is_empty() {
            return Err(Failure::new(
                ErrorKind::NoMatch,
                format!("no live connection to a peer matches {selector}"),
            ));
        }
        Ok(matching)
    }

    /// What became of connections that were to move to a bump.
    fn changed(&self, bump: u8, outcomes: impl Iterator<Item = (ConnInfo, Moved)>) -> Changed {
        let mut changed = Changed {
            bump: self.bumps.name_of(bump).to_owned(),
            connections: Vec::new(),
            skipped: Vec::new(),
            warnings: { self.bumps.get(bump).and_then(|bump| bump.warning) }
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
        &self,
        bump: u8,
        moved: &[Moved],
        origins: &HashMap<Pair, u8>,
        progress: &Progress,
    ) -> Result<bool, Failure> {
        let moved = moved.iter().filter(|(_, outcome)| outcome.is_ok());
        let moved: Vec<Live> = moved.map(|(live, _)| *live).collect();
        if moved.is_empty() {
            return Ok(false);
        }
        match self.hear(bump, &moved).await.map_err(failed)? {
            Heard::Something => return Ok(false),
            Heard::Unasked => return Ok(true),
            Heard::Nothing => {}
        }
        let mut stuck = 0;
        let mut back: BTreeMap<u8, Vec<Live>> = BTreeMap::new();
        for live in &moved {
            let origin = origins.get(&live.pair).copied().unwrap_or(0);
            back.entry(origin).or_default().push(*live);
        }
        // Those that were there before stay.
        let stayed = back.remove(&bump).unwrap_or_default().len();
        for (origin, lives) in back {
            let put_back = self.choose(&lives, origin, progress).await;
            let put_back = put_back.map_err(failed)?.into_iter();
            stuck += put_back.filter(|(_, outcome)| outcome.is_err()).count();
        }
        let why = self.nothing_back_by(bump);
        let where_now = match stuck + stayed {
            0 => "the connections are back where they were".to_owned(),
            count => {
                format!("{count} connection(s) are still on it, and \"disable\" takes them off")
            }
        };
        Err(Failure::new(
            ErrorKind::Failed,
            format!("{why}; {where_now}"),
        ))
    }

    /// Why a peer that has a session cannot have a connection on this bump.
    fn lacks(&self, peer: &PeerSnapshot, index: usize, bump: u8) -> Option<String> {
        let own = self.bumps.split_of(bump)?;
        if peer_state(peer) != PeerState::Established {
            return None;
        }
        let name = self.peer_name(index);
        let carried = self.bumps.name_of(bump);
        let Some(theirs) = peer.bumps.iter().find(|other| other.number == bump) else {
            return Some(format!("peer {name} does not carry the bump \"{carried}\""));
        };
        (theirs.shares != own).then(|| {
            let say = |shares: Option<(u8, u8)>| {
                let (needed, shares) = shares.unwrap_or_default();
                format!("{needed} of {shares} shares")
            };
            format!(
                "peer {name} needs {}, this host {}: list {carried} with the same shares and \
                 needed as a [[bump]] at both",
                say(theirs.shares),
                say(own)
            )
        })
    }

    /// Tells of bumps that our rules put connections of a peer into, and that it cannot follow.
    pub(crate) async fn tell_lacks(&self, peer: usize) {
        let Ok(snapshot) = self.driver.snapshot().await else {
            return;
        };
        let wanted = wants::wanted_of(self, peer);
        let seen = &snapshot.peers[peer];
        for bump in (1..16).filter(|bump| wanted & 1 << bump != 0) {
            if let Some(why) = self.lacks(seen, peer, bump) {
                let name = self.bumps.name_of(bump).to_owned();
                self.events.tell("bump_refused", why, &[("bump", name)]);
            }
        }
    }

    /// Why no peer that a rule could be for and that has a session can have its connections on this
    /// bump.
    async fn lacking(&self, peer: Option<&str>, bump: u8) -> Result<Option<String>, Failure> {
        let seen = self.driver.snapshot().await.map_err(failed)?.peers;
        let meant = |index: &usize| peer.is_none_or(|name| self.peer_name(*index) == name);
        let meant = (0..seen.len())
            .filter(meant)
            .filter(|index| peer_state(&seen[*index]) == PeerState::Established);
        let mut whys: Vec<_> = meant
            .map(|index| self.lacks(&seen[index], index, bump))
            .collect();
        let all = whys.iter().all(Option::is_some);
        Ok(whys.pop().flatten().filter(|_| all))
    }

    fn check_peer(&self, name: Option<&str>) -> Result<(), Failure> {
        match name {
            Some(name) if !self.config.peers.iter().any(|peer| peer.name == name) => Err(
                Failure::new(ErrorKind::NotFound, format!("there is no peer \"{name}\"")),
            ),
            _ => Ok(()),
        }
    }

    fn no_session(&self, lives: &[Live]) -> Failure {
        let peers: BTreeSet<&str> = lives.iter().map(|live| self.peer_name(live.peer)).collect();
        let peers: Vec<&str> = peers.into_iter().collect();
        Failure::new(
            ErrorKind::NoSession,
            format!(
                "there is no session with peer {}: nothing was changed",
                peers.join(", ")
            ),
        )
    }

    async fn cleanup(&self) -> Result<(), Failure> {
        let lives = self.connections().await.map_err(failed)?;
        let on_bumps: Vec<Live> = lives
            .into_iter()
            .filter(|live| !live.over && self.bump_of(live) != 0)
            .collect();
        let up = self.sessions().await?;
        // Peers whose rules want otherwise keep their part, and answer into nothing.
        let told: Vec<Live> = on_bumps.into_iter().filter(|live| up[live.peer]).collect();
        self.overrule(&told).await.map_err(failed)?;
        let progress = Progress::default();
        self.choose(&told, 0, &progress).await.map_err(failed)?;
        {
            let mut state = self.state.borrow_mut();
            state.rules.retain(|rule| rule.origin == RuleOrigin::Config);
            state.user_rules.clear();
            state.conns.clear();
            state.suspended = true;
            for peer in &mut state.peers {
                peer.engaged = 0;
            }
        }
        self.save().map_err(failed)?;
        wants::send_all(self).await;
        self.tell_flow_schedulers().map_err(failed)?;
        self.remove_all(false).await.map_err(failed)?;
        self.events.tell(
            "cleanup",
            "everything was removed from the kernel; rules of the file wait for SIGHUP or a restart"
                .to_owned(),
            &[],
        );
        Ok(())
    }
}
