//! Bumps that are other programs' devices: whether they can be used, what may not go into them, and what is
//! told when they come and go. They are routed to, and never changed.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;

use dibs_policy::sockets;
use dibs_settings::BumpId;

use crate::data::bumps::Bumps;
use crate::host::Host;
use crate::host::interfaces::Interface;
use crate::host::live::Live;

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
            "lets nothing of the peer in: set net.ipv4.conf.{name}.rp_filter to 2"
        )),
        _ if interface.addresses.iter().any(IpAddr::is_ipv4) => None,
        _ => Some(
            "lets nothing of the peer in, for it has no IPv4 address: give it one, or set \
             rp_filter to 0"
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
