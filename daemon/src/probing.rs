//! Whether the kernel takes a rule, asked before anything depends on it.

use anyhow::Context as _;
use dibs_config::{Config, Selection};
use dibs_control::RuleOrigin;
use dibs_policy::{Error, Family, Probed, Steering};

use crate::daemon::Daemon;
use crate::rules::Rule;

/// Whether a rule names what not every kernel or iptables takes.
fn is_special(selection: &Selection) -> bool {
    let owned = selection.uid.is_some() || selection.user.is_some() || selection.gid.is_some();
    let timed = selection.dscp.is_some() || selection.time.is_some();
    owned || timed || selection.match_expr.is_some()
}

/// Has the kernel look at a rule, and keeps it to the families in which it is taken. Why it is taken in
/// none, if so.
pub(crate) async fn probe(
    steering: &mut Steering,
    config: &Config,
    rule: &mut Rule,
) -> anyhow::Result<Option<String>> {
    if !is_special(&rule.selection) {
        return Ok(None);
    }
    let peers = || config.peers.iter().flat_map(|peer| &peer.addresses);
    let families = [
        (Family::V4, peers().any(|net| net.addr().is_ipv4())),
        (Family::V6, peers().any(|net| net.addr().is_ipv6())),
    ];
    let families: Vec<Family> = families
        .iter()
        .filter_map(|(family, used)| used.then_some(*family))
        .collect();
    // All of its classes match the same, but for ports and addresses.
    let class = rule.kernel_classes(0).next();
    let class = class.expect("a rule has a class");
    let probed = match steering.probe(&class, &families).await {
        Ok(probed) => probed,
        Err(Error::Refused(why)) => return Ok(Some(format!("iptables refuses it: {why}"))),
        Err(error) => return Err(error).context("cannot try a rule out"),
    };
    let Probed { families, refusal } = probed;
    if let (Some((other, why)), [only]) = (refusal, families.as_slice()) {
        tracing::info!("rule {} is not for IP{other}: {why}", rule.id);
        return Ok(rule.keep_to(*only).err());
    }
    Ok(None)
}

/// The place in the file of what iptables may refuse in a rule.
fn place(rule: &Rule) -> String {
    let selection = &rule.selection;
    let key = match (&selection.match_expr, selection.dscp) {
        (Some(_), _) => "match",
        (None, Some(_)) => "dscp",
        (None, None) => "time",
    };
    format!("rule.{}.{key}", rule.id - 1)
}

/// As [`probe`], for all rules that the daemon starts with.
///
/// # Errors
/// A rule of the file is refused; a rule of the user is left out, and the log says so.
pub(crate) async fn probe_all(
    steering: &mut Steering,
    config: &Config,
    rules: &mut Vec<Rule>,
) -> anyhow::Result<()> {
    let mut kept = Vec::with_capacity(rules.len());
    for mut rule in std::mem::take(rules) {
        match probe(steering, config, &mut rule).await? {
            None => kept.push(rule),
            Some(why) if rule.origin == RuleOrigin::Config => {
                return Err(config.refuse(&place(&rule), why, None).into());
            }
            Some(why) => tracing::warn!("rule {} is dropped: {why}", rule.id),
        }
    }
    *rules = kept;
    Ok(())
}

impl Daemon {
    /// Why the kernel does not take a rule, if it does not; see [`probe`].
    pub(crate) async fn probe(&self, rule: &mut Rule) -> anyhow::Result<Option<String>> {
        let mut steerer = self.steerer.lock().await;
        probe(steerer.steering(), &self.config, rule).await
    }

    /// See [`probe_all`].
    pub(crate) async fn probe_rules(&self) -> anyhow::Result<()> {
        let mut rules = std::mem::take(&mut self.state.borrow_mut().rules);
        let mut steerer = self.steerer.lock().await;
        probe_all(steerer.steering(), &self.config, &mut rules).await?;
        let mut state = self.state.borrow_mut();
        let known = |id| rules.iter().any(|rule: &Rule| rule.id == id);
        state.user_rules.retain(|rule| known(rule.id));
        state.rules = rules;
        Ok(())
    }
}
