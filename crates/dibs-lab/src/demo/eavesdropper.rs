//! Who listens on the untrusted link, and what that tells.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use dibs_eavesdrop::{Link, Packet, Payload};

use super::text::NEEDLE;
use crate::capture::Recording;

/// Payload bytes from which a datagram is one of data rather than of control.
const DATA: usize = 200;

/// When the bump was in force.
#[derive(Clone, Copy, Debug)]
pub(super) struct InForce {
    /// `enable` returned.
    pub(super) from: SystemTime,
    /// `disable` was called.
    pub(super) to: SystemTime,
}

/// What was overheard.
#[derive(Debug)]
pub(super) struct Overheard {
    /// The first data segment before the bump, from its TCP payload on.
    pub(super) before: Vec<u8>,
    /// The first data datagram while the bump was in force, from its UDP payload on.
    pub(super) during: Vec<u8>,
    /// Packets with readable text before the bump was in force.
    pub(super) readable_before: usize,
    /// Packets with readable text while it was.
    pub(super) readable_during: usize,
    /// How long after `enable` had returned the last of them passed: the link had them queued.
    pub(super) readable_for: Duration,
    /// All packets with data while the bump was in force.
    pub(super) packets_during: usize,
}

/// Makes sense of a recording of the untrusted link's far end.
pub(super) fn study(recording: &Recording, bump: InForce) -> Result<Overheard> {
    let packets = recording.packets.iter().filter(|packet| !packet.outgoing);
    let heard = packets.filter_map(|packet| {
        let carried = Packet::of(Link::Ethernet, &packet.frame)?;
        Some((packet.at, carried.payload))
    });
    let heard: Vec<_> = heard.collect();
    let is_readable = |payload: &Payload<'_>| {
        let mut windows = payload.bytes().windows(NEEDLE.len());
        windows.any(|window| window == NEEDLE)
    };
    let readable = || heard.iter().filter(|(_, payload)| is_readable(payload));
    let before = || readable().filter(|(at, _)| *at < bump.from);
    let during = |at: &SystemTime| (bump.from..bump.to).contains(at);
    let readable_during: Vec<_> = readable().map(|(at, _)| *at).filter(during).collect();
    let data = heard
        .iter()
        .filter(|(at, payload)| during(at) && payload.bytes().len() >= DATA);
    let data: Vec<_> = data.map(|(_, payload)| payload).collect();
    let first_before = before().find(|(_, payload)| matches!(payload, Payload::Tcp(_)));
    let (_, first_before) =
        first_before.context("nothing passed the untrusted link before the bump")?;
    let first_during = data
        .iter()
        .find(|payload| matches!(payload, Payload::Udp(_)));
    let first_during =
        first_during.context("no data passed the untrusted link while the bump was in force")?;
    let last = readable_during.last().copied().unwrap_or(bump.from);
    Ok(Overheard {
        before: first_before.bytes().to_vec(),
        during: first_during.bytes().to_vec(),
        readable_before: before().count(),
        readable_during: readable_during.len(),
        readable_for: last.duration_since(bump.from).unwrap_or_default(),
        packets_during: data.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture;

    fn frame(protocol: u8, header: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut ip = [0; 20];
        (ip[0], ip[9]) = (0x45, protocol);
        [&[0; 12], &[8, 0][..], &ip, header, payload].concat()
    }

    fn tcp(payload: &[u8]) -> Vec<u8> {
        let mut header = [0; 32];
        header[12] = 8 << 4;
        frame(6, &header, payload)
    }

    #[test]
    fn what_was_queued_is_told_from_what_leaks() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let packet = |seconds, frame| capture::Packet {
            at: at(seconds),
            outgoing: false,
            frame,
        };
        let text = || tcp(b"1. Dear Bob, come.");
        let scrambled = || frame(17, &[0; 8], &[7; DATA]);
        let mut recording = Recording::default();
        recording.packets = vec![
            packet(1, text()),
            packet(2, text()),
            packet(5, text()),
            packet(6, scrambled()),
            packet(9, text()),
        ];
        let bump = InForce {
            from: at(4),
            to: at(8),
        };
        let overheard = study(&recording, bump).unwrap();
        assert_eq!(overheard.before, b"1. Dear Bob, come.");
        assert_eq!(overheard.during, [7; DATA]);
        assert_eq!(overheard.readable_before, 2);
        assert_eq!(overheard.readable_during, 1);
        assert_eq!(overheard.readable_for, Duration::from_secs(1));
        assert_eq!(overheard.packets_during, 1);
    }
}
