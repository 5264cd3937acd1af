//! Two revisions in turn: this tree's programs, and those of another one, through the same experiments.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;

use super::report::{Table, median};
use crate::dibs::Programs;

/// Another revision's programs.
#[derive(Clone, Debug)]
pub struct Other {
    /// As the user calls it.
    pub name: String,
    /// Directory of its `dibsd` and `dibsctl`.
    pub directory: PathBuf,
}

/// `NAME=DIRECTORY`.
impl FromStr for Other {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, directory) = text.split_once('=').ok_or("cargo xtask bench builds it")?;
        Ok(Self {
            name: name.to_owned(),
            directory: directory.into(),
        })
    }
}

impl Other {
    /// # Errors
    /// If one is missing: an installed one would be measured in its place.
    pub(super) fn programs(&self) -> Result<Programs> {
        for program in ["dibsd", "dibsctl"] {
            let path = self.directory.join(program);
            ensure!(path.is_file(), "there is no {}", path.display());
        }
        Programs::beside(&self.directory)
    }
}

/// The tables of two revisions, round by round, as one for each: medians of this tree's, each with the median of its
/// ratios to the other's.
///
/// # Errors
/// If the rounds' tables are of different shapes.
pub(super) fn merged(other: &str, rounds: &[[Vec<Table>; 2]]) -> Result<Vec<Table>> {
    let [first, _] = rounds.first().context("there is a round")?;
    let table = |at: usize| {
        let pairs = rounds
            .iter()
            .map(|[ours, theirs]| Some([ours.get(at)?, theirs.get(at)?]));
        let pairs: Option<Vec<_>> = pairs.collect();
        match pairs {
            Some(pairs) => one(other, &pairs),
            None => bail!("a round has fewer tables than the first one"),
        }
    };
    (0..first.len()).map(table).collect()
}

fn one(other: &str, pairs: &[[&Table; 2]]) -> Result<Table> {
    let [first, _] = pairs[0];
    let same = |table: &&Table| {
        let shape = |table: &Table| -> Vec<usize> { table.rows.iter().map(Vec::len).collect() };
        table.columns == first.columns && shape(table) == shape(first)
    };
    ensure!(
        pairs.iter().flatten().all(same),
        "{}: the rounds' tables differ",
        first.title
    );
    let mut columns = first.columns[..1].to_vec();
    for column in &first.columns[1..] {
        columns.extend([column.clone(), "ratio".to_owned()]);
    }
    let cells = |row: usize, column: usize| {
        let numbers = |at: usize| {
            pairs
                .iter()
                .map(move |pair| number(&pair[at].rows[row][column]))
        };
        let ours: Option<Vec<f64>> = numbers(0).collect();
        let theirs: Option<Vec<f64>> = numbers(1).collect();
        let (Some(ours), Some(theirs)) = (ours, theirs) else {
            return [first.rows[row][column].clone(), "-".to_owned()];
        };
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs);
        let ratio = median(ratios.filter(|ratio| ratio.is_finite()));
        let ratio = match ratio.is_nan() {
            true => "-".to_owned(),
            false => format!("{ratio:.2}"),
        };
        // As precise as a round's.
        let decimals = first.rows[row][column].split_once('.');
        let decimals = decimals.map_or(0, |(_, behind)| {
            behind.chars().take_while(char::is_ascii_digit).count()
        });
        [format!("{:.decimals$}", median(ours)), ratio]
    };
    let row = |(at, row): (usize, &Vec<String>)| {
        let mut made = vec![row[0].clone()];
        made.extend((1..row.len()).flat_map(|column| cells(at, column)));
        made
    };
    let turns = |at: usize| pairs.iter().map(|pair| &pair[at].turns).collect::<Vec<_>>();
    let mut notes = vec![format!(
        "a ratio is that of this tree to {other}, the median of those of the rounds; what runs no dibs shows the noise"
    )];
    notes.extend(first.notes.iter().cloned());
    Ok(Table {
        title: format!("{}, beside {other}", first.title),
        rows: first.rows.iter().enumerate().map(row).collect(),
        columns,
        ratios: Vec::new(),
        notes,
        turns: json!({ "this tree": turns(0), other: turns(1) }),
    })
}

/// The number that a cell begins with.
fn number(cell: &str) -> Option<f64> {
    let end = cell.find(|c: char| !c.is_ascii_digit() && c != '.');
    cell[..end.unwrap_or(cell.len())].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rate: &str, lost: &str) -> Table {
        Table {
            rows: vec![["seal", rate, lost, "none"].map(str::to_owned).to_vec()],
            turns: json!([rate]),
            ..Table::new("One stream", &["system", "Gbit/s", "lost", "why"])
        }
    }

    #[test]
    fn each_figure_stands_beside_its_ratio() {
        let round =
            |ours: &str, theirs: &str| [vec![table(ours, "2 (1 to 3)")], vec![table(theirs, "0")]];
        let rounds = [
            round("9.0", "10.0"),
            round("8.0", "8.0"),
            round("6.0", "5.0"),
        ];
        let made = merged("v1", &rounds).unwrap();
        assert_eq!(
            made[0].columns,
            ["system", "Gbit/s", "ratio", "lost", "ratio", "why", "ratio"]
        );
        assert_eq!(
            made[0].rows[0],
            ["seal", "8.0", "1.00", "2", "-", "none", "-"]
        );
        assert_eq!(made[0].title, "One stream, beside v1");
        assert_eq!(made[0].turns["v1"], json!([["10.0"], ["8.0"], ["5.0"]]));
    }

    #[test]
    fn rounds_of_other_shapes_are_refused() {
        let mut other = table("1", "1");
        other.rows.clear();
        let rounds = [[vec![table("1", "1")], vec![other]]];
        assert!(merged("v1", &rounds).is_err());
        assert!(merged("v1", &[[vec![table("1", "1")], Vec::new()]]).is_err());
    }

    #[test]
    fn an_other_revision_is_a_name_and_a_place() {
        let other: Other = "v1=/tmp/v1".parse().unwrap();
        assert_eq!(
            (other.name.as_str(), other.directory.as_path()),
            ("v1", "/tmp/v1".as_ref())
        );
        assert!("v1".parse::<Other>().is_err());
        assert!(
            other
                .programs()
                .unwrap_err()
                .to_string()
                .contains("/tmp/v1/dibsd")
        );
    }
}
