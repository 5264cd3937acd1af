//! How paths are used: what a client may change of it, and what is in force.

use serde::{Deserialize, Serialize};

/// What is to be otherwise. It stands above the configuration file, and outlives the daemon, until it is
/// [`Reset`](Self::Reset).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    rename_all = "snake_case",
    rename_all_fields = "snake_case",
    deny_unknown_fields
)]
pub enum PathChange {
    /// New data by this path as long as it is usable.
    Prefer {
        /// From the configuration.
        path: String,
        /// None: 100.
        weight: Option<u32>,
        /// None: 2.
        delta: Option<f64>,
    },
    /// New data as the scheduler chooses.
    Unprefer,
    /// Another scheduler.
    Scheduler {
        /// As in the configuration.
        name: String,
    },
    /// What a path is for.
    Role {
        /// From the configuration.
        path: String,
        /// As in the configuration.
        role: String,
    },
    /// What a path carries at most; one of both at least.
    Limit {
        /// From the configuration.
        path: String,
        /// Bits a second; none: as it is.
        rate: Option<Limit>,
        /// Bytes a month; none: as it is.
        volume: Option<Limit>,
    },
    /// All as the configuration file says.
    Reset,
}

/// A limit, which may be none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// As much as there is.
    None,
    /// So much.
    At(u64),
}

/// How paths are used now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preferences {
    /// How new data is shared out over the paths.
    pub scheduler: String,
    /// The path that new data goes by as long as it is usable.
    pub prefer: Option<Preferred>,
    /// Paths of the configuration, in its order.
    pub paths: Vec<PathUsage>,
    /// True if some of it was set with `dibsctl`.
    pub changed: bool,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// See [`Preferences::prefer`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Preferred {
    /// From the configuration.
    pub path: String,
    /// Probes of it, when it stops answering, before they come more slowly.
    pub weight: u32,
    /// Limit of its use: while its round trip is at most so many times the least of all.
    pub delta: f64,
}

/// See [`Preferences::paths`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathUsage {
    /// From the configuration.
    pub name: String,
    /// Use of the path.
    pub role: String,
    /// Limit of what this host sends over it, bits a second.
    pub rate_limit: Option<u64>,
    /// Data cap for a month, bytes.
    pub volume: Option<u64>,
}
