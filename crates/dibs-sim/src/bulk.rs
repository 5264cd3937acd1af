//! Bulk transfers: tens of megabytes by one connection, from a sender that reacts as a Linux kernel does.
//!
//! The histories of the [`World`](crate::World) move little, by smoltcp. Here a [`Sender`](sender::Sender) with CUBIC and
//! HyStart sends superpackets into the TUN of a node, and a [`Receiver`](receiver::Receiver) acknowledges what comes
//! out of the other one's, over two links that a [`Scenario`] draws and changes. The same sender over each link alone
//! ([`plain`]) says what TCP would have had without dibs.
//!
//! Sender and receiver are no TCP stack: the connection is open already, data goes one way, and nobody closes. What is
//! modelled is what a sender makes of delays, losses and order. Linux's own behaviour is taken where it departs from
//! the RFCs.

mod cubic;
mod event;
pub mod pair;
pub mod plain;
pub mod receiver;
mod recovery;
pub mod report;
mod rtt;
pub mod scenario;
mod scoreboard;
pub mod segment;
pub mod sender;
mod wire;

pub use pair::{Outcome, Pair};
pub use plain::{Carried, Plain};
pub use report::{HEADING, Row};
pub use scenario::{Change, Link, Scenario};

/// Runs the scenario of a seed; `watches`: its course is noted.
///
/// # Errors
/// A promise was broken; the text says which, and how to repeat it.
pub fn run(seed: u64, watches: bool) -> Result<Row, String> {
    let scenario = Scenario::random(seed);
    let run = std::panic::catch_unwind(|| Row::run(scenario, watches));
    run.unwrap_or_else(|panic| Err(format!("seed {seed}: {}", crate::panic_text(&*panic))))
}
