//! One path: packet numbers, acknowledgements, loss detection, congestion control, MTU.
//!
//! Pure and synchronous. The owner drives a [`Path`] like this:
//! - Before sending, ask [`Path::budget`]; build a datagram with number [`Path::next_seq`]; report
//!   it with [`Path::on_sent`]. If the budget is zero, [`Path::blocked_until`] says what to wait for.
//! - When a datagram's content has been taken, call [`Path::on_received`]; when
//!   [`Path::next_ack_time`] has come, or when a datagram goes that way anyhow,
//!   [`Path::encode_ack`].
//! - Acknowledgements from the peer go to [`Path::on_ack`], which returns the tokens of what
//!   arrived and of what is lost. Each token of an ack-eliciting datagram is returned once.
//! - When [`Path::poll_timeout`] has come, first take in what the socket holds, then call
//!   [`Path::on_timeout`]: an answer that waits in the socket must not count as silence.
//! - Whenever the path is served, send the probe that [`Path::poll_mtu_probe`] asks for.

mod ack;
mod ack_aggregation;
mod acknowledged;
mod bbr;
mod ecn;
mod loss;
mod mtud;
mod pacing;
mod ranges;
mod rate;
mod received;
mod rtt;
mod sent;
mod state;
#[cfg(test)]
mod tests;

pub use ack::{AckDecodeError, AckError, AckFrame, MAX_ACK_RANGES};
pub use mtud::BASE as MIN_MTU;
pub use ranges::SeqRange;
pub use state::PathState;

use crate::time::Time;
use bbr::Bbr;
use core::num::NonZeroU64;
use core::time::Duration;
use ecn::Ecn;
use loss::LossDetector;
use mtud::Mtud;
use pacing::Pacer;
use ranges::Ranges;
use rate::DeliveryRate;
use received::{MAX_ACK_DELAY, Received};
use rtt::Rtt;
use sent::{Fate, Sent, SentRing};
use state::{Alarm, Liveness};

/// Silence of a path with something in flight that is more than the pause of a busy peer.
const LEAST_SILENCE: Duration = Duration::from_millis(25);

/// A path that was heard of within it need not prove that it works.
const LEAST_PATIENCE: Duration = Duration::from_millis(10);

/// Limits of a path that the outside world fixes.
#[derive(Clone, Copy, Debug)]
pub struct PathConfig {
    /// The longest datagram (UDP payload, bytes) that the local interface takes.
    pub longest: u16,
}

/// Obstacle that keeps a path from sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    /// Nothing.
    No,
    /// The congestion window: until an acknowledgement comes.
    Window,
    /// The pacer: until then.
    Pacing(Time),
    /// The path is not active.
    Inactive,
}

/// Action that [`Path::on_timeout`] asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeoutAction {
    /// Nothing.
    Nothing,
    /// Send an ack-eliciting datagram now, whatever the budget.
    Probe,
}

/// Statistics of a path. Bytes are of UDP payload.
#[derive(Clone, Copy, Debug)]
pub struct PathStats {
    /// How the path stands.
    pub state: PathState,
    /// Smoothed round-trip time.
    pub srtt: Duration,
    /// Its mean deviation.
    pub rttvar: Duration,
    /// Least round trip of the last seconds.
    pub min_rtt: Duration,
    /// Smoothed fraction of datagrams lost.
    pub loss: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams received and taken.
    pub received: u64,
    /// Datagrams declared lost.
    pub lost: u64,
    /// Datagrams declared lost that arrived after all.
    pub spurious: u64,
    /// Datagrams that a router has marked for congestion (ECN), by the peer's count.
    pub marked: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes acknowledged by the peer.
    pub bytes_acked: u64,
    /// Bytes that may be in flight.
    pub cwnd: u64,
    /// Bytes in flight.
    pub in_flight: u64,
    /// Bytes a second that the pacer lets go.
    pub pacing_rate: u64,
    /// Bytes a second that the path delivers; zero as long as unknown.
    pub delivery_rate: u64,
    /// Probe timeouts in all.
    pub ptos: u64,
    /// Largest UDP payload that passes.
    pub mtu: u16,
}

/// One path to the peer.
#[derive(Debug)]
pub struct Path {
    sent: SentRing,
    /// Numbers known to be acknowledged, so that ranges told again cost nothing.
    acked: Ranges,
    rtt: Rtt,
    loss: LossDetector,
    rate: DeliveryRate,
    bbr: Bbr,
    pacer: Pacer,
    mtud: Mtud,
    received: Received,
    ecn: Ecn,
    liveness: Liveness,
    /// Bytes and datagrams that wait for acknowledgement.
    in_flight: u64,
    waiting: u64,
    /// Bytes in flight, smoothed as the round trip is.
    usual_flight: u64,
    /// The last time at which the window was seen to let nothing through: capacity that passed until then was not left unused.
    held_until: Time,
    last: Last,
    /// Bytes a second that the user lets it have.
    rate_limit: u64,
    /// This host slept until then.
    slept_until: Option<Time>,
    count: Counters,
}

/// When something happened last, or the path began.
#[derive(Debug)]
struct Last {
    /// Something went either way.
    busy: Time,
    /// Something did that was more than what keeps the path alive.
    used: Time,
    /// Something came of the peer's.
    heard: Time,
}

#[derive(Debug, Default)]
struct Counters {
    sent: u64,
    bytes_sent: u64,
    lost: u64,
    spurious: u64,
    ptos: u64,
}

impl Path {
    /// A path that has not been validated.
    pub fn new(now: Time, config: PathConfig) -> Self {
        let mtud = Mtud::new(config.longest);
        let mtu = u64::from(mtud.current());
        let rtt = Rtt::new();
        let bbr = Bbr::new(now, mtu);
        let pacer = Pacer::new(now, bbr.pacing_rate(rtt.smoothed()), mtu);
        Self {
            sent: SentRing::new(),
            acked: Ranges::with_capacity(2 * MAX_ACK_RANGES),
            rtt,
            loss: LossDetector::new(),
            rate: DeliveryRate::new(now),
            bbr,
            pacer,
            mtud,
            received: Received::new(now),
            ecn: Ecn::default(),
            liveness: Liveness::new(now),
            in_flight: 0,
            waiting: 0,
            usual_flight: 0,
            held_until: now,
            last: Last {
                busy: now,
                used: now,
                heard: now,
            },
            rate_limit: u64::MAX,
            slept_until: None,
            count: Counters::default(),
        }
    }

    /// The same with `seq` as the number of its first datagram: a path id was used before, and a
    /// nonce serves once.
    pub const fn starting_at(mut self, seq: u64) -> Self {
        self.sent.start_at(seq);
        self
    }

    /// The peer has answered a challenge on this path, `rtt` after it was sent.
    pub fn on_validated(&mut self, now: Time, rtt: Duration) {
        if !self.rtt.is_measured() {
            self.rtt.update(rtt, Duration::ZERO);
            self.update_pacing();
        }
        self.revive(now);
    }

    /// How the path stands.
    pub const fn state(&self) -> PathState {
        self.liveness.state()
    }

    /// Since when an answer of the peer is waited for.
    pub const fn silent_since(&self) -> Time {
        self.liveness.silent_since()
    }

    /// True if a probe timeout has passed since the peer answered last: the path may be broken.
    pub const fn is_unanswered(&self) -> bool {
        self.liveness.is_unanswered()
    }

    /// The smoothed round trip.
    pub fn srtt(&self) -> Duration {
        self.rtt.smoothed()
    }

    /// Bytes that may be in flight.
    pub fn cwnd(&self) -> u64 {
        self.bbr.cwnd()
    }

    /// Bytes in flight.
    pub const fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Lets go so many bytes a second at most, whatever the path would carry.
    pub fn set_rate_limit(&mut self, limit: Option<NonZeroU64>) {
        self.rate_limit = limit.map_or(u64::MAX, NonZeroU64::get);
        self.update_pacing();
    }

    /// So many probes go at one interval once the path stops answering; none: as long as usual.
    pub fn set_probes(&mut self, probes: Option<u32>) {
        self.liveness.set_probes(probes);
    }

    /// Largest UDP payload that passes.
    pub const fn mtu(&self) -> u16 {
        self.mtud.current()
    }

    /// The number of the datagram sent next.
    pub const fn next_seq(&self) -> u64 {
        self.sent.next()
    }

    /// Bytes that window and pacer let go now; zero if blocked.
    ///
    /// `wanted` is what the caller has to send. The pacer lets go in bursts: the answer is zero
    /// until there is credit for all of it or for a burst, so that each call is worth a send.
    pub fn budget(&self, now: Time, wanted: usize) -> usize {
        if self.blocked_until(now, wanted) != Blocked::No {
            return 0;
        }
        self.pacer.credit(now).min(self.window()) as usize
    }

    /// Obstacle that keeps the path from sending `wanted` bytes, or a burst of them.
    pub fn blocked_until(&self, now: Time, wanted: usize) -> Blocked {
        if !self.liveness.is_active() {
            return Blocked::Inactive;
        }
        if self.window() < u64::from(self.mtu()) {
            return Blocked::Window;
        }
        let burst = (wanted as u64).min(self.pacer.quantum());
        let ready = self.pacer.ready_at(burst);
        if ready > now {
            Blocked::Pacing(ready)
        } else {
            Blocked::No
        }
    }

    fn window(&self) -> u64 {
        self.bbr.cwnd().saturating_sub(self.in_flight)
    }

    /// True if datagrams are sent as capable of ECN: ECT(0) in their IP header. A path that has to show first that it
    /// works sends none.
    pub fn is_ect(&self) -> bool {
        self.liveness.is_active() && !self.is_unanswered() && self.ecn.is_sent()
    }

    /// Bytes of one burst: what is best sent with one call.
    pub const fn quantum(&self) -> usize {
        self.pacer.quantum() as usize
    }

    /// Bytes that one flow may send before it is another one's turn.
    pub const fn turn(&self) -> usize {
        self.pacer.turn() as usize
    }

    /// Bytes a second that the path is expected to deliver.
    pub fn expected_rate(&self) -> u64 {
        self.bbr
            .expected_rate(self.rtt.smoothed(), self.mtu().into())
            .min(self.rate_limit)
    }

    /// Bytes a second that it may turn out to deliver.
    pub fn most_rate(&self) -> u64 {
        self.bbr.most_rate(self.rtt.smoothed()).min(self.rate_limit)
    }

    /// The least round trip of late, as far as one was measured.
    pub fn min_rtt(&self) -> Duration {
        self.bbr.min_rtt().unwrap_or_default()
    }

    /// When `bytes` more would be at the peer if they were sent as soon as the path lets them go:
    /// behind what is in flight beyond a round trip, at the path's rate, and not before what the round
    /// trip shows to wait. The pacer's gain says nothing about that.
    pub fn predict_delivery(&self, now: Time, bytes: usize) -> Time {
        let rate = self.expected_rate();
        let min_rtt = self.bbr.min_rtt().unwrap_or_default();
        let under_way = Duration::from_secs_f64(self.in_flight as f64 / rate as f64);
        let own = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let mut wait = under_way.saturating_sub(min_rtt);
        if rate < bbr::HOSTS_LIMIT {
            // The rate is the best of some time, perhaps of a burst that a token bucket let pass, and a
            // path that is thought too much of would get all, and the others little. A round trip shows
            // what waits, whatever is thought.
            let of_usual = self.in_flight as f64 / self.usual_flight.max(1) as f64;
            let queue = self.rtt.smoothed().saturating_sub(min_rtt);
            wait = wait.max(queue.mul_f64(of_usual.min(1.0)));
        }
        let sent = now + wait + own;
        sent.max(self.pacer.ready_at(bytes as u64)) + min_rtt / 2
    }

    /// Records a datagram as sent and returns its number, which [`Self::next_seq`] told before.
    ///
    /// `token` comes back when it is acknowledged or lost; zero is of what carries nothing of a connection's. One
    /// that is not ack-eliciting is neither in flight nor paced, and its token never comes back.
    pub fn on_sent(&mut self, now: Time, bytes: u16, token: u64, ack_eliciting: bool) -> u64 {
        self.record(now, bytes, token, ack_eliciting, false)
    }

    /// Records the probe that [`Self::poll_mtu_probe`] asked for as sent.
    pub fn on_mtu_probe_sent(&mut self, now: Time, bytes: u16) -> u64 {
        self.mtud.on_probe_sent();
        self.record(now, bytes, 0, true, true)
    }

    fn record(&mut self, now: Time, bytes: u16, token: u64, elicits: bool, probe: bool) -> u64 {
        self.count.sent += 1;
        self.count.bytes_sent += u64::from(bytes);
        if self.is_ect() && elicits {
            self.ecn.on_sent(self.next_seq());
        }
        let mut sent = Sent {
            at: now,
            token,
            bytes,
            mtu_probe: probe,
            ..Sent::EMPTY
        };
        let mut rate = None;
        if elicits {
            if self.waiting == 0 {
                self.liveness.on_first_in_flight(now);
            }
            self.last.busy = now;
            if token != 0 {
                self.last.used = now;
            }
            sent.fate = Fate::Waiting;
            self.note_held(now);
            let unused = self.pacer.is_full(now, self.held_until);
            if unused {
                // Capacity has passed unused although nothing was in the way.
                self.rate.on_app_limited(self.in_flight);
            }
            rate = Some(self.rate.on_sent(now, unused && self.waiting == 0));
            self.in_flight += u64::from(bytes);
            self.waiting += 1;
            self.pacer.on_sent(now, u64::from(bytes));
        }
        if self.sent.is_full() {
            self.forget_sent(now);
        }
        self.sent.push(sent, rate)
    }

    /// Takes note that the window is in the way up to now, if it is; to be called before anything opens it.
    fn note_held(&mut self, now: Time) {
        if self.window() < u64::from(self.mtu()) {
            self.held_until = now;
        }
    }

    fn forget_sent(&mut self, now: Time) {
        let patience = 2 * self.rtt.pto(MAX_ACK_DELAY);
        self.sent.forget(now - patience);
    }

    /// Another sender has found that the path carries so many bytes a second.
    pub fn begin_at(&mut self, now: Time, rate: u64) {
        self.bbr.begin_at(now, rate);
        self.update_pacing();
    }

    fn update_pacing(&mut self) {
        let rate = self.bbr.pacing_rate(self.rtt.smoothed());
        self.pacer
            .set_rate(rate.min(self.rate_limit), self.mtu().into());
    }

    fn revive(&mut self, now: Time) {
        if self.liveness.move_to_active(now) {
            self.bbr.on_recovered(now);
        }
    }

    /// Gives up what is in flight, so that it can go another way; appends its tokens to `lost`.
    pub fn abandon(&mut self, lost: &mut Vec<u64>) {
        self.mtud.on_outage();
        self.give_up(lost);
    }

    /// Gives up what is in flight of a path that has not answered for a probe timeout and for [`LEAST_SILENCE`]: another
    /// one may have it. If this one only paused, the peer has it twice; if it takes nothing as long any more, that is
    /// found as always.
    pub fn abandon_unanswered(&mut self, now: Time, lost: &mut Vec<u64>) {
        let silence = now.since(self.liveness.silent_since());
        if self.is_unanswered() && silence >= LEAST_SILENCE && self.waiting > 0 {
            self.mtud.on_given_up();
            if let Some(smallest) = self.give_up(lost) {
                self.mtud.on_lost(now, smallest);
            }
        }
    }

    /// Returns the least length of what was given up, MTU probes aside.
    fn give_up(&mut self, lost: &mut Vec<u64>) -> Option<u16> {
        let mut smallest = None;
        self.bbr.on_outage();
        for seq in self.sent.base()..self.sent.next() {
            if let Some(sent) = self.sent.get_mut(seq)
                && sent.fate == Fate::Waiting
            {
                sent.fate = Fate::Lost;
                if !sent.mtu_probe {
                    self.count.lost += 1;
                    lost.push(sent.token);
                    smallest =
                        Some(smallest.map_or(sent.bytes, |least: u16| least.min(sent.bytes)));
                }
            }
        }
        self.in_flight = 0;
        self.waiting = 0;
        smallest
    }

    /// A datagram with this number has come in and its content was taken.
    pub fn on_received(&mut self, now: Time, seq: u64, ack_eliciting: bool) {
        self.last.heard = now;
        self.last.busy = now;
        self.received.on_received(now, seq, ack_eliciting);
    }

    /// The peer has sent something by it that was more than what keeps the path alive.
    pub fn on_used(&mut self, now: Time) {
        self.last.used = now;
    }

    /// A datagram of the peer's that was taken had been marked for congestion (CE).
    pub fn on_marked(&mut self) {
        self.ecn.on_marked();
    }

    /// True if an acknowledgement should go now.
    pub fn ack_due(&self, now: Time) -> bool {
        self.received.due_at().is_some_and(|t| t <= now)
    }

    /// When an acknowledgement should go; `None` if there is nothing to acknowledge.
    pub fn next_ack_time(&self) -> Option<Time> {
        self.received.due_at()
    }

    /// Appends an acknowledgement of at most `max_len` bytes to `out`; false, and nothing appended,
    /// if there is nothing new to acknowledge or no room.
    pub fn encode_ack(&mut self, now: Time, max_len: usize, out: &mut Vec<u8>) -> bool {
        let marked = self.ecn.received();
        self.received.report(now, marked, max_len, out)
    }

    /// When [`Self::on_timeout`] or [`Self::poll_mtu_probe`] is to be called.
    pub fn poll_timeout(&self) -> Option<Time> {
        let mtu = self.mtud.due_at().filter(|_| self.liveness.is_active());
        [self.loss.due_at(), self.alarm_at(), mtu]
            .into_iter()
            .flatten()
            .min()
    }

    fn alarm_at(&self) -> Option<Time> {
        self.liveness
            .due_at(&self.rtt, MAX_ACK_DELAY, self.waiting > 0)
    }

    /// Does what is due; appends the tokens of what is lost to `lost`.
    pub fn on_timeout(&mut self, now: Time, lost: &mut Vec<u64>) -> TimeoutAction {
        if self.loss.due_at().is_some_and(|t| t <= now) {
            self.detect_loss(now, lost);
        }
        if self.alarm_at().is_none_or(|t| t > now) {
            return TimeoutAction::Nothing;
        }
        self.count.ptos += 1;
        self.ecn.on_silence(self.next_seq());
        if self.liveness.on_alarm(now) == Alarm::ProbeAndAbandon {
            self.abandon(lost);
        }
        TimeoutAction::Probe
    }

    /// True if a datagram should ask for an answer although it need not: nothing has come from the peer for longer than
    /// a round trip, and nothing is under way that shows whether the path is broken. TCP's acknowledgements ask for
    /// none, and would go by a dead path until it is next asked.
    pub fn wants_proof(&self, now: Time) -> bool {
        let patience = self.rtt.smoothed().max(LEAST_PATIENCE);
        self.waiting == 0 && now.since(self.last.heard) > patience
    }

    /// True if the path should be asked if it is still there: nothing has gone either way for the first of `interval`,
    /// or for as long as it had been unused before, up to the second.
    ///
    /// With an ack-eliciting datagram in flight the probe timeout sees to that.
    pub fn wants_ping(&self, now: Time, interval: [Duration; 2]) -> bool {
        self.next_ping(interval).is_some_and(|t| t <= now)
    }

    /// When [`Self::wants_ping`] becomes true if nothing else happens.
    pub fn next_ping(&self, [least, most]: [Duration; 2]) -> Option<Time> {
        let unused = self.last.busy.since(self.last.used);
        (self.liveness.is_active() && self.waiting == 0)
            .then(|| self.last.busy + unused.clamp(least, most))
    }

    /// True if nothing has gone either way for so long, and nothing is under way: nobody knows whether it still works.
    pub fn is_idle(&self, now: Time, span: Duration) -> bool {
        self.waiting == 0 && now.since(self.last.busy) >= span
    }

    /// Size of the probe to send now, as UDP payload. It goes whatever the budget.
    pub fn poll_mtu_probe(&mut self, now: Time) -> Option<u16> {
        if self.liveness.is_active() {
            self.mtud.poll(now)
        } else {
            None
        }
    }

    /// This host slept until `now`: nothing of that time says how long the path takes, nor that the
    /// peer is silent.
    pub fn on_sleep(&mut self, now: Time) {
        self.slept_until = Some(now);
        self.liveness.on_sleep(now);
    }

    /// The system refused a UDP payload of `bytes` (EMSGSIZE).
    pub fn on_message_too_big(&mut self, now: Time, bytes: u16) {
        self.mtud.on_too_big(now, bytes);
    }

    /// The local interface takes datagrams (UDP payload) of other sizes from now on.
    pub fn set_longest(&mut self, longest: u16) {
        self.mtud.set_max(longest);
    }

    /// Statistics of the path.
    pub fn stats(&self) -> PathStats {
        PathStats {
            state: self.state(),
            srtt: self.rtt.smoothed(),
            rttvar: self.rtt.variance(),
            min_rtt: self.bbr.min_rtt().unwrap_or_else(|| self.rtt.min()),
            loss: self.bbr.loss(),
            sent: self.count.sent,
            received: self.received.datagrams,
            lost: self.count.lost,
            spurious: self.count.spurious,
            marked: self.ecn.reported(),
            bytes_sent: self.count.bytes_sent,
            bytes_acked: self.rate.delivered(),
            cwnd: self.bbr.cwnd(),
            in_flight: self.in_flight,
            pacing_rate: self.pacer.rate(),
            delivery_rate: self.bbr.rate(),
            ptos: self.count.ptos,
            mtu: self.mtu(),
        }
    }
}
