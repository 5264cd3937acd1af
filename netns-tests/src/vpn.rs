//! Devices of other programs as bumps, named "vpn".

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use dibs_lab::baseline::{self, Tunnel};

use crate::daemon::wait;
use crate::{Net, Node, Setup};

/// The device that the lab's OpenVPN makes.
pub const OPENVPN: &str = "tun99";
/// The device that the lab's wireguard-go makes.
pub const WIREGUARD_GO: &str = "wg0";

/// A setup in which this device is a bump of either host.
pub fn with(device: &str) -> Setup {
    Setup::new().devices(&[("vpn", device)], &[("vpn", device)])
}

/// Starts OpenVPN; its device can be used then.
pub fn openvpn(net: &Net) -> Result<Tunnel> {
    let tunnel = baseline::openvpn((&net.a.host, at(1)), (&net.b.host, at(2)))?;
    seen(net)?;
    Ok(tunnel)
}

/// Starts OpenVPN as it comes: it drops what goes to its own far end. Its device is there, and seems ready.
pub fn openvpn_as_it_comes(net: &Net) -> Result<Tunnel> {
    let tunnel = baseline::openvpn_as_it_comes((&net.a.host, at(1)), (&net.b.host, at(2)))?;
    seen(net)?;
    Ok(tunnel)
}

/// Starts wireguard-go; its device can be used then.
pub fn wireguard_go(net: &Net) -> Result<Tunnel> {
    let tunnel = baseline::wireguard_go((&net.a.host, at(1)), (&net.b.host, at(2)), None)?;
    seen(net)?;
    Ok(tunnel)
}

fn at(host: u8) -> IpAddr {
    IpAddr::from([10, 0, 1, host])
}

/// Waits until the daemons see the device.
fn seen(net: &Net) -> Result<()> {
    for node in [&net.a, &net.b] {
        wait("the device to be seen", || {
            bump(node).is_ok_and(|bump| bump["reason"].is_null())
        })?;
    }
    Ok(())
}

/// The bump's entry in `bump list`.
pub fn bump(node: &Node) -> Result<serde_json::Value> {
    let bumps = node.ctl(&["bump", "list"])?;
    let mut bumps = bumps.as_array().context("a list")?.iter();
    let found = bumps.find(|bump| bump["name"] == "vpn");
    found.cloned().context("no such bump")
}
