//! Options of the commands that are programs of their own: `dibsctl` knows them for its help, completions and manual.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use dibs_control::ConnId;

/// The socket of a daemon that was not told otherwise.
pub const SOCKET: &str = "/run/dibs/dibsd.sock";

/// Options of `dibsctl eavesdrop`.
#[derive(Args)]
#[command(group = ArgGroup::new("source").required(true).args(["pcap", "path"]))]
pub struct Eavesdrop {
    /// Capture made on a path, pcap or pcapng
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Path of the running daemon to listen on (root only)
    #[arg(long, value_name = "NAME")]
    pub path: Option<String>,
    /// Show one connection: its segments while it is plain, and all datagrams of its peer, which do not tell connections
    /// apart
    #[arg(long, value_name = "ID", requires = "path")]
    pub conn: Option<ConnId>,
    /// Time to listen on the path
    #[arg(long, value_name = "SECONDS", default_value_t = 10, conflicts_with = "pcap",
        value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// UDP port of dibs
    #[arg(long, value_name = "PORT", default_value_t = 5300, value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// File that the eavesdropper knows was sent
    #[arg(long, value_name = "FILE")]
    pub known: Option<PathBuf>,
}

/// Options of `dibsctl demo`.
#[derive(Args)]
pub struct Demo {
    /// Length of the text, in MiB
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(16..=65536))]
    pub mebibytes: u32,
}
