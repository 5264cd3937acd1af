//! Rules of the configuration file: at the start, and anew on SIGHUP.
//!
//! Of the file only its rules are read anew; whatever else changed in it takes a restart, and is named in the log.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::bail;
use dibs_config::{Config, Level};
use dibs_control::RuleOrigin;
use dibs_switch::engine;
use tokio::signal::unix::Signal;

use crate::host::directory;
use crate::kernel::{backstop, connections};
use crate::rulebook::Rules;
use crate::rulebook::restoring::of_file;
use crate::rulebook::rules;
use crate::rulebook::rules::Rule;
use crate::rulebook::state_file::SavedRule;
use crate::switch::Daemon;
use crate::switch::host_changes;
use crate::switch::{marking, probing, reconcile, startup};

/// Reloads at each signal, one after the other: what a reload waits for holds up nothing else.
pub(crate) async fn keep(daemon: Rc<Daemon>, file: PathBuf, mut signal: Signal) {
    while signal.recv().await.is_some() {
        reload(&daemon, &file).await;
    }
}

/// SIGHUP: takes the rules of the file as they are now, and puts back what others removed, and what `cleanup`
/// suspended. A file that cannot be taken changes nothing, and leaves suspended what is.
async fn reload(daemon: &Daemon, file: &Path) {
    if let Err(error) = take_rules(daemon, file).await {
        tracing::error!("the file is not taken, and rules stay as they are: {error:#}");
    }
    let done = async {
        host_changes::refresh_interfaces(daemon).await?;
        probing::widen_rules(daemon).await?;
        reconcile::steer(daemon).await
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
    let rules = directory::ask(move || of_file(&file_says, &carried, now)).await??;
    let _turn = daemon.users.own_turn().await;
    let mut rules = probed(daemon, &config, rules).await?;
    let lives = connections::all(daemon).await?;
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
                    tracing::warn!("rule {id} of uid {by} gives way to the file: {why}");
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
    tracing::info!("{} rule(s) of the file hold", config.rules.len());
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
        let mut refused = probing::probe(daemon, rule).await?;
        if refused.is_none() && is_required {
            refused = backstop::unbacked(daemon, Some(rule)).await;
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
            "{} of the file changed: that takes a restart (connections stay on their bumps)",
            changed.join(", ")
        );
    }
}
