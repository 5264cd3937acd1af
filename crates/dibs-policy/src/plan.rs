//! From a wish to the kernel state that carries it out, and from there to the steps that are still missing.

use std::fmt;

use dibs_settings::BumpId;

use crate::iptables::{Chain, Role, Tables, install, remove};
use crate::net::{NetChange, Network, NetworkState};
use crate::rules;
use crate::{Desired, Family, Invalid, MarkLayout};

/// The kernel state that carries out a wish. Printed, it reads as commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(crate) marks: MarkLayout,
    pub(crate) bumps: Vec<BumpId>,
    pub(crate) v4: Vec<Chain>,
    pub(crate) v6: Vec<Chain>,
    /// Devices, addresses, routes, RPDB rules.
    pub network: Network,
}

/// The kernel state as it is, as far as it is ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// IPv4 chains.
    pub v4: Tables,
    /// IPv6 chains.
    pub v6: Tables,
    /// Devices, addresses, routes, RPDB rules.
    pub network: NetworkState,
}

/// One step towards a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Feed `input` to the family's iptables-restore.
    Restore {
        /// IPv4 or IPv6.
        family: Family,
        /// What it reads.
        input: String,
    },
    /// Change devices, addresses, routes or RPDB rules.
    Net(NetChange),
    /// Clear our bits from every conntrack entry whose bump is not among these. With none of them:
    /// from every entry that has any.
    ReleaseMarks {
        /// Which bits are ours.
        marks: MarkLayout,
        /// Bumps whose connections stay.
        keep: Vec<BumpId>,
    },
}

impl Plan {
    /// The plan for `desired`.
    pub fn new(desired: &Desired) -> Result<Self, Invalid> {
        desired.validate()?;
        Ok(Self {
            marks: desired.marks,
            bumps: desired.bumps.iter().map(|bump| bump.id).collect(),
            v4: rules::iptables(desired, Family::V4),
            v6: rules::iptables(desired, Family::V6),
            network: Network::of(desired),
        })
    }

    /// The plan that leaves nothing of ours.
    pub fn empty(marks: MarkLayout) -> Self {
        let (bumps, v4, v6) = Default::default();
        Self {
            marks,
            bumps,
            v4,
            v6,
            network: Network::default(),
        }
    }

    /// The chains of `family`.
    pub fn chains(&self, family: Family) -> &[Chain] {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// True if nothing at all is wanted.
    pub fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty() && self.network == Network::default()
    }

    /// The steps from `now` to this plan, in an order in which no marked packet can leave in plain:
    /// guards, routes and RPDB rules come before what sets marks, and go after it.
    ///
    /// `accepted` tells whether the rules found are how this kernel shows the chain wanted.
    pub fn steps(
        &self,
        now: &Observed,
        accepted: impl Fn(Family, &Chain, &[&str]) -> bool,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        let installing = |role| {
            Family::BOTH.map(|family| {
                let accepted = |chain: &Chain, rules: &[&str]| accepted(family, chain, rules);
                (
                    family,
                    install(self.chains(family), now.tables(family), role, accepted),
                )
            })
        };
        let removing = |role| {
            Family::BOTH.map(|family| {
                (
                    family,
                    remove(self.chains(family), now.tables(family), role),
                )
            })
        };
        restore(&mut steps, installing(Role::Guard));
        steps.extend(
            self.network
                .additions(&now.network)
                .into_iter()
                .map(Step::Net),
        );
        restore(&mut steps, installing(Role::Marker));
        restore(&mut steps, removing(Role::Marker));
        if self.drops_bump(now) {
            steps.push(Step::ReleaseMarks {
                marks: self.marks,
                keep: self.bumps.clone(),
            });
        }
        steps.extend(
            self.network
                .removals(&now.network)
                .into_iter()
                .map(Step::Net),
        );
        restore(&mut steps, removing(Role::Guard));
        steps
    }

    /// Whether a bump that has an RPDB rule now has none in the plan.
    fn drops_bump(&self, now: &Observed) -> bool {
        let ids = |rule: &crate::net::Rule| self.marks.bump_of(rule.mark?.0);
        now.network
            .rules
            .iter()
            .filter_map(ids)
            .any(|id| !self.bumps.contains(&id))
            || (self.bumps.is_empty() && !(now.v4.is_empty() && now.v6.is_empty()))
    }
}

impl Observed {
    /// The chains of `family`.
    pub fn tables(&self, family: Family) -> &Tables {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }
}

impl Step {
    /// What it is about, in a line.
    pub(crate) fn gist(&self) -> String {
        let Step::Restore { family, input } = self else {
            return self.to_string().trim_end().to_owned();
        };
        let program = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let declared = input.lines().filter_map(|line| line.strip_prefix(':'));
        let chains: Vec<&str> = declared.filter_map(|line| line.split(' ').next()).collect();
        let jumps: Vec<&str> = { input.lines() }
            .filter(|line| line.starts_with("-I"))
            .collect();
        match chains.is_empty() {
            true => format!("{program} {}", jumps.join(", ")),
            false => format!("{} of {program}", chains.join(", ")),
        }
    }
}

fn restore(steps: &mut Vec<Step>, inputs: [(Family, String); 2]) {
    let needed = inputs.into_iter().filter(|(_, input)| !input.is_empty());
    steps.extend(needed.map(|(family, input)| Step::Restore { family, input }));
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Restore { family, input } => {
                let program = match family {
                    Family::V4 => "iptables-restore",
                    Family::V6 => "ip6tables-restore",
                };
                writeln!(f, "{program} --noflush --wait <<EOF\n{input}EOF")
            }
            Step::Net(change) => writeln!(f, "{change}"),
            Step::ReleaseMarks { marks, keep } => {
                write!(f, "clear {:#x} of ctmarks", marks.mask())?;
                for (n, id) in keep.iter().enumerate() {
                    write!(f, "{} {id}", if n == 0 { ", but for bump" } else { "," })?;
                }
                writeln!(f)
            }
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps(&Observed::with_devices(&self.network), |_, _, _| false)
            .iter()
            .try_for_each(|step| step.fmt(f))
    }
}

impl Observed {
    /// A kernel with nothing of ours but fresh devices.
    fn with_devices(network: &Network) -> Self {
        let fresh = |ours: bool| crate::net::LinkState {
            up: !ours,
            mtu: 1500,
            noqueue: false,
            sysctls: crate::net::SYSCTLS
                .iter()
                .map(|(key, _)| (*key, String::new()))
                .collect(),
        };
        let link =
            |device: &crate::DeviceName| (device.clone(), fresh(network.devices.contains(device)));
        let links = network.watched().map(link).collect();
        Self {
            network: NetworkState {
                links,
                ..Default::default()
            },
            ..Default::default()
        }
    }
}

#[cfg(test)]
mod tests;
