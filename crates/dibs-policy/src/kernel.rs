//! The kernel's network state over rtnetlink and /proc/sys.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use dibs_settings::BumpId;
use ipnet::IpNet;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use rtnetlink::packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressProtocol,
};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcHandle, TcMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use rtnetlink::{LinkUnspec, RouteMessageBuilder};

use crate::conntrack::Conntrack;
use crate::net::{
    Address, Change, Hop, LinkState, NetChange, NetworkState, OWNER, Route, Rule, SYSCTLS,
};
use crate::wire::Wire;
use crate::{DeviceName, Error, Family, MarkLayout};

/// The network state of a kernel. There is one besides [`Netlink`] only in tests.
pub trait Kernel {
    /// What is ours, and how `devices` are.
    fn observe(
        &mut self,
        devices: &[DeviceName],
    ) -> impl Future<Output = Result<NetworkState, Error>> + Send;

    /// Makes one change. What is so already is success.
    fn change(&mut self, change: &NetChange) -> impl Future<Output = Result<(), Error>> + Send;

    /// Clears our bits from each conntrack entry whose bump is not among `keep` (with none: from
    /// each that has any) and says from how many.
    fn release_marks(
        &mut self,
        marks: MarkLayout,
        keep: &[BumpId],
    ) -> impl Future<Output = Result<usize, Error>> + Send;
}

/// The kernel of this host, in the network namespace of the thread that made it.
pub struct Netlink {
    route: Wire,
}

impl Netlink {
    /// Opens a netlink socket. Needs a tokio runtime.
    pub fn new() -> Result<Self, Error> {
        let route = Wire::open(NETLINK_ROUTE).map_err(Error::netlink("open rtnetlink"))?;
        Ok(Self { route })
    }

    async fn dump(&mut self, what: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.route.dump(what).await
    }

    async fn state(&mut self, devices: &[DeviceName]) -> io::Result<NetworkState> {
        let mut state = NetworkState::default();
        let mut names = BTreeMap::new();
        for message in self
            .dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))
            .await?
        {
            let RouteNetlinkMessage::NewLink(link) = message else {
                continue;
            };
            let Some(name) = link_name(&link) else {
                continue;
            };
            if devices.contains(&name) {
                state.links.insert(name.clone(), link_state(&name, &link));
            }
            names.insert(link.header.index, name);
        }
        for message in self
            .dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))
            .await?
        {
            let RouteNetlinkMessage::NewAddress(message) = message else {
                continue;
            };
            state.addresses.extend(our_address(&message, &names));
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut query = RouteMessage::default();
            query.header.address_family = family;
            for message in self.dump(RouteNetlinkMessage::GetRoute(query)).await? {
                let RouteNetlinkMessage::NewRoute(message) = message else {
                    continue;
                };
                state.routes.extend(our_route(&message, &names));
            }
            let mut query = RuleMessage::default();
            query.header.family = family;
            for message in self.dump(RouteNetlinkMessage::GetRule(query)).await? {
                let RouteNetlinkMessage::NewRule(message) = message else {
                    continue;
                };
                state.rules.extend(our_rule(&message));
            }
        }
        Ok(state)
    }

    async fn make(&mut self, change: &NetChange) -> io::Result<()> {
        use RouteNetlinkMessage as M;
        let (message, flags) = match change {
            NetChange::Sysctl { device, key, value } => {
                return std::fs::write(sysctl_path(key, device), value);
            }
            NetChange::Mtu(device, mtu) => (
                M::SetLink(LinkUnspec::new_with_name(device.as_str()).mtu(*mtu).build()),
                0,
            ),
            NetChange::Up(device) => (
                M::SetLink(LinkUnspec::new_with_name(device.as_str()).up().build()),
                0,
            ),
            NetChange::NoQueue(device) => {
                let mut qdisc = TcMessage::with_index(index(device)? as i32);
                qdisc.header.parent = TcHandle::ROOT;
                qdisc.attributes.push(TcAttribute::Kind("noqueue".into()));
                (M::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_REPLACE)
            }
            NetChange::Address(Change::Add, address) => (
                M::NewAddress(address_message(address)?),
                NLM_F_CREATE | NLM_F_EXCL,
            ),
            NetChange::Address(Change::Remove, address) => {
                (M::DelAddress(address_message(address)?), 0)
            }
            NetChange::Route(Change::Add, route) => (
                M::NewRoute(route_message(route)?),
                NLM_F_CREATE | NLM_F_REPLACE,
            ),
            NetChange::Route(Change::Remove, route) => (M::DelRoute(route_message(route)?), 0),
            NetChange::Rule(Change::Add, rule) => {
                (M::NewRule(rule_message(rule)), NLM_F_CREATE | NLM_F_EXCL)
            }
            NetChange::Rule(Change::Remove, rule) => (M::DelRule(rule_message(rule)), 0),
        };
        self.route.request(message, flags).await.map(drop)
    }
}

impl Kernel for Netlink {
    async fn observe(&mut self, devices: &[DeviceName]) -> Result<NetworkState, Error> {
        self.state(devices)
            .await
            .map_err(Error::netlink("list links, addresses, routes and rules"))
    }

    async fn change(&mut self, change: &NetChange) -> Result<(), Error> {
        let outcome = self.make(change).await;
        match (direction(change), outcome) {
            (Some(Change::Add), Err(e)) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            (Some(Change::Remove), Err(e)) if is_gone(&e) => Ok(()),
            (_, outcome) => outcome.map_err(Error::netlink(change.to_string())),
        }
    }

    async fn release_marks(&mut self, marks: MarkLayout, keep: &[BumpId]) -> Result<usize, Error> {
        Conntrack::open()?.release(marks, keep).await
    }
}

fn direction(change: &NetChange) -> Option<Change> {
    match change {
        NetChange::Address(change, _)
        | NetChange::Route(change, _)
        | NetChange::Rule(change, _) => Some(*change),
        _ => None,
    }
}

/// What is to be removed is no longer there, or went with its device.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ESRCH | libc::ENOENT | libc::EADDRNOTAVAIL | libc::ENODEV)
    )
}

fn index(device: &DeviceName) -> io::Result<u32> {
    Ok(nix::net::if_::if_nametoindex(device.as_str())?)
}

fn sysctl_path(key: &str, device: &DeviceName) -> PathBuf {
    PathBuf::from("/proc/sys/net").join(key.replace('@', device.as_str()))
}

fn link_name(link: &LinkMessage) -> Option<DeviceName> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => DeviceName::new(name).ok(),
            _ => None,
        })
}

fn link_state(name: &DeviceName, link: &LinkMessage) -> LinkState {
    let mut state = LinkState {
        up: link.header.flags.contains(LinkFlags::Up),
        mtu: 0,
        noqueue: false,
        sysctls: BTreeMap::new(),
    };
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => state.mtu = *mtu,
            LinkAttribute::Qdisc(kind) => state.noqueue = kind == "noqueue",
            _ => {}
        }
    }
    for (key, _) in SYSCTLS {
        if let Ok(value) = std::fs::read_to_string(sysctl_path(key, name)) {
            state.sysctls.insert(key, value.trim().to_owned());
        }
    }
    state
}

fn our_address(message: &AddressMessage, names: &BTreeMap<u32, DeviceName>) -> Option<Address> {
    let device = names.get(&message.header.index)?.clone();
    let ours = AddressAttribute::Protocol(AddressProtocol::Other(OWNER));
    let mut found = None;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(address) => found = Some(*address),
            AddressAttribute::Address(address) if found.is_none() => found = Some(*address),
            _ => {}
        }
    }
    message.attributes.contains(&ours).then_some(Address {
        address: found?,
        device,
    })
}

fn address_message(address: &Address) -> io::Result<AddressMessage> {
    let ip = address.address;
    let mut message = AddressMessage::default();
    message.header.index = index(&address.device)?;
    message.header.prefix_len = IpNet::from(ip).prefix_len();
    message.header.flags = AddressHeaderFlags::Nodad;
    message.header.family = match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.attributes = vec![
        AddressAttribute::Local(ip),
        AddressAttribute::Address(ip),
        AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute),
        AddressAttribute::Protocol(AddressProtocol::Other(OWNER)),
    ];
    Ok(message)
}

fn our_route(message: &RouteMessage, names: &BTreeMap<u32, DeviceName>) -> Option<Route> {
    if message.header.protocol != RouteProtocol::from(OWNER) {
        return None;
    }
    let family = match message.header.address_family {
        AddressFamily::Inet => Family::V4,
        AddressFamily::Inet6 => Family::V6,
        _ => return None,
    };
    let mut table = u32::from(message.header.table);
    let (mut address, mut device, mut metric) = (family.any().addr(), None, 0);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(id) => table = *id,
            RouteAttribute::Destination(RouteAddress::Inet(to)) => address = IpAddr::V4(*to),
            RouteAttribute::Destination(RouteAddress::Inet6(to)) => address = IpAddr::V6(*to),
            RouteAttribute::Oif(index) => device = names.get(index).cloned(),
            RouteAttribute::Priority(priority) => metric = *priority,
            _ => {}
        }
    }
    let destination = IpNet::new(address, message.header.destination_prefix_length).ok()?;
    // An IPv6 route that leads nowhere is shown with the device lo.
    let hop = match message.header.kind {
        RouteType::Unicast => Hop::Device(device?),
        RouteType::Throw => Hop::Throw,
        _ => Hop::Blackhole,
    };
    Some(Route {
        table,
        destination,
        hop,
        metric,
    })
}

fn route_message(route: &Route) -> io::Result<RouteMessage> {
    let length = route.destination.prefix_len();
    let mut message = match route.destination.addr() {
        IpAddr::V4(address) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, length)
            .build(),
        IpAddr::V6(address) => RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(address, length)
            .build(),
    };
    message.header.table = RouteHeader::RT_TABLE_UNSPEC;
    message.header.protocol = RouteProtocol::from(OWNER);
    message.attributes.push(RouteAttribute::Table(route.table));
    message
        .attributes
        .push(RouteAttribute::Priority(route.metric));
    (message.header.kind, message.header.scope) = match &route.hop {
        Hop::Device(device) => {
            message.attributes.push(RouteAttribute::Oif(index(device)?));
            (RouteType::Unicast, RouteScope::Link)
        }
        Hop::Blackhole => (RouteType::BlackHole, RouteScope::Universe),
        Hop::Throw => (RouteType::Throw, RouteScope::Universe),
    };
    Ok(message)
}

fn our_rule(message: &RuleMessage) -> Option<Rule> {
    let family = match message.header.family {
        AddressFamily::Inet => Family::V4,
        AddressFamily::Inet6 => Family::V6,
        _ => return None,
    };
    let mut ours = false;
    let mut table = u32::from(message.header.table);
    let (mut priority, mut mark, mut mask) = (0, None, u32::MAX);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Protocol(protocol) => ours = *protocol == RouteProtocol::from(OWNER),
            RuleAttribute::Table(id) => table = *id,
            RuleAttribute::Priority(value) => priority = *value,
            RuleAttribute::FwMark(value) => mark = Some(*value),
            RuleAttribute::FwMask(value) => mask = *value,
            _ => {}
        }
    }
    ours.then_some(Rule {
        family,
        priority,
        mark: mark.map(|mark| (mark, mask)),
        table,
    })
}

fn rule_message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = match rule.family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    };
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(rule.priority),
        RuleAttribute::Table(rule.table),
        RuleAttribute::Protocol(RouteProtocol::from(OWNER)),
    ];
    match rule.mark {
        Some((mark, mask)) => {
            message.attributes.push(RuleAttribute::FwMark(mark));
            message.attributes.push(RuleAttribute::FwMask(mask));
        }
        None => message.attributes.push(RuleAttribute::Iifname("lo".into())),
    }
    message
}
