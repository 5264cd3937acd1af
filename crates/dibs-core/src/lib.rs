//! The pure core of dibs: no IO, no clock, no threads. `now` and randomness are arguments.

pub mod path;
pub mod session;
pub mod time;

pub use time::Time;
