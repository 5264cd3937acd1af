//! Admission of datagrams by their path, and the questions of a peer that opens one.
//!
//! A path is trusted if both ends call it so, and each end knows only its own label. Where they disagree
//! about one, whoever sits there may bring what one end asks on it to another path of the other end,
//! which that end trusts. So the question names the address that it was sent to, and on a trusted path
//! counts only if that is an address of this path alone.

use std::net::{IpAddr, SocketAddr};

use dibs_wire::frame::{Frame, Frames};

use super::{Full, GivenUp, Link, PathSet};
use crate::counters::Counter;
use crate::node::shared::{Setup, Shared};
use crate::path_index::PathIndex;
use crate::session::{OVERHEAD, Opened};
use crate::time::Time;

/// How a datagram came in.
#[derive(Clone, Copy)]
pub(in crate::node) struct Arrival {
    pub(in crate::node) path: PathIndex,
    pub(in crate::node) from: SocketAddr,
    /// A router has marked it for congestion.
    pub(in crate::node) marked: bool,
}

impl PathSet {
    /// Takes note of a datagram of a path that there is, from where that leads. Others are dropped, but one may ask for
    /// a path: then what made room for that.
    pub(in crate::node) fn admit(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        opened: &Opened<'_>,
    ) -> Result<(), GivenUp> {
        let Arrival { path, from, .. } = arrival;
        let len = (opened.header.len() + opened.payload.len() + OVERHEAD) as u64;
        let refused = match self.position(opened.path_id) {
            None if opened.authenticated => {
                return Err(self.receive_join(now, shared, arrival, len, opened));
            }
            None => Counter::BareRefused,
            Some(at) if self[at].local != path => {
                // It may wait to be proved, and have been asked for elsewhere at first.
                if opened.authenticated && self[at].is_accepting() {
                    return Err(self.receive_join(now, shared, arrival, len, opened));
                }
                Counter::WrongPath
            }
            // What was asked from the peer's endpoint is not answered elsewhere either.
            Some(at)
                if opened.authenticated
                    && self[at].is_accepting()
                    && !self.may_ask_from(&shared.setup, arrival) =>
            {
                Counter::PathRefused
            }
            Some(at) if !opened.authenticated && !self[at].expects_bare(opened.seq, from) => {
                Counter::BareRefused
            }
            Some(at) => {
                let may_ask = self.may_ask_from(&shared.setup, arrival);
                let link = &mut self[at];
                if opened.authenticated {
                    link.on_source(now, shared, opened.seq, (from, may_ask), len);
                }
                link.bytes_received += len;
                shared.journal.note_carried(path, len);
                return Ok(());
            }
        };
        shared.count(refused);
        Err(GivenUp::new())
    }

    /// A datagram of a path that we do not know can only ask to open it.
    fn receive_join(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        len: u64,
        opened: &Opened<'_>,
    ) -> GivenUp {
        let Arrival { path, from, .. } = arrival;
        let id = opened.path_id;
        let mut given_up = GivenUp::new();
        let Some(Ok(Frame::PathJoin { nonce, trusted, to })) = Frames::new(opened.header).next()
        else {
            shared.count(Counter::WrongPath);
            return given_up;
        };
        if let Some(reason) = self.refusal(&shared.setup, arrival, trusted, to) {
            self.count_refusal(shared, reason, path, to);
            return given_up;
        }
        if self.numbers(id) || !self.resolve_crossed(path, from) {
            shared.count(Counter::PathRefused);
            return given_up;
        }
        if let Some(at) = self.position(id) {
            self.remove(at);
        }
        match self.make_room() {
            Ok(instead) => {
                given_up.extend(instead);
                self.add(Link::accept(
                    now, shared, id, path, from, len, nonce, trusted, to,
                ));
            }
            Err(Full) => shared.count(Counter::PathRefused),
        }
        given_up
    }

    /// Takes a frame that opens or tries the path at `at`; returns paths that are of no use any more.
    pub(in crate::node) fn take_frame(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        at: usize,
        frame: &Frame<'_>,
    ) -> GivenUp {
        let link = &mut self.links[at];
        let id = link.id;
        let refused = match *frame {
            Frame::PathJoin { nonce, trusted, to } => {
                match self.refusal(&shared.setup, arrival, trusted, to) {
                    Some(reason) => self.count_refusal(shared, reason, arrival.path, to),
                    None => self.links[at].on_join(now, shared, nonce, trusted),
                }
                None
            }
            Frame::PathAccept {
                nonce,
                challenge,
                trusted,
            } => {
                if link.on_accept(now, shared, nonce, challenge, trusted) {
                    return self.supersede(id);
                }
                Some(Counter::PeerContradiction)
            }
            Frame::PathConfirm { challenge } => {
                if link.on_confirm(now, challenge) {
                    return self.supersede(id);
                }
                Some(Counter::PathNotValidated)
            }
            Frame::PathChallenge { challenge } => {
                if link.on_challenge(shared, challenge) {
                    self.dial_at_once(now);
                }
                None
            }
            Frame::PathResponse { challenge } => {
                match link.on_response(arrival.from, challenge) {
                    Some(true) => Some(Counter::EndpointMoved),
                    // The peer asks for the path anew.
                    Some(false) => None,
                    None => Some(Counter::PeerContradiction),
                }
            }
            Frame::Ping | Frame::PingSpent => {
                link.on_ping(*frame == Frame::PingSpent);
                None
            }
            _ => None,
        };
        if let Some(reason) = refused {
            shared.count(reason);
        }
        GivenUp::new()
    }

    /// True if the peer may ask for a path from there: on a trusted one from its endpoint only, where it has one.
    fn may_ask_from(&self, setup: &Setup, arrival: Arrival) -> bool {
        let Arrival { path, from, .. } = arrival;
        !setup.local[path].trusted || self.is_endpoint(path, from) != Some(false)
    }

    /// Counts a path that the peer asked for at our address `to` and does not get.
    fn count_refusal(&mut self, shared: &mut Shared, reason: Counter, path: PathIndex, to: IpAddr) {
        shared.count(reason);
        if reason == Counter::PathMisdirected {
            self.note_misdirected(shared, path, to);
        }
    }

    /// Why a path does not come about that the peer, which calls it `trusted`, asks for at our address
    /// `to`.
    fn refusal(
        &self,
        setup: &Setup,
        arrival: Arrival,
        trusted: bool,
        to: IpAddr,
    ) -> Option<Counter> {
        if !self.may_ask_from(setup, arrival) {
            return Some(Counter::PathRefused);
        }
        let Arrival { path, from, .. } = arrival;
        // One that an end calls untrusted is so whichever it is.
        if !trusted || !setup.local[path].trusted {
            return None;
        }
        let of = |at: PathIndex| setup.local[at].is_at(to);
        let others = setup.local.iter().any(|(at, _)| at != path && of(at));
        let told_apart = match (of(path), others) {
            (true, false) => true,
            (false, true) => false,
            // An address of several paths, or one that somebody translates: it does not tell, but the
            // peer's address may.
            (true, true) | (false, false) => self.is_endpoint(path, from) == Some(true),
        };
        (!told_apart).then_some(Counter::PathMisdirected)
    }
}

/// True if a frame has a meaning on a path that is not open.
pub(in crate::node) const fn is_joining(frame: &Frame<'_>) -> bool {
    matches!(
        frame,
        Frame::PathJoin { .. }
            | Frame::PathAccept { .. }
            | Frame::PathConfirm { .. }
            | Frame::PathChallenge { .. }
            | Frame::PathResponse { .. }
            | Frame::Ack(_)
    )
}
