//! What the owner is told.

use std::time::Duration;

use dibs_wire::Tuple;

/// Something that happened; peers and paths by their index in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A session with a peer is in use for the first time since it was down, or it restarted.
    PeerUp {
        /// The peer.
        peer: usize,
        /// It is not the instance that we knew.
        restarted: bool,
    },
    /// The last session with a peer expired.
    PeerDown {
        /// The peer.
        peer: usize,
    },
    /// A peer's call is refused, for it is older than its latest by so much: somebody repeats it, or the
    /// peer's clock was set back. Told from time to time.
    Outdated {
        /// The peer.
        peer: usize,
        /// Between the two calls, by the peer's clock.
        behind: Duration,
    },
    /// The keys of the session with a peer have sealed all that they may: nothing is sent until
    /// there is another session.
    KeysExhausted {
        /// The peer.
        peer: usize,
    },
    /// A path changed its state.
    Path {
        /// The peer.
        peer: usize,
        /// The local path.
        path: usize,
        /// What it is now: "active", "suspect", "down", "joining".
        state: &'static str,
    },
    /// A message of the peer's daemon, once.
    Control {
        /// The peer.
        peer: usize,
        /// The message.
        bytes: Vec<u8>,
    },
    /// Nothing of a connection that is to leave its bump is under way any more.
    Drained {
        /// The peer.
        peer: usize,
        /// The bump.
        bump: u8,
        /// The connection as the local host sends.
        tuple: Tuple,
    },
    /// The first packet of a connection came from the peer: the connection is in the bump.
    Opened {
        /// The peer.
        peer: usize,
        /// The bump.
        bump: u8,
        /// The connection as the local host sends.
        tuple: Tuple,
    },
}
