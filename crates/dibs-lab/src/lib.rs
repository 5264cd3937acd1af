//! Hosts and links in network namespaces from a few lines of code.
//!
//! ```no_run
//! use dibs_lab::{Conditions, Lab, LinkSpec};
//! use std::time::Duration;
//!
//! # fn main() -> anyhow::Result<()> {
//! dibs_netns::enter()?; // first thing in main, before any thread
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
//! The hosts, and what runs on them, are those of [`dibs_netns`].

pub mod baseline;
pub mod bench;
pub mod capture;
pub mod demo;
pub mod dibs;
mod emulated_link;
pub mod experiment;
mod lab;
mod link;
pub mod load;
mod packet_socket;
mod plaintext;
pub mod plot;
pub mod processor;
pub mod site;

pub use capture::{Capture, Packet, Recording};
pub use dibs_netem::Conditions;
pub use emulated_link::{End, WireStats};
pub use lab::Lab;
pub use link::{Link, LinkSpec};
pub use plaintext::Plaintext;
