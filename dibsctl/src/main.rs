//! The command line of dibs. Exits with 0 when done, 1 when refused or failed, with one sentence
//! on stderr, 2 when the command line itself is wrong.

mod args;
mod check;
mod cleanup;
mod commands;
mod doctor;
mod eavesdrop;
mod init;
mod keys;
mod output;
mod render;
mod table;
mod top;
mod units;

use std::io;
use std::process::ExitCode;

use clap::Parser;

use crate::args::Args;

fn main() -> ExitCode {
    match commands::run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::say(&format!(
                "dibsctl: {}",
                units::printable(&format!("{error:#}"))
            ));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
