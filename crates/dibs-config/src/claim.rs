//! Contradictions between two rules.

use std::fmt;

use dibs_settings::{Level, Scheduler, Selection};

/// A rule, as far as others can stand against it.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// Owners of the connections.
    pub selection: &'a Selection,
    /// Ports and addresses that they take.
    pub bump: &'a str,
    /// How firmly.
    pub level: Level,
    /// How their data is shared out, if it is by a scheduler of their own.
    pub scheduler: Option<Scheduler>,
}

/// Why two rules cannot both be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// They select the same, and say different things of it: the later would never count.
    Same,
    /// Some connections would be required to go by either bump, and so by none.
    BothRequired,
    /// They select the same, and each has a scheduler: the later's would never count.
    Schedulers,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Conflict::Same => "selects the same connections",
            Conflict::BothRequired => "requires another bump of some of the same connections",
            Conflict::Schedulers => "has another scheduler for the same connections",
        })
    }
}

impl Claim<'_> {
    /// True if this and another rule contradict each other.
    pub fn conflict(self, other: Claim<'_>) -> Option<Conflict> {
        let bumps_differ = self.bump != other.bump;
        let required = self.level == Level::Require && other.level == Level::Require;
        let schedulers = self.scheduler.zip(other.scheduler);
        let same = self.selection.is_same(other.selection);
        if same && (bumps_differ || self.level != other.level) {
            Some(Conflict::Same)
        } else if same && schedulers.is_some_and(|(own, others)| own != others) {
            Some(Conflict::Schedulers)
        } else if required && bumps_differ && self.selection.may_meet(other.selection) {
            Some(Conflict::BothRequired)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use dibs_settings::Term;

    use super::*;

    fn of(key: &str, texts: &str) -> Selection {
        let texts = texts.split(' ').filter(|text| !text.is_empty());
        texts.map(|text| Term::parse(key, text).unwrap()).collect()
    }

    fn to(dport: &str) -> Selection {
        of("dport", dport)
    }

    fn between(a: (&Selection, &str, Level), b: (&Selection, &str, Level)) -> Option<Conflict> {
        let claim = |(selection, bump, level)| Claim {
            selection,
            bump,
            level,
            scheduler: None,
        };
        let found = claim(a).conflict(claim(b));
        assert_eq!(claim(b).conflict(claim(a)), found, "either way round");
        found
    }

    #[test]
    fn one_selection_has_one_bump_and_one_level() {
        use Level::{Prefer, Require, Usual};
        let (a, b) = (to("80 443"), to("443 80 80"));
        assert_eq!(
            between((&a, "seal", Usual), (&b, "share", Usual)),
            Some(Conflict::Same)
        );
        assert_eq!(
            between((&a, "seal", Require), (&b, "seal", Prefer)),
            Some(Conflict::Same)
        );
        assert_eq!(between((&a, "seal", Usual), (&b, "seal", Usual)), None);
        // Nor two schedulers; but one may have what the other leaves open.
        let scheduled = |scheduler| Claim {
            selection: &a,
            bump: "seal",
            level: Usual,
            scheduler,
        };
        let redundant = scheduled(Some(Scheduler::Redundant));
        for (other, conflict) in [
            (Some(Scheduler::Blest), Some(Conflict::Schedulers)),
            (Some(Scheduler::Redundant), None),
            (None, None),
        ] {
            assert_eq!(redundant.conflict(scheduled(other)), conflict);
            assert_eq!(scheduled(other).conflict(redundant), conflict);
        }
        // The first decides over what both select.
        assert_eq!(
            between((&a, "seal", Usual), (&to("80"), "share", Usual)),
            None
        );
    }

    #[test]
    fn nothing_can_be_required_to_go_by_two_bumps() {
        let required = |a: &Selection, b: &Selection| {
            let found = between((a, "seal", Level::Require), (b, "share", Level::Require));
            found == Some(Conflict::BothRequired)
        };
        let net = |text: &str| of("destination", text);
        let hours = |text: &str| of("time", text);
        let owned = |uid: u32| of("uid", &uid.to_string());
        assert!(required(&to("80-90"), &to("85")));
        assert!(!required(&to("80-90"), &to("91 79")));
        assert!(required(&to("80"), &net("10.0.0.0/8")));
        assert!(required(&net("10.0.0.0/8"), &net("10.1.2.3/32")));
        assert!(!required(&net("10.0.0.0/8"), &net("fd00::/8")));
        assert!(required(&owned(1), &to("80")) && !required(&owned(1), &owned(2)));
        assert!(!required(&hours("08:00-18:00"), &hours("18:00-08:00")));
        assert!(required(&hours("08:00-18:00"), &hours("22:00-08:01")));
        let usual = between(
            (&to("80-90"), "seal", Level::Require),
            (&to("85"), "share", Level::Usual),
        );
        assert_eq!(usual, None);
    }
}
