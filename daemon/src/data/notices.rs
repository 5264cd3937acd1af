//! What the data path tells the main thread: over a bounded channel, without ever waiting for it, and without losing
//! anything. What finds no room stays where it is, which has bounds of its own, until there is some.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dibs_core::node::Event;
use dibs_io::{Tun, Waker};
use dibs_settings::BumpId;
use dibs_switch::messages::Message;
use tokio::sync::mpsc;

/// Notices that wait for the main thread, at most. More wait in the node: see `dibs_core::node::Event`.
const NOTICES: usize = 256;

/// What the data path tells the main thread.
pub(crate) enum Notice {
    /// An event of the node, but for messages.
    Node(Event),
    /// A message of a peer's daemon; none: bytes that are none.
    Message {
        /// The peer.
        peer: usize,
        /// Connections in it have the names that this host gives them.
        message: Option<Message>,
    },
    /// A TUN cannot be read any more.
    TunLost {
        /// Its bump.
        bump: BumpId,
        /// The device, to be closed where that does not stop packets.
        tun: Box<Tun>,
        /// What the system said.
        error: io::Error,
    },
}

/// The data path's end.
pub(super) struct Teller {
    notices: mpsc::Sender<Notice>,
    /// Something found no room.
    held: Arc<AtomicBool>,
}

/// The main thread's end.
pub(crate) struct Notices {
    notices: mpsc::Receiver<Notice>,
    held: Arc<AtomicBool>,
    /// Of the data path.
    waker: Waker,
}

pub(super) fn channel(waker: Waker) -> (Teller, Notices) {
    let (notices, told) = mpsc::channel(NOTICES);
    let held = Arc::new(AtomicBool::new(false));
    let teller = Teller {
        notices,
        held: Arc::clone(&held),
    };
    let notices = Notices {
        notices: told,
        held,
        waker,
    };
    (teller, notices)
}

impl Teller {
    /// Whether there is room for a notice. If not, the data path is woken once there is.
    pub(super) fn has_room(&self) -> bool {
        let has_room = || self.notices.capacity() > 0;
        has_room() || {
            self.held.store(true, Ordering::SeqCst);
            // What was taken before that woke nobody.
            has_room()
        }
    }

    /// Sends a notice for which there [is room](Self::has_room).
    pub(super) fn tell(&self, notice: Notice) {
        // Nobody else sends; without the main thread nobody is to be told.
        let _ = self.notices.try_send(notice);
    }
}

impl Notices {
    /// The next notice; none once the data path has ended.
    pub(crate) async fn next(&mut self) -> Option<Notice> {
        let notice = self.notices.recv().await;
        if self.held.swap(false, Ordering::SeqCst) {
            self.waker.wake();
        }
        notice
    }
}
