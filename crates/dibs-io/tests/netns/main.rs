//! TUNs and sockets against the real kernel, in namespaces of their own: no root is needed, and
//! nothing of the host is touched.

mod allocations;
mod packets;
mod tun;
mod udp;

use anyhow::Result;
use dibs_netns::{Host, veth};

/// Two hosts, joined by [`join`] with interfaces `v`.
fn two_hosts() -> Result<(Host, Host)> {
    let (a, b) = (Host::new("a")?, Host::new("b")?);
    join((&a, &b), "v", 1)?;
    Ok((a, b))
}

/// Joins two hosts by a veth pair: `name` with addresses that end in 1 at the first, in 2 at the second.
fn join((a, b): (&Host, &Host), name: &str, subnet: u8) -> Result<()> {
    veth::add((a, name), (b, name), 1500)?;
    for (host, last) in [(a, 1), (b, 2)] {
        ip(host, &format!("link set {name} addrgenmode none"));
        let addresses = format!("10.0.{subnet}.{last}/24 fd00:{subnet}::{last}/64");
        veth::set_up(host, name, &addresses)?;
    }
    Ok(())
}

/// What `ip` with these arguments prints, which must succeed.
fn ip(host: &Host, arguments: &str) -> String {
    host.run(&format!("ip {arguments}")).expect("ip(8)")
}
