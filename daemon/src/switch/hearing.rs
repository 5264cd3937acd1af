//! Waits for what comes back by another program's device.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::host::live::Live;
use crate::kernel::connections;
use crate::switch::Daemon;
use crate::switch::answers::Heard;

/// What was sent by a device that answers is acknowledged sooner, retransmissions included: also where a VPN lost a message of
/// its first handshake, which WireGuard repeats after 5 s (REKEY_TIMEOUT) and a third at most.
const SILENT_FOR: Duration = Duration::from_secs(7);
/// What is received later than this, and than a round trip, was sent since the far end moved too.
const SETTLED_AFTER: Duration = Duration::from_millis(300);
/// However slowly a queue empties in which all of it waits, nobody waits for longer.
const AT_MOST: Duration = Duration::from_secs(10);
/// Between two looks at the sockets.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Waits until something came back by the device of `bump` of what these connections, which have just come to it,
/// send and receive; not for those that send nothing.
pub(crate) async fn hear(daemon: &Daemon, bump: BumpId, moved: &[Live]) -> anyhow::Result<Heard> {
    let mut meant: HashMap<FlowKey, Socket> =
        moved.iter().map(|live| (live.pair, live.socket)).collect();
    let begin = Instant::now();
    let rtts = moved.iter().map(|live| live.counts.rtt_us);
    let rtt = Duration::from_micros(rtts.max().unwrap_or(0).into());
    let settled = SETTLED_AFTER.max(rtt);
    let answers = &daemon.answers;
    let mut before = counts_of(daemon, &meant).await?;
    meant.retain(|pair, _| before.contains_key(pair));
    answers.borrow_mut().note_arrived(bump, &meant, &before);
    let (mut last, mut since) = (before.clone(), begin);
    let heard = loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = counts_of(daemon, &meant).await?;
        if begin.elapsed() < settled {
            // What the far end had under way when it moved may still arrive.
            for (pair, counts) in &now {
                before.entry(*pair).and_modify(|known| {
                    known.bytes_received = counts.bytes_received;
                });
            }
            answers.borrow_mut().note_arrived(bump, &meant, &before);
        }
        let mut counted = now.iter();
        if counted.any(|(pair, counts)| answers.borrow().is_answered(pair, counts)) {
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
    answers.borrow_mut().note_heard(bump, heard);
    Ok(heard)
}

async fn counts_of(
    daemon: &Daemon,
    meant: &HashMap<FlowKey, Socket>,
) -> anyhow::Result<HashMap<FlowKey, TcpCounts>> {
    let counts = |live: Live| {
        let is_meant = meant.get(&live.pair) == Some(&live.socket);
        is_meant.then_some((live.pair, live.counts))
    };
    let counts = connections::sockets_as(&daemon.kernel, counts).await?;
    Ok(counts.into_iter().collect())
}

/// What is likely in the way where nothing comes back by the device of `bump`.
pub(crate) fn nothing_back_by(daemon: &Daemon, bump: BumpId) -> String {
    let device = daemon.bumps.device_of(bump).unwrap_or_default();
    format!(
        "nothing came back by device {device} of bump {} within {} s: see whether its program passes packets to the \
         peer's address (OpenVPN needs --allow-recursive-routing, wireguard-go the address in AllowedIPs, at both \
         ends), and whether a firewall drops what comes in by it, here or at the peer",
        daemon.bumps.name_of(bump),
        SILENT_FOR.as_secs()
    )
}
