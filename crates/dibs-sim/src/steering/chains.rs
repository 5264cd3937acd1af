//! The kernel's marks of connections, and the rules that set them.

use dibs_wire::FlowKey;
use std::collections::BTreeMap;

use dibs_settings::{BumpId, Level};

use super::Mark;
use super::ruling::Rule;
use crate::coverage::{Coverage, Seen};
use crate::kernel::Way;

/// Marks and rules of a host's kernel.
#[derive(Debug, Default)]
pub(super) struct Chains {
    pub(super) marks: BTreeMap<FlowKey, Mark>,
    /// In the order in which they are tried.
    pub(super) rules: Vec<Rule>,
    /// The peer has a session, for rules that prefer their bump.
    pub(super) answers: bool,
    /// Events so far.
    pub(super) seen: Coverage,
}

impl Chains {
    pub(super) fn mark(&self, pair: &FlowKey) -> Mark {
        self.marks.get(pair).copied().unwrap_or_default()
    }

    /// The bump that a rule requires.
    pub(super) fn requires(&self, pair: &FlowKey) -> Option<BumpId> {
        let requires = |rule: &&Rule| rule.level == Level::Require && rule.means(pair);
        self.rules.iter().find(requires).map(|rule| rule.bump)
    }

    /// The bump that the first rule has a connection on.
    pub(super) fn ruled(&self, pair: &FlowKey) -> Option<BumpId> {
        let first = self.rules.iter().find(|rule| rule.means(pair));
        self.requires(pair).or(first.map(|rule| rule.bump))
    }

    /// True if a packet that came in this way gets to the local kernel: PREROUTING and INPUT.
    pub(super) fn admits(&mut self, pair: &FlowKey, way: Way, follow: bool) -> bool {
        let required = self.requires(pair);
        let mark = self.marks.entry(*pair).or_default();
        let came = match way {
            Way::Plain => None,
            Way::Bump(bump) => Some(bump),
        };
        if mark.locked && mark.bump.is_some() && came != mark.bump {
            self.seen.note(match way {
                Way::Plain => Seen::LockedDropped,
                Way::Bump(_) => Seen::LockedElsewhere,
            });
            return false;
        }
        if required.is_some() && came != required {
            self.seen.note(match way {
                Way::Plain => Seen::RequiredDropped,
                Way::Bump(_) => Seen::RequiredElsewhere,
            });
            return false;
        }
        if came.is_some() && follow && mark.bump.is_none() && !mark.chosen {
            mark.bump = came;
            self.seen.note(Seen::Followed);
        }
        true
    }

    /// Way that a packet of the local kernel takes: OUTPUT's order.
    pub(super) fn way(&mut self, pair: &FlowKey) -> Way {
        let required = self.requires(pair);
        let mark = self.marks.entry(*pair).or_default();
        let mut rules = self.rules.iter().filter(|rule| rule.means(pair));
        if let Some(required) = required {
            mark.bump = Some(required);
        } else if !mark.chosen
            && let Some(rule) = rules.next()
            && (rule.level != Level::Prefer || self.answers)
        {
            mark.bump = Some(rule.bump);
        }
        match mark.bump {
            None => Way::Plain,
            Some(bump) => Way::Bump(bump),
        }
    }

    /// Somebody sets a mark by hand; what was chosen with the daemon stays.
    pub(super) fn set_by_hand(&mut self, pair: FlowKey, bump: Option<BumpId>) {
        let required = self.requires(&pair).is_some();
        let mark = self.marks.entry(pair).or_default();
        if !mark.chosen && !mark.locked && !required && mark.bump != bump {
            mark.bump = bump;
            self.seen.note(Seen::MarkedByHand);
        }
    }

    /// LOCKED is as the record says for the bump that a connection is on.
    pub(super) fn set_lock(&mut self, pair: &FlowKey, lock: Option<BumpId>) {
        if let Some(mark) = self.marks.get_mut(pair) {
            let locked = mark.bump.is_some() && lock == mark.bump;
            if std::mem::replace(&mut mark.locked, locked) != locked {
                self.seen.note(match locked {
                    true => Seen::Locked,
                    false => Seen::Unlocked,
                });
            }
        }
    }
}
