//! What a run came to, for people and for programs.

use std::fmt;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::plot;

/// A run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Place and time.
    pub environment: Environment,
    /// Each system's turns.
    pub rounds: usize,
    /// The length of a turn.
    pub seconds: f64,
    /// The experiments.
    pub tables: Vec<Table>,
}

/// Place and time of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// UTC.
    pub date: String,
    /// The version of its release.
    pub kernel: String,
    /// Its model.
    pub cpu: String,
    /// How many of them.
    pub cpus: usize,
    /// Load of the last minute, when the run began: what else the machine did.
    pub load: String,
}

/// An experiment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// Title of the experiment.
    pub title: String,
    /// The names of the columns.
    pub columns: Vec<String>,
    /// Medians over the rounds.
    pub rows: Vec<Vec<String>>,
    /// Comparisons.
    pub ratios: Vec<Ratio>,
    /// Notes beside the figures.
    pub notes: Vec<String>,
    /// All turns.
    pub turns: serde_json::Value,
}

/// A figure: its name, how many decimals are shown, and what it is of a turn.
pub(super) type Figure<'a, T> = (&'a str, usize, fn(&T) -> f64);

/// Figures of a turn of this name, each by name, decimals and value.
macro_rules! figures {
    ($turn:ident: $($name:literal, $decimals:literal, $value:expr;)*) => {
        &[$(($name, $decimals, |$turn| $value)),*]
    };
}
pub(super) use figures;

/// The turns of systems, by their labels.
pub(super) type Turns<T> = [(String, Vec<T>)];

impl Table {
    /// One that has no rows yet.
    pub(super) fn new(title: &str, columns: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            columns: columns.iter().map(|&name| name.to_owned()).collect(),
            rows: Vec::new(),
            ratios: Vec::new(),
            notes: Vec::new(),
            turns: serde_json::Value::Null,
        }
    }

    /// A row for each system, with the medians of its turns.
    pub(super) fn of<T: Serialize>(
        title: &str,
        first: &str,
        turns: &Turns<T>,
        figures: &[Figure<'_, T>],
    ) -> Result<Self> {
        let names = figures.iter().map(|(name, ..)| *name);
        let mut table = Self::new(title, &Vec::from_iter([first].into_iter().chain(names)));
        for (label, turns) in turns {
            let medians = figures.iter().map(|figure| shown(figure, turns));
            table
                .rows
                .push([label.clone()].into_iter().chain(medians).collect());
        }
        table.turns = serde_json::to_value(turns)?;
        Ok(table)
    }

    /// Picture of the first and the last figure of each system, as SVG.
    pub fn picture(&self) -> String {
        let last = self.columns.len().saturating_sub(1);
        let columns = { self.columns.iter().enumerate() }.filter(|(at, _)| *at == 1 || *at == last);
        let bars = |at: usize| {
            let rows = self.rows.iter();
            rows.filter_map(|row| Some((row.first()?.as_str(), row.get(at)?.parse().ok()?)))
                .collect()
        };
        let groups = columns.map(|(at, name)| (name.as_str(), bars(at)));
        plot::bars(&groups.collect::<Vec<_>>())
    }

    /// A row for each figure, with the median of one system's turns.
    pub(super) fn of_one<T: Serialize>(
        title: &str,
        turns: &[T],
        figures: &[Figure<'_, T>],
    ) -> Result<Self> {
        let row = |figure: &Figure<'_, T>| vec![figure.0.to_owned(), shown(figure, turns)];
        Ok(Self {
            rows: figures.iter().map(row).collect(),
            turns: serde_json::to_value(turns)?,
            ..Self::new(title, &["", "median"])
        })
    }
}

fn shown<T>((_, decimals, value): &Figure<'_, T>, turns: &[T]) -> String {
    format!("{:.decimals$}", median(turns.iter().map(value)))
}

/// A comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ratio {
    /// Subject of the figure.
    pub what: String,
    /// The median over the rounds.
    pub value: f64,
    /// Value that it should reach.
    pub least: Option<f64>,
    /// Value that it should not exceed.
    pub most: Option<f64>,
}

impl Environment {
    /// Here, at this time.
    ///
    /// # Errors
    /// If `/proc` is not there.
    pub fn of(now: SystemTime) -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).context(path.to_owned());
        let cpus = read("/proc/cpuinfo")?;
        // Not every architecture names it.
        let model = cpus
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
            .map_or("unknown", |(_, model)| model.trim());
        let load = read("/proc/loadavg")?;
        Ok(Self {
            date: humantime::format_rfc3339_seconds(now).to_string(),
            kernel: version(&read("/proc/sys/kernel/osrelease")?).to_owned(),
            cpu: model.to_owned(),
            cpus: std::thread::available_parallelism()?.get(),
            load: load.split(' ').next().unwrap_or_default().to_owned(),
        })
    }
}

/// What a release begins with; what a distribution or a user adds to it tells nothing of the kernel.
fn version(release: &str) -> &str {
    let end = release.find(|c: char| !c.is_ascii_digit() && c != '.');
    release[..end.unwrap_or(release.len())].trim_end_matches('.')
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            date,
            kernel,
            cpu,
            cpus,
            load,
        } = self;
        write!(f, "{date}, Linux {kernel}, {cpus} x {cpu}, load {load}.")
    }
}

impl Ratio {
    /// One without a target.
    pub(super) fn new(what: impl Into<String>, value: f64) -> Self {
        Self {
            what: what.into(),
            value,
            least: None,
            most: None,
        }
    }

    /// What it should reach, if anything.
    pub(super) fn least(self, least: impl Into<Option<f64>>) -> Self {
        Self {
            least: least.into(),
            ..self
        }
    }

    /// What it should not exceed, if anything.
    pub(super) fn most(self, most: impl Into<Option<f64>>) -> Self {
        Self {
            most: most.into(),
            ..self
        }
    }

    /// One system's value beside another's, by their labels, within rounds; nothing if one of them did not run.
    pub(super) fn beside<T>(
        turns: &Turns<T>,
        what: &str,
        (one, other): (&str, &str),
        value: fn(&T) -> f64,
    ) -> Option<Self> {
        let of = |name: &str| {
            let found = turns.iter().find(|(label, _)| *label == name);
            found.map(|(_, turns)| turns.iter().map(value))
        };
        let ratio = median(of(one)?.zip(of(other)?).map(|(one, other)| one / other));
        Some(Self::new(format!("{what}: {one} / {other}"), ratio))
    }

    fn is_met(&self) -> bool {
        self.least.is_none_or(|least| self.value >= least)
            && self.most.is_none_or(|most| self.value <= most)
    }
}

/// In Markdown.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.environment)?;
        writeln!(
            f,
            "Medians of {} rounds of {} s, the systems in turn; ratios are taken within rounds.",
            self.rounds, self.seconds
        )?;
        self.tables
            .iter()
            .try_for_each(|table| write!(f, "\n{table}"))
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}\n", self.title)?;
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| row[column].len());
                cells
                    .chain([self.columns[column].len(), 3])
                    .max()
                    .unwrap_or(3)
            })
            .collect();
        let mut line = |cells: &[String]| {
            for (cell, width) in cells.iter().zip(&widths) {
                write!(f, "| {cell:width$} ")?;
            }
            writeln!(f, "|")
        };
        line(&self.columns)?;
        let rule = widths
            .iter()
            .enumerate()
            .map(|(column, width)| match column {
                0 => "-".repeat(*width),
                _ => format!("{}:", "-".repeat(width - 1)),
            });
        line(&rule.collect::<Vec<_>>())?;
        self.rows.iter().try_for_each(|row| line(row))?;
        if !self.ratios.is_empty() || !self.notes.is_empty() {
            writeln!(f)?;
        }
        for ratio in &self.ratios {
            write!(f, "- {}: {:.2}", ratio.what, ratio.value)?;
            let target = match (ratio.least, ratio.most) {
                (Some(least), _) => format!("at least {least}"),
                (None, Some(most)) => format!("at most {most}"),
                (None, None) => {
                    writeln!(f)?;
                    continue;
                }
            };
            let verdict = if ratio.is_met() { "met" } else { "missed" };
            writeln!(f, " ({target}: {verdict})")?;
        }
        self.notes
            .iter()
            .try_for_each(|note| writeln!(f, "- {note}"))
    }
}

/// The middle value, or the mean of the middle two.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        _ if values.is_empty() => f64::NAN,
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median([]).is_nan());
    }

    #[test]
    fn of_a_release_the_version_counts() {
        assert_eq!(version("6.18.5-1-amd64\n"), "6.18.5");
        assert_eq!(version("6.1"), "6.1");
    }

    #[test]
    fn tables_are_markdown() {
        let ratio = |what: &str, least, most| Ratio {
            what: what.to_owned(),
            value: 0.9,
            least,
            most,
        };
        let table = Table {
            title: "One stream".to_owned(),
            columns: vec!["system".to_owned(), "Gbit/s".to_owned()],
            rows: vec![vec!["plain".to_owned(), "1.5".to_owned()]],
            ratios: vec![
                ratio("x / y", Some(0.9), None),
                ratio("x / z", Some(1.0), None),
                ratio("lost", None, Some(0.5)),
                ratio("other", None, None),
            ],
            notes: vec!["a note".to_owned()],
            turns: serde_json::Value::Null,
        };
        let expected = "### One stream\n\n\
            | system | Gbit/s |\n\
            | ------ | -----: |\n\
            | plain  | 1.5    |\n\n\
            - x / y: 0.90 (at least 0.9: met)\n\
            - x / z: 0.90 (at least 1: missed)\n\
            - lost: 0.90 (at most 0.5: missed)\n\
            - other: 0.90\n\
            - a note\n";
        assert_eq!(table.to_string(), expected);
    }
}
