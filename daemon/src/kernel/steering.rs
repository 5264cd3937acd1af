//! Steering of this host: kernel state and TUNs together, and whether the kernel takes a rule, asked before anything
//! depends on it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use dibs_config::{Config, Level};
use dibs_control::RuleOrigin;
use dibs_io::Tun;
use dibs_policy::{
    BumpRoute, ClassRule, Counting, Desired, DeviceOwner, Error, Family, Probed, Report, Steering,
    System,
};
use dibs_settings::{BumpId, Term};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;

use crate::data::Driver;
use crate::data::bumps::marks;
use crate::rulebook::rules::{Narrowed, Rule, name};

/// No real route has a larger MTU, so that a switch never makes a segment too long.
const TUN_MTU: u16 = 65_535;

/// Steers for the daemon: kernel state and TUNs together.
pub(crate) struct Steerer {
    steering: Steering,
    driver: Driver,
    /// TUNs that the data path has not been given yet: what steers their connections does not stand.
    made: BTreeMap<BumpId, Tun>,
    /// Bumps whose TUN the data path has.
    open: BTreeSet<BumpId>,
    warned: BTreeSet<String>,
}

impl Steerer {
    /// Steering of this host. Needs a tokio runtime.
    pub(crate) fn new(driver: Driver) -> anyhow::Result<Self> {
        Ok(Self {
            steering: Steering::system(None)?,
            driver,
            made: BTreeMap::new(),
            open: BTreeSet::new(),
            warned: BTreeSet::new(),
        })
    }

    /// Brings TUNs and kernel to the wish. TUNs come before what leads to them, and go after it. The data
    /// path has them last: the answer to what came out of one earlier would leave in plain.
    pub(crate) async fn set(&mut self, desired: &Desired) -> anyhow::Result<Report> {
        let ours = |bump: &&BumpRoute| bump.owner == DeviceOwner::Ours;
        let wanted: BTreeSet<BumpId> = { desired.bumps.iter().filter(ours) }
            .map(|bump| bump.id)
            .collect();
        self.give_up_renamed().await?;
        self.made.retain(|id, _| wanted.contains(id));
        for &id in wanted.difference(&self.open) {
            if let Entry::Vacant(place) = self.made.entry(id) {
                place.insert(Tun::open(&id.tun_name(), TUN_MTU)?);
            }
        }
        let report = self.steering.set(desired).await?;
        while let Some((id, tun)) = self.made.pop_first() {
            let added = self.driver.add_tun(id, tun).await?;
            added.with_context(|| format!("watch {}", id.tun_name()))?;
            self.open.insert(id);
        }
        for step in &report.steps {
            tracing::debug!("steering: {}", step.to_string().trim_end());
        }
        for warning in &report.warnings {
            if self.warned.insert(warning.clone()) {
                tracing::warn!("{warning}");
            }
        }
        self.close(wanted).await?;
        Ok(report)
    }

    /// Closes TUNs that have another name now, or are in another namespace: nothing leads to them. One that
    /// was deleted the data path has noticed, and tells.
    async fn give_up_renamed(&mut self) -> anyhow::Result<()> {
        let is_gone = |name: &str| if_nametoindex(name) == Err(Errno::ENODEV);
        self.made.retain(|&id, _| !is_gone(&id.tun_name()));
        for id in self.open.clone() {
            let name = id.tun_name();
            if is_gone(&name)
                && let Some(tun) = self.driver.remove_tun(id).await?
            {
                tracing::warn!("device {name} was renamed or moved; making it again");
                drop(tun);
                self.open.remove(&id);
            }
        }
        Ok(())
    }

    /// Removes what an earlier daemon left with another variant of iptables.
    pub(crate) async fn clear_others(&mut self) -> Result<(), dibs_policy::Error> {
        for step in self.steering.clear_others().await? {
            tracing::info!("left by an earlier run: {}", step.to_string().trim_end());
        }
        Ok(())
    }

    /// Whether the kernel tells when others change our chains.
    pub(crate) async fn is_told(&mut self) -> bool {
        self.steering.is_told().await.unwrap_or(false)
    }

    /// Forgets the TUN of a bump: the data path lost it. The next [`set`](Self::set) opens another.
    pub(crate) fn tun_lost(&mut self, bump: BumpId) {
        self.open.remove(&bump);
    }

    /// Counts what the kernel dropped for us, by reason.
    pub(crate) fn counting(&self) -> Counting<System> {
        self.steering.counting()
    }

    /// Removes everything of ours from the kernel, TUNs included.
    pub(crate) async fn cleanup(&mut self, config: &Config) -> anyhow::Result<Report> {
        let report = self.steering.cleanup(marks(config)).await?;
        self.made.clear();
        self.close(BTreeSet::new()).await?;
        Ok(report)
    }

    /// Closes the TUNs of all bumps but `wanted`.
    async fn close(&mut self, wanted: BTreeSet<BumpId>) -> anyhow::Result<()> {
        for &id in self.open.clone().difference(&wanted) {
            let tun = self.driver.remove_tun(id).await?;
            // Closing takes the kernel milliseconds, which is not the data path's business.
            drop(tun);
            self.open.remove(&id);
        }
        Ok(())
    }
}

impl Steerer {
    /// Has the kernel look at a rule, and keeps it to the family in which it is taken, if that is one. Why it
    /// cannot be, if it is taken in none, or in one and requires its bump: to make do with that is its caller's choice.
    pub(crate) async fn try_out(
        &mut self,
        config: &Config,
        rule: &mut Rule,
    ) -> anyhow::Result<Option<String>> {
        if !rule.selection.terms().iter().any(Term::is_special) {
            return Ok(None);
        }
        let peers = || config.peers.iter().flat_map(|peer| &peer.addresses);
        let families = [
            (Family::V4, peers().any(|net| net.addr().is_ipv4())),
            (Family::V6, peers().any(|net| net.addr().is_ipv6())),
        ];
        let families: Vec<Family> = families
            .iter()
            .filter_map(|(family, used)| (*used && rule.concerns(*family)).then_some(*family))
            .collect();
        rule.narrowed = None;
        // All of its classes match the same, but for ports and addresses.
        let Some(class) = rule.kernel_classes(0).next() else {
            // It waits for its user.
            return Ok(None);
        };
        let class = ClassRule {
            source: None,
            destination: None,
            ..class
        };
        let probed = match self.steering.probe(&class, &families).await {
            Ok(probed) => probed,
            Err(Error::Refused(why)) => return Ok(Some(format!("iptables refuses it: {why}"))),
            Err(error) => return Err(error).context("cannot try a rule out"),
        };
        let Probed { families, refusal } = probed;
        let (Some((other, why)), [only]) = (refusal, families.as_slice()) else {
            return Ok(None);
        };
        let program = match other {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        let why = format!("{program} refuses it: {why}");
        let refused = (rule.level == Level::Require).then(|| {
            let other = name(other);
            format!("it requires its bump over {other} too, and {why}")
        });
        rule.narrowed = Some(Narrowed { to: *only, why });
        Ok(refused)
    }

    /// Why the kernel does not take a rule, if it does not; see [`try_out`](Self::try_out).
    pub(crate) async fn probe(
        &mut self,
        config: &Config,
        rule: &mut Rule,
    ) -> anyhow::Result<Option<String>> {
        let refused = self.try_out(config, rule).await?;
        if refused.is_none() {
            tell_narrowed(rule);
        }
        Ok(refused)
    }

    /// As [`try_out`](Self::try_out), for all rules that the daemon starts with.
    ///
    /// A rule of the file that is refused is [not resolved](crate::rulebook); a rule of the user is left out, and the log says so.
    /// But what one that was taken once requires is not to go in plain where it can be held: it is kept to the family that takes it.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub(crate) async fn probe_all(
        &mut self,
        config: &Config,
        rules: &mut Vec<Rule>,
    ) -> anyhow::Result<()> {
        let mut kept = Vec::with_capacity(rules.len());
        for mut rule in std::mem::take(rules) {
            match self.try_out(config, &mut rule).await? {
                None => {
                    tell_narrowed(&rule);
                    kept.push(rule);
                }
                Some(why) if rule.origin == RuleOrigin::Config => {
                    rule.hold_coarsely(why, true, dibs_io::local_time());
                    let warning = rule.warning().unwrap_or_default();
                    let at_its_place = config.refuse(&place(&rule), warning, None);
                    tracing::error!("{at_its_place}");
                    kept.push(rule);
                }
                Some(_) if rule.narrowed.is_some() => {
                    tell_narrowed(&rule);
                    kept.push(rule);
                }
                Some(why) => tracing::warn!("rule {} is dropped: {why}", rule.id),
            }
        }
        *rules = kept;
        Ok(())
    }
}

/// The place in the file of what iptables may refuse in a rule.
fn place(rule: &Rule) -> String {
    let mut special = { rule.selection.terms() }
        .iter()
        .filter(|term| term.is_special());
    let key = special.next_back().map_or("uid", Term::key);
    format!("rule.{}.{key}", rule.id - 1)
}

fn tell_narrowed(rule: &Rule) {
    match (rule.warning(), rule.level) {
        (None, _) => {}
        (Some(warning), Level::Require) => tracing::error!("{warning}"),
        (Some(warning), _) => tracing::warn!("{warning}"),
    }
}
