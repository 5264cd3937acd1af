//! The daemon: a thread for packets (`data`), and this one for everything else.
//!
//! The main thread steers: it decides which connections take a bump, tells the kernel
//! (`kernel`) and the peers' daemons, and serves users (`control`). None of that stands in a packet's way.

pub mod control;
pub mod data;
pub mod host;
pub mod kernel;
pub mod rulebook;
pub mod switch;
