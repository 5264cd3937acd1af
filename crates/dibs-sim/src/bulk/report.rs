//! What scenarios came to: a row each, and a summary.

use std::fmt;

use dibs_core::bump::SCRAMBLE;

use super::control::Algorithm;
use super::pair::{Outcome, Pair};
use super::plain::{Carried, Plain};
use super::scenario::Scenario;

/// Of what the best link has alone; less is named in the summary. Headers and the trusted share's bookkeeping
/// take what is missing.
pub const ENOUGH: f64 = 0.97;
/// Rows that the summary names.
const WORST: usize = 10;

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
            Plain::new(seed, scenario.algorithm, &link, changes, bytes).run()
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
        self.best_alone().rate()
    }

    fn best_alone(&self) -> &Carried {
        let links = self.alone.iter().enumerate();
        let allowed = links.filter(|(at, _)| self.scenario.allows(*at));
        let best = allowed.max_by(|a, b| a.1.rate().total_cmp(&b.1.rate()));
        best.expect("one of the links is trusted").1
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
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (o, s) = (&self.outcome, &self.scenario);
        write!(
            f,
            "{:>5} {} {} {:>6.1} {:>6.1} {:>6.1} {:>5.2} {:>5}/{:<5} {:>6} {:>3} {:>3} {:>4}/{:<4} {:>6}/{:<6} {:>6} {:>5}  {s}",
            s.seed,
            match s.algorithm {
                Algorithm::Cubic => "cubic",
                Algorithm::Bbr => "bbr  ",
            },
            if s.bump == SCRAMBLE {
                "scramble"
            } else {
                "seal    "
            },
            self.best(),
            self.sum(),
            o.rate(),
            self.ratio(),
            o.sender.started,
            self.best_alone().sender.started,
            o.sender.again,
            o.sender.timeouts,
            o.sender.undone,
            o.codel[0],
            o.codel[1],
            o.path_losses[0],
            o.path_losses[1],
            o.held >> 10,
            o.receiver.longest_gap.as_millis(),
        )
    }
}

/// Rows as a table, with a summary. Links are Mbit/s / ms of round trip, with jitter, loss, and the buffer in KiB;
/// the first one is trusted.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
}

impl Table {
    /// Adds a row, in the order of seeds.
    pub fn add(&mut self, row: Row) {
        let at = self
            .rows
            .partition_point(|r| r.scenario.seed < row.scenario.seed);
        self.rows.insert(at, row);
    }
}

/// What the columns are: of the start, the window at which it ended by dibs, and over the best link alone.
pub const HEADING: &str = "\
 seed send. bump       best    sum   dibs ratio  start/alone  again rto und codel/ret    lost/found    held   gap  links
                         Mbit/s                   segments               dropped       datagrams     KiB    ms";

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADING}")?;
        for row in &self.rows {
            writeln!(f, "{row}")?;
        }
        let count = |least: f64| self.rows.iter().filter(|r| r.ratio() < least).count();
        writeln!(
            f,
            "{} scenarios: {} below {ENOUGH} of the best link alone, {} below 0.9, {} below 0.75; worst:",
            self.rows.len(),
            count(ENOUGH),
            count(0.9),
            count(0.75),
        )?;
        let mut worst: Vec<&Row> = self.rows.iter().collect();
        worst.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        for row in worst.into_iter().take(WORST) {
            writeln!(f, "{row}")?;
        }
        Ok(())
    }
}
