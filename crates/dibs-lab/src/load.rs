//! Load and what becomes of it: bulk transfers and ping-pong over TCP or MPTCP.
//!
//! Ours rather than iperf3's, for the receiver checks every byte and sees each gap, and MPTCP needs
//! no wrapper. Reports serialise to JSON.

mod latency;
pub(crate) mod sockets;
mod throughput;

pub use latency::{Latency, LatencyReport};
pub use sockets::Transport;
pub use throughput::{Throughput, ThroughputReport, Transfer};
