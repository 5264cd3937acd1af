//! What came from the peer.

mod acks;
mod joins;
mod packets;
mod streams;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

use dibs_wire::frame::{Chunk, Frame, Frames};

use super::messages::{MAX_CONTROL, Verdict as MessageVerdict};
use super::notice::Event;
use super::peer::Peer;
use super::send::NOT_BARE;
use super::shared::Shared;
use crate::counters::Counter;
use crate::path::PathState;
use crate::session::{OVERHEAD, Opened, Received};
use crate::time::Time;

pub(super) use packets::Protection;
pub(super) use streams::incoming;

/// How a datagram came in.
#[derive(Clone, Copy)]
pub(super) struct Arrival {
    pub(super) path: usize,
    pub(super) from: SocketAddr,
    /// A router has marked it for congestion.
    pub(super) marked: bool,
}

/// What the frames of a datagram come to.
struct Verdict {
    /// Its content was taken, so it may be acknowledged.
    taken: bool,
    /// It asks for that.
    eliciting: bool,
}

impl Peer {
    /// Takes a datagram that belongs to a session with this peer.
    pub(crate) fn receive(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        received: &Received<'_>,
    ) {
        if received.opened.authenticated {
            self.on_used(now, shared, received.session, received.confirmed);
        }
        if !self.association.counts(received.session) {
            return shared.count(Counter::DatagramExpired);
        }
        let opened = &received.opened;
        if !self.admits(now, shared, arrival, opened) {
            return;
        }
        let Some(verdict) = self.take_frames(now, shared, arrival, opened) else {
            return;
        };
        if verdict.taken
            && let Some(link) = self.paths.by_id(opened.path_id)
            && link.is_open()
        {
            link.path.on_received(now, opened.seq, verdict.eliciting);
            if arrival.marked && opened.authenticated {
                link.path.on_marked();
            }
            // It is there again: an answer to a question of ours makes it ours to use.
            link.probe |= verdict.eliciting && link.path.state() != PathState::Active;
        }
    }

    /// Whether a datagram is of a path that there is, from where that leads; one that is not may ask for it.
    fn admits(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        opened: &Opened<'_>,
    ) -> bool {
        let Arrival { path, from, .. } = arrival;
        let len = (opened.header.len() + opened.payload.len() + OVERHEAD) as u64;
        let refused = match self.paths.position(opened.path_id) {
            None if opened.authenticated => {
                self.receive_join(now, shared, arrival, len, opened.path_id, opened.header);
                return false;
            }
            None => Counter::BareRefused,
            Some(at) if self.paths[at].local != path => {
                // It may wait to be proved, and have been asked for elsewhere at first.
                if opened.authenticated && self.paths[at].is_accepting() {
                    self.receive_join(now, shared, arrival, len, opened.path_id, opened.header);
                    return false;
                }
                Counter::WrongPath
            }
            // What was asked from the peer's endpoint is not answered elsewhere either.
            Some(at)
                if opened.authenticated
                    && self.paths[at].is_accepting()
                    && !self.may_ask_from(shared, arrival) =>
            {
                Counter::PathRefused
            }
            Some(at) if !opened.authenticated && !self.paths[at].expects_bare(opened.seq, from) => {
                Counter::BareRefused
            }
            Some(at) => {
                let link = &mut self.paths[at];
                if opened.authenticated {
                    link.on_source(now, shared, opened.seq, from, len);
                }
                link.bytes_received += len;
                return true;
            }
        };
        shared.count(refused);
        false
    }

    /// Takes the frames of a datagram; none if it is dropped, which is counted.
    fn take_frames(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        opened: &Opened<'_>,
    ) -> Option<Verdict> {
        let dropped = |shared: &mut Shared, reason| {
            shared.count(reason);
            None
        };
        let mut verdict = Verdict {
            taken: true,
            eliciting: false,
        };
        let protection = match (opened.authenticated, opened.payload_inside) {
            (false, _) => Protection::None,
            (true, false) => Protection::Authentic,
            (true, true) => Protection::Encrypted,
        };
        let mut payload = Some(&*opened.payload);
        let mut frames = Frames::new(opened.header);
        let mut chunk = Chunk::EMPTY;
        loop {
            let other = match frames.chunk(&mut chunk) {
                Some(Ok(())) => None,
                Some(Err(_)) => return dropped(shared, Counter::FrameMalformed),
                None => match frames.next() {
                    Some(Ok(frame)) => Some(frame),
                    Some(Err(_)) => return dropped(shared, Counter::FrameMalformed),
                    None => return Some(verdict),
                },
            };
            if !opened.authenticated {
                let len = payload.map_or(0, <[u8]>::len);
                if other.is_some() || !is_bare_data(&chunk, len) {
                    return dropped(shared, Counter::BareRefused);
                }
            }
            verdict.eliciting |= other.as_ref().is_none_or(Frame::is_ack_eliciting);
            // A path that was proved may have taken the place of others.
            let at = self.paths.position(opened.path_id)?;
            if !self.paths[at].is_open() && !other.as_ref().is_some_and(is_joining) {
                if opened.authenticated {
                    self.paths[at].on_early_data();
                }
                return dropped(shared, Counter::PathNotValidated);
            }
            // At most one frame describes the payload.
            let mut described = || payload.take();
            verdict.taken &= match &other {
                None => match described() {
                    Some(bytes) => {
                        let protected = (bytes, protection);
                        self.take_chunk(now, shared, arrival.path, &chunk, protected)
                    }
                    None => return dropped(shared, Counter::FrameMalformed),
                },
                Some(Frame::Share(share)) => match described() {
                    Some(bytes) => self.take_share(now, shared, arrival.path, share, bytes),
                    None => return dropped(shared, Counter::FrameMalformed),
                },
                Some(frame) => self.take_frame(now, shared, arrival, at, frame),
            };
        }
    }

    fn take_frame(
        &mut self,
        now: Time,
        shared: &mut Shared,
        arrival: Arrival,
        at: usize,
        frame: &Frame<'_>,
    ) -> bool {
        let link = &mut self.paths[at];
        match *frame {
            Frame::Ping => {}
            Frame::Ack(bytes) => self.take_ack(now, shared, at, bytes),
            Frame::Chunk(_) | Frame::Share(_) => {
                unreachable!("the caller keeps what has a payload to itself")
            }
            Frame::Segment(_) | Frame::Opaque { .. } | Frame::Fragment { .. } => {
                // Header blocks are encrypted, always.
                return self.take_inner(now, shared, arrival.path, frame, Protection::Encrypted);
            }
            Frame::Control { id, bytes } => return self.take_control(shared, id, bytes),
            Frame::FlowUnknown { flow, incarnation } => {
                if let Some(conn) = self.flows.by_own_number(flow)
                    && conn.out.stream.incarnation() == incarnation
                {
                    conn.out.begin_anew();
                }
            }
            Frame::EpochBroken {
                flow,
                incarnation,
                epoch,
            } => {
                if let Some(conn) = self.flows.by_own_number(flow)
                    && conn.out.stream.incarnation() == incarnation
                    && conn.out.stream.is_current(epoch)
                {
                    conn.out.stream.break_chain();
                    if conn.out.stream.is_worn() {
                        conn.out.begin_anew();
                    }
                }
            }
            Frame::PathJoin { nonce, trusted, to } => {
                match self.refusal(shared, arrival, trusted, to) {
                    None => self.paths[at].on_join(now, shared, nonce, trusted),
                    Some(reason) => shared.count(reason),
                }
            }
            Frame::PathAccept {
                nonce,
                challenge,
                trusted,
            } => {
                let id = link.id;
                if link.on_accept(now, shared, nonce, challenge, trusted) {
                    let given_up = self.paths.supersede(id);
                    self.abandon(shared, given_up);
                } else {
                    shared.count(Counter::PeerContradiction);
                }
            }
            Frame::PathConfirm { challenge } => {
                let id = link.id;
                if link.on_confirm(now, challenge) {
                    let given_up = self.paths.supersede(id);
                    self.abandon(shared, given_up);
                } else {
                    shared.count(Counter::PathNotValidated);
                }
            }
            Frame::PathChallenge { challenge } => {
                link.push_frame(shared, &Frame::PathResponse { challenge });
            }
            Frame::PathResponse { challenge } => {
                shared.count(match link.on_response(arrival.from, challenge) {
                    true => Counter::EndpointMoved,
                    false => Counter::PeerContradiction,
                });
            }
        }
        let peer = self.id.index();
        if let Some(link) = self.paths.get_mut(at) {
            link.note_state(shared, peer);
        }
        true
    }
}

impl Peer {
    /// Takes a message of the peer's daemon, unless the owner has too many to deal with: then it is to come
    /// again, so nothing of it is remembered.
    fn take_control(&mut self, shared: &mut Shared, id: u32, bytes: &[u8]) -> bool {
        if bytes.len() > MAX_CONTROL {
            shared.count(Counter::FrameMalformed);
            return true;
        }
        match self.messages.take(id) {
            MessageVerdict::New => {}
            MessageVerdict::Again => return true,
            MessageVerdict::Refused => {
                shared.count(Counter::ControlRefused);
                return false;
            }
        }
        shared.events.push(Event::Control {
            peer: self.id.index(),
            bytes: bytes.to_vec(),
        });
        true
    }
}

/// What may come without authentication: data of the scramble bump in the midst of an epoch of a
/// flow that an authenticated frame opened (docs/protocol.md, 9). It neither opens nor closes anything.
fn is_bare_data(chunk: &Chunk<'_>, payload: usize) -> bool {
    let data = payload > 0 && chunk.tcp.flags & NOT_BARE == 0;
    data && !chunk.solo && !chunk.first && chunk.open.is_none()
}

fn is_joining(frame: &Frame<'_>) -> bool {
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
