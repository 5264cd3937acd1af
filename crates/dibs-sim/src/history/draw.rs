//! Histories drawn from a seed.

use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::{Padding, SCRAMBLE, SEAL, SHARE};
use dibs_core::session::{Integrity, KeyLimits, Suite};
use dibs_netem::{
    Conditions,
    rng::{Rng, mix},
};
use dibs_settings::{BumpId, Handshake};

use super::{
    BETWEEN, History, Leaving, Op, Order, PathSetup, Plan, STRICT, Setup, between, preferences,
    ruled,
};
use crate::adversary::Tamper;
use crate::payload::Kind;

impl History {
    /// The history of a seed.
    ///
    /// From [`BETWEEN`] on there are devices on the ordinary route, from [`STRICT`] on they follow or change TCP's numbers; the
    /// rest is as of the seed that is so much lower.
    pub fn random(seed: u64) -> Self {
        let Some(plain) = seed.checked_sub(BETWEEN) else {
            return Self::drawn(seed);
        };
        let mut history = Self::drawn(plain % BETWEEN);
        between::add(&mut Rng::new(mix(seed)), &mut history, seed >= STRICT);
        history
    }

    fn drawn(seed: u64) -> Self {
        let rng = &mut Rng::new(seed);
        // By dice of its own, so that all else that a seed draws is as without it.
        let handshake = Handshake::ALL[mix(seed) as usize % Handshake::ALL.len()];
        let setup = Setup {
            handshake,
            ..setup(rng)
        };
        let long = rng.chance(0.04);
        let span = if long {
            Duration::from_secs(rng.range(130, 400))
        } else {
            Duration::from_micros(rng.magnitude(200_000, 30_000_000))
        };
        let mut ops = Vec::new();
        let mut at = Time::ZERO;
        let mut conns = 0;
        let budget = &mut if rng.chance(0.1) { 2_000_000 } else { 300_000 };
        let bumps = bumps(&setup);
        let mut interface_down = vec![[false; 2]; setup.paths.len()];
        let rounds = rng.range(1, 24);
        let many = rng.chance(0.05).then(|| rng.range(10, 60));
        if rng.chance(0.7) {
            // Let a session come about first.
            at += Duration::from_millis(rng.range(0, 1000));
        }
        for _ in 0..many.unwrap_or(0) {
            conns += 1;
            ops.push((at, Op::Open(small_plan(rng, budget, bumps, conns - 1))));
        }
        // A user who cannot make up his mind, with something to move.
        let restless = rng.chance(0.25);
        if restless {
            let long = Plan {
                port_of: None,
                bytes: [0; 2].map(|_| rng.range(20_000, 200_000)),
                order: Order::Both,
                slow: None,
                // It is closed once all is acknowledged: each switch to plain closes its window, and
                // in LAST-ACK smoltcp sends nothing again of what was lost before.
                keepalive: Some(Duration::from_secs(5)),
                require: [None; 2],
                ..plan(rng, budget, bumps, conns)
            };
            conns += 1;
            ops.push((at, Op::Open(long)));
        }
        for round in 0..rounds {
            for _ in 0..if restless { rng.range(1, 6) } else { 0 } {
                let (conn, host) = (rng.below(conns as u64) as usize, rng.below(2) as usize);
                at += Duration::from_micros(rng.magnitude(100, 300_000));
                ops.push((at, Op::Choose(conn, host, anywhere(rng, bumps))));
            }
            let both = rng.chance(0.15);
            let op = if conns == 0 || (round < 4 && rng.chance(0.4)) {
                conns += 1;
                Op::Open(plan(rng, budget, bumps, conns - 1))
            } else {
                random_op(rng, &setup, budget, &mut conns, &mut interface_down)
            };
            if let Op::Restart(host, gap) = op
                && both
            {
                ops.push((at, Op::Restart(1 - host, gap.mul_f64(2.0 * rng.unit()))));
            }
            ops.push((at, op));
            let mean = span.div_f64(rounds as f64);
            if !rng.chance(0.25) {
                at += mean.mul_f64(2.0 * rng.unit());
            }
        }
        let quiet = at + Duration::from_millis(rng.range(0, 2000));
        let mut history = Self { setup, ops, quiet };
        preferences::add(&mut Rng::new(mix(seed ^ 0x9a7b5)), &mut history);
        history.setup.leaving = Rng::new(mix(seed ^ 0x1eaf)).pick(&[
            Leaving::Forced,
            Leaving::Proved,
            Leaving::Firewalled,
            Leaving::Firewalled,
        ]);
        let dice = &mut Rng::new(mix(seed ^ 0x2a1e5));
        if dice.chance(0.4) {
            ruled::add(dice, &mut history, bumps);
        }
        history
    }
}

/// The bumps that connections may be on: with a path too few, what should be split waits for ever.
fn bumps(setup: &Setup) -> &'static [BumpId] {
    match usize::from(setup.share.0) <= setup.paths.len() {
        true => &[SCRAMBLE, SHARE, SEAL],
        false => &[SCRAMBLE, SEAL],
    }
}

/// A bump, or plain.
fn anywhere(rng: &mut Rng, bumps: &[BumpId]) -> Option<BumpId> {
    (!rng.chance(0.3)).then(|| rng.pick(bumps))
}

fn setup(rng: &mut Rng) -> Setup {
    let labels: &[&[bool]] = &[
        &[true],
        &[true, false],
        &[true, false],
        &[false, true],
        &[true, false, false],
        &[true, true, false],
        &[true, true],
    ];
    let easy = rng.chance(0.3);
    let paths = rng.pick(labels).iter().map(|&trusted| {
        // Now and then the ends disagree; the lower label counts.
        let mixed = !trusted && rng.chance(0.15);
        let other = if mixed { [true, false] } else { [trusted; 2] };
        PathSetup {
            trusted: if rng.chance(0.5) {
                other
            } else {
                [other[1], other[0]]
            },
            v6: rng.chance(0.3),
            mtu: rng.pick(&[1500, 1500, 65_535, 1400, 9000, 1300, 1280]),
            link: if easy {
                [0; 2].map(|_| Conditions::new().delay(Duration::from_millis(rng.range(0, 20))))
            } else {
                [conditions(rng), conditions(rng)]
            },
        }
    });
    let paths: Vec<PathSetup> = paths.collect();
    let share = match paths.len() {
        3 => rng.pick(&[(2, 2), (2, 3), (3, 3)]),
        _ => (2, 2),
    };
    let padding = rng.pick(&[Padding::None, Padding::Buckets]);
    let direct = Conditions::new()
        .rate(rng.magnitude(2_000_000, 1_000_000_000))
        .delay(Duration::from_micros(rng.magnitude(1, 50_000)))
        .loss(rng.pick(&[0.0, 0.0, 0.0, 0.005]));
    Setup {
        paths,
        direct,
        suite: [0; 2].map(|_| rng.pick(&[Suite::Aes256Gcm, Suite::ChaCha20Poly1305])),
        integrity: if rng.chance(0.15) {
            Integrity::Off
        } else {
            Integrity::On
        },
        preshared: rng.chance(0.3),
        calls: rng.pick(&[[true, true], [true, false], [false, true]]),
        trusted_share: rng.pick(&[0.05, 0.05, 0.0, 0.5, 1.0]),
        hold_without_trusted: rng.chance(0.85),
        mtu: [0; 2].map(|_| rng.pick(&[1500, 1500, 1400, 9000, 1280, 20_000])),
        tick: [0; 2].map(|_| Duration::from_micros(rng.pick(&[1, 1, 50, 500]))),
        clock: [0; 2].map(|_| rng.pick(&[1, 12_345, 0x7fff_ff00, 0xffff_fe00])),
        follow: rng.chance(0.5),
        // A whole phase may be lost here without anybody noticing: shorter ones have a test.
        keys: KeyLimits::default(),
        share,
        padding,
        preferences: Default::default(),
        marks: true,
        handshake: Handshake::Chained,
        leaving: Leaving::Forced,
        between: Default::default(),
    }
}

fn conditions(rng: &mut Rng) -> Conditions {
    let delay = Duration::from_micros(rng.magnitude(1, 100_000));
    let mut c = Conditions::new().delay(delay);
    if rng.chance(0.7) {
        c = c.rate(rng.magnitude(1_000_000, 1_000_000_000));
        if rng.chance(0.5) {
            c = c.queue(rng.magnitude(8_000, 1_000_000) as usize);
        }
    }
    if rng.chance(0.4) {
        c = c.jitter(delay.mul_f64(rng.unit()));
    }
    c = c.loss(rng.pick(&[0.0, 0.0, 0.0, 0.001, 0.01, 0.05, 0.3]));
    if rng.chance(0.3) {
        let late = Duration::from_micros(rng.magnitude(10, 50_000));
        c = c.reorder(rng.pick(&[0.001, 0.02, 0.2]), late);
    }
    c = c.duplicate(rng.pick(&[0.0, 0.0, 0.01, 0.2]));
    c.corrupt(rng.pick(&[0.0, 0.0, 0.0, 0.01]))
}

/// One of many small connections.
fn small_plan(rng: &mut Rng, budget: &mut u64, bumps: &[BumpId], before: usize) -> Plan {
    let bytes = [rng.range(1, 3000), rng.range(0, 3000)];
    Plan {
        bytes,
        buffer: 8000,
        rx: 64 << 10,
        slow: None,
        stops: None,
        ..plan(rng, budget, bumps, before)
    }
}

fn plan(rng: &mut Rng, budget: &mut u64, bumps: &[BumpId], before: usize) -> Plan {
    let mut bytes = [0; 2].map(|_| match rng.below(5) {
        0 => 0,
        1 => rng.range(1, 200),
        _ => rng.magnitude(1, (*budget / 2).max(2)),
    });
    bytes[0] = bytes[0].max(u64::from(bytes[1] == 0));
    *budget = budget.saturating_sub(bytes[0] + bytes[1]);
    let both = rng.chance(0.6);
    let first = rng.chance(0.6).then(|| rng.pick(bumps));
    let other = match first {
        None => Some(rng.pick(bumps)),
        Some(_) => anywhere(rng, bumps),
    };
    let buffer = rng.magnitude(2_000, 1 << 20) as usize;
    let closes = rng.chance(0.25);
    let keepalive = closes || rng.chance(0.1);
    let client = rng.below(2) as usize;
    let order = rng.pick(&[Order::Both, Order::HalfClose, Order::Reply]);
    let mut bump = [first, if both { first } else { other }];
    let mut require = [None; 2];
    if rng.chance(0.12) {
        // Where only the server requires it, a client that does not know never gets through.
        let required = rng.pick(bumps);
        require[client] = Some(required);
        require[1 - client] = rng.chance(0.7).then_some(required);
        // Rules for different bumps at both ends go together no more than that.
        bump = bump.map(|bump| bump.map(|_| required));
    }
    Plan {
        client,
        v6: rng.chance(0.3),
        port_of: (before > 0 && rng.chance(0.3)).then(|| rng.below(before as u64) as usize),
        bytes,
        order,
        kind: if rng.chance(0.85) {
            Kind::Marked
        } else {
            Kind::Digits
        },
        buffer,
        cubic: rng.chance(0.5),
        bump,
        pause: match rng.below(4) {
            0 => Duration::from_millis(rng.magnitude(1, 60_000)),
            _ => Duration::ZERO,
        },
        slow: (bytes[0].max(bytes[1]) < 30_000 && rng.chance(0.1))
            .then(|| Duration::from_millis(rng.range(1, 100))),
        rx: match closes {
            true => rng.magnitude(600, 20_000) as usize,
            false => (2 * buffer).max(64 << 10),
        },
        // smoltcp forgets unread bytes when TIME-WAIT ends, after 10 s.
        stops: closes.then(|| Duration::from_millis(rng.magnitude(1, 6000))),
        keepalive: keepalive.then(|| Duration::from_millis(rng.range(1100, 8000))),
        urgent: rng.chance(0.1),
        lingers: order != Order::HalfClose && rng.chance(0.35),
        require,
    }
}

fn random_op(
    rng: &mut Rng,
    setup: &Setup,
    budget: &mut u64,
    conns: &mut usize,
    interface_down: &mut [[bool; 2]],
) -> Op {
    let host = rng.below(2) as usize;
    let conn = rng.below(*conns as u64) as usize;
    let path = rng.below(setup.paths.len() as u64) as usize;
    let bumps = bumps(setup);
    match rng.below(100) {
        0..12 => {
            *conns += 1;
            Op::Open(plan(rng, budget, bumps, *conns - 1))
        }
        12..15 => Op::Abort(conn, host),
        15..24 => Op::Mark(conn, host, anywhere(rng, bumps), rng.chance(0.5)),
        24..43 => Op::Choose(conn, host, anywhere(rng, bumps)),
        43..48 => Op::Cross(conn, [0; 2].map(|_| anywhere(rng, bumps))),
        48..50 => Op::Flush(host),
        50..57 => Op::Restart(host, Duration::from_micros(rng.magnitude(1, 5_000_000))),
        57..63 => {
            let down = &mut interface_down[path][host];
            *down = !*down;
            Op::Interface(host, path, !*down)
        }
        63..67 => Op::Outage(path, rng.chance(0.5)),
        67..69 => {
            let time = Duration::from_micros(rng.magnitude(10_000, 20_000_000));
            match rng.chance(0.5) {
                true => Op::Cut(time),
                false => Op::Suspend(host, 2 * time),
            }
        }
        69..73 => Op::Link(path, host, conditions(rng)),
        73..77 => Op::Mtu(
            path,
            rng.pick(&[1280, 1300, 1400, 1500, 9000]),
            rng.chance(0.3),
        ),
        77..84 => Op::Tamper(path, host, Tamper::random(rng)),
        84..87 => Op::Attack(host, rng.magnitude(1, 200) as usize),
        87..91 => {
            let [forged, again] = [0; 2].map(|_| rng.magnitude(1, 30) as usize);
            Op::Plain(host, conn, forged, again)
        }
        91..93 => Op::Foreign(host, rng.magnitude(1, 20) as usize),
        93..97 => {
            let len = rng.magnitude(40, 9000) as usize;
            Op::Opaque(host, len, rng.chance(0.3), rng.pick(bumps))
        }
        97..98 => Op::Control(host, rng.range(1, 1024) as usize),
        _ => Op::Unable(host, Duration::from_micros(rng.magnitude(1000, 20_000_000))),
    }
}
