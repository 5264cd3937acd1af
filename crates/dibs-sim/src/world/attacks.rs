//! Who has a hand in the hosts' networks: datagrams out of nothing, plain packets of connections that
//! are in the bump, packets that fall into a TUN.

use dibs_core::bump::{SCRAMBLE, SEAL, SHARE};
use dibs_core::counters::Counter;
use dibs_core::node::Node;
use dibs_core::session::Integrity;
use dibs_wire::packet::{Segment, flags};

use super::World;
use crate::coverage::Seen;
use crate::offload;

/// Sends a daemon what it must not be impressed by: old datagrams, on any path and from
/// anywhere, whole or spoilt, and noise.
pub(super) fn attack(world: &mut World, host: usize, count: usize) -> Result<(), String> {
    // Without integrity an attacker has his way with data; that is what was agreed to.
    if world.setup.integrity == Integrity::Off {
        return Ok(());
    }
    for _ in 0..count {
        let (put, act) = world.adversary.strike(host, world.links.len(), true);
        world.coverage.note(act);
        world.arrive_datagram(put)?;
    }
    Ok(())
}

/// Sends a host packets of a connection as the other end might, of which nothing may come: the
/// attacker knows every number, and the host is closed to what does not come by the bump.
pub(super) fn forge_plain(
    world: &mut World,
    host: usize,
    conn: usize,
    count: usize,
) -> Result<(), String> {
    let pair = world.conns[conn].pairs[host];
    for _ in 0..count {
        let h = &world.hosts[host];
        let closed = h.steering.mark(&pair).locked || h.steering.requires(&pair).is_some();
        let far = world.conns[conn].pairs[1 - host];
        let Some(real) = world.last.get(&far).filter(|_| closed) else {
            return Ok(());
        };
        let dice = &mut world.rng;
        let kind = dice.pick(&[
            flags::RST,
            flags::RST | flags::ACK,
            flags::SYN,
            flags::SYN | flags::ACK,
            flags::FIN | flags::ACK,
            flags::ACK,
            flags::ACK | flags::PSH,
            flags::ACK | flags::URG,
        ]);
        let far = dice.pick(&[0, 0, 0, 1, 1000, 70_000, 1 << 31, u32::MAX]);
        let ahead = dice.pick(&[0, 0, 1, 5000]);
        let len = match kind & (flags::SYN | flags::RST) {
            0 => dice.range(0, 1000) as usize,
            _ => 0,
        };
        let window = dice.pick(&[0, 1, 65_535]);
        let packet = offload::rewrite(real, |headers, payload| {
            headers.tuple = pair.reversed();
            headers.seq = headers.seq.add(payload.len() as u32).add(far);
            headers.ack = headers.ack.add(ahead);
            headers.flags = kind;
            headers.window = window;
            headers.urgent = u16::from(kind & flags::URG != 0);
            *payload = vec![b'!'; len];
        });
        world.coverage.note(Seen::PlainForged);
        // What gets through changes the stream, or ends it.
        world.arrive_plain(host, packet)?;
    }
    Ok(())
}

/// Sends a host plain packets that it was sent before: the network may double what it likes.
pub(super) fn replay_plain(world: &mut World, host: usize, count: usize) -> Result<(), String> {
    for _ in 0..count {
        let Some((to, packet)) = world.plain.draw(&mut world.rng) else {
            return Ok(());
        };
        if to == host {
            let packet = packet.to_vec();
            let call = offload::tcp(&packet).filter(calls);
            // A router that follows numbers drops the answer to an old call, and the model's kernels wait for ever for what follows it.
            if call.is_some_and(|s| world.setup.between.tracks || world.is_anothers(host, &s)) {
                continue;
            }
            world.coverage.note(Seen::PlainReplayed);
            world.arrive_plain(host, packet)?;
        }
    }
    Ok(())
}

/// True if a segment begins a connection.
fn calls(segment: &Segment<'_>) -> bool {
    segment.flags & (flags::SYN | flags::ACK) == flags::SYN
}

/// Puts packets into a host's TUN that no rule put there.
pub(super) fn foreign(world: &mut World, host: usize, count: usize) -> Result<(), String> {
    for _ in 0..count {
        let v6 = world.rng.chance(0.3);
        let len = world.rng.range(1, 1200) as usize;
        let mut packet = world.opaque_packet(host, len, v6);
        let (src, dst) = if v6 { (23, 39) } else { (15, 19) };
        let expected = match world.rng.below(4) {
            0 => {
                packet.truncate(world.rng.below(20) as usize);
                Some(Counter::TunMalformed)
            }
            1 => {
                packet[0] |= 0x80;
                Some(Counter::TunMalformed)
            }
            2 => {
                packet[dst] = 77;
                Some(Counter::TunNoPeer)
            }
            _ => {
                // Forwarded, not the host's own: the peer has to refuse it.
                packet[src] = 77;
                world.foreign[host] = true;
                None
            }
        };
        let Some(node) = &world.hosts[host].node else {
            return Ok(());
        };
        let count = |node: &Node| expected.map_or(0, |c| node.counters().get(c));
        let before = count(node);
        let bump = world.rng.pick(&[SCRAMBLE, SHARE, SEAL]);
        world.tun(host, bump, &offload::plain_frame(&packet));
        let h = &mut world.hosts[host];
        let after = h.node.as_ref().map_or(0, count);
        match expected {
            Some(counter) if after != before + 1 => {
                return Err(format!("a drop is not counted as {}", counter.name()));
            }
            Some(Counter::TunMalformed) => h.malformed += 1,
            Some(_) => h.stray += 1,
            None => {}
        }
        world.coverage.note(Seen::TunForeign);
    }
    Ok(())
}
