//! Whether anything comes back by a device. Another program decides what becomes of the packets that go into it, and
//! says nothing: OpenVPN drops those to its own far end unless it is told not to. What can be seen is whether TCP gets
//! acknowledged what it sent since it came to the device, or receives anything.

use std::collections::{HashMap, HashSet};

use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::host::live::Live;

/// Attempts in vain behind which there is no mere loss.
const ATTEMPTS: u8 = 3;

/// What a user's connection had sent and received when it came to a device.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    bump: BumpId,
    socket: Socket,
    /// Acknowledged or not.
    sent: u64,
    received: u64,
}

impl Arrived {
    /// Whether TCP has got anything by the device.
    fn is_answered(&self, counts: &TcpCounts) -> bool {
        counts.bytes_acked > self.sent || counts.bytes_received > self.received
    }
}

/// What is known of devices that users chose for connections.
#[derive(Default)]
pub(crate) struct Answers {
    /// The connections of the last `enable` for each bump, as far as they live.
    arrived: HashMap<FlowKey, Arrived>,
    /// Bumps that the last connections were taken back from, for nothing came back.
    silent: HashSet<BumpId>,
}

/// What came of waiting for an answer by a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Something came back.
    Something,
    /// Much was sent, and nothing came back.
    Nothing,
    /// None of them has sent anything: nobody knows.
    Unasked,
}

impl Answers {
    /// Notes what these connections had sent when they came to `bump`, if they are the last that did.
    pub(crate) fn note_arrived(
        &mut self,
        bump: BumpId,
        meant: &HashMap<FlowKey, Socket>,
        counts: &HashMap<FlowKey, TcpCounts>,
    ) {
        let arrived = &mut self.arrived;
        arrived.retain(|pair, known| known.bump != bump || meant.contains_key(pair));
        for (pair, socket) in meant {
            let Some(counts) = counts.get(pair) else {
                continue;
            };
            let known = Arrived {
                bump,
                socket: *socket,
                sent: counts.bytes_acked + u64::from(counts.outstanding),
                received: counts.bytes_received,
            };
            arrived.insert(*pair, known);
        }
    }

    /// Whether a connection has got anything by the device that it came to last.
    pub(crate) fn is_answered(&self, pair: &FlowKey, counts: &TcpCounts) -> bool {
        let arrived = self.arrived.get(pair);
        arrived.is_some_and(|arrived| arrived.is_answered(counts))
    }

    /// Notes what came of waiting for an answer by the device of `bump`.
    pub(crate) fn note_heard(&mut self, bump: BumpId, heard: Heard) {
        match heard {
            Heard::Nothing => self.silent.insert(bump),
            Heard::Something | Heard::Unasked => self.silent.remove(&bump),
        };
    }

    /// Whether anything comes back by the device of `bump`, as far as the connections on it (`lives`) show; none:
    /// nobody knows.
    pub(crate) fn of<'a>(
        &self,
        bump: BumpId,
        lives: impl Iterator<Item = &'a Live> + Clone,
    ) -> Option<bool> {
        let silent = |live: &Live| {
            let waits = live.counts.outstanding > 0 || live.opening;
            waits && live.counts.attempts >= ATTEMPTS
        };
        let answered = |live: &Live| {
            let arrived = self.arrived.get(&live.pair);
            let arrived = arrived.filter(|a| a.bump == bump && a.socket == live.socket);
            arrived.is_some_and(|arrived| arrived.is_answered(&live.counts))
        };
        if lives.clone().any(|live| answered(live) && !silent(live)) {
            return Some(true);
        }
        let is_silent = lives.clone().any(silent) || self.silent.contains(&bump);
        is_silent.then_some(false)
    }
}
