//! What the users want of the paths, and that it is so.

use dibs_core::Time;
use dibs_core::node::Node;
use dibs_core::preference::{Unused, Usage};
use dibs_settings::{Role, Scheduler};
use dibs_wire::FlowKey;

use super::Host;
use crate::coverage::Seen;
use crate::history::{Wish, calm_usage};
use crate::observer::Held;

/// What may leave by a limited path at once, beyond its rate: a burst of the longest datagrams, and what does not ask
/// for room.
const BURST: f64 = 200_000.0;

/// What has left by a path with a limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    /// Bytes beyond the limit.
    level: f64,
    at: Time,
}

impl Bucket {
    /// Notes that so many bytes leave where `rate` may in a second; how many are beyond that by now.
    fn add(&mut self, now: Time, bytes: usize, rate: u64) -> f64 {
        let passed = now.since(std::mem::replace(&mut self.at, now));
        self.level = (self.level - passed.as_secs_f64() * rate as f64).max(0.0) + bytes as f64;
        self.level
    }
}

/// Why each local path of a node carries no new data, if it carries none.
pub(super) type Reasons = Vec<Vec<Option<Unused>>>;

/// Whether a path of which this is said could carry something.
fn is_active(reason: &Option<Unused>) -> bool {
    use Unused::{InterfaceDown, Joining, Never, Spent, SpentThere, Unanswered};
    !matches!(
        reason,
        Some(Never | Spent | SpentThere | InterfaceDown | Joining | Unanswered)
    )
}

impl Host {
    /// Why paths carry no new data, by path; nothing where no user said anything of paths.
    pub(super) fn reasons(&self) -> Reasons {
        let mut reasons = vec![Vec::new(); self.up.len()];
        let said = self.preferences.hint.is_some() || !self.preferences.usage.is_empty();
        if let Some(node) = self.node.as_ref().filter(|_| said) {
            for path in node.paths() {
                reasons[path.local].push(path.unused);
            }
        }
        reasons
    }

    /// Tells a node what its user wants of connections, which it is not told at its start.
    pub(super) fn tell_flows(&self, node: &mut Node) {
        node.set_flow_schedulers(self.preferences.flows.clone());
    }

    /// The user of the host wants something otherwise.
    pub(super) fn wish(&mut self, now: Time, wish: &Wish) {
        self.preferences.take(wish);
        let Some(node) = &mut self.node else { return };
        match wish {
            Wish::Scheduler(scheduler) => node.set_scheduler(*scheduler),
            Wish::Flows(flows) => node.set_flow_schedulers(flows.clone()),
            Wish::Hint(hint) => node.prefer(*hint),
            Wish::Usage(path, usage) => node.set_usage(now, *path, *usage),
        }
    }

    /// Nothing that the users want keeps anything for ever.
    pub(super) fn calm_wishes(&mut self, now: Time) {
        for path in 0..self.up.len() {
            let usage = self.preferences.usage(path);
            let calm = calm_usage(usage);
            if calm != usage {
                self.wish(now, &Wish::Usage(path, calm));
            }
        }
    }

    /// How a segment of the host's kernel that goes to its node is to be shared out.
    pub(super) fn schedulers_of(&self, tuple: &FlowKey) -> Vec<Seen> {
        let mut own = self.preferences.flows.iter();
        let own = own.find(|flow| flow.selects(tuple));
        let mut seen = Vec::new();
        if own.is_some() {
            seen.push(Seen::FlowScheduler);
        }
        seen.push(
            match own.map_or(self.preferences.scheduler, |own| own.scheduler) {
                Scheduler::Balanced => Seen::Balanced,
                Scheduler::LowestRtt => Seen::LowestRtt,
                Scheduler::RoundRobin => Seen::RoundRobin,
                Scheduler::Redundant => Seen::Redundant,
                Scheduler::Blest => Seen::Blest,
            },
        );
        seen
    }

    /// A datagram leaves the host, `who`, by a path; `reasons` are those of before and after the node was asked for
    /// it, `shares` those of a split. Returns what was seen by that.
    pub(super) fn check_wishes(
        &mut self,
        now: Time,
        (who, path): (char, usize),
        (held, len): (Held, usize),
        reasons: &[Reasons; 2],
        shares: u8,
    ) -> Result<Vec<Seen>, String> {
        let Usage { role, rate, spent } = self.preferences.usage(path);
        if role == Role::Never || spent && held.payload {
            return Err(format!(
                "a datagram of {len} bytes by path {path} of {who}, which carries nothing: role {role}, spent {spent}"
            ));
        }
        let all_say = |why: Unused| {
            let said = |of: &Reasons| of[path].iter().all(|said| *said == Some(why));
            !reasons[0][path].is_empty() && reasons.iter().all(said)
        };
        // Any path may carry what is encrypted whole.
        if held.sealed && all_say(Unused::Backup) {
            return Err(format!(
                "data by path {path} of {who}, which is a backup while others are there"
            ));
        }
        let enough = |of: &Reasons| {
            let is_primary = |path: &usize| self.preferences.usage(*path).role != Role::Backup;
            let others = (0..of.len()).filter(is_primary);
            let active = others.filter(|path| of[*path].iter().any(is_active));
            active.count() >= usize::from(shares)
        };
        if held.split && role == Role::Backup && reasons.iter().all(enough) {
            return Err(format!(
                "a share by path {path} of {who}, a backup, while there are paths enough"
            ));
        }
        if held.fresh && all_say(Unused::NotPreferred) {
            return Err(format!(
                "new data by path {path} of {who} while another one is preferred"
            ));
        }
        if !held.payload {
            return Ok(Vec::new());
        }
        if let Some(rate) = rate {
            let beyond = self.sent_of_limit[path].add(now, len, rate.get());
            if beyond > BURST {
                return Err(format!(
                    "{beyond} bytes beyond {rate} a second by path {path} of {who}"
                ));
            }
        }
        let hinted = self.preferences.hint.is_some_and(|hint| hint.path == path);
        let others = self.preferences.usage.iter();
        let idle = others.filter(|other| other.role == Role::Never).count();
        let spent = self.preferences.usage.iter().any(|other| other.spent);
        let spared = reasons[1].iter().flatten().flatten();
        let spared = spared.filter(|why| **why == Unused::Backup).count();
        let seen = [
            (hinted && held.fresh, Seen::Preferred),
            (role == Role::Secondary, Seen::SecondaryUsed),
            (role == Role::Backup, Seen::BackupUsed),
            (spared > 0, Seen::BackupSpared),
            (idle > 0, Seen::NeverUsed),
            (spent, Seen::VolumeSpent),
            (rate.is_some(), Seen::RateLimited),
        ];
        let happened = seen.into_iter().filter(|(happened, _)| *happened);
        Ok(happened.map(|(_, what)| what).collect())
    }
}
