//! Plan of a piece: where in its stream it stands, and which paths may carry it. Trust is decided here and nowhere else.

use crate::bump::Bump;
use crate::chunk::Placement;
use crate::flow::conn::Outgoing;
use crate::stream::tx::Position;

/// See the module.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    pub(super) position: Position,
    pub(super) placement: Placement,
    /// Nothing behind it goes before a trusted path has taken it.
    pub(super) is_strict: bool,
}

impl Plan {
    /// The plan of `left` bytes at `offset` of what a flow sends on a bump. A chunk that is due for a trusted path may be
    /// left out of a run, and wait while others go on, unless too many do.
    #[inline]
    pub(super) fn of(
        out: &mut Outgoing,
        bump: &Bump,
        (offset, left): (u64, usize),
        is_full: bool,
    ) -> Self {
        let position = out.stream.position(offset, left.max(1));
        let chain = bump.chain();
        let is_guarded = chain
            .is_some_and(|chain| position.solo || out.stream.is_guarded(offset, chain.guarded()));
        let is_due = chain.is_some() && out.schedule.is_due();
        Self {
            position,
            placement: match is_guarded || is_due {
                true => Placement::TrustedOnly,
                false => Placement::Any,
            },
            is_strict: is_guarded || (is_due && is_full),
        }
    }

    /// The plan of a packet that waits at the head of its flow's queue.
    pub(super) fn of_head(out: &mut Outgoing, bump: &Bump, is_full: bool) -> Option<Self> {
        let Outgoing { queue, stream, .. } = out;
        let head = queue.head()?;
        let at = (head.offset(stream), head.rest.left);
        Some(Self::of(out, bump, at, is_full))
    }
}
