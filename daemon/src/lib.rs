//! The daemon: a thread for packets (`driver`), and this one for everything else.
//!
//! The main thread steers: it decides which connections take a bump, tells the kernel
//! ([`steering`]) and the peers' daemons (`rpc`), and serves users (`control_socket`). None of
//! that stands in a packet's way.

mod answers;
mod backstop;
pub mod bumps;
mod caller;
mod clock;
mod confirming;
mod connections;
mod conntracks;
mod control_socket;
mod daemon;
mod devices;
mod directory;
mod driver;
mod endpoints;
mod events;
mod following;
mod fresh;
mod gateway;
pub mod guard;
mod hearing;
mod host;
mod hours;
pub mod interfaces;
mod kernel;
mod links;
mod listing;
mod live;
mod locking;
pub mod log;
mod marking;
mod metering;
mod metrics;
mod preferences;
mod preferring;
mod privileges;
mod probing;
mod questions;
mod reconcile;
mod recovery;
mod reloading;
mod requests;
mod restoring;
mod resync;
mod rpc;
mod rule_book;
pub mod rules;
pub mod run;
mod scheduling;
mod sessions;
pub mod startup;
pub mod state_file;
pub mod steering;
mod switching;
mod tasks;
pub mod terms;
mod tracking;
mod translated;
mod turns;
mod users;
mod volumes;
mod wakers;
mod wants;
