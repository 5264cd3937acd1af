//! The checks: each a function from what was read to what it means.

pub(super) mod clock;
pub(super) mod config;
pub(super) mod congestion;
pub(super) mod daemon;
pub(super) mod firewall;
pub(super) mod flavours;
pub(super) mod forwarding;
pub(super) mod kernel;
pub(super) mod managers;
pub(super) mod marks;
pub(super) mod mtu;
pub(super) mod paths;
pub(super) mod routing;
pub(super) mod rp_filter;
pub(super) mod translation;
pub(super) mod tun;
pub(super) mod wake;
