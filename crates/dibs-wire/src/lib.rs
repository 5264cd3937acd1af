//! Bytes only: IP and TCP views, sequence numbers, the virtio header, superpackets cut in software, and the frames that two
//! daemons exchange. Nothing here knows keys, time or state.
//!
//! Parsers take bytes from the network or from a peer. They return an error for anything that is
//! not well formed and never panic; accessors of a parsed value cannot fail.

pub mod bytes;
pub mod checksum;
pub mod emit;
pub mod frame;
pub mod packet;
pub mod readdress;
pub mod segment;
pub mod seq;
pub mod virtio;

pub use packet::{FlowKey, Packet, ParseError, Segment};
pub use seq::SeqNumber;
