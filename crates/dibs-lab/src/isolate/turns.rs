//! Which tests of a binary run at the same time.

use std::sync::{Condvar, Mutex, MutexGuard};

/// How many tests run at a time: they wait for much, and two leave the processors of a small machine idle.
pub(super) const PLACES: usize = 3;

/// Places that tests take while they run.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// Tests that wait for all places: no other begins before them, or they might wait until the end.
    wait_for_all: usize,
}

/// Places taken until this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    places: usize,
}

impl Turns {
    /// All places are free.
    pub(super) const fn new() -> Self {
        let state = State {
            free: PLACES,
            wait_for_all: 0,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// Waits for so many places, of [`PLACES`].
    pub(super) fn take(&self, places: usize) -> Turn<'_> {
        let all = places == PLACES;
        let mut state = self.lock();
        state.wait_for_all += usize::from(all);
        let must_wait = |state: &mut State| state.free < places || (!all && state.wait_for_all > 0);
        let waited = self.changed.wait_while(state, must_wait);
        let mut state = waited.unwrap_or_else(|failed| failed.into_inner());
        state.wait_for_all -= usize::from(all);
        state.free -= places;
        Turn {
            turns: self,
            places,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        { self.state.lock() }.unwrap_or_else(|failed| failed.into_inner())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.lock().free += self.places;
        self.turns.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn as_many_run_as_there_are_places_and_some_alone() {
        let (turns, running) = (Turns::new(), AtomicUsize::new(0));
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for number in 0..24 {
                let (turns, running, most) = (&turns, &running, &most);
                scope.spawn(move || {
                    let places = if number % 6 == 5 { PLACES } else { 1 };
                    let _turn = turns.take(places);
                    let now = running.fetch_add(places, Ordering::SeqCst) + places;
                    assert!(now <= PLACES, "{now} places taken");
                    most.fetch_max(now, Ordering::SeqCst);
                    std::thread::yield_now();
                    running.fetch_sub(places, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.into_inner(), PLACES);
        assert_eq!(turns.lock().free, PLACES);
    }

    #[test]
    fn who_waits_for_all_places_is_next() {
        let turns = Turns::new();
        std::thread::scope(|scope| {
            let first = turns.take(1);
            let alone = scope.spawn(|| {
                let _turn = turns.take(PLACES);
                turns.lock().free
            });
            while turns.lock().wait_for_all == 0 {
                assert!(!alone.is_finished());
                std::thread::yield_now();
            }
            // A place is free, and still this one is behind the one that waits.
            let later = scope.spawn(|| drop(turns.take(1)));
            for _ in 0..100 {
                assert!(!later.is_finished());
                std::thread::yield_now();
            }
            drop(first);
            assert_eq!(alone.join().unwrap(), 0);
            later.join().unwrap();
        });
    }
}
