//! Whether anything comes back by a device. Another program decides what becomes of the packets that go into it, and
//! says nothing: OpenVPN drops those to its own far end unless it is told not to. What can be seen is whether TCP gets
//! acknowledged what it sent since it came to the device, or receives anything.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use dibs_policy::sockets::TcpCounts;

use crate::daemon::Daemon;
use crate::live::Live;
use dibs_switch::conns::{Pair, Socket};

/// What was sent by a device that answers is acknowledged sooner, retransmissions included: also where a VPN lost a message of
/// its first handshake, which WireGuard repeats after 5 s (REKEY_TIMEOUT) and a third at most.
const SILENT_FOR: Duration = Duration::from_secs(7);
/// What is received later than this, and than a round trip, was sent since the far end moved too.
const SETTLED_AFTER: Duration = Duration::from_millis(300);
/// However slowly a queue empties in which all of it waits, nobody waits for longer.
const AT_MOST: Duration = Duration::from_secs(10);
/// Between two looks at the sockets.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Attempts in vain behind which there is no mere loss.
const ATTEMPTS: u8 = 3;

/// What a user's connection had sent and received when it came to a device.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    bump: u8,
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
    arrived: HashMap<Pair, Arrived>,
    /// Bumps that the last connections were taken back from, for nothing came back.
    silent: HashSet<u8>,
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

impl Daemon {
    /// Waits until something came back by the device of `bump` of what these connections, which have just come to it,
    /// send and receive; not for those that send nothing.
    pub(crate) async fn hear(&self, bump: u8, moved: &[Live]) -> anyhow::Result<Heard> {
        let mut meant: HashMap<Pair, Socket> =
            moved.iter().map(|live| (live.pair, live.socket)).collect();
        let begin = Instant::now();
        let rtts = moved.iter().map(|live| live.counts.rtt_us);
        let rtt = Duration::from_micros(rtts.max().unwrap_or(0).into());
        let settled = SETTLED_AFTER.max(rtt);
        let mut before = self.counts_of(&meant).await?;
        meant.retain(|pair, _| before.contains_key(pair));
        self.note_arrived(bump, &meant, &before);
        let (mut last, mut since) = (before.clone(), begin);
        let heard = loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = self.counts_of(&meant).await?;
            if begin.elapsed() < settled {
                // What the far end had under way when it moved may still arrive.
                for (pair, counts) in &now {
                    before.entry(*pair).and_modify(|known| {
                        known.bytes_received = counts.bytes_received;
                    });
                }
                self.note_arrived(bump, &meant, &before);
            }
            let answered = |pair: &Pair, counts| {
                let answers = self.answers.borrow();
                let arrived = answers.arrived.get(pair);
                arrived.is_some_and(|arrived| arrived.is_answered(counts))
            };
            if now.iter().any(|(pair, counts)| answered(pair, counts)) {
                break Heard::Something;
            }
            if now.iter().any(|(pair, counts)| {
                let known = last.get(pair);
                known.is_none_or(|known| known.bytes_acked != counts.bytes_acked)
            }) {
                since = Instant::now();
            }
            let asks = now.iter().any(|(pair, counts)| {
                let sent = |counts: &TcpCounts| counts.bytes_acked + u64::from(counts.outstanding);
                counts.outstanding > 0
                    || before
                        .get(pair)
                        .is_some_and(|known| sent(counts) > sent(known))
            });
            if !asks && begin.elapsed() >= settled {
                break Heard::Unasked;
            }
            if since.elapsed() >= SILENT_FOR.max(4 * rtt) {
                break Heard::Nothing;
            }
            // What was sent before gets acknowledged still, if slowly.
            if begin.elapsed() >= AT_MOST {
                break Heard::Something;
            }
            last = now;
        };
        let silent = &mut self.answers.borrow_mut().silent;
        match heard {
            Heard::Nothing => silent.insert(bump),
            Heard::Something | Heard::Unasked => silent.remove(&bump),
        };
        Ok(heard)
    }

    fn note_arrived(
        &self,
        bump: u8,
        meant: &HashMap<Pair, Socket>,
        counts: &HashMap<Pair, TcpCounts>,
    ) {
        let arrived = &mut self.answers.borrow_mut().arrived;
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

    async fn counts_of(
        &self,
        meant: &HashMap<Pair, Socket>,
    ) -> anyhow::Result<HashMap<Pair, TcpCounts>> {
        let counts = |live: Live| {
            let is_meant = meant.get(&live.pair) == Some(&live.socket);
            is_meant.then_some((live.pair, live.counts))
        };
        Ok(self.sockets_as(counts).await?.into_iter().collect())
    }

    /// Whether anything comes back by the device of `bump`, as far as the connections on it (`lives`) show; none:
    /// nobody knows.
    pub(crate) fn answers<'a>(
        &self,
        bump: u8,
        lives: impl Iterator<Item = &'a Live> + Clone,
    ) -> Option<bool> {
        let answers = self.answers.borrow();
        let silent = |live: &Live| {
            let waits = live.counts.outstanding > 0 || live.opening;
            waits && live.counts.attempts >= ATTEMPTS
        };
        let answered = |live: &Live| {
            let arrived = answers.arrived.get(&live.pair);
            let arrived = arrived.filter(|a| a.bump == bump && a.socket == live.socket);
            arrived.is_some_and(|arrived| arrived.is_answered(&live.counts))
        };
        if lives.clone().any(|live| answered(live) && !silent(live)) {
            return Some(true);
        }
        let is_silent = lives.clone().any(silent) || answers.silent.contains(&bump);
        is_silent.then_some(false)
    }

    /// What is likely in the way where nothing comes back by the device of `bump`.
    pub(crate) fn nothing_back_by(&self, bump: u8) -> String {
        let device = self.bumps.device_of(bump).unwrap_or_default();
        format!(
            "nothing came back by device {device} of bump {} within {} s: see whether its program passes packets to the \
             peer's address (OpenVPN needs --allow-recursive-routing, wireguard-go the address in AllowedIPs, at both \
             ends), and whether a firewall drops what comes in by it, here or at the peer",
            self.bumps.name_of(bump),
            SILENT_FOR.as_secs()
        )
    }
}
