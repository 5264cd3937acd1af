//! Measuring what paths carry: load, and counts of it.

use serde::{Deserialize, Serialize};

/// Load on paths to a peer for the next 2 s: to be repeated while it is to last. No other measurement is served meanwhile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measure {
    /// From the configuration.
    pub peer: String,
    /// Number of the measurement, drawn at random.
    pub run: u64,
    /// True for load from the peer to this host.
    pub down: bool,
    /// The user named the path, so it may cost something.
    pub named: bool,
    /// From the configuration; none: the load ends.
    pub paths: Vec<String>,
}

/// Counts of the paths of a [`Measure`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Time of these counts, in seconds of a steady clock.
    pub at: f64,
    /// Paths that carry data now.
    pub paths: Vec<PathCount>,
}

/// See [`Measured::paths`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathCount {
    /// From the configuration.
    pub name: String,
    /// Datagram bytes that arrived, in the direction that is measured.
    pub bytes: u64,
    /// Smoothed round trip in microseconds, by the end that sends the load.
    pub srtt_us: u64,
}
