//! The window that refuses what was seen before (RFC 6479): a ring of bits by sequence number,
//! where moving on clears whole words and shifts nothing.

const WORDS: usize = 512;

/// How far below the highest accepted number a late one may lie and still be taken.
///
/// One word less than the ring, so that the word being filled never holds old bits in the window.
pub const REPLAY_WINDOW: u64 = (WORDS as u64 - 1) * 64;

/// The sequence numbers accepted on one path under one session.
pub struct ReplayWindow {
    /// One more than the highest number accepted.
    top: u64,
    bits: [u64; WORDS],
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self {
            top: 0,
            bits: [0; WORDS],
        }
    }
}

impl ReplayWindow {
    /// True if `seq` was not accepted before, and does not lie below the window.
    pub fn is_new(&self, seq: u64) -> bool {
        // The last number cannot have a `top` above it and is never sent.
        if seq >= self.top {
            return seq != u64::MAX;
        }
        self.top - seq <= REPLAY_WINDOW && self.bits[word(seq)] & bit(seq) == 0
    }

    /// Notes `seq`, which [`is_new`](Self::is_new), as seen. Only for what was authenticated.
    pub fn accept(&mut self, seq: u64) {
        debug_assert!(self.is_new(seq), "accept follows is_new");
        if seq >= self.top {
            let last = self.top.saturating_sub(1) / 64;
            let fresh = (seq / 64 - last).min(WORDS as u64);
            for ahead in 1..=fresh {
                self.bits[word((last + ahead) * 64)] = 0;
            }
            self.top = seq + 1;
        }
        self.bits[word(seq)] |= bit(seq);
    }
}

const fn word(seq: u64) -> usize {
    (seq / 64) as usize % WORDS
}

const fn bit(seq: u64) -> u64 {
    1 << (seq % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Every number ever accepted, and nothing clever.
    #[derive(Default)]
    struct Model {
        seen: BTreeSet<u64>,
    }

    impl Model {
        fn take(&mut self, seq: u64) -> bool {
            let top = self.seen.last().map_or(0, |highest| highest + 1);
            let in_window = seq >= top || top - seq <= REPLAY_WINDOW;
            in_window && seq != u64::MAX && self.seen.insert(seq)
        }
    }

    fn take(window: &mut ReplayWindow, seq: u64) -> bool {
        let new = window.is_new(seq);
        if new {
            window.accept(seq);
        }
        new
    }

    #[test]
    fn is_at_least_as_wide_as_promised() {
        const { assert!(REPLAY_WINDOW >= 16_384) };
        let mut window = ReplayWindow::default();
        assert!(take(&mut window, 1_000_000));
        assert!(take(&mut window, 1_000_001 - REPLAY_WINDOW));
        assert!(
            !take(&mut window, 1_000_000 - REPLAY_WINDOW),
            "below the window"
        );
        assert!(!take(&mut window, 1_000_001 - REPLAY_WINDOW), "seen");
    }

    #[test]
    fn stands_the_ends_of_the_number_space() {
        let mut window = ReplayWindow::default();
        assert!(take(&mut window, 0));
        assert!(!take(&mut window, 0));
        assert!(take(&mut window, u64::MAX - 1));
        assert!(!take(&mut window, u64::MAX - 1));
        assert!(!take(&mut window, u64::MAX));
        assert!(take(&mut window, u64::MAX - REPLAY_WINDOW));
    }

    /// Steps that stay near, cross words, cross the window, and repeat.
    fn steps() -> impl Strategy<Value = Vec<i64>> {
        let window = REPLAY_WINDOW as i64;
        let step = prop_oneof![
            8 => -70..200i64,
            2 => -window - 70..=-window + 70,
            1 => 0..3 * window,
        ];
        proptest::collection::vec(step, 1..400)
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model(start in 0..200_000u64, steps in steps()) {
            let mut window = ReplayWindow::default();
            let mut model = Model::default();
            let mut top = start;
            for step in steps {
                let seq = top.saturating_add_signed(step);
                prop_assert_eq!(take(&mut window, seq), model.take(seq), "at {}", seq);
                top = top.max(seq);
            }
        }
    }
}
