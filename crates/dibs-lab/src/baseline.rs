//! What dibs is compared with: kernel MPTCP, wireguard-go, OpenVPN. Plain TCP needs nothing.

mod mptcp;
mod openvpn;
mod wireguard;

use std::net::IpAddr;

use dibs_netns::Process;
pub use mptcp::mptcp;
pub use openvpn::{openvpn, openvpn_as_it_comes};
pub use wireguard::{wireguard_go, wireguard_go_hub};

/// A VPN between two hosts, gone when dropped.
#[derive(Debug)]
pub struct Tunnel {
    /// The first host's address inside.
    pub a: IpAddr,
    /// The second host's.
    pub b: IpAddr,
    _processes: [Process; 2],
}
