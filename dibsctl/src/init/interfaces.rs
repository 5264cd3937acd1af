//! The host's interfaces, and which of them make a path.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use dibs_config::PathConfig;
use dibs_config::setup::{Attachment, is_routable};
use futures_util::TryStreamExt;
use ipnet::IpNet;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, Prop,
};
use rtnetlink::packet_route::route::RouteFlags;

use crate::output::runtime;

/// An interface that is not loopback nor dibsd's.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    index: u32,
    pub(crate) name: String,
    /// Other names that the kernel knows it by.
    altnames: Vec<String>,
    /// Which interface it is a port of.
    controller: Option<u32>,
    kind: Option<InfoKind>,
    /// Its addresses that other hosts can use and that stay.
    pub(crate) attachments: Vec<Attachment>,
}

/// Lists what there is in this network namespace, by number.
pub(crate) fn list() -> Result<Vec<Interface>> {
    let mut interfaces = runtime()?.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().context("open rtnetlink")?;
        tokio::spawn(connection);
        let mut interfaces = Vec::new();
        let mut links = handle.link().get().execute();
        while let Some(link) = links.try_next().await.context("list interfaces")? {
            interfaces.extend(interface(link));
        }
        let mut addresses = handle.address().get().execute();
        while let Some(message) = addresses.try_next().await.context("list addresses")? {
            let index = message.header.index;
            let found = interfaces.iter_mut().find(|other| other.index == index);
            if let (Some(interface), Some(attachment)) = (found, attachment(&message)) {
                interface.attachments.push(attachment);
            }
        }
        anyhow::Ok(interfaces)
    })?;
    interfaces.sort_by_key(|interface| interface.index);
    for interface in &mut interfaces {
        // The order is stable: what the kernel prefers stays before the rest of its family.
        let attachments = &mut interface.attachments;
        attachments.sort_by_key(|attachment| attachment.address.is_ipv6());
    }
    Ok(interfaces)
}

fn interface(link: LinkMessage) -> Option<Interface> {
    if link.header.flags.contains(LinkFlags::Loopback) {
        return None;
    }
    let mut interface = Interface {
        index: link.header.index,
        name: String::new(),
        altnames: Vec::new(),
        controller: None,
        kind: None,
        attachments: Vec::new(),
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
            LinkAttribute::Controller(index) => interface.controller = Some(index),
            LinkAttribute::LinkInfo(infos) => {
                interface.kind = infos.into_iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    // The file cannot name it otherwise.
    let fits = dibs_config::is_interface_name(&interface.name);
    let own = interface.name.strip_prefix("dibs");
    let is_own = own.is_some_and(|number| number.parse::<u8>().is_ok());
    (fits && !is_own).then_some(interface)
}

fn attachment(message: &AddressMessage) -> Option<Attachment> {
    // Temporary ones change within a day (RFC 8981); another of a network adds nothing.
    let passing = AddressHeaderFlags::Secondary
        | AddressHeaderFlags::Deprecated
        | AddressHeaderFlags::Dadfailed;
    if message.header.flags.intersects(passing) {
        return None;
    }
    let (mut local, mut any) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(address) => local = Some(*address),
            AddressAttribute::Address(address) => any = Some(*address),
            _ => {}
        }
    }
    // Of a point-to-point link, IFA_ADDRESS is the far end and IFA_LOCAL ours.
    let address = local.or(any)?;
    let network = IpNet::new(any.unwrap_or(address), message.header.prefix_len).ok()?;
    is_routable(address).then_some(Attachment {
        address,
        network: network.trunc(),
    })
}

impl Interface {
    /// True if this is its name, its own or an alternative one, or a pattern of one.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        let mut names = [&self.name].into_iter().chain(&self.altnames);
        names.any(|own| dibs_settings::is_like(name, own))
    }

    /// Its addresses.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        let attachments = self.attachments.iter();
        attachments.map(|attachment| attachment.address).collect()
    }

    /// True if it leads to the Internet: to addresses that only a default route leads to (RFC 5737, RFC 3849).
    pub(crate) fn is_uplink(&self) -> bool {
        let nowhere = [
            IpAddr::from([192, 0, 2, 1]),
            IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1]),
        ];
        nowhere.into_iter().any(|to| leads(Some(self), to))
    }

    /// Whether it makes a path without being named: it has an address, and is a way out of this host by
    /// itself. A tunnel goes over another, and a bridge without a card joins only what runs here.
    pub(crate) fn is_way_out(&self, all: &[Interface]) -> bool {
        let is_card = |interface: &Interface| {
            matches!(
                interface.kind,
                None | Some(
                    InfoKind::Bond
                        | InfoKind::Team
                        | InfoKind::Vlan
                        | InfoKind::Ipoib
                        | InfoKind::Wwan
                        | InfoKind::RmNet
                        | InfoKind::Dsa
                )
            )
        };
        let leaves = match self.kind {
            Some(InfoKind::Bridge) => all
                .iter()
                .any(|other| other.controller == Some(self.index) && is_card(other)),
            // What a container has for a card.
            Some(
                InfoKind::Veth
                | InfoKind::MacVlan
                | InfoKind::IpVlan
                | InfoKind::MacVtap
                | InfoKind::Netkit,
            ) => true,
            _ => is_card(self),
        };
        leaves && !self.attachments.is_empty()
    }
}

/// What a path of the configuration is attached to now.
pub(crate) fn attachments(path: &PathConfig, all: &[Interface]) -> Vec<Attachment> {
    let named = |interface: &&Interface| match &path.interface {
        Some(name) => interface.is_called(name),
        None => true,
    };
    let attachments = all.iter().filter(named).flat_map(|i| &i.attachments);
    let fits = |at: &&Attachment| path.address.is_none_or(|address| address == at.address);
    attachments.filter(fits).copied().collect()
}

/// True if there is a route to an endpoint by the interface of a path. Not asked by a bound socket, because from one Linux
/// sends IPv4 to anywhere as to a neighbour.
pub(crate) fn is_routed(path: &PathConfig, all: &[Interface], endpoint: SocketAddr) -> bool {
    let called = |name: &String| all.iter().find(|interface| interface.is_called(name));
    match &path.interface {
        Some(name) => called(name).is_some_and(|interface| leads(Some(interface), endpoint.ip())),
        None => leads(None, endpoint.ip()),
    }
}

fn leads(by: Option<&Interface>, to: IpAddr) -> bool {
    let prefix = if to.is_ipv4() { 32 } else { 128 };
    let asked = RouteMessageBuilder::<IpAddr>::new().destination_prefix(to, prefix);
    let Ok(mut asked) = asked else { return false };
    if let Some(interface) = by {
        asked = asked.output_interface(interface.index);
    }
    let mut asked = asked.build();
    asked.header.flags |= RouteFlags::FibMatch;
    let route = async {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        anyhow::Ok(handle.route().get(asked).execute().try_next().await?)
    };
    runtime().is_ok_and(|runtime| runtime.block_on(route).is_ok_and(|route| route.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(index: u32, kind: Option<InfoKind>, controller: Option<u32>) -> Interface {
        Interface {
            index,
            name: format!("if{index}"),
            altnames: Vec::new(),
            controller,
            kind,
            attachments: vec![Attachment {
                address: IpAddr::from([10, 0, index as u8, 1]),
                network: "10.0.0.0/8".parse().unwrap(),
            }],
        }
    }

    #[test]
    fn cards_and_what_stands_for_them_are_ways_out() {
        let mut all = vec![
            interface(1, None, None),
            interface(2, Some(InfoKind::Veth), None),
            interface(3, Some(InfoKind::Bond), None),
            interface(4, Some(InfoKind::Wireguard), None),
            interface(5, Some(InfoKind::Tun), None),
            // With a card, and as docker has it.
            interface(6, Some(InfoKind::Bridge), None),
            interface(7, None, Some(6)),
            interface(8, Some(InfoKind::Bridge), None),
            interface(9, Some(InfoKind::Veth), Some(8)),
            interface(10, Some(InfoKind::Dummy), None),
            interface(11, None, None),
        ];
        all[6].attachments.clear();
        all[8].attachments.clear();
        all[10].attachments.clear();
        let ways: Vec<u32> = { all.iter() }
            .filter(|interface| interface.is_way_out(&all))
            .map(|interface| interface.index)
            .collect();
        assert_eq!(ways, [1, 2, 3, 6]);
    }
}
