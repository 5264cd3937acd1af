//! What is to be steered, in the terms of `dibs-policy`, and the TUNs that it needs.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Context as _;
use dibs_config::Config;
use dibs_io::Tun;
use dibs_policy::{
    BumpRoute, ClassRule, Counting, Desired, DeviceOwner, MarkLayout, Report, Steering, System,
};
use dibs_settings::BumpId;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;

use crate::data::Driver;
use crate::data::bumps::carried;
use crate::host::interfaces::Inventory;

/// No real route has a larger MTU, so that a switch never makes a segment too long.
const TUN_MTU: u16 = 65_535;

/// Field in the marks: the lowest six bits of the configured run.
pub fn marks(config: &Config) -> MarkLayout {
    let mask = config.daemon.mark_mask;
    MarkLayout::new(0x3f << mask.trailing_zeros()).expect("the run has six bits at least")
}

/// Steers for the daemon: kernel state and TUNs together.
pub struct Steerer {
    steering: Steering,
    driver: Driver,
    /// TUNs that the data path has not been given yet: what steers their connections does not stand.
    made: BTreeMap<BumpId, Tun>,
    /// Bumps whose TUN the data path has.
    open: BTreeSet<BumpId>,
    warned: BTreeSet<String>,
}

/// The wish that follows from the configuration, the rules, and the bumps in use.
pub fn desired(
    config: &Config,
    inventory: &Inventory,
    rules: impl Iterator<Item = ClassRule>,
    in_use: &BTreeSet<BumpId>,
    addresses: &[IpAddr],
) -> Desired {
    let peers: Vec<_> = config
        .peers
        .iter()
        .flat_map(|peer| peer.addresses.clone())
        .collect();
    let carried = carried(config);
    let foreign = |id: BumpId| {
        let bump = carried.iter().find(|bump| bump.id == id);
        bump.and_then(|bump| bump.device.as_deref())
    };
    let route = |&id: &BumpId| BumpRoute {
        id,
        device: inventory.device_name(foreign(id).unwrap_or(&id.tun_name())),
        owner: match foreign(id) {
            Some(_) => DeviceOwner::Foreign,
            None => DeviceOwner::Ours,
        },
        addresses: addresses.to_vec(),
        peers: peers.clone(),
    };
    Desired {
        marks: marks(config),
        table_base: config.daemon.table_base,
        fail: config.daemon.fail,
        gateway: config.daemon.gateway.clone(),
        bumps: in_use.iter().map(route).collect(),
        rules: rules.filter(|class| in_use.contains(&class.bump)).collect(),
        ..Desired::default()
    }
}

impl Steerer {
    /// Steering of this host. Needs a tokio runtime.
    pub fn new(driver: Driver) -> anyhow::Result<Self> {
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
    pub async fn set(&mut self, desired: &Desired) -> anyhow::Result<Report> {
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

    /// For looking only.
    pub(crate) fn steering(&mut self) -> &mut Steering {
        &mut self.steering
    }

    /// Whether the kernel tells when others change our chains.
    pub async fn is_told(&mut self) -> bool {
        self.steering.is_told().await.unwrap_or(false)
    }

    /// Forgets the TUN of a bump: the data path lost it. The next [`set`](Self::set) opens another.
    pub fn tun_lost(&mut self, bump: BumpId) {
        self.open.remove(&bump);
    }

    /// Counts what the kernel dropped for us, by reason.
    pub(crate) fn counting(&self) -> Counting<System> {
        self.steering.counting()
    }

    /// Removes everything of ours from the kernel, TUNs included.
    pub async fn cleanup(&mut self, config: &Config) -> anyhow::Result<Report> {
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
