//! Tests of shadows, with a router as Linux's conntrack has it.

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

/// The other host says again and again that a rule of it requires the bump, and knocks once that has ended.
#[test]
fn a_connection_that_the_other_host_requires_is_hidden_until_it_knocks_or_falls_silent() {
    let (is_kept, just_before) = (true, START + HIDDEN_FOR - TICK);
    let mut shadow = Shadow::new(None, START);
    shadow.hide(START);
    shadow.ask(START);
    shadow.listen(just_before);
    assert!(!shadow.is_due(is_kept, just_before));
    let (is_open, _) = shadow.plain(just_before);
    assert!(!is_open);
    assert!(shadow.is_due(is_kept, START + HIDDEN_FOR));
    shadow.handle_knock(just_before);
    assert!(shadow.is_due(!is_kept, just_before));
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

/// Bytes that an end has when it comes to the bump may have come there. A router drops what acknowledges them.
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
