//! When to do without an offload that was refused, and when to try it again.

/// How many uses are skipped after the first refusal; doubled by each further one in a row.
const FIRST_SKIP: u32 = 16;
/// A persistent refusal costs one failed call in this many uses.
const MAX_SKIP: u32 = 16_384;

/// One offload's standing with the kernel, counted in uses, so that it needs no clock.
///
/// A refusal may be about one packet (Linux 6.6.44 refused some GSO writes, not all), about a
/// route, or for good; the pause doubles from a few uses to many.
#[derive(Debug, Default)]
pub(crate) struct Offload {
    skip: u32,
    pause: u32,
}

impl Offload {
    /// Whether to use the offload now. Counts one use.
    pub(crate) fn wanted(&mut self) -> bool {
        let wanted = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        wanted
    }

    /// The kernel refused it, and took the same data without it.
    pub(crate) fn refused(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_SKIP, MAX_SKIP);
        self.skip = self.pause;
    }

    /// It worked.
    pub(crate) fn accepted(&mut self) {
        *self = Self::default();
    }

    /// Whether it is in use, as far as known.
    pub(crate) fn active(&self) -> bool {
        self.pause == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skipped(offload: &mut Offload) -> u32 {
        (0..).find(|_| offload.wanted()).expect("it is tried again")
    }

    #[test]
    fn pauses_double_up_to_a_bound_and_end_with_success() {
        let mut offload = Offload::default();
        assert_eq!(skipped(&mut offload), 0);
        let mut pause = FIRST_SKIP;
        for _ in 0..20 {
            offload.refused();
            assert!(!offload.active());
            assert_eq!(skipped(&mut offload), pause);
            pause = (pause * 2).min(MAX_SKIP);
        }
        assert_eq!(pause, MAX_SKIP);
        offload.accepted();
        assert!(offload.active());
        offload.refused();
        assert_eq!(skipped(&mut offload), FIRST_SKIP);
    }
}
