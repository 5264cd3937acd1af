//! A peer that is seen elsewhere than where its path leads.

use std::net::SocketAddr;

use dibs_wire::frame::Frame;

use super::{AMPLIFICATION, Link, Retry, Stage};
use crate::counters::Counter;
use crate::node::shared::Shared;
use crate::session::{OVERHEAD, Random};
use crate::time::Time;

/// A datagram with a challenge.
const CHALLENGE_LEN: u64 = OVERHEAD as u64 + 9;

/// An address that a path's datagrams began to come from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Roaming {
    pub(super) to: SocketAddr,
    challenge: [u8; 8],
    pub(super) retry: Retry,
    /// Bytes that may be sent there.
    credit: u64,
}

impl Link {
    /// An authentic datagram came from `from`. If that is not where the peer was, and nothing newer
    /// came from there, the new place is challenged; the old one is kept meanwhile (docs/protocol.md, 7). A trusted path
    /// does not roam: there the challenge tells the peer to ask for it anew, if it `may_ask` from there.
    pub(crate) fn on_source(
        &mut self,
        now: Time,
        shared: &mut Shared,
        seq: u64,
        (from, may_ask): (SocketAddr, bool),
        len: u64,
    ) {
        let newest = seq >= self.highest;
        self.highest = self.highest.max(seq);
        if newest && from != self.remote {
            self.ask_anew(now, shared, from);
        }
        if self.is_accepting() && from == self.remote {
            self.credit += AMPLIFICATION * len;
        }
        if from == self.remote || !newest || !self.is_open() {
            return;
        }
        if self.trusted && !may_ask {
            return;
        }
        if let Some(roaming) = self.roaming.as_mut().filter(|r| r.to == from) {
            roaming.credit += AMPLIFICATION * len;
            return;
        }
        shared.count(Counter::EndpointChallenged);
        let mut challenge = [0; 8];
        shared.dice.rng.fill(&mut challenge);
        self.roaming = Some(Roaming {
            to: from,
            challenge,
            retry: Retry::new(now),
            credit: AMPLIFICATION * len,
        });
    }

    /// Proof of the peer's place, asked for anew: the peer has not proved to be where it asked from at first. So the
    /// challenge goes to `from`, too, and only an answer from there counts. Otherwise whoever sends its answer
    /// from elsewhere would open the path to there.
    fn ask_anew(&mut self, now: Time, shared: &mut Shared, from: SocketAddr) {
        if let Stage::Accepting {
            challenge, retry, ..
        } = &mut self.stage
        {
            shared.dice.rng.fill(challenge);
            *retry = Retry::new(now);
            self.frames.clear();
            self.remote = from;
            self.credit = 0;
        }
    }

    /// A challenge to send to a place that is not proved yet.
    pub(crate) fn poll_challenge(&mut self, now: Time) -> Option<(SocketAddr, [u8; 8])> {
        let roaming = self.roaming.as_mut()?;
        if roaming.retry.at > now || roaming.retry.tries >= 3 {
            return None;
        }
        roaming.retry.next(now);
        roaming.credit = roaming.credit.checked_sub(CHALLENGE_LEN)?;
        Some((roaming.to, roaming.challenge))
    }

    /// The peer asks whether we are where this came; true if the path is to be asked for anew.
    pub(in crate::node) fn on_challenge(
        &mut self,
        shared: &mut Shared,
        challenge: [u8; 8],
    ) -> bool {
        self.push_frame(&mut shared.journal, &Frame::PathResponse { challenge });
        self.moved |= self.trusted && self.is_open();
        self.moved
    }

    /// The new place answered: it is where the peer is now (true), unless the path is trusted. None if that is no
    /// answer to a question of ours.
    pub(crate) fn on_response(&mut self, from: SocketAddr, challenge: [u8; 8]) -> Option<bool> {
        self.roaming
            .filter(|roaming| roaming.challenge == challenge && roaming.to == from)?;
        if !self.trusted {
            self.remote = from;
            self.roaming = None;
        }
        Some(!self.trusted)
    }
}
