//! Two dibs cores, TCP endpoints and seeded links in virtual time.
//!
//! A [`World`](world::World) is two hosts: an application and a kernel (smoltcp) each, a
//! [`Node`](dibs_core::node::Node), and between them an ordinary route and the paths, each with an
//! [`Observer`](observer::Observer). [`run`] draws a [`History`](history::History) from a seed and
//! checks at every step that
//!
//! - delivered bytes are sent bytes, and every transfer comes to its end;
//! - no path shows plaintext, a key, or a nonce with two contents, and an untrusted one no start of an
//!   epoch, no solo chunk, no opaque packet of a chain, and no handshake unless the user allows that;
//! - each share takes a path of its own, and what is to be encrypted is: copies are opened;
//! - what goes into a TUN is what a kernel accepts, its time stamps included;
//! - honest ends never find fault with each other, and afterwards nothing is left over.
//!
//! The same seed gives the same run, bit by bit.

pub mod adversary;
pub mod bulk;
pub mod conn;
pub mod coverage;
pub mod history;
pub mod kernel;
pub mod observer;
pub mod offload;
pub mod payload;
mod queue;
pub mod steering;
pub mod world;

pub use history::History;
pub use world::{Failure, Report, World};

/// Runs the history of a seed.
///
/// # Errors
/// A promise was broken; the text says which, and how to repeat it.
pub fn run(seed: u64) -> Result<Report, String> {
    let history = History::random(seed);
    let outcome = std::panic::catch_unwind(|| World::run(seed, &history));
    let (at, what, state) = match outcome {
        Ok(Ok(report)) => return Ok(report),
        Ok(Err(Failure { at, what, state })) => (format!("{at:?}"), what, state),
        Err(panic) => ("some time".into(), panic_text(&*panic), String::new()),
    };
    Err(format!(
        "seed {seed}: {what} (at {at})\n{history}\n{state}repeat with: cargo xtask sim --seed {seed}"
    ))
}

/// What a panic said.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    let text = owned.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("no message"))
}
