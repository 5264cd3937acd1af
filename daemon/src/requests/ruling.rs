//! Rules that users make and delete while the daemon runs.

use dibs_config::Level;
use dibs_control::{ErrorKind, Failure, NewRule, RuleId, RuleInfo, RuleOrigin, Selector};

use super::{Caller, failed, refused};
use crate::daemon::{Daemon, Hand};
use crate::live::Live;
use crate::rules::{self, Rule};
use crate::saved::SavedRule;

impl Daemon {
    pub(super) async fn rule_add(
        &self,
        caller: Caller,
        wanted: NewRule,
    ) -> Result<RuleInfo, Failure> {
        let _turn = self.changes.lock().await;
        self.may_add(caller, &wanted)?;
        let bump = self.bump_for(Some(&wanted.bump))?;
        let behind = |name: &str| {
            let peer = self.config.peers.iter().find(|peer| peer.name == name);
            peer.map(|peer| peer.addresses.clone())
        };
        if let Selector::Match(named) = &wanted.selector {
            self.check_peer(named.peer.as_deref())?;
        }
        let peer = match &wanted.selector {
            Selector::Match(named) => named.peer.as_deref(),
            _ => None,
        };
        if let Some(why) = self.lacking(peer, bump.id.get()).await? {
            return Err(refused(why));
        }
        let id = self.state.borrow().next_rule;
        let now = dibs_io::local_time();
        let mut rule = rules::of_user(id, &wanted, bump.id, now, behind).map_err(refused)?;
        if let Some(why) = rules::contradicted(&rule, &self.state.borrow().rules) {
            return Err(refused(format!("the rule cannot be made: {why}")));
        }
        if let Some(why) = self.probe(&mut rule).await.map_err(failed)? {
            return Err(refused(format!("the rule cannot be made: {why}")));
        }
        let lives = self.connections().await.map_err(failed)?;
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
        let number = bump.id.get();
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
        let info = rule.info();
        {
            let mut state = self.state.borrow_mut();
            state.next_rule = id + 1;
            state.rules.push(rule);
            state.rules.sort_by_key(Rule::order);
            state.user_rules.push(SavedRule { id, rule: wanted });
        }
        // Peers first: what comes to them by the bump finds it there.
        self.send_wants().await;
        let carried_out = async {
            self.save()?;
            self.steer().await.map(drop)
        };
        if let Err(error) = carried_out.await {
            self.forget_rule(id);
            // Or the next start would find it in the file.
            if let Err(error) = self.save() {
                tracing::warn!("{error:#}");
            }
            // Some of it may be in the kernel.
            if let Err(error) = self.steer().await {
                tracing::warn!("cannot take back rule {id}: {error:#}");
            }
            self.send_wants().await;
            return Err(failed(error));
        }
        self.enforce(&lives, None).await;
        for (bump, lives) in self.ruled(&lives, None) {
            self.follow_rules(&lives, bump).await;
        }
        self.hours_due.notify_one();
        self.sessions_due.notify_one();
        if let Some(warning) = bump.warning {
            tracing::warn!("{warning}");
        }
        self.tell(
            "rule_added",
            format!("rule {id} puts connections on {}", bump.name),
            &[("rule", id.to_string()), ("bump", bump.name.clone())],
        );
        Ok(info)
    }

    /// Whether a user may make a rule (SECURITY 8), and the configuration leaves it its strength.
    fn may_add(&self, caller: Caller, wanted: &NewRule) -> Result<(), Failure> {
        if let (true, Some((message, hint))) = (wanted.require, self.config.excludes_require()) {
            return Err(refused(format!("{message}: {hint} in the configuration")));
        }
        let denied = |message: String| Err(Failure::new(ErrorKind::Denied, message));
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
        Ok(())
    }

    fn forget_rule(&self, id: RuleId) {
        let mut state = self.state.borrow_mut();
        state.rules.retain(|rule| rule.id != id);
        state.user_rules.retain(|rule| rule.id != id);
    }

    pub(super) async fn rule_del(&self, caller: Caller, id: RuleId) -> Result<(), Failure> {
        let _turn = self.changes.lock().await;
        let found = {
            let state = self.state.borrow();
            state.rules.iter().find(|rule| rule.id == id).cloned()
        };
        let Some(rule) = found else {
            return Err(Failure::new(
                ErrorKind::NotFound,
                format!("there is no rule {id}"),
            ));
        };
        if rule.origin == RuleOrigin::Config {
            return Err(refused(format!(
                "rule {id} stands in the configuration file: change it there"
            )));
        }
        if !caller.is_root() && !rule.classes.iter().all(|c| c.uid == Some(caller.uid)) {
            return Err(Failure::new(
                ErrorKind::Denied,
                format!("rule {id} is not for you alone: only root deletes it"),
            ));
        }
        let lives = self.connections().await.map_err(failed)?;
        self.forget_rule(id);
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
        for (bump, lives) in self.ruled(&meant, None) {
            self.follow_rules(&lives, bump).await;
        }
        self.send_wants().await;
        self.tell(
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
            let chosen = state.choices.of(&live.pair, live.socket).is_some();
            let ruled = state.active_rules().any(|other| other.means(live));
            if chosen || ruled {
                continue;
            }
            let handed = state.handed.get(&live.pair);
            let by_it = handed
                .is_some_and(|handed| handed.by == Hand::Rule && rule.may_have(live, handed.bump));
            if by_it {
                // Where another rule of the kernel's wants it, the next packet puts it back.
                state.handed.remove(&live.pair);
            }
            if by_it || rule.means(live) {
                freed.push(*live);
            }
        }
        freed
    }
}
