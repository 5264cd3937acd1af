//! Devices, addresses, routes and RPDB rules: as they should be, as they are, and the difference.

use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use crate::desired::{DeviceOwner, Fail, widest};
use crate::{Desired, DeviceName, Family};

/// The protocol number in every route, RPDB rule and address that dibs adds: how it knows its own.
/// Not among the kernel's RTPROT numbers, nor those that routing daemons registered there.
pub const OWNER: u8 = 219;

/// The largest MTU: no route's is larger, so nothing is retransmitted at a switch (docs/switching.md).
const TUN_MTU: u32 = 65535;

/// Behind the kernel's own `default` rule (32767): asked only if no other table has a route.
const BACKUP_PRIORITY: u32 = 32800;

/// Metric of backup routes; the bump id is added.
const BACKUP_METRIC: u32 = 1000;

/// The network side of a wish.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// TUNs of ours and how they should be set up.
    pub devices: BTreeSet<DeviceName>,
    /// True if packets that come out of them may be for others.
    pub forwards: bool,
    /// Devices of others that routes lead to.
    pub foreign: BTreeSet<DeviceName>,
    /// Addresses on TUNs of ours.
    pub addresses: BTreeSet<Address>,
    /// Routes in our tables.
    pub routes: BTreeSet<Route>,
    /// RPDB rules.
    pub rules: BTreeSet<Rule>,
}

/// An address, alone in its prefix, on a TUN of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// The device it stands on.
    pub device: DeviceName,
}

/// A route of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Its routing table.
    pub table: u32,
    /// Destination.
    pub destination: IpNet,
    /// Hop that a packet takes.
    pub hop: Hop,
    /// The lower is preferred.
    pub metric: u32,
}

/// Hop of a route.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hop {
    /// It leaves by this device.
    Device(DeviceName),
    /// Nowhere, and senders are not told: connections that begin wait.
    Blackhole,
    /// The tables asked later decide.
    Throw,
}

impl Route {
    /// The device that it leads by, if it does.
    pub(crate) const fn device(&self) -> Option<&DeviceName> {
        match &self.hop {
            Hop::Device(device) => Some(device),
            Hop::Blackhole | Hop::Throw => None,
        }
    }
}

/// An RPDB rule of ours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// IPv4 or IPv6.
    pub family: Family,
    /// The lower is tried first.
    pub priority: u32,
    /// Whose packets: of a mark (value, mask), or all that this host sends.
    pub mark: Option<(u32, u32)>,
    /// The table they are looked up in.
    pub table: u32,
}

/// State of the kernel's network: what is ours, and the devices that matter to us.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetworkState {
    /// The devices asked for, as far as they exist.
    pub links: BTreeMap<DeviceName, LinkState>,
    /// Addresses with our protocol number.
    pub addresses: BTreeSet<Address>,
    /// Routes with our protocol number.
    pub routes: BTreeSet<Route>,
    /// RPDB rules with our protocol number.
    pub rules: BTreeSet<Rule>,
}

/// A device as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// True if it is up.
    pub up: bool,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// True if its root queueing discipline is `noqueue`.
    pub noqueue: bool,
    /// The sysctls of [`SYSCTLS`] that exist for it.
    pub sysctls: BTreeMap<&'static str, String>,
}

/// Settings of a TUN of ours, as paths under /proc/sys/net with `@` for the device. rp_filter: replies to
/// addresses of other interfaces come in here. forwarding: what comes out is for this host alone, also
/// where it is a router, unless [`Network::forwards`]. disable_ipv6: routes by it are refused otherwise, and a
/// host without IPv6 has no address to use them with. The rest: it has no neighbours to learn from.
pub const SYSCTLS: [(&str, &str); 9] = [
    ("ipv4/conf/@/rp_filter", "2"),
    ("ipv4/conf/@/forwarding", "0"),
    ("ipv6/conf/@/forwarding", "0"),
    ("ipv6/conf/@/disable_ipv6", "0"),
    ("ipv6/conf/@/accept_ra", "0"),
    ("ipv6/conf/@/autoconf", "0"),
    ("ipv6/conf/@/router_solicitations", "0"),
    ("ipv6/conf/@/accept_redirects", "0"),
    ("ipv6/conf/@/addr_gen_mode", "1"),
];

/// Of [`SYSCTLS`], what a gateway has otherwise.
fn setting(key: &str, value: &'static str, forwards: bool) -> &'static str {
    if forwards && key.ends_with("/forwarding") {
        "1"
    } else {
        value
    }
}

/// One change of the kernel's network state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetChange {
    /// Write a sysctl of a device.
    Sysctl {
        /// The device.
        device: DeviceName,
        /// One of [`SYSCTLS`].
        key: &'static str,
        /// What to write.
        value: &'static str,
    },
    /// Set a device's MTU.
    Mtu(DeviceName, u32),
    /// Give a device the queueing discipline `noqueue`.
    NoQueue(DeviceName),
    /// Set a device up.
    Up(DeviceName),
    /// Add an address, or take it away.
    Address(Change, Address),
    /// Add a route (in place of one with the same destination and metric), or take it away.
    Route(Change, Route),
    /// Add an RPDB rule, or take it away.
    Rule(Change, Rule),
}

/// The direction of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Add; what is there already is success.
    Add,
    /// Remove; what is gone already is success.
    Remove,
}

impl Network {
    /// The network side of `desired`.
    pub fn of(desired: &Desired) -> Self {
        let mut network = Self {
            forwards: (desired.forwards() || desired.translates) && !desired.bumps.is_empty(),
            ..Self::default()
        };
        let families = Family::BOTH
            .into_iter()
            .filter(|f| !desired.peers(*f).is_empty());
        for family in families {
            for bump in &desired.bumps {
                let table = desired.table_base + u32::from(bump.id.get());
                let mark = Some((desired.marks.bump(bump.id), desired.marks.bump_mask()));
                let default = |hop, metric| Route {
                    table,
                    destination: family.any(),
                    hop,
                    metric,
                };
                let out = || Hop::Device(bump.device.clone());
                // IPv6 has no metric 0: the kernel makes it 1024.
                network.routes.insert(default(out(), 1));
                if desired.fail == Fail::Closed {
                    network.routes.insert(default(Hop::Blackhole, u32::MAX));
                }
                // Where the kernel filters by reverse path and asks with the packet's mark (src_valid_mark), what
                // a network behind sends would have to come in by the TUN. IPv6 has no such filter.
                let near = match family {
                    Family::V4 => widest(&desired.gateway, family),
                    Family::V6 => Vec::new(),
                };
                network
                    .routes
                    .extend(near.into_iter().map(|destination| Route {
                        destination,
                        ..default(Hop::Throw, 0)
                    }));
                network.rules.insert(Rule {
                    family,
                    priority: desired.rule_priority,
                    mark,
                    table,
                });
                let devices = match bump.owner {
                    DeviceOwner::Ours => &mut network.devices,
                    DeviceOwner::Foreign => &mut network.foreign,
                };
                devices.insert(bump.device.clone());
                if bump.owner == DeviceOwner::Foreign {
                    continue;
                }
                let own = bump
                    .addresses
                    .iter()
                    .filter(|address| Family::of(**address) == family);
                network.addresses.extend(own.map(|&address| Address {
                    address,
                    device: bump.device.clone(),
                }));
                for destination in widest(&bump.peers, family) {
                    network.routes.insert(Route {
                        table: desired.table_base,
                        destination,
                        hop: out(),
                        metric: BACKUP_METRIC + u32::from(bump.id.get()),
                    });
                    let (priority, table) = (BACKUP_PRIORITY, desired.table_base);
                    network.rules.insert(Rule {
                        family,
                        priority,
                        mark: None,
                        table,
                    });
                }
            }
        }
        network
    }

    /// The devices that an observation has to look at.
    pub fn watched(&self) -> impl Iterator<Item = &DeviceName> {
        self.devices.iter().chain(&self.foreign)
    }

    /// Changes that add to `now` what is missing, in the order in which that is safe: set up devices, close tables,
    /// open them, send marked packets there. Routes by devices that are missing or down wait for them.
    pub fn additions(&self, now: &NetworkState) -> Vec<NetChange> {
        let mut changes = Vec::new();
        for device in &self.devices {
            let Some(link) = now.links.get(device) else {
                continue;
            };
            changes.extend(set_up(device, link, self.forwards));
        }
        let (closed, open): (Vec<_>, Vec<_>) = self
            .routes
            .difference(&now.routes)
            .filter(|route| route.device().is_none_or(|device| self.usable(device, now)))
            .cloned()
            .partition(|route| route.device().is_none());
        changes.extend(
            closed
                .into_iter()
                .map(|route| NetChange::Route(Change::Add, route)),
        );
        let addresses = self.addresses.difference(&now.addresses);
        changes.extend(
            addresses
                .filter(|address| self.usable(&address.device, now))
                .map(|address| NetChange::Address(Change::Add, address.clone())),
        );
        changes.extend(
            open.into_iter()
                .map(|route| NetChange::Route(Change::Add, route)),
        );
        let rules = self.rules.difference(&now.rules).cloned();
        changes.extend(rules.map(|rule| NetChange::Rule(Change::Add, rule)));
        changes
    }

    /// Changes that remove from `now` what is too much, in the reverse order.
    pub fn removals(&self, now: &NetworkState) -> Vec<NetChange> {
        let rules = now.rules.difference(&self.rules).rev_collect();
        let routes = now.routes.difference(&self.routes).rev_collect();
        let addresses = now.addresses.difference(&self.addresses).rev_collect();
        let rules = rules
            .into_iter()
            .map(|rule| NetChange::Rule(Change::Remove, rule));
        let routes = routes
            .into_iter()
            .map(|route| NetChange::Route(Change::Remove, route));
        let addresses = addresses
            .into_iter()
            .map(|a| NetChange::Address(Change::Remove, a));
        rules.chain(routes).chain(addresses).collect()
    }

    /// Whether a route leads by another program's device, which may refuse it: it may have no IPv6.
    pub(crate) fn is_foreign(&self, change: &NetChange) -> bool {
        match change {
            NetChange::Route(Change::Add, route) => {
                let device = route.device();
                device.is_some_and(|device| self.foreign.contains(device))
            }
            _ => false,
        }
    }

    /// Our own device is set up before its routes are added; a foreign one has to be up already.
    fn usable(&self, device: &DeviceName, now: &NetworkState) -> bool {
        now.links
            .get(device)
            .is_some_and(|link| link.up || self.devices.contains(device))
    }
}

trait RevCollect<T> {
    fn rev_collect(self) -> Vec<T>;
}

impl<'a, T: Clone + 'a, I: Iterator<Item = &'a T>> RevCollect<T> for I {
    fn rev_collect(self) -> Vec<T> {
        let mut all: Vec<T> = self.cloned().collect();
        all.reverse();
        all
    }
}

fn set_up(device: &DeviceName, link: &LinkState, forwards: bool) -> Vec<NetChange> {
    let mut changes = Vec::new();
    for (key, value) in SYSCTLS {
        let value = setting(key, value, forwards);
        if link.sysctls.get(key).is_some_and(|found| found != value) {
            changes.push(NetChange::Sysctl {
                device: device.clone(),
                key,
                value,
            });
        }
    }
    if link.mtu != TUN_MTU {
        changes.push(NetChange::Mtu(device.clone(), TUN_MTU));
    }
    if !link.noqueue {
        changes.push(NetChange::NoQueue(device.clone()));
    }
    if !link.up {
        changes.push(NetChange::Up(device.clone()));
    }
    changes
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} dev {}", IpNet::from(self.address), self.device)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hop {
            Hop::Device(device) => write!(f, "{} dev {device}", self.destination)?,
            Hop::Throw => write!(f, "throw {}", self.destination)?,
            Hop::Blackhole => write!(f, "blackhole {}", self.destination)?,
        }
        write!(f, " table {} metric {}", self.table, self.metric)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mark {
            Some((mark, mask)) => write!(f, "fwmark {mark:#x}/{mask:#x}")?,
            None => write!(f, "iif lo")?,
        }
        write!(f, " table {} priority {}", self.table, self.priority)
    }
}

impl fmt::Display for NetChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |change: &Change| match change {
            Change::Add => "add",
            Change::Remove => "del",
        };
        match self {
            NetChange::Sysctl { device, key, value } => {
                write!(
                    f,
                    "sysctl net/{}={value}",
                    key.replace('@', device.as_str())
                )
            }
            NetChange::Mtu(device, mtu) => write!(f, "ip link set {device} mtu {mtu}"),
            NetChange::NoQueue(device) => write!(f, "tc qdisc replace dev {device} root noqueue"),
            NetChange::Up(device) => write!(f, "ip link set {device} up"),
            NetChange::Address(change, address) => {
                write!(f, "ip address {} {address}", word(change))
            }
            NetChange::Route(change, route) => {
                let family = Family::of(route.destination.addr());
                write!(f, "ip {family} route {} {route}", word(change))
            }
            NetChange::Rule(change, rule) => {
                write!(f, "ip {} rule {} {rule}", rule.family, word(change))
            }
        }
    }
}
