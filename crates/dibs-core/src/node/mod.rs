//! The whole core: peers, their paths and connections, between a TUN and sockets.
//!
//! # Driving it
//!
//! The owner holds the TUNs, the sockets and the clock, and calls in turn:
//!
//! 1. inputs: [`Node::handle_tun`] for each packet read from a TUN, [`Node::handle_datagram`] for
//!    each datagram received, [`Node::handle_timeout`] when [`Node::poll_timeout`] has come;
//! 2. then the outputs until they are empty: [`Node::poll_transmit`], [`Node::poll_injection`],
//!    [`Node::poll_event`].
//!
//! Commands ([`Node::send_control`], [`Node::set_path`], …) may come at any time and are followed
//! by the outputs as well. For each [`Event::Control`] the owner calls [`Node::control_done`] once it has dealt
//! with the message. Whatever arrives, nothing panics; what is dropped is counted.

mod association;
mod command;
mod config;
mod deadline;
mod dispatch;
mod empty;
mod flow_scheduler;
mod flows;
mod fq;
mod handover;
mod hosts;
mod inner;
mod messages;
mod name_table;
mod names;
mod notice;
mod opaque;
mod out;
mod paths;
mod peer;
mod protection;
mod receive;
mod send;
mod share_collector;
mod shared;
mod silence;
mod snapshot;
mod solicit;
#[cfg(test)]
mod tests;

pub use association::{CarriedBump, MAX_TICKET, Ticket};
pub use config::{LocalPath, NodeConfig, PeerConfig};
pub use deadline::{Deadline, Reason};
pub use dispatch::{Node, Transmit};
pub use flow_scheduler::FlowScheduler;
pub use messages::{ControlError, MAX_CONTROL};
pub use name_table::{MAX_MOVED, MovedPort};
pub use notice::Event;
pub use silence::{MAX_SILENT, SilentPort};
pub use snapshot::{ConnSnapshot, PathSnapshot, PeerSnapshot};
