//! Rules of the configuration file: at the start, and anew on SIGHUP.
//!
//! Of the file only its rules are read anew; whatever else changed in it takes a restart, and is named in the log.

use std::path::Path;

use anyhow::bail;
use dibs_config::{Config, Level};
use dibs_control::RuleOrigin;
use dibs_io::LocalTime;

use crate::bumps::Carried;
use crate::daemon::Daemon;
use crate::rules::{self, Rule};
use crate::state_file::SavedRule;
use crate::wants;
use crate::{background, startup};

/// The rules of a file, in its order.
pub(crate) fn of_file(
    config: &Config,
    carried: &[Carried],
    now: LocalTime,
) -> Result<Vec<Rule>, dibs_config::Error> {
    let made = |(index, rule): (usize, &dibs_config::RuleConfig)| {
        let refuse = |key: &str, message, hint: Option<&str>| {
            config.refuse(
                &format!("rule.{index}.{key}"),
                message,
                hint.map(str::to_owned),
            )
        };
        let Some(bump) = carried.iter().find(|bump| bump.name == rule.bump) else {
            let message = format!("this daemon does not know the bump \"{}\"", rule.bump);
            return Err(refuse("bump", message, Some("restart it")));
        };
        rules::of_file(index as u64 + 1, rule, bump.id, now)
            .map_err(|message| refuse("user", message, None))
    };
    config.rules.iter().enumerate().map(made).collect()
}

/// Adds the rules that were made with `dibsctl` to those of the file, and returns those that still can be. The
/// file displaces all of them, root's those of members of the group: nothing saved keeps the daemon from
/// starting.
pub(crate) fn add_saved(
    config: &Config,
    carried: &[Carried],
    saved: &[SavedRule],
    rules: &mut Vec<Rule>,
) -> Vec<SavedRule> {
    let bump_id = |name: &str| carried.iter().find(|bump| bump.name == name).map(|b| b.id);
    let now = dibs_io::local_time();
    let behind = |name: &str| {
        let peer = config.peers.iter().find(|peer| peer.name == name);
        peer.map(|peer| peer.addresses.clone())
    };
    let mut sorted: Vec<&SavedRule> = saved.iter().collect();
    sorted.sort_by_key(|saved| (saved.maker() != rules::ROOT, saved.id));
    let mut kept = Vec::new();
    for saved in sorted {
        let SavedRule { id, rule, .. } = saved;
        let by = saved.maker();
        let made = match config.excludes_require().filter(|_| rule.require) {
            Some((message, hint)) => Err(format!("{message}: {hint} to make it again")),
            None => bump_id(&rule.bump)
                .ok_or_else(|| format!("this version does not carry the bump \"{}\"", rule.bump))
                .and_then(|bump| rules::of_user(*id, rule, by, bump, now, behind))
                .and_then(|made| match rules::contradicted(&made, rules) {
                    Some(why) => Err(why),
                    None => Ok(made),
                }),
        };
        match made {
            Ok(made) => {
                rules.push(made);
                kept.push(saved.clone());
            }
            Err(reason) => tracing::warn!(
                "rule {id} of uid {by}, which puts connections on \"{}\", is dropped: {reason}",
                rule.bump
            ),
        }
    }
    kept.sort_by_key(|saved| saved.id);
    kept
}

impl Daemon {
    /// SIGHUP: takes the rules of the file as they are now, and puts back what others removed, and what `cleanup`
    /// suspended. A file that cannot be taken changes nothing.
    pub(crate) async fn reload(&self, file: &Path) {
        self.state.borrow_mut().suspended = false;
        if let Err(error) = self.take_rules(file).await {
            tracing::error!("the file is not taken, and rules stay as they are: {error:#}");
        }
        let done = async {
            background::refresh_interfaces(self).await?;
            self.widen_rules().await?;
            self.steer().await
        };
        match done.await {
            Ok(steered) => tracing::info!("steering applied again, {} step(s)", steered.steps),
            Err(error) => tracing::error!("steering: {error:#}"),
        }
        self.mark_all_choices().await;
        wants::send_all(self).await;
    }

    async fn take_rules(&self, file: &Path) -> anyhow::Result<()> {
        let config = startup::load(file)?;
        for warning in config.warnings() {
            tracing::warn!("{warning}");
        }
        self.warn_of_other_changes(&config);
        let _turn = self.users.own_turn().await;
        let mut rules = self.probed(&config).await?;
        let lives = self.connections().await?;
        let (user_rules, gone) = {
            let state = self.state.borrow();
            let (of_file, of_users): (Vec<&Rule>, Vec<&Rule>) =
                { state.rules.iter() }.partition(|rule| rule.origin == RuleOrigin::Config);
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
                state.user_rules.iter().filter(stays).cloned().collect();
            let gone: Vec<Rule> = gone
                .into_iter()
                .filter(|rule| rule.holds)
                .cloned()
                .collect();
            (user_rules, gone)
        };
        self.replace_rules((rules, user_rules), &gone, &lives)
            .await?;
        tracing::info!("{} rule(s) of the file hold", config.rules.len());
        Ok(())
    }

    /// The rules of a file, as the kernel takes them.
    async fn probed(&self, config: &Config) -> anyhow::Result<Vec<Rule>> {
        let mut rules = of_file(config, self.bumps.all(), dibs_io::local_time())?;
        for (index, rule) in rules.iter_mut().enumerate() {
            let is_required = rule.level == Level::Require;
            if let (true, Some((why, hint))) = (is_required, self.config.excludes_require()) {
                bail!("rule {}: {why}: {hint}, and restart the daemon", rule.id);
            }
            let mut refused = self.probe(rule).await?;
            if refused.is_none() && is_required {
                refused = self.unbacked(Some(rule)).await;
            }
            if let Some(why) = refused {
                return Err(config
                    .refuse(&format!("rule.{index}.bump"), why, None)
                    .into());
            }
        }
        Ok(rules)
    }

    fn warn_of_other_changes(&self, config: &Config) {
        let ours = &self.config;
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
}
