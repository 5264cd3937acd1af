//! Rules of the file for users who are not known yet, as where the host asks a directory for them that the network has to be up
//! for, and rules that iptables does not take yet, as where a set that they name is made later.
//!
//! The bump of such a rule is required of all TCP of its ports and addresses, whatever else it names: nothing that it may mean
//! leaves in plain. A rule that requires nothing waits. Both are resolved as soon as they can be.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use dibs_config::{Level, RuleConfig};
use dibs_control::RuleId;
use dibs_io::LocalTime;
use dibs_settings::BumpId;
use dibs_switch::engine;

use crate::control::events::Audience;
use crate::kernel::{backstop, connections};
use crate::rulebook::Rules;
use crate::rulebook::rules;
use crate::rulebook::rules::Rule;
use crate::switch::Daemon;
use crate::switch::probing;
use crate::switch::wakers::Task;

/// Between two looks for a user.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Between two trials of rules that iptables did not take.
const TRY_EVERY: Duration = Duration::from_secs(10);

/// State of a rule that cannot be carried out as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// Reason in one clause.
    pub why: String,
    /// The reason is that iptables does not take it, and not that its user is not known.
    pub is_refused: bool,
    /// Nothing is steered by it until then.
    pub waits: bool,
}

impl Unresolved {
    /// Sentence for the user.
    pub(crate) fn warning(&self, rule: RuleId) -> String {
        let why = &self.why;
        let reason = match self.is_refused {
            true => "the kernel does not take it yet",
            false => "its user is not known yet",
        };
        match self.waits {
            true => format!("rule {rule} waits, as {reason}: {why}"),
            false => format!(
                "rule {rule} requires its bump of every user's connections to its ports and addresses, as {reason}: {why}"
            ),
        }
    }
}

/// Rule of the file, the `id`th, whose user is not known, and why.
///
/// # Errors
/// The rule cannot be, for another reason.
pub(crate) fn of_file(
    id: RuleId,
    rule: &RuleConfig,
    bump: BumpId,
    now: LocalTime,
    why: String,
) -> Result<Rule, String> {
    let anybodys = RuleConfig {
        selection: rule.selection.without("user"),
        ..rule.clone()
    };
    let mut made = rules::of_file(id, &anybodys, bump, now)?;
    let user = rule.selection.user().into_iter();
    made.selector
        .extend(user.map(|name| ("user".to_owned(), name.clone())));
    made.selection = rule.selection.clone();
    made.hold_coarsely(why, false, now);
    Ok(made)
}

impl Rule {
    /// Has it hold of all TCP of its ports and addresses if it requires its bump, and wait otherwise.
    pub(crate) fn hold_coarsely(&mut self, why: String, is_refused: bool, now: LocalTime) {
        self.classes = self.classes.iter().map(|class| class.coarse()).collect();
        self.narrowed = None;
        self.unresolved = Some(Unresolved {
            why,
            is_refused,
            waits: self.level != Level::Require,
        });
        self.turn(now);
    }

    /// True if nothing is steered by it, as its user is not known.
    pub fn waits(&self) -> bool {
        self.unresolved.as_ref().is_some_and(|rule| rule.waits)
    }

    /// Makes it hold of every user's connections where it would wait, unless it leaves them in plain without a session: as
    /// nothing is carried before the daemon runs, this blocks.
    pub(crate) fn block(&mut self) {
        let blocks = self.level != Level::Prefer;
        if let Some(unresolved) = self.unresolved.as_mut().filter(|_| blocks) {
            unresolved.waits = false;
            self.holds = true;
        }
    }

    /// Has it hold as it is, of its user, whose number this is, if it names one.
    fn resolve(&mut self, uid: Option<u32>, now: LocalTime) -> Result<(), String> {
        let bump = self.bump_id();
        self.classes = rules::classes(self.id, &self.selection, uid, bump, self.level)?;
        self.unresolved = None;
        self.turn(now);
        Ok(())
    }
}

/// Looks for users, and tries rules out, again, as long as a rule is not resolved.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
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
                resolved.push((rule.id, Audience::of_rule(rule)));
                gone.extend(before.holds.then_some(before));
            }
            // That is known.
            Err(_) if is_refused => {}
            Err(why) => refused.push(format!("rule {}: {why}", rule.id)),
        }
    }
    if !resolved.is_empty() {
        let lives = connections::all(daemon).await?;
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
            format!("rule {id} holds as it is now"),
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
    let mut refused = probing::probe(daemon, &mut rule).await?;
    if refused.is_none() && rule.level == Level::Require {
        refused = backstop::unbacked(daemon, Some(&rule)).await;
    }
    Ok(refused.map_or(Ok(rule), Err))
}
