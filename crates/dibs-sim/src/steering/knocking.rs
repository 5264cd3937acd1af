//! Packets that a daemon sends and hears in plain: a model of its packet sockets.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::rc::{Rc, Weak};

use dibs_core::Time;
use dibs_switch::engine;
use dibs_wire::FlowKey;
use dibs_wire::packet::flags;

use super::host::Host;
use crate::offload;

/// Ears for packets in plain.
#[derive(Debug)]
pub(super) struct Ears {
    /// Connections, as this host sends; none: acknowledgements of all.
    pairs: Option<BTreeSet<FlowKey>>,
    heard: RefCell<VecDeque<Vec<u8>>>,
}

/// Sockets that send packets in plain, and hear them.
pub(super) struct Plain {
    host: Rc<Host>,
    ears: Rc<Ears>,
}

impl engine::Plain for Plain {
    fn now(&self) -> Time {
        self.host.now.get()
    }

    fn send(&self, _: &FlowKey, packet: &[u8]) {
        self.host.knocked.borrow_mut().push(packet.to_vec());
        self.host.changed.set(true);
    }

    async fn hear(&self, until: Option<Time>) -> Option<Vec<u8>> {
        let heard = || match self.ears.heard.borrow_mut().pop_front() {
            Some(packet) => Some(Some(packet)),
            None => (until.is_some_and(|until| self.host.is_time(until))).then_some(None),
        };
        self.host.until(heard).await
    }
}

impl Host {
    /// Sockets for these connections, as this host sends; for acknowledgements of any if there are none.
    pub(super) fn open_plain(&self, pairs: Option<BTreeSet<FlowKey>>) -> Plain {
        let heard = RefCell::default();
        let ears = Rc::new(Ears { pairs, heard });
        let open = &mut *self.ears.borrow_mut();
        open.retain(|ears| ears.strong_count() > 0);
        open.push(Rc::downgrade(&ears));
        let host = self.me.upgrade().expect("it runs");
        Plain { host, ears }
    }

    /// A packet came in by the ordinary route. True if anybody listens for it.
    pub(super) fn hear(&self, packet: &[u8]) -> bool {
        let Some(segment) = offload::tcp(packet) else {
            return false;
        };
        let pair = segment.tuple.reversed();
        let is_bare = segment.flags == flags::ACK && segment.payload.is_empty();
        let ears = self.ears.borrow();
        let hears = |ears: &Rc<Ears>| ears.pairs.as_ref().map_or(is_bare, |it| it.contains(&pair));
        let hearing = ears.iter().filter_map(Weak::upgrade).filter(hears);
        let heard = hearing.map(|ears| ears.heard.borrow_mut().push_back(packet.to_vec()));
        heard.count() > 0
    }
}
