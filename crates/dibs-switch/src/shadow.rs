//! Shadow of a connection in plain while it is on a bump, so that routers on the way do not lose track of it.
//!
//! A router that translates addresses follows TCP's numbers, and takes for invalid what is further than a window from what it has
//! seen. So each end shows now and then, in plain, where its kernel stands: one byte that the other kernel has acknowledged already, and so
//! never takes for data. A router lets only pass what fits what it saw of the other end (Linux, `tcp_in_window` in
//! net/netfilter/nf_conntrack_proto_tcp.c). So an end says no more than fits what it has heard of the other one, and the two go on
//! in steps of a window until both have said all.
//!
//! A connection that both ends call alike is shown only once a [knock](crate::knock) for it is not heard, from where it left plain on, or
//! once much went by the bump since the knock, from there on: a firewall on the way may have lost track of it.

use std::time::Duration;

use dibs_core::Time;
use dibs_wire::SeqNumber;
use dibs_wire::packet::{self, FlowKey, Packet, flags};

use crate::knock;
use crate::matching::Stand;

/// Window that a shadow shows, which the connection shifts by its scale.
const WINDOW: u16 = u16::MAX;
/// Time after which it is shown again although nothing moved: some routers forget a connection that is idle for 30 seconds.
const AT_LEAST_EACH: Duration = Duration::from_secs(25);
/// Time in which a connection takes its bump, once it is known where it stands in plain.
const FRESH_FOR: Duration = Duration::from_secs(30);
/// Bytes by which the first shadow acknowledges less than the kernel has. Linux's conntrack takes what is up to 66,000 bytes behind
/// what it has seen (MAXACKWINDOW).
const BEHIND: u32 = 64_000;
/// Bytes that a firewall takes by which an end has gone further since it was seen: about the largest window without a scale, as
/// kernels begin with.
const TAKEN: u32 = 64_000;
/// Bytes by which the other end may be ahead of what the kernel here was told, as plain is quicker than the bump.
const AHEAD: u32 = 64 << 20;
/// Bytes by which a late packet may be behind what was heard.
const BEFORE: u32 = 1 << 20;
/// Time before the same is shown again to an end that is not heard.
const REPEAT_AFTER: Duration = Duration::from_millis(300);
/// The same while routers are to know all of it.
const ASKED_AGAIN: Duration = Duration::from_millis(100);
/// Repetitions of that, or for an end that repeats itself.
const REPETITIONS: u32 = 4;
/// Time after which an end that was not heard is taken for lost: it shows itself twice in it.
const SILENT_AFTER: Duration = Duration::from_secs(60);
/// Time for the routers to hear of all of it.
const ASKED_FOR: Duration = Duration::from_secs(4);
/// Time between two shadows meanwhile, except for whole windows: an answer to each would be one each round trip.
const ASKED_EACH: Duration = Duration::from_millis(20);
/// Time for which an end that knocks may have the other one show itself, and repeats its knock while the two get on.
pub const CATCH_UP_WITHIN: Duration = Duration::from_secs(16);

/// Numbers of one end: what the other kernel has acknowledged of its bytes, and what its kernel has acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Number behind the bytes of this end that the other kernel has acknowledged.
    pub given: SeqNumber,
    /// Number behind the bytes of the other end that the kernel here has acknowledged.
    pub acked: SeqNumber,
}

impl From<Stand> for Numbers {
    /// The numbers of a connection in plain, as its kernel says them.
    fn from(stand: Stand) -> Self {
        Self {
            given: SeqNumber::new(stand.seq),
            acked: SeqNumber::new(stand.ack),
        }
    }
}

impl From<knock::Numbers> for Numbers {
    /// The numbers of an end that knocked, as a router saw them.
    fn from(knocked: knock::Numbers) -> Self {
        let (given, acked) = knocked.seen();
        Self { given, acked }
    }
}

impl Numbers {
    /// The same numbers as the other end has them.
    const fn reversed(self) -> Self {
        Self {
            given: self.acked,
            acked: self.given,
        }
    }

    /// True if an end that has sent up to `sent_end` may stand so. No more than a window of the other end is under way, which that
    /// shifts by `scale` (RFC 7323). Otherwise something in plain changes numbers, and what the far kernel acknowledges is none of them.
    pub fn may_be_of(self, sent_end: SeqNumber, scale: u8) -> bool {
        sent_end.raw().wrapping_sub(self.given.raw()) <= window(scale)
    }

    /// These numbers, or what an end had `before` where that is later: routers know the latest.
    fn or_later(self, before: Option<Self>) -> Self {
        let Some(before) = before else {
            return self;
        };
        let later =
            |one: SeqNumber, other: SeqNumber| if other.is_after(one) { other } else { one };
        Self {
            given: later(self.given, before.given),
            acked: later(self.acked, before.acked),
        }
    }

    /// Bytes of that end that went further from these numbers to `later`.
    fn bytes_to(self, later: Self) -> u32 {
        let bytes = |to: SeqNumber, from| to.distance_from(from).unsigned_abs();
        bytes(later.given, self.given).max(bytes(later.acked, self.acked))
    }

    /// The shadow as a packet of the connection.
    ///
    /// Its acknowledgement is one byte less, so a reset by a stranger, such as a router that has forgotten the
    /// connection, has a number outside the window of the kernel here, and ends nothing (RFC 5961, 3.2).
    pub fn packet(self, pair: &FlowKey) -> Vec<u8> {
        knock::shown(pair, self.shown(), WINDOW)
    }

    /// The same without its byte, which could be new to the other kernel. Nobody reads it as a shadow, but routers see it.
    pub fn bare_packet(self, pair: &FlowKey) -> Vec<u8> {
        knock::acknowledgement(pair, self.shown(), None)
    }

    /// Number of the byte that is shown, and the acknowledgement with it.
    const fn shown(self) -> (SeqNumber, SeqNumber) {
        let before = u32::MAX;
        (self.given.add(before), self.acked.add(before))
    }

    /// Connection, as the host sends that hears it, and the numbers of the end that showed it, as a router saw them.
    pub fn read(bytes: &[u8]) -> Option<(FlowKey, Self)> {
        let Ok(Packet::Tcp(segment)) = packet::parse(bytes) else {
            return None;
        };
        let numbers = Self {
            given: segment.seq.add(1),
            acked: segment.ack,
        };
        let is_shadow = segment.flags == flags::ACK && segment.payload.len() == 1;
        is_shadow.then_some((segment.tuple.reversed(), numbers))
    }
}

/// One end's part.
#[derive(Clone, Debug)]
pub struct Shadow {
    since: Time,
    /// Time at which the other end was last heard, or the connection left plain.
    heard_at: Time,
    /// Numbers of this end when it left plain.
    left: Option<Numbers>,
    shown: Option<(Numbers, Time)>,
    repeated: u32,
    /// Repetitions for an end that repeated itself.
    answered: u32,
    /// Numbers of the other end that the routers know.
    heard: Option<Numbers>,
    /// Numbers that were heard before the first look at where this end stands.
    unchecked: Option<Numbers>,
    /// True if the other end was heard since the connection left plain.
    is_heard: bool,
    /// Something came that is not answered yet.
    is_answer_due: bool,
    /// Time at which the routers were to know all of it.
    asked: Option<Time>,
    /// Time at which the other end knocked.
    knocked: Option<Time>,
    /// Bytes between what is shown and where this end stands.
    behind: u32,
    /// Numbers of this end at the last look.
    stands: Option<Numbers>,
    /// Numbers of this end at the first look.
    first: Option<Numbers>,
    /// True if an end that was never heard is shown what routers know that follow shadows, which are of large windows.
    is_far_back: bool,
}

impl Shadow {
    /// Shadow of a connection. `plain`: where this end stood in plain, if that is known.
    pub fn new(plain: Option<Numbers>, now: Time) -> Self {
        Self {
            since: now,
            heard_at: now,
            left: None,
            shown: None,
            repeated: 0,
            answered: 0,
            heard: plain.map(Numbers::reversed),
            unchecked: None,
            is_heard: false,
            is_answer_due: false,
            asked: None,
            knocked: None,
            behind: 0,
            stands: None,
            first: None,
            is_far_back: false,
        }
    }

    /// The connection left plain when this end stood so. What is known from before says less, unless something was shown since, or
    /// both ends knocked.
    pub fn handle_left(&mut self, plain: Numbers) {
        let before = self.left.replace(plain);
        let is_shown = self.shown.is_some() || self.is_heard;
        if before.is_none() && !is_shown && self.is_news(plain.reversed())
            || before.is_some_and(|before| before != plain)
        {
            (self.shown, self.is_heard) = (None, false);
            self.heard = Some(plain.reversed());
        }
    }

    /// The other end was heard in plain. Numbers that it cannot have are somebody else's: each answer would be as wrong, and be answered.
    pub fn handle_heard(&mut self, numbers: Numbers, now: Time) {
        let (latest, heard) = match self.stands {
            Some(stands) if !is_possible(numbers, self.heard, stands) => return,
            // A copy that comes late takes nothing back: this end would say all again from there, and the other one would answer all.
            Some(_) if self.is_heard => (numbers.or_later(self.heard), &mut self.heard),
            // Until now this end took routers to know all that its kernel has, and some of that came by the bump.
            Some(_) => (numbers, &mut self.heard),
            None => (numbers, &mut self.unchecked),
        };
        self.heard_at = now;
        // An end that repeats itself, or has begun anew, does not get on.
        self.is_answer_due |= !self.is_heard || *heard == Some(latest);
        *heard = Some(latest);
        self.is_heard = true;
        self.repeated = 0;
    }

    /// Both ends knocked, and this one heard the other: routers know these numbers of it.
    pub fn handle_knocked(&mut self, theirs: Numbers) {
        if self.is_news(theirs) {
            self.heard = Some(theirs);
        }
    }

    /// True if these numbers of the other end are later than those that routers are known to have.
    fn is_news(&self, theirs: Numbers) -> bool {
        self.heard.is_none_or(|heard| {
            theirs.given.is_after(heard.given) || theirs.acked.is_after(heard.acked)
        })
    }

    /// True if so much went by the bump since routers were seen to know both ends that they may take no word of an end any more that has
    /// sent up to `sent_end`, and acknowledged up to `acked`.
    pub fn is_outrun(&self, (sent_end, acked): (SeqNumber, SeqNumber)) -> bool {
        let is_far = |number: SeqNumber, seen: SeqNumber| {
            let bytes = number.raw().wrapping_sub(seen.raw());
            bytes > TAKEN && bytes < BEFORE.wrapping_neg()
        };
        self.heard
            .is_some_and(|heard| is_far(sent_end, heard.acked) || is_far(acked, heard.given))
    }

    /// Number behind the bytes of the other end that routers have seen.
    pub fn seen(&self) -> Option<SeqNumber> {
        self.heard.map(|heard| heard.given)
    }

    /// The connection is about to go to plain: the routers are to know all of it.
    pub fn ask(&mut self, now: Time) {
        self.asked = Some(now);
        self.repeated = 0;
    }

    /// The other end knocks: its shadows are answered from now on.
    pub fn handle_knock(&mut self, now: Time) {
        self.knocked = Some(now);
    }

    /// True if the routers are to know all of it now.
    pub fn is_asked(&self, now: Time) -> bool {
        is_within(self.asked, ASKED_FOR, now)
            || is_within(self.knocked, CATCH_UP_WITHIN, now)
                && is_within(self.is_heard.then_some(self.heard_at), ASKED_FOR, now)
    }

    /// True if it is shown, or will be if the other end is heard, although it is not kept up.
    pub fn is_on_demand(&self, now: Time) -> bool {
        is_within(self.asked, ASKED_FOR, now) || is_within(self.knocked, CATCH_UP_WITHIN, now)
    }

    /// True if the other end was heard since the connection left plain.
    pub const fn is_heard(&self) -> bool {
        self.is_heard
    }

    /// True if the other end was heard since then, and since the connection left plain.
    pub fn is_heard_since(&self, from: Time) -> bool {
        self.is_heard && self.heard_at >= from
    }

    /// Bytes that routers have not been shown, if the other end was heard since `from`.
    pub fn behind(&self, from: Time) -> Option<u32> {
        self.is_heard_since(from).then_some(self.behind)
    }

    /// State of plain: true if it carries the connection as far as that shows, and the time at which the other end was last heard.
    pub fn plain(&self, now: Time) -> (bool, Time) {
        let is_heard = now.since(self.heard_at) < SILENT_AFTER && self.repeated < REPETITIONS;
        (is_heard, self.heard_at)
    }

    /// True if the other end has shown that it has all up to `sent`, so routers on the way have seen that.
    pub fn is_level(&self, sent: SeqNumber) -> bool {
        let acked = self.heard.map(|heard| heard.acked.add(1));
        acked.is_some_and(|acked| !sent.is_after(acked))
    }

    /// True if the other end has shown all that the kernel here has acknowledged up to `acked`, so routers on the way let that pass.
    pub fn has_shown(&self, acked: SeqNumber) -> bool {
        let given = self.heard.map(|heard| heard.given);
        given.is_some_and(|given| !acked.is_after(given))
    }

    /// True if it still says where the connection leaves plain, although that is not on a bump yet.
    pub fn is_fresh(&self, now: Time) -> bool {
        now.since(self.since) < FRESH_FOR && self.shown.is_none()
    }

    /// Numbers that are to be shown now, of an end that stands so. The other end shifts its windows by `scale` (RFC 7323).
    pub fn poll(&mut self, stands: Numbers, scale: u8, now: Time) -> Option<Numbers> {
        let first = *self.first.get_or_insert(stands);
        if self.stands.replace(stands).is_none()
            && let Some(numbers) = self.unchecked.take()
        {
            match is_possible(numbers, self.heard, stands) {
                true => self.heard = Some(numbers),
                false => self.is_heard = false,
            }
        }
        let window = window(scale);
        let mut next = self.within_window(stands, first, window);
        self.behind = next.bytes_to(stands);
        let is_asked = self.is_asked(now);
        let answers = std::mem::take(&mut self.is_answer_due);
        if let Some((shown, at)) = self.shown {
            let far = |end: Numbers| shown.bytes_to(end) >= window / 2;
            let since = now.since(at);
            let goes_on =
                next != shown && (far(next) || answers || is_asked && since >= ASKED_EACH);
            // The last one was lost, or the other end's.
            let is_level = stands == shown && self.is_level(stands.given);
            // The first one of either end may come before the other listens.
            let is_stuck = far(stands) || is_asked && !is_level || !self.is_heard;
            let patience = if is_asked { ASKED_AGAIN } else { REPEAT_AFTER };
            let again = is_stuck && since >= patience && self.repeated < REPETITIONS;
            // What this end said last was lost. It does not answer what answers that itself, or a few times on a long way.
            if since >= ASKED_FOR {
                self.answered = 0;
            }
            let answers = answers && since >= ASKED_AGAIN && self.answered < REPETITIONS;
            if !goes_on && !again && !answers && since < AT_LEAST_EACH {
                return None;
            }
            (self.repeated, self.answered) = match (goes_on, again || !answers) {
                (true, _) => (0, 0),
                (false, true) => (self.repeated + 1, self.answered),
                (false, false) => (self.repeated, self.answered + 1),
            };
            if !goes_on && again && self.heard.is_none() {
                self.is_far_back = !self.is_far_back;
                next = self.within_window(stands, first, window);
            }
        }
        self.shown = Some((next, now));
        Some(next)
    }

    /// Part of these numbers that fits what was heard, or else of those at the `first` look.
    fn within_window(&self, stands: Numbers, first: Numbers, window: u32) -> Numbers {
        let Some(heard) = self.heard else {
            // Something may have gone by the bump already. Both ends may have begun anew, and what the other one showed last may be
            // half a window behind; routers that saw shadows take what is a window behind.
            let far_back = BEHIND.max(window / 4 * 3);
            let behind = if self.is_far_back { far_back } else { BEHIND };
            let acked = first.acked.add(behind.wrapping_neg());
            return Numbers { acked, ..first };
        };
        // No further than `step` from what was heard. A kernel is no more than a window behind that, and may be far ahead, as
        // gigabytes go by a bump.
        let least = |stands: SeqNumber, heard: SeqNumber, step: u32| {
            let ahead = stands.raw().wrapping_sub(heard.raw());
            match ahead > step && ahead < window.wrapping_neg() {
                true => heard.add(step),
                false => stands,
            }
        };
        // The windows that were seen in plain may be small.
        let step = if self.is_heard { window } else { 0 };
        Numbers {
            given: least(stands.given, heard.acked, step),
            acked: least(stands.acked, heard.given, 0),
        }
    }
}

/// Largest window of an end that shifts it by `scale`.
fn window(scale: u8) -> u32 {
    u32::from(WINDOW) << scale.min(14)
}

/// True if the other end may stand so: not before what was heard of it, and not further than both kernels are.
fn is_possible(numbers: Numbers, before: Option<Numbers>, stands: Numbers) -> bool {
    // What was heard last may be ahead of what the kernel was told since.
    let most = |stands: SeqNumber| stands.add(AHEAD);
    let Some(before) = before else {
        return !numbers.acked.is_after(most(stands.given))
            && !numbers.given.is_after(most(stands.acked));
    };
    let up_to = |from: SeqNumber, to: SeqNumber| to.raw().wrapping_sub(from.raw());
    let lies = |number, before: SeqNumber, stands: SeqNumber| {
        let most = up_to(before, most(stands));
        up_to(before.add(BEFORE.wrapping_neg()), number) <= most.saturating_add(BEFORE)
    };
    lies(numbers.acked, before.acked, stands.given)
        && lies(numbers.given, before.given, stands.acked)
}

/// True if something was so short a time ago.
fn is_within(at: Option<Time>, time: Duration, now: Time) -> bool {
    at.is_some_and(|at| now.since(at) < time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conns::tests::pair;

    const START: Time = Time::from_nanos(1_000_000_000_000);
    const TICK: Duration = Duration::from_millis(100);
    const SCALE: u8 = 7;
    /// Numbers at which both ends are when the connection leaves plain.
    const BASE: i64 = 1_000_000;

    /// State that Linux's conntrack keeps of each end (`struct ip_ct_tcp_state`).
    #[derive(Clone, Copy, Debug)]
    struct Side {
        end: i64,
        max_end: i64,
        max_window: i64,
    }

    /// A router that saw the connection go on in plain, up to [`BASE`] of both ends.
    struct Router([Side; 2]);

    impl Router {
        fn new() -> Self {
            Self(
                [Side {
                    end: BASE,
                    max_end: BASE + 64_000,
                    max_window: 64_000,
                }; 2],
            )
        }

        /// True if it takes a segment of this end for valid, as `tcp_in_window` does.
        fn passes(&mut self, from: usize, (seq, end, ack): (i64, i64, i64), window: i64) -> bool {
            let (sender, receiver) = (self.0[from], self.0[1 - from]);
            let is_valid = seq <= sender.max_end
                && end >= sender.end - receiver.max_window
                && ack <= receiver.end
                && ack >= receiver.end - sender.max_window.max(66_000);
            if is_valid {
                let (sender, receiver) = (from, 1 - from);
                let side = &mut self.0[sender];
                side.max_window = side.max_window.max(window);
                side.end = side.end.max(end);
                self.0[receiver].max_end = self.0[receiver].max_end.max(ack + window);
            }
            is_valid
        }
    }

    /// Two ends of a connection that has moved these bytes of each, and a router between them.
    struct Ends {
        shadows: [Shadow; 2],
        router: Router,
        moved: [i64; 2],
        now: Time,
        shown: usize,
        /// Shadows are sent only while they are asked.
        on_demand: bool,
    }

    impl Ends {
        fn new() -> Self {
            let base = SeqNumber::new(BASE as u32);
            let plain = Numbers {
                given: base,
                acked: base,
            };
            Self {
                shadows: [0, 1].map(|_| Shadow::new(Some(plain), START)),
                router: Router::new(),
                moved: [BASE; 2],
                now: START,
                shown: 0,
                on_demand: false,
            }
        }

        fn stands(&self, end: usize) -> Numbers {
            let number = |moved: i64| SeqNumber::new(moved as u32);
            Numbers {
                given: number(self.moved[end]),
                acked: number(self.moved[1 - end]),
            }
        }

        /// Both ends say what they have to say until neither has more.
        fn tick(&mut self) {
            self.pass(TICK);
        }

        fn pass(&mut self, time: Duration) {
            self.now += time;
            for _ in 0..8 {
                for end in [0, 1] {
                    if self.on_demand && !self.shadows[end].is_asked(self.now) {
                        continue;
                    }
                    let Some(numbers) = self.shadows[end].poll(self.stands(end), SCALE, self.now)
                    else {
                        continue;
                    };
                    self.shown += 1;
                    let given = i64::from(numbers.given.raw());
                    let acked = i64::from(numbers.acked.raw()) - 1;
                    let window = i64::from(WINDOW) << SCALE;
                    if self.router.passes(end, (given - 1, given, acked), window) {
                        let (_, seen) = Numbers::read(&numbers.packet(&pair())).expect("a shadow");
                        self.shadows[1 - end].handle_heard(seen, self.now);
                    }
                }
            }
        }

        /// True if the connection could go on in plain.
        fn is_open(&mut self) -> bool {
            self.shadows
                .iter_mut()
                .for_each(|shadow| shadow.ask(self.now));
            self.tick();
            self.tick();
            [0, 1].into_iter().all(|end| {
                let (given, acked) = (self.moved[end], self.moved[1 - end]);
                self.router.passes(end, (given, given, acked), 64_000)
            })
        }
    }

    #[test]
    fn a_router_follows_whoever_sends_and_few_packets_do() {
        for per_tick in [
            [10_000_000, 0],
            [0, 10_000_000],
            [1_000_000, 2_500_000],
            [70_000, 10],
        ] {
            let mut ends = Ends::new();
            ends.tick();
            for _ in 0..30 {
                for (moved, more) in ends.moved.iter_mut().zip(per_tick) {
                    *moved += more;
                }
                ends.tick();
            }
            assert!(ends.is_open(), "{per_tick:?} {:?}", ends.router.0);
            let bytes: i64 = ends.moved.iter().sum();
            let cost = ends.shown as i64 * 41;
            assert!(cost * 1000 < bytes, "{cost} of {bytes}");
        }
    }

    /// A fast connection is far beyond its window before the first shadow.
    #[test]
    fn a_router_is_caught_up_with_from_where_the_connection_left_plain() {
        let mut ends = Ends::new();
        ends.moved = [BASE + 40_000_000, BASE + 25_000_000];
        for _ in 0..20 {
            ends.tick();
        }
        assert!(ends.is_open(), "{:?}", ends.router.0);
    }

    /// Both ends call the connection alike, and show it only once one of them knocks.
    #[test]
    fn a_firewall_is_caught_up_with_once_an_end_knocks() {
        for moved in [[40_000_000, 25_000_000], [3_000_000_000, 10], [5, 100_000]] {
            let mut ends = Ends::new();
            ends.on_demand = true;
            ends.moved = moved.map(|bytes| BASE + bytes);
            let [asks, answers] = &mut ends.shadows;
            asks.ask(START);
            answers.handle_knock(START);
            for _ in 0..60 {
                ends.tick();
                let [asks, _] = &mut ends.shadows;
                if asks.behind(START).is_none_or(|bytes| bytes > 0) {
                    asks.ask(ends.now);
                }
            }
            let steps = moved.map(|bytes| bytes as usize / (usize::from(WINDOW) << SCALE));
            let most = 2 * steps[0].max(steps[1]) + 8;
            assert!(ends.shown <= most, "{} of {most}", ends.shown);
            let before = ends.shown;
            assert!(ends.is_open(), "{moved:?} {:?}", ends.router.0);
            // A short time afterwards nothing more of it is seen.
            ends.moved[0] += 100_000_000;
            (0..1000).for_each(|_| ends.tick());
            let before = ends.shown - before;
            assert!(before <= 100, "{before}");
        }
    }

    /// The last word of an end was lost that nobody asked for more. The other one, which is to leave, repeats itself.
    #[test]
    fn an_end_that_repeats_itself_is_told_again_what_it_has_not_heard() {
        let trips = [1, 30, 700].map(Duration::from_millis);
        for trip in trips {
            let mut ends = Ends::new();
            (0..3).for_each(|_| ends.tick());
            ends.moved[0] += 2000;
            ends.shadows[0].ask(ends.now);
            let (stands, begun) = ([0, 1].map(|end| ends.stands(end)), ends.now);
            let mut under_way: Vec<(Time, usize, Numbers)> = Vec::new();
            let (mut level, mut sent) = (None, [0; 2]);
            for millis in 0..20_000 {
                let now = begun + Duration::from_millis(millis);
                under_way.retain(|(at, to, numbers)| {
                    if *at <= now {
                        ends.shadows[*to].handle_heard(*numbers, now);
                    }
                    *at > now
                });
                for end in [0, 1] {
                    if let Some(shown) = ends.shadows[end].poll(stands[end], SCALE, now) {
                        sent[end] += 1;
                        let (_, seen) = Numbers::read(&shown.packet(&pair())).expect("a shadow");
                        let is_lost = end == 1 && sent[1] == 1;
                        under_way.extend((!is_lost).then_some((now + trip / 2, 1 - end, seen)));
                    }
                }
                if level.is_none() && ends.shadows[0].is_level(stands[0].given) {
                    level = Some(now.since(begun));
                }
            }
            let most = Duration::from_millis(210) + 2 * trip;
            assert!(level.is_some_and(|at| at <= most), "{trip:?} {level:?}");
            assert!(sent.iter().sum::<u32>() <= 20, "{trip:?} {sent:?}");
        }
    }

    /// Somebody on the way doubles what he sees, and one of the two comes late: each copy had an end say all again from there, and the
    /// other one answered each (seed 2199025001560).
    #[test]
    fn copies_that_come_late_are_not_answered_each() {
        let mut ends = Ends::new();
        ends.moved = [BASE + 5_000_000, BASE + 200];
        let stands = [0, 1].map(|end| ends.stands(end));
        ends.shadows.iter_mut().for_each(|shadow| shadow.ask(START));
        let mut under_way: Vec<(u64, usize, Numbers)> = Vec::new();
        let mut sent = 0;
        for millis in 0..5000 {
            let now = START + Duration::from_millis(millis);
            let arrived = under_way.extract_if(.., |(at, ..)| *at <= millis);
            arrived.for_each(|(_, to, numbers)| ends.shadows[to].handle_heard(numbers, now));
            for end in [0, 1] {
                if let Some(shown) = ends.shadows[end].poll(stands[end], 0, now) {
                    sent += 1;
                    let (_, seen) = Numbers::read(&shown.packet(&pair())).expect("a shadow");
                    under_way.extend([5, 40].map(|late| (millis + late, 1 - end, seen)));
                }
            }
        }
        assert!(ends.shadows[0].is_level(stands[0].given));
        let steps = 5_000_000 / u32::from(WINDOW);
        assert!(sent <= 2 * steps + 20, "{sent} of {steps}");
    }

    /// Traffic goes on while the routers are to know all of it.
    #[test]
    fn a_busy_connection_is_shown_now_and_then_and_not_each_round_trip() {
        let mut ends = Ends::new();
        ends.tick();
        let before = ends.shown;
        ends.shadows
            .iter_mut()
            .for_each(|shadow| shadow.ask(ends.now));
        for _ in 0..4000 {
            ends.moved = ends.moved.map(|moved| moved + 10_000);
            ends.pass(Duration::from_millis(1));
        }
        let shown = ends.shown - before;
        assert!((100..=420).contains(&shown), "{shown}");
        assert!(ends.is_open());
    }

    /// Routers know less of both ends than these have, up to what is not worth a shadow.
    #[test]
    fn ends_that_begin_anew_under_a_transfer_find_each_other() {
        for per_tick in [[700_000, 900_000], [1_300_000, 300_000], [0, 2_000_000]] {
            for ticks in 0..24 {
                let mut ends = Ends::new();
                for tick in 0..40 {
                    for (moved, more) in ends.moved.iter_mut().zip(per_tick) {
                        *moved += more;
                    }
                    ends.tick();
                    if tick == 12 + ticks {
                        ends.shadows = [0, 1].map(|_| Shadow::new(None, ends.now));
                    }
                }
                for _ in 0..10 {
                    ends.is_open();
                }
                assert!(ends.is_open(), "{per_tick:?} {ticks} {:?}", ends.router.0);
            }
        }
    }

    /// Somebody else's packet came before this end had looked where it stands.
    #[test]
    fn a_first_word_with_numbers_of_another_connection_is_forgotten() {
        let left = Ends::new().stands(0);
        let other = Numbers {
            given: left.given.add(1 << 30),
            acked: left.acked.add(1 << 29),
        };
        for (first, is_heard) in [(other, false), (left.reversed(), true)] {
            let mut shadow = Shadow::new(None, START);
            shadow.handle_left(left);
            shadow.handle_heard(first, START);
            assert_eq!(shadow.poll(left, SCALE, START), Some(left), "{first:?}");
            assert_eq!(shadow.is_heard(), is_heard);
        }
    }

    /// More than a window went by the bump since both ends heard the other's knock, and the firewall has seen nothing of before.
    #[test]
    fn a_connection_is_shown_from_where_both_ends_knocked() {
        let at = |given: u32, acked: u32| Numbers {
            given: SeqNumber::new(given),
            acked: SeqNumber::new(acked),
        };
        let mut shadow = Shadow::new(None, START);
        assert!(!shadow.is_outrun((SeqNumber::new(1 << 20), SeqNumber::new(5))));
        let knocked = 100_000_000;
        shadow.handle_knocked(at(5, knocked));
        shadow.handle_left(at(1000, 5));
        for (sent, acked, is_outrun) in [
            (knocked + TAKEN, 5, false),
            (knocked + TAKEN + 1, 5, true),
            (knocked, TAKEN + 6, true),
            (knocked + (3 << 30), 5, true),
            (knocked - 1000, 5, false),
        ] {
            let stands = (SeqNumber::new(sent), SeqNumber::new(acked));
            assert_eq!(shadow.is_outrun(stands), is_outrun, "{sent} {acked}");
        }
        let stands = at(knocked + (1 << 20), 5);
        assert_eq!(shadow.poll(stands, 0, START), Some(at(knocked, 5)));
        // It came from plain again meanwhile.
        let left = at(knocked + (1 << 24), 7);
        shadow.handle_left(left);
        assert_eq!(shadow.poll(left, 0, START), Some(left));
    }

    #[test]
    fn a_connection_that_left_plain_again_is_shown_from_there() {
        let mut ends = Ends::new();
        let base = ends.stands(0);
        ends.shadows[0].handle_left(base);
        (0..3).for_each(|_| ends.tick());
        // So much went in plain meanwhile.
        let later = SeqNumber::new(BASE as u32 + 900_000_000);
        let left = Numbers {
            given: later,
            acked: later,
        };
        let far = Numbers {
            given: later.add(100_000_000),
            acked: later,
        };
        let shadow = &mut ends.shadows[0];
        for _ in 0..2 {
            shadow.handle_left(left);
        }
        assert_eq!(shadow.poll(far, SCALE, ends.now), Some(left));
        shadow.handle_left(left);
        assert_eq!(shadow.poll(far, SCALE, ends.now), None);
    }

    #[test]
    fn without_it_a_router_loses_track() {
        let mut ends = Ends::new();
        ends.moved = [11_000_000, 11_000_000];
        let segment = (11_000_000, 11_000_000, 11_000_000);
        assert!(!ends.router.passes(0, segment, 64_000) && !ends.router.passes(1, segment, 64_000));
    }

    #[test]
    fn an_idle_connection_is_shown_before_routers_forget_it_and_no_more() {
        let mut ends = Ends::new();
        ends.moved = [BASE + 5000, BASE + 5000];
        (0..10).for_each(|_| ends.tick());
        let before = ends.shown;
        (0..200).for_each(|_| ends.tick());
        assert_eq!(ends.shown, before);
        (0..90).for_each(|_| ends.tick());
        assert_eq!(ends.shown, before + 2);
        assert!(ends.is_open());
    }

    /// A copy of another connection's shadow used to begin an exchange of thousands.
    #[test]
    fn numbers_that_the_other_end_cannot_have_are_not_answered() {
        let mut ends = Ends::new();
        (0..30).for_each(|_| ends.tick());
        ends.shadows.iter_mut().for_each(|shadow| shadow.ask(START));
        let (before, stands) = (ends.shown, ends.stands(0).given);
        for (given, acked) in [(1 << 30, 0), (0, 1 << 30), (1 << 31, 1 << 31)] {
            let forged = Numbers {
                given: stands.add(given),
                acked: stands.add(acked),
            };
            ends.shadows[0].handle_heard(forged, ends.now);
            (0..3).for_each(|_| ends.tick());
        }
        assert_eq!(ends.shown, before);
        assert!(ends.is_open());
    }

    #[test]
    fn what_is_not_heard_is_said_again_a_few_times() {
        let mut shadow = Shadow::new(None, START);
        let stands = Numbers {
            given: SeqNumber::new(9),
            acked: SeqNumber::new(5),
        };
        assert!(shadow.poll(stands, 0, START).is_some());
        let far = Numbers {
            given: SeqNumber::new(900_000),
            ..stands
        };
        let said = (1..100).filter(|tick| shadow.poll(far, 0, START + TICK * *tick).is_some());
        assert_eq!(said.count(), REPETITIONS as usize);
        assert_eq!(shadow.plain(START + TICK * 100), (false, START));
        shadow.handle_heard(far, START + TICK * 100);
        let at = |later: u64| START + TICK * 100 + Duration::from_secs(later);
        assert_eq!(shadow.plain(at(59)), (true, at(0)));
        assert_eq!(shadow.plain(at(60)), (false, at(0)));
    }

    /// Otherwise the routers would learn nothing before half a window has moved, and nothing more if a daemon starts again by then.
    #[test]
    fn first_words_that_nobody_heard_are_said_again() {
        let mut ends = Ends::new();
        for end in [0, 1] {
            let (stands, now) = (ends.stands(end), ends.now);
            assert!(ends.shadows[end].poll(stands, SCALE, now).is_some());
        }
        ends.moved = ends.moved.map(|moved| moved + 100_000);
        (0..5).for_each(|_| ends.tick());
        assert!(ends.shadows.iter().all(Shadow::is_heard));
    }

    /// What one end has when it comes to the bump, the other one may have sent there. A router drops what acknowledges that.
    #[test]
    fn what_is_heard_first_counts_whatever_this_end_had() {
        let mut ends = Ends::new();
        let at = |given: i64, acked: i64| {
            let [given, acked] = [given, acked].map(|of| SeqNumber::new(of as u32));
            Numbers { given, acked }
        };
        ends.moved = [BASE, BASE + 30_000];
        ends.shadows[0].handle_left(at(BASE, BASE + 30_000));
        ends.shadows[1].handle_left(at(BASE, BASE));
        ends.moved = ends.moved.map(|moved| moved + 1_000_000);
        assert!(ends.is_open());
    }

    #[test]
    fn it_is_level_once_the_other_end_has_shown_that_it_has_all() {
        let mut ends = Ends::new();
        ends.moved[0] += 5000;
        let sent = ends.stands(0).given;
        assert!(!ends.shadows[0].is_level(sent));
        ends.shadows.iter_mut().for_each(|shadow| shadow.ask(START));
        (0..2).for_each(|_| ends.tick());
        assert!(ends.shadows[0].is_level(sent) && !ends.shadows[0].is_level(sent.add(1)));
    }

    /// A firewall changes numbers, and nobody has noticed yet.
    #[test]
    fn an_end_has_no_more_than_a_window_under_way() {
        let (given, acked) = (SeqNumber::new(u32::MAX - 9), SeqNumber::new(5));
        for (sent, scale, may_be) in [
            (0, 0, true),
            (-1, 0, false),
            (65_535, 0, true),
            (65_536, 0, false),
            (65_535 << 7, 7, true),
            ((65_535 << 7) + 1, 7, false),
        ] {
            let sent_end = given.add(sent as u32);
            let stands = Numbers { given, acked };
            assert_eq!(stands.may_be_of(sent_end, scale), may_be, "{sent} {scale}");
        }
    }

    #[test]
    fn a_shadow_comes_back_as_it_was_shown() {
        let numbers = Numbers {
            given: SeqNumber::new(9),
            acked: SeqNumber::new(5),
        };
        let bytes = numbers.packet(&pair());
        // What answers it with a reset gives that the number that it acknowledges (RFC 9293, 3.5.2).
        let seen = Numbers {
            acked: SeqNumber::new(4),
            ..numbers
        };
        assert_eq!(Numbers::read(&bytes), Some((pair().reversed(), seen)));
        assert_eq!(bytes.len(), 41);
    }
}
