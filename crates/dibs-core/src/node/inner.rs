//! Packets of other protocols than TCP: what of them may come out of a TUN (SECURITY 6).

use std::net::IpAddr;

use dibs_wire::packet::{ICMP, ICMPV6, Opaque};

use super::Shared;
use super::peer::Peer;

/// Extension headers of IPv6: hop-by-hop options, routing, fragment, destination options.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// More extension headers than anybody has a use for.
const MAX_EXTENSIONS: usize = 8;

/// Whether a packet from this peer with good addresses may pass: no detours, no redirects, an error
/// only about a packet of ours to this peer.
pub(super) fn may_pass(peer: &Peer, shared: &Shared, packet: &Opaque<'_>) -> bool {
    match packet.src {
        IpAddr::V4(_) => {
            if has_source_route(&packet.bytes[20..packet.upper]) {
                return false;
            }
            // Only the first of several fragments has the header.
            let offset = u16::from_be_bytes([packet.bytes[6], packet.bytes[7]]) & 0x1fff;
            let upper = &packet.bytes[packet.upper..];
            packet.protocol != ICMP || offset != 0 || icmp_may_pass(peer, shared, upper, false)
        }
        IpAddr::V6(_) => match icmpv6_of(packet.protocol, &packet.bytes[packet.upper..]) {
            Upper::Icmp(upper) => icmp_may_pass(peer, shared, upper, true),
            Upper::Other => true,
            Upper::Refused => false,
        },
    }
}

/// Whether IPv4 options send the packet on from here (RFC 791, loose and strict source route).
fn has_source_route(mut options: &[u8]) -> bool {
    while let [kind, rest @ ..] = options {
        match kind {
            0 => return false,
            1 => options = rest,
            131 | 137 => return true,
            _ => {
                let len = rest.first().map_or(0, |len| usize::from(*len));
                match options.get(len..) {
                    Some(next) if len >= 2 => options = next,
                    // The kernel has no use for malformed options either.
                    _ => return true,
                }
            }
        }
    }
    false
}

enum Upper<'a> {
    Icmp(&'a [u8]),
    Other,
    Refused,
}

/// What stands behind the extension headers of an IPv6 packet, where redirects could hide.
fn icmpv6_of(mut next: u8, mut bytes: &[u8]) -> Upper<'_> {
    for _ in 0..MAX_EXTENSIONS {
        let len = match next {
            ICMPV6 => return Upper::Icmp(bytes),
            ROUTING => return Upper::Refused,
            FRAGMENT => 8,
            HOP_BY_HOP | DESTINATION => match bytes.get(1) {
                Some(len) => (usize::from(*len) + 1) * 8,
                None => return Upper::Refused,
            },
            _ => return Upper::Other,
        };
        let Some((header, rest)) = bytes.split_at_checked(len) else {
            return Upper::Refused;
        };
        if next == FRAGMENT && u16::from_be_bytes([header[2], header[3]]) & 0xfff8 != 0 {
            // Only the first of several fragments has what follows.
            return Upper::Other;
        }
        next = header[0];
        bytes = rest;
    }
    Upper::Refused
}

fn icmp_may_pass(peer: &Peer, shared: &Shared, message: &[u8], v6: bool) -> bool {
    // What is cut before its type, or before what it quotes, is not looked through.
    let Some(&kind) = message.first() else {
        return false;
    };
    let is_error = match v6 {
        // Redirect; router and neighbour discovery are of the link, not of the peer.
        true if (133..=137).contains(&kind) => return false,
        true => kind < 128,
        false if kind == 5 => return false,
        // Destination unreachable, source quench, time exceeded, parameter problem.
        false => matches!(kind, 3 | 4 | 11 | 12),
    };
    if !is_error {
        return true;
    }
    // The quoted packet is cut short, so only its addresses are looked at.
    let Some((src, dst)) = message.get(8..).and_then(quoted_addresses) else {
        return false;
    };
    shared.is_ours(src) && peer.owns(dst)
}

fn quoted_addresses(quoted: &[u8]) -> Option<(IpAddr, IpAddr)> {
    match quoted.first()? >> 4 {
        4 => {
            let src: [u8; 4] = quoted.get(12..16)?.try_into().ok()?;
            let dst: [u8; 4] = quoted.get(16..20)?.try_into().ok()?;
            Some((src.into(), dst.into()))
        }
        6 => {
            let src: [u8; 16] = quoted.get(8..24)?.try_into().ok()?;
            let dst: [u8; 16] = quoted.get(24..40)?.try_into().ok()?;
            Some((src.into(), dst.into()))
        }
        _ => None,
    }
}
