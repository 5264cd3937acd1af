//! Devices and attackers on the ordinary route, put into a history.

use std::time::Duration;

use dibs_netem::rng::Rng;
use dibs_settings::Level;

use super::{Between, History, Leaving, Op};

/// Least room of a connection whose numbers a router follows, as that of a Linux host.
const WINDOW: usize = 65_536;

/// Puts what is between the hosts into a history.
pub(super) fn add(rng: &mut Rng, history: &mut History, is_strict: bool) {
    let renumbers = is_strict && rng.chance(0.5);
    let translates = rng.chance(if renumbers { 0.3 } else { 0.75 });
    let is_rough = rng.chance(0.6);
    let setup = &mut history.setup;
    // Firewalls that renumber keep in mind what is idle for an hour (Cisco ASA) or a day (pf), longer than a history lasts.
    let forgets = |idle: Duration| Some(idle).filter(|_| !renumbers);
    setup.between = Between {
        translates,
        renumbers,
        tracks: rng.chance(if renumbers { 0.3 } else { 0.8 }) && is_strict,
        forgets: rng
            .chance(0.3)
            .then(|| Duration::from_secs(rng.pick(&[30, 30, 120, 600])))
            .and_then(forgets),
        adopts: rng.chance(0.6),
        resets: rng.chance(0.5),
        lost: if is_rough {
            rng.pick(&[0.0, 0.05, 0.1])
        } else {
            0.0
        },
        late: (is_rough && rng.chance(0.5))
            .then(|| Duration::from_micros(rng.magnitude(1000, 20_000_000))),
        forges: is_rough && rng.chance(0.7),
    };
    if setup.between.tracks && !translates {
        // A host that is not heard in time leaves all the same.
        setup.between.lost = 0.0;
    }
    setup.leaving = Leaving::Proved;
    // Devices look at both directions of a connection.
    setup.follow = true;
    let (forgets, tracks) = (setup.between.forgets.is_some(), setup.between.tracks);
    for (_, op) in &mut history.ops {
        match op {
            Op::Open(plan) => {
                if translates {
                    plan.client = 0;
                }
                if forgets {
                    // In plain it is not idle for as long.
                    plan.keepalive.get_or_insert(Duration::from_secs(5));
                }
                if tracks {
                    // A window of a few hundred bytes is full with each packet by a bump, of which a router hears nothing.
                    plan.rx = plan.rx.max(WINDOW);
                }
                let required = plan.require[0].or(plan.require[1]);
                plan.require = [required; 2];
                plan.bump = [required.or(plan.bump[plan.client]); 2];
            }
            // By two bumps at once nobody can compare the numbers of both ends.
            Op::Rules(1, rules) if renumbers => rules.clear(),
            // What rules require stays blocked where no bump can carry it.
            Op::Rules(_, rules) if renumbers => {
                rules.iter_mut().for_each(|rule| rule.level = Level::Usual);
            }
            // Another program does not wait until the peer has found a connection.
            Op::Mark(conn, host, bump, _) if translates && bump.is_some() => {
                *op = Op::Choose(*conn, *host, *bump);
            }
            _ => {}
        }
    }
    if renumbers {
        let is_rough = |op: &Op| {
            matches!(
                op,
                Op::Restart(..) | Op::Mark(..) | Op::Suspend(..) | Op::Unable(..) | Op::Flush(_)
            )
        };
        history.ops.retain(|(_, op)| !is_rough(op));
    }
    if translates {
        // What is carried whole is not looked at by its ends; rules do not wait either.
        history.ops.retain(|(_, op)| {
            let is_whole = matches!(op, Op::Opaque(..) | Op::Foreign(..));
            !is_whole && !matches!(op, Op::Rules(..))
        });
    }
}
