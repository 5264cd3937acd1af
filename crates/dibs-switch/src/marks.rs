//! Connections that are on a bump neither by choice nor by a rule of this host's, and what their marks say.

use std::time::Duration;

use dibs_settings::BumpId;
use dibs_wire::FlowKey;

/// Time for which packets that came by a bump after their connection had left it do not pull it back.
pub const STRAGGLERS: Duration = Duration::from_secs(5);

/// Place of a connection that no choice and no rule of ours put there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handed {
    /// The bump.
    pub bump: BumpId,
    /// Hand that put it there.
    pub by: Hand,
}

/// Hand that puts connections on bumps, beside choices and the rules that the daemon can follow itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hand {
    /// The peer.
    Peer,
    /// A rule that only the kernel can follow.
    Rule,
    /// Another program.
    Other,
    /// Nobody: it was to go to plain, and plain does not carry it.
    Kept,
}

impl Hand {
    /// Place where it puts a connection, if it does.
    pub fn on(self, bump: impl Into<Option<BumpId>>) -> Option<Handed> {
        bump.into().map(|bump| Handed { bump, by: self })
    }
}

/// Mark that a connection is to have.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// The connection.
    pub pair: FlowKey,
    /// The bump; none: plain.
    pub bump: Option<BumpId>,
    /// True if somebody chose so.
    pub explicit: bool,
    /// True if its far end may still send by the bump that it leaves for plain by no choice: that does not pull it back.
    pub leaves: bool,
    /// True if it leaves for plain and stays silent until its peer has followed.
    pub leads: bool,
}

impl Mark {
    /// This bump, or plain, by no choice.
    pub fn moved(pair: FlowKey, bump: Option<BumpId>) -> Self {
        Self::new(pair, bump, false)
    }

    /// This bump, or plain, by choice if `explicit`.
    pub fn new(pair: FlowKey, bump: Option<BumpId>, explicit: bool) -> Self {
        let (leaves, leads) = (false, false);
        Self {
            pair,
            bump,
            explicit,
            leaves,
            leads,
        }
    }
}

/// Mark that a connection is to have, by all that is known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewMark {
    /// OVERRIDE is set.
    pub chosen: bool,
    /// LOCKED is set.
    pub locked: bool,
    /// The bump that it had before, as far as is known.
    pub was: Option<BumpId>,
}

/// Mark of a connection as the kernel tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenMark {
    /// Its bump, if it has one.
    pub bump: Option<BumpId>,
    /// OVERRIDE is set.
    pub chosen: bool,
    /// LOCKED is set.
    pub locked: bool,
    /// This host carries its bump, if it has one.
    pub carried: bool,
    /// Events of other things leave a mark of 0 out.
    pub told: bool,
}

/// Meaning of a mark that our record does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// Another program chose so.
    Chosen,
    /// It was cleared with a bump that went, or by hand: the choice outlives that.
    Lost,
    /// It is on its bump only for what came by it after it had left.
    Straggler,
    /// Another program, or a rule that takes it from another bump, has it there: the peer does not follow by itself.
    News,
    /// A rule of ours has it there, or what came from the peer.
    Known,
}
