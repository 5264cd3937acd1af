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

use super::clump::Clump;
use super::rate::RateSample;
use crate::time::Time;
use core::time::Duration;

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

/// Rounds without growth by a quarter that end the start.
const STARTUP_ROUNDS: u32 = 3;

/// A queue that is tolerated, beside a quarter of the propagation time, and for how long a longer
/// one is (and for at least a round): a pause of a busy host looks the same.
const QUEUE_LIMIT: Duration = Duration::from_millis(4);
const QUEUE_TIME: Duration = Duration::from_millis(20);

/// Bytes a second from which on what waits, waits for the hosts: such a path is hardly the limit.
pub(super) const HOSTS_LIMIT: u64 = 500_000_000;

/// Age at which the propagation time is measured again.
const MIN_RTT_AGE: Duration = Duration::from_secs(10);

/// Duration of that measurement with little in flight, beside a round.
const PROBE_RTT: Duration = Duration::from_millis(20);

/// Loss that is heavy, in a sample of at least so many datagrams.
const HEAVY_LOSS: f64 = 0.15;
const LOSS_SAMPLE: u64 = 128;

/// What heavy loss leaves of the rate, unless more was delivered, and rounds until it does so again.
const LOSS_BETA: f64 = 0.85;
const LOSS_ROUNDS: u64 = 4;

/// Clumping of reports that the window makes room for at most.
const MAX_CLUMP: Duration = Duration::from_millis(8);

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
    min_rtt: Option<Duration>,
    min_rtt_at: Time,
    /// The measurement under way: its first round and least round trip.
    probe_rtt: (u64, Duration),

    /// A round ends when what is sent after this much was delivered is acknowledged.
    round_end: u64,
    rounds: u64,
    round_started: Time,
    round_rate: u64,
    round_app_limited: bool,
    /// Its least and its greatest round trip.
    round_rtt: Duration,
    round_most: Duration,
    /// Most bytes in flight.
    round_flight: u64,
    /// Longest time between two reports, as long as there was something to report.
    round_pause: Duration,
    reported_at: Time,
    idle: bool,

    /// Startup has found the path's rate.
    full: bool,
    full_rate: u64,
    full_rounds: u32,

    /// Strength of the current or next probe, and the rate before it.
    probe: f64,
    probe_from: u64,

    /// Since when each round has had a queue, and how often that had a consequence.
    queued_since: Option<Time>,
    queue_strikes: u32,
    drained_at: Time,

    /// Routers have marked datagrams in this round (ECN).
    marked: bool,

    lost: u64,
    acked: u64,
    loss_round: u64,
    loss: f64,
    /// Round of the last reaction to heavy loss.
    backoff_round: u64,
    /// The rates before the last reaction to heavy loss.
    undo: Option<[u64; 2]>,

    clump: Clump,
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
            min_rtt: None,
            min_rtt_at: now,
            probe_rtt: (0, Duration::MAX),
            round_end: 0,
            rounds: 0,
            round_started: now,
            round_rate: 0,
            round_app_limited: false,
            round_rtt: Duration::MAX,
            round_most: Duration::ZERO,
            round_flight: 0,
            round_pause: Duration::ZERO,
            reported_at: now,
            idle: true,
            full: false,
            full_rate: 0,
            full_rounds: 0,
            probe: 0.0,
            probe_from: 0,
            queued_since: None,
            queue_strikes: 0,
            drained_at: now,
            marked: false,
            lost: 0,
            acked: 0,
            loss_round: 0,
            loss: 0.0,
            backoff_round: 0,
            undo: None,
            clump: Clump::new(now),
        }
    }

    /// Bytes that may be in flight.
    pub(super) fn cwnd(&self) -> u64 {
        match self.phase {
            Phase::ProbeRtt => {
                let half = self.bytes_in(self.min_rtt.unwrap_or_default()) / 2;
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
        self.min_rtt
    }

    /// Smoothed fraction of datagrams lost.
    pub(super) const fn loss(&self) -> f64 {
        self.loss
    }

    /// The rate to count on. As long as it is to be found, that is more than was delivered: this
    /// measures the sender if there was little to send, and a path that is thought slow for that would be
    /// left with nothing for ever. But it is twice as much at most, beyond the first window, or the
    /// others would be left with nothing.
    pub(super) fn expected_rate(&self, srtt: Duration, mtu: u64) -> u64 {
        let rate = self.rate().max(MIN_RATE);
        let most = self.most_rate(srtt);
        if self.full || rate >= HOSTS_LIMIT {
            return most;
        }
        // The first round trips were perhaps measured while a host was busy with other things.
        let least = self.min_rtt.map_or(srtt, |min| min.min(srtt));
        let first = rate_of(INITIAL_DATAGRAMS * mtu, least);
        most.max(first).min((2 * rate).max(first))
    }

    /// What the rate may be: as long as it is to be found, as much as the window lets pass.
    pub(super) fn most_rate(&self, srtt: Duration) -> u64 {
        let least = match self.full {
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
            Phase::Up => 1.0 + self.probe + self.loss.min(0.06),
            Phase::Down => DOWN_GAIN,
            Phase::Cruise | Phase::ProbeRtt => CRUISE_GAIN,
        };
        // As long as the rate is to be found and nothing waits, what was delivered measures the sender: at that rate
        // what it sends next would wait here, and TCP takes that for the end of its start (HyStart).
        let empty = self.min_rtt.unwrap_or(srtt);
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
        self.full = true;
        let window = self.bytes_in(self.min_rtt.unwrap_or_default().mul_f64(CWND_GAIN) + SLACK);
        self.cwnd = self.cwnd.max(window).min(MAX_CWND);
        self.enter(Phase::Cruise, now);
    }

    /// Datagrams were declared lost, no MTU probes among them.
    pub(super) fn on_lost(&mut self, datagrams: u64) {
        self.lost += datagrams;
    }

    /// A router has marked datagrams for congestion.
    pub(super) fn on_marked(&mut self) {
        self.marked = true;
    }

    /// A datagram declared lost was late.
    pub(super) fn on_spurious(&mut self) {
        self.lost = self.lost.saturating_sub(1);
        if let Some([this, last]) = self.undo.take() {
            self.cycle_rates = [self.cycle_rates[0].max(this), self.cycle_rates[1].max(last)];
        }
    }

    /// Nothing has passed for several round trips. What was lost is no sign of congestion, and what
    /// is known of the path may hold when it comes back.
    pub(super) fn on_outage(&mut self) {
        self.lost = 0;
        self.acked = 0;
        self.queued_since = None;
        self.queue_strikes = 0;
        self.round_rtt = Duration::MAX;
        self.round_most = Duration::ZERO;
    }

    /// The path works again after an outage.
    pub(super) fn on_recovered(&mut self, now: Time) {
        self.min_rtt_at = now;
        if self.full {
            self.enter(Phase::Cruise, now);
        }
    }

    pub(super) fn on_ack(&mut self, ev: &AckEvent) {
        self.acked += ev.datagrams;
        if !self.idle {
            self.round_pause = self.round_pause.max(ev.now.since(self.reported_at));
        }
        self.idle = ev.in_flight == 0;
        self.round_flight = self.round_flight.max(ev.in_flight + ev.bytes);
        self.reported_at = ev.now;
        let round_ended = self.update_round(ev);
        self.update_rate(ev);
        self.clump
            .update(ev.now, ev.bytes, self.rate(), self.rounds);
        self.update_min_rtt(ev);
        if round_ended {
            self.on_round(ev);
        }
        self.update_phase(ev);
        self.update_cwnd(ev);
        if round_ended {
            self.round_started = ev.now;
            self.round_rate = 0;
            self.round_app_limited = false;
            self.round_rtt = Duration::MAX;
            self.round_most = Duration::ZERO;
            self.round_flight = 0;
            self.round_pause = Duration::ZERO;
        }
    }

    fn update_round(&mut self, ev: &AckEvent) -> bool {
        let ended = ev.rate.is_some_and(|r| r.prior_delivered >= self.round_end);
        if ended {
            self.round_end = ev.delivered;
            self.rounds += 1;
        }
        ended
    }

    fn update_rate(&mut self, ev: &AckEvent) {
        let Some(sample) = ev.rate else { return };
        self.round_rate = self.round_rate.max(sample.bytes_per_sec);
        self.round_app_limited |= sample.app_limited;
        // What an app-limited sample falls short of says nothing; what it exceeds does.
        if !sample.app_limited || sample.bytes_per_sec > self.rate() {
            self.cycle_rates[0] = self.cycle_rates[0].max(sample.bytes_per_sec);
        }
        self.cycle_full |= !sample.app_limited;
    }

    fn update_min_rtt(&mut self, ev: &AckEvent) {
        let Some(rtt) = ev.rtt else { return };
        self.round_rtt = self.round_rtt.min(rtt);
        self.round_most = self.round_most.max(rtt);
        self.probe_rtt.1 = self.probe_rtt.1.min(rtt);
        match self.min_rtt {
            Some(min) if rtt >= min => {
                // Close to it: it still holds.
                if rtt <= min + min / 16 + MS / 20 {
                    self.min_rtt_at = ev.now;
                }
            }
            _ => {
                self.min_rtt = Some(rtt);
                self.min_rtt_at = ev.now;
            }
        }
    }

    /// The end of a round: what it says about growth, queue and loss.
    fn on_round(&mut self, ev: &AckEvent) {
        if !self.full && !self.round_app_limited {
            self.check_growth();
        }
        let over = |rtt: Duration| rtt.saturating_sub(self.min_rtt.unwrap_or_default());
        let mut excess = match self.round_rtt {
            Duration::MAX => Duration::ZERO,
            least => over(least),
        };
        // Few datagrams are no queue: they may be late for other reasons.
        let may_overflow =
            (self.lost > 0 || self.loss > 0.0) && self.round_flight >= INITIAL_DATAGRAMS * ev.mtu;
        if self.phase == Phase::Startup && may_overflow {
            // Who sends all that it may now and then overflows the queue, though it empties each time.
            excess = over(self.round_most);
        }
        // A sender that does not fill the path has not filled its queue either, unless it was let
        // send at many times the rate; and what has waited while no report came at all has waited
        // for a host, not in a queue.
        let queued = excess > self.queue_limit(ev.mtu)
            && excess > 2 * self.round_pause
            && (!self.round_app_limited || self.phase == Phase::Startup);
        let marked = core::mem::take(&mut self.marked);
        if self.round_started < self.drained_at
            || matches!(self.phase, Phase::Drain | Phase::ProbeRtt)
        {
            // The queue is on its way out.
            self.queued_since = None;
        } else if marked {
            self.on_queue_marked(ev.now);
        } else if !queued {
            self.queued_since = None;
            self.queue_strikes = 0;
        } else {
            let since = *self.queued_since.get_or_insert(self.round_started);
            if ev.now.since(since) >= QUEUE_TIME {
                self.on_queue(ev.now);
            }
        }
        self.check_loss(ev);
    }

    fn check_growth(&mut self) {
        if self.rate() as f64 >= 1.25 * self.full_rate as f64 {
            self.full_rate = self.rate();
            self.full_rounds = 0;
        } else {
            self.full_rounds += 1;
            self.full = self.full_rounds >= STARTUP_ROUNDS;
        }
    }

    fn check_loss(&mut self, ev: &AckEvent) {
        let total = self.lost + self.acked;
        if total < LOSS_SAMPLE || self.rounds == self.loss_round {
            return;
        }
        let loss = self.lost as f64 / total as f64;
        self.loss += (loss - self.loss) / 8.0;
        self.lost = 0;
        self.acked = 0;
        self.loss_round = self.rounds;
        if loss > HEAVY_LOSS && self.rounds >= self.backoff_round + LOSS_ROUNDS {
            self.backoff_round = self.rounds;
            self.undo = Some(self.cycle_rates);
            self.full = true;
            let floor = (self.rate() as f64 * LOSS_BETA) as u64;
            self.set_rate(self.round_rate.max(floor));
            self.probe = 0.0;
            self.enter(Phase::Down, ev.now);
        }
    }

    fn set_rate(&mut self, rate: u64) {
        self.cycle_rates = [rate.min(self.rate()).max(MIN_RATE), 0];
    }

    fn update_phase(&mut self, ev: &AckEvent) {
        let now = ev.now;
        let in_phase = now.since(self.phase_since);
        let phase_len = self.min_rtt.unwrap_or_default() + PHASE_MARGIN;
        match self.phase {
            Phase::Startup => {
                if self.full {
                    self.enter(Phase::Drain, now);
                }
            }
            Phase::Drain => {
                if ev.in_flight <= self.under_way(ev) || in_phase > 8 * phase_len {
                    self.drained_at = now;
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
                let (round, min) = self.probe_rtt;
                // The first round still sees the queue, the second what is left of it.
                if in_phase >= phase_len.max(PROBE_RTT) && self.rounds >= round + 2 {
                    if self
                        .min_rtt
                        .is_some_and(|old| min > old + self.queue_limit(ev.mtu))
                    {
                        // There was no queue: the path has become longer, and what was measured
                        // while it was thought to be short is worth nothing.
                        self.full = false;
                        self.full_rate = 0;
                        self.full_rounds = 0;
                    }
                    self.min_rtt = Some(min);
                    self.min_rtt_at = now;
                    self.enter(
                        if self.full {
                            Phase::Cruise
                        } else {
                            Phase::Startup
                        },
                        now,
                    );
                }
            }
        }
        if self.full && self.phase != Phase::ProbeRtt && now.since(self.min_rtt_at) > MIN_RTT_AGE {
            if !ev.app_limited {
                self.enter_probe_rtt(now);
            } else if ev.rtt.is_some() {
                // Too little is sent to make a queue: any sample will do.
                self.min_rtt = ev.rtt;
                self.min_rtt_at = now;
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
        self.probe_rtt = (self.rounds, Duration::MAX);
        self.enter(Phase::ProbeRtt, now);
    }

    /// A queue stands.
    fn on_queue(&mut self, now: Time) {
        self.queued_since = None;
        if !self.full {
            self.full = true;
            return;
        }
        self.queue_strikes += 1;
        if self.queue_strikes > 1 {
            self.queue_strikes = 0;
            self.enter_probe_rtt(now);
            return;
        }
        if self.round_rate > 0 {
            self.set_rate(self.round_rate);
        }
        self.enter(Phase::Drain, now);
    }

    /// A router says that its queue stands, whatever the round trips show: once a round at most.
    fn on_queue_marked(&mut self, now: Time) {
        self.queued_since = None;
        if !self.full {
            self.full = true;
            return;
        }
        if self.round_rate > 0 && !self.round_app_limited {
            self.set_rate(self.round_rate);
        }
        self.probe = 0.0;
        self.enter(Phase::Drain, now);
    }

    /// A queue, in time, that is too long to be chance.
    fn queue_limit(&self, mtu: u64) -> Duration {
        self.min_rtt.unwrap_or_default() / 4 + QUEUE_LIMIT + self.time_of(4 * mtu)
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
        self.bytes_in(self.min_rtt.unwrap_or_default() + MS) + ev.quantum / 2
    }

    fn update_cwnd(&mut self, ev: &AckEvent) {
        let floor = MIN_DATAGRAMS * ev.mtu;
        let target = match self.min_rtt {
            Some(min_rtt) if self.rate() > 0 => {
                self.bytes_in(min_rtt.mul_f64(CWND_GAIN) + SLACK)
                    + self.clump.max().min(self.bytes_in(MAX_CLUMP))
                    + 3 * ev.quantum
            }
            _ => INITIAL_DATAGRAMS * ev.mtu,
        };
        let grown = self.cwnd + ev.bytes;
        if self.full {
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
