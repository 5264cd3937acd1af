//! Bumps: what is done to the bytes of a connection on their way.
//!
//! A [`Bump`] is a number and one of three methods, and the node knows nothing else of it:
//!
//! - [`Method::Chain`]: what is sent of a byte depends on bytes before it. It is authenticated and
//!   seen on the wire, so its start and what stands alone go by trusted paths only (docs/threat-model.md);
//! - [`Method::Seal`]: nothing is done here; each datagram is encrypted whole, and may go anywhere;
//! - [`Method::Split`]: each datagram, headers included, becomes several, one for each path.
//!
//! Order, loss, retransmission and sharing out over paths are the node's business for all of them.
//! docs/writing-a-bump.md leads through one.

mod scramble;
mod seal;
mod share;

use std::fmt;
use std::sync::Arc;

use dibs_settings::BumpId;
use dibs_wire::checksum::crc32c;
pub use scramble::{SCRAMBLE, Scramble, scramble};
pub use seal::{SEAL, seal};
pub use share::{InvalidScheme, Pads, SHARE, Scheme, share};

use crate::session::EpochKey;

/// The highest number of a bump that a node carries.
pub const MAX_NUMBER: u8 = 6;

/// A bump.
#[derive(Clone, Debug)]
pub struct Bump {
    /// Names it in marks and on the wire: 1 to [`MAX_NUMBER`], the same at both ends.
    pub number: BumpId,
    /// Method by which it transforms.
    pub method: Method,
}

/// Method of a bump, see the [module](self).
#[derive(Clone, Debug)]
pub enum Method {
    /// Transforms the stream byte by byte.
    Chain(Arc<dyn Chain>),
    /// Encrypts each datagram whole.
    Seal(Padding),
    /// Makes several datagrams of each.
    Split(Arc<dyn Split>),
}

/// Padding of encrypted datagrams: the lengths that an observer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The true ones.
    None,
    /// Those of a few buckets: powers of two up to 1024 bytes, or as long as the path allows.
    Buckets,
}

/// A transformation in which bytes depend on those before them. A chain begins anew with each epoch;
/// its key is that epoch's, or that of one chunk which stands alone.
pub trait Chain: Send + Sync + fmt::Debug {
    /// So many bytes at the start of an epoch an observer of an untrusted path must not have.
    fn guarded(&self) -> u64;
    /// The sender's side at the start of an epoch.
    fn encoder(&self, key: &EpochKey) -> Box<dyn Encode>;
    /// The receiver's side at the start of an epoch.
    fn decoder(&self, key: &EpochKey) -> Box<dyn Decode>;
}

/// The sender's side of a chain.
pub trait Encode: Send + fmt::Debug {
    /// Transforms the next bytes of the stream into `out`, which is as long.
    fn encode(&mut self, plain: &[u8], out: &mut [u8]);
    /// The same; returns the CRC-32C of `plain`. Where the passes over the bytes can be one, it is worth
    /// its while.
    fn encode_summed(&mut self, plain: &[u8], out: &mut [u8]) -> u32 {
        self.encode(plain, out);
        crc32c(plain)
    }
}

/// The receiver's side of a chain.
pub trait Decode: Send + fmt::Debug {
    /// Restores the next bytes of the stream into `plain`, which is as long.
    fn decode(&mut self, sent: &[u8], plain: &mut [u8]);
    /// The same; returns the CRC-32C of what is now in `plain`.
    fn decode_summed(&mut self, sent: &[u8], plain: &mut [u8]) -> u32 {
        self.decode(sent, plain);
        crc32c(plain)
    }
    /// Moves on over bytes whose plaintext has come another way. Pieces need not end where those of
    /// [`decode`](Self::decode) do.
    fn advance(&mut self, plain: &[u8]);
}

/// A way to make several byte strings of one, for as many paths, and that one of some of them.
pub trait Split: Send + Sync + fmt::Debug {
    /// How many there are: each goes by a path of its own. At most 32.
    fn shares(&self) -> u8;
    /// How many of them give the whole. With fewer paths, nothing is sent.
    fn needed(&self) -> u8;
    /// The longest whole whose shares are `share` bytes long at most.
    fn capacity(&self, share: usize) -> usize;
    /// How long the shares of a whole of `len` bytes are: all equally.
    fn share_len(&self, len: usize) -> usize {
        len
    }
    /// How many random bytes it takes to split `len` bytes.
    fn randomness(&self, len: usize) -> usize;
    /// Splits `whole` into all shares. `random` are fresh bytes of a generator fit for cryptography.
    fn split(&self, whole: &[u8], random: &[u8], shares: &mut [&mut [u8]]);
    /// Puts shares, by index, together again; false if they do not fit together. Zeros may follow.
    fn join(&self, shares: &[(u8, &[u8])], whole: &mut Vec<u8>) -> bool;
}

/// All bumps of this crate for two paths.
pub fn ordinary() -> Vec<Bump> {
    let two = Scheme::new(2, 2).expect("two of two are a scheme");
    vec![scramble(), share(two), seal(Padding::None)]
}

impl Bump {
    /// How many shares of how many give the data, if it is split.
    pub fn shares(&self) -> Option<(u8, u8)> {
        let split = self.split()?;
        Some((split.needed(), split.shares()))
    }

    /// The chain, if it is one.
    pub(crate) fn chain(&self) -> Option<&dyn Chain> {
        match &self.method {
            Method::Chain(chain) => Some(&**chain),
            Method::Seal(_) | Method::Split(_) => None,
        }
    }

    /// How datagrams are split, if they are.
    pub(crate) fn split(&self) -> Option<&dyn Split> {
        match &self.method {
            Method::Split(split) => Some(&**split),
            Method::Chain(_) | Method::Seal(_) => None,
        }
    }

    /// Whether lengths are hidden.
    pub(crate) const fn is_padded(&self) -> bool {
        matches!(self.method, Method::Seal(Padding::Buckets))
    }

    /// Whether datagrams are encrypted whole.
    pub(crate) const fn is_sealed(&self) -> bool {
        matches!(self.method, Method::Seal(_))
    }
}

/// The bumps of a node, by number.
#[derive(Debug)]
pub(crate) struct Bumps([Option<Bump>; MAX_NUMBER as usize + 1]);

impl Bumps {
    /// # Panics
    /// If two have the same number, or one a number that none can have.
    pub(crate) fn new(bumps: Vec<Bump>) -> Self {
        let mut all = Self([const { None }; MAX_NUMBER as usize + 1]);
        for bump in bumps {
            let number = bump.number;
            let place = all.0.get_mut(usize::from(number.get()));
            let before = place.expect("a number that a node carries").replace(bump);
            assert!(before.is_none(), "two bumps are {number}");
        }
        all
    }

    /// The bump that a peer names by this number, if the node carries it.
    pub(crate) fn named(&self, number: u8) -> Option<&Bump> {
        self.0.get(usize::from(number))?.as_ref()
    }

    /// The bump of this number, if the node carries it.
    pub(crate) fn get(&self, number: BumpId) -> Option<&Bump> {
        self.named(number.get())
    }

    /// All that the node carries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Bump> {
        self.0.iter().flatten()
    }

    /// The bump of a connection, which began because the node carries it.
    pub(crate) fn of(&self, number: BumpId) -> &Bump {
        self.get(number).expect("a connection's bump is carried")
    }
}
