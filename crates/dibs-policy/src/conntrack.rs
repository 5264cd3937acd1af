//! Connection tracking over ctnetlink: list, set the mark of one connection, follow events.
//!
//! The kernel tracks connections only while a rule of some program asks for it, and entries come and go
//! with expiry and flushes: a connection may live without one.

use std::io;
use std::net::IpAddr;

use dibs_settings::BumpId;
use dibs_wire::FlowKey;
use dibs_wire::packet::TCP;
use netlink_packet_netfilter::conntrack::{
    ConntrackAttribute as Attribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP,
    ProtoTuple, Tuple as TupleAttribute,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use nix::sys::socket::{setsockopt, sockopt};
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_CREATE, NLM_F_EXCL, NetlinkMessage, NetlinkPayload, Nla,
};
use rtnetlink::sys::protocols::NETLINK_NETFILTER;
use rtnetlink::sys::{AsyncSocket, TokioSocket};

use crate::wire::{Wire, receive};
use crate::{Error, Family, MarkLayout};

mod made;

const CTA_COUNTERS_ORIG: u16 = 9;
const CTA_COUNTERS_REPLY: u16 = 10;
const CTA_COUNTERS_BYTES: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_TIMESTAMP: u16 = 20;
const CTA_TIMESTAMP_START: u16 = 1;
const CTA_MARK_MASK: u16 = 21;

const CTA_PROTOINFO_TCP_WSCALE_ORIGINAL: u16 = 2;
const CTA_PROTOINFO_TCP_WSCALE_REPLY: u16 = 3;
const CTA_PROTOINFO_TCP_FLAGS_ORIGINAL: u16 = 4;
const CTA_PROTOINFO_TCP_FLAGS_REPLY: u16 = 5;

/// IP_CT_TCP_FLAG_SACK_PERM.
const TCP_SACK_PERM: u8 = 0x02;
/// IP_CT_TCP_FLAG_BE_LIBERAL.
const TCP_BE_LIBERAL: u8 = 0x08;
/// TCP_CONNTRACK_ESTABLISHED.
const TCP_ESTABLISHED: u8 = 3;
/// TCP_CONNTRACK_LAST_ACK: both ends sent a FIN.
const TCP_LAST_ACK: u8 = 6;
/// TCP_CONNTRACK_TIME_WAIT: both FINs were acknowledged.
const TCP_TIME_WAIT: u8 = 7;
/// TCP_CONNTRACK_CLOSE: a RST was seen.
const TCP_CLOSE: u8 = 8;

/// Connections that are better looked up one by one than listed: for a list the kernel walks its whole table, which
/// has 262,144 places on a host of some GB. That takes it up to 10 ms, in which that processor receives nothing.
pub const LOOKUPS: usize = 512;

/// Bytes of events that may wait before the kernel drops some and [`Event::Lost`] is seen.
const EVENT_BUFFER: usize = 4 << 20;

/// A tracked TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// As its first packet went.
    pub original: FlowKey,
    /// As its answers come; differs from the mirrored original where addresses are translated.
    pub reply: FlowKey,
    /// The whole ctmark, bits of others included.
    pub mark: u32,
    /// True if the kernel told the mark. Events about other things leave a mark of 0 out.
    pub mark_told: bool,
    /// The kernel's number for the entry.
    pub id: u32,
    /// The conntrack zone; 0 unless another program uses zones.
    pub zone: u16,
    /// The kernel's TCP state (3 is established), if it said.
    pub tcp_state: Option<u8>,
    /// By how many bits each end shifts the windows that it gives (RFC 7323): the one that sent first,
    /// the other. 0 also where their SYNs were not seen.
    pub window_scales: [u8; 2],
    /// Made over ctnetlink, and by no packet: its source stays as given wherever its packets leave.
    pub made: bool,
    /// When the kernel began to track it, in nanoseconds since 1970, if it keeps note (the sysctl
    /// net.netfilter.nf_conntrack_timestamp).
    pub since: Option<u64>,
    /// Bytes that each end sent, in the order of the scales, if the kernel counts them (the sysctl
    /// net.netfilter.nf_conntrack_acct).
    pub bytes: Option<[u64; 2]>,
}

impl Connection {
    /// The connection as either end may have begun it.
    pub fn ends(&self) -> [FlowKey; 2] {
        [self.original, self.original.reversed()]
    }

    /// True if conntrack saw both ends finish.
    pub fn has_finished(&self) -> bool {
        matches!(self.tcp_state, Some(TCP_LAST_ACK | TCP_TIME_WAIT))
    }

    /// True if conntrack saw a RST of it.
    pub fn was_closed(&self) -> bool {
        self.tcp_state == Some(TCP_CLOSE)
    }
}

/// Change of a tracked connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is tracked from now on.
    New(Connection),
    /// Its mark or state changed.
    Update(Connection),
    /// It is no longer tracked.
    Destroyed(Connection),
    /// Events were lost: list again.
    Lost,
}

/// A connection to ctnetlink, in the network namespace of the thread that opened it.
pub struct Conntrack {
    wire: Wire,
}

impl Conntrack {
    /// Opens a socket. Needs a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let wire = Wire::open(NETLINK_NETFILTER).map_err(Error::netlink("open ctnetlink"))?;
        Ok(Self { wire })
    }

    /// True if it waits for nothing. A socket that does was given up half way, and is of no use any more.
    pub fn is_idle(&self) -> bool {
        self.wire.is_idle()
    }

    /// Results of `pick` for every tracked connection of both families.
    pub async fn list<U>(
        &mut self,
        pick: impl FnMut(Connection) -> Option<U>,
    ) -> Result<Vec<U>, Error> {
        self.listed(Vec::new(), pick).await
    }

    /// As [`list`](Self::list), of those whose mark has `value` in the bits `mask`; the kernel sorts out
    /// the others.
    pub async fn marked<U>(
        &mut self,
        value: u32,
        mask: u32,
        mut pick: impl FnMut(Connection) -> Option<U>,
    ) -> Result<Vec<U>, Error> {
        let filter = vec![Attribute::CtaMark(value), mark_mask(mask)];
        self.listed(filter, |entry| {
            (entry.mark & mask == value).then(|| pick(entry)).flatten()
        })
        .await
    }

    async fn listed<U>(
        &mut self,
        filter: Vec<Attribute>,
        mut pick: impl FnMut(Connection) -> Option<U>,
    ) -> Result<Vec<U>, Error> {
        // Both families at once: the kernel walks its whole table for each question.
        let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 0);
        let query = NetfilterMessage::new(header, ConntrackMessage::Get(filter));
        self.wire
            .gather(query, |answer| pick(connection(answer)?))
            .await
            .map_err(Error::netlink("list tracked connections"))
    }

    /// One connection, by its ends as either of them sends; `None` if it is not tracked.
    pub async fn get(&mut self, ends: &FlowKey) -> Result<Option<Connection>, Error> {
        for tuple in both_ways(ends) {
            let query = ConntrackMessage::Get(vec![Attribute::CtaTupleOrig(attributes(&tuple))]);
            let query = message(Family::of(tuple.src), query);
            match self.wire.request(query, 0).await {
                Ok(answers) => return Ok(answers.into_iter().find_map(connection)),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(Error::netlink(format!("look up {tuple}"))(error)),
            }
        }
        Ok(None)
    }

    /// Replaces the bits `mask` of one connection's mark by those of `value`, in one step in the
    /// kernel. `false`: it is not tracked.
    pub async fn set_mark(
        &mut self,
        tuple: &FlowKey,
        value: u32,
        mask: u32,
    ) -> Result<bool, Error> {
        for tuple in both_ways(tuple) {
            let which = vec![Attribute::CtaTupleOrig(attributes(&tuple))];
            let done = self.replace_mark(Family::of(tuple.src), which, value, mask);
            let fault = Error::netlink(format!("set the mark of {tuple}"));
            if done.await.map_err(fault)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tracks an established TCP connection that the kernel does not track, with `mark` from its first
    /// packet on. `false`: it is tracked by now.
    ///
    /// A connection that is older than our rules gets an entry with its next packet only, which for an
    /// idle one may be the far end's.
    pub async fn adopt(&mut self, tuple: &FlowKey, mark: u32) -> Result<bool, Error> {
        // As the kernel picks up a connection half way: its windows are not known.
        let tcp = made::tcp([0; 2], TCP_ESTABLISHED);
        let message = made::entry(tuple, tcp, mark, None);
        let made = self.wire.request(message, NLM_F_CREATE | NLM_F_EXCL).await;
        is_made(made.map(drop), tuple)
    }

    /// As [`adopt`](Self::adopt), with the source that a known one was given. What the kernel still has of that one goes
    /// first: a masqueraded connection ends for it where it leaves by another interface, and this one does not.
    pub async fn adopt_translated(&mut self, known: &Connection, mark: u32) -> Result<bool, Error> {
        let tuple = &known.original;
        let state = known.tcp_state.unwrap_or(TCP_ESTABLISHED);
        let tcp = made::tcp(known.window_scales, state);
        let source = made::source(&known.reply);
        let made = made::entry(tuple, tcp, mark, Some(source));
        let gone = vec![
            Attribute::CtaTupleOrig(attributes(tuple)),
            Attribute::Other(DefaultNla::new(CTA_ID, known.id.to_be_bytes().to_vec())),
        ];
        let gone = message(Family::of(tuple.src), ConntrackMessage::Delete(gone));
        let made = self
            .wire
            .request_after(gone, made, NLM_F_CREATE | NLM_F_EXCL);
        is_made(made.await, tuple)
    }

    /// Has the kernel take a TCP connection for established that it takes for closed, and would forget.
    /// `false`: it is not tracked.
    pub async fn revive(&mut self, tuple: &FlowKey) -> Result<bool, Error> {
        let established = vec![ProtoInfoTCP::State(TCP_ESTABLISHED)];
        let timeout = Attribute::CtaTimeout(made::ESTABLISHED_TIMEOUT);
        let done = self.change_tcp(tuple, established, vec![timeout]).await;
        done.map_err(Error::netlink(format!("revive {tuple}")))
    }

    /// Has the kernel take packets of a TCP connection for valid, and translate them, whatever their numbers. `false`: it is
    /// not tracked.
    pub async fn make_liberal(&mut self, tuple: &FlowKey) -> Result<bool, Error> {
        let done = self.change_tcp(tuple, made::liberal(), Vec::new()).await;
        done.map_err(Error::netlink(format!("take all numbers of {tuple}")))
    }

    async fn change_tcp(
        &mut self,
        tuple: &FlowKey,
        tcp: Vec<ProtoInfoTCP>,
        more: Vec<Attribute>,
    ) -> io::Result<bool> {
        for tuple in both_ways(tuple) {
            let mut change = vec![
                Attribute::CtaTupleOrig(attributes(&tuple)),
                Attribute::CtaProtoInfo(vec![ProtoInfo::TCP(tcp.clone())]),
            ];
            change.extend(more.clone());
            let message = message(Family::of(tuple.src), ConntrackMessage::New(change));
            match self.wire.request(message, 0).await {
                Ok(_) => return Ok(true),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Clears our bits from each connection whose bump is not among `keep` (with none: from each that has
    /// any of them) and says from how many.
    pub async fn release(&mut self, marks: MarkLayout, keep: &[BumpId]) -> Result<usize, Error> {
        let mut released = 0;
        for family in Family::BOTH {
            let query = message(family, ConntrackMessage::Get(Vec::new()));
            let stale = |entry: NetfilterMessage| {
                let which = identity(&entry);
                let mark = mark(&entry)?;
                let stale = match marks.bump_of(mark) {
                    Some(bump) => !keep.contains(&bump),
                    None => keep.is_empty() && mark & marks.mask() != 0,
                };
                stale.then_some(which)
            };
            let stale = self.wire.gather(query, stale).await;
            for which in stale.map_err(Error::netlink("list tracked connections"))? {
                let done = self
                    .replace_mark(family, which, 0, marks.mask())
                    .await
                    .map_err(Error::netlink("clear a connection's mark"))?;
                released += usize::from(done);
            }
        }
        Ok(released)
    }

    async fn replace_mark(
        &mut self,
        family: Family,
        mut which: Vec<Attribute>,
        value: u32,
        mask: u32,
    ) -> io::Result<bool> {
        // Without CREATE: a connection that is not tracked stays so.
        which.extend([Attribute::CtaMark(value & mask), mark_mask(mask)]);
        match self
            .wire
            .request(message(family, ConntrackMessage::New(which)), 0)
            .await
        {
            Ok(_) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A stream of conntrack events.
///
/// With the kernel's default (`nf_conntrack_events = 2`) it covers connections that were first seen
/// while some listener existed.
pub struct Events {
    socket: TokioSocket,
    ready: std::collections::VecDeque<Event>,
}

impl Events {
    /// Subscribes, from this moment on. Needs a tokio runtime.
    pub fn open() -> Result<Self, Error> {
        let open = || -> io::Result<TokioSocket> {
            let mut socket = TokioSocket::new(NETLINK_NETFILTER)?;
            let inner = socket.socket_mut();
            // Bound before it is subscribed: an unbound socket loses what comes before its first request.
            inner.bind_auto()?;
            // Beyond the system's limit with CAP_NET_ADMIN on the host, up to it without.
            if setsockopt(inner, sockopt::RcvBufForce, &EVENT_BUFFER).is_err() {
                inner.set_rx_buf_sz(EVENT_BUFFER as i32)?;
            }
            for group in [1, 2, 3] {
                inner.add_membership(group)?; // new, update, destroy
            }
            Ok(socket)
        };
        let socket = open().map_err(Error::netlink("subscribe to conntrack events"))?;
        Ok(Self {
            socket,
            ready: Default::default(),
        })
    }

    /// The next event. Safe to drop and call again.
    pub async fn next(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            match receive(&self.socket).await {
                Ok(messages) => self.ready.extend(messages.into_iter().filter_map(event)),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    return Ok(Event::Lost);
                }
                Err(error) => return Err(Error::netlink("read conntrack events")(error)),
            }
        }
    }
}

/// Outcome of making an entry: false if it was there before.
fn is_made(made: io::Result<()>, tuple: &FlowKey) -> Result<bool, Error> {
    let Err(error) = made else { return Ok(true) };
    let full = match error.raw_os_error() {
        Some(libc::EEXIST) => return Ok(false),
        Some(libc::ENOMEM) => " (is the table full? see net.netfilter.nf_conntrack_max)",
        _ => "",
    };
    let operation = format!("track the connection from {tuple}{full}");
    Err(Error::netlink(operation)(error))
}

/// A connection as either end sends. Where an address is translated here, conntrack has one of both alone.
fn both_ways(ends: &FlowKey) -> [FlowKey; 2] {
    [*ends, ends.reversed()]
}

fn mark_mask(mask: u32) -> Attribute {
    let mask = DefaultNla::new(CTA_MARK_MASK, mask.to_be_bytes().to_vec());
    Attribute::Other(mask)
}

fn message(family: Family, message: ConntrackMessage) -> NetfilterMessage {
    let family = match family {
        Family::V4 => NetfilterProtoFamily::IPv4,
        Family::V6 => NetfilterProtoFamily::IPv6,
    };
    NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message)
}

fn event(message: NetlinkMessage<NetfilterMessage>) -> Option<Event> {
    let fresh = message.header.flags & (NLM_F_CREATE | NLM_F_EXCL) != 0;
    let NetlinkPayload::InnerMessage(inner) = message.payload else {
        return None;
    };
    let gone = matches!(
        inner.inner,
        NetfilterMessageInner::Conntrack(ConntrackMessage::Delete(_))
    );
    let connection = connection(inner)?;
    Some(match (gone, fresh) {
        (true, _) => Event::Destroyed(connection),
        (false, true) => Event::New(connection),
        (false, false) => Event::Update(connection),
    })
}

fn attributes(tuple: &FlowKey) -> Vec<TupleAttribute> {
    vec![
        TupleAttribute::Ip(vec![
            IPTuple::SourceAddress(tuple.src),
            IPTuple::DestinationAddress(tuple.dst),
        ]),
        TupleAttribute::Proto(vec![
            ProtoTuple::Protocol(TCP.into()),
            ProtoTuple::SourcePort(tuple.sport),
            ProtoTuple::DestinationPort(tuple.dport),
        ]),
    ]
}

/// The mark of an entry, whatever its protocol.
fn mark(message: &NetfilterMessage) -> Option<u32> {
    let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = &message.inner else {
        return None;
    };
    attributes.iter().find_map(|attribute| match attribute {
        Attribute::CtaMark(mark) => Some(*mark),
        _ => None,
    })
}

/// What tells an entry from all others, as the kernel gave it: also for protocols without ports.
fn identity(message: &NetfilterMessage) -> Vec<Attribute> {
    let NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)) = &message.inner else {
        return Vec::new();
    };
    let identifies = |attribute: &&Attribute| match attribute {
        Attribute::CtaTupleOrig(_) => true,
        Attribute::Other(other) => other.kind() == CTA_ZONE,
        _ => false,
    };
    attributes.iter().filter(identifies).cloned().collect()
}

/// One direction of a tracked connection; `None` if it is not TCP.
fn tuple(attributes: &[TupleAttribute]) -> Option<FlowKey> {
    let (mut source, mut destination) = ((None, None), (None, None));
    let mut protocol = None;
    for attribute in attributes {
        match attribute {
            TupleAttribute::Ip(parts) => {
                for part in parts {
                    match part {
                        IPTuple::SourceAddress(address) => source.0 = Some(*address),
                        IPTuple::DestinationAddress(address) => destination.0 = Some(*address),
                        _ => {}
                    }
                }
            }
            TupleAttribute::Proto(parts) => {
                for part in parts {
                    match part {
                        ProtoTuple::Protocol(number) => protocol = Some(u8::from(*number)),
                        ProtoTuple::SourcePort(port) => source.1 = Some(*port),
                        ProtoTuple::DestinationPort(port) => destination.1 = Some(*port),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let is_tcp = protocol == Some(TCP);
    let end = |(address, port): (Option<IpAddr>, Option<u16>)| address.zip(port);
    end(source)
        .zip(end(destination))
        .filter(|_| is_tcp)
        .map(|(source, destination)| FlowKey::tcp(source, destination))
}

fn connection(message: NetfilterMessage) -> Option<Connection> {
    let NetfilterMessageInner::Conntrack(
        ConntrackMessage::New(attributes) | ConntrackMessage::Delete(attributes),
    ) = message.inner
    else {
        return None;
    };
    let (mut original, mut reply) = (None, None);
    let (mut mark, mut id, mut zone, mut tcp_state) = (None, 0, 0, None);
    let (mut window_scales, mut made) = ([0; 2], false);
    let (mut since, mut bytes) = (None, [None; 2]);
    for attribute in &attributes {
        match attribute {
            Attribute::CtaTupleOrig(parts) => original = tuple(parts),
            Attribute::CtaTupleReply(parts) => reply = tuple(parts),
            Attribute::CtaMark(value) => mark = Some(*value),
            Attribute::CtaProtoInfo(infos) => {
                tcp_state = tcp_state_of(infos);
                window_scales = window_scales_of(infos);
                // Selective acknowledgements: the kernel notes them of each connection that it picks up half way itself.
                let flags = tcp_byte(infos, CTA_PROTOINFO_TCP_FLAGS_ORIGINAL);
                made = flags.unwrap_or(0) & (TCP_BE_LIBERAL | TCP_SACK_PERM) == TCP_BE_LIBERAL;
            }
            Attribute::Other(other) if other.kind() == CTA_ID => {
                id = value(other).map(u32::from_be_bytes).unwrap_or(0);
            }
            Attribute::Other(other) if other.kind() == CTA_ZONE => {
                zone = value(other).map(u16::from_be_bytes).unwrap_or(0);
            }
            Attribute::Other(other) if is_nest(other, CTA_TIMESTAMP) => {
                since = nested(other, CTA_TIMESTAMP_START);
            }
            Attribute::Other(other) if is_nest(other, CTA_COUNTERS_ORIG) => {
                bytes[0] = nested(other, CTA_COUNTERS_BYTES);
            }
            Attribute::Other(other) if is_nest(other, CTA_COUNTERS_REPLY) => {
                bytes[1] = nested(other, CTA_COUNTERS_BYTES);
            }
            _ => {}
        }
    }
    Some(Connection {
        original: original?,
        reply: reply?,
        mark: mark.unwrap_or(0),
        mark_told: mark.is_some(),
        id,
        zone,
        tcp_state,
        window_scales,
        made,
        since,
        bytes: bytes[0]
            .zip(bytes[1])
            .map(|(original, reply)| [original, reply]),
    })
}

fn tcp_state_of(infos: &[ProtoInfo]) -> Option<u8> {
    let tcp = infos.iter().find_map(|info| match info {
        ProtoInfo::TCP(parts) => Some(parts),
        _ => None,
    })?;
    tcp.iter().find_map(|part| match part {
        ProtoInfoTCP::State(state) => Some(*state),
        _ => None,
    })
}

/// What each end said in its SYN, as far as conntrack saw it.
fn window_scales_of(infos: &[ProtoInfo]) -> [u8; 2] {
    [
        CTA_PROTOINFO_TCP_WSCALE_ORIGINAL,
        CTA_PROTOINFO_TCP_WSCALE_REPLY,
    ]
    .map(|kind| tcp_byte(infos, kind).unwrap_or(0))
}

/// The first byte of what conntrack notes of a TCP connection.
fn tcp_byte(infos: &[ProtoInfo], kind: u16) -> Option<u8> {
    let parts = infos.iter().filter_map(|info| match info {
        ProtoInfo::TCP(parts) => Some(parts),
        _ => None,
    });
    let found = parts.flatten().find(|part| part.kind() == kind)?;
    let mut bytes = vec![0; found.value_len()];
    found.emit_value(&mut bytes);
    bytes.first().copied()
}

/// Whether an attribute is this one, which holds others: its kind comes with a flag that says so.
fn is_nest(nla: &DefaultNla, kind: u16) -> bool {
    const NLA_TYPE_MASK: u16 = 0x3fff;
    nla.kind() & NLA_TYPE_MASK == kind
}

/// A number of eight bytes among the attributes that one holds.
fn nested(nla: &DefaultNla, kind: u16) -> Option<u64> {
    let mut bytes = vec![0; nla.value_len()];
    nla.emit_value(&mut bytes);
    let found = crate::nft::attribute(&bytes, kind)?;
    Some(u64::from_be_bytes(*found.first_chunk::<8>()?))
}

fn value<const N: usize>(nla: &DefaultNla) -> Option<[u8; N]> {
    if nla.value_len() != N {
        return None;
    }
    let mut bytes = [0; N];
    nla.emit_value(&mut bytes);
    Some(bytes)
}
