//! Carries a wish out: observe, compare, change, look again.

use std::collections::{BTreeMap, BTreeSet};

use crate::drops::Drops;
use crate::iptables::{self, Chain, Role, Tables};
use crate::kernel::{Kernel, Netlink};
use crate::net::NetChange;
use crate::plan::{Observed, Plan, Step};
use crate::runner::{Command, CommandRunner, System};
use crate::table::Table;
use crate::{Desired, DeviceName, Error, Family, MarkLayout};

mod probe;

pub use probe::Probed;

/// Variant of the iptables programs. Each sees only the rules made with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// What this host calls `iptables`.
    Default,
    /// `iptables-nft`.
    Nft,
    /// `iptables-legacy`.
    Legacy,
}

impl Variant {
    const ALL: [Variant; 3] = [Variant::Default, Variant::Nft, Variant::Legacy];

    fn program(self, family: Family, verb: &str) -> String {
        let name = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let variant = match self {
            Variant::Default => "",
            Variant::Nft => "-nft",
            Variant::Legacy => "-legacy",
        };
        format!("{name}{variant}-{verb}")
    }
}

/// Rounds of observing and changing: another program may change the rules in between.
const ATTEMPTS: usize = 3;

/// Steers: brings the kernel to a wish and knows when it is there.
pub struct Steering<R = System, K = Netlink> {
    runner: R,
    kernel: K,
    /// The variant in use, once one has been seen to work.
    variant: Option<Variant>,
    /// Whether the kernel tells of changes made with it.
    told: Option<bool>,
    /// Whether the other variants were cleared of what an earlier run may have left there.
    others_clear: bool,
    /// How iptables-save shows a chain of ours, where that is not the way we write it.
    shown: BTreeMap<(Family, Table, String), Shown>,
    /// What was counted by chains that have been written anew since.
    dropped: Drops,
}

/// A chain as it was written and as it is shown.
struct Shown {
    written: Vec<String>,
    shown: Vec<String>,
}

/// Report of [`Steering::set`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The steps taken, in order. Empty: everything was as wanted.
    pub steps: Vec<Step>,
    /// Warnings for the log: things that could not be had but do not stand in the way.
    pub warnings: Vec<String>,
}

impl Steering {
    /// Steering of this host, in the network namespace of the calling thread. `variant` fixes the
    /// iptables variant; without it, the host's default, or the one of the others that works.
    pub fn system(variant: Option<Variant>) -> Result<Self, Error> {
        Ok(Self::new(System, Netlink::new()?, variant))
    }
}

impl<R: CommandRunner, K: Kernel> Steering<R, K> {
    /// Steering with the given means.
    pub fn new(runner: R, kernel: K, variant: Option<Variant>) -> Self {
        let others_clear = variant.is_some();
        Self {
            runner,
            kernel,
            variant,
            told: None,
            others_clear,
            shown: BTreeMap::new(),
            dropped: Drops::default(),
        }
    }

    /// Brings the kernel to `desired` by the difference alone; may be repeated at any time. After an error
    /// the kernel is somewhere between, with no marked packet let out in plain; call again. What an earlier
    /// run left with another variant of iptables stays until [`clear_others`](Self::clear_others).
    pub async fn set(&mut self, desired: &Desired) -> Result<Report, Error> {
        let plan = Plan::new(desired)?;
        let mut report = Report::default();
        if plan.is_empty() && self.variant.is_none() {
            for variant in Variant::ALL {
                self.bring(variant, &plan, &mut report).await?;
            }
            return Ok(report);
        }
        let variant = match self.variant {
            Some(variant) => variant,
            None => self.choose().await?,
        };
        self.variant = Some(variant);
        let observed = self.bring(variant, &plan, &mut report).await?;
        report.warnings.extend(missing(&plan, &observed));
        Ok(report)
    }

    /// Removes what an earlier run left with another variant of iptables than that in use, and says what.
    /// To be called some time after [`set`](Self::set), so that there is no gap; looks only once, for
    /// that takes as long as all of `set`.
    pub async fn clear_others(&mut self) -> Result<Vec<Step>, Error> {
        let mut steps = Vec::new();
        let Some(used) = self.variant.filter(|_| !self.others_clear) else {
            return Ok(steps);
        };
        self.others_clear = true;
        let ours = self.is_nft(used).await?;
        for variant in Variant::ALL {
            // Two names of one kind see the same rules: those in use.
            match self.is_nft(variant).await {
                Ok(kind) if kind != ours => {}
                Ok(_) | Err(Error::NotInstalled(_)) => continue,
                Err(error) => return Err(error),
            }
            for family in Family::BOTH {
                let found = self.tables(variant, family, false).await?;
                for role in [Role::Marker, Role::Guard] {
                    let input = iptables::remove(&[], &found, role);
                    if !input.is_empty() {
                        self.restore(variant, family, &input).await?;
                        steps.push(Step::Restore { family, input });
                    }
                }
            }
        }
        Ok(steps)
    }

    /// Removes everything of ours, whoever left it: chains, jumps, RPDB rules, routes, addresses, our bits in
    /// ctmarks. Works without a daemon and without knowing what was wanted; touches nothing else.
    pub async fn cleanup(&mut self, marks: MarkLayout) -> Result<Report, Error> {
        let mut report = Report::default();
        let plan = Plan::empty(marks);
        for variant in Variant::ALL {
            self.bring(variant, &plan, &mut report).await?;
        }
        // Marks outlive the rules that set them.
        let mut released = 0;
        match self.kernel.release_marks(marks, &[]).await {
            Ok(count) => released = count,
            Err(error) if error.os_error() == Some(libc::EPERM) => return Err(error),
            Err(error) => report.warnings.push(error.to_string()),
        }
        if released > 0 {
            report.steps.push(Step::ReleaseMarks {
                marks,
                keep: Vec::new(),
            });
        }
        Ok(report)
    }

    /// True if [`Watch`](crate::Watch) hears of changes of our chains. It does not for those made with the legacy
    /// variant: then [`set`](Self::set) is to be repeated often.
    pub async fn is_told(&mut self) -> Result<bool, Error> {
        match (self.told, self.variant) {
            (Some(told), _) => Ok(told),
            (None, None) => Ok(true),
            (None, Some(variant)) => {
                let told = self.is_nft(variant).await?;
                self.told = Some(told);
                Ok(told)
            }
        }
    }

    /// Rules of ours in the kernel, seen with the variant in use.
    pub async fn observe(&mut self, desired: &Desired) -> Result<Observed, Error> {
        let plan = Plan::new(desired)?;
        self.look(self.variant.unwrap_or(Variant::Default), &plan)
            .await
    }

    /// Counts packets that our chains dropped since the start, IPv4 and IPv6 together, by reason, while this
    /// steers.
    pub fn counting(&self) -> Counting<R>
    where
        R: Clone,
    {
        Counting {
            runner: self.runner.clone(),
            variant: self.variant,
            before: self.dropped.clone(),
        }
    }

    /// The first variant that can set up its tables here.
    async fn choose(&self) -> Result<Variant, Error> {
        let (mut absent, mut reasons) = (None, Vec::new());
        for variant in Variant::ALL {
            let program = variant.program(Family::V4, "restore");
            let probe = Command::new(program, &["--noflush", "--wait"], "*mangle\nCOMMIT\n");
            match self.runner.run(&probe).await {
                Ok(_) => return Ok(variant),
                // It is the one, and busy.
                Err(error @ Error::TimedOut { .. }) => return Err(error),
                Err(error @ Error::NotInstalled(_)) => absent = absent.or(Some(error)),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        match absent {
            Some(error) if reasons.is_empty() => Err(error),
            _ => Err(Error::NoIptables(reasons.join("; "))),
        }
    }

    /// Whether a variant's rules are nftables', as its version says since there are two kinds (1.8).
    async fn is_nft(&self, variant: Variant) -> Result<bool, Error> {
        let program = variant.program(Family::V4, "restore");
        let version = self
            .runner
            .run(&Command::new(program, &["--version"], ""))
            .await?;
        Ok(version.contains("nf_tables"))
    }

    /// Takes the steps to `plan` until none is left.
    async fn bring(
        &mut self,
        variant: Variant,
        plan: &Plan,
        report: &mut Report,
    ) -> Result<Observed, Error> {
        let mut failure = None;
        for _ in 0..=ATTEMPTS {
            let observed = self.look(variant, plan).await?;
            self.learn(plan, &observed, report)?;
            let steps = plan.steps(&observed, |family, chain, rules| {
                self.is_shown_as(family, chain, rules)
            });
            let steps: Vec<Step> = steps
                .into_iter()
                .filter(|step| !report.gave_up(plan, step))
                .collect();
            if steps.is_empty() {
                return Ok(observed);
            }
            failure = steps.first().map(|step| Error::Undone(step.gist()));
            for step in steps {
                tracing::debug!(%step, "steering");
                if let Step::Restore { family, input } = &step {
                    let ends = |name: &str| input.lines().any(|line| declared(line) == Some(name));
                    self.dropped.add(observed.tables(*family), ends);
                }
                match self.take(variant, &step).await {
                    Ok(()) => report.steps.push(step),
                    Err(error) if optional(plan, &step) => {
                        report.warnings.push(error.to_string());
                        report.steps.push(step);
                    }
                    // Whoever keeps it waiting may do so for long; who called us is not to wait as long.
                    Err(error @ Error::TimedOut { .. }) => return Err(error),
                    Err(error) => {
                        tracing::debug!(%error, "steering step failed, looking again");
                        failure = Some(error);
                        break;
                    }
                }
            }
        }
        Err(failure.expect("the last round left steps, or it would have returned"))
    }

    async fn take(&mut self, variant: Variant, step: &Step) -> Result<(), Error> {
        match step {
            Step::Restore { family, input } => self.restore(variant, *family, input).await,
            Step::Net(change) => self.kernel.change(change).await,
            Step::ReleaseMarks { marks, keep } => {
                self.kernel.release_marks(*marks, keep).await.map(drop)
            }
        }
    }

    async fn restore(&self, variant: Variant, family: Family, input: &str) -> Result<(), Error> {
        let program = variant.program(family, "restore");
        self.runner
            .run(&Command::new(program, &["--noflush", "--wait"], input))
            .await
            .map(drop)
    }

    async fn look(&mut self, variant: Variant, plan: &Plan) -> Result<Observed, Error> {
        let devices: Vec<DeviceName> = plan.network.watched().cloned().collect();
        let network = self.kernel.observe(&devices).await?;
        let (v4, v6) = tokio::try_join!(
            self.tables(variant, Family::V4, !plan.v4.is_empty()),
            self.tables(variant, Family::V6, !plan.v6.is_empty()),
        )?;
        Ok(Observed { v4, v6, network })
    }

    /// Our chains of a family. A variant that is not installed has none; unless it is needed, one that
    /// fails (no IPv6 here, no kernel module) has none either.
    async fn tables(
        &self,
        variant: Variant,
        family: Family,
        needed: bool,
    ) -> Result<Tables, Error> {
        tables(&self.runner, variant, family, needed).await
    }

    fn is_shown_as(&self, family: Family, chain: &Chain, rules: &[&str]) -> bool {
        chain.rules == rules
            || self
                .shown
                .get(&(family, chain.table, chain.name.clone()))
                .is_some_and(|known| known.written == chain.rules && known.shown == rules)
    }

    /// iptables versions differ in how they print a rule. What is there right after it was written is
    /// how this one prints it, if it has as many rules.
    fn learn(&mut self, plan: &Plan, observed: &Observed, report: &Report) -> Result<(), Error> {
        for family in Family::BOTH {
            let written: BTreeSet<&str> = report
                .steps
                .iter()
                .filter_map(|step| match step {
                    Step::Restore { family: of, input } if *of == family => Some(input),
                    _ => None,
                })
                .flat_map(|input| input.lines().filter_map(declared))
                .collect();
            for chain in plan
                .chains(family)
                .iter()
                .filter(|c| written.contains(c.name.as_str()))
            {
                let Some(rules) = observed.tables(family).rules(chain) else {
                    continue;
                };
                if rules.len() != chain.rules.len() {
                    return Err(Error::NotTaken {
                        chain: chain.name.clone(),
                        written: chain.rules.len(),
                        found: rules.len(),
                    });
                }
                if chain.rules != rules {
                    let shown = rules.iter().map(|&rule| rule.to_owned()).collect();
                    let key = (family, chain.table, chain.name.clone());
                    self.shown.insert(
                        key,
                        Shown {
                            written: chain.rules.clone(),
                            shown,
                        },
                    );
                }
            }
        }
        Ok(())
    }
}

/// See [`Steering::counting`].
#[derive(Debug)]
pub struct Counting<R> {
    runner: R,
    variant: Option<Variant>,
    /// By chains that have been written anew since.
    before: Drops,
}

impl<R: CommandRunner> Counting<R> {
    /// Packets that were dropped, without those counted by chains that are written anew meanwhile.
    pub async fn drops(self) -> Result<Drops, Error> {
        let mut drops = self.before;
        if let Some(variant) = self.variant {
            for family in Family::BOTH {
                drops.add(&tables(&self.runner, variant, family, false).await?, |_| {
                    true
                });
            }
        }
        Ok(drops)
    }
}

/// See [`Steering::tables`].
async fn tables(
    runner: &impl CommandRunner,
    variant: Variant,
    family: Family,
    needed: bool,
) -> Result<Tables, Error> {
    // Without `-t`: naming a table would make the legacy variant create it.
    let command = Command::new(variant.program(family, "save"), &["-c"], "");
    match runner.run(&command).await {
        Ok(text) => Ok(Tables::parse(&text)),
        Err(Error::NotInstalled(_)) if !needed => Ok(Tables::default()),
        Err(Error::Command { stderr, .. }) if !needed && !forbidden(&stderr) => {
            Ok(Tables::default())
        }
        Err(error) => Err(error),
    }
}

/// Whether a program failed for want of rights: then nothing can be said about what is there.
fn forbidden(stderr: &str) -> bool {
    ["ermission denied", "not permitted", "be root"]
        .iter()
        .any(|words| stderr.contains(words))
}

fn declared(line: &str) -> Option<&str> {
    line.strip_prefix(':')?.split(' ').next()
}

/// Steps without which steering still works and still is safe.
fn optional(plan: &Plan, step: &Step) -> bool {
    match step {
        // /proc/sys may be read-only in a container; qdisc modules may be missing.
        Step::Net(NetChange::Sysctl { .. } | NetChange::NoQueue(_)) => true,
        Step::Net(change) => plan.network.is_foreign(change),
        // Without ctnetlink no mark was ever set by it; the guard stands until the last step.
        Step::ReleaseMarks { .. } => true,
        Step::Restore { .. } => false,
    }
}

impl Report {
    /// Steps that are taken once for each `set`, whatever is seen afterwards: optional ones;
    /// addresses, which do not show our protocol number before Linux 5.18; RPDB rules, which
    /// somebody else may have made word for word.
    fn gave_up(&self, plan: &Plan, step: &Step) -> bool {
        let once = optional(plan, step)
            || matches!(
                step,
                Step::Net(NetChange::Address(..) | NetChange::Rule(..))
            );
        once && self.steps.contains(step)
    }
}

fn missing(plan: &Plan, observed: &Observed) -> Vec<String> {
    let links = &observed.network.links;
    let absent = |device: &&DeviceName| links.get(*device).is_none_or(|link| !link.up);
    plan.network
        .watched()
        .filter(absent)
        .map(|device| format!("device {device} is missing or down: its bump carries nothing"))
        .collect()
}

#[cfg(test)]
mod tests;
