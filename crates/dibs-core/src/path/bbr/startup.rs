//! Whether the path's rate has been found.

/// Rounds without growth by a quarter that end the start.
const ROUNDS: u32 = 3;

/// The start: the rate doubles each round for as long as it grows.
#[derive(Debug, Default)]
pub(super) struct Startup {
    over: bool,
    rate: u64,
    rounds: u32,
}

impl Startup {
    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    /// Something other than its rounds says that the path is full.
    pub(super) const fn end(&mut self) {
        self.over = true;
    }

    /// A round ended in which the sender could have sent more.
    pub(super) fn on_round(&mut self, rate: u64) {
        if self.over {
            return;
        }
        if rate as f64 >= 1.25 * self.rate as f64 {
            self.rate = rate;
            self.rounds = 0;
        } else {
            self.rounds += 1;
            self.over = self.rounds >= ROUNDS;
        }
    }
}
