//! What may stand on the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, ArgGroup, Parser, Subcommand};
use clap_complete::Shell;
use dibs_config::{BadAmount, Rate, Volume};
use dibs_control::{ConnId, Limit, Match, RuleId, Selector, Terms};
use dibs_settings::{Role, Scheduler};
use dibsctl::options::{Demo, Eavesdrop, SOCKET};
use ipnet::IpNet;

use crate::init::Wishes;
use crate::{speed, top};

/// Control the dibs daemon: connections, rules, paths.
#[derive(Parser)]
#[command(
    name = "dibsctl",
    version,
    after_help = "Examples:\n  dibsctl enable --dport 5432     protect the open connections to port 5432\n  \
        dibsctl doctor                  find out why something does not work"
)]
pub(crate) struct Args {
    /// Socket of dibsd
    #[arg(
        long,
        global = true,
        display_order = 99,
        value_name = "PATH",
        default_value = SOCKET
    )]
    pub(crate) socket: PathBuf,
    /// Print JSON; its keys do not change between versions
    #[arg(long, global = true, display_order = 100)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Show the daemon, peers, paths, bumps and counters
    #[command(after_help = "Examples:\n  dibsctl status\n  dibsctl --json status | jq .counters")]
    Status,
    /// List open connections to peers
    #[command(subcommand)]
    Conn(ConnCommand),
    /// Protect open connections: put a bump into them
    #[command(
        override_usage = "dibsctl enable SELECTOR... [--bump <NAME>]",
        after_help = "Examples:\n  dibsctl enable --dport 5432\n  dibsctl enable --user backup --bump share"
    )]
    Enable {
        /// Bump to put in [default: default_bump of the configuration]
        #[arg(long, value_name = "NAME")]
        bump: Option<String>,
        #[command(flatten)]
        selector: SelectorArgs,
    },
    /// Return open connections to plain TCP
    #[command(
        override_usage = "dibsctl disable SELECTOR... [--force]",
        after_help = "Examples:\n  dibsctl disable --dport 5432\n  dibsctl disable --all"
    )]
    Disable {
        /// Move connections even if the network does not carry them in plain: they break
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        selector: SelectorArgs,
    },
    /// Manage rules, for new and open connections
    #[command(subcommand)]
    Rule(RuleCommand),
    /// List and control the paths to peers
    #[command(subcommand)]
    Path(PathCommand),
    /// List peers and their sessions
    #[command(subcommand)]
    Peer(PeerCommand),
    /// List bumps
    #[command(subcommand)]
    Bump(BumpCommand),
    /// Follow events as they happen
    #[command(after_help = "Examples:\n  dibsctl events\n  dibsctl --json events | jq .kind")]
    Events,
    /// Watch traffic by path, bump and connection
    #[command(after_help = "Examples:\n  dibsctl top --sort sent\n  dibsctl top --once")]
    Top(top::Options),
    /// Measure what the paths to a peer carry, alone and together
    ///
    /// Fills each path, and then all at once, in both directions. The daemons send this load behind the data of connections. A
    /// path that has a data cap or is a backup is measured only if --path names it.
    #[command(
        after_help = "Examples:\n  sudo dibsctl speed\n  sudo dibsctl speed server --path lte --time 5"
    )]
    Speed(speed::Options),
    /// Set up this host, or add another host
    ///
    /// Makes a key and a configuration, and prints a join token for the other host. With --peer it adds the other host by its
    /// join token. The token is not secret, but anyone who alters it can impersonate a host.
    #[command(
        after_help = "Examples:\n  sudo dibsctl init --trusted eth0\n  sudo dibsctl init --peer dibs1,name=b,key=...\n  \
            sudo dibsctl init --exit\n  sudo dibsctl init --gateway lan0 --join dibs1,name=server,key=..."
    )]
    Init(Wishes),
    /// Check a configuration file
    #[command(
        after_help = "Examples:\n  dibsctl check /etc/dibs/dibsd.toml\n  dibsctl --json check new.toml"
    )]
    Check {
        /// File to check
        file: PathBuf,
    },
    /// Show what an eavesdropper on a path can read
    #[command(
        override_usage = "dibsctl eavesdrop (--pcap <FILE> | --path <NAME> [--conn <ID>]) [OPTIONS]",
        after_help = "Examples:\n  sudo dibsctl eavesdrop --path wlan0\n  dibsctl eavesdrop --pcap capture.pcapng"
    )]
    Eavesdrop(Eavesdrop),
    /// Find out why dibs does not work on this host
    ///
    /// Checks the kernel, the firewall, the configuration and the daemon, and prints what to do. It changes nothing. Run it as root,
    /// or some checks are skipped. The exit status is 1 if a check fails, otherwise 0.
    #[command(
        after_help = "Examples:\n  sudo dibsctl doctor\n  sudo dibsctl doctor --config new.toml"
    )]
    Doctor {
        /// Configuration of dibsd [default: /etc/dibs/dibsd.toml, if it exists]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Remove all dibs rules, routes and devices
    ///
    /// Connections return to plain TCP first. Works without a daemon too, and removes what the last one left.
    #[command(after_help = "Examples:\n  sudo dibsctl cleanup\n  sudo dibsctl cleanup --force")]
    Cleanup {
        /// Remove them even if connections break, because the network does not carry them in plain
        #[arg(long)]
        force: bool,
    },
    /// Undo `init` on a host with one peer
    ///
    /// Removes what dibs has in the kernel, the configuration, which is kept as FILE.old, and the key.
    #[command(after_help = "Examples:\n  sudo dibsctl leave\n  sudo dibsctl leave --force")]
    Leave {
        /// Configuration file that `init` wrote; it is kept as FILE.old
        #[arg(
            long = "config",
            value_name = "FILE",
            default_value = "/etc/dibs/dibsd.toml"
        )]
        file: PathBuf,
        /// Leave even if connections break, because the network does not carry them in plain
        #[arg(long)]
        force: bool,
    },
    /// Show dibs at work: two hosts and an eavesdropper
    #[command(after_help = "Examples:\n  sudo dibsctl demo\n  sudo dibsctl demo --mebibytes 64")]
    Demo(Demo),
    /// Print a new private key
    #[command(
        after_help = "Examples:\n  umask 077; dibsctl genkey >private.key\n  dibsctl genkey | tee private.key | dibsctl pubkey"
    )]
    Genkey,
    /// Print the public key of a private key on stdin
    #[command(
        after_help = "Examples:\n  dibsctl pubkey <private.key\n  sudo sh -c 'dibsctl pubkey </etc/dibs/private.key'"
    )]
    Pubkey,
    /// Print a new preshared key
    #[command(
        after_help = "Examples:\n  umask 077; dibsctl genpsk >peer.psk\n  dibsctl genpsk | ssh b 'umask 077; cat >a.psk'"
    )]
    Genpsk,
    /// Print completions for a shell
    #[command(
        after_help = "Examples:\n  dibsctl completions bash >dibsctl.bash\n  dibsctl completions fish >dibsctl.fish"
    )]
    Completions {
        /// Shell to complete in
        shell: Shell,
    },
    /// Write the manual pages to a directory
    #[command(hide = true)]
    Man {
        /// Existing directory
        directory: PathBuf,
    },
}

#[derive(Subcommand)]
pub(crate) enum ConnCommand {
    /// List open connections: process, bump, traffic by path
    #[command(
        after_help = "Examples:\n  dibsctl conn list\n  dibsctl --json conn list | jq '.[].bump'"
    )]
    List,
}

#[derive(Subcommand)]
pub(crate) enum RuleCommand {
    /// Add a rule, which lasts until the host reboots
    ///
    /// A [[rule]] in the configuration file outlives a reboot.
    #[command(
        override_usage = "dibsctl rule add SELECTOR... --bump <NAME> [--require | --prefer] [--scheduler <NAME>]",
        after_help = "Examples:\n  dibsctl rule add --dport ssh --bump seal --require\n  \
            dibsctl rule add --dport 5432 --bump seal --time 01:00-05:00",
        args(["conn", "pid"].map(|name| Arg::new(name).long(name).hide(true).value_parser(in_no_rule)))
    )]
    Add {
        /// Bump of the connections; direct: none, new ones leave in plain
        #[arg(long, value_name = "NAME")]
        bump: String,
        /// Block these connections, in both directions, unless they use this bump
        #[arg(long, conflicts_with = "prefer")]
        require: bool,
        /// Leave connections plain while there is no session
        #[arg(long)]
        prefer: bool,
        /// Order among rules: higher numbers are tried first
        #[arg(
            long,
            value_name = "N",
            default_value_t = 0,
            allow_negative_numbers = true
        )]
        priority: i32,
        /// Scheduler for these connections (root only; not with user, group, interface, DSCP or match)
        #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name)))]
        scheduler: Option<String>,
        #[command(flatten)]
        class: ClassArgs,
        #[command(flatten)]
        terms: Box<TermArgs>,
    },
    /// List rules in the order in which they are tried
    #[command(
        after_help = "Examples:\n  dibsctl rule list\n  dibsctl --json rule list | jq '.[].id'"
    )]
    List,
    /// Delete a rule that `rule add` made
    #[command(after_help = "Examples:\n  dibsctl rule del 1000\n  dibsctl rule del 1000 --force")]
    Del {
        /// Number of the rule in `rule list`
        id: RuleId,
        /// Move its connections even if the network does not carry them in plain: they break
        #[arg(long)]
        force: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum PathCommand {
    /// List paths, their state, and why one is not used
    #[command(
        after_help = "Examples:\n  dibsctl path list\n  dibsctl --json path list | jq '.[].unused'"
    )]
    List,
    /// Prefer a path for new data while it works well
    #[command(
        after_help = "Examples:\n  dibsctl path prefer wlan\n  dibsctl path prefer wlan --delta 4"
    )]
    Prefer {
        /// Name of the path in `path list`
        name: String,
        /// Number of fast probes when the path stops answering [default: 100]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10_000))]
        weight: Option<u32>,
        /// Use it while its round trip is at most F times the shortest of all paths [default: 2]
        #[arg(long, value_name = "F")]
        delta: Option<f64>,
    },
    /// Prefer no path: let the scheduler choose
    #[command(after_help = "Examples:\n  dibsctl path unprefer\n  dibsctl path scheduler balanced")]
    Unprefer,
    /// Show or set the scheduler, which spreads data over paths
    #[command(
        after_help = "Examples:\n  dibsctl path scheduler\n  dibsctl path scheduler redundant"
    )]
    Scheduler {
        /// Scheduler to use from now on
        #[arg(value_parser = PossibleValuesParser::new(Scheduler::ALL.map(Scheduler::name)))]
        name: Option<String>,
    },
    /// Set what a path is used for
    #[command(
        after_help = "Examples:\n  dibsctl path role lte backup\n  dibsctl path role lte off"
    )]
    Role {
        /// Name of the path in `path list`
        name: String,
        /// Use of the path
        #[arg(value_parser = role())]
        role: String,
    },
    /// Limit the rate or the monthly data of a path
    #[command(
        group(ArgGroup::new("limit").args(["rate", "volume"]).required(true).multiple(true)),
        after_help = "Examples:\n  dibsctl path limit lte --rate \"5 Mbit\" --data-cap \"10 GB\"\n  \
            dibsctl path limit lte --rate none"
    )]
    Limit {
        /// Name of the path in `path list`
        name: String,
        /// Rate at which this host sends at most, such as "20 Mbit" a second, or none
        #[arg(long, value_parser = rate)]
        rate: Option<Limit>,
        /// Data that the path carries at most in a calendar month, both ways, such as "10 GB", or none
        #[arg(long = "data-cap", alias = "volume", value_name = "DATA", value_parser = volume)]
        volume: Option<Limit>,
    },
    /// Use the paths as the configuration file says
    #[command(after_help = "Examples:\n  dibsctl path reset\n  dibsctl path list")]
    Reset,
}

#[derive(Subcommand)]
pub(crate) enum PeerCommand {
    /// List peers and their sessions
    #[command(
        after_help = "Examples:\n  dibsctl peer list\n  dibsctl --json peer list | jq '.[].state'"
    )]
    List,
    /// Remove a peer that joined by `dibsctl init --join`
    #[command(
        after_help = "Examples:\n  sudo dibsctl peer remove van\n  sudo dibsctl peer remove van --force"
    )]
    Remove {
        /// Name in `peer list`
        name: String,
        /// Remove it even if it has connections on a bump: they break
        #[arg(long)]
        force: bool,
    },
}

#[derive(Subcommand)]
pub(crate) enum BumpCommand {
    /// List bumps, their kind and use
    #[command(
        after_help = "Examples:\n  dibsctl bump list\n  dibsctl --json bump list | jq '.[].name'"
    )]
    List,
}

/// Selectors of open and of new connections.
const CLASS: [&str; 8] = ["all", "dport", "sport", "dst", "src", "uid", "user", "peer"];

/// Selectors of open connections.
const SELECTOR: [&str; 10] = [
    "conn", "pid", "all", "dport", "sport", "dst", "src", "uid", "user", "peer",
];

/// Heading of what selects connections.
const SELECTORS: &str = "Selectors (a connection must match all that are given)";

/// Advice for a command line that selects nothing.
pub(crate) const SELECT: &str = "select connections, for example with --dport 22, or with --all";

/// Selectors of open connections.
#[derive(clap::Args)]
#[command(next_help_heading = SELECTORS)]
pub(crate) struct SelectorArgs {
    /// Number of one connection in `conn list`
    #[arg(long, value_name = "ID", conflicts_with_all = &SELECTOR[1..])]
    conn: Option<ConnId>,
    #[command(flatten)]
    class: ClassArgs,
    /// Process that holds the socket
    #[arg(long, value_name = "PID", conflicts_with = "all")]
    pid: Option<u32>,
}

/// Selectors of open and of new connections.
#[derive(clap::Args)]
#[command(next_help_heading = SELECTORS)]
pub(crate) struct ClassArgs {
    /// All connections to peers
    #[arg(long, conflicts_with_all = &CLASS[1..])]
    all: bool,
    /// Port of the other end, a number or a service such as ssh
    #[arg(long, value_name = "PORT", value_parser = port)]
    dport: Option<u16>,
    /// Port of this end, a number or a service
    #[arg(long, value_name = "PORT", value_parser = port)]
    sport: Option<u16>,
    /// Address or network of the other end
    #[arg(long, value_name = "ADDRESS", value_parser = prefix)]
    dst: Option<IpNet>,
    /// Address or network of this end
    #[arg(long, value_name = "ADDRESS", value_parser = prefix)]
    src: Option<IpNet>,
    /// User that owns the socket, by number
    #[arg(long, value_name = "UID")]
    uid: Option<u32>,
    /// User that owns the socket, by name
    #[arg(long, value_name = "NAME", value_parser = uid_of, conflicts_with = "uid")]
    user: Option<u32>,
    /// Peer, by name
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,
}

/// Selectors of rules alone.
#[derive(clap::Args)]
#[command(next_help_heading = SELECTORS)]
pub(crate) struct TermArgs {
    /// Group that owns the socket, by number
    #[arg(long, value_name = "GID")]
    gid: Option<u32>,
    /// Interface through which the connection would leave without a bump
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Differentiated services code point, a number or a name such as EF
    #[arg(long, value_name = "DSCP")]
    dscp: Option<String>,
    /// Part of each day in local time, such as 08:00-18:00
    #[arg(long, value_name = "SPAN")]
    time: Option<String>,
    /// Further matches of iptables, such as "-m length --length 0:99" (root only)
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

/// Port of a number, or of a service of TCP in `/etc/services`.
fn port(text: &str) -> Result<u16, String> {
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        let port = text.parse().ok().filter(|port| *port > 0);
        return port.ok_or_else(|| {
            "write one port, from 1 to 65535; ranges stand in a [[rule]] of the configuration file".to_owned()
        });
    }
    let services = std::fs::read_to_string("/etc/services").unwrap_or_default();
    let of_line = |line: &str| {
        let mut words = line.split('#').next()?.split_whitespace();
        let (name, place) = (words.next()?, words.next()?);
        let named = name == text || words.any(|alias| alias == text);
        let port = place.strip_suffix("/tcp").filter(|_| named)?;
        port.parse().ok()
    };
    let port = services.lines().find_map(of_line);
    port.ok_or_else(|| {
        "/etc/services has no such service for TCP: write the number of the port".to_owned()
    })
}

/// Refuses what selects one connection or process, in a rule.
fn in_no_rule(_: &str) -> Result<String, String> {
    Err("a rule cannot select one connection or process: use dibsctl enable, or select by port or user".to_owned())
}

/// Roles by the names of the command line, as the daemon calls them.
fn role() -> impl TypedValueParser<Value = String> {
    let shown = Role::ALL.map(|role| match role {
        Role::Never => PossibleValue::new(OFF).alias(role.name()).help("nothing"),
        Role::Primary => PossibleValue::new(role.name()).help("data"),
        Role::Secondary => {
            PossibleValue::new(role.name()).help("data that primary paths have no room for")
        }
        Role::Backup => PossibleValue::new(role.name()).help("data only while no other path can"),
    });
    let named = |name: String| {
        if name == OFF {
            Role::Never.name().to_owned()
        } else {
            name
        }
    };
    PossibleValuesParser::new(shown).map(named)
}

/// Role [`Role::Never`], for users.
pub(crate) const OFF: &str = "off";

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

    /// Each command that a user may give begins its help with a verb, and has two examples or more.
    #[test]
    fn help_has_examples() {
        fn leaves(command: &clap::Command, found: &mut Vec<clap::Command>) {
            if !command.has_subcommands() {
                found.push(command.clone());
            }
            let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
            shown.for_each(|sub| leaves(sub, found));
        }
        let mut found = Vec::new();
        leaves(&Args::command(), &mut found);
        assert!(found.len() > 25, "{} commands", found.len());
        for command in found {
            let name = command.get_name();
            let about = command
                .get_about()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(about.len() < 60, "{name}: {about}");
            let examples = command
                .get_after_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            assert!(examples.lines().count() > 2, "{name}: {examples:?}");
        }
    }

    #[test]
    fn prefixes() {
        assert_eq!(prefix("10.0.1.2").unwrap().to_string(), "10.0.1.2/32");
        assert_eq!(prefix("10.0.1.2/24").unwrap().to_string(), "10.0.1.0/24");
        assert!(prefix("server").is_err());
    }

    #[test]
    fn ports() {
        assert_eq!(port("443"), Ok(443));
        for wrong in ["0", "65536", "-1", "22x", "no-such-service", ""] {
            assert!(port(wrong).is_err(), "{wrong}");
        }
        if std::path::Path::new("/etc/services").exists() {
            assert_eq!(port("ssh"), Ok(22));
        }
    }
}
