//! This host: its interfaces and addresses, and the sockets of the paths. Each socket follows its interface, and one that
//! cannot be opened is tried again.

pub(crate) mod endpoints;
pub mod interfaces;
pub mod live;
pub mod preferences;
pub mod process;
pub(crate) mod volumes;

use std::cell::{Cell, Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::rc::Rc;

use anyhow::Context as _;
use dibs_config::{Config, PathConfig};
use dibs_io::{PathSocket, SetupError};
use dibs_policy::conntrack::Connection;
use dibs_policy::sockets;
use dibs_settings::{BumpId, Nearest, left_out};
use dibs_switch::engine::shadows::Shadows;
use dibs_switch::knock::Refusal;
use dibs_switch::matching::Matched;
use dibs_wire::FlowKey;
use ipnet::IpNet;
use nix::libc;
use tokio::sync::Mutex;

use crate::data::bumps::marks;
use crate::data::{Driver, Gone};
use crate::host::interfaces::{Interface, Interfaces, Inventory, LEAST_MTU, own_addresses, sorted};

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
    /// Live connections that peers call by other addresses.
    matched: RefCell<BTreeMap<FlowKey, Matched>>,
    /// Connections whose addresses this host translates, as peers know them, with their last entries: those that peers opened to
    /// this host, and that its nat table leads elsewhere, and those of the networks behind it that it masquerades.
    pub(crate) translated: RefCell<BTreeMap<FlowKey, Connection>>,
    /// Numbers of entries that the daemon has put others in the place of, until their end is told.
    pub(crate) replaced: RefCell<BTreeSet<u32>>,
    /// Shadows of those of the matched ones that are on a bump, and of others that were to go to plain.
    pub(crate) shadows: RefCell<Shadows>,
    /// Copies of what peers show of connections, under other addresses: those without room, and those that matched nothing.
    pub(crate) copies: Cell<[u64; 2]>,
    /// The peers' prefixes, and which peer each is of, by index.
    prefixes: Nearest<usize>,
    /// Networks that these leave out.
    left_out: Vec<IpNet>,
    /// Networks that peers do not reach in this host's name.
    closed: Vec<IpNet>,
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
        let peers = config.peers.iter().enumerate();
        let prefixes =
            peers.flat_map(|(index, peer)| peer.addresses.iter().map(move |net| (*net, index)));
        let nets: Vec<IpNet> = prefixes.clone().map(|(net, _)| net).collect();
        Self {
            driver,
            interfaces,
            left_out: left_out(&nets),
            prefixes: prefixes.collect(),
            closed: left_out(config.daemon.exits()),
            addresses: RefCell::new(inventory.host_addresses(BumpId::is_tun)),
            reachable: RefCell::new(inventory.reachable(&config.paths)),
            inventory: RefCell::new(inventory),
            matched: RefCell::default(),
            translated: RefCell::default(),
            replaced: RefCell::default(),
            shadows: RefCell::default(),
            copies: Cell::default(),
            links: Links::new(config.paths.len()),
            config,
        }
    }

    /// The file, as read at the start.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The peer that has the other end of a connection, as this host sends, by index.
    pub(crate) fn peer_of(&self, pair: &FlowKey) -> Option<usize> {
        let matched = self.matched.borrow().get(pair).map(|known| known.peer);
        matched.or_else(|| self.peer_behind(pair.dst))
    }

    /// Live connections that peers call by other addresses, as this host sends.
    pub(crate) fn matched(&self) -> Ref<'_, BTreeMap<FlowKey, Matched>> {
        self.matched.borrow()
    }

    /// Notes that a peer calls a connection otherwise, and tells the data path. The host whose name goes over the wire notes
    /// that as well: the name there is its own.
    ///
    /// # Errors
    /// There is no data path.
    pub(crate) fn match_names(&self, pair: FlowKey, known: Matched) -> Result<(), Gone> {
        let mut matched = self.matched.borrow_mut();
        let is_same = |other: &Matched| (other.peer, other.theirs) == (known.peer, known.theirs);
        matched.retain(|_, other| !is_same(other));
        matched.insert(pair, known);
        match known.theirs == pair {
            true => Ok(()),
            false => self.driver.match_names(known.peer, pair, known.theirs),
        }
    }

    /// Forgets the peer's name of a connection that is over.
    ///
    /// # Errors
    /// As of [`match_names`](Self::match_names).
    pub(crate) fn forget_match(&self, pair: &FlowKey) -> Result<(), Gone> {
        self.shadows.borrow_mut().remove(pair);
        match self.matched.borrow_mut().remove(pair) {
            Some(known) => self.driver.forget_match(known.peer, *pair),
            None => Ok(()),
        }
    }

    /// The peer that an address is behind, by index: the longest prefix decides.
    pub(crate) fn peer_behind(&self, address: IpAddr) -> Option<usize> {
        self.behind_peer(address).map(|(_, index)| index)
    }

    /// The same behind the prefix.
    fn behind_peer(&self, address: IpAddr) -> Option<(IpNet, usize)> {
        if hold(&self.left_out, address) {
            return None;
        }
        let found = self.prefixes.holding(address);
        found.filter(|(net, _)| net.prefix_len() > 0 || !self.has(address))
    }

    /// True if an address is another's that peers reach in this host's name.
    pub(crate) fn is_beyond(&self, address: IpAddr) -> bool {
        let is_open = hold(self.config.daemon.exits(), address) && !hold(&self.closed, address);
        is_open && self.behind_peer(address).is_none() && !self.has(address)
    }

    /// True if a connection, as this host sends, reaches others in the name of this host or of the peer.
    pub(crate) fn is_by_exit(&self, pair: &FlowKey) -> bool {
        let behind = self.behind_peer(pair.dst);
        self.is_beyond(pair.src) || behind.is_some_and(|(net, _)| net.prefix_len() == 0)
    }

    /// Reason why plain cannot carry a connection, as this host sends, if there is one.
    pub(crate) fn lacks_plain(&self, pair: &FlowKey) -> Option<Refusal> {
        if self.is_by_exit(pair) {
            return Some(Refusal::Exit);
        }
        let outlives = self.has(pair.src) && !self.missing(&[pair.src]).is_empty();
        outlives.then_some(Refusal::NoAddress)
    }

    /// The last entry of a connection of the networks behind this host that it masquerades, as the peer knows it.
    pub(crate) fn masqueraded(&self, pair: &FlowKey) -> Option<Connection> {
        let known = self.translated.borrow().get(pair).copied();
        known.filter(|entry| entry.original.destination() == pair.destination())
    }

    /// What was last seen of the interfaces.
    pub(crate) fn inventory(&self) -> Ref<'_, Inventory> {
        self.inventory.borrow()
    }

    /// What there is of interfaces now.
    pub(crate) async fn look(&self) -> anyhow::Result<Inventory> {
        let listed = self.interfaces.list().await?;
        Ok(listed.shared_out(&self.config.paths, &self.inventory()))
    }

    /// Looks at the interfaces again; what was known of them before.
    pub(crate) async fn refresh(&self) -> anyhow::Result<Inventory> {
        let fresh = self.look().await?;
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

fn hold(nets: &[IpNet], address: IpAddr) -> bool {
    nets.iter().any(|net| net.contains(&address))
}

/// A path's socket, and what the data path was told of its interface.
#[derive(Clone, Debug)]
struct Link {
    socket: Socket,
    /// Usable, the MTU, and the addresses.
    told: Option<(bool, u16, Vec<IpAddr>)>,
}

#[derive(Clone, Debug)]
enum Socket {
    /// Bound to the interface of this number; none if it is bound to an address alone.
    Open(Option<u32>),
    /// Nobody has tried to open one.
    Untried,
    /// There is none until its interface or its address comes.
    Awaited,
    /// There is none, for the system refused it.
    Refused(String),
}

impl Default for Link {
    fn default() -> Self {
        Self {
            socket: Socket::Untried,
            told: None,
        }
    }
}

impl Link {
    /// Whether a socket is to be opened, for the path's interface of this number.
    fn is_due(&self, interface: Option<u32>) -> bool {
        match self.socket {
            // It stays bound to an interface that is gone, even if one of the same name comes. One that
            // comes back is the one that it is bound to, and a second socket there would be refused.
            Socket::Open(Some(bound)) => interface.is_some_and(|interface| interface != bound),
            Socket::Open(None) => false,
            Socket::Untried | Socket::Awaited | Socket::Refused(_) => interface.is_some(),
        }
    }

    /// Why the path cannot be used here, if so.
    fn lack(&self, path: &PathConfig, inventory: &Inventory) -> Option<String> {
        let (up, mtu) = inventory.path_state(path);
        if mtu < LEAST_MTU {
            return Some(format!(
                "its interface has an MTU of {mtu} bytes, and {LEAST_MTU} are needed: raise it"
            ));
        }
        match &self.socket {
            _ if !up && inventory.of_path(path).is_none() && path.pattern().is_some() => {
                let pattern = path.pattern().unwrap_or_default();
                Some(format!(
                    "no interface that another path has not taken is called {pattern}"
                ))
            }
            _ if !up => Some("its interface is missing, down, or without the address".to_owned()),
            Socket::Refused(why) => Some(format!("its socket cannot be opened: {why}")),
            Socket::Untried | Socket::Awaited => Some("its socket is not open yet".to_owned()),
            Socket::Open(_) => None,
        }
    }
}

/// The sockets of all paths, by index of the configuration. One task at a time looks after them.
pub(crate) struct Links {
    links: RefCell<Vec<Link>>,
    turn: Mutex<()>,
}

impl Links {
    /// Of so many paths.
    pub(crate) fn new(paths: usize) -> Self {
        Self {
            links: RefCell::new(vec![Link::default(); paths]),
            turn: Mutex::default(),
        }
    }

    /// Opens the sockets that are not there and tells the data path what is new. A path whose socket the system
    /// refuses waits, at the start too: any local user may have taken the port.
    pub(crate) async fn follow(
        &self,
        config: &Config,
        driver: &Driver,
        inventory: impl Fn() -> Inventory,
    ) -> anyhow::Result<()> {
        let _turn = self.turn.lock().await;
        let inventory = inventory();
        for (index, path) in config.paths.iter().enumerate() {
            let interface = inventory.of_path(path);
            let before = self.links.borrow()[index].clone();
            let due = before.is_due(interface.map(|found| found.index));
            let socket = match due {
                true => open(config, driver, index, interface, &before.socket).await?,
                false => before.socket,
            };
            let opened = due && matches!(socket, Socket::Open(_));
            let lack = {
                let link = &mut self.links.borrow_mut()[index];
                link.socket = socket;
                link.lack(path, &inventory)
            };
            let (_, mtu) = inventory.path_state(path);
            let is = (lack.is_none(), mtu, inventory.path_addresses(path));
            if opened || before.told.as_ref() != Some(&is) {
                driver.set_path(index, is.0, is.1, is.2.clone())?;
                self.links.borrow_mut()[index].told = Some(is);
            }
        }
        Ok(())
    }

    /// Why a path cannot be used here, if so.
    pub(crate) fn lack(
        &self,
        index: usize,
        path: &PathConfig,
        inventory: &Inventory,
    ) -> Option<String> {
        self.links.borrow()[index].lack(path, inventory)
    }

    /// Whether a socket was refused for a reason of whose end no event tells.
    pub(crate) fn have_failed(&self) -> bool {
        let links = self.links.borrow();
        let mut sockets = links.iter().map(|link| &link.socket);
        sockets.any(|socket| matches!(socket, Socket::Refused(_)))
    }
}

/// Opens the socket of a path, of which there is none for the interface that it has now.
async fn open(
    config: &Config,
    driver: &Driver,
    index: usize,
    interface: Option<&Interface>,
    before: &Socket,
) -> anyhow::Result<Socket> {
    let path = &config.paths[index];
    let name = &path.name;
    let device = interface.map(|found| found.name.as_str());
    Ok(match open_socket(config, path, device) {
        Ok(socket) => {
            let set = driver.set_socket(index, socket).await?;
            set.with_context(|| format!("cannot watch path {name}"))?;
            let bound = interface.filter(|_| path.interface.is_some());
            Socket::Open(bound.map(|found| found.index))
        }
        Err(error) if is_awaited(&error) => {
            if !matches!(before, Socket::Awaited) {
                tracing::warn!(dibs.path = name, "path {name} is not up yet: {error}");
            }
            Socket::Awaited
        }
        Err(error) => {
            let holders = match error.error.kind() {
                ErrorKind::AddrInUse => holders(config.daemon.port).await,
                _ => String::new(),
            };
            let why = format!("{error}{holders}");
            if !matches!(before, Socket::Refused(known) if *known == why) {
                tracing::warn!(
                    dibs.path = name,
                    "path {name}: its socket cannot be opened yet: {why}"
                );
            }
            Socket::Refused(why)
        }
    })
}

/// The other processes that have this UDP port here, for a message; nothing if that cannot be seen.
async fn holders(port: u16) -> String {
    // It reads all of /proc.
    let held = tokio::task::spawn_blocking(move || sockets::of_udp_port(port)).await;
    let mut held = held.unwrap_or_default();
    held.retain(|holder| holder.pid != std::process::id());
    let named: Vec<String> = held.iter().map(ToString::to_string).collect();
    match named.is_empty() {
        true => String::new(),
        false => format!(": {} has it", named.join(", ")),
    }
}

/// Opens the socket of a path, on the interface of this name where the path is bound to one.
fn open_socket(
    config: &Config,
    path: &PathConfig,
    interface: Option<&str>,
) -> Result<PathSocket, SetupError> {
    let mark = marks(config).own();
    let port = config.daemon.port;
    let name = path.interface.as_deref();
    // The file may have a name that is too long for the kernel here.
    let name = name.map(|name| interface.unwrap_or(name));
    PathSocket::open(name, path.address, port, mark)
}

/// Whether a socket was refused for want of its interface or address, which may come.
fn is_awaited(error: &SetupError) -> bool {
    let absent = [libc::ENODEV, libc::EADDRNOTAVAIL];
    let code = error.error.raw_os_error();
    code.is_some_and(|code| absent.contains(&code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(socket: Socket) -> Link {
        Link { socket, told: None }
    }

    #[test]
    fn a_socket_is_opened_for_another_interface_and_where_there_is_none() {
        let bound = link(Socket::Open(Some(5)));
        assert!(!bound.is_due(Some(5)) && !bound.is_due(None));
        assert!(bound.is_due(Some(6)));
        // An address that goes to another interface takes its socket with it.
        assert!(!link(Socket::Open(None)).is_due(Some(6)));
        for missing in [
            Socket::Untried,
            Socket::Awaited,
            Socket::Refused("why".to_owned()),
        ] {
            let missing = link(missing);
            assert!(missing.is_due(Some(5)) && !missing.is_due(None));
        }
    }
}
