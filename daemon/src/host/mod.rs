//! This host: its interfaces and addresses, and the sockets of the paths.

pub(crate) mod clock;
pub(crate) mod directory;
pub(crate) mod endpoints;
pub(crate) mod fresh;
pub mod interfaces;
pub(crate) mod links;
pub mod live;
pub mod log;
pub(crate) mod peer_warnings;
pub mod preferences;
pub(crate) mod privileges;
pub(crate) mod volumes;

use std::cell::{Ref, RefCell};
use std::net::IpAddr;
use std::rc::Rc;

use dibs_config::Config;
use dibs_settings::BumpId;

use crate::data::{Driver, Gone};
use crate::host::interfaces::{Interfaces, Inventory, own_addresses, sorted};
use crate::host::links::Links;

/// What is known of this host. Inputs are [`refresh`](Self::refresh) and [`keep_addresses`](Self::keep_addresses), the
/// command is [`follow_links`](Self::follow_links); the data path is told what is new.
pub(crate) struct Host {
    config: Rc<Config>,
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
        config: Rc<Config>,
        driver: Driver,
        interfaces: Interfaces,
        inventory: Inventory,
    ) -> Self {
        Self {
            driver,
            interfaces,
            addresses: RefCell::new(inventory.host_addresses(BumpId::is_tun)),
            reachable: RefCell::new(inventory.reachable(&config.paths)),
            inventory: RefCell::new(inventory),
            links: Links::new(config.paths.len()),
            config,
        }
    }

    /// The file, as read at the start.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The peer that an address is behind, by index: the longest prefix decides.
    pub(crate) fn peer_of(&self, address: IpAddr) -> Option<usize> {
        let peers = self.config.peers.iter().enumerate();
        let nets =
            peers.flat_map(|(index, peer)| peer.addresses.iter().map(move |net| (index, net)));
        nets.filter(|(_, net)| net.contains(&address))
            .max_by_key(|(_, net)| net.prefix_len())
            .map(|(index, _)| index)
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
    pub(crate) fn keep_addresses(&self, used: Vec<IpAddr>) -> Result<bool, Gone> {
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
        let reachable = inventory.reachable(&self.config.paths).into_iter();
        let reachable = sorted(reachable.chain(outlive));
        if *self.reachable.borrow() != reachable {
            self.driver.set_reachable(reachable.clone())?;
            self.reachable.replace(reachable);
        }
        Ok(changed)
    }

    /// See [`own_addresses`].
    pub(crate) fn own_addresses(&self) -> Vec<String> {
        own_addresses(&self.config, &self.inventory.borrow())
    }

    /// Opens the sockets of paths that are not there and tells the data path what is new; see [`Links::follow`].
    pub(crate) async fn follow_links(&self) -> anyhow::Result<()> {
        let inventory = || self.inventory.borrow().clone();
        let links = self.links.follow(&self.config, &self.driver, inventory);
        links.await
    }

    /// Why this host cannot use a path, by index, if so.
    pub(crate) fn lack_of_path(&self, index: usize) -> Option<String> {
        let inventory = self.inventory.borrow();
        self.links
            .lack(index, &self.config.paths[index], &inventory)
    }

    /// Whether the socket of a path was refused for a reason of whose end no event tells.
    pub(crate) fn has_failed_path(&self) -> bool {
        self.links.have_failed()
    }
}
