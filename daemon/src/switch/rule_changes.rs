//! Rules that change while the daemon runs: those of the file anew on SIGHUP, once they can be resolved, and once both IP
//! versions take them; those of a time of day and those that prefer their bump with the time and the sessions.
//!
//! Of the file only its rules are read anew; whatever else changed in it takes a restart, and is named in the log. A rule
//! that names a time of day holds when it begins, and no more when it ends, for connections that are there already too;
//! new ones the kernel sorts by itself, also while no daemon runs. A rule that prefers its bump asks which peers have a
//! session: elsewhere what begins is plain, and moved once there is one. What is on a bump stays there, whatever becomes of
//! the session.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use dibs_config::{Config, Level};
use dibs_control::{RuleId, RuleOrigin};
use dibs_io::LocalTime;
use dibs_policy::{ClassRule, Error, Family, Probed, Steering};
use dibs_settings::Term;
use dibs_switch::engine;
use tokio::signal::unix::Signal;

use crate::host::process;
use crate::rulebook::rules::{Narrowed, Rule, Unresolved, name};
use crate::rulebook::state_file::SavedRule;
use crate::rulebook::{Rules, of_file, rules};
use crate::switch::{Daemon, Task, marking, startup, steering};

/// Reloads at each signal, one after the other: what a reload waits for holds up nothing else.
pub(crate) async fn keep_reloading(daemon: Rc<Daemon>, file: PathBuf, mut signal: Signal) {
    while signal.recv().await.is_some() {
        reload(&daemon, &file).await;
    }
}

/// SIGHUP: takes the rules of the file as they are now, and puts back what others removed, and what `cleanup`
/// suspended. A file that cannot be taken changes nothing, and leaves suspended what is.
async fn reload(daemon: &Daemon, file: &Path) {
    if let Err(error) = take_rules(daemon, file).await {
        tracing::error!(
            "the configuration file was not applied, and rules stay as they are: {error:#}"
        );
    }
    let done = async {
        steering::refresh_interfaces(daemon).await?;
        widen_rules(daemon).await?;
        steering::steer(daemon).await
    };
    match done.await {
        Ok(steered) => tracing::info!("steering applied again, {} step(s)", steered.steps),
        Err(error) => tracing::error!("steering: {error:#}"),
    }
    marking::mark_all_choices(daemon).await;
    engine::wants::send_all(daemon).await;
}

async fn take_rules(daemon: &Daemon, file: &Path) -> anyhow::Result<()> {
    let config = startup::load(file)?;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    warn_of_other_changes(daemon, &config);
    let (file_says, carried) = (config.clone(), daemon.bumps.all().to_vec());
    let now = dibs_io::local_time();
    let rules = process::ask_directory(move || of_file(&file_says, &carried, now)).await??;
    let _turn = daemon.users.own_turn().await;
    let mut rules = probed(daemon, &config, rules).await?;
    let lives = daemon.connections().await?;
    let (user_rules, gone) = {
        let state = daemon.state.borrow();
        let (of_file, of_users): (Vec<&Rule>, Vec<&Rule>) =
            { state.rules.all().iter() }.partition(|rule| rule.origin == RuleOrigin::Config);
        let mut gone: Vec<&Rule> = of_file;
        for rule in of_users {
            match rules::contradicted(rule, &rules) {
                None => rules.push(rule.clone()),
                Some(why) => {
                    let (id, by) = (rule.id, rule.by);
                    tracing::warn!(
                        "rule {id} of uid {by} contradicts the configuration file and was deleted: {why}"
                    );
                    gone.push(rule);
                }
            }
        }
        let stays = |saved: &&SavedRule| rules.iter().any(|rule| rule.id == saved.id);
        let user_rules: Vec<SavedRule> =
            state.rules.saved().iter().filter(stays).cloned().collect();
        let gone: Vec<Rule> = gone
            .into_iter()
            .filter(|rule| rule.holds)
            .cloned()
            .collect();
        (user_rules, gone)
    };
    let rules = Rules {
        rules,
        saved: user_rules,
        suspended: false,
    };
    engine::rules::replace(daemon, rules, gone.as_slice().into(), &lives).await?;
    tracing::info!(
        "{} rule(s) of the configuration file are in force",
        config.rules.len()
    );
    Ok(())
}

/// The rules of a file, as the kernel takes them.
async fn probed(
    daemon: &Daemon,
    config: &Config,
    mut rules: Vec<Rule>,
) -> anyhow::Result<Vec<Rule>> {
    for (index, rule) in rules.iter_mut().enumerate() {
        let is_required = rule.level == Level::Require;
        if let (true, Some((why, hint))) = (is_required, daemon.config.excludes_require()) {
            bail!("rule {}: {why}: {hint}, and restart the daemon", rule.id);
        }
        let mut refused = probe(
            daemon.kernel.steerer().await.steering(),
            &daemon.config,
            rule,
        )
        .await?;
        if refused.is_none() && is_required {
            refused = marking::unbacked(daemon, Some(rule)).await;
        }
        if let Some(why) = refused {
            return Err(config
                .refuse(&format!("rule.{index}.bump"), why, None)
                .into());
        }
    }
    Ok(rules)
}

fn warn_of_other_changes(daemon: &Daemon, config: &Config) {
    let ours = &daemon.config;
    let bumps = |config: &Config| format!("{:?}", config.bumps);
    let sections = [
        ("[daemon]", ours.daemon != config.daemon),
        ("[[path]]", ours.paths != config.paths),
        ("[prefer]", ours.prefer != config.prefer),
        ("[[peer]]", ours.peers != config.peers),
        ("[[bump]]", bumps(ours) != bumps(config)),
    ];
    let changed = sections.iter().filter(|(_, changed)| *changed);
    let changed: Vec<&str> = changed.map(|(section, _)| *section).collect();
    if !changed.is_empty() {
        tracing::warn!(
            "{} of the configuration file changed: restart dibsd to apply it (connections stay on their bumps)",
            changed.join(", ")
        );
    }
}

/// Tries rules again that are kept to one family: what the other lacked may be there by now.
pub(crate) async fn widen_rules(daemon: &Daemon) -> anyhow::Result<()> {
    let is_narrow = |rule: &&Rule| rule.narrowed.is_some();
    if !daemon
        .state
        .borrow()
        .rules
        .in_force()
        .any(|rule| is_narrow(&rule))
    {
        return Ok(());
    }
    let _turn = daemon.users.own_turn().await;
    let narrow: Vec<Rule> = {
        let state = daemon.state.borrow();
        state.rules.in_force().filter(is_narrow).cloned().collect()
    };
    let mut wider = Vec::new();
    for mut rule in narrow {
        let mut steerer = daemon.kernel.steerer().await;
        let refused = try_out(steerer.steering(), &daemon.config, &mut rule).await?;
        if refused.is_none() && rule.narrowed.is_none() {
            wider.push((rule.id, rule.audience()));
        }
    }
    if wider.is_empty() {
        return Ok(());
    }
    let ids: Vec<RuleId> = wider.iter().map(|(id, _)| *id).collect();
    let rules = daemon.state.borrow().rules.widened(&ids);
    let lives = daemon.connections().await?;
    engine::rules::turn(daemon, rules, [].as_slice().into(), &lives).await?;
    for (id, audience) in &wider {
        daemon.events.tell_of(
            *audience,
            "rule_widened",
            format!("rule {id} is in force for IPv4 and IPv6 now"),
            &[("rule", id.to_string())],
        );
    }
    Ok(())
}

/// Between two looks for a user.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Between two trials of rules that iptables did not take.
const TRY_EVERY: Duration = Duration::from_secs(10);

/// Looks for users, and tries rules out, again, as long as a rule is not resolved.
pub(crate) async fn keep_resolving(daemon: Rc<Daemon>) {
    loop {
        let due = daemon.wakers.woken(Task::Users);
        match next_look(&daemon) {
            None => due.await,
            Some(wait) => drop(tokio::time::timeout(wait, due).await),
        }
        let done = resolve_rules(&daemon).await;
        daemon.events.note("resolve rules", done);
    }
}

/// Wait before the next look; none if all rules are resolved.
fn next_look(daemon: &Daemon) -> Option<Duration> {
    let state = daemon.state.borrow();
    let lacking = { state.rules.all().iter() }.filter_map(|rule| rule.unresolved.as_ref());
    let waits = lacking.map(|rule| match rule.is_refused {
        true => TRY_EVERY,
        false => LOOK_EVERY,
    });
    waits.min()
}

/// Has rules hold as they are, where that can be by now; connections follow.
async fn resolve_rules(daemon: &Daemon) -> anyhow::Result<()> {
    let names: BTreeSet<String> = {
        let state = daemon.state.borrow();
        let lacking = { state.rules.all().iter() }.filter(|rule| rule.unresolved.is_some());
        let names = lacking.filter_map(|rule| rule.selection.user().cloned());
        names.collect()
    };
    let look_up = move || -> BTreeMap<String, u32> {
        let known = names.into_iter().filter_map(|name| {
            let uid = rules::uid_of(&name).ok()?;
            Some((name, uid))
        });
        known.collect()
    };
    let known = tokio::task::spawn_blocking(look_up).await?;
    let _turn = daemon.users.own_turn().await;
    let (mut rules, saved, suspended) = {
        let state = daemon.state.borrow();
        let book = &state.rules;
        (
            book.all().to_vec(),
            book.saved().to_vec(),
            book.is_suspended(),
        )
    };
    let (mut gone, mut resolved, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    for rule in &mut rules {
        let Some(Unresolved { is_refused, .. }) = rule.unresolved else {
            continue;
        };
        let named = rule.selection.user();
        let uid = named
            .map_or(rule.selection.uid(), |name| known.get(name))
            .copied();
        if named.is_some() && uid.is_none() {
            continue;
        }
        match resolved_rule(daemon, rule.clone(), uid).await? {
            Ok(now) => {
                let before = std::mem::replace(rule, now);
                resolved.push((rule.id, rule.audience()));
                gone.extend(before.holds.then_some(before));
            }
            // That is known.
            Err(_) if is_refused => {}
            Err(why) => refused.push(format!("rule {}: {why}", rule.id)),
        }
    }
    if !resolved.is_empty() {
        let lives = daemon.connections().await?;
        let rules = Rules {
            rules,
            saved,
            suspended,
        };
        engine::rules::replace(daemon, rules, gone.as_slice().into(), &lives).await?;
    }
    for (id, audience) in resolved {
        daemon.events.tell_of(
            audience,
            "rule_resolved",
            format!("rule {id} is in force now"),
            &[("rule", id.to_string())],
        );
    }
    anyhow::ensure!(refused.is_empty(), "{}", refused.join("; "));
    Ok(())
}

/// A rule as it is, whose user has this number if it names one, or why the kernel does not take it.
async fn resolved_rule(
    daemon: &Daemon,
    mut rule: Rule,
    uid: Option<u32>,
) -> anyhow::Result<Result<Rule, String>> {
    if let Err(why) = rule.resolve(uid, dibs_io::local_time()) {
        return Ok(Err(why));
    }
    let mut refused = probe(
        daemon.kernel.steerer().await.steering(),
        &daemon.config,
        &mut rule,
    )
    .await?;
    if refused.is_none() && rule.level == Level::Require {
        refused = marking::unbacked(daemon, Some(&rule)).await;
    }
    Ok(refused.map_or(Ok(rule), Err))
}

/// See [`probe_all`].
pub(crate) async fn probe_rules(daemon: &Daemon) -> anyhow::Result<()> {
    let mut rules = daemon.state.borrow().rules.all().to_vec();
    let mut steerer = daemon.kernel.steerer().await;
    probe_all(steerer.steering(), &daemon.config, &mut rules).await?;
    daemon.state.borrow_mut().rules.keep(rules);
    Ok(())
}

/// A clock that was set, or another time zone, is noticed after this.
const HOURS_EVERY: Duration = Duration::from_secs(10);

/// Follows the time of day for good.
pub(crate) async fn follow_hours(daemon: Rc<Daemon>) {
    loop {
        if let Err(error) = turn_rules(&daemon, dibs_io::local_time()).await {
            tracing::warn!("cannot apply rules with a time of day: {error:#}");
        }
        let due = daemon.wakers.woken(Task::Hours);
        let next = daemon.state.borrow().rules.next_turn(dibs_io::local_time());
        match next {
            Some(next) => drop(tokio::time::timeout(next.min(HOURS_EVERY), due).await),
            None => due.await,
        }
    }
}

/// Has rules hold, or no more, that are to from now on.
async fn turn_rules(daemon: &Daemon, now: LocalTime) -> anyhow::Result<()> {
    if !daemon.state.borrow().rules.are_to_turn(now) {
        return Ok(());
    }
    let _turn = daemon.users.own_turn().await;
    let lives = daemon.connections().await?;
    // The kernel's clock is UTC.
    let (rules, turned) = daemon.state.borrow_mut().rules.turned(now);
    let gone: Vec<Rule> = { turned.iter() }
        .filter(|rule| !rule.holds)
        .cloned()
        .collect();
    engine::rules::turn(daemon, rules, gone.as_slice().into(), &lives).await?;
    for rule in &turned {
        let holds = if rule.holds {
            "holds"
        } else {
            "is not in force"
        };
        daemon.events.tell_of(
            rule.audience(),
            "rule_turned",
            format!("rule {} {holds} at this time of day", rule.id),
            &[("rule", rule.id.to_string())],
        );
    }
    Ok(())
}

/// Has the kernel look at a rule, and keeps it to the family in which it is taken, if that is one. Why it
/// cannot be, if it is taken in none, or in one and requires its bump: to make do with that is its caller's choice.
async fn try_out(
    steering: &mut Steering,
    config: &Config,
    rule: &mut Rule,
) -> anyhow::Result<Option<String>> {
    if !rule.selection.terms().iter().any(Term::is_special) {
        return Ok(None);
    }
    let peers = || config.peers.iter().flat_map(|peer| &peer.addresses);
    let families = [
        (Family::V4, peers().any(|net| net.addr().is_ipv4())),
        (Family::V6, peers().any(|net| net.addr().is_ipv6())),
    ];
    let families: Vec<Family> = families
        .iter()
        .filter_map(|(family, used)| (*used && rule.concerns(*family)).then_some(*family))
        .collect();
    rule.narrowed = None;
    // All of its classes match the same, but for ports and addresses.
    let Some(class) = rule.kernel_classes(0).next() else {
        // It waits for its user.
        return Ok(None);
    };
    let class = ClassRule {
        source: None,
        destination: None,
        ..class
    };
    let probed = match steering.probe(&class, &families).await {
        Ok(probed) => probed,
        Err(Error::Refused(why)) => return Ok(Some(format!("iptables refuses it: {why}"))),
        Err(error) => return Err(error).context("cannot test a rule"),
    };
    let Probed { families, refusal } = probed;
    let (Some((other, why)), [only]) = (refusal, families.as_slice()) else {
        return Ok(None);
    };
    let program = match other {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    };
    let why = format!("{program} refuses it: {why}");
    let refused = (rule.level == Level::Require).then(|| {
        let other = name(other);
        format!("it requires its bump for {other} too, but {why}")
    });
    rule.narrowed = Some(Narrowed { to: *only, why });
    Ok(refused)
}

/// Why the kernel does not take a rule, if it does not; see [`try_out`].
pub(crate) async fn probe(
    steering: &mut Steering,
    config: &Config,
    rule: &mut Rule,
) -> anyhow::Result<Option<String>> {
    let refused = try_out(steering, config, rule).await?;
    if refused.is_none() {
        tell_narrowed(rule);
    }
    Ok(refused)
}

/// As [`try_out`], for all rules that the daemon starts with.
///
/// A rule of the file that is refused is [not resolved](crate::rulebook); a rule of the user is left out, and the log says so.
/// But what one that was taken once requires is not to go in plain where it can be held: it is kept to the family that takes it.
///
/// # Errors
/// The kernel cannot be asked.
async fn probe_all(
    steering: &mut Steering,
    config: &Config,
    rules: &mut Vec<Rule>,
) -> anyhow::Result<()> {
    let mut kept = Vec::with_capacity(rules.len());
    for mut rule in std::mem::take(rules) {
        match try_out(steering, config, &mut rule).await? {
            None => {
                tell_narrowed(&rule);
                kept.push(rule);
            }
            Some(why) if rule.origin == RuleOrigin::Config => {
                rule.hold_coarsely(why, true, dibs_io::local_time());
                let warning = rule.warning().unwrap_or_default();
                let at_its_place = config.refuse(&place(&rule), warning, None);
                tracing::error!("{at_its_place}");
                kept.push(rule);
            }
            Some(_) if rule.narrowed.is_some() => {
                tell_narrowed(&rule);
                kept.push(rule);
            }
            Some(why) => tracing::warn!("rule {} was deleted: {why}", rule.id),
        }
    }
    *rules = kept;
    Ok(())
}

/// The place in the file of what iptables may refuse in a rule.
fn place(rule: &Rule) -> String {
    let mut special = { rule.selection.terms() }
        .iter()
        .filter(|term| term.is_special());
    let key = special.next_back().map_or("uid", Term::key);
    format!("rule.{}.{key}", rule.id - 1)
}

fn tell_narrowed(rule: &Rule) {
    match (rule.warning(), rule.level) {
        (None, _) => {}
        (Some(warning), Level::Require) => tracing::error!("{warning}"),
        (Some(warning), _) => tracing::warn!("{warning}"),
    }
}
