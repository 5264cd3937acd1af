//! What an eavesdropper on one path sees of dibs, and what he can recover of it: pure functions of a capture.
//!
//! 1. [`Tap`] takes frames as a capture has them, finds dibs' datagrams by their clear header, and keeps what belongs
//!    together: the datagrams of one path, one way.
//! 2. [`Tap::report`] says of each such direction what it looks like ([`Statistics`]), what its lengths and times tell,
//!    and what can be read of it.
//! 3. For the latter an [`Attacker`] takes each datagram's payload for a run of the scrambler of Kato et al. 2019.
//!    `B[i] ^ B[i-1] = b[i] ^ b[i-65]` divides a run into 65 [`Chains`], each known up to one byte. Which bytes these are
//!    is a question of what text looks like: a beam search over the chains, side by side, by frequencies of bytes behind
//!    the five before them. The frequencies are of [`Kind`]s of text that stand in `texts/`.
//!
//! What is read is claimed by a rule without statistics of its own: a run of n bytes counts as read if its plaintext
//! takes at least [`CLAIM`] bits fewer than 8n to write down by these frequencies. Of random bytes less than one run
//! in 2^60 does, whatever the search tries, so `seal` and `share` give nothing, and nothing is made up about them.

mod attack;
mod chains;
mod datagram;
mod frame;
mod known;
mod model;
mod reader;
mod report;
mod search;
mod statistics;
mod tap;
mod view;

pub use attack::{Attacker, CLAIM, How, Kind, Reading};
pub use chains::{BEFORE, CHAINS, Chains};
pub use datagram::CLEAR;
pub use frame::{Link, Packet, Payload};
pub use known::{place, unroll};
pub use reader::Piece;
pub use report::{Direction, Plain, Report, Times};
pub use statistics::Statistics;
pub use tap::{Only, Tap};
pub use view::{hex, text};
