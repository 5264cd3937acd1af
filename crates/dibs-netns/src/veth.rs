//! Pairs of virtual Ethernet interfaces, each end on a host.

use std::net::IpAddr;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};

use crate::host::{Host, with_system_paths};

/// Makes a pair with its ends on two hosts: their interfaces of these names, down as yet.
///
/// # Errors
/// If a name is none for an interface or taken, or the kernel refuses the MTU.
pub fn add(a: (&Host, &str), b: (&Host, &str), mtu: u32) -> Result<()> {
    check_interface(a.1)?;
    check_interface(b.1)?;
    let end = |(host, name): (&Host, &str)| format!("{name} mtu {mtu} netns {}", host.name());
    let line = format!("link add {} type veth peer name {}", end(a), end(b));
    // In this process's own namespace, where the hosts' names are known.
    let output = with_system_paths(Command::new("ip").args(line.split(' '))).output();
    let output = output.with_context(|| format!("cannot start: ip {line}"))?;
    if !output.status.success() {
        bail!("ip {line}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// Brings an interface up, and gives it addresses with their prefix lengths, separated by spaces:
/// `"10.0.1.1/24 fd01::1/64"`.
///
/// # Errors
/// If an address is malformed, or a command fails.
pub fn set_up(host: &Host, interface: &str, addresses: &str) -> Result<()> {
    check_addresses(addresses)?;
    host.run(&format!("ip link set {interface} up"))?;
    for address in addresses.split_ascii_whitespace() {
        // No duplicate address detection: usable at once.
        let nodad = if address.contains(':') { "nodad" } else { "" };
        host.run(&format!("ip address add {address} dev {interface} {nodad}"))?;
    }
    Ok(())
}

fn check_interface(name: &str) -> Result<()> {
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    ensure!(
        (1..16).contains(&name.len()) && name.chars().all(valid) && !name.starts_with('-'),
        "not a name for an interface: {name:?}"
    );
    Ok(())
}

fn check_addresses(addresses: &str) -> Result<()> {
    for address in addresses.split_ascii_whitespace() {
        let valid = address.split_once('/').is_some_and(|(ip, prefix)| {
            let longest = match ip.parse() {
                Ok(IpAddr::V4(_)) => 32,
                Ok(IpAddr::V6(_)) => 128,
                Err(_) => return false,
            };
            prefix.parse::<u8>().is_ok_and(|prefix| prefix <= longest)
        });
        ensure!(valid, "not an address with a prefix length: {address:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_prefix_length() {
        assert!(check_addresses("").is_ok());
        assert!(check_addresses("10.0.1.1/24 fd01::1/64").is_ok());
        for wrong in [
            "10.0.1.1",
            "10.0.1.1/33",
            "fd01::1/129",
            "10.0.1/24",
            "a/8",
            "1.2.3.4/-1",
        ] {
            assert!(check_addresses(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn interfaces_are_not_options() {
        assert!(check_interface("eth0.1").is_ok());
        for wrong in ["", "-eth0", "eth 0", "sixteen-letters-"] {
            assert!(check_interface(wrong).is_err(), "{wrong}");
        }
    }
}
