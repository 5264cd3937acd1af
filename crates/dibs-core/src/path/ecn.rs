//! Explicit congestion notification on a path's datagrams (RFC 3168), used as QUIC does (RFC 9000, 13.4).
//!
//! A router that would drop a datagram of a sender who says ECT(0) marks it CE instead. The receiver counts these
//! marks, and its acknowledgements tell the count. A network may drop what says ECT: where the path falls silent before
//! one of the first such datagrams is acknowledged, it is not said again, unless that acknowledgement was only late.

use super::ranges::SeqRange;

/// One path's notifications, both ways.
#[derive(Debug, Default)]
pub(super) struct Ecn {
    capability: Capability,
    /// Datagrams that came in with a mark.
    received: u64,
    /// Marks that the peer has told of.
    reported: u64,
}

/// Whether what says ECT gets through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Capability {
    #[default]
    Unknown,
    /// It is said from this number on, and none such has been acknowledged.
    Testing(u64),
    Capable,
    /// It was said in these numbers, and none of them was acknowledged before the path fell silent.
    Refused(SeqRange),
}

impl Ecn {
    /// Whether datagrams may say ECT(0).
    pub(super) fn is_sent(&self) -> bool {
        !matches!(self.capability, Capability::Refused(_))
    }

    /// A datagram was sent that says ECT.
    pub(super) fn on_sent(&mut self, seq: u64) {
        if self.capability == Capability::Unknown {
            self.capability = Capability::Testing(seq);
        }
    }

    /// The peer has got these datagrams. Of a host that was busy the answer comes after the silence.
    pub(super) fn on_acked(&mut self, ranges: &[SeqRange]) {
        let said = match self.capability {
            Capability::Unknown | Capability::Capable => return,
            Capability::Testing(start) => SeqRange {
                start,
                end: u64::MAX,
            },
            Capability::Refused(said) => said,
        };
        if ranges
            .iter()
            .any(|r| r.start <= said.end && said.start <= r.end)
        {
            self.capability = Capability::Capable;
        }
    }

    /// A probe timeout has passed without an answer, and `next` is sent next. What answers afterwards may be another
    /// network.
    pub(super) fn on_silence(&mut self, next: u64) {
        self.capability = match self.capability {
            Capability::Testing(start) => Capability::Refused(SeqRange {
                start,
                end: next - 1,
            }),
            Capability::Refused(said) => Capability::Refused(said),
            Capability::Capable | Capability::Unknown => Capability::Unknown,
        };
    }

    /// A datagram came in with a mark.
    pub(super) fn on_marked(&mut self) {
        self.received += 1;
    }

    /// Marks that the peer is to be told of.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Marks that the peer has told of.
    pub(super) fn reported(&self) -> u64 {
        self.reported
    }

    /// The peer has counted so many marks; true if that is more than before.
    pub(super) fn on_reported(&mut self, marks: u64) -> bool {
        let more = marks > self.reported;
        self.reported = self.reported.max(marks);
        more
    }
}
