//! Two names of one connection: ours, which the kernel here has, and theirs, which the peer has and which goes over the wire.
//!
//! Both are the same unless something translates addresses between the two hosts. A peer behind such a router has addresses that
//! others may have too, so one that this host lends it stands for them. And a host behind one is called by an address that
//! none of its interfaces has. The host that is called notes both names of each connection ([`FlowTable`]). It speaks of
//! the connection by theirs, so the peer needs to know nothing of it.

use std::borrow::Cow;
use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::packet::{Opaque, Packet, Segment};
use dibs_wire::{FlowKey, readdress};

use super::flows::FlowTable;
use super::hosts::{Hosts, is_unicast};
use super::inner;
use super::notice::Event;
use super::paths::PathSet;
use super::peer::Peer;
use super::receive::ReceiveCx;
use super::shared::Setup;
use super::solicit;
use crate::counters::Counter;
use crate::slab::Key;

/// Least time between two words of a connection of which the peer forgot the name.
const REMIND_EACH: Duration = Duration::from_millis(100);
/// Ports that are tried in place of one that is taken.
const TRIES: usize = 64;
/// The lowest of them.
const LOWEST_PORT: u16 = 1024;

/// Name here of a connection that the peer calls `theirs`, both as this host sends.
///
/// # Errors
/// The peer does not speak for its end, or this host does not have the other one; or there is no port left for it.
pub(super) fn ours(cx: &mut ReceiveCx<'_>, theirs: FlowKey) -> Result<FlowKey, Counter> {
    if let Some(known) = cx.flows.ours_of(&theirs) {
        return Ok(known);
    }
    let mut ours = by_addresses(&cx.shared.setup, cx.hosts, cx.paths, theirs);
    if !cx.hosts.may_reach(&cx.shared.setup, ours.dst, ours.src) {
        return Err(Counter::InnerAddress);
    }
    let is_taken = |flows: &FlowTable, ours: &FlowKey| {
        flows.theirs_of(ours).is_some_and(|known| known != theirs)
    };
    if !is_taken(cx.flows, &ours) {
        return Ok(ours);
    }
    // Two of the peer's addresses with one port.
    let ports = u64::from(u16::MAX - LOWEST_PORT);
    for _ in 0..TRIES {
        ours.dport = LOWEST_PORT + cx.shared.dice.random_below(ports) as u16;
        if !is_taken(cx.flows, &ours) {
            return Ok(ours);
        }
    }
    Err(Counter::PortsTaken)
}

/// Notes the name `theirs` of a connection, and tells which ones have another port here, if these are others than before.
pub(super) fn note(cx: &mut ReceiveCx<'_>, key: Key, theirs: FlowKey) {
    cx.flows.name(key, theirs);
    if let Some(ports) = cx.flows.poll_moved() {
        let peer = cx.peer;
        let events = &mut cx.shared.journal.events;
        events.push(Event::MovedPorts { peer, ports });
    }
}

/// Has the local kernel speak by a bump, if the connection that the peer calls `theirs` is one of this host that the peer lends an
/// address: it has forgotten by which other one it was called, and learns that from any segment. This host may have nothing to say.
pub(super) fn remind(cx: &mut ReceiveCx<'_>, bump: BumpId, theirs: FlowKey) {
    let known = by_lent(cx.flows, &cx.shared.setup, theirs);
    let known = known.and_then(|ours| cx.flows.find(ours, bump));
    let Some((conn, tuple, _)) = known.and_then(|key| cx.flows.with_ends(key)) else {
        return;
    };
    if cx.now.since(conn.last_seen) >= REMIND_EACH {
        conn.last_seen = cx.now;
        solicit::solicit(cx.shared, bump, tuple, Some(conn));
    }
}

/// The connection of this host that the peer calls `theirs` by an address that it lends, if there is only one that this may be.
fn by_lent(flows: &FlowTable, setup: &Setup, theirs: FlowKey) -> Option<FlowKey> {
    let own = setup.own.addresses.iter();
    let own = own.map(|src| FlowKey {
        src: *src,
        ..theirs
    });
    let mut known = own.filter(|ours| flows.knows(ours));
    known.next().filter(|_| known.next().is_none())
}

/// The peer begins a connection that it calls `theirs`. What was matched by that name began in plain, so it is over.
pub(super) fn begin(flows: &mut FlowTable, theirs: &FlowKey) {
    if let Some(ours) = flows.ours_of(theirs)
        && flows.is_matched(&ours)
    {
        flows.forget_match(&ours);
    }
}

/// Name here by addresses alone.
fn by_addresses(setup: &Setup, hosts: &Hosts, paths: &PathSet, theirs: FlowKey) -> FlowKey {
    let src = match setup.is_here(theirs.src) {
        true => None,
        false => paths.stands_for(setup, theirs.src),
    };
    // What the peer calls its own may be an address of this host, or of another peer.
    let dst = match hosts.owns(theirs.dst) && !setup.is_ours(theirs.dst) {
        true => None,
        false => hosts.lent(theirs.dst).filter(|_| is_unicast(theirs.dst)),
    };
    FlowKey {
        src: src.unwrap_or(theirs.src),
        dst: dst.unwrap_or(theirs.dst),
        ..theirs
    }
}

/// Name here of a connection that the peer calls `theirs`, as far as is known without one of its segments. A peer that has begun anew
/// may call it by an address that it lends, and its kernel may have nothing to say.
pub(super) fn known(peer: &Peer, setup: &Setup, theirs: FlowKey) -> FlowKey {
    if let Some(known) = peer.flows.ours_of(&theirs) {
        return known;
    }
    let ours = by_addresses(setup, &peer.hosts, &peer.paths, theirs);
    match setup.is_ours(ours.src) {
        true => ours,
        false => by_lent(&peer.flows, setup, ours).unwrap_or(ours),
    }
}

/// A segment of the peer that is carried whole, of the connection `ours`.
pub(super) fn inward<'a>(bytes: &'a [u8], segment: &Segment<'_>, ours: FlowKey) -> Cow<'a, [u8]> {
    with_ends(bytes, segment, ours.reversed())
}

/// A packet of the peer that is no segment, by the name here of the segment of this host that it quotes, if it is an ICMP error.
///
/// # Errors
/// As of [`ours`].
pub(super) fn inward_error<'a>(
    cx: &mut ReceiveCx<'_>,
    packet: &Opaque<'_>,
    bytes: &'a [u8],
) -> Result<Cow<'a, [u8]>, Counter> {
    let Some((quoted, at)) = inner::quoted(packet) else {
        return Ok(Cow::Borrowed(bytes));
    };
    Ok(with_quoted(
        bytes,
        (packet.upper, at),
        quoted,
        ours(cx, quoted)?,
    ))
}

/// A packet for the peer that is carried whole, by its name there.
pub(super) fn outward<'a>(
    flows: &FlowTable,
    packet: &Packet<'_>,
    bytes: &'a [u8],
) -> Cow<'a, [u8]> {
    let theirs = |ours: FlowKey| flows.theirs_of(&ours).unwrap_or(ours);
    match packet {
        Packet::Tcp(segment) => with_ends(bytes, segment, theirs(segment.tuple)),
        Packet::Opaque(opaque) => match inner::quoted(opaque) {
            // Quoted is what the peer sent.
            Some((quoted, at)) => {
                let there = theirs(quoted.reversed()).reversed();
                with_quoted(bytes, (opaque.upper, at), quoted, there)
            }
            None => Cow::Borrowed(bytes),
        },
    }
}

/// A segment with these ends.
fn with_ends<'a>(bytes: &'a [u8], segment: &Segment<'_>, ends: FlowKey) -> Cow<'a, [u8]> {
    if segment.tuple == ends {
        return Cow::Borrowed(bytes);
    }
    let mut packet = bytes.to_vec();
    readdress::segment(&mut packet, segment.tcp_at(), &ends);
    Cow::Owned(packet)
}

/// An ICMP error that quotes a segment of other ends, and goes from their destination to their source.
fn with_quoted(bytes: &[u8], at: (usize, usize), quoted: FlowKey, ends: FlowKey) -> Cow<'_, [u8]> {
    if quoted == ends {
        return Cow::Borrowed(bytes);
    }
    let mut packet = bytes.to_vec();
    readdress::error(&mut packet, at, (ends.dst, ends.src), &ends);
    Cow::Owned(packet)
}
