//! Two hosts, a trusted and an untrusted link, a daemon on each host, and real traffic: what the
//! tests in `tests/` are written with.
//!
//! ```no_run
//! use netns_tests::{Setup, isolated};
//!
//! #[test]
//! fn a_bump_goes_in() {
//!     isolated(|| {
//!         Setup::new().run(|net| {
//!             let talk = net.talk(7000)?;
//!             net.a.enable(7000)?;
//!             talk.advance(1 << 20)?;
//!             talk.finish()
//!         })
//!     });
//! }
//! ```

pub mod attacker;
pub mod browser;
pub mod daemon;
mod dice;
pub mod docker;
pub mod eavesdropper;
pub mod homes;
pub mod hostile;
pub mod household;
pub mod kernel;
pub mod member;
pub mod programs;
pub mod routed;
pub mod ssh;
pub mod topology;
pub mod traffic;
pub mod vpn;

use std::io::Write as _;

use anyhow::Result;

pub use daemon::Node;
pub use dice::Dice;
pub use eavesdropper::Eavesdropper;
pub use topology::{Net, Setup};

/// Runs the body of a test in namespaces of its own ([`dibs_netns::isolated`]), once the binaries
/// under test are built.
pub fn isolated<F: FnOnce() -> Result<()>>(body: F) {
    programs::build();
    dibs_netns::isolated(body);
}

/// As [`isolated`], for tests with users besides root, whom only namespaces that root makes have: elsewhere
/// the test says that it did not run.
pub fn isolated_with_users<F: FnOnce() -> Result<()>>(body: F) {
    if !nix::unistd::geteuid().is_root() {
        // Past the harness, which shows only the words of tests that fail.
        let name = std::any::type_name::<F>();
        let _ = writeln!(std::io::stderr(), "{name} DID NOT RUN: it needs root");
        return;
    }
    isolated(body);
}

/// As [`isolated`], while no other test of this binary runs: for what leaves others little of the processors.
pub fn isolated_alone<F: FnOnce() -> Result<()>>(body: F) {
    programs::build();
    dibs_netns::isolated_alone(body);
}
