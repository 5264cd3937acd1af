//! The command line of dibs. Exits with 0 when done, 1 when refused or failed, with one sentence
//! on stderr, 2 when the command line itself is wrong.

mod args;
mod check;
mod cleanup;
mod commands;
mod doctor;
mod init;
mod keys;
mod program;
mod render;
mod table;
mod top;

use std::process::ExitCode;

use clap::Parser;
use dibsctl::{output, units};

use crate::args::Args;

fn main() -> ExitCode {
    output::ended(commands::run(Args::parse()))
}
