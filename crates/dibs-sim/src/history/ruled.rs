//! Rules that the users of both hosts add, change and remove, put into a history.

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
}

fn rule(rng: &mut Rng, conns: usize, bumps: &[BumpId]) -> Rule {
    let last = conns.max(1) as u64 - 1;
    let ends = [rng.range(0, last), rng.range(0, last)].map(|end| end as u16);
    Rule {
        bump: rng.pick(bumps),
        level: rng.pick(&[Level::Usual, Level::Usual, Level::Prefer]),
        meant: Selected::Ports(ends[0].min(ends[1])..=ends[0].max(ends[1])),
    }
}
