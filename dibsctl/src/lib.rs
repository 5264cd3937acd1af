//! Parts that `dibsctl` shares with the programs that it runs for some of its commands: `dibs-demo` and `dibs-eavesdrop`.
//! The laboratory and the attack on the scrambler are in these, and not in what root uses every day.

pub mod options;
pub mod output;
pub mod units;
