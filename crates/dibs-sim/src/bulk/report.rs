//! A scenario and its outcome, as a row.

use std::fmt;

use dibs_core::bump::SCRAMBLE;

use super::pair::{Outcome, Pair};
use super::plain::{Carried, Plain};
use super::scenario::Scenario;

/// Names of a row's columns: the first link is the trusted one.
pub const HEADING: &str =
    "    seed bump       best    sum   dibs ratio again rto  lost/found  gap  links";

/// A scenario, and what came of it.
#[derive(Clone, Debug)]
pub struct Row {
    /// The scenario.
    pub scenario: Scenario,
    /// The same sender over each link alone.
    pub alone: Vec<Carried>,
    /// Through two nodes.
    pub outcome: Outcome,
}

impl Row {
    /// Runs a scenario; `watches`: its course is noted.
    ///
    /// # Errors
    /// A promise was broken; the text says which, and how to repeat it.
    pub fn run(scenario: Scenario, watches: bool) -> Result<Self, String> {
        let fault = |what: String| {
            let seed = scenario.seed;
            format!(
                "seed {seed}: {what}\n{scenario}\nrepeat with: cargo xtask sim --bulk --seed {seed}"
            )
        };
        let alone = (0..scenario.links.len()).map(|at| {
            let (link, changes) = scenario.alone(at);
            let (seed, bytes) = (scenario.seed + at as u64, scenario.bytes);
            Plain::new(seed, &link, changes, bytes).run()
        });
        let alone = alone.collect::<Result<_, _>>().map_err(fault)?;
        let outcome = Pair::new(&scenario, watches).run().map_err(fault)?;
        Ok(Self {
            scenario,
            alone,
            outcome,
        })
    }

    /// Megabits a second over the best single link that trust allows.
    pub fn best(&self) -> f64 {
        let links = self.alone.iter().enumerate();
        let allowed = links.filter(|(at, _)| self.scenario.allows(*at));
        allowed.map(|(_, link)| link.rate()).fold(0.0, f64::max)
    }

    /// Megabits a second over all links, each alone.
    pub fn sum(&self) -> f64 {
        self.alone.iter().map(Carried::rate).sum()
    }

    /// What dibs gives over what the best link has alone.
    pub fn ratio(&self) -> f64 {
        self.outcome.rate() / self.best()
    }
}

impl fmt::Display for Row {
    /// Rates in Mbit/s, by [`HEADING`]; links are Mbit/s / ms of round trip, with jitter, loss, and the buffer in KiB.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (o, s) = (&self.outcome, &self.scenario);
        write!(
            f,
            "{:>8} {:8} {:>6.1} {:>6.1} {:>6.1} {:>5.2} {:>5} {:>3} {:>5}/{:<5} {:>4}  {s}",
            s.seed,
            if s.bump == SCRAMBLE {
                "scramble"
            } else {
                "seal"
            },
            self.best(),
            self.sum(),
            o.rate(),
            self.ratio(),
            o.sender.again,
            o.sender.timeouts,
            o.path_losses[0],
            o.path_losses[1],
            o.receiver.longest_gap.as_millis(),
        )
    }
}
