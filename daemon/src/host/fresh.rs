//! What is found out at some cost and kept for a while, however many ask.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

/// Keeps what was found out last.
pub(crate) struct Fresh<T> {
    keep: Duration,
    last: Mutex<Option<(Instant, T)>>,
}

impl<T: Clone> Fresh<T> {
    /// Finds out anew once what is known is older than `keep`.
    pub(crate) fn new(keep: Duration) -> Self {
        Self {
            keep,
            last: Mutex::default(),
        }
    }

    /// What is known at `now`. `find` is given what was known before; meanwhile others wait, for what it finds.
    /// Who does not want to wait for so long leaves what was known to the next.
    pub(crate) async fn get(&self, now: Instant, find: impl AsyncFnOnce(Option<T>) -> T) -> T {
        let mut last = self.last.lock().await;
        let known = match &mut *last {
            Some((at, known)) => {
                if now.saturating_duration_since(*at) < self.keep {
                    return known.clone();
                }
                // The next attempt is as far away, should this one be given up.
                *at = now;
                Some(known.clone())
            }
            None => None,
        };
        let found = find(known).await;
        *last = Some((now, found.clone()));
        found
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::join_all;
    use tokio::task::yield_now;

    use super::*;

    const KEPT: Duration = Duration::from_secs(1);

    #[test]
    fn all_who_ask_within_a_time_cause_one_run() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(async {
            let (fresh, runs) = (Fresh::new(KEPT), Cell::new(0));
            let start = Instant::now();
            let ask = async |after: Duration| {
                let run = async |before: Option<u32>| {
                    assert_eq!(before.unwrap_or(0), runs.get());
                    runs.set(runs.get() + 1);
                    yield_now().await;
                    runs.get()
                };
                fresh.get(start + after, run).await
            };
            // At once, while it runs, and afterwards.
            let many = join_all((0..100).map(|_| ask(Duration::ZERO))).await;
            assert!(many.iter().all(|found| *found == 1), "{many:?}");
            assert_eq!(ask(KEPT / 2).await, 1);
            let later = join_all((0..100).map(|n| ask(KEPT + KEPT / 200 * n))).await;
            assert!(later.iter().all(|found| *found == 2), "{later:?}");
            assert_eq!(runs.get(), 2);
        });
    }
}
