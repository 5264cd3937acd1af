//! Steering: which packets of this host take a bump, decided by the kernel.
//!
//! The daemon states what it wants ([`Desired`]); a [`Plan`] says which iptables chains, RPDB rules,
//! routes and addresses carry that out; [`Steering`] observes what the kernel has and takes the steps
//! that are missing. Nothing wanted means nothing installed. [`conntrack`] moves single connections,
//! [`sockets`] finds them and their processes, [`Watch`] tells when somebody changed something.
//!
//! # Marks, for users of plain iptables and conntrack
//!
//! One field of fwmark and ctmark is ours, by default `0x3f000000`; bits outside it are never touched.
//!
//! | bits | meaning in a ctmark |
//! |---|---|
//! | `0x0f000000` | bump id: 0 plain, 1 to 14 a bump, 15 the daemon's own sockets |
//! | `0x10000000` | OVERRIDE: an explicit choice; class rules and following leave it alone |
//! | `0x20000000` | LOCKED: kept by the daemon; what does not come by the bump's device is dropped |
//!
//! A packet's fwmark holds the bump id only. A connection is moved to bump 2, to stay there, with
//! `CONNMARK --set-xmark 0x12000000/0x1f000000`; it is kept plain with `0x10000000/0x1f000000`. Only
//! packets to the peers' addresses are looked at, so a mark elsewhere does nothing of ours. A packet
//! that carries a bump's id and is about to leave by another device is dropped. A rule that requires its
//! bump stands above all of this.
//!
//! Chains are named `DIBS-*` and are rewritten whole: rules of others belong elsewhere. Routes, RPDB rules
//! and addresses carry the protocol number 219.

mod address;
mod backstop;
pub mod claim;
pub mod conntrack;
mod desired;
mod drops;
mod error;
mod iptables;
mod kernel;
mod marks;
mod net;
mod nft;
mod plan;
mod rule;
mod rules;
mod runner;
pub mod sockets;
mod steering;
mod table;
pub mod translation;
mod watch;
mod wire;

pub use address::{BadDeviceName, DeviceName, Family};
pub use backstop::{Backstop, Known, Place, Standing, Strength};
pub use desired::{
    Binding, BumpRoute, ClassRule, Desired, DeviceOwner, Fail, Hours, Invalid, Ports,
};
pub use drops::Drops;
pub use error::Error;
pub use iptables::{Chain, CountedRule, Jump, Role, Tables};
pub use kernel::{Kernel, Netlink};
pub use marks::{BadMask, MarkLayout};
pub use net::{
    Address, Change, Hop, LinkState, NetChange, Network, NetworkState, OWNER, Route, Rule, SYSCTLS,
};
pub use plan::{Observed, Plan, Step};
pub use runner::{Command, CommandRunner, System};
pub use steering::{Counting, Probed, Report, Steering, Variant};
pub use table::Table;
pub use watch::Watch;
