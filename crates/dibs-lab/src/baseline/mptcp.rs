//! The kernel's Multipath TCP (RFC 8684).

use std::net::IpAddr;

use anyhow::Result;
use dibs_netns::Host;

/// Subflows and announced addresses that either host takes; the kernel's own limit.
const LIMIT: u32 = 8;

/// Lets MPTCP connections from `client` to `server` use a subflow to each of the server's
/// `further` addresses, which the server announces, beside the one connected to.
///
/// # Errors
/// If the kernel has no MPTCP.
pub fn mptcp(client: &Host, server: &Host, further: &[IpAddr]) -> Result<()> {
    for host in [client, server] {
        host.sysctl("net.mptcp.enabled", "1")?;
        host.run(&format!(
            "ip mptcp limits set subflow {LIMIT} add_addr_accepted {LIMIT}"
        ))?;
        host.run("ip mptcp endpoint flush")?;
    }
    for address in further {
        server.run(&format!("ip mptcp endpoint add {address} signal"))?;
    }
    Ok(())
}
