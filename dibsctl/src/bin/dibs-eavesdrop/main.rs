//! `dibs-eavesdrop`: what someone on a path sees, and what they can read of it. `dibsctl eavesdrop` runs it.

mod capture;
mod hearing;
mod render;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use dibs_control::Client;
use dibsctl::options::{Eavesdrop, SOCKET};

/// Shows what someone on a path sees, and what they can read of it
#[derive(Parser)]
#[command(bin_name = "dibsctl eavesdrop", version)]
struct Args {
    #[command(flatten)]
    options: Eavesdrop,
    /// Control socket of dibsd
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// Print JSON, with keys that stay
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    dibsctl::output::ended(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let Eavesdrop {
        pcap,
        path,
        conn,
        seconds,
        port,
        known,
    } = &args.options;
    let heard = match (pcap, path) {
        (Some(file), _) => hearing::of_file(file, *port)?,
        (None, Some(path)) => {
            let mut client = Client::connect(&args.socket)?;
            hearing::of_path(&mut client, (path, *conn), *seconds, *port)?
        }
        (None, None) => unreachable!("the command line asks for one of both"),
    };
    hearing::show_what_is_read(&heard, known.as_deref(), args.json)
}
