//! The pure core of dibs: no IO, no clock, no threads. `now` and randomness are arguments.
//!
//! [`node::Node`] is the whole of it; its documentation says how to drive it. The layers below, from
//! the local kernel to the network:
//!
//! - [`flow`]: connections, their queues toward the paths, the packets made for the kernel;
//! - [`bump`]: what is done to their bytes;
//! - [`stream`]: where each byte stands, which epoch carries it, restoring in order;
//! - [`chunk`], [`in_flight`]: what is sent until it is acknowledged;
//! - [`path`]: packet numbers, acknowledgements, loss, congestion, MTU;
//! - [`session`]: handshakes, keys, replay windows.

pub mod buffer;
pub mod bump;
pub mod chunk;
pub mod counters;
pub mod flow;
pub mod in_flight;
pub mod node;
pub mod path;
pub mod path_index;
pub mod preference;
pub mod session;
pub mod slab;
pub mod stream;
pub mod tcp_fields;
pub mod time;

pub use path_index::PathIndex;
pub use time::Time;
