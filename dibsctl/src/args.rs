//! What may stand on the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Parser, Subcommand};
use clap_complete::Shell;
use dibs_config::{BadAmount, Rate, Volume};
use dibs_control::{ConnId, Limit, Match, RuleId, Selector, Terms};
use dibs_settings::{Role, Scheduler};
use dibsctl::options::{Demo, Eavesdrop, SOCKET};
use ipnet::IpNet;

use crate::init::Wishes;
use crate::top;

/// Sees and steers what dibsd does to this host's connections.
#[derive(Parser)]
#[command(name = "dibsctl", version, disable_help_subcommand = true)]
pub(crate) struct Args {
    /// Where dibsd listens
    #[arg(
        long,
        global = true,
        display_order = 99,
        value_name = "PATH",
        default_value = SOCKET
    )]
    pub(crate) socket: PathBuf,
    /// Print JSON, with keys that stay
    #[arg(long, global = true, display_order = 100)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Daemon, session, peers, paths and bumps at a glance
    Status,
    /// Live connections to peers
    #[command(subcommand)]
    Conn(ConnCommand),
    /// Put a bump into the live connections that match, now
    #[command(
        override_usage = "dibsctl enable SELECTOR... [--bump <NAME>]",
        group(selectors().args(SELECTOR))
    )]
    Enable {
        #[command(flatten)]
        selector: SelectorArgs,
        /// Which bump; without it the configuration's default_bump
        #[arg(long, value_name = "NAME")]
        bump: Option<String>,
    },
    /// Take the live connections that match back to plain, now
    #[command(
        override_usage = "dibsctl disable SELECTOR... [--force]",
        group(selectors().args(SELECTOR))
    )]
    Disable {
        #[command(flatten)]
        selector: SelectorArgs,
        /// Move connections that plain does not carry as well: they break
        #[arg(long)]
        force: bool,
    },
    /// Rules for connections to come; they apply to established ones at once
    #[command(subcommand)]
    Rule(RuleCommand),
    /// Paths to the peers
    #[command(subcommand)]
    Path(PathCommand),
    /// Peers and the sessions with them
    #[command(subcommand)]
    Peer(PeerCommand),
    /// Bumps that can be asked for
    #[command(subcommand)]
    Bump(BumpCommand),
    /// Follow what happens
    Events,
    /// Watch what flows by path, bump and connection, live
    Top(top::Options),
    /// Set this host up: make a key and a configuration, and print the line by which the other host gets to
    /// know this one; or add the other host, with its line
    Init(Wishes),
    /// Check a configuration file, without touching anything
    Check {
        /// The file
        file: PathBuf,
    },
    /// Show what someone on a path sees, and what he can read: of a capture made there, or of what passes now
    #[command(
        override_usage = "dibsctl eavesdrop (--pcap <FILE> | --path <NAME> [--conn <ID>]) [OPTIONS]"
    )]
    Eavesdrop(Eavesdrop),
    /// Say what would keep dibs from working on this host, and what to do about it
    ///
    /// It changes nothing, whether dibsd runs or not. Who is not root is told what only root may look at. The exit
    /// status is 0 if nothing fails, whatever is warned of or skipped, and 1 if something does.
    Doctor {
        /// The configuration of dibsd; without it that in /etc/dibs, if there is one
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Let go of everything that is installed in the kernel: steered connections go on in plain
    Cleanup {
        /// Let go also if connections break, because plain does not carry them
        #[arg(long)]
        force: bool,
    },
    /// Show what dibs does: two hosts on this machine, a text between them, an eavesdropper
    Demo(Demo),
    /// Print a new private key
    Genkey,
    /// Print the public key of the private key on stdin
    Pubkey,
    /// Print a new preshared key
    Genpsk,
    /// Print the completions for a shell
    Completions {
        /// Which shell
        shell: Shell,
    },
    /// Write the manual pages to a directory
    #[command(hide = true)]
    Man {
        /// Where, which exists
        directory: PathBuf,
    },
}

#[derive(Subcommand)]
pub(crate) enum ConnCommand {
    /// Id, ends, process, bump, since when, bytes and retransmissions, per path
    List,
}

#[derive(Subcommand)]
pub(crate) enum RuleCommand {
    /// Make a rule; it outlives the daemon
    #[command(
        override_usage = "dibsctl rule add SELECTOR... --bump <NAME> [--require | --prefer] [--scheduler <NAME>]",
        group(selectors().args(CLASS).args(Terms::keys()))
    )]
    Add {
        #[command(flatten)]
        class: ClassArgs,
        #[command(flatten)]
        terms: Box<TermArgs>,
        /// What the connections take; direct: nothing, new ones leave in plain
        #[arg(long, value_name = "NAME")]
        bump: String,
        /// Let them go, and come, by nothing else: without a session or a trusted path they wait, and
        /// disable is refused
        #[arg(long, conflicts_with = "prefer")]
        require: bool,
        /// Leave what begins without a session plain until there is one
        #[arg(long)]
        prefer: bool,
        /// Before rules with less, after rules with more
        #[arg(
            long,
            value_name = "N",
            default_value_t = 0,
            allow_negative_numbers = true
        )]
        priority: i32,
        /// Share out their new data over the paths otherwise than that of others, whichever bump they are on; for
        /// rules by addresses, ports, peer and time; root only
        #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name)))]
        scheduler: Option<String>,
    },
    /// All rules, in the order in which they are tried; for others than root those of their own
    List,
    /// Delete a rule that `rule add` made
    Del {
        /// As `rule list` shows it
        id: RuleId,
        /// Move connections of the rule that plain does not carry as well: they break
        #[arg(long)]
        force: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum PathCommand {
    /// Trust, role, state, round trip, loss and load, and why a path is not used
    List,
    /// Send new data by this path as long as it is usable: it answers, and its round trip is not too long
    Prefer {
        /// As `path list` shows it
        name: String,
        /// When it stops answering, send it so many probes before they come more slowly; 100 without
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10_000))]
        weight: Option<u32>,
        /// Use it while its round trip is at most so many times the least of all; 2 without
        #[arg(long, value_name = "F")]
        delta: Option<f64>,
    },
    /// Send new data as the scheduler chooses
    Unprefer,
    /// Share out new data over the paths otherwise; without a name, say how it is done now
    Scheduler {
        /// Which
        #[arg(value_parser = PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name)))]
        name: Option<String>,
    },
    /// Say what a path is for
    Role {
        /// As `path list` shows it
        name: String,
        /// For data; for what the others have no room for; for when the others are gone; for nothing
        #[arg(value_parser = PossibleValuesParser::new(Role::ALL.map(Role::name)))]
        role: String,
    },
    /// Limit what a path carries
    #[command(group(ArgGroup::new("limit").args(["rate", "volume"]).required(true).multiple(true)))]
    Limit {
        /// As `path list` shows it
        name: String,
        /// What this host sends by it at most, such as "20 Mbit" a second, or none
        #[arg(long, value_parser = rate)]
        rate: Option<Limit>,
        /// What it carries at most in a calendar month, both ways, such as "10 GB", or none
        #[arg(long, value_parser = volume)]
        volume: Option<Limit>,
    },
    /// Use the paths as the configuration file says again
    Reset,
}

#[derive(Subcommand)]
pub(crate) enum PeerCommand {
    /// Name, state and load
    List,
}

#[derive(Subcommand)]
pub(crate) enum BumpCommand {
    /// Name, kind and use
    List,
}

/// What names connections that are, and those to come.
const CLASS: [&str; 8] = ["all", "dport", "sport", "dst", "src", "uid", "user", "peer"];

/// The same, and what names only those that are.
const SELECTOR: [&str; 10] = [
    "conn", "pid", "all", "dport", "sport", "dst", "src", "uid", "user", "peer",
];

/// Something has to be selected.
fn selectors() -> ArgGroup {
    ArgGroup::new("selector").required(true).multiple(true)
}

/// A connection has to match in everything that is given.
#[derive(clap::Args)]
pub(crate) struct SelectorArgs {
    /// One connection, as `conn list` shows it
    #[arg(long, value_name = "ID", conflicts_with_all = &SELECTOR[1..])]
    conn: Option<ConnId>,
    #[command(flatten)]
    class: ClassArgs,
    /// Process that holds the socket
    #[arg(long, value_name = "PID", conflicts_with = "all")]
    pid: Option<u32>,
}

/// A connection, now or to come, has to match in everything that is given.
#[derive(clap::Args)]
pub(crate) struct ClassArgs {
    /// All connections to peers
    #[arg(long, conflicts_with_all = &CLASS[1..])]
    all: bool,
    /// Port of the far end
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    dport: Option<u16>,
    /// Port of this end
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    sport: Option<u16>,
    /// Address or prefix of the far end
    #[arg(long, value_name = "ADDRESS", value_parser = prefix)]
    dst: Option<IpNet>,
    /// Address or prefix of this end
    #[arg(long, value_name = "ADDRESS", value_parser = prefix)]
    src: Option<IpNet>,
    /// Number of the user that owns the socket
    #[arg(long, value_name = "UID")]
    uid: Option<u32>,
    /// Name of that user
    #[arg(long, value_name = "NAME", value_parser = uid_of, conflicts_with = "uid")]
    user: Option<u32>,
    /// Name of the peer
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,
}

/// What a rule may name besides, once for all connections to come.
#[derive(clap::Args)]
pub(crate) struct TermArgs {
    /// Number of the group of the socket
    #[arg(long, value_name = "GID")]
    gid: Option<u32>,
    /// Interface by which the connection would go without a bump
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Differentiated services code point, a number or a name such as EF
    #[arg(long, value_name = "DSCP")]
    dscp: Option<String>,
    /// Part of each day by the local time, such as 08:00-18:00
    #[arg(long, value_name = "SPAN")]
    time: Option<String>,
    /// Further matches of iptables, such as "-m length --length 0:99"; root only
    #[arg(long, value_name = "MATCHES", allow_hyphen_values = true)]
    r#match: Option<String>,
}

impl From<TermArgs> for Terms {
    fn from(args: TermArgs) -> Self {
        let named = [
            ("gid", args.gid.map(|gid| gid.to_string())),
            ("interface", args.interface),
            ("dscp", args.dscp),
            ("time", args.time),
            ("match", args.r#match),
        ];
        let named = named.into_iter();
        named.filter_map(|(key, text)| Some((key, text?))).collect()
    }
}

/// The number of a user.
fn uid_of(name: &str) -> Result<u32, String> {
    match nix::unistd::User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err("there is no such user".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl From<SelectorArgs> for Selector {
    fn from(args: SelectorArgs) -> Self {
        let SelectorArgs { conn, class, pid } = args;
        match (conn, Selector::from(class)) {
            (Some(id), _) => Selector::Conn(id),
            (None, Selector::Match(class)) => Selector::Match(Match { pid, ..class }),
            (None, all) => all,
        }
    }
}

impl From<ClassArgs> for Selector {
    fn from(args: ClassArgs) -> Self {
        let ClassArgs {
            all,
            dport,
            sport,
            dst,
            src,
            uid,
            user,
            peer,
        } = args;
        if all {
            return Selector::All;
        }
        Selector::Match(Match {
            dport,
            sport,
            dst,
            src,
            uid: uid.or(user),
            peer,
            pid: None,
        })
    }
}

fn rate(text: &str) -> Result<Limit, BadAmount> {
    match text {
        "none" => Ok(Limit::None),
        _ => text.parse().map(|rate: Rate| Limit::At(rate.bits())),
    }
}

fn volume(text: &str) -> Result<Limit, BadAmount> {
    match text {
        "none" => Ok(Limit::None),
        _ => text.parse().map(|volume: Volume| Limit::At(volume.bytes())),
    }
}

fn prefix(text: &str) -> Result<IpNet, String> {
    let net = text
        .parse::<IpNet>()
        .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    net.map(|net| net.trunc())
        .map_err(|_| "write 10.0.1.2, 10.0.1.0/24 or fd00::/64".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn prefixes() {
        assert_eq!(prefix("10.0.1.2").unwrap().to_string(), "10.0.1.2/32");
        assert_eq!(prefix("10.0.1.2/24").unwrap().to_string(), "10.0.1.0/24");
        assert!(prefix("server").is_err());
    }
}
