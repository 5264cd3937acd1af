//! This host: its interfaces and addresses, and the sockets of the paths.

pub(crate) mod clock;
pub(crate) mod devices;
pub(crate) mod directory;
pub(crate) mod fresh;
pub mod interfaces;
pub mod live;
pub mod log;
pub(crate) mod peer_warnings;
pub(crate) mod privileges;

use std::cell::{Ref, RefCell};
use std::net::IpAddr;

use dibs_config::Config;
use dibs_settings::BumpId;

use crate::data::links::Links;
use crate::data::{Driver, Gone};
use crate::host::interfaces::{Interfaces, Inventory, own_addresses, sorted};

/// What is known of this host. Inputs are [`refresh`](Self::refresh) and [`keep_addresses`](Self::keep_addresses), the
/// command is [`follow_links`](Self::follow_links); the data path is told what is new.
pub(crate) struct Host {
    driver: Driver,
    interfaces: Interfaces,
    inventory: RefCell<Inventory>,
    /// As far as steered connections may use them.
    addresses: RefCell<Vec<IpAddr>>,
    /// Those of them that a path's interface has, or had.
    reachable: RefCell<Vec<IpAddr>>,
    links: Links,
}

impl Host {
    /// As it is at the start.
    pub(crate) fn new(
        driver: Driver,
        interfaces: Interfaces,
        inventory: Inventory,
        config: &Config,
    ) -> Self {
        Self {
            driver,
            interfaces,
            addresses: RefCell::new(inventory.host_addresses(BumpId::is_tun)),
            reachable: RefCell::new(inventory.reachable(&config.paths)),
            inventory: RefCell::new(inventory),
            links: Links::new(config.paths.len()),
        }
    }

    /// What was last seen of the interfaces.
    pub(crate) fn inventory(&self) -> Ref<'_, Inventory> {
        self.inventory.borrow()
    }

    /// What there is of interfaces now.
    pub(crate) async fn look(&self) -> anyhow::Result<Inventory> {
        self.interfaces.list().await
    }

    /// Looks at the interfaces again; what was known of them before.
    pub(crate) async fn refresh(&self) -> anyhow::Result<Inventory> {
        let fresh = self.interfaces.list().await?;
        Ok(self.inventory.replace(fresh))
    }

    /// The addresses that steered connections may use.
    pub(crate) fn addresses(&self) -> Ref<'_, Vec<IpAddr>> {
        self.addresses.borrow()
    }

    /// Whether an address is this host's.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.addresses.borrow().contains(&address)
    }

    /// Those of these addresses that no interface has any more.
    pub(crate) fn missing(&self, addresses: &[IpAddr]) -> Vec<IpAddr> {
        let there = self.inventory.borrow().host_addresses(BumpId::is_tun);
        let missing = addresses.iter().filter(|address| !there.contains(address));
        missing.copied().collect()
    }

    /// Notes the host's addresses, and those that are `used` still: they outlive the interface whose address it was.
    /// Whether that is news.
    pub(crate) fn keep_addresses(&self, config: &Config, used: Vec<IpAddr>) -> Result<bool, Gone> {
        let inventory = self.inventory.borrow();
        let outlive = self.missing(&self.reachable.borrow()).into_iter();
        let addresses = inventory.host_addresses(BumpId::is_tun).into_iter();
        let addresses = sorted(addresses.chain(used));
        let changed = *self.addresses.borrow() != addresses;
        if changed {
            self.driver.set_addresses(addresses.clone())?;
            self.addresses.replace(addresses);
        }
        // What was a path's outlives its interface, too.
        let outlive = outlive.filter(|address| self.has(*address));
        let reachable = inventory.reachable(&config.paths).into_iter();
        let reachable = sorted(reachable.chain(outlive));
        if *self.reachable.borrow() != reachable {
            self.driver.set_reachable(reachable.clone())?;
            self.reachable.replace(reachable);
        }
        Ok(changed)
    }

    /// See [`own_addresses`].
    pub(crate) fn own_addresses(&self, config: &Config) -> Vec<String> {
        own_addresses(config, &self.inventory.borrow())
    }

    /// Opens the sockets of paths that are not there and tells the data path what is new; see [`Links::follow`].
    pub(crate) async fn follow_links(&self, config: &Config) -> anyhow::Result<()> {
        let inventory = || self.inventory.borrow().clone();
        self.links.follow(config, &self.driver, inventory).await
    }

    /// Why this host cannot use a path, by index, if so.
    pub(crate) fn lack_of_path(&self, config: &Config, index: usize) -> Option<String> {
        let inventory = self.inventory.borrow();
        self.links.lack(index, &config.paths[index], &inventory)
    }

    /// Whether the socket of a path was refused for a reason of whose end no event tells.
    pub(crate) fn has_failed_path(&self) -> bool {
        self.links.have_failed()
    }
}
