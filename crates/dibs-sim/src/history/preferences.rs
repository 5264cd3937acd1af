//! How the users would have the paths used, from the start and from some moments on. Drawn apart from all else that
//! happens, and put into it: what else a seed draws does not depend on it.

use std::num::NonZeroU64;
use std::ops::RangeInclusive;

use dibs_core::Time;
use dibs_core::node::FlowScheduler;
use dibs_core::preference::Usage;
use dibs_netem::rng::Rng;
use dibs_settings::{Hint, Role, Scheduler};

use super::{History, Op};

/// Preferences of the user of a host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Preferences {
    /// How new data is shared out.
    pub scheduler: Scheduler,
    /// For some connections otherwise.
    pub flows: Vec<FlowScheduler>,
    /// The path that new data prefers.
    pub hint: Option<Hint>,
    /// Purpose of each path; of those behind the last nothing is said.
    pub usage: Vec<Usage>,
}

/// Wish that is another one from now on.
#[derive(Clone, Debug, PartialEq)]
pub enum Wish {
    /// Another scheduler.
    Scheduler(Scheduler),
    /// Others for some connections.
    Flows(Vec<FlowScheduler>),
    /// Another path preferred, or none.
    Hint(Option<Hint>),
    /// A path used otherwise.
    Usage(usize, Usage),
}

impl Preferences {
    /// Purpose of a path.
    pub fn usage(&self, path: usize) -> Usage {
        self.usage.get(path).copied().unwrap_or_default()
    }

    /// Notes what is wanted otherwise.
    pub fn take(&mut self, wish: &Wish) {
        match wish {
            Wish::Scheduler(scheduler) => self.scheduler = *scheduler,
            Wish::Flows(flows) => self.flows.clone_from(flows),
            Wish::Hint(hint) => self.hint = *hint,
            Wish::Usage(path, usage) => {
                if self.usage.len() <= *path {
                    self.usage.resize(path + 1, Usage::default());
                }
                self.usage[*path] = *usage;
            }
        }
    }
}

/// Least rate that a path is limited to in the end, in bytes a second: transfers are to end in time.
const LEAST_RATE: NonZeroU64 = NonZeroU64::new(250_000).unwrap();

/// Use of a path once nothing disturbs any more.
pub fn calm_usage(usage: Usage) -> Usage {
    Usage {
        role: match usage.role {
            Role::Never => Role::Primary,
            role => role,
        },
        rate: usage.rate.map(|rate| rate.max(LEAST_RATE)),
        spent: false,
    }
}

/// Puts into a history what its users want of the paths.
pub(super) fn add(rng: &mut Rng, history: &mut History) {
    if rng.chance(0.3) {
        return;
    }
    let paths = history.setup.paths.len();
    for preferences in &mut history.setup.preferences {
        *preferences = preferences_of(rng, paths);
    }
    if rng.chance(0.3) {
        return;
    }
    let span = history.quiet.since(Time::ZERO);
    for _ in 0..rng.range(1, 10) {
        let at = Time::ZERO + span.mul_f64(rng.unit());
        let host = rng.below(2) as usize;
        history.ops.push((at, Op::Wish(host, wish(rng, paths))));
    }
    history.ops.sort_by_key(|(at, _)| *at);
}

fn preferences_of(rng: &mut Rng, paths: usize) -> Preferences {
    let mut preferences = Preferences::default();
    if rng.chance(0.6) {
        preferences.scheduler = rng.pick(&Scheduler::ALL);
    }
    if rng.chance(0.4) {
        preferences.flows = flows(rng);
    }
    if rng.chance(0.4) {
        preferences.hint = Some(hint(rng, paths));
    }
    for path in 0..paths {
        if rng.chance(0.4) {
            preferences.take(&Wish::Usage(path, usage(rng)));
        }
    }
    preferences
}

fn wish(rng: &mut Rng, paths: usize) -> Wish {
    match rng.below(100) {
        0..30 => Wish::Scheduler(rng.pick(&Scheduler::ALL)),
        30..45 => Wish::Flows(flows(rng)),
        45..65 => Wish::Hint(rng.chance(0.7).then(|| hint(rng, paths))),
        _ => Wish::Usage(rng.below(paths as u64) as usize, usage(rng)),
    }
}

fn hint(rng: &mut Rng, paths: usize) -> Hint {
    Hint {
        path: rng.below(paths as u64) as usize,
        weight: rng.pick(&[0, 3, Hint::WEIGHT]),
        delta: rng.pick(&[1.0, Hint::DELTA, 1000.0]),
    }
}

fn usage(rng: &mut Rng) -> Usage {
    Usage {
        role: match rng.below(100) {
            0..40 => Role::Primary,
            40..60 => Role::Secondary,
            60..85 => Role::Backup,
            _ => Role::Never,
        },
        rate: { rng.chance(0.25).then(|| rng.magnitude(20_000, 5_000_000)) }
            .and_then(NonZeroU64::new),
        spent: rng.chance(0.06),
    }
}

/// Up to three selectors of connections, of which the first that selects one counts.
fn flows(rng: &mut Rng) -> Vec<FlowScheduler> {
    let count = rng.below(4);
    (0..count).map(|_| flow(rng)).collect()
}

fn flow(rng: &mut Rng) -> FlowScheduler {
    let family = rng.pick(&["0.0.0.0/0", "::/0"]).parse().expect("it is one");
    // Clients have ports from 20,000 on, servers from 30,000 on, by number of the connection.
    let ports = |rng: &mut Rng| -> Vec<RangeInclusive<u16>> {
        let first = rng.pick(&[20_000, 30_000]) + rng.below(4) as u16;
        vec![first..=first + rng.below(4) as u16]
    };
    let all = FlowScheduler::all(rng.pick(&Scheduler::ALL));
    match rng.below(4) {
        0 => FlowScheduler {
            local_ports: ports(rng),
            ..all
        },
        1 => FlowScheduler {
            remote_ports: ports(rng),
            ..all
        },
        2 => FlowScheduler {
            remote: vec![family],
            ..all
        },
        _ => FlowScheduler {
            local: vec![family],
            remote_ports: ports(rng),
            ..all
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wish_is_drawn_and_what_else_a_seed_draws_is_as_without_them() {
        let mut drawn = [0; 4];
        let mut from_start = [0; 4];
        for seed in 0..200 {
            let history = History::random(seed);
            for preferences in &history.setup.preferences {
                for (count, is) in from_start.iter_mut().zip([
                    preferences.scheduler != Scheduler::default(),
                    !preferences.flows.is_empty(),
                    preferences.hint.is_some(),
                    !preferences.usage.is_empty(),
                ]) {
                    *count += u64::from(is);
                }
            }
            let times: Vec<Time> = history.ops.iter().map(|(at, _)| *at).collect();
            assert!(times.is_sorted() && times.iter().all(|at| *at <= history.quiet));
            for (_, op) in &history.ops {
                let Op::Wish(_, wish) = op else { continue };
                drawn[match wish {
                    Wish::Scheduler(_) => 0,
                    Wish::Flows(_) => 1,
                    Wish::Hint(_) => 2,
                    Wish::Usage(..) => 3,
                }] += 1;
            }
        }
        assert!(drawn.iter().all(|count| *count > 50), "{drawn:?}");
        assert!(from_start.iter().all(|count| *count > 50), "{from_start:?}");
    }
}
