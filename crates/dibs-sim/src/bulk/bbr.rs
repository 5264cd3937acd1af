//! BBR of version 1 (Cardwell et al. 2016), as Linux has it (`tcp_bbr.c`), but for its detection of policers.

use std::collections::VecDeque;
use std::time::Duration;

use dibs_core::Time;
use dibs_netem::rng::Rng;

use super::event::{Event, INITIAL_WINDOW, State, Window};
use super::segment::MSS;

/// Doubles the rate each round: 2 / ln 2.
const HIGH_GAIN: f64 = 2.885;
const DRAIN_GAIN: f64 = 1.0 / HIGH_GAIN;
const CWND_GAIN: f64 = 2.0;
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
/// Part of the rate that is used, so that no queue comes of rounding.
const MARGIN: f64 = 0.99;
/// Rounds over which the highest bandwidth counts.
const BW_ROUNDS: u64 = 10;
const MIN_RTT_AGE: Duration = Duration::from_secs(10);
const PROBE_RTT: Duration = Duration::from_millis(200);
const LEAST_WINDOW: u64 = 4;
/// Rounds without growth by a quarter that end the start.
const FULL_ROUNDS: u32 = 3;
/// Rounds over which aggregation of acknowledgements counts, twice; and the longest that is made room for.
const EXTRA_ROUNDS: u32 = 5;
const EXTRA_MOST: Duration = Duration::from_millis(100);
/// An epoch of acknowledgements that is longer begins anew, in segments.
const EPOCH_MOST: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Startup,
    Drain,
    ProbeBw,
    ProbeRtt,
}

/// Whether the start has filled the path.
#[derive(Debug, Default)]
struct Full {
    is: bool,
    bw: f64,
    rounds: u32,
}

impl Full {
    /// A round ended in which the sender could have sent more.
    fn on_round(&mut self, bw: f64) {
        if bw >= self.bw * 1.25 {
            self.bw = bw;
            self.rounds = 0;
            return;
        }
        self.rounds += 1;
        self.is = self.rounds >= FULL_ROUNDS;
    }
}

/// How much more than the bandwidth's is acknowledged at once.
#[derive(Debug)]
struct Extra {
    /// The most of these rounds and of those before.
    most: [u64; 2],
    rounds: u32,
    epoch_at: Time,
    epoch_acked: u64,
}

impl Extra {
    const fn new(now: Time) -> Self {
        Self {
            most: [0; 2],
            rounds: 0,
            epoch_at: now,
            epoch_acked: 0,
        }
    }

    fn most(&self) -> u64 {
        self.most[0].max(self.most[1])
    }

    /// Segments were acknowledged (`bbr_update_ack_aggregation`).
    fn update(&mut self, event: &Event, best: f64, cwnd: u64, round_starts: bool) {
        if round_starts {
            self.rounds += 1;
            if self.rounds >= EXTRA_ROUNDS {
                self.rounds = 0;
                self.most = [0, self.most[0]];
            }
        }
        let time = event.now.since(self.epoch_at).as_secs_f64();
        let mut expected = (best * time) as u64;
        if self.epoch_acked <= expected || self.epoch_acked + event.delivered >= EPOCH_MOST {
            self.epoch_acked = 0;
            self.epoch_at = event.now;
            expected = 0;
        }
        self.epoch_acked += event.delivered;
        let extra = self.epoch_acked.saturating_sub(expected).min(cwnd);
        self.most[0] = self.most[0].max(extra);
    }
}

#[derive(Debug)]
pub(super) struct Bbr {
    rng: Rng,
    mode: Mode,
    /// Segments a second by round, the highest first, each higher than those behind it.
    bandwidth: VecDeque<(u64, f64)>,
    pacing: f64,
    pacing_gain: f64,
    cwnd_gain: f64,
    rounds: u64,
    round_starts: bool,
    round_end: u64,
    full: Full,
    min_rtt: Option<Duration>,
    min_rtt_at: Time,
    /// When the measurement of the round trip ends, and whether a round has ended in it.
    probe: Option<(Time, bool)>,
    prior_window: u64,
    conserves: bool,
    prior_state: State,
    cycle: usize,
    cycle_at: Time,
    extra: Extra,
    /// What is sent until so much was delivered is not limited by the path.
    pub(super) app_limited_until: u64,
}

impl Bbr {
    pub(super) fn new(now: Time, rng: Rng) -> Self {
        // Linux takes a millisecond for the round trip as long as it knows none.
        let pacing = HIGH_GAIN * (INITIAL_WINDOW * MSS) as f64 / 1e-3;
        Self {
            rng,
            mode: Mode::Startup,
            bandwidth: VecDeque::new(),
            pacing,
            pacing_gain: HIGH_GAIN,
            cwnd_gain: HIGH_GAIN,
            rounds: 0,
            round_starts: false,
            round_end: 0,
            full: Full::default(),
            min_rtt: None,
            min_rtt_at: now,
            probe: None,
            prior_window: 0,
            conserves: false,
            prior_state: State::Open,
            cycle: 0,
            cycle_at: now,
            extra: Extra::new(now),
            app_limited_until: 0,
        }
    }

    pub(super) fn on_ack(&mut self, event: &Event, window: &mut Window) {
        let measured = self.min_rtt.is_some();
        self.update_bandwidth(event);
        self.update_extra(event, window.cwnd);
        self.update_cycle(event);
        self.check_full(event);
        self.check_drain(event, window);
        self.update_min_rtt(event, window);
        (self.pacing_gain, self.cwnd_gain) = match self.mode {
            Mode::Startup => (HIGH_GAIN, HIGH_GAIN),
            Mode::Drain => (DRAIN_GAIN, HIGH_GAIN),
            Mode::ProbeBw => (CYCLE[self.cycle], CWND_GAIN),
            Mode::ProbeRtt => (1.0, 1.0),
        };
        if let Some(rtt) = event.rtt.filter(|_| !measured) {
            self.pacing = HIGH_GAIN * (window.cwnd * MSS) as f64 / rtt.as_secs_f64().max(1e-6);
        }
        let rate = self.best() * MSS as f64 * self.pacing_gain * MARGIN;
        if self.full.is || rate > self.pacing {
            self.pacing = rate.max(1000.0);
        }
        self.set_window(event, window);
    }

    pub(super) fn pacing_rate(&self) -> f64 {
        self.pacing
    }

    /// Segments of a superpacket (`bbr_tso_segs_goal`).
    pub(super) fn burst(&self) -> u64 {
        let least = if self.pacing < 150_000.0 { 1 } else { 2 };
        (((self.pacing / 1024.0) as u64).min(65_000) / MSS).clamp(least, 0x7f)
    }

    /// A loss, or a measurement of the round trip, makes the window small for a while.
    pub(super) fn save(&mut self, window: &Window) {
        let small = self.prior_state >= State::Recovery || self.mode == Mode::ProbeRtt;
        self.prior_window = match small {
            true => self.prior_window.max(window.cwnd),
            false => window.cwnd,
        };
    }

    pub(super) fn on_timeout(&mut self) {
        self.prior_state = State::Loss;
        self.full.bw = 0.0;
        self.round_starts = true;
    }

    pub(super) fn on_undo(&mut self) {
        self.full.bw = 0.0;
        self.full.rounds = 0;
    }

    pub(super) fn describe(&self) -> String {
        format!(
            "{:?}, {:.1} Mbit/s, least {:?}",
            self.mode,
            self.best() * MSS as f64 * 8e-6,
            self.min_rtt
        )
    }

    /// Segments a second.
    fn best(&self) -> f64 {
        self.bandwidth.front().map_or(0.0, |(_, bw)| *bw)
    }

    fn product(&self, gain: f64) -> u64 {
        match self.min_rtt {
            Some(rtt) => (gain * self.best() * rtt.as_secs_f64()).ceil() as u64,
            None => INITIAL_WINDOW,
        }
    }

    /// What makes up for superpackets and delayed acknowledgements (`bbr_quantization_budget`).
    fn quantized(&self, window: u64) -> u64 {
        let even = (window + 3 * self.burst()).next_multiple_of(2);
        let probes = self.mode == Mode::ProbeBw && self.cycle == 0;
        even + if probes { 2 } else { 0 }
    }

    fn in_flight(&self, gain: f64) -> u64 {
        self.quantized(self.product(gain))
    }

    fn update_bandwidth(&mut self, event: &Event) {
        self.round_starts = false;
        let Some(rate) = event.rate else { return };
        if rate.prior >= self.round_end {
            self.round_end = event.total;
            self.rounds += 1;
            self.round_starts = true;
            self.conserves = false;
        }
        let bw = rate.delivered as f64 / rate.interval.as_secs_f64();
        if rate.app_limited && bw < self.best() {
            return;
        }
        while self.bandwidth.back().is_some_and(|(_, other)| *other <= bw) {
            self.bandwidth.pop_back();
        }
        self.bandwidth.push_back((self.rounds, bw));
        let oldest = self.rounds.saturating_sub(BW_ROUNDS);
        while self.bandwidth.len() > 1 && self.bandwidth[0].0 < oldest {
            self.bandwidth.pop_front();
        }
    }

    fn update_extra(&mut self, event: &Event, cwnd: u64) {
        if event.delivered == 0 || event.rate.is_none() {
            return;
        }
        let best = self.best();
        self.extra.update(event, best, cwnd, self.round_starts);
    }

    fn update_cycle(&mut self, event: &Event) {
        if self.mode != Mode::ProbeBw {
            return;
        }
        let long = event.now.since(self.cycle_at) > self.min_rtt.unwrap_or_default();
        let gain = CYCLE[self.cycle];
        let due = match gain {
            g if g > 1.0 => long && (event.lost > 0 || event.prior_in_flight >= self.in_flight(g)),
            g if g < 1.0 => long || event.prior_in_flight <= self.in_flight(1.0),
            _ => long,
        };
        if due {
            self.cycle = (self.cycle + 1) % CYCLE.len();
            self.cycle_at = event.now;
        }
    }

    fn check_full(&mut self, event: &Event) {
        let limited = event.rate.is_none_or(|rate| rate.app_limited);
        if self.full.is || !self.round_starts || limited {
            return;
        }
        self.full.on_round(self.best());
    }

    fn check_drain(&mut self, event: &Event, window: &mut Window) {
        if self.mode == Mode::Startup && self.full.is {
            self.mode = Mode::Drain;
            window.ssthresh = self.in_flight(1.0);
        }
        if self.mode == Mode::Drain && event.in_flight <= self.in_flight(1.0) {
            self.probe_bandwidth(event.now);
        }
    }

    fn probe_bandwidth(&mut self, now: Time) {
        self.mode = Mode::ProbeBw;
        // Anywhere but where the queue of a probe is drained.
        self.cycle = (CYCLE.len() - self.rng.below(7) as usize) % CYCLE.len();
        self.cycle_at = now;
    }

    fn update_min_rtt(&mut self, event: &Event, window: &mut Window) {
        let now = event.now;
        let expired = now.since(self.min_rtt_at) > MIN_RTT_AGE;
        if let Some(rtt) = event.rtt
            && (expired || self.min_rtt.is_none_or(|least| rtt <= least))
        {
            self.min_rtt = Some(rtt);
            self.min_rtt_at = now;
        }
        if expired && self.mode != Mode::ProbeRtt {
            self.save(window);
            self.mode = Mode::ProbeRtt;
            self.probe = None;
        }
        if self.mode != Mode::ProbeRtt {
            return;
        }
        self.app_limited_until = (event.total + event.in_flight).max(1);
        match &mut self.probe {
            None if event.in_flight <= LEAST_WINDOW => {
                self.probe = Some((now + PROBE_RTT, false));
                self.round_end = event.total;
            }
            None => {}
            Some((ends, round_ended)) => {
                *round_ended |= self.round_starts;
                if *round_ended && now > *ends {
                    self.min_rtt_at = now;
                    window.cwnd = window.cwnd.max(self.prior_window);
                    match self.full.is {
                        true => self.probe_bandwidth(now),
                        false => self.mode = Mode::Startup,
                    }
                }
            }
        }
    }

    fn set_window(&mut self, event: &Event, window: &mut Window) {
        let acked = event.delivered;
        if acked > 0 && !self.follows_losses(event, window) {
            let extra = self.extra.most() as f64;
            let most = self.best() * EXTRA_MOST.as_secs_f64();
            let extra = if self.full.is {
                extra.min(most) as u64
            } else {
                0
            };
            let target = self.quantized(self.product(self.cwnd_gain) + extra);
            if self.full.is {
                window.cwnd = (window.cwnd + acked).min(target);
            } else if window.cwnd < target || event.total < INITIAL_WINDOW {
                window.cwnd += acked;
            }
            window.cwnd = window.cwnd.max(LEAST_WINDOW);
        }
        if self.mode == Mode::ProbeRtt {
            window.cwnd = window.cwnd.min(LEAST_WINDOW);
        }
    }

    /// The first round of a recovery sends no more than arrives (`bbr_set_cwnd_to_recover_or_restore`).
    fn follows_losses(&mut self, event: &Event, window: &mut Window) -> bool {
        if event.lost > 0 {
            window.cwnd = window.cwnd.saturating_sub(event.lost).max(1);
        }
        let before = std::mem::replace(&mut self.prior_state, event.state);
        if event.state == State::Recovery && before != State::Recovery {
            self.conserves = true;
            self.round_end = event.total;
            window.cwnd = event.in_flight + event.delivered;
        } else if before >= State::Recovery && event.state < State::Recovery {
            window.cwnd = window.cwnd.max(self.prior_window);
            self.conserves = false;
        }
        if self.conserves {
            window.cwnd = window.cwnd.max(event.in_flight + event.delivered);
        }
        self.conserves
    }
}
