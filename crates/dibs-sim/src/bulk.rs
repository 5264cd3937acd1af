//! Bulk transfers: tens of megabytes by one connection, from a sender that reacts as a Linux kernel does.
//!
//! The histories of the [`World`](crate::World) move little, by smoltcp. Here a [`Sender`](sender::Sender) with CUBIC and
//! HyStart sends superpackets into the TUN of a node, and a [`Receiver`](receiver::Receiver) acknowledges what comes
//! out of the other one's, over the links of a [`Scenario`]. The same sender over each link alone
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
mod rtt;
pub mod scenario;
mod scoreboard;
pub mod segment;
pub mod sender;
mod wire;

pub use pair::{Outcome, Pair};
pub use plain::{Carried, Plain};
pub use scenario::{Change, Link, Scenario};
