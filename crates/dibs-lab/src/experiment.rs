//! The papers' experiments, on this machine's stack.

mod dibs;
mod hint;
mod plot;
mod processor;

pub use dibs::{Phase, RUNS, Report as DibsReport, Run, dibs};
pub use hint::{Outcome, Recovery, Report as HintReport, hint};
