//! Every table and figure of the papers on this machine, in one report: `cargo xtask reproduce`.
//!
//! A [`Part`] runs an experiment and returns a [`Finding`]: the set-up, the paper's numbers beside ours with a verdict
//! each, tables, pictures and captures. [`Plan::run`] runs the parts one after the other, keeps what came of each as JSON,
//! and writes the [page](page::page) anew after each, so that a run that is cut short leaves a report of what was done.

mod finding;
mod page;
mod parts;
mod run;
mod screen;

pub use finding::{Block, Comparison, Finding, Outcome, Record, Verdict};
pub use page::page;
pub use parts::{PARTS, Part, Stage};
pub use run::Plan;
