//! What the peer asks when it opens a path.
//!
//! A path is trusted if both ends call it so, and each end knows only its own label. Where they disagree
//! about one, whoever sits there may bring what one end asks on it to another path of the other end,
//! which that end trusts. So the question names the address that it was sent to, and on a trusted path
//! counts only if that is an address of this path alone.

use std::net::IpAddr;

use dibs_wire::frame::{Frame, Frames};

use super::Arrival;
use crate::counters::Counter;
use crate::node::paths::Link;
use crate::node::peer::Peer;
use crate::node::shared::Shared;
use crate::time::Time;

impl Peer {
    /// A datagram of a path that we do not know can only ask to open it.
    pub(super) fn receive_join(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        len: u64,
        id: u8,
        header: &[u8],
    ) {
        let Some(Ok(Frame::PathJoin { nonce, trusted, to })) = Frames::new(header).next() else {
            return shared.count(Counter::WrongPath);
        };
        if let Some(reason) = self.refusal(shared, arrival, trusted, to) {
            return shared.count(reason);
        }
        let Arrival { path, from, .. } = arrival;
        if self.paths.numbers(id) || !self.paths.resolve_crossed(path, from) {
            return shared.count(Counter::PathRefused);
        }
        if let Some(at) = self.paths.position(id) {
            self.paths.remove(at);
        }
        let Ok(instead) = self.paths.make_room() else {
            return shared.count(Counter::PathRefused);
        };
        self.abandon(shared, instead);
        let link = Link::accept(now, shared, id, path, from, len, nonce, trusted);
        self.paths.add(link);
    }

    /// Whether the peer may ask for a path from there: on a trusted one from its endpoint only, where it
    /// has one.
    pub(super) fn may_ask_from(&self, shared: &Shared, arrival: Arrival) -> bool {
        let Arrival { path, from, .. } = arrival;
        !shared.local[path].trusted || self.paths.is_endpoint(path, from) != Some(false)
    }

    /// Why a path does not come about that the peer, which calls it `trusted`, asks for at our address
    /// `to`.
    pub(super) fn refusal(
        &self,
        shared: &Shared,
        arrival: Arrival,
        trusted: bool,
        to: IpAddr,
    ) -> Option<Counter> {
        if !self.may_ask_from(shared, arrival) {
            return Some(Counter::PathRefused);
        }
        let Arrival { path, from, .. } = arrival;
        // One that an end calls untrusted is so whichever it is.
        if !trusted || !shared.local[path].trusted {
            return None;
        }
        let of = |at: usize| shared.local[at].addresses.contains(&to);
        let others = (0..shared.local.len()).any(|at| at != path && of(at));
        let told_apart = match (of(path), others) {
            (true, false) => true,
            (false, true) => false,
            // An address of several paths, or one that somebody translates: it does not tell, but the
            // peer's address may.
            (true, true) | (false, false) => self.paths.is_endpoint(path, from) == Some(true),
        };
        (!told_apart).then_some(Counter::PathMisdirected)
    }
}
