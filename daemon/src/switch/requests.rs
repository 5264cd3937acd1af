//! Requests of users over the control socket, and the rules that they make and delete while the daemon runs.

use anyhow::{Context as _, bail};
use dibs_config::Level;
use dibs_control::{
    ErrorKind, Failure, NewRule, Reply, Request, RuleGone, RuleId, RuleMade, RuleOrigin, Selector,
    Skipped,
};
use dibs_settings::{BumpId, DIRECT};
use dibs_switch::engine;
use dibs_switch::engine::Goal;
use dibs_switch::engine::rules::{Gone, Replaced};
use dibs_switch::messages::Ground;
use tokio::sync::broadcast;

use crate::control::events::Told;
use crate::control::socket::Serves;
use crate::control::{Caller, Progress, TurnedAway, failure, refused};
use crate::host::live::Live;
use crate::host::preferences::scheduler;
use crate::kernel::{connections, devices};
use crate::rulebook::rules;
use crate::rulebook::rules::{Displaced, Rule};
use crate::rulebook::state_file::SavedRule;
use crate::switch::{
    Daemon, Task, knocking, listing, marking, paths, rule_changes, sessions, startup, steering,
    switching,
};

impl Serves for Daemon {
    async fn serve(
        &self,
        caller: Caller,
        request: Request,
        progress: &Progress,
    ) -> Result<Reply, Failure> {
        let served = serve(self, caller, request, progress).await;
        served.map_err(failure)
    }

    fn follow(&self) -> broadcast::Receiver<Told> {
        self.events.follow()
    }

    fn turned_away(&self) -> &TurnedAway {
        self.users.turned_away()
    }
}

/// Does what a user asks for; [`Request::Events`] is the socket's business.
async fn serve(
    daemon: &Daemon,
    caller: Caller,
    request: Request,
    progress: &Progress,
) -> anyhow::Result<Reply> {
    let changes = match &request {
        Request::Enable { .. }
        | Request::Disable { .. }
        | Request::RuleAdd(_)
        | Request::RuleDel { .. } => true,
        Request::Cleanup | Request::ForceCleanup if !caller.is_root() => {
            bail!(Failure::new(
                ErrorKind::Denied,
                "only root may remove dibs from the kernel: use sudo"
            ));
        }
        Request::PeerRemove { .. } if !caller.is_root() => {
            let why = "only root may remove peers: use sudo";
            bail!(Failure::new(ErrorKind::Denied, why));
        }
        Request::Measure(_) if !caller.is_root() => {
            let why = "only root may measure paths, because that fills them: use sudo";
            bail!(Failure::new(ErrorKind::Denied, why));
        }
        Request::PathChange(_) if !caller.is_root() => {
            let why = "only root may change how paths are used: use sudo";
            bail!(Failure::new(ErrorKind::Denied, why));
        }
        Request::Cleanup
        | Request::ForceCleanup
        | Request::PeerRemove { .. }
        | Request::PathChange(_) => true,
        _ => false,
    };
    let _turn = daemon.users.admit(caller, changes).await?;
    Ok(match request {
        Request::Status => Reply::Status(listing::status(daemon, caller).await?),
        Request::ConnList => {
            let conns = listing::visible(daemon, caller).await?;
            Reply::Conns(conns.into_iter().map(|(_, info)| info).collect())
        }
        Request::Enable { selector, bump } => {
            if bump.as_deref() == Some("plain") {
                return Err(
                    refused("plain is no bump: dibsctl disable returns connections to it").into(),
                );
            }
            let bump = Some(listing::bump_for(daemon, bump.as_deref())?.id);
            let changed = switching::change(daemon, caller, &selector, bump.into(), progress);
            Reply::Changed(changed.await?)
        }
        Request::Disable { selector, force } => {
            let goal = Goal {
                bump: None,
                ground: Ground::forced(force),
            };
            Reply::Changed(switching::change(daemon, caller, &selector, goal, progress).await?)
        }
        Request::RuleAdd(rule) => Reply::Rule(rule_add(daemon, caller, rule).await?),
        Request::RuleList => {
            let state = daemon.state.borrow();
            let seen = state
                .rules
                .listed()
                .filter(|rule| caller.may(rule.only_user()));
            Reply::Rules(seen.map(Rule::info).collect())
        }
        Request::RuleDel { id, force } => {
            Reply::RuleGone(rule_del(daemon, caller, id, force).await?)
        }
        Request::PathList => Reply::Paths(listing::path_list(daemon).await?),
        Request::PathPreferences => {
            Reply::Preferences(daemon.preferences.borrow().info(&daemon.config))
        }
        Request::PathChange(change) => Reply::Preferences(paths::change(daemon, change).await?),
        Request::Measure(wanted) => Reply::Measured(paths::measure(daemon, wanted).await?),
        Request::PeerList => Reply::Peers(listing::peer_list(daemon).await?),
        Request::PeerRemove { name, force } => {
            peer_remove(daemon, &name, force).await?;
            Reply::Done
        }
        Request::BumpList => Reply::Bumps(listing::bump_list(daemon).await?),
        Request::Events => Reply::Following,
        Request::Cleanup | Request::ForceCleanup => {
            cleanup(daemon, request == Request::ForceCleanup).await?;
            Reply::Done
        }
    })
}

/// Takes all connections to plain, and everything out of the kernel; what plain does not carry breaks by that, which
/// takes `force`.
async fn cleanup(daemon: &Daemon, force: bool) -> anyhow::Result<()> {
    let up = sessions::sessions(daemon).await?;
    // Peers whose rules want otherwise keep their part, and answer into nothing.
    let told = async || -> anyhow::Result<Vec<Live>> {
        let mut told = on_bumps(daemon).await?;
        told.retain(|live| up[live.peer]);
        Ok(told)
    };
    if !force && let Some(breaks) = knocking::breaks_in_plain(daemon).await? {
        bail!(refused(format!(
            "nothing was changed: {breaks}; --force removes everything anyway"
        )));
    }
    take_to_plain(daemon, &told().await?).await?;
    daemon.state.borrow_mut().rules.suspend();
    steering::steer(daemon).await?;
    // Until then connections began on bumps, by rules.
    take_to_plain(daemon, &told().await?).await?;
    {
        let mut state = daemon.state.borrow_mut();
        state.conns.clear();
        for peer in &mut state.peers {
            peer.wants.clear();
        }
    }
    daemon.save_or_warn();
    engine::wants::send_all(daemon).await;
    steering::tell_flow_schedulers(daemon)?;
    steering::remove_all(daemon, false).await?;
    daemon.events.tell(
        "cleanup",
        "everything was removed from the kernel; rules of the file wait for SIGHUP or a restart"
            .to_owned(),
        &[],
    );
    Ok(())
}

async fn on_bumps(daemon: &Daemon) -> anyhow::Result<Vec<Live>> {
    let lives = daemon.connections().await?.into_iter();
    let on = lives.filter(|live| !live.over && daemon.bump_of(live).is_some());
    Ok(on.collect())
}

/// Takes connections to plain, whatever rules say and whether plain carries them or not.
async fn take_to_plain(daemon: &Daemon, conns: &[Live]) -> anyhow::Result<()> {
    marking::overrule(daemon, conns).await?;
    let goal = Goal {
        bump: None,
        ground: Ground::Forced,
    };
    switching::choose(daemon, conns, goal, &Progress::default()).await?;
    Ok(())
}

/// Forgets a peer that joined, and has the daemon start again without it. What is on a bump to it breaks if plain does not
/// carry it, which takes `force`.
async fn peer_remove(daemon: &Daemon, name: &str, force: bool) -> anyhow::Result<()> {
    listing::check_peer(daemon, Some(name))?;
    let store = startup::store(&daemon.config);
    if !store.has_joined(name) {
        bail!(refused(format!(
            "peer {name} comes from the configuration file: delete it there, and restart dibsd"
        )));
    }
    let of_peer = |live: &Live| daemon.peer_name(live.peer) == name;
    let theirs: Vec<Live> = { on_bumps(daemon).await?.into_iter() }
        .filter(of_peer)
        .collect();
    if !force && let Some(first) = theirs.first() {
        bail!(refused(format!(
            "peer {name} was not removed: {} connection(s) on bumps to it may break, such as {}; dibsctl peer remove {name} \
             --force removes it anyway",
            theirs.len(),
            first.pair
        )));
    }
    let up = sessions::sessions(daemon).await?;
    let told: Vec<Live> = { theirs.into_iter() }
        .filter(|live| up[live.peer])
        .collect();
    take_to_plain(daemon, &told).await?;
    store.remove(name).context("cannot remove the peer")?;
    let text = format!("peer {name} was removed: dibsd starts again");
    daemon
        .events
        .tell("peer_removed", text, &[("peer", name.to_owned())]);
    daemon.wakers.wake(Task::Restart);
    Ok(())
}

/// Rules of a member of the group, of which every packet to a peer may have to be compared with each.
const RULES_OF_UID: usize = 64;
/// Those of all members, for one person may have many uids (subuid(5)).
const RULES_OF_MEMBERS: usize = 256;

/// Makes a rule. The caller of this has its turn to change things.
pub(crate) async fn rule_add(
    daemon: &Daemon,
    caller: Caller,
    wanted: NewRule,
) -> anyhow::Result<RuleMade> {
    may_add(daemon, caller, &wanted)?;
    if let Some(Err(message)) = wanted.scheduler.as_deref().map(scheduler) {
        bail!(Failure::new(ErrorKind::NotFound, message));
    }
    let bump = match wanted.bump.as_str() {
        DIRECT => None,
        "plain" => {
            let why =
                format!("plain is no bump: --bump {DIRECT} has new connections leave in plain");
            return Err(refused(why).into());
        }
        name => Some(listing::bump_for(daemon, Some(name))?),
    };
    let id = bump.as_ref().map(|bump| bump.id);
    let (rule, displaced) = rule_of(daemon, caller, &wanted, id).await?;
    let lives = daemon.connections().await?;
    check_meant(daemon, &rule, &lives).await?;
    let (id, info, by) = (rule.id, rule.info(), caller.uid);
    let mut warnings = sessions::in_the_way(daemon, &rule);
    warnings.extend(sessions::shown_late(daemon, &rule));
    let audience = rule.audience();
    let wanted = SavedRule {
        id,
        rule: wanted,
        by: Some(by),
    };
    let rules = daemon
        .state
        .borrow_mut()
        .rules
        .with(rule, wanted, &displaced);
    let gone: Vec<Rule> = { displaced.iter() }
        .filter(|(rule, _)| rule.holds)
        .map(|(rule, _)| rule.clone())
        .collect();
    let gone = gone.as_slice().into();
    let Replaced { kept, unfound, .. } =
        engine::rules::replace(daemon, rules, gone, &lives).await?;
    warnings.extend(
        unfound
            .iter()
            .map(|(pair, why)| switching::unfound(pair, *why)),
    );
    if let Some(why) = kept.values().next() {
        tracing::warn!(
            "{} connection(s) of deleted rules stay on their bumps: {why}",
            kept.len()
        );
    }
    if let Some(warning) = bump.and_then(|bump| bump.warning) {
        tracing::warn!("{warning}");
    }
    daemon.events.tell_of(
        audience,
        "rule_added",
        match info.bump.as_str() {
            DIRECT => format!("rule {id} lets connections leave directly"),
            bump => format!("rule {id} puts connections on {bump}"),
        },
        &[("rule", id.to_string()), ("bump", info.bump.clone())],
    );
    for (rule, why) in &displaced {
        tell_displaced(daemon, rule, id, why);
    }
    Ok(RuleMade {
        rule: info,
        displaced: displaced.iter().map(|(rule, _)| rule.info()).collect(),
        warnings,
    })
}

/// The rule that a user wants, as the kernel takes it, and the rules that give way to it.
async fn rule_of(
    daemon: &Daemon,
    caller: Caller,
    wanted: &NewRule,
    bump: Option<BumpId>,
) -> anyhow::Result<(Rule, Vec<Displaced>)> {
    let behind = |name: &str| {
        let peer = daemon.config.peers.iter().find(|peer| peer.name == name);
        peer.map(|peer| peer.addresses.clone())
    };
    let peer = match &wanted.selector {
        Selector::Match(named) => named.peer.as_deref(),
        _ => None,
    };
    listing::check_peer(daemon, peer)?;
    if let Some(bump) = bump
        && let Some(why) = sessions::lacking(daemon, peer, bump).await?
    {
        bail!(refused(why));
    }
    let id = daemon.state.borrow().rules.next();
    let now = dibs_io::local_time();
    let mut rule = rules::of_user(id, wanted, caller.uid, bump, now, behind).map_err(refused)?;
    let cannot_be = |why: String| refused(format!("the rule was not added: {why}"));
    let displaced =
        rules::displaced(&rule, daemon.state.borrow().rules.all()).map_err(cannot_be)?;
    let mut steerer = daemon.kernel.steerer().await;
    match rule_changes::probe(steerer.steering(), &daemon.config, &mut rule).await? {
        Some(why) => Err(cannot_be(why).into()),
        None => Ok((rule, displaced)),
    }
}

/// Refuses a rule that live connections could not follow, or that could not be held.
async fn check_meant(daemon: &Daemon, rule: &Rule, lives: &[Live]) -> anyhow::Result<()> {
    let up = sessions::sessions(daemon).await?;
    let moves = rule.holds && rule.bump_id().is_some();
    let meant = lives.iter().filter(|live| moves && !live.over);
    let meant: Vec<Live> = meant.filter(|live| rule.means(live)).copied().collect();
    // What requires its bump is to wait where there is no session, what prefers it is plain there.
    let stuck = meant.iter().filter(|live| !up[live.peer]);
    let stuck: Vec<Live> = stuck.copied().collect();
    if rule.level == Level::Usual && !stuck.is_empty() {
        bail!(listing::no_session(daemon, &stuck));
    }
    if let Some((pair, why)) = connections::translated(&daemon.kernel, &meant)
        .await?
        .iter()
        .next()
    {
        bail!(refused(format!(
            "the connection {pair} cannot follow the rule: {why}"
        )));
    }
    check_united(daemon, rule, lives, &meant).await?;
    let bump = rule.bump_id();
    let addresses = meant.iter().map(|live| live.pair.src);
    // What requires its bump is to wait where there is no device.
    let fault = devices::device_fault(&daemon.host, &daemon.bumps, bump, addresses).await?;
    if let Some(why) = fault.filter(|_| rule.level != Level::Require) {
        bail!(refused(format!("{why}: nothing was changed")));
    }
    let carriers = devices::carriers(&daemon.host, &daemon.bumps, bump, &meant).await?;
    if let Some(carrier) = carriers.first() {
        bail!(refused(format!(
            "the rule would move the connection to {}, which carries the bump's device, into that device: \
             exclude it, or let the device use UDP",
            carrier.pair.destination()
        )));
    }
    match marking::unbacked(daemon, Some(rule)).await {
        Some(why) => Err(refused(format!(
            "the rule was not added, because it would not survive a flush of the firewall: {why}"
        ))
        .into()),
        None => Ok(()),
    }
}

/// Refuses a rule that would move some subflows of an MPTCP connection, and others not.
async fn check_united(
    daemon: &Daemon,
    rule: &Rule,
    lives: &[Live],
    meant: &[Live],
) -> anyhow::Result<()> {
    let beyond = connections::out_of_reach(&daemon.host, meant).await?;
    if let Some((pair, why)) = beyond.iter().next() {
        bail!(refused(format!(
            "the connection {pair} cannot follow the rule: {why}"
        )));
    }
    let is_left_out = |live: &&&Live| !live.over && !rule.means(live);
    let moves = rule.bump_id().is_some();
    let united = connections::united(lives, |live| moves && !live.over && rule.means(live));
    match united.iter().find(is_left_out) {
        None => Ok(()),
        Some(Live { pair, .. }) => bail!(refused(format!(
            "the rule selects some subflows of an MPTCP connection, but not {pair}: select all of them"
        ))),
    }
}

/// Tells that a rule of a member of the group gave way to one of root's, to both.
fn tell_displaced(daemon: &Daemon, rule: &Rule, to: RuleId, why: &str) {
    let Rule { id, by, .. } = rule;
    daemon.events.tell_of(
        rule.audience(),
        "rule_displaced",
        format!("rule {id} of uid {by} contradicted one of root and was deleted: {why}"),
        &[("rule", id.to_string()), ("by", to.to_string())],
    );
}

/// Whether a user may make a rule (docs/threat-model.md, "Keys and the host"), and the configuration leaves it its strength.
fn may_add(daemon: &Daemon, caller: Caller, wanted: &NewRule) -> anyhow::Result<()> {
    if let (true, Some((message, hint))) = (wanted.require, daemon.config.excludes_require()) {
        bail!(refused(format!("{message}: {hint} in the configuration")));
    }
    let denied = |message: String| Err(Failure::new(ErrorKind::Denied, message).into());
    if !caller.is_root() && wanted.scheduler.is_some() {
        return denied("only root may add rules with a scheduler: use sudo".to_owned());
    }
    let own = matches!(&wanted.selector, Selector::Match(named) if named.uid == Some(caller.uid));
    if !caller.is_root() && !own {
        return denied(format!(
            "only root may add rules for other users: add --uid {}",
            caller.uid
        ));
    }
    if !caller.is_root() && wanted.terms.has("match") {
        return denied("only root may add rules with a match of iptables: use sudo".to_owned());
    }
    may_have_more(daemon, caller)
}

/// Refuses members of the group more rules than packets should be compared with.
fn may_have_more(daemon: &Daemon, caller: Caller) -> anyhow::Result<()> {
    if caller.is_root() {
        return Ok(());
    }
    let state = daemon.state.borrow();
    let members = || state.rules.all().iter().filter(|rule| rule.is_of_member());
    let own = members().filter(|rule| rule.by == caller.uid).count();
    if own >= RULES_OF_UID {
        bail!(refused(format!(
            "uid {} has {RULES_OF_UID} rules, which is the limit: delete one first",
            caller.uid
        )));
    }
    if members().count() >= RULES_OF_MEMBERS {
        bail!(refused(format!(
            "the members of the group have {RULES_OF_MEMBERS} rules, which is the limit: root can delete some"
        )));
    }
    Ok(())
}

/// Deletes a rule. The caller of this has its turn to change things. `force`: its connections go to plain whether that
/// carries them or not.
pub(crate) async fn rule_del(
    daemon: &Daemon,
    caller: Caller,
    id: RuleId,
    force: bool,
) -> anyhow::Result<RuleGone> {
    let found = {
        let state = daemon.state.borrow();
        let mut rules = state.rules.all().iter();
        rules.find(|rule| rule.id == id).cloned()
    };
    let Some(rule) = found.filter(|rule| caller.may(rule.only_user())) else {
        let whose = if caller.is_root() { "" } else { " of yours" };
        bail!(Failure::new(
            ErrorKind::NotFound,
            format!("there is no rule {id}{whose}: see dibsctl rule list"),
        ));
    };
    if rule.origin == RuleOrigin::Config {
        bail!(refused(format!(
            "rule {id} comes from the configuration file: change it there"
        )));
    }
    if !caller.is_root() && rule.by != caller.uid {
        bail!(Failure::new(
            ErrorKind::Denied,
            format!("rule {id} is root's: use sudo"),
        ));
    }
    let lives = daemon.connections().await?;
    let rules = daemon.state.borrow().rules.without(id);
    let held = if rule.holds { &[rule.clone()][..] } else { &[] };
    let gone = Gone { rules: held, force };
    let replaced = engine::rules::replace(daemon, rules, gone, &lives).await;
    let replaced = replaced.with_context(|| format!("rule {id} was not changed"))?;
    let Replaced { freed, kept, .. } = replaced;
    daemon.events.tell_of(
        rule.audience(),
        "rule_deleted",
        format!("rule {id} was deleted; it had {freed} connection(s)"),
        &[("rule", id.to_string())],
    );
    let stay: Vec<Live> = { lives.into_iter() }
        .filter(|live| kept.contains_key(&live.pair))
        .collect();
    let infos = listing::describe(daemon, &stay).await?;
    let skipped = infos.into_iter().zip(&stay).map(|(info, live)| Skipped {
        id: info.id,
        local: info.local,
        remote: info.remote,
        reason: kept[&live.pair].to_string(),
    });
    Ok(RuleGone {
        id,
        kept: skipped.collect(),
    })
}
