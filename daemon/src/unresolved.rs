//! Rules for users who are not known yet, as where the host asks a directory for them that the network has to be up for.
//!
//! The bump of such a rule is required of all TCP of its ports and addresses, whoever sends it: nothing that it may mean
//! leaves in plain. A rule that requires nothing waits. Both are resolved as soon as the user is known.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use dibs_config::{Level, RuleConfig, Selection};
use dibs_control::RuleId;
use dibs_io::LocalTime;
use dibs_settings::BumpId;
use dibs_switch::engine;

use crate::daemon::Daemon;
use crate::events::Audience;
use crate::rule_book::Rules;
use crate::rules::{self, Rule};
use crate::wakers::Task;
use crate::{backstop, connections, probing};

/// Between two looks for a user.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// State of a rule whose user is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// Reason in one clause.
    pub why: String,
    /// Nothing is steered by it until the user is known.
    pub waits: bool,
}

impl Unresolved {
    /// Sentence for the user.
    pub(crate) fn warning(&self, rule: RuleId) -> String {
        let why = &self.why;
        match self.waits {
            true => format!("rule {rule} waits, as its user is not known yet: {why}"),
            false => format!(
                "rule {rule} requires its bump of every user's connections to its ports and addresses, as its user is \
                 not known yet: {why}"
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
    let anybodys = Selection {
        user: None,
        ..rule.selection.clone()
    };
    let anybodys = RuleConfig {
        selection: anybodys,
        ..rule.clone()
    };
    let mut made = rules::of_file(id, &anybodys, bump, now)?;
    made.classes = made.classes.iter().map(|class| class.coarse()).collect();
    let user = rule.selection.user.iter();
    made.selector
        .extend(user.map(|name| ("user".to_owned(), name.clone())));
    made.selection = rule.selection.clone();
    made.unresolved = Some(Unresolved {
        why,
        waits: rule.level != Level::Require,
    });
    made.turn(now);
    Ok(made)
}

impl Rule {
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

    /// Has it hold of its user, whose number this is.
    fn resolve(&mut self, uid: u32, now: LocalTime) -> Result<(), String> {
        let bump = self.bump_id();
        self.classes = rules::classes(self.id, &self.selection, Some(uid), bump, self.level)?;
        self.unresolved = None;
        self.turn(now);
        Ok(())
    }
}

/// Looks for users again, as long as a rule lacks one.
pub(crate) async fn keep(daemon: Rc<Daemon>) {
    loop {
        let due = daemon.wakers.woken(Task::Users);
        match names(&daemon).is_empty() {
            true => due.await,
            false => drop(tokio::time::timeout(LOOK_EVERY, due).await),
        }
        let done = resolve_rules(&daemon).await;
        daemon.events.note("resolve the users of rules", done);
    }
}

/// Users that rules name and that are not known.
fn names(daemon: &Daemon) -> BTreeSet<String> {
    let state = daemon.state.borrow();
    let lacking = { state.rules.all().iter() }.filter(|rule| rule.unresolved.is_some());
    let names = lacking.filter_map(|rule| rule.selection.user.clone());
    names.collect()
}

/// Has rules hold of their users, where these are known by now; connections follow.
async fn resolve_rules(daemon: &Daemon) -> anyhow::Result<()> {
    let names = names(daemon);
    let look_up = move || -> BTreeMap<String, u32> {
        let known = names.into_iter().filter_map(|name| {
            let uid = rules::uid_of(&name).ok()?;
            Some((name, uid))
        });
        known.collect()
    };
    let known = tokio::task::spawn_blocking(look_up).await?;
    if known.is_empty() {
        return Ok(());
    }
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
        let name = { rule.selection.user.as_ref() }.filter(|_| rule.unresolved.is_some());
        let Some(&uid) = name.and_then(|name| known.get(name)) else {
            continue;
        };
        match resolved_rule(daemon, rule.clone(), uid).await? {
            Ok(now) => {
                let before = std::mem::replace(rule, now);
                resolved.push((rule.id, Audience::of_rule(rule)));
                gone.extend(before.holds.then_some(before));
            }
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
            format!("rule {id} holds: its user is known now"),
            &[("rule", id.to_string())],
        );
    }
    anyhow::ensure!(refused.is_empty(), "{}", refused.join("; "));
    Ok(())
}

/// A rule whose user has this number, or why the kernel does not take it.
async fn resolved_rule(
    daemon: &Daemon,
    mut rule: Rule,
    uid: u32,
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
