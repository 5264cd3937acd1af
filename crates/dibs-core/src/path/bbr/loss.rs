//! How much is lost, and when that is congestion.

/// Loss that is heavy, in a sample of at least so many datagrams.
const HEAVY: f64 = 0.15;
const SAMPLE: u64 = 128;

/// Rounds from a reaction to heavy loss to the next.
const ROUNDS: u64 = 4;

/// The fraction of datagrams lost.
#[derive(Debug, Default)]
pub(super) struct LossRate {
    lost: u64,
    acked: u64,
    /// Round of the last sample.
    round: u64,
    smoothed: f64,
    /// Round of the last reaction to heavy loss.
    backoff_round: u64,
    /// The rates before the last reaction to heavy loss.
    undo: Option<[u64; 2]>,
}

impl LossRate {
    pub(super) const fn smoothed(&self) -> f64 {
        self.smoothed
    }

    /// Whether anything has been lost of late.
    pub(super) fn is_losing(&self) -> bool {
        self.lost > 0 || self.smoothed > 0.0
    }

    pub(super) const fn on_lost(&mut self, datagrams: u64) {
        self.lost += datagrams;
    }

    pub(super) const fn on_acked(&mut self, datagrams: u64) {
        self.acked += datagrams;
    }

    /// A datagram declared lost was late. Returns the rates before a reaction that was perhaps wrong.
    pub(super) const fn on_spurious(&mut self) -> Option<[u64; 2]> {
        self.lost = self.lost.saturating_sub(1);
        self.undo.take()
    }

    /// What the current sample has says nothing of congestion.
    pub(super) const fn forget_sample(&mut self) {
        self.lost = 0;
        self.acked = 0;
    }

    /// A round ended: whether loss is heavy, and the rates are to fall for that.
    pub(super) fn on_round(&mut self, round: u64, rates: [u64; 2]) -> bool {
        let total = self.lost + self.acked;
        if total < SAMPLE || round == self.round {
            return false;
        }
        let loss = self.lost as f64 / total as f64;
        self.smoothed += (loss - self.smoothed) / 8.0;
        self.forget_sample();
        self.round = round;
        let heavy = loss > HEAVY && round >= self.backoff_round + ROUNDS;
        if heavy {
            self.backoff_round = round;
            self.undo = Some(rates);
        }
        heavy
    }
}
