//! The kernel's marks of connections, and the rules that set them.

use dibs_wire::FlowKey;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use dibs_settings::{BumpId, Level};

use super::Mark;
use super::ruling::Rule;
use crate::coverage::{Coverage, Seen};
use crate::kernel::Way;

/// Event of conntrack about an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    New(Mark),
    Update(Mark),
    Destroyed,
}

/// Marks and rules of a host's kernel.
#[derive(Debug, Default)]
pub(super) struct Chains {
    pub(super) marks: BTreeMap<FlowKey, Mark>,
    /// Marks that connections begin with.
    pub(super) first: BTreeMap<FlowKey, Mark>,
    /// Connections with marks of other programs, of which the daemon has made nothing yet; true if it was started since, so
    /// that nobody can say where a connection in plain was before.
    pub(super) by_others: BTreeMap<FlowKey, bool>,
    /// Connections of which another program ever set the mark, when they began or later.
    pub(super) meddled: BTreeSet<FlowKey>,
    /// Connections whose entries the daemon made: they take all numbers.
    pub(super) loose: BTreeSet<FlowKey>,
    /// Events of which the daemon has not heard yet.
    pub(super) events: VecDeque<(FlowKey, Event)>,
    /// In the order in which they are tried.
    pub(super) rules: Vec<Rule>,
    /// Rules of their own of connections that are chosen to be on a bump, as the daemon last had them.
    pub(super) pinned: BTreeMap<FlowKey, BumpId>,
    /// Addresses that others have beside the peer: rules mean what is on a bump there.
    pub(super) shared: Vec<IpAddr>,
    /// The peer has a session, for rules that prefer their bump.
    pub(super) answers: bool,
    /// Events so far.
    pub(super) seen: Coverage,
}

impl Chains {
    pub(super) fn mark(&self, pair: &FlowKey) -> Mark {
        self.marks.get(pair).copied().unwrap_or_default()
    }

    /// A connection is to begin with this mark.
    pub(super) fn begin(&mut self, pair: FlowKey, mark: Mark) {
        self.first.insert(pair, mark);
        if mark.bump.is_some() {
            self.meddled.insert(pair);
        }
    }

    /// Changes the entry of a connection, which is made if there is none.
    pub(super) fn change<R>(&mut self, pair: &FlowKey, change: impl FnOnce(&mut Mark) -> R) -> R {
        let known = self.marks.get(pair).copied();
        let first = || self.first.remove(pair).unwrap_or_default();
        let mut mark = known.unwrap_or_else(first);
        let changed = change(&mut mark);
        if known != Some(mark) {
            self.marks.insert(*pair, mark);
            let event = match known {
                None => Event::New(mark),
                Some(_) => Event::Update(mark),
            };
            self.events.push_back((*pair, event));
        }
        changed
    }

    /// True if packets of a connection are valid whatever their numbers: its entry says so, or is made by the next one.
    pub(super) fn takes_all(&self, pair: &FlowKey) -> bool {
        self.loose.contains(pair) || !self.marks.contains_key(pair)
    }

    /// The entry of a connection is lost.
    pub(super) fn lose(&mut self, pair: &FlowKey) {
        self.loose.remove(pair);
        if self.marks.remove(pair).is_some() {
            self.events.push_back((*pair, Event::Destroyed));
        }
    }

    /// The ends of a connection that is over belong to nobody.
    pub(super) fn forget(&mut self, pair: &FlowKey) {
        self.marks.remove(pair);
        self.first.remove(pair);
        self.by_others.remove(pair);
        self.meddled.remove(pair);
        self.loose.remove(pair);
        self.pinned.remove(pair);
        self.events.retain(|(known, _)| known != pair);
    }

    /// Rules for connections to the other end of this one.
    fn rules_for(&self, pair: &FlowKey) -> impl Iterator<Item = &Rule> {
        let is_anothers = self.shared.contains(&pair.dst) && self.mark(pair).bump.is_none();
        self.rules.iter().filter(move |_| !is_anothers)
    }

    /// The bump that a rule requires.
    pub(super) fn requires(&self, pair: &FlowKey) -> Option<BumpId> {
        let requires = |rule: &&Rule| rule.level == Level::Require && rule.means(pair);
        self.rules_for(pair).find(requires).map(|rule| rule.bump)
    }

    /// The bump that the first rule has a connection on.
    pub(super) fn ruled(&self, pair: &FlowKey) -> Option<BumpId> {
        let first = self.rules_for(pair).find(|rule| rule.means(pair));
        self.requires(pair).or(first.map(|rule| rule.bump))
    }

    /// True if a packet that came in this way gets to the local kernel: PREROUTING and INPUT.
    pub(super) fn admits(&mut self, pair: &FlowKey, way: Way, follow: bool) -> bool {
        let required = self.requires(pair);
        let is_pinned = self.pinned.contains_key(pair);
        let came = match way {
            Way::Plain => None,
            Way::Bump(bump) => Some(bump),
        };
        let note = |drops: bool, [plain, elsewhere]: [Seen; 2]| {
            let seen = match way {
                Way::Plain => plain,
                Way::Bump(_) => elsewhere,
            };
            drops.then_some((false, seen))
        };
        let judge = |mark: &mut Mark| {
            let is_locked = mark.locked && mark.bump.is_some() && came != mark.bump;
            let locked = note(is_locked, [Seen::LockedDropped, Seen::LockedElsewhere]);
            let is_required = required.is_some() && came != required;
            let drop = note(
                is_required,
                [Seen::RequiredDropped, Seen::RequiredElsewhere],
            );
            let strays = is_pinned && came.is_none() && !mark.chosen;
            let pinned = strays.then_some((false, Seen::PinnedDropped));
            let dropped = locked.or(drop).or(pinned);
            let follows = came.is_some() && follow && mark.bump.is_none() && !mark.chosen;
            if dropped.is_none() && follows {
                mark.bump = came;
                return Some((true, Seen::Followed));
            }
            dropped
        };
        let judged = self.change(pair, judge);
        if let Some((_, seen)) = judged {
            self.seen.note(seen);
        }
        judged.is_none_or(|(admits, _)| admits)
    }

    /// Way that a packet of the local kernel takes: OUTPUT's order.
    pub(super) fn way(&mut self, pair: &FlowKey) -> Way {
        let required = self.requires(pair);
        let rule = self.rules_for(pair).find(|rule| rule.means(pair));
        let rule = rule.filter(|rule| rule.level != Level::Prefer || self.answers);
        let pinned = self.pinned.get(pair).copied();
        let ruled = pinned.or(rule.map(|rule| rule.bump));
        let (bump, was) = self.change(pair, |mark| {
            let ruled = ruled.filter(|_| !mark.chosen);
            let was = mark.bump;
            mark.bump = required.or(ruled).or(was);
            (mark.bump, was)
        });
        if bump != was && bump == pinned {
            self.seen.note(Seen::Pinned);
        }
        bump.map_or(Way::Plain, Way::Bump)
    }

    /// Another program sets the whole mark of a connection, if it is tracked.
    pub(super) fn set_by_hand(&mut self, pair: FlowKey, bump: Option<BumpId>, chosen: bool) {
        if !self.marks.contains_key(&pair) {
            return;
        }
        let locked = false;
        let mark = Mark {
            bump,
            chosen,
            locked,
        };
        if self.change(&pair, |known| std::mem::replace(known, mark)) != mark {
            self.by_others.insert(pair, false);
            self.meddled.insert(pair);
            self.seen.note(Seen::MarkedByHand);
        }
    }

    /// LOCKED is as the record says for the bump that a connection is on.
    pub(super) fn set_lock(&mut self, pair: &FlowKey, lock: Option<BumpId>) {
        if !self.marks.contains_key(pair) {
            return;
        }
        let set = |mark: &mut Mark| {
            let locked = mark.bump.is_some() && lock == mark.bump;
            let was = std::mem::replace(&mut mark.locked, locked);
            (was != locked).then_some(locked)
        };
        match self.change(pair, set) {
            Some(true) => self.seen.note(Seen::Locked),
            Some(false) => self.seen.note(Seen::Unlocked),
            None => {}
        }
    }
}
