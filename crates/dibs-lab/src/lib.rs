//! Hosts and links in network namespaces from a few lines of code.
//!
//! ```no_run
//! use dibs_lab::{Conditions, Lab, LinkSpec};
//! use std::time::Duration;
//!
//! # fn main() -> anyhow::Result<()> {
//! dibs_lab::enter()?; // first thing in main, before any thread
//! let mut lab = Lab::new()?;
//! let a = lab.host("a")?;
//! let b = lab.host("b")?;
//! let link = lab.link(
//!     LinkSpec::new(&a, "eth0", "10.0.1.1/24 fd01::1/64", &b, "eth0", "10.0.1.2/24 fd01::2/64")
//!         .emulated(Conditions::new().rate(100_000_000).delay(Duration::from_millis(5))),
//! )?;
//! a.run("ping -c 1 10.0.1.2")?;
//! link.set(|conditions| conditions.loss = 0.01)?;
//! # Ok(())
//! # }
//! ```
//!
//! The lab works as root and, where user namespaces are allowed, without. It refuses to run
//! anywhere but in namespaces of its own: a program calls [`enter`] first, a test wraps its body in
//! [`isolated`]. Each host has a network namespace, a private `/run` and a thread of its own, whose
//! end takes the host's processes along.

pub mod baseline;
pub mod bench;
pub mod capture;
pub mod demo;
pub mod dibs;
pub mod experiment;
mod host;
mod isolate;
mod lab;
mod link;
pub mod load;
mod packet_socket;
pub mod plot;
mod process;
mod processor;
pub mod site;
mod wire;

pub use capture::{Capture, Packet, Recording};
pub use dibs_netem::Conditions;
pub use host::{Counters, Host};
pub use isolate::{enter, is_inside, isolated, isolated_alone};
pub use lab::Lab;
pub use link::{End, Link, LinkSpec};
pub use process::{HANG, Process, wait_for, wait_until};
pub use wire::WireStats;
