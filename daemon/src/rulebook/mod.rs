//! The rule book: all rules, which of them hold, and what it begins with.
//!
//! A rule of the file may be for users who are not known yet, as where the host asks a directory for them that the network
//! has to be up for, and iptables may not take it yet, as where a set that it names is made later. The bump of such a rule is
//! required of all TCP of its ports and addresses, whatever else it names: nothing that it may mean leaves in plain. A rule
//! that requires nothing waits. Both are resolved as soon as they can be.
//!
//! Rules that have a scheduler say which connections the data path has to share out by it.

pub mod kept;
pub mod rules;
pub mod state_file;

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::slice;
use std::time::Duration;

use dibs_config::{Config, Level, PortRange, RuleConfig};
use dibs_control::{RuleId, RuleOrigin};
use dibs_core::node::FlowScheduler;
use dibs_io::LocalTime;
use dibs_policy::Family;
use dibs_settings::{BumpId, DIRECT};
use ipnet::IpNet;

use crate::control::ROOT;
use crate::data::bumps::Carried;
use crate::data::{Driver, Gone};
use crate::rulebook::rules::{Displaced, Rule, Unresolved};
use crate::rulebook::state_file::{Saved, SavedRule};

/// Seconds.
const DAY: u32 = 86_400;

/// Rules of the file and of users.
#[derive(Clone)]
pub(crate) struct Rules {
    /// All of them, in the order in which they are tried once they are in the book.
    pub(crate) rules: Vec<Rule>,
    /// Rules of users, as they wrote them.
    pub(crate) saved: Vec<SavedRule>,
    /// The rules of the file wait for the next start or SIGHUP: the user had everything removed.
    pub(crate) suspended: bool,
}

impl Rules {
    fn listed(&self) -> impl Iterator<Item = &Rule> + Clone {
        let suspended = self.suspended;
        let listed = move |rule: &&Rule| !(suspended && rule.origin == RuleOrigin::Config);
        self.rules.iter().filter(listed)
    }

    /// Rules in force, whatever the time of day.
    pub(crate) fn in_force(&self) -> impl Iterator<Item = &Rule> + Clone {
        self.listed().filter(|rule| !rule.waits())
    }
}

/// The rules of the file and of users. Whoever changes them has the kernel and the peers told, and connections follow.
pub(crate) struct RuleBook {
    now: Rules,
    next: RuleId,
    /// What local time is ahead of UTC, in seconds, as the kernel's rules have it.
    utc_offset: i32,
}

/// Rules that hold now, in the order in which they are tried.
#[derive(Clone)]
pub(crate) struct Active<'a> {
    rules: slice::Iter<'a, Rule>,
    suspended: bool,
}

impl<'a> Iterator for Active<'a> {
    type Item = &'a Rule;

    fn next(&mut self) -> Option<&'a Rule> {
        let suspended = self.suspended;
        self.rules.find(|rule| {
            let is_listed = !(suspended && rule.origin == RuleOrigin::Config);
            is_listed && !rule.waits() && rule.holds
        })
    }
}

impl RuleBook {
    /// These rules; the next that a user makes has the number `next`.
    pub(crate) fn new(mut rules: Rules, next: RuleId, utc_offset: i32) -> Self {
        rules.rules.sort_by_key(Rule::order);
        Self {
            now: rules,
            next,
            utc_offset,
        }
    }

    /// All of them, in the order in which they are tried.
    pub(crate) fn all(&self) -> &[Rule] {
        &self.now.rules
    }

    /// Those that users made.
    pub(crate) fn saved(&self) -> &[SavedRule] {
        &self.now.saved
    }

    /// The number of the next that a user makes.
    pub(crate) fn next(&self) -> RuleId {
        self.next
    }

    /// What local time is ahead of UTC, in seconds.
    pub(crate) fn utc_offset(&self) -> i32 {
        self.utc_offset
    }

    /// True if the rules of the file wait for the next start or SIGHUP.
    pub(crate) fn is_suspended(&self) -> bool {
        self.now.suspended
    }

    /// Rules that users are shown: in force, or waiting until their user is known.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &Rule> + Clone {
        self.now.listed()
    }

    /// Rules in force, whatever the time of day.
    pub(crate) fn in_force(&self) -> impl Iterator<Item = &Rule> + Clone {
        self.now.in_force()
    }

    /// Has rules block that would wait until their user is known.
    pub(crate) fn block(&mut self) {
        self.now.rules.iter_mut().for_each(Rule::block);
    }

    /// Rules that hold now.
    pub(crate) fn active(&self) -> Active<'_> {
        Active {
            rules: self.now.rules.iter(),
            suspended: self.now.suspended,
        }
    }

    /// What there would be with another one, which takes the next number, without those that it displaces.
    pub(crate) fn with(&mut self, rule: Rule, wanted: SavedRule, displaced: &[Displaced]) -> Rules {
        self.next = rule.id + 1;
        let stays = |id| !displaced.iter().any(|(rule, _)| rule.id == id);
        let rules = self.now.rules.iter().filter(|rule| stays(rule.id));
        let saved = self.now.saved.iter().filter(|rule| stays(rule.id));
        Rules {
            rules: rules.cloned().chain([rule]).collect(),
            saved: saved.cloned().chain([wanted]).collect(),
            suspended: self.now.suspended,
        }
    }

    /// Has these take the place of all there were, which are returned.
    pub(crate) fn replace(&mut self, mut rules: Rules) -> Rules {
        rules.rules.sort_by_key(Rule::order);
        std::mem::replace(&mut self.now, rules)
    }

    /// Keeps these alone, as they are.
    pub(crate) fn keep(&mut self, rules: Vec<Rule>) {
        let known = |saved: &SavedRule| rules.iter().any(|rule| rule.id == saved.id);
        self.now.saved.retain(known);
        self.now.rules = rules;
    }

    /// Rules that there would be without one.
    pub(crate) fn without(&self, id: RuleId) -> Rules {
        let rules = self.now.rules.iter().filter(|rule| rule.id != id);
        let saved = self.now.saved.iter().filter(|rule| rule.id != id);
        Rules {
            rules: rules.cloned().collect(),
            saved: saved.cloned().collect(),
            suspended: self.now.suspended,
        }
    }

    /// Removes what users made, and has the rules of the file wait.
    pub(crate) fn suspend(&mut self) {
        self.now
            .rules
            .retain(|rule| rule.origin == RuleOrigin::Config);
        self.now.saved.clear();
        self.now.suspended = true;
    }

    /// Rules that there would be if these held for both IP versions.
    pub(crate) fn widened(&self, ids: &[RuleId]) -> Rules {
        let mut now = self.now.clone();
        let wider = now.rules.iter_mut().filter(|rule| ids.contains(&rule.id));
        wider.for_each(|rule| rule.narrowed = None);
        now
    }

    /// Whether rules begin or end to hold by now, or mean other times of day in UTC.
    pub(crate) fn are_to_turn(&self, now: LocalTime) -> bool {
        let timed = self
            .now
            .rules
            .iter()
            .any(|rule| rule.selection.time().is_some());
        let mut rules = self.now.rules.iter();
        rules.any(|rule| rule.clone().turn(now)) || timed && self.utc_offset != now.utc_offset
    }

    /// Rules that there are from now on, and those of them that begin or end to hold.
    pub(crate) fn turned(&mut self, now: LocalTime) -> (Rules, Vec<Rule>) {
        self.utc_offset = now.utc_offset;
        let mut rules = self.now.clone();
        let turned = rules.rules.iter_mut().filter_map(|rule| {
            let turned = rule.turn(now);
            turned.then(|| rule.clone())
        });
        let turned = turned.collect();
        (rules, turned)
    }

    /// How long until a rule begins or ends to hold; none names a time of day.
    pub(crate) fn next_turn(&self, now: LocalTime) -> Option<Duration> {
        let spans = self
            .now
            .rules
            .iter()
            .filter_map(|rule| rule.selection.time());
        let until = |minute: u16| match (u32::from(minute) * 60 + DAY - now.second_of_day) % DAY {
            0 => DAY,
            seconds => seconds,
        };
        let next = spans.flat_map(|span| [until(span.start), until(span.end)]);
        let next = next.min()?;
        Some(Duration::from_secs(next.into()) - Duration::from_nanos(now.nanos.into()))
    }
}

impl RuleBook {
    /// The rules of the file, and those of users that the last run left.
    pub(crate) fn restored(
        config: &Config,
        carried: &[Carried],
        saved: &Saved,
    ) -> Result<Self, dibs_config::Error> {
        let now = dibs_io::local_time();
        let mut rules = of_file(config, carried, now)?;
        let kept = add_saved(config, carried, &saved.rules, &mut rules);
        let all = Rules {
            rules,
            saved: kept,
            suspended: false,
        };
        Ok(Self::new(all, saved.next_rule, now.utc_offset))
    }
}

/// The rules of a file, in its order. One whose user is not known is [`unresolved`].
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
        let bump = bump_of(carried, &rule.bump).map_err(|name| {
            let message = format!("the bump \"{name}\" does not exist any more");
            refuse("bump", message, Some("restart it"))
        })?;
        let id = index as u64 + 1;
        let made = match rules::of_file(id, rule, bump, now) {
            Err(why) if rule.selection.user().is_some() => held_coarsely(id, rule, bump, now, why),
            made => made,
        };
        made.map_err(|message| refuse("bump", message, None))
    };
    config.rules.iter().enumerate().map(made).collect()
}

/// The bump that a rule names, or none; without one of that name, the name.
fn bump_of<'n>(carried: &[Carried], name: &'n str) -> Result<Option<BumpId>, &'n str> {
    let found = carried.iter().find(|bump| bump.name == name);
    match found {
        None if name == DIRECT => Ok(None),
        found => found.map(|bump| Some(bump.id)).ok_or(name),
    }
}

/// Adds the rules that were made with `dibsctl` to those of the file, and returns those that still can be. The
/// file displaces all of them, root's those of members of the group: nothing saved keeps the daemon from
/// starting.
fn add_saved(
    config: &Config,
    carried: &[Carried],
    saved: &[SavedRule],
    rules: &mut Vec<Rule>,
) -> Vec<SavedRule> {
    let now = dibs_io::local_time();
    let behind = |name: &str| {
        let peer = config.peers.iter().find(|peer| peer.name == name);
        peer.map(|peer| peer.addresses.clone())
    };
    let mut sorted: Vec<&SavedRule> = saved.iter().collect();
    sorted.sort_by_key(|saved| (saved.maker() != ROOT, saved.id));
    let mut kept = Vec::new();
    for saved in sorted {
        let SavedRule { id, rule, .. } = saved;
        let by = saved.maker();
        let made = match config.excludes_require().filter(|_| rule.require) {
            Some((message, hint)) => Err(format!("{message}: {hint}, then add the rule again")),
            None => bump_of(carried, &rule.bump)
                .map_err(|name| format!("this version does not carry the bump \"{name}\""))
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
                "rule {id} of uid {by}, for \"{}\", was deleted: {reason}",
                rule.bump
            ),
        }
    }
    kept.sort_by_key(|saved| saved.id);
    kept
}

/// Rule of the file, the `id`th, whose user is not known, and why.
///
/// # Errors
/// The rule cannot be, for another reason.
fn held_coarsely(
    id: RuleId,
    rule: &RuleConfig,
    bump: Option<BumpId>,
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
        let blocks = self.level != Level::Prefer && self.bump_id().is_some();
        if let Some(unresolved) = self.unresolved.as_mut().filter(|_| blocks) {
            unresolved.waits = false;
            self.holds = true;
        }
    }

    /// Has it hold as it is, of its user, whose number this is, if it names one.
    pub(crate) fn resolve(&mut self, uid: Option<u32>, now: LocalTime) -> Result<(), String> {
        let bump = self.bump_id();
        self.classes = rules::classes(self.id, &self.selection, uid, bump, self.level)?;
        self.unresolved = None;
        self.turn(now);
        Ok(())
    }
}

impl Rule {
    /// What the data path is told of the connections that the rule selects, if it has a scheduler for any.
    fn flow_scheduler(&self) -> Option<FlowScheduler> {
        let scheduler = self.scheduler?;
        let selection = &self.selection;
        let to = self.narrowed.as_ref().map(|narrowed| narrowed.to);
        Some(FlowScheduler {
            scheduler,
            local: prefixes(selection.source(), to)?,
            remote: prefixes(selection.destination(), to)?,
            local_ports: ports(selection.sport()),
            remote_ports: ports(selection.dport()),
        })
    }
}

/// Prefixes as the data path knows them, those of a family alone if the rule is kept to one; none: nothing is left.
fn prefixes(nets: Option<&Vec<IpNet>>, to: Option<Family>) -> Option<Vec<IpNet>> {
    let nets = nets.map_or(&[][..], Vec::as_slice);
    let Some(family) = to else {
        return Some(nets.to_vec());
    };
    if nets.is_empty() {
        return Some(vec![family.any()]);
    }
    let kept = nets.iter().filter(|net| Family::of(net.addr()) == family);
    let kept: Vec<IpNet> = kept.copied().collect();
    (!kept.is_empty()).then_some(kept)
}

fn ports(ranges: Option<&Vec<PortRange>>) -> Vec<RangeInclusive<u16>> {
    let range = |range: &PortRange| range.first..=range.last;
    ranges.into_iter().flatten().map(range).collect()
}

/// The schedulers of rules that the data path was told of last.
#[derive(Default)]
pub(crate) struct FlowSchedulers(RefCell<Vec<FlowScheduler>>);

impl FlowSchedulers {
    /// Tells the data path the schedulers of the rules that hold now, if it knows others.
    pub(crate) fn tell<'a>(
        &self,
        driver: &Driver,
        rules: impl Iterator<Item = &'a Rule>,
    ) -> Result<(), Gone> {
        let now: Vec<FlowScheduler> = rules.filter_map(Rule::flow_scheduler).collect();
        let mut told = self.0.borrow_mut();
        if *told != now {
            driver.set_flow_schedulers(now.clone())?;
            *told = now;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use dibs_config::Level;
    use dibs_control::{Match, NewRule, Selector, Terms};
    use dibs_io::LocalTime;
    use dibs_settings::{BumpId, Scheduler};

    use super::*;
    use crate::control::ROOT;
    use crate::rulebook::rules::{Narrowed, of_user};
    use crate::rulebook::state_file::FIRST_USER_RULE;

    const NOON: LocalTime = LocalTime {
        second_of_day: 12 * 3600,
        nanos: 0,
        utc_offset: 0,
    };

    fn made(change: impl FnOnce(&mut NewRule)) -> Result<Rule, String> {
        let named = Match {
            dport: Some(22),
            peer: Some("server".to_owned()),
            ..Match::default()
        };
        let mut wanted = NewRule {
            scheduler: Some("redundant".to_owned()),
            ..NewRule::new(Selector::Match(named), "seal")
        };
        change(&mut wanted);
        let behind = ["10.0.1.2/32", "fd00::/64"].map(|net| net.parse().unwrap());
        let bump = BumpId::new(3);
        of_user(FIRST_USER_RULE, &wanted, ROOT, bump, NOON, |_| {
            Some(behind.to_vec())
        })
    }

    #[test]
    fn the_data_path_is_told_addresses_and_ports() {
        let rule = made(|_| {}).unwrap();
        assert_eq!(rule.info().scheduler.as_deref(), Some("redundant"));
        let net = |addr: &str, len| IpNet::new(addr.parse().unwrap(), len).unwrap();
        let all = FlowScheduler {
            remote: vec![net("10.0.1.2", 32), net("fd00::", 64)],
            remote_ports: vec![22..=22],
            ..FlowScheduler::all(Scheduler::Redundant)
        };
        assert_eq!(rule.flow_scheduler(), Some(all.clone()));
        // A rule that the kernel has for one family alone.
        let narrowed = Rule {
            narrowed: Some(Narrowed {
                to: Family::V6,
                why: String::new(),
            }),
            ..rule
        };
        let v6 = FlowScheduler {
            local: vec![net("::", 0)],
            remote: vec![net("fd00::", 64)],
            ..all
        };
        assert_eq!(narrowed.flow_scheduler(), Some(v6));
        let plain = made(|rule| rule.scheduler = None).unwrap();
        assert_eq!((plain.flow_scheduler(), plain.level), (None, Level::Usual));
    }

    #[test]
    fn a_scheduler_goes_with_hours_and_with_nothing_else_than_addresses_and_ports() {
        let term = |key, text: &str| Terms::from_iter([(key, text.to_owned())]);
        let hours = term("time", "08:00-18:00");
        assert!(made(|rule| rule.terms = hours).unwrap().holds);
        let said = made(|rule| rule.terms = term("gid", "7")).unwrap_err();
        assert!(
            said.starts_with("a rule with gid cannot have a scheduler"),
            "{said}"
        );
        let said = made(|rule| rule.scheduler = Some("best".to_owned())).unwrap_err();
        assert!(
            said.starts_with("there is no scheduler \"best\": there are balanced"),
            "{said}"
        );
    }
}
