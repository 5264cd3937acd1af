//! What a rule selects, and whether two rules contradict each other.

use std::fmt;

use dibs_settings::{Level, Scheduler};
use ipnet::IpNet;

use crate::check;
use crate::table::Wrong;
use crate::{DaySpan, MatchExpr, PortRange};

/// Connections that match in everything that is named. What is empty matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Local ports.
    pub sport: Vec<PortRange>,
    /// Remote ports.
    pub dport: Vec<PortRange>,
    /// Local addresses.
    pub source: Vec<IpNet>,
    /// Remote addresses.
    pub destination: Vec<IpNet>,
    /// Owner of the socket by number. Not together with `user`.
    pub uid: Option<u32>,
    /// Owner of the socket by name.
    pub user: Option<String>,
    /// Group of the socket.
    pub gid: Option<u32>,
    /// The interface by which the ordinary route leads.
    pub interface: Option<String>,
    /// Differentiated services code point of what is sent.
    pub dscp: Option<u8>,
    /// When the rule holds.
    pub time: Option<DaySpan>,
    /// Further matches of iptables.
    pub match_expr: Option<MatchExpr>,
}

/// A rule, as far as others can stand against it.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    /// Whose connections.
    pub selection: &'a Selection,
    /// What they take.
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
    /// Whether this and another rule contradict each other.
    pub fn conflict(self, other: Claim<'_>) -> Option<Conflict> {
        let bumps_differ = self.bump != other.bump;
        let required = self.level == Level::Require && other.level == Level::Require;
        let schedulers = self.scheduler.zip(other.scheduler);
        let same = self.selection.sorted() == other.selection.sorted();
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

impl Selection {
    /// The key of a port, an address or a user, if one is named: what the command line has in place of `--all`.
    pub(crate) fn names_ends(&self) -> Option<&'static str> {
        let named = [
            ("dport", !self.dport.is_empty()),
            ("sport", !self.sport.is_empty()),
            ("source", !self.source.is_empty()),
            ("destination", !self.destination.is_empty()),
            ("uid", self.uid.is_some()),
            ("user", self.user.is_some()),
        ];
        named.iter().find(|(_, is)| *is).map(|(key, _)| *key)
    }

    /// True if some source and some destination are of one IP version.
    pub(crate) fn can_match(&self) -> bool {
        any(&self.source, &self.destination, |a, b| {
            a.addr().is_ipv4() == b.addr().is_ipv4()
        })
    }

    /// The key of something that shows only in packets that this host sends, if it is named: what comes
    /// in cannot be told by it.
    pub fn shows_only_sending(&self) -> Option<&'static str> {
        let named = [
            ("gid", self.gid.is_some()),
            ("interface", self.interface.is_some()),
            ("dscp", self.dscp.is_some()),
            ("match", self.match_expr.is_some()),
        ];
        named.iter().find(|(_, is)| *is).map(|(key, _)| *key)
    }

    /// The key of something that neither addresses nor ports show, if it is named: whoever shares out data over the
    /// paths knows no more of a connection.
    pub fn shows_elsewhere(&self) -> Option<&'static str> {
        let owner = [("uid", self.uid.is_some()), ("user", self.user.is_some())];
        let owner = owner.iter().find(|(_, is)| *is).map(|(key, _)| *key);
        owner.or_else(|| self.shows_only_sending())
    }

    /// Names one thing more, as the file does under this key.
    ///
    /// # Errors
    /// The text says nothing of that kind, in words that begin with the key.
    pub fn name(&mut self, key: &str, text: &str) -> Result<(), String> {
        let named = match key {
            "interface" => check::interface(text).map(|name| self.interface = Some(name)),
            "dscp" => check::dscp(text).map(|dscp| self.dscp = Some(dscp)),
            "time" => check::day_span(text).map(|span| self.time = Some(span)),
            "match" => MatchExpr::parse(text).map(|expr| self.match_expr = Some(expr)),
            _ => Err(Wrong::bare("is nothing that a rule names")),
        };
        named.map_err(|Wrong { message, hint, .. }| match hint {
            Some(hint) => format!("{key} {message}: {hint}"),
            None => format!("{key} {message}"),
        })
    }

    /// What is named, by its key, as the user writes it.
    pub fn terms(&self) -> Vec<(&'static str, String)> {
        fn list<T: ToString>(items: &[T]) -> Option<String> {
            let items: Vec<String> = items.iter().map(T::to_string).collect();
            (!items.is_empty()).then(|| items.join(","))
        }
        fn one<T: ToString>(item: &Option<T>) -> Option<String> {
            item.as_ref().map(T::to_string)
        }
        [
            ("sport", list(&self.sport)),
            ("dport", list(&self.dport)),
            ("source", list(&self.source)),
            ("destination", list(&self.destination)),
            ("uid", one(&self.uid)),
            ("user", self.user.clone()),
            ("gid", one(&self.gid)),
            ("interface", self.interface.clone()),
            ("dscp", one(&self.dscp)),
            ("time", one(&self.time)),
            ("match", one(&self.match_expr)),
        ]
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .collect()
    }

    fn sorted(&self) -> Self {
        let mut sorted = self.clone();
        for ports in [&mut sorted.sport, &mut sorted.dport] {
            ports.sort_unstable_by_key(|range| (range.first, range.last));
            ports.dedup();
        }
        for nets in [&mut sorted.source, &mut sorted.destination] {
            nets.sort_unstable();
            nets.dedup();
        }
        sorted
    }

    /// Whether there may be connections that both select. What only the kernel can tell may be so.
    fn may_meet(&self, other: &Self) -> bool {
        any(&self.sport, &other.sport, ports_meet)
            && any(&self.dport, &other.dport, ports_meet)
            && any(&self.source, &other.source, nets_meet)
            && any(&self.destination, &other.destination, nets_meet)
            && equal(&self.uid, &other.uid)
            && equal(&self.user, &other.user)
            && equal(&self.gid, &other.gid)
            && equal(&self.interface, &other.interface)
            && equal(&self.dscp, &other.dscp)
            && match (self.time, other.time) {
                (Some(a), Some(b)) => a.contains(b.start) || b.contains(a.start),
                _ => true,
            }
    }
}

fn any<T>(a: &[T], b: &[T], meet: fn(&T, &T) -> bool) -> bool {
    a.is_empty() || b.is_empty() || a.iter().any(|a| b.iter().any(|b| meet(a, b)))
}

fn ports_meet(a: &PortRange, b: &PortRange) -> bool {
    a.first <= b.last && b.first <= a.last
}

fn nets_meet(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

fn equal<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
    a.is_none() || b.is_none() || a == b
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(text: &str) -> Vec<PortRange> {
        let ranges = text.split(' ').filter(|range| !range.is_empty());
        ranges
            .map(|r| crate::check::port_range(r).unwrap())
            .collect()
    }

    fn to(dport: &str) -> Selection {
        Selection {
            dport: ports(dport),
            ..Selection::default()
        }
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
        let net = |text: &str| Selection {
            destination: vec![text.parse().unwrap()],
            ..Selection::default()
        };
        let hours = |text: &str| Selection {
            time: Some(crate::check::day_span(text).unwrap()),
            ..Selection::default()
        };
        let owned = |uid| Selection {
            uid: Some(uid),
            ..Selection::default()
        };
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
