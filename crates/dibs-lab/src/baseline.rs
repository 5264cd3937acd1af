//! What dibs is compared with: kernel MPTCP, wireguard-go, boringtun, OpenVPN. Plain TCP needs nothing.

mod mptcp;
mod openvpn;
mod wireguard;

use std::net::IpAddr;

use dibs_netns::Process;
pub use mptcp::mptcp;
pub use openvpn::{openvpn, openvpn_as_it_comes};
pub use wireguard::{WIREGUARD_GO, boringtun, build_boringtun, build_wireguard_go, wireguard_go};

/// A VPN between two hosts, gone when dropped.
#[derive(Debug)]
pub struct Tunnel {
    /// The first host's address inside.
    pub a: IpAddr,
    /// The second host's.
    pub b: IpAddr,
    processes: [Process; 2],
}

impl Tunnel {
    /// The process ids of its two programs.
    pub fn programs(&self) -> [u32; 2] {
        self.processes.each_ref().map(Process::id)
    }
}
