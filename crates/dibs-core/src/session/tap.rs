//! Opening copies of what one end of a session sends, for who checks what it gives away.

use super::keys::{Integrity, SessionId};
use super::seal::{self, OpenError, OpenKeys, Opened};

/// The keys of one end's datagrams, as the other end has them.
pub struct Tap {
    pub(super) session: SessionId,
    pub(super) index: u32,
    pub(super) integrity: Integrity,
    pub(super) keys: OpenKeys,
}

impl Tap {
    /// The session's name.
    pub const fn session(&self) -> SessionId {
        self.session
    }

    /// The receiver index that these datagrams have.
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Opens a copy of a datagram in place, once.
    ///
    /// # Errors
    /// It is none of these datagrams, or was opened before.
    pub fn open<'a>(&mut self, datagram: &'a mut [u8]) -> Result<Opened<'a>, OpenError> {
        match (seal::is_bare(datagram), self.integrity) {
            (true, Integrity::On) => Err(OpenError::BareRefused),
            (true, Integrity::Off) => seal::open_bare(datagram),
            (false, _) => self.keys.open(datagram),
        }
    }
}
