//! What the fuzzers run. Each target is a function of bytes that panics where the code under test
//! does, or where one of the target's own checks fails: bounds, round trips, differences to a model.
//!
//! The binaries that cargo-fuzz builds are in `fuzz/`, their corpora in `fuzz/corpus`. The test
//! `replay` runs the corpora and some mutations of them with an ordinary compiler.
//!
//! Bytes are read front to back as a list of operations, so that a mutation in one place leaves
//! the rest of the story as it was.

mod attacker;
mod config;
mod control;
mod datagrams;
mod handshake;
mod host;
mod input;
mod messages;
mod packets;
mod traffic;
mod views;

pub use config::config;
pub use control::control;
pub use datagrams::datagrams;
pub use handshake::handshake;
pub use messages::messages;
pub use packets::packets;

/// Runs one input.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: [(&str, Target); 6] = [
    ("config", config),
    ("control", control),
    ("datagrams", datagrams),
    ("handshake", handshake),
    ("messages", messages),
    ("packets", packets),
];
