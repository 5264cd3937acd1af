//! Rules that users make and delete while the daemon runs.

use dibs_config::Level;
use dibs_control::{ErrorKind, Failure, NewRule, RuleId, RuleMade, RuleOrigin, Selector};
use dibs_policy::BumpId;

use super::{failed, refused};
use crate::caller::Caller;
use crate::daemon::Daemon;
use crate::events::Audience;
use crate::live::Live;
use crate::rules::{self, Displaced, Rule};
use crate::state_file::SavedRule;
use crate::wants;
use dibs_switch::marks::Hand;

/// Rules of a member of the group, of which every packet to a peer may have to be compared with each.
const RULES_OF_UID: usize = 64;
/// Those of all members, for one person may have many uids (subuid(5)).
const RULES_OF_MEMBERS: usize = 256;

impl Daemon {
    /// Makes a rule. The caller of this has its turn to change things.
    pub(super) async fn rule_add(
        &self,
        caller: Caller,
        wanted: NewRule,
    ) -> Result<RuleMade, Failure> {
        self.may_add(caller, &wanted)?;
        if let Some(Err(message)) = wanted.scheduler.as_deref().map(rules::scheduler) {
            return Err(Failure::new(ErrorKind::NotFound, message));
        }
        let bump = self.bump_for(Some(&wanted.bump))?;
        let (rule, displaced) = self.rule_of(caller, &wanted, bump.id).await?;
        let lives = self.connections().await.map_err(failed)?;
        self.check_meant(&rule, &lives).await?;
        let (id, info, by) = (rule.id, rule.info(), caller.uid);
        let audience = Audience::of_rule(&rule);
        let (rules, user_rules) = {
            let mut state = self.state.borrow_mut();
            state.next_rule = id + 1;
            let stays = |id| !displaced.iter().any(|(rule, _)| rule.id == id);
            let mut rules = state.rules.clone();
            rules.retain(|rule| stays(rule.id));
            rules.push(rule);
            let mut user_rules = state.user_rules.clone();
            user_rules.retain(|rule| stays(rule.id));
            user_rules.push(SavedRule {
                id,
                rule: wanted,
                by: Some(by),
            });
            (rules, user_rules)
        };
        let gone: Vec<Rule> = { displaced.iter() }
            .filter(|(rule, _)| rule.holds)
            .map(|(rule, _)| rule.clone())
            .collect();
        let replaced = self.replace_rules((rules, user_rules), &gone, &lives);
        replaced.await.map_err(failed)?;
        if let Some(warning) = bump.warning {
            tracing::warn!("{warning}");
        }
        self.events.tell_of(
            audience,
            "rule_added",
            format!("rule {id} puts connections on {}", bump.name),
            &[("rule", id.to_string()), ("bump", bump.name.clone())],
        );
        for (rule, why) in &displaced {
            self.tell_displaced(rule, id, why);
        }
        Ok(RuleMade {
            rule: info,
            displaced: displaced.iter().map(|(rule, _)| rule.info()).collect(),
        })
    }

    /// The rule that a user wants, as the kernel takes it, and the rules that give way to it.
    async fn rule_of(
        &self,
        caller: Caller,
        wanted: &NewRule,
        bump: BumpId,
    ) -> Result<(Rule, Vec<Displaced>), Failure> {
        let behind = |name: &str| {
            let peer = self.config.peers.iter().find(|peer| peer.name == name);
            peer.map(|peer| peer.addresses.clone())
        };
        let peer = match &wanted.selector {
            Selector::Match(named) => named.peer.as_deref(),
            _ => None,
        };
        self.check_peer(peer)?;
        if let Some(why) = self.lacking(peer, bump.get()).await? {
            return Err(refused(why));
        }
        let id = self.state.borrow().next_rule;
        let now = dibs_io::local_time();
        let mut rule =
            rules::of_user(id, wanted, caller.uid, bump, now, behind).map_err(refused)?;
        let cannot_be = |why: String| refused(format!("the rule cannot be made: {why}"));
        let displaced = rules::displaced(&rule, &self.state.borrow().rules).map_err(cannot_be)?;
        match self.probe(&mut rule).await.map_err(failed)? {
            Some(why) => Err(cannot_be(why)),
            None => Ok((rule, displaced)),
        }
    }

    /// Refuses a rule that live connections could not follow, or that could not be held.
    async fn check_meant(&self, rule: &Rule, lives: &[Live]) -> Result<(), Failure> {
        let up = self.sessions().await?;
        let meant = lives.iter().filter(|live| rule.holds && !live.over);
        let meant: Vec<Live> = meant.filter(|live| rule.means(live)).copied().collect();
        // What requires its bump is to wait where there is no session, what prefers it is plain there.
        let stuck = meant.iter().filter(|live| !up[live.peer]);
        let stuck: Vec<Live> = stuck.copied().collect();
        if rule.level == Level::Usual && !stuck.is_empty() {
            return Err(self.no_session(&stuck));
        }
        if let Some((pair, why)) = self.translated(&meant).await.map_err(failed)?.iter().next() {
            return Err(refused(format!(
                "the connection {} to {} cannot follow the rule: {why}",
                pair.local, pair.remote
            )));
        }
        let number = rule.bump_id().get();
        let addresses = meant.iter().map(|live| live.pair.local.ip());
        // What requires its bump is to wait where there is no device.
        let fault = self.device_fault(number, addresses).await.map_err(failed)?;
        if let Some(why) = fault.filter(|_| rule.level != Level::Require) {
            return Err(refused(format!("{why}: nothing was changed")));
        }
        let carriers = self.carriers(number, &meant).await.map_err(failed)?;
        if let Some(carrier) = carriers.first() {
            return Err(refused(format!(
                "the rule would put the connection to {} that carries the bump's device into that \
                 device: except it, or have the device go by UDP",
                carrier.pair.remote
            )));
        }
        match self.unbacked(Some(rule)).await {
            Some(why) => Err(refused(format!(
                "the rule cannot be made: it would not be held when others flush the firewall: {why}; nothing \
                 was changed"
            ))),
            None => Ok(()),
        }
    }

    /// Tells that a rule of a member of the group gave way to one of root's, to both.
    fn tell_displaced(&self, rule: &Rule, to: RuleId, why: &str) {
        let Rule { id, by, .. } = rule;
        self.events.tell_of(
            Audience::of_rule(rule),
            "rule_displaced",
            format!("rule {id} of uid {by} gave way to root and is gone: {why}"),
            &[("rule", id.to_string()), ("by", to.to_string())],
        );
    }

    /// Whether a user may make a rule (docs/threat-model.md, "Keys and the host"), and the configuration leaves it its strength.
    fn may_add(&self, caller: Caller, wanted: &NewRule) -> Result<(), Failure> {
        if let (true, Some((message, hint))) = (wanted.require, self.config.excludes_require()) {
            return Err(refused(format!("{message}: {hint} in the configuration")));
        }
        let denied = |message: String| Err(Failure::new(ErrorKind::Denied, message));
        if !caller.is_root() && wanted.scheduler.is_some() {
            return denied("only root makes rules with a scheduler".to_owned());
        }
        let own =
            matches!(&wanted.selector, Selector::Match(named) if named.uid == Some(caller.uid));
        if !caller.is_root() && !own {
            return denied(format!(
                "only root makes rules for others: add --uid {}",
                caller.uid
            ));
        }
        if !caller.is_root() && wanted.terms.match_expr.is_some() {
            return denied("only root makes rules with a match of iptables".to_owned());
        }
        self.may_have_more(caller)
    }

    /// Refuses members of the group more rules than packets should be compared with.
    fn may_have_more(&self, caller: Caller) -> Result<(), Failure> {
        if caller.is_root() {
            return Ok(());
        }
        let state = self.state.borrow();
        let members = || state.rules.iter().filter(|rule| rule.is_of_member());
        let own = members().filter(|rule| rule.by == caller.uid).count();
        if own >= RULES_OF_UID {
            return Err(refused(format!(
                "uid {} has {RULES_OF_UID} rules, and may not have more: delete one first",
                caller.uid
            )));
        }
        if members().count() >= RULES_OF_MEMBERS {
            return Err(refused(format!(
                "the members of the group have {RULES_OF_MEMBERS} rules, and may not have more: \
                 root can delete some"
            )));
        }
        Ok(())
    }

    pub(super) async fn rule_del(&self, caller: Caller, id: RuleId) -> Result<(), Failure> {
        let found = {
            let state = self.state.borrow();
            state.rules.iter().find(|rule| rule.id == id).cloned()
        };
        let Some(rule) = found.filter(|rule| caller.sees(rule)) else {
            let whose = if caller.is_root() { "" } else { " of yours" };
            return Err(Failure::new(
                ErrorKind::NotFound,
                format!("there is no rule {id}{whose}"),
            ));
        };
        if rule.origin == RuleOrigin::Config {
            return Err(refused(format!(
                "rule {id} stands in the configuration file: change it there"
            )));
        }
        if !caller.is_root() && rule.by != caller.uid {
            return Err(Failure::new(
                ErrorKind::Denied,
                format!("rule {id} is root's: only root deletes it"),
            ));
        }
        let lives = self.connections().await.map_err(failed)?;
        {
            let mut state = self.state.borrow_mut();
            state.rules.retain(|rule| rule.id != id);
            state.user_rules.retain(|rule| rule.id != id);
        }
        self.save().map_err(failed)?;
        self.steer().await.map_err(failed)?;
        let freed = if rule.holds {
            self.freed(&rule, &lives)
        } else {
            Vec::new()
        };
        self.follow_rules(&freed, 0).await;
        // The others another rule takes, perhaps to another bump.
        let meant = lives.iter().filter(|live| rule.means(live));
        let meant: Vec<Live> = meant.copied().collect();
        for (bump, lives) in self.ruled(&meant) {
            self.follow_rules(&lives, bump).await;
        }
        wants::send_all(self).await;
        self.events.tell_of(
            Audience::of_rule(&rule),
            "rule_deleted",
            format!("rule {id} is gone, {} connection(s) with it", freed.len()),
            &[("rule", id.to_string())],
        );
        Ok(())
    }

    /// The connections that nothing keeps on the bump of a rule that does not hold any more.
    pub(crate) fn freed(&self, rule: &Rule, lives: &[Live]) -> Vec<Live> {
        let mut state = self.state.borrow_mut();
        let mut freed = Vec::new();
        for live in lives.iter().filter(|live| !live.over) {
            let chosen = state.conns.get(&live.pair).choice.of(live.socket).is_some();
            let ruled = state.active_rules().any(|other| other.means(live));
            if chosen || ruled {
                continue;
            }
            let handed = state.conns.get(&live.pair).handed();
            let by_it = handed
                .is_some_and(|handed| handed.by == Hand::Rule && rule.may_have(live, handed.bump));
            if by_it {
                // Where another rule of the kernel's wants it, the next packet puts it back.
                state.conns.update(&live.pair, |conn| conn.hand_over(None));
            }
            if by_it || rule.means(live) {
                freed.push(*live);
            }
        }
        freed
    }
}
