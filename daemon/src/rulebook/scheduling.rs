//! Rules that have a scheduler: which connections the data path has to share out by it.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use dibs_config::PortRange;
use dibs_core::node::FlowScheduler;
use dibs_policy::Family;
use ipnet::IpNet;

use crate::data::{Driver, Gone};
use crate::rulebook::rules::Rule;

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
    use crate::rulebook::rules::{FIRST_USER_RULE, Narrowed, of_user};

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
        let bump = BumpId::new(3).unwrap();
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
