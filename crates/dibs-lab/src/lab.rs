//! The lab: makes hosts, and the links between them.

use anyhow::{Context as _, Result};
use dibs_netns::{Host, require_inside, require_programs};

use crate::link::{Link, LinkSpec};

/// The programs that every lab needs, and the Debian packages they come in.
const NEEDED: [(&str, &str); 3] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ethtool", "ethtool"),
];

/// Makes hosts and links in the process's own namespaces.
#[derive(Debug)]
pub struct Lab {
    /// Where emulated links have their middle.
    wire: Option<Host>,
    links: u32,
}

impl Lab {
    /// A lab without hosts.
    ///
    /// # Errors
    /// If the process is not in namespaces of its own ([`enter`](dibs_netns::enter),
    /// [`isolated`](dibs_netns::isolated)), or a program is missing: the message names its package.
    pub fn new() -> Result<Self> {
        require_inside()?;
        require_programs(&NEEDED)?;
        Ok(Self {
            wire: None,
            links: 0,
        })
    }

    /// A new host with nothing but `lo`.
    ///
    /// # Errors
    /// If the name is taken or not a host's name (letters, digits, hyphens).
    pub fn host(&mut self, name: &str) -> Result<Host> {
        Host::new(name)
    }

    /// Joins two hosts.
    ///
    /// # Errors
    /// If an interface's name is taken, an address is malformed, or a command fails.
    pub fn link(&mut self, spec: LinkSpec) -> Result<Link> {
        let number = self.links;
        self.links += 1;
        let wire = match (&self.wire, spec.is_emulated()) {
            (Some(wire), true) => Some(wire.clone()),
            (None, true) => {
                let wire = Host::new("wire").context("namespace of the emulated links")?;
                // Only the emulator speaks there.
                wire.sysctl("net.ipv6.conf.all.disable_ipv6", "1")?;
                wire.sysctl("net.ipv6.conf.default.disable_ipv6", "1")?;
                self.wire = Some(wire.clone());
                Some(wire)
            }
            (_, false) => None,
        };
        Link::make(spec, number, wire)
    }
}
