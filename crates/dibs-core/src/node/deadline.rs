//! Deadlines of a node.

use crate::time::Time;

/// Deadline of a node: when [`Node::handle_timeout`](super::Node::handle_timeout) is due, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    /// Instant at which it is due.
    pub at: Time,
    /// Owner that asked for it.
    pub reason: Reason,
}

/// Reason of a [`Deadline`]: each is one owner's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Sessions: a handshake is to be repeated, or keys are old.
    Handshake,
    /// Keys agreed by an untrusted path are to be agreed by a trusted one.
    Renewal,
    /// The association with a peer: it may have to be called.
    Call,
    /// Paths to a peer are to be asked for.
    Dial,
    /// A path: losses, acknowledgements, probes, questions whether it is still there.
    Path,
    /// The pacer of a path lets data go.
    Pacer,
    /// The receiver: something was held, or idle, for long enough.
    Receiver,
    /// A handover between bumps: a drain ends.
    Handover,
    /// The fair queue: TCP has not sent again what CoDel dropped.
    Dropped,
    /// A message that was lost more than once is to be sent again.
    Message,
}

impl Reason {
    /// The deadline of this reason, if there is one.
    pub(super) fn at(self, at: Option<Time>) -> Option<Deadline> {
        at.map(|at| Deadline { at, reason: self })
    }
}
