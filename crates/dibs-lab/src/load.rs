//! Load and what becomes of it: bulk transfers and ping-pong, over TCP or MPTCP, and a server.
//!
//! Ours rather than iperf3's, for the receiver checks every byte and sees each gap, and MPTCP needs
//! no wrapper. Reports serialise to JSON.

mod latency;
mod nginx;
pub(crate) mod sockets;
mod throughput;

use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Result, anyhow};

pub use latency::Latency;
pub use nginx::nginx;
pub use sockets::{Transport, accept, retransmissions, set_congestion};
pub use throughput::{Throughput, ThroughputReport, Transfer};

/// Results of all these threads; waits for every one of them.
///
/// # Errors
/// The first one's that failed or panicked.
pub fn join<T>(threads: Vec<JoinHandle<Result<T>>>) -> Result<Vec<T>> {
    let results: Vec<_> = threads.into_iter().map(JoinHandle::join).collect();
    results
        .into_iter()
        .map(|result| result.map_err(|_| anyhow!("a thread panicked"))?)
        .collect()
}

/// Time that this share of the times, which are in order, does not exceed, in µs; not a number of none.
pub fn percentile(times: &[Duration], share: f64) -> f64 {
    let place = (times.len().saturating_sub(1) as f64 * share).round() as usize;
    times.get(place).copied().map_or(f64::NAN, micros)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
