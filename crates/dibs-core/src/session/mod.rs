//! The session with a peer: handshake, keys, replay windows, rekey.
//!
//! [`Sessions`] holds all of a node's. Its methods are of four kinds:
//! - commands: [`add_peer`](Sessions::add_peer), [`initiate`](Sessions::initiate), to be called for each peer that
//!   [`handle_timeout`](Sessions::handle_timeout) returns, too;
//! - input: [`handle`](Sessions::handle) for the handshake datagrams (types 1 to 3, see
//!   [`is_handshake`]), [`open`](Sessions::open) for data (types 4 to 6),
//!   [`handle_timeout`](Sessions::handle_timeout);
//! - output: what these return, and [`sending`](Sessions::sending), the session to seal with;
//! - [`poll_timeout`](Sessions::poll_timeout), when to call `handle_timeout` next.
//!
//! Who sent message 1 has to send some datagram as soon as its session is established: the
//! other end sends nothing under it before that datagram has come.

mod chain;
mod cookie;
mod established;
mod handshake;
mod keys;
mod message;
mod noise;
mod peer;
mod primitives;
mod random;
mod rate_limit;
mod replay;
mod seal;
mod secured;
mod sessions;
#[cfg(feature = "observe")]
mod tap;

pub(crate) use rate_limit::{Bucket, Rate};

pub use established::{REJECT_AFTER, Session};
pub use handshake::{Arrived, Dropped, Established, HandshakeOutcome, Way};
pub use keys::{
    Direction, EpochKey, EpochSecrets, Integrity, KeyOrigin, PathId, Role, Secret, SessionId,
    Suite, TAG_LEN,
};
pub use message::{Hello, HelloTooLong, MAX_HELLO, is_handshake};
pub use peer::{AddPeerError, Hurry, PeerId, PeerState};
pub use random::{Random, SeededRandom};
pub use replay::{REPLAY_WINDOW, ReplayWindow};
pub use seal::{
    CLEAR_HEADER_LEN, KeyLimits, MAX_DATAGRAM, MAX_HEADER_BLOCK, OVERHEAD, OpenError, Opened,
    SealError,
};
pub use sessions::{Claim, Config, Received, Sessions};
#[cfg(feature = "observe")]
pub use tap::Tap;
pub use x25519_dalek::{PublicKey, StaticSecret};

#[cfg(test)]
mod testing {
    /// Bytes of a hexadecimal text; white space is skipped.
    pub(super) fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits
            .chunks(2)
            .map(|d| u8::from_str_radix(core::str::from_utf8(d).unwrap(), 16).unwrap())
            .collect()
    }
}
