//! The papers' experiments, on this machine's stack.

mod dibs;
mod hint;

pub use dibs::{Phase, RUNS, Report as DibsReport, Run, dibs, table_one};
pub use hint::{Outcome, Recovery, Report as HintReport, hint};
