//! Whether the kernel takes a rule, asked before anything depends on it.

use anyhow::Context as _;
use dibs_config::{Config, Level};
use dibs_control::{RuleId, RuleOrigin};
use dibs_policy::{ClassRule, Error, Family, Probed, Steering};
use dibs_settings::Term;
use dibs_switch::engine;

use crate::control::events::Audience;
use crate::kernel::connections;
use crate::rulebook::rules::{Narrowed, Rule, name};
use crate::switch::Daemon;
use crate::switch::reconcile;

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
        Err(error) => return Err(error).context("cannot try a rule out"),
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
        format!("it requires its bump over {other} too, and {why}")
    });
    rule.narrowed = Some(Narrowed { to: *only, why });
    Ok(refused)
}

/// The place in the file of what iptables may refuse in a rule.
fn place(rule: &Rule) -> String {
    let mut special = { rule.selection.terms() }
        .iter()
        .filter(|term| term.is_special());
    let key = special.next_back().map_or("uid", Term::key);
    format!("rule.{}.{key}", rule.id - 1)
}

/// As [`try_out`], for all rules that the daemon starts with.
///
/// A rule of the file that is refused is [not resolved](crate::rulebook::unresolved); a rule of the user is left out, and the log says so.
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
            Some(why) => tracing::warn!("rule {} is dropped: {why}", rule.id),
        }
    }
    *rules = kept;
    Ok(())
}

fn tell_narrowed(rule: &Rule) {
    match (rule.warning(), rule.level) {
        (None, _) => {}
        (Some(warning), Level::Require) => tracing::error!("{warning}"),
        (Some(warning), _) => tracing::warn!("{warning}"),
    }
}

/// Why the kernel does not take a rule, if it does not; see [`try_out`].
pub(crate) async fn probe(daemon: &Daemon, rule: &mut Rule) -> anyhow::Result<Option<String>> {
    let mut steerer = daemon.kernel.steerer().await;
    let refused = try_out(steerer.steering(), &daemon.config, rule).await?;
    if refused.is_none() {
        tell_narrowed(rule);
    }
    Ok(refused)
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
            wider.push((rule.id, Audience::of_rule(&rule)));
        }
    }
    if wider.is_empty() {
        return Ok(());
    }
    let ids: Vec<RuleId> = wider.iter().map(|(id, _)| *id).collect();
    daemon.state.borrow_mut().rules.widen(&ids);
    reconcile::steer(daemon).await?;
    for (id, audience) in &wider {
        daemon.events.tell_of(
            *audience,
            "rule_widened",
            format!("rule {id} holds for IPv4 and IPv6 now"),
            &[("rule", id.to_string())],
        );
    }
    let lives = connections::all(daemon).await?;
    engine::rules::follow_changed(daemon, [].as_slice().into(), &lives).await;
    Ok(())
}

/// See [`probe_all`].
pub(crate) async fn probe_rules(daemon: &Daemon) -> anyhow::Result<()> {
    let mut rules = daemon.state.borrow().rules.all().to_vec();
    let mut steerer = daemon.kernel.steerer().await;
    probe_all(steerer.steering(), &daemon.config, &mut rules).await?;
    daemon.state.borrow_mut().rules.keep(rules);
    Ok(())
}
