//! All rules, and which of them hold.

pub(crate) mod kept;
pub(crate) mod restoring;
pub mod rules;
pub(crate) mod scheduling;
pub mod state_file;
pub(crate) mod unresolved;

use std::slice;
use std::time::Duration;

use dibs_control::{RuleId, RuleOrigin};
use dibs_io::LocalTime;

use crate::rulebook::rules::{Displaced, Rule};
use crate::rulebook::state_file::SavedRule;

/// Seconds.
const DAY: u32 = 86_400;

/// Rules of the file and of users.
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

    /// Has these hold for both IP versions.
    pub(crate) fn widen(&mut self, ids: &[RuleId]) {
        let wider = self
            .now
            .rules
            .iter_mut()
            .filter(|rule| ids.contains(&rule.id));
        wider.for_each(|rule| rule.narrowed = None);
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

    /// Has rules hold, or no more, that are to from now on; which.
    pub(crate) fn turn(&mut self, now: LocalTime) -> Vec<Rule> {
        self.utc_offset = now.utc_offset;
        let turned = self.now.rules.iter_mut().filter_map(|rule| {
            let turned = rule.turn(now);
            turned.then(|| rule.clone())
        });
        turned.collect()
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
