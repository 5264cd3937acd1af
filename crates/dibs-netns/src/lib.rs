//! Hosts in network namespaces: threads and commands on them, and veth pairs between them.
//!
//! ```no_run
//! use dibs_netns::{Host, veth};
//!
//! # fn main() -> anyhow::Result<()> {
//! dibs_netns::enter()?; // first thing in main, before any thread
//! let (a, b) = (Host::new("a")?, Host::new("b")?);
//! veth::add((&a, "eth0"), (&b, "eth0"), 1500)?;
//! veth::set_up(&a, "eth0", "10.0.1.1/24 fd01::1/64")?;
//! veth::set_up(&b, "eth0", "10.0.1.2/24 fd01::2/64")?;
//! a.run("ping -c 1 10.0.1.2")?;
//! # Ok(())
//! # }
//! ```
//!
//! It works as root and, where user namespaces are allowed, without. It refuses to run anywhere but in namespaces
//! of its own: a program calls [`enter`] first, a test wraps its body in [`isolated`]. Each host has a network
//! namespace, a private `/run` and a thread of its own, whose end takes the host's processes along.

mod host;
mod isolate;
mod process;
pub mod veth;

pub use host::{Counters, Host};
pub use isolate::{enter, is_inside, isolated, isolated_alone, require_inside};
pub use process::{HANG, Process, require_programs, wait_for, wait_until};
