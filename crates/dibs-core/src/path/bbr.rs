//! Congestion control by model: bottleneck bandwidth and round-trip propagation time (BBR,
//! draft-ietf-ccwg-bbr), reduced to what a path of ours needs.
//!
//! The rate is the highest delivery rate of the last two probing cycles, the window what that rate
//! has under way, twice. Random loss changes neither. Departures from the draft:
//! - A queue is a sign of congestion: if the least round trip of a round lies well above the
//!   propagation time, the rate becomes what is being delivered, and the queue is drained. If
//!   that does not help, the propagation time has changed and is measured again.
//! - Heavy loss (over 15 % of some dozens of datagrams) does the same, and so do marks of routers (ECN).
//! - Phases and windows allow for clumped reports and late threads by a millisecond or two: with
//!   round trips of 50 us these, not the path, decide how much must be under way.
//! - A probe that finds more bandwidth is followed at once by one twice as strong.

mod loss;
mod min_rtt;
mod queue;
mod round;
mod startup;

use super::ack_aggregation::AckAggregation;
use super::rate::RateSample;
use crate::time::Time;
use core::time::Duration;
use loss::LossRate;
use min_rtt::MinRtt;
use queue::{Queue, Sign};
use round::Round;
use startup::Startup;

const MS: Duration = Duration::from_millis(1);

/// Pacing gain that doubles the rate each round (4 ln 2), and its counterpart to drain.
const STARTUP_GAIN: f64 = 2.77;
const DRAIN_GAIN: f64 = 1.0 / STARTUP_GAIN;

/// Pacing gain after a probe.
const DOWN_GAIN: f64 = 0.75;

/// Part of the rate used otherwise, so that no queue is built by rounding.
const CRUISE_GAIN: f64 = 0.99;

/// Window over what the rate has under way.
const CWND_GAIN: f64 = 2.0;

/// Time for which the window goes on covering the rate when reports are late: their own delay, and
/// threads that wait for a processor.
const SLACK: Duration = Duration::from_millis(2);

/// A phase lasts a round trip and this, so that a sample of the rate can lie within it.
const PHASE_MARGIN: Duration = Duration::from_millis(4);

/// Phases of steady rate between two probes.
const CRUISE_PHASES: u32 = 6;

/// What a probe's queue may come to in time; with the probe's phase it gives the gain.
const PROBE_QUEUE: Duration = Duration::from_millis(6);
const MIN_PROBE: f64 = 0.05;
const MAX_PROBE: f64 = 0.15;

/// A queue that is tolerated, beside a quarter of the propagation time.
const QUEUE_LIMIT: Duration = Duration::from_millis(4);

/// Bytes a second from which on what waits, waits for the hosts: such a path is hardly the limit.
pub(super) const HOSTS_LIMIT: u64 = 500_000_000;

/// Duration of a measurement of the propagation time with little in flight, beside a round.
const PROBE_RTT: Duration = Duration::from_millis(20);

/// What heavy loss leaves of the rate, unless more was delivered.
const LOSS_BETA: f64 = 0.85;

/// Aggregation of reports that the window makes room for at most.
const MAX_AGGREGATION: Duration = Duration::from_millis(8);

const INITIAL_DATAGRAMS: u64 = 10;
const MIN_DATAGRAMS: u64 = 4;
const MAX_CWND: u64 = 64 << 20;

/// Bytes a second below which the rate never falls.
const MIN_RATE: u64 = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Startup,
    Drain,
    Up,
    Down,
    Cruise,
    ProbeRtt,
}

/// What one report says.
#[derive(Debug)]
pub(super) struct AckEvent {
    pub(super) now: Time,
    /// Newly acknowledged.
    pub(super) bytes: u64,
    pub(super) datagrams: u64,
    /// Bytes acknowledged in all, this report included.
    pub(super) delivered: u64,
    pub(super) in_flight: u64,
    pub(super) rtt: Option<Duration>,
    pub(super) rate: Option<RateSample>,
    /// What the sender sends does not fill the path.
    pub(super) app_limited: bool,
    /// Largest datagram and burst of the pacer.
    pub(super) mtu: u64,
    pub(super) quantum: u64,
}

/// The controller.
#[derive(Debug)]
pub(super) struct Bbr {
    phase: Phase,
    phase_since: Time,
    cwnd: u64,
    cwnd_floor: u64,
    /// Bytes a second, without the phase's gain: the best of this and of the last cycle.
    cycle_rates: [u64; 2],
    /// The current cycle has a sample that was not app-limited.
    cycle_full: bool,
    /// Strength of the current or next probe, and the rate before it.
    probe: f64,
    probe_from: u64,
    startup: Startup,
    round: Round,
    min_rtt: MinRtt,
    queue: Queue,
    loss: LossRate,
    aggregation: AckAggregation,
}

impl Bbr {
    pub(super) fn new(now: Time, mtu: u64) -> Self {
        Self {
            phase: Phase::Startup,
            phase_since: now,
            cwnd: INITIAL_DATAGRAMS * mtu,
            cwnd_floor: MIN_DATAGRAMS * mtu,
            cycle_rates: [0; 2],
            cycle_full: false,
            probe: 0.0,
            probe_from: 0,
            startup: Startup::default(),
            round: Round::new(now),
            min_rtt: MinRtt::new(now),
            queue: Queue::new(now),
            loss: LossRate::default(),
            aggregation: AckAggregation::new(now),
        }
    }

    /// Bytes that may be in flight.
    pub(super) fn cwnd(&self) -> u64 {
        match self.phase {
            Phase::ProbeRtt => {
                let half = self.bytes_in(self.min_rtt.get().unwrap_or_default()) / 2;
                half.clamp(self.cwnd_floor, self.cwnd)
            }
            _ => self.cwnd,
        }
    }

    /// The path's rate in bytes a second; zero before the first sample.
    pub(super) fn rate(&self) -> u64 {
        self.cycle_rates[0].max(self.cycle_rates[1])
    }

    /// Round trip of an empty path.
    pub(super) const fn min_rtt(&self) -> Option<Duration> {
        self.min_rtt.get()
    }

    /// Smoothed fraction of datagrams lost.
    pub(super) const fn loss(&self) -> f64 {
        self.loss.smoothed()
    }

    /// The rate to count on. As long as it is to be found, that is more than was delivered: this
    /// measures the sender if there was little to send, and a path that is thought slow for that would be
    /// left with nothing for ever. But it is twice as much at most, beyond the first window, or the
    /// others would be left with nothing.
    pub(super) fn expected_rate(&self, srtt: Duration, mtu: u64) -> u64 {
        let rate = self.rate().max(MIN_RATE);
        let most = self.most_rate(srtt);
        if self.startup.is_over() || rate >= HOSTS_LIMIT {
            return most;
        }
        // The first round trips were perhaps measured while a host was busy with other things.
        let least = self.min_rtt.get().map_or(srtt, |min| min.min(srtt));
        let first = rate_of(INITIAL_DATAGRAMS * mtu, least);
        most.max(first).min((2 * rate).max(first))
    }

    /// What the rate may be: as long as it is to be found, as much as the window lets pass.
    pub(super) fn most_rate(&self, srtt: Duration) -> u64 {
        let least = match self.startup.is_over() {
            true => MIN_RATE,
            false => rate_of(self.cwnd, srtt).max(MIN_RATE),
        };
        self.rate().max(least)
    }

    /// Bytes a second to send at now; `srtt` counts as long as no rate is known.
    pub(super) fn pacing_rate(&self, srtt: Duration) -> u64 {
        let gain = match self.phase {
            Phase::Startup => STARTUP_GAIN,
            Phase::Drain => DRAIN_GAIN,
            // Beside what it adds a probe makes up for random loss, or it would find nothing.
            Phase::Up => 1.0 + self.probe + self.loss().min(0.06),
            Phase::Down => DOWN_GAIN,
            Phase::Cruise | Phase::ProbeRtt => CRUISE_GAIN,
        };
        // As long as the rate is to be found and nothing waits, what was delivered measures the sender: at that rate
        // what it sends next would wait here, and TCP takes that for the end of its start (HyStart).
        let empty = self.min_rtt.get().unwrap_or(srtt);
        let waits = srtt > empty + empty / 4 + MS;
        let rate = match self.rate() {
            rate if rate == 0 || (self.phase == Phase::Startup && !waits) => self.most_rate(srtt),
            rate => rate,
        };
        ((rate as f64 * gain) as u64).max(MIN_RATE)
    }

    /// Another sender has found that the path carries `rate`: begins there if less is known. What
    /// turns out too much makes a queue, and is corrected like any other change.
    pub(super) fn begin_at(&mut self, now: Time, rate: u64) {
        if rate <= self.rate() {
            return;
        }
        self.cycle_rates[0] = rate;
        self.startup.end();
        let window =
            self.bytes_in(self.min_rtt.get().unwrap_or_default().mul_f64(CWND_GAIN) + SLACK);
        self.cwnd = self.cwnd.max(window).min(MAX_CWND);
        self.enter(Phase::Cruise, now);
    }

    /// Datagrams were declared lost, no MTU probes among them.
    pub(super) fn on_lost(&mut self, datagrams: u64) {
        self.loss.on_lost(datagrams);
    }

    /// A router has marked datagrams for congestion.
    pub(super) fn on_marked(&mut self) {
        self.queue.on_marked();
    }

    /// A datagram declared lost was late.
    pub(super) fn on_spurious(&mut self) {
        if let Some([this, last]) = self.loss.on_spurious() {
            self.cycle_rates = [self.cycle_rates[0].max(this), self.cycle_rates[1].max(last)];
        }
    }

    /// Nothing has passed for several round trips. What was lost is no sign of congestion, and what
    /// is known of the path may hold when it comes back.
    pub(super) fn on_outage(&mut self) {
        self.loss.forget_sample();
        self.queue.forget();
        self.round.forget_rtt();
    }

    /// The path works again after an outage.
    pub(super) fn on_recovered(&mut self, now: Time) {
        self.min_rtt.hold(now);
        if self.startup.is_over() {
            self.enter(Phase::Cruise, now);
        }
    }

    pub(super) fn on_ack(&mut self, ev: &AckEvent) {
        self.loss.on_acked(ev.datagrams);
        let round_ended = self.round.on_ack(ev);
        self.update_rate(ev);
        let (rate, round) = (self.rate(), self.round.number());
        self.aggregation.update(ev.now, ev.bytes, rate, round);
        if let Some(rtt) = ev.rtt {
            self.min_rtt.update(ev.now, rtt);
        }
        if round_ended {
            self.on_round(ev);
        }
        self.update_phase(ev);
        self.update_cwnd(ev);
        if round_ended {
            self.round.begin(ev.now);
        }
    }

    fn update_rate(&mut self, ev: &AckEvent) {
        let Some(sample) = ev.rate else { return };
        // What an app-limited sample falls short of says nothing; what it exceeds does.
        if !sample.app_limited || sample.bytes_per_sec > self.rate() {
            self.cycle_rates[0] = self.cycle_rates[0].max(sample.bytes_per_sec);
        }
        self.cycle_full |= !sample.app_limited;
    }

    /// The end of a round: what it says about growth, queue and loss.
    fn on_round(&mut self, ev: &AckEvent) {
        if !self.round.is_app_limited() || self.is_overfull(ev) {
            self.startup.on_round(self.rate());
        }
        let drains = matches!(self.phase, Phase::Drain | Phase::ProbeRtt);
        let queued = self.is_queued(ev);
        match self
            .queue
            .on_round(ev.now, self.round.started(), drains, queued)
        {
            Sign::None => {}
            Sign::Marked => self.on_queue_marked(ev.now),
            Sign::Stands => self.on_queue(ev.now),
        }
        if self.loss.on_round(self.round.number(), self.cycle_rates) {
            self.startup.end();
            let floor = (self.rate() as f64 * LOSS_BETA) as u64;
            self.set_rate(self.round.rate().max(floor));
            self.probe = 0.0;
            self.enter(Phase::Down, ev.now);
        }
    }

    /// Whether the round's round trips show a queue.
    fn is_queued(&self, ev: &AckEvent) -> bool {
        let (least, most) = self.round.rtts();
        let mut excess = least.map_or(Duration::ZERO, |least| self.excess(least));
        // Few datagrams are no queue: they may be late for other reasons.
        let may_overflow =
            self.loss.is_losing() && self.round.flight() >= INITIAL_DATAGRAMS * ev.mtu;
        if self.phase == Phase::Startup && may_overflow {
            // Who sends all that it may now and then overflows the queue, though it empties each time.
            excess = self.excess(most);
        }
        // A sender that does not fill the path has not filled its queue either, unless it was let
        // send at many times the rate; and what has waited while no report came at all has waited
        // for a host, not in a queue.
        excess > self.queue_limit(ev.mtu)
            && excess > 2 * self.round.pause()
            && (!self.round.is_app_limited() || self.phase == Phase::Startup)
    }

    /// True if the path was full although the sender had little in all: so much was under way at once that it waited for
    /// longer than an empty path takes. What was delivered measures the path then. TCP whose window holds it back sends
    /// so, now by one path and now by another.
    fn is_overfull(&self, ev: &AckEvent) -> bool {
        let empty = self.min_rtt.get().unwrap_or_default();
        let excess = self.excess(self.round.rtts().1);
        excess > empty.max(self.queue_limit(ev.mtu))
            && excess > 2 * self.round.pause()
            && self.round.flight() >= INITIAL_DATAGRAMS * ev.mtu
            && !self.round.has_idled()
    }

    /// Time for which a round trip is longer than that of an empty path.
    fn excess(&self, rtt: Duration) -> Duration {
        rtt.saturating_sub(self.min_rtt.get().unwrap_or_default())
    }

    fn set_rate(&mut self, rate: u64) {
        self.cycle_rates = [rate.min(self.rate()).max(MIN_RATE), 0];
    }

    fn update_phase(&mut self, ev: &AckEvent) {
        let now = ev.now;
        let in_phase = now.since(self.phase_since);
        let phase_len = self.min_rtt.get().unwrap_or_default() + PHASE_MARGIN;
        match self.phase {
            Phase::Startup => {
                if self.startup.is_over() {
                    self.enter(Phase::Drain, now);
                }
            }
            Phase::Drain => {
                if ev.in_flight <= self.under_way(ev) || in_phase > 8 * phase_len {
                    self.queue.on_drained(now);
                    self.enter(Phase::Cruise, now);
                }
            }
            Phase::Up => {
                if in_phase >= phase_len {
                    self.enter(Phase::Down, now);
                }
            }
            Phase::Down => {
                let drained = ev.in_flight <= self.under_way(ev) && in_phase >= PHASE_MARGIN;
                if self.probe_succeeded() {
                    self.start_probe(2.0 * self.probe, now);
                } else if drained || in_phase >= 2 * phase_len {
                    self.enter(Phase::Cruise, now);
                }
            }
            Phase::Cruise => {
                // What a probe has found shows a round trip later.
                if in_phase < 2 * phase_len && self.probe_succeeded() {
                    self.start_probe(2.0 * self.probe, now);
                } else if in_phase >= CRUISE_PHASES * phase_len {
                    if self.cycle_full {
                        self.cycle_rates = [0, self.cycle_rates[0]];
                        self.cycle_full = false;
                    }
                    let gain = PROBE_QUEUE.as_secs_f64() / phase_len.as_secs_f64();
                    self.start_probe(gain.clamp(MIN_PROBE, MAX_PROBE), now);
                }
            }
            Phase::ProbeRtt => {
                if in_phase >= phase_len.max(PROBE_RTT) {
                    self.end_probe_rtt(ev);
                }
            }
        }
        if self.startup.is_over() && self.phase != Phase::ProbeRtt && self.min_rtt.is_old(now) {
            if !ev.app_limited {
                self.enter_probe_rtt(now);
            } else if let Some(rtt) = ev.rtt {
                // Too little is sent to make a queue: any sample will do.
                self.min_rtt.set(now, rtt);
            }
        }
    }

    fn enter(&mut self, phase: Phase, now: Time) {
        self.phase = phase;
        self.phase_since = now;
    }

    fn start_probe(&mut self, strength: f64, now: Time) {
        self.probe = strength.min(1.0);
        self.probe_from = self.rate();
        self.enter(Phase::Up, now);
    }

    /// The rate has grown by half of what the last probe tried.
    fn probe_succeeded(&self) -> bool {
        self.probe > 0.0 && self.rate() as f64 > self.probe_from as f64 * (1.0 + self.probe / 2.0)
    }

    fn enter_probe_rtt(&mut self, now: Time) {
        self.min_rtt.begin_probe(self.round.number());
        self.enter(Phase::ProbeRtt, now);
    }

    /// Takes what the measurement of the propagation time gave, once it has gone on for rounds enough.
    fn end_probe_rtt(&mut self, ev: &AckEvent) {
        let Some(measured) = self.min_rtt.probed(self.round.number()) else {
            return;
        };
        let limit = self.queue_limit(ev.mtu);
        if self.min_rtt.get().is_some_and(|old| measured > old + limit) {
            // There was no queue: the path has become longer, and what was measured
            // while it was thought to be short is worth nothing.
            self.startup = Startup::default();
        }
        self.min_rtt.set(ev.now, measured);
        let phase = match self.startup.is_over() {
            true => Phase::Cruise,
            false => Phase::Startup,
        };
        self.enter(phase, ev.now);
    }

    /// A queue stands.
    fn on_queue(&mut self, now: Time) {
        if !self.startup.is_over() {
            self.startup.end();
        } else if self.queue.stands_again() {
            self.enter_probe_rtt(now);
        } else {
            if self.round.rate() > 0 {
                self.set_rate(self.round.rate());
            }
            self.enter(Phase::Drain, now);
        }
    }

    /// A router says that its queue stands, whatever the round trips show: once a round at most.
    fn on_queue_marked(&mut self, now: Time) {
        if !self.startup.is_over() {
            self.startup.end();
            return;
        }
        if self.round.rate() > 0 && !self.round.is_app_limited() {
            self.set_rate(self.round.rate());
        }
        self.probe = 0.0;
        self.enter(Phase::Drain, now);
    }

    /// A queue, in time, that is too long to be chance.
    fn queue_limit(&self, mtu: u64) -> Duration {
        self.min_rtt.get().unwrap_or_default() / 4 + QUEUE_LIMIT + self.time_of(4 * mtu)
    }

    /// Time that `bytes` take at the path's rate.
    fn time_of(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.rate().max(MIN_RATE) as f64)
    }

    fn bytes_in(&self, time: Duration) -> u64 {
        (self.rate() as f64 * time.as_secs_f64()) as u64
    }

    /// What the rate has under way when there is no queue: the pipe, and what waits for a report.
    fn under_way(&self, ev: &AckEvent) -> u64 {
        self.bytes_in(self.min_rtt.get().unwrap_or_default() + MS) + ev.quantum / 2
    }

    fn update_cwnd(&mut self, ev: &AckEvent) {
        let floor = MIN_DATAGRAMS * ev.mtu;
        let target = match self.min_rtt.get() {
            Some(min_rtt) if self.rate() > 0 => {
                self.bytes_in(min_rtt.mul_f64(CWND_GAIN) + SLACK)
                    + self.aggregation.max().min(self.bytes_in(MAX_AGGREGATION))
                    + 3 * ev.quantum
            }
            _ => INITIAL_DATAGRAMS * ev.mtu,
        };
        let grown = self.cwnd + ev.bytes;
        if self.startup.is_over() {
            self.cwnd = grown.min(target);
        } else if self.cwnd < target {
            self.cwnd = grown;
        }
        self.cwnd_floor = floor;
        self.cwnd = self.cwnd.clamp(floor, MAX_CWND);
    }
}

/// Bytes a second of a window each round trip.
fn rate_of(window: u64, rtt: Duration) -> u64 {
    (window as f64 / rtt.max(MS / 10).as_secs_f64()) as u64
}
