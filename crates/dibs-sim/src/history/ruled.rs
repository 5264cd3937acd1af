//! Rules that the users of both hosts add, change and remove, put into a history.

use std::time::Duration;

use dibs_core::Time;
use dibs_netem::rng::Rng;
use dibs_settings::{BumpId, Level};

use super::{History, Op};
use crate::steering::ruling::{Rule, Selected};

/// Most rules of a host at one time.
const MOST: u64 = 3;

/// Puts changes of rules into a history of connections that may be on these bumps.
pub(super) fn add(rng: &mut Rng, history: &mut History, bumps: &[BumpId]) {
    // What comes by a bump is followed; and what two rules require of one connection in different ways never gets through,
    // and is not to.
    let mut conns = 0;
    for (_, op) in &mut history.ops {
        if let Op::Open(plan) = op {
            (plan.bump, plan.require) = ([None; 2], [None; 2]);
            conns += 1;
        }
    }
    history.setup.follow = true;
    let span = history.quiet.since(Time::ZERO);
    let mut times: Vec<Time> = (0..rng.range(1, 8))
        .map(|_| Time::ZERO + span.mul_f64(rng.unit()))
        .collect();
    times.sort_unstable();
    // Both hosts require the same now.
    let mut both = false;
    for at in times {
        let rules: Vec<Rule> = (0..rng.below(MOST + 1))
            .map(|_| rule(rng, conns, bumps))
            .collect();
        if rng.chance(0.2) {
            let require = |rule: &Rule| Rule {
                level: Level::Require,
                ..rule.clone()
            };
            let required: Vec<Rule> = rules.iter().map(require).collect();
            both = true;
            history.ops.push((at, Op::Rules(0, required.clone())));
            history.ops.push((at, Op::Rules(1, required)));
        } else if both {
            // Nor is what one end alone still requires.
            both = false;
            history.ops.push((at, Op::Rules(0, rules)));
            history.ops.push((at, Op::Rules(1, Vec::new())));
        } else {
            history
                .ops
                .push((at, Op::Rules(rng.below(2) as usize, rules)));
        }
    }
    history.ops.sort_by_key(|(at, _)| *at);
    let turned = rng.chance(0.4).then(|| turn(rng, history));
    let replaced = { rng.chance(0.2) }.then(|| leave(rng, history, conns, bumps));
    if let Some((made, turns)) = turned {
        // Rules that were replaced meanwhile do not come back: one end alone would require something.
        let replaced = replaced.flatten().filter(|at| *at >= made);
        let stand = |(at, _): &(Time, Op)| replaced.is_none_or(|replaced| *at < replaced);
        history.ops.extend(turns.into_iter().filter(stand));
    }
    history.ops.sort_by_key(|(at, _)| *at);
}

/// Turns of some of the rules that are made at one time, which hold at some hours only; and that time.
fn turn(rng: &mut Rng, history: &History) -> (Time, [(Time, Op); 2]) {
    let made: Vec<usize> = (0..history.ops.len())
        .filter(|at| matches!(history.ops[*at].1, Op::Rules(..)))
        .collect();
    let nth = rng.below(made.len() as u64) as usize;
    let (at, Op::Rules(host, rules)) = &history.ops[made[nth]] else {
        unreachable!("these are rules")
    };
    let (host, next) = (
        *host,
        made.get(nth + 1)
            .map_or(history.quiet, |next| history.ops[*next].0),
    );
    let span = next.since(*at);
    // One end alone does not require anything.
    let ended = rules.iter().map(|rule| Rule {
        holds: rule.level == Level::Require || rng.chance(0.5),
        ..rule.clone()
    });
    let (ended, again) = (ended.collect(), rules.clone());
    let turns = [(0.5 * rng.unit(), ended), (0.5 + 0.5 * rng.unit(), again)];
    let turns = turns.map(|(part, rules)| (*at + span.mul_f64(part), Op::Rules(host, rules)));
    (*at, turns)
}

/// Has the peer go away while a connection begins whose rule prefers its bump; returns when that replaced all rules.
fn leave(rng: &mut Rng, history: &mut History, conns: usize, bumps: &[BumpId]) -> Option<Time> {
    let begun = |(at, op): &(Time, Op)| match op {
        Op::Open(plan) => Some((*at, plan.client)),
        _ => None,
    };
    let begun: Vec<_> = history.ops.iter().filter_map(begun).collect();
    if begun.is_empty() {
        return None;
    }
    let (at, client) = rng.pick(&begun);
    let rule = Rule {
        level: Level::Prefer,
        meant: Selected::Ports(0..=conns as u16),
        bump: rng.pick(bumps),
        holds: true,
    };
    let away = Duration::from_millis(rng.range(2000, 30_000));
    let goes = match rng.chance(0.5) {
        true => Op::Cut(away),
        false => Op::Restart(1 - client, away),
    };
    let earlier = |time| Time::ZERO + at.since(Time::ZERO).saturating_sub(time);
    let before = Duration::from_micros(rng.magnitude(1, 2_000_000));
    let replaced = earlier(before);
    history.ops.extend([
        (replaced, Op::Rules(client, vec![rule])),
        (replaced, Op::Rules(1 - client, Vec::new())),
        (earlier(before.mul_f64(rng.unit())), goes),
    ]);
    history.quiet = history.quiet.max(at + away);
    Some(replaced)
}

fn rule(rng: &mut Rng, conns: usize, bumps: &[BumpId]) -> Rule {
    let last = conns.max(1) as u64 - 1;
    let ends = [rng.range(0, last), rng.range(0, last)].map(|end| end as u16);
    Rule {
        bump: rng.pick(bumps),
        level: rng.pick(&[Level::Usual, Level::Usual, Level::Prefer]),
        meant: Selected::Ports(ends[0].min(ends[1])..=ends[0].max(ends[1])),
        holds: true,
    }
}
