//! Entries that are made over ctnetlink, of connections that are under way.

use std::net::IpAddr;

use dibs_wire::FlowKey;
use netlink_packet_netfilter::NetfilterMessage;
use netlink_packet_netfilter::conntrack::{
    ConntrackAttribute as Attribute, ConntrackMessage, ProtoInfo, ProtoInfoTCP, Status,
};
use rtnetlink::packet_core::DefaultNla;

use super::{
    CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, CTA_PROTOINFO_TCP_FLAGS_REPLY,
    CTA_PROTOINFO_TCP_WSCALE_ORIGINAL, CTA_PROTOINFO_TCP_WSCALE_REPLY, TCP_BE_LIBERAL, attributes,
    message,
};
use crate::Family;
use crate::nft::Attributes;

const CTA_NAT_SRC: u16 = 6;
const CTA_NAT_V4_MINIP: u16 = 1;
const CTA_NAT_V4_MAXIP: u16 = 2;
const CTA_NAT_PROTO: u16 = 3;
const CTA_NAT_V6_MINIP: u16 = 4;
const CTA_NAT_V6_MAXIP: u16 = 5;
const CTA_PROTONAT_PORT_MIN: u16 = 1;
const CTA_PROTONAT_PORT_MAX: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;

/// IP_CT_TCP_FLAG_WINDOW_SCALE.
const TCP_WINDOW_SCALE: u8 = 0x01;
/// Seconds, the kernel's own default for established connections.
pub(super) const ESTABLISHED_TIMEOUT: u32 = 432_000;

/// The message that makes an entry of a connection that is under way, with another source if one is given.
pub(super) fn entry(
    tuple: &FlowKey,
    tcp: Vec<ProtoInfoTCP>,
    mark: u32,
    source: Option<Attribute>,
) -> NetfilterMessage {
    let mut entry = vec![
        Attribute::CtaTupleOrig(attributes(tuple)),
        Attribute::CtaTupleReply(attributes(&tuple.reversed())),
        Attribute::CtaProtoInfo(vec![ProtoInfo::TCP(tcp)]),
        Attribute::CtaStatus(Status::Confirmed | Status::SeenReply | Status::Assured),
        Attribute::CtaTimeout(ESTABLISHED_TIMEOUT),
        Attribute::CtaMark(mark),
    ];
    entry.extend(source);
    message(Family::of(tuple.src), ConntrackMessage::New(entry))
}

/// TCP part of an entry: the state, and the bits by which each end shifts its windows, as far as a SYN was seen.
pub(super) fn tcp(window_scales: [u8; 2], state: u8) -> Vec<ProtoInfoTCP> {
    let scales = [
        CTA_PROTOINFO_TCP_WSCALE_ORIGINAL,
        CTA_PROTOINFO_TCP_WSCALE_REPLY,
    ];
    let scales = scales.into_iter().zip(window_scales);
    let mut tcp = match window_scales {
        [0, 0] => liberal(),
        _ => flags(TCP_BE_LIBERAL | TCP_WINDOW_SCALE),
    };
    tcp.extend(scales.map(|(kind, shift)| ProtoInfoTCP::Other(DefaultNla::new(kind, vec![shift]))));
    tcp.push(ProtoInfoTCP::State(state));
    tcp
}

/// Flags by which a connection's packets are valid whatever their numbers.
pub(super) fn liberal() -> Vec<ProtoInfoTCP> {
    flags(TCP_BE_LIBERAL)
}

/// Flags of both ends, as value and as mask.
fn flags(bits: u8) -> Vec<ProtoInfoTCP> {
    let kinds = [
        CTA_PROTOINFO_TCP_FLAGS_ORIGINAL,
        CTA_PROTOINFO_TCP_FLAGS_REPLY,
    ];
    let flags = |kind| ProtoInfoTCP::Other(DefaultNla::new(kind, vec![bits; 2]));
    kinds.map(flags).into()
}

/// The translation of a source to which these answers come.
pub(super) fn source(reply: &FlowKey) -> Attribute {
    let (address, kinds) = match reply.dst {
        IpAddr::V4(address) => (
            address.octets().to_vec(),
            [CTA_NAT_V4_MINIP, CTA_NAT_V4_MAXIP],
        ),
        IpAddr::V6(address) => (
            address.octets().to_vec(),
            [CTA_NAT_V6_MINIP, CTA_NAT_V6_MAXIP],
        ),
    };
    let ports = [CTA_PROTONAT_PORT_MIN, CTA_PROTONAT_PORT_MAX];
    let ports = ports
        .into_iter()
        .fold(Attributes::default(), |ports, kind| {
            ports.bytes(kind, &reply.dport.to_be_bytes())
        });
    let given = kinds
        .into_iter()
        .fold(Attributes::default(), |given, kind| {
            given.bytes(kind, &address)
        });
    let given = given.nested(CTA_NAT_PROTO, ports);
    Attribute::Other(DefaultNla::new(CTA_NAT_SRC | NLA_F_NESTED, given.0))
}
