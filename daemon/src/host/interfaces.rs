//! The host's interfaces and addresses, as the kernel lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;

use anyhow::Context as _;
use dibs_config::{Config, PathConfig};
use dibs_core::path::MIN_MTU;
use dibs_policy::DeviceName;
use dibs_settings::{BumpId, is_like};
use futures_util::TryStreamExt as _;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, Prop};

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number, a new one each time that it is made.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Other names that the kernel knows it by (ip-link(8), `altname`), and its hardware address.
    pub altnames: Vec<String>,
    /// Set up, with a carrier.
    pub up: bool,
    /// MTU in bytes, as far as a datagram can be.
    pub mtu: u16,
    /// All its addresses.
    pub addresses: Vec<IpAddr>,
}

impl Interface {
    fn names(&self) -> impl Iterator<Item = &String> {
        [&self.name].into_iter().chain(&self.altnames)
    }

    fn is_like(&self, pattern: &str) -> bool {
        self.names().any(|name| is_like(pattern, name))
    }
}

/// All interfaces of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    interfaces: Vec<Interface>,
    /// Number of the interface of each path that names a pattern, by the path's name.
    taken: BTreeMap<String, u32>,
}

/// What an interface that is missing is taken to have.
const DEFAULT_MTU: u16 = 1500;
/// Least MTU of a path's interface: it takes the datagrams that any path is taken to carry, by IPv4. (IPv6 is not
/// there below 1280.)
pub const LEAST_MTU: u16 = MIN_MTU + 28;

impl Inventory {
    /// Inventory of these interfaces, of which no path that names a pattern has taken one.
    pub fn of(interfaces: Vec<Interface>) -> Self {
        let taken = BTreeMap::new();
        Self { interfaces, taken }
    }

    /// The same, with an interface for each path that names a pattern: the one that it had `before`, if that is up or no other
    /// is, or else the first by name that no other path has.
    pub fn shared_out(mut self, paths: &[PathConfig], before: &Self) -> Self {
        let mut free: Vec<&Interface> = { self.interfaces.iter() }
            .filter(|one| one.name != "lo" && !BumpId::is_tun(&one.name))
            .collect();
        free.sort_by(|one, other| (!one.up, &one.name).cmp(&(!other.up, &other.name)));
        for path in paths.iter().filter(|path| path.pattern().is_none()) {
            let own = self.of_path(path).map(|own| own.index);
            free.retain(|one| Some(one.index) != own);
        }
        let mut taken = BTreeMap::new();
        let patterns = || {
            paths
                .iter()
                .filter_map(|path| Some((path, path.pattern()?)))
        };
        // What is up is kept before anything new is taken.
        for is_kept in [true, false] {
            for (path, pattern) in patterns()
                .filter(|(path, _)| !taken.contains_key(&path.name))
                .collect::<Vec<_>>()
            {
                let had = before.taken.get(&path.name);
                let kept = |one: &&&Interface| Some(&one.index) == had && one.up;
                let mut like = free.iter().filter(|one| one.is_like(pattern));
                let found = match is_kept {
                    true => like.find(kept),
                    false => like.next(),
                };
                if let Some(index) = found.map(|one| one.index) {
                    taken.insert(path.name.clone(), index);
                    free.retain(|one| one.index != index);
                }
            }
        }
        self.taken = taken;
        self
    }

    /// The interface that the kernel knows by this name, its own or an alternative one.
    pub fn named(&self, name: &str) -> Option<&Interface> {
        self.interfaces
            .iter()
            .find(|one| one.names().any(|own| own == name))
    }

    /// An interface of the file as rules of the kernel have to name it: by its own name. One that is not there may
    /// come by the name of the file; if that is too long for a rule, by one that no interface has.
    pub fn device_name(&self, name: &str) -> DeviceName {
        let found = self.named(name).map(|interface| interface.name.as_str());
        DeviceName::new(found.unwrap_or(name)).unwrap_or_else(|_| nobodys_name(name))
    }

    /// The interface of a configured path: the one that it names, or the one with its address.
    pub fn of_path(&self, path: &PathConfig) -> Option<&Interface> {
        match (&path.interface, path.address) {
            (Some(_), _) if path.pattern().is_some() => {
                let taken = self.taken.get(&path.name)?;
                self.interfaces.iter().find(|one| one.index == *taken)
            }
            (Some(name), _) => self.named(name),
            (None, Some(address)) => {
                let mut all = self.interfaces.iter();
                all.find(|interface| interface.addresses.contains(&address))
            }
            (None, None) => None,
        }
    }

    /// True if a path can be used now, and the MTU of its interface.
    pub fn path_state(&self, path: &PathConfig) -> (bool, u16) {
        match self.of_path(path) {
            Some(interface) => {
                let has_address = match path.address {
                    Some(address) => interface.addresses.contains(&address),
                    None => true,
                };
                let wide = interface.mtu >= LEAST_MTU;
                (interface.up && has_address && wide, interface.mtu)
            }
            None => (false, DEFAULT_MTU),
        }
    }

    /// The addresses that peers reach a path at.
    pub fn path_addresses(&self, path: &PathConfig) -> Vec<IpAddr> {
        match path.address {
            Some(address) => vec![address],
            None => self
                .of_path(path)
                .map(|interface| interface.addresses.clone())
                .unwrap_or_default(),
        }
    }

    /// IP versions, 4 and 6, by which a path can reach peers; both until that is known.
    pub fn path_versions(&self, path: &PathConfig) -> [bool; 2] {
        let addresses = self.path_addresses(path);
        let versions = [IpAddr::is_ipv4, IpAddr::is_ipv6];
        // Every interface has a link-local address of IPv6.
        let has = versions.map(|is| addresses.iter().any(|to| is(to) && is_routable(*to)));
        let local = versions.map(|is| addresses.iter().any(is));
        match (has, local) {
            ([false, false], [false, false]) => [true; 2],
            ([false, false], local) => local,
            (has, _) => has,
        }
    }

    /// The addresses of the paths' interfaces, which peers may open connections to if nothing else is said.
    pub fn reachable(&self, paths: &[PathConfig]) -> Vec<IpAddr> {
        let interfaces = paths.iter().filter_map(|path| self.of_path(path));
        let addresses = interfaces.flat_map(|interface| interface.addresses.iter().copied());
        sorted(addresses.filter(|address| is_routable(*address)))
    }

    /// The networks that this host is in, but by the interfaces `ours`: what interfaces have addresses that lead to
    /// others, whether they are up, and those addresses.
    pub fn networks(&self, ours: impl Fn(&str) -> bool) -> Vec<(&str, bool, Vec<IpAddr>)> {
        let interfaces = { self.interfaces.iter() }.filter(|interface| !ours(&interface.name));
        let networks = interfaces.map(|interface| {
            let addresses = interface.addresses.iter().copied();
            let addresses = sorted(addresses.filter(|address| is_routable(*address)));
            (interface.name.as_str(), interface.up, addresses)
        });
        networks
            .filter(|(_, _, addresses)| !addresses.is_empty())
            .collect()
    }

    /// The addresses that connections of this host may use, but for those of the interfaces `ours`.
    pub fn host_addresses(&self, ours: impl Fn(&str) -> bool) -> Vec<IpAddr> {
        let interfaces = { self.interfaces.iter() }.filter(|interface| !ours(&interface.name));
        let addresses = interfaces.flat_map(|interface| interface.addresses.iter().copied());
        sorted(addresses.filter(|address| is_routable(*address)))
    }
}

/// For rules of the kernel, in place of a name that they cannot have: another for each.
pub fn nobodys_name(name: &str) -> DeviceName {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let name = format!("absent-{:08x}", hasher.finish() as u32);
    DeviceName::new(&name).expect("15 letters, digits and a hyphen")
}

/// Each of these once, in order.
pub(crate) fn sorted(addresses: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = addresses.collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
}

/// What the file says is a peer's and is this host's own: nothing comes of it, for what goes to an own address
/// never leaves.
pub(crate) fn own_addresses(config: &Config, inventory: &Inventory) -> Vec<String> {
    // A relay on this host may listen at a loopback address.
    let own: BTreeSet<IpAddr> = { inventory.interfaces.iter() }
        .flat_map(|interface| interface.addresses.iter().copied())
        .filter(|address| !address.is_loopback())
        .collect();
    let is_own = |address: IpAddr| own.contains(&address);
    let mut faults = Vec::new();
    for peer in &config.peers {
        let name = &peer.name;
        // A network may well have this host in it.
        let hosts = peer
            .addresses
            .iter()
            .filter(|net| net.prefix_len() == net.max_prefix_len());
        for net in hosts.filter(|net| is_own(net.addr())) {
            faults.push(format!(
                "peer {name}: {} in its addresses is an address of this host: list those of the hosts \
                 behind the peer",
                net.addr()
            ));
        }
        for (path, endpoint) in &peer.endpoints {
            if endpoint.address().is_some_and(|to| is_own(to.ip())) {
                faults.push(format!(
                    "peer {name}: {endpoint}, its endpoint on path {path}, is an address of this host: \
                     name the peer's own"
                ));
            }
        }
    }
    faults
}

/// Neither loopback nor link-local.
fn is_routable(address: IpAddr) -> bool {
    let link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !link_local && !address.is_loopback() && !address.is_unspecified() && !address.is_multicast()
}

/// A netlink socket that lists interfaces.
pub struct Interfaces {
    handle: Handle,
}

impl Interfaces {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("open rtnetlink")?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Inventory of what there is now.
    pub async fn list(&self) -> anyhow::Result<Inventory> {
        let mut found = BTreeMap::new();
        let mut links = self.handle.link().get().execute();
        while let Some(link) = links.try_next().await.context("list interfaces")? {
            let mut interface = Interface {
                index: link.header.index,
                name: String::new(),
                altnames: Vec::new(),
                up: link
                    .header
                    .flags
                    .contains(LinkFlags::Up | LinkFlags::LowerUp),
                mtu: DEFAULT_MTU,
                addresses: Vec::new(),
            };
            for attribute in link.attributes {
                match attribute {
                    LinkAttribute::IfName(name) => interface.name = name,
                    LinkAttribute::PropList(all) => {
                        let names = all.into_iter().filter_map(|property| match property {
                            Prop::AltIfName(name) => Some(name),
                            _ => None,
                        });
                        interface.altnames.extend(names);
                    }
                    LinkAttribute::Address(bytes) => {
                        let bytes: Vec<String> =
                            { bytes.iter() }.map(|byte| format!("{byte:02x}")).collect();
                        interface.altnames.push(bytes.join(":"));
                    }
                    LinkAttribute::Mtu(mtu) => interface.mtu = mtu.try_into().unwrap_or(u16::MAX),
                    _ => {}
                }
            }
            found.insert(interface.index, interface);
        }
        let mut addresses = self.handle.address().get().execute();
        while let Some(message) = addresses.try_next().await.context("list addresses")? {
            let Some(interface) = found.get_mut(&message.header.index) else {
                continue;
            };
            // Of a point-to-point link, IFA_ADDRESS is the far end and IFA_LOCAL ours.
            let local = message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let any = message.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            });
            interface.addresses.extend(local.or(any));
        }
        Ok(Inventory::of(found.into_values().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dibs_config::Trust;

    fn interface(name: &str, up: bool, addresses: &[&str]) -> Interface {
        Interface {
            index: 1,
            name: name.to_owned(),
            altnames: Vec::new(),
            up,
            mtu: 1400,
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        }
    }

    fn path(interface: Option<&str>, address: Option<&str>) -> PathConfig {
        PathConfig {
            public: Vec::new(),
            name: "p".to_owned(),
            interface: interface.map(str::to_owned),
            address: address.map(|a| a.parse().unwrap()),
            trust: Trust::Trusted,
            usage: Default::default(),
        }
    }

    #[test]
    fn paths_are_up_with_their_interface_and_address() {
        let inventory = Inventory::of(vec![
            interface("eth0", true, &["10.0.1.1"]),
            interface("eth1", false, &["10.0.2.1"]),
        ]);
        let state = |interface, address| inventory.path_state(&path(interface, address));
        assert_eq!(state(Some("eth0"), None), (true, 1400));
        assert_eq!(state(Some("eth0"), Some("10.0.1.1")), (true, 1400));
        assert_eq!(state(Some("eth0"), Some("10.0.1.9")), (false, 1400));
        assert_eq!(state(None, Some("10.0.1.1")), (true, 1400));
        assert_eq!(state(Some("eth1"), None), (false, 1400));
        assert_eq!(state(Some("eth2"), None), (false, DEFAULT_MTU));
        assert_eq!(state(None, Some("10.0.3.1")), (false, DEFAULT_MTU));

        let addresses = |interface, address| inventory.path_addresses(&path(interface, address));
        let of = |address: &str| vec![address.parse::<IpAddr>().unwrap()];
        assert_eq!(addresses(Some("eth0"), None), of("10.0.1.1"));
        assert_eq!(addresses(Some("eth0"), Some("10.0.1.9")), of("10.0.1.9"));
        assert_eq!(addresses(None, Some("10.0.1.1")), of("10.0.1.1"));
        assert!(addresses(Some("eth2"), None).is_empty());

        let mut narrow = inventory.clone();
        narrow.interfaces[0].mtu = LEAST_MTU - 1;
        assert_eq!(
            narrow.path_state(&path(Some("eth0"), None)),
            (false, LEAST_MTU - 1)
        );
    }

    #[test]
    fn another_network_shows_in_addresses_and_their_interfaces() {
        let host = |addresses: &[&str], up, more: Option<&str>| {
            let mut inventory = Inventory::of(vec![interface("eth0", up, addresses)]);
            // As containers have them, which come and go.
            inventory
                .interfaces
                .extend(more.map(|name| interface(name, true, &["fe80::9"])));
            inventory
        };
        let before = host(&["10.0.1.1", "fe80::1"], true, None);
        let is_same = |now: &Inventory| before.networks(|_| false) == now.networks(|_| false);
        assert!(is_same(&host(
            &["fe80::1", "10.0.1.1"],
            true,
            Some("veth1")
        )));
        assert!(!is_same(&host(&["10.0.1.1"], false, None)));
        assert!(!is_same(&host(&["10.0.1.2"], true, None)));
        assert!(!is_same(&host(&[], true, None)));
    }

    #[test]
    fn an_interface_goes_by_other_names_too() {
        let long = "enx0123456789ab-of-the-uplink";
        let mut inventory = Inventory::of(vec![interface("eth0", true, &["10.0.1.1"])]);
        let rule = |inventory: &Inventory, name| inventory.device_name(name).as_str().to_owned();
        assert_eq!(rule(&inventory, "enxuplink"), "enxuplink");
        assert_eq!(rule(&inventory, "eth0"), "eth0");
        // No interface has a name of a rule that cannot be.
        let absent = rule(&inventory, long);
        assert!(absent.len() <= 15 && absent != rule(&inventory, "another-long-name-of-it"));
        assert!(inventory.of_path(&path(Some(long), None)).is_none());

        inventory.interfaces[0].altnames = vec!["enxuplink".to_owned(), long.to_owned()];
        for name in ["eth0", "enxuplink", long] {
            assert_eq!(rule(&inventory, name), "eth0");
            assert_eq!(inventory.path_state(&path(Some(name), None)), (true, 1400));
        }
    }

    #[test]
    fn each_path_of_a_pattern_takes_another_interface_and_keeps_it() {
        let named = |name: &str, pattern| PathConfig {
            name: name.to_owned(),
            ..path(Some(pattern), None)
        };
        let paths = [
            named("lte", "wwan*"),
            named("lte2", "wwan*"),
            named("usb", "en?usb*"),
            named("dsl", "eth0"),
            named("any", "e*"),
        ];
        let at = |names: &[(u32, &str, bool)]| {
            let interface = |(index, name, up): &(u32, &str, bool)| Interface {
                index: *index,
                ..interface(name, *up, &[])
            };
            Inventory::of(names.iter().map(interface).collect())
        };
        let has = |inventory: &Inventory| {
            let name = |path| inventory.of_path(path).map_or("", |found| &found.name);
            paths.each_ref().map(name).map(str::to_owned)
        };
        let none = Inventory::default();
        assert_eq!(has(&none.clone().shared_out(&paths, &none)), [""; 5]);
        let two = [
            (1, "lo", true),
            (2, "eth0", true),
            (3, "wwan0", true),
            (4, "wwan1", true),
        ];
        let both = at(&two).shared_out(&paths, &none);
        assert_eq!(has(&both), ["wwan0", "wwan1", "", "eth0", ""]);
        // The second one stays where it is, and the first takes what comes.
        let one = at(&two[..2])
            .interfaces
            .into_iter()
            .chain(at(&two[3..]).interfaces);
        let one = Inventory::of(one.collect()).shared_out(&paths, &both);
        assert_eq!(has(&one), ["", "wwan1", "", "eth0", ""]);
        let more = [
            (2, "eth0", true),
            (4, "wwan1", true),
            (5, "wwan5", true),
            (6, "enxusb7", true),
        ];
        let more = at(&more).shared_out(&paths, &one);
        assert_eq!(has(&more), ["wwan5", "wwan1", "enxusb7", "eth0", ""]);
        // One that is down gives way to one that is up.
        let down = at(&[(4, "wwan1", false), (7, "wwan7", true)]).shared_out(&paths[1..2], &more);
        assert_eq!(has(&down)[1], "wwan7");
        let down = at(&[(4, "wwan1", false)]).shared_out(&paths[1..2], &more);
        assert_eq!(has(&down)[1], "wwan1");
        assert!(!at(&[(9, "dibs3", true)]).interfaces[0].is_like("wwan*"));
    }

    #[test]
    fn peers_reach_all_addresses_of_the_paths_interfaces() {
        let inventory = Inventory::of(vec![
            interface("eth0", true, &["10.0.1.1", "10.0.1.9", "fe80::1"]),
            interface("docker0", true, &["172.17.0.1"]),
            interface("eth1", false, &["10.0.2.1"]),
        ]);
        let reachable = |paths: &[PathConfig]| inventory.reachable(paths);
        let expected = |addresses: &[&str]| -> Vec<IpAddr> {
            addresses.iter().map(|a| a.parse().unwrap()).collect()
        };
        let eth0 = [path(Some("eth0"), Some("10.0.1.1"))];
        assert_eq!(reachable(&eth0), expected(&["10.0.1.1", "10.0.1.9"]));
        let both = [path(None, Some("10.0.1.9")), path(Some("eth1"), None)];
        let all = expected(&["10.0.1.1", "10.0.1.9", "10.0.2.1"]);
        assert_eq!(reachable(&both), all);
        assert_eq!(reachable(&[path(Some("eth2"), None)]), expected(&[]));
    }

    #[test]
    fn only_routable_addresses_of_others_are_the_hosts() {
        let inventory = Inventory::of(vec![
            interface("lo", true, &["127.0.0.1", "::1"]),
            interface("eth0", true, &["10.0.1.1", "fe80::1", "fd00::1"]),
            interface("dibs1", true, &["10.0.1.1", "10.9.9.9"]),
        ]);
        let addresses = inventory.host_addresses(|name| name.starts_with("dibs"));
        let expected: Vec<IpAddr> = ["10.0.1.1", "fd00::1"].map(|a| a.parse().unwrap()).into();
        assert_eq!(addresses, expected);
    }
}
