//! The command line of dibs. Exits with 0 when done, 1 when refused or failed, with one sentence
//! on stderr, 2 when the command line itself is wrong.

mod args;
mod check;
mod cleanup;
mod commands;
mod doctor;
mod init;
mod keys;
mod leave;
mod program;
mod render;
mod speed;
mod table;
mod top;

use std::process::ExitCode;

use clap::Parser;
use dibsctl::{output, units};

use crate::args::Args;

/// Answer to a command line without a command: those that matter first.
const FIRST: &str = "\
dibsctl controls dibs on this host. The commands that matter first:

  dibsctl status                  Show the daemon, peers and paths
  dibsctl conn list               List open connections to peers
  dibsctl enable --dport 5432     Protect the open connections to port 5432
  dibsctl disable --dport 5432    Return them to plain TCP
  dibsctl doctor                  Find out why something does not work

Set up a host: dibsctl init. All commands: dibsctl --help. One of them: dibsctl enable --help.";

fn main() -> ExitCode {
    if std::env::args_os().len() < 2 {
        output::say(FIRST);
        return ExitCode::from(2);
    }
    output::ended(commands::run(Args::parse()))
}
