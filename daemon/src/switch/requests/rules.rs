//! Rules that users make and delete while the daemon runs.

use anyhow::{Context as _, bail};
use dibs_config::Level;
use dibs_control::{
    ErrorKind, Failure, NewRule, RuleGone, RuleId, RuleMade, RuleOrigin, Selector, Skipped,
};
use dibs_settings::BumpId;
use dibs_switch::engine;
use dibs_switch::engine::rules::Gone;

use super::named;
use crate::control::{Caller, refused};
use crate::host::live::Live;
use crate::host::preferences::scheduler;
use crate::kernel::{connections, devices};
use crate::rulebook::rules;
use crate::rulebook::rules::{Displaced, Rule};
use crate::rulebook::state_file::SavedRule;
use crate::switch::{Daemon, backstop, listing, rule_changes, sessions, silence};

/// Rules of a member of the group, of which every packet to a peer may have to be compared with each.
const RULES_OF_UID: usize = 64;
/// Those of all members, for one person may have many uids (subuid(5)).
const RULES_OF_MEMBERS: usize = 256;

/// Makes a rule. The caller of this has its turn to change things.
pub(super) async fn rule_add(
    daemon: &Daemon,
    caller: Caller,
    wanted: NewRule,
) -> anyhow::Result<RuleMade> {
    may_add(daemon, caller, &wanted)?;
    if let Some(Err(message)) = wanted.scheduler.as_deref().map(scheduler) {
        bail!(Failure::new(ErrorKind::NotFound, message));
    }
    let bump = named::bump_for(daemon, Some(&wanted.bump))?;
    let (rule, displaced) = rule_of(daemon, caller, &wanted, bump.id).await?;
    let lives = daemon.connections().await?;
    check_meant(daemon, &rule, &lives).await?;
    let (id, info, by) = (rule.id, rule.info(), caller.uid);
    let warnings = silence::in_the_way(daemon, &rule);
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
    let (_, kept) = engine::rules::replace(daemon, rules, gone, &lives).await?;
    if let Some(why) = kept.values().next() {
        tracing::warn!(
            "{} connection(s) of displaced rules stay on their bumps: {why}",
            kept.len()
        );
    }
    if let Some(warning) = bump.warning {
        tracing::warn!("{warning}");
    }
    daemon.events.tell_of(
        audience,
        "rule_added",
        format!("rule {id} puts connections on {}", bump.name),
        &[("rule", id.to_string()), ("bump", bump.name.clone())],
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
    bump: BumpId,
) -> anyhow::Result<(Rule, Vec<Displaced>)> {
    let behind = |name: &str| {
        let peer = daemon.config.peers.iter().find(|peer| peer.name == name);
        peer.map(|peer| peer.addresses.clone())
    };
    let peer = match &wanted.selector {
        Selector::Match(named) => named.peer.as_deref(),
        _ => None,
    };
    named::check_peer(daemon, peer)?;
    if let Some(why) = sessions::lacking(daemon, peer, bump).await? {
        bail!(refused(why));
    }
    let id = daemon.state.borrow().rules.next();
    let now = dibs_io::local_time();
    let mut rule = rules::of_user(id, wanted, caller.uid, bump, now, behind).map_err(refused)?;
    let cannot_be = |why: String| refused(format!("the rule cannot be made: {why}"));
    let displaced =
        rules::displaced(&rule, daemon.state.borrow().rules.all()).map_err(cannot_be)?;
    match rule_changes::probe(daemon, &mut rule).await? {
        Some(why) => Err(cannot_be(why).into()),
        None => Ok((rule, displaced)),
    }
}

/// Refuses a rule that live connections could not follow, or that could not be held.
async fn check_meant(daemon: &Daemon, rule: &Rule, lives: &[Live]) -> anyhow::Result<()> {
    let up = sessions::sessions(daemon).await?;
    let meant = lives.iter().filter(|live| rule.holds && !live.over);
    let meant: Vec<Live> = meant.filter(|live| rule.means(live)).copied().collect();
    // What requires its bump is to wait where there is no session, what prefers it is plain there.
    let stuck = meant.iter().filter(|live| !up[live.peer]);
    let stuck: Vec<Live> = stuck.copied().collect();
    if rule.level == Level::Usual && !stuck.is_empty() {
        bail!(named::no_session(daemon, &stuck));
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
    let bump = Some(rule.bump_id());
    let addresses = meant.iter().map(|live| live.pair.src);
    // What requires its bump is to wait where there is no device.
    let fault = devices::device_fault(&daemon.host, &daemon.bumps, bump, addresses).await?;
    if let Some(why) = fault.filter(|_| rule.level != Level::Require) {
        bail!(refused(format!("{why}: nothing was changed")));
    }
    let carriers = devices::carriers(&daemon.host, &daemon.bumps, bump, &meant).await?;
    if let Some(carrier) = carriers.first() {
        bail!(refused(format!(
            "the rule would put the connection to {} that carries the bump's device into that \
             device: except it, or have the device go by UDP",
            carrier.pair.destination()
        )));
    }
    match backstop::unbacked(daemon, Some(rule)).await {
        Some(why) => Err(refused(format!(
            "the rule cannot be made: it would not be held when others flush the firewall: {why}; nothing \
             was changed"
        )).into()),
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
    let united = connections::united(lives, |live| !live.over && rule.means(live));
    match united.iter().find(is_left_out) {
        None => Ok(()),
        Some(Live { pair, .. }) => bail!(refused(format!(
            "the rule would leave the subflow {pair} of an MPTCP connection in plain of which it means others: have \
             it mean all of them"
        ))),
    }
}

/// Tells that a rule of a member of the group gave way to one of root's, to both.
fn tell_displaced(daemon: &Daemon, rule: &Rule, to: RuleId, why: &str) {
    let Rule { id, by, .. } = rule;
    daemon.events.tell_of(
        rule.audience(),
        "rule_displaced",
        format!("rule {id} of uid {by} gave way to root and is gone: {why}"),
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
        return denied("only root makes rules with a scheduler".to_owned());
    }
    let own = matches!(&wanted.selector, Selector::Match(named) if named.uid == Some(caller.uid));
    if !caller.is_root() && !own {
        return denied(format!(
            "only root makes rules for others: add --uid {}",
            caller.uid
        ));
    }
    if !caller.is_root() && wanted.terms.has("match") {
        return denied("only root makes rules with a match of iptables".to_owned());
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
            "uid {} has {RULES_OF_UID} rules, and may not have more: delete one first",
            caller.uid
        )));
    }
    if members().count() >= RULES_OF_MEMBERS {
        bail!(refused(format!(
            "the members of the group have {RULES_OF_MEMBERS} rules, and may not have more: \
             root can delete some"
        )));
    }
    Ok(())
}

/// Deletes a rule. The caller of this has its turn to change things. `force`: its connections go to plain whether that
/// carries them or not.
pub(super) async fn rule_del(
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
            format!("there is no rule {id}{whose}"),
        ));
    };
    if rule.origin == RuleOrigin::Config {
        bail!(refused(format!(
            "rule {id} stands in the configuration file: change it there"
        )));
    }
    if !caller.is_root() && rule.by != caller.uid {
        bail!(Failure::new(
            ErrorKind::Denied,
            format!("rule {id} is root's: only root deletes it"),
        ));
    }
    let lives = daemon.connections().await?;
    let rules = daemon.state.borrow().rules.without(id);
    let held = if rule.holds { &[rule.clone()][..] } else { &[] };
    let gone = Gone { rules: held, force };
    let replaced = engine::rules::replace(daemon, rules, gone, &lives).await;
    let (freed, kept) = replaced.with_context(|| format!("rule {id} stays as it was"))?;
    daemon.events.tell_of(
        rule.audience(),
        "rule_deleted",
        format!("rule {id} is gone, {freed} connection(s) with it"),
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
