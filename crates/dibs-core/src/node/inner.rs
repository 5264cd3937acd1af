//! Packets that are carried whole: what of them may come out of a TUN (docs/threat-model.md, "The peer"). TCP, and what tells
//! of its troubles: with anything else a peer would drag flows into a bump that nobody put there.

use std::net::IpAddr;

use dibs_wire::FlowKey;
use dibs_wire::packet::{ICMP, ICMPV6, Opaque, TCP};

use crate::counters::Counter;

/// Extension headers of IPv6: hop-by-hop options, routing, fragment, destination options.
const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// More extension headers than anybody has a use for.
const MAX_EXTENSIONS: usize = 8;

/// TCP that takes no detour, and fragments of it; ICMP errors about what the receiver sent to the sender.
pub(super) fn may_pass(
    packet: &Opaque<'_>,
    is_senders: impl Fn(IpAddr) -> bool,
    is_receivers: impl Fn(IpAddr) -> bool,
) -> Result<(), Counter> {
    let bytes = &packet.bytes[packet.upper..];
    let (protocol, upper) = match packet.src {
        IpAddr::V4(_) if has_source_route(&packet.bytes[20..packet.upper]) => {
            return Err(Counter::InnerAddress);
        }
        IpAddr::V4(_) if packet.fragment => (packet.protocol, &[][..]),
        IpAddr::V4(_) => (packet.protocol, bytes),
        IpAddr::V6(_) => {
            let upper = behind_extensions(packet.protocol, bytes)?;
            // Fragments are not looked into.
            let whole = if upper.fragment.is_none() {
                upper.bytes
            } else {
                &[]
            };
            (upper.protocol, whole)
        }
    };
    let v6 = packet.src.is_ipv6();
    if protocol == TCP {
        return Ok(());
    }
    let quoted = match (protocol, v6) {
        (ICMP, false) | (ICMPV6, true) => quoted_segment(upper, v6),
        _ => None,
    };
    let quoted = quoted.ok_or(Counter::InnerProtocol)?;
    match is_receivers(quoted.src) && is_senders(quoted.dst) {
        true => Ok(()),
        false => Err(Counter::InnerAddress),
    }
}

/// True if IPv4 options send the packet on from here (RFC 791, loose and strict source route).
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

/// What an IPv6 packet carries behind its extension headers.
pub(super) struct Upper<'a> {
    pub(super) protocol: u8,
    pub(super) bytes: &'a [u8],
    /// Where in the whole they stand, if this is a fragment of it.
    pub(super) fragment: Option<usize>,
}

/// Walks over the extension headers of an IPv6 packet, up to that of a fragment.
pub(super) fn behind_extensions(mut next: u8, mut bytes: &[u8]) -> Result<Upper<'_>, Counter> {
    for _ in 0..MAX_EXTENSIONS {
        let len = match next {
            ROUTING => return Err(Counter::InnerAddress),
            FRAGMENT => 8,
            HOP_BY_HOP | DESTINATION => match bytes.get(1) {
                Some(len) => (usize::from(*len) + 1) * 8,
                None => break,
            },
            _ => {
                return Ok(Upper {
                    protocol: next,
                    bytes,
                    fragment: None,
                });
            }
        };
        let Some((header, rest)) = bytes.split_at_checked(len) else {
            break;
        };
        if next == FRAGMENT {
            let at = u16::from_be_bytes([header[2], header[3]]) & 0xfff8;
            return Ok(Upper {
                protocol: header[0],
                bytes: rest,
                fragment: Some(at.into()),
            });
        }
        next = header[0];
        bytes = rest;
    }
    Err(Counter::InnerProtocol)
}

/// The segment that was to come to this host, as its sender sent it, of which an ICMP error says that it did not:
/// destination unreachable, but for packets that are too long (RFC 792, type 3 without code 4; RFC 4443, type 1).
pub(super) fn rejected(packet: &Opaque<'_>) -> Option<FlowKey> {
    let (quoted, _) = quoted(packet)?;
    let rejects = match packet.bytes[packet.upper..] {
        [3, code, ..] => packet.protocol == ICMP && code != 4,
        [kind, ..] => packet.protocol == ICMPV6 && kind == 1,
        [] => false,
    };
    rejects.then_some(quoted)
}

/// The segment that an ICMP error quotes, as its sender sent it, and where in the packet its TCP header begins.
pub(super) fn quoted(packet: &Opaque<'_>) -> Option<(FlowKey, usize)> {
    let message = packet.bytes.get(packet.upper..)?;
    let v6 = match (packet.protocol, packet.src) {
        (ICMP, IpAddr::V4(_)) => false,
        (ICMPV6, IpAddr::V6(_)) => true,
        _ => return None,
    };
    let quoted = quoted_segment(message, v6).filter(|_| !packet.fragment)?;
    let [s0, s1, d0, d1] = *quoted.tcp.first_chunk()?;
    let ends = FlowKey::tcp(
        (quoted.src, u16::from_be_bytes([s0, s1])),
        (quoted.dst, u16::from_be_bytes([d0, d1])),
    );
    Some((ends, packet.bytes.len() - quoted.tcp.len()))
}

/// A segment in an ICMP error.
struct Quoted<'a> {
    src: IpAddr,
    dst: IpAddr,
    /// As much of it as there is.
    tcp: &'a [u8],
}

/// The segment that an ICMP error quotes: destination unreachable, source quench, time exceeded, parameter problem;
/// of ICMPv6 those that RFC 4443 counts as errors.
fn quoted_segment(message: &[u8], v6: bool) -> Option<Quoted<'_>> {
    let is_error = match (message.first()?, v6) {
        (kind, false) => matches!(kind, 3 | 4 | 11 | 12),
        (kind, true) => *kind < 128,
    };
    // The quoted packet is cut short, so only its addresses and its protocol are sure to be there.
    let quoted = message.get(8..).filter(|_| is_error)?;
    match (quoted.first()? >> 4, v6) {
        (4, false) if quoted.get(9) == Some(&TCP) => {
            let src: [u8; 4] = quoted.get(12..16)?.try_into().ok()?;
            let dst: [u8; 4] = quoted.get(16..20)?.try_into().ok()?;
            let upper = usize::from(quoted[0] & 15).max(5) * 4;
            Some(Quoted {
                src: src.into(),
                dst: dst.into(),
                tcp: quoted.get(upper..).unwrap_or_default(),
            })
        }
        (6, true) => {
            let src: [u8; 16] = quoted.get(8..24)?.try_into().ok()?;
            let dst: [u8; 16] = quoted.get(24..40)?.try_into().ok()?;
            let upper = behind_extensions(quoted[6], &quoted[40..]).ok()?;
            let tcp = { upper.fragment.is_none() }.then_some(upper.bytes);
            (upper.protocol == TCP).then(|| Quoted {
                src: src.into(),
                dst: dst.into(),
                tcp: tcp.unwrap_or_default(),
            })
        }
        _ => None,
    }
}
