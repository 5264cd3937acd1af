//! Bumps that are other programs' devices: whether they can be used, what may not go into them, and whether anything comes
//! back by them. They are routed to, and never changed.
//!
//! Another program decides what becomes of the packets that go into a device, and says nothing: OpenVPN drops those to its
//! own far end unless it is told not to. What can be seen is whether TCP gets acknowledged what it sent since it came to the
//! device, or receives anything.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use dibs_policy::sockets;
use dibs_policy::sockets::TcpCounts;
use dibs_settings::BumpId;
use dibs_switch::conns::Socket;
use dibs_wire::FlowKey;

use crate::data::bumps::Bumps;
use crate::host::Host;
use crate::host::interfaces::Interface;
use crate::host::live::{Answers, Heard, Live};
use crate::kernel::{Kernel, connections};

/// Drops what the kernel learned of routes with a smaller MTU.
const FORGET_MTUS: &str = "/proc/sys/net/ipv4/route/flush";

/// Why connections with these local addresses cannot use the device of a bump now; none of our own
/// bumps has one.
pub(crate) async fn device_fault(
    host: &Host,
    bumps: &Bumps,
    bump: Option<BumpId>,
    addresses: impl Iterator<Item = IpAddr> + Clone,
) -> anyhow::Result<Option<String>> {
    let Some(device) = bumps.device_of(bump) else {
        return Ok(None);
    };
    let inventory = host.look().await?;
    let why = match inventory.named(device) {
        None => Some("is not there: start what makes it".to_owned()),
        Some(interface) if !interface.up => {
            Some("is down, or nothing serves it: start what does".to_owned())
        }
        Some(interface) => {
            let v4 = addresses.clone().any(|address| address.is_ipv4());
            let v6 = addresses.clone().any(|address| address.is_ipv6());
            let v4 = if v4 { no_ipv4(interface) } else { None };
            v4.or_else(|| if v6 { no_ipv6(&interface.name) } else { None })
        }
    };
    Ok(why.map(|why| format!("device {device} of bump {} {why}", bumps.name_of(bump))))
}

/// Of these connections, those of the program that serves the bump's device: what is to go by the
/// device goes by them, so they cannot.
pub(crate) async fn carriers(
    host: &Host,
    bumps: &Bumps,
    bump: Option<BumpId>,
    lives: &[Live],
) -> anyhow::Result<Vec<Live>> {
    let Some(device) = bumps.device_of(bump) else {
        return Ok(Vec::new());
    };
    let device = host.inventory().device_name(device);
    // It reads all of /proc.
    let look = move || sockets::of_tun(device.as_str());
    let inodes: HashSet<u64> = tokio::task::spawn_blocking(look).await?;
    let carries = |live: &&Live| inodes.contains(&live.inode);
    Ok(lives.iter().filter(carries).copied().collect())
}

/// A connection that comes from a device with a smaller MTU has its segments cut to that MTU, and so
/// have others to the same host, for ten minutes. The kernel is to learn anew.
pub(crate) fn forget_mtus() {
    if let Err(error) = std::fs::write(FORGET_MTUS, "1") {
        tracing::warn!("{FORGET_MTUS}: {error}: segments stay short for ten minutes");
    }
}

/// Why the kernel drops what comes in by a device over IPv4 from a peer, to which another route leads.
fn no_ipv4(interface: &Interface) -> Option<String> {
    let filter = |name: &str| {
        let path = Path::new("/proc/sys/net/ipv4/conf").join(name);
        let text = std::fs::read_to_string(path.join("rp_filter")).unwrap_or_default();
        text.trim().parse::<u8>().unwrap_or(0)
    };
    let name = &interface.name;
    match filter("all").max(filter(name)) {
        0 => None,
        1 => Some(format!(
            "drops what the peer sends: set net.ipv4.conf.{name}.rp_filter to 2"
        )),
        _ if interface.addresses.iter().any(IpAddr::is_ipv4) => None,
        _ => Some(
            "drops what the peer sends, because it has no IPv4 address: give it one, or set rp_filter to 0"
                .to_owned(),
        ),
    }
}

fn no_ipv6(device: &str) -> Option<String> {
    let path = Path::new("/proc/sys/net/ipv6/conf").join(device);
    let disabled = std::fs::read_to_string(path.join("disable_ipv6"));
    let has = disabled.is_ok_and(|disabled| disabled.trim() == "0");
    (!has).then(|| "has no IPv6".to_owned())
}

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
pub(crate) async fn hear(
    kernel: &Kernel,
    answers: &RefCell<Answers>,
    bump: BumpId,
    moved: &[Live],
) -> anyhow::Result<Heard> {
    let mut meant: HashMap<FlowKey, Socket> =
        moved.iter().map(|live| (live.pair, live.socket)).collect();
    let begin = Instant::now();
    let rtts = moved.iter().map(|live| live.counts.rtt_us);
    let rtt = Duration::from_micros(rtts.max().unwrap_or(0).into());
    let settled = SETTLED_AFTER.max(rtt);
    let mut before = counts_of(kernel, &meant).await?;
    meant.retain(|pair, _| before.contains_key(pair));
    answers.borrow_mut().note_arrived(bump, &meant, &before);
    let (mut last, mut since) = (before.clone(), begin);
    let heard = loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = counts_of(kernel, &meant).await?;
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
    kernel: &Kernel,
    meant: &HashMap<FlowKey, Socket>,
) -> anyhow::Result<HashMap<FlowKey, TcpCounts>> {
    let counts = |live: Live| {
        let is_meant = meant.get(&live.pair) == Some(&live.socket);
        is_meant.then_some((live.pair, live.counts))
    };
    let counts = connections::sockets_as(kernel, counts).await?;
    Ok(counts.into_iter().collect())
}

/// What is likely in the way where nothing comes back by the device of `bump`.
pub(crate) fn nothing_back_by(bumps: &Bumps, bump: BumpId) -> String {
    let device = bumps.device_of(bump).unwrap_or_default();
    format!(
        "nothing came back over device {device} of bump {} within {} s: its program must pass packets to the \
         peer's address (OpenVPN: --allow-recursive-routing; wireguard-go: AllowedIPs; at both ends), and no \
         firewall may drop them, here or at the peer",
        bumps.name_of(bump),
        SILENT_FOR.as_secs()
    )
}
