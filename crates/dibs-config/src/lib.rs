//! The configuration file of `dibsd`: its keys, their defaults, and every check that needs no host.
//!
//! [`parse()`] turns TOML into a [`Config`] whose values need no further checking, or says in one
//! sentence what is wrong, where, and what was probably meant. Nothing here touches the network;
//! only [`load`], the key readers and [`joining`] touch files.

mod amount;
mod bumps;
mod check;
mod claim;
mod endpoint;
mod error;
pub mod joining;
mod keys;
mod parse;
pub mod setup;
mod table;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use dibs_settings::{DIRECT, Handshake, Hint, Opening, Role, Scheduler};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::Deserialize;

pub use amount::{BadAmount, Rate, Volume};
pub use bumps::BuiltIn;
use check::read;
pub use claim::{Claim, Conflict};
pub use dibs_settings::{DaySpan, Fail, Integrity, Level, MatchExpr, PortRange, Selection, Trust};
pub use endpoint::Endpoint;
pub use error::{Error, Invalid};
pub use keys::{
    KeyError, KeyFileError, PresharedKey, PrivateKey, PublicKey, read_preshared_key,
    read_private_key,
};
use table::Origin;

/// A configuration whose values were checked one by one and against each other.
#[derive(Clone, Debug)]
pub struct Config {
    /// Section `[daemon]`.
    pub daemon: Daemon,
    /// Each `[[path]]`, in order of the file. Without a trusted one, `seal` and `share` alone are carried.
    pub paths: Vec<PathConfig>,
    /// Section `[prefer]`; none: the scheduler alone chooses.
    pub prefer: Option<Prefer>,
    /// Each `[[peer]]`, in order of the file.
    pub peers: Vec<PeerConfig>,
    /// Bumps that are built in, then each device in order of the file.
    pub bumps: Vec<BumpConfig>,
    /// Each `[[rule]]`, in order of the file, which is the order in which they are tried.
    pub rules: Vec<RuleConfig>,
    origin: Origin,
}

/// Section `[daemon]`; a missing key has the value that is shown here.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename = "[daemon]", default)]
pub struct Daemon {
    /// `/etc/dibs/private.key`; see [`read_private_key`].
    #[serde(deserialize_with = "read::file")]
    pub private_key_file: PathBuf,
    /// `/run/dibs/dibsd.sock`
    #[serde(deserialize_with = "read::socket")]
    pub control_socket: PathBuf,
    /// `/var/lib/dibs`; what is to outlive a start of the host is kept here.
    #[serde(deserialize_with = "read::absolute")]
    pub state_dir: PathBuf,
    /// 5300; the UDP port of all paths.
    #[serde(deserialize_with = "read::whole::<1, 65535, u16, _, _>")]
    pub port: u16,
    /// 0x3f000000; one run of at least six bits of the firewall mark.
    #[serde(deserialize_with = "read::mark_mask")]
    pub mark_mask: u32,
    /// 5200; the routing table of bump id n is `table_base + n`, n below 16.
    #[serde(deserialize_with = "read::whole::<LOWEST_TABLE, HIGHEST_TABLE, u32, _, _>")]
    pub table_base: u32,
    /// `closed`
    pub fail: Fail,
    /// `on`
    pub integrity: Integrity,
    /// `chained`, or `any` if no path is trusted.
    pub handshake: Handshake,
    /// `balanced`
    pub scheduler: Scheduler,
    /// 0.05; the least part, 0 to 1, of each chained flow's bytes that goes by trusted paths.
    #[serde(deserialize_with = "read::number::<0, 1, _>")]
    pub trusted_share: f64,
    /// `hold`
    pub on_trusted_down: OnTrustedDown,
    /// True; connections that routers translate are shown to these in plain while they are on a bump.
    pub keep_plain_open: bool,
    /// Bump that `enable` takes without `--bump`; none: it must be named.
    pub default_bump: Option<String>,
    /// None; the networks that this host forwards for, host bits zero. None shares an address with a
    /// peer's.
    #[serde(deserialize_with = "read::networks")]
    pub gateway: Vec<IpNet>,
    /// False; peers reach others by this host, in its name.
    pub exit: bool,
    /// `0.0.0.0/0`, `::/0`; whom they reach: see [`exits`](Self::exits).
    #[serde(deserialize_with = "read::networks")]
    pub exit_to: Vec<IpNet>,
    /// False; UDP to port 443 is refused, where TCP goes by a peer that has everything.
    pub refuse_quic: bool,
    /// None; the loopback address and port at which Prometheus finds metrics.
    #[serde(deserialize_with = "read::loopback")]
    pub metrics: Option<SocketAddr>,
}

/// Tables 253 to 255 are the kernel's.
const LOWEST_TABLE: i64 = 256;
const HIGHEST_TABLE: i64 = u32::MAX as i64 - 16;

impl Default for Daemon {
    fn default() -> Self {
        Daemon {
            private_key_file: PathBuf::from("/etc/dibs/private.key"),
            control_socket: PathBuf::from("/run/dibs/dibsd.sock"),
            state_dir: PathBuf::from(STATE_DIR),
            port: 5300,
            mark_mask: 0x3f00_0000,
            table_base: 5200,
            fail: Fail::Closed,
            integrity: Integrity::On,
            handshake: Handshake::Chained,
            scheduler: Scheduler::default(),
            trusted_share: 0.05,
            on_trusted_down: OnTrustedDown::Hold,
            keep_plain_open: true,
            default_bump: None,
            gateway: Vec::new(),
            exit: false,
            exit_to: vec![Ipv4Net::default().into(), Ipv6Net::default().into()],
            refuse_quic: false,
            metrics: None,
        }
    }
}

impl Daemon {
    /// Networks that peers reach by this host, in its name: without those that [`dibs_settings::left_out`] says and
    /// without the peers'.
    pub fn exits(&self) -> &[IpNet] {
        if self.exit { &self.exit_to } else { &[] }
    }

    /// Names of sysctls that keep this host from forwarding as this says; `read` gives the value of each.
    pub fn unforwarded(&self, read: impl Fn(&str) -> Option<String>) -> Vec<&'static str> {
        let families = [
            ("net.ipv4.ip_forward", false),
            ("net.ipv6.conf.all.forwarding", true),
        ];
        let off = |(key, v6): &(&str, bool)| {
            let mut networks = self.gateway.iter().chain(self.exits());
            networks.any(|net| net.addr().is_ipv6() == *v6) && read(key).as_deref() == Some("0")
        };
        { families.into_iter().filter(off) }
            .map(|(key, _)| key)
            .collect()
    }

    /// True if this host forwards for others: for networks behind it, or for peers.
    pub fn forwards(&self) -> bool {
        !self.gateway.is_empty() || self.exit
    }
}

/// Behaviour of chained flows while no trusted path is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTrustedDown {
    /// Wait.
    Hold,
    /// Go on by untrusted paths alone.
    Untrusted,
}

/// A `[[path]]`: a way out of this host. Has an interface, an address, or both.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "parse::PathTable")]
pub struct PathConfig {
    /// Unique.
    pub name: String,
    /// The interface that its socket is bound to, or a [pattern](Self::pattern) of names. Always there where two paths differ in trust.
    pub interface: Option<String>,
    /// The local address, where the interface has several.
    pub address: Option<IpAddr>,
    /// Addresses by which peers reach this path although its interface does not have them, because they are translated on
    /// the way: one of each IP version at most.
    pub public: Vec<IpAddr>,
    /// This end's label.
    pub trust: Trust,
    /// Use of the path.
    pub usage: PathUsage,
}

impl PathConfig {
    /// The pattern of names that its interface has, if it names no single one.
    pub fn pattern(&self) -> Option<&str> {
        { self.interface.as_deref() }.filter(|name| name.contains(['*', '?']))
    }
}

/// Use of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathUsage {
    /// `primary`
    pub role: Role,
    /// Limit of what this host sends over it, UDP payload; none: as much as it carries.
    pub rate: Option<Rate>,
    /// Data cap for a month, both ways, UDP payload; none: any.
    pub volume: Option<Volume>,
}

/// Most probes that a path may be sent before they come more slowly.
const MOST_WEIGHT: i64 = 10_000;
/// Most times the least round trip that is as good as any.
const MOST_DELTA: u32 = 1000;

/// Section `[prefer]`: new data by this path as long as it is usable; see [`dibs_settings::Hint`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename = "[prefer]")]
pub struct Prefer {
    /// One of [`Config::paths`].
    pub path: String,
    /// 100
    #[serde(
        default = "Prefer::weight",
        deserialize_with = "read::whole::<0, MOST_WEIGHT, u32, _, _>"
    )]
    pub weight: u32,
    /// 2.0
    #[serde(
        default = "Prefer::delta",
        deserialize_with = "read::number::<1, MOST_DELTA, _>"
    )]
    pub delta: f64,
}

/// A `[[peer]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename = "[[peer]]")]
pub struct PeerConfig {
    /// Unique.
    #[serde(deserialize_with = "read::name")]
    pub name: String,
    /// Unique.
    #[serde(deserialize_with = "read::public_key")]
    pub public_key: PublicKey,
    /// See [`read_preshared_key`].
    #[serde(default, deserialize_with = "read::file")]
    pub preshared_key_file: Option<PathBuf>,
    /// The hosts behind this peer, host bits zero, and behind them [`appears_as`](Self::appears_as). No two peers have the same
    /// prefix; where one prefix contains another, the longest decides.
    #[serde(default, deserialize_with = "read::networks")]
    pub addresses: Vec<IpNet>,
    /// Addresses that stand here for those of the peer that are not in [`addresses`](Self::addresses), because others may have
    /// the same: one of each IP version at most.
    #[serde(default, deserialize_with = "read::hosts")]
    pub appears_as: Vec<IpAddr>,
    /// Endpoints of the peer, by name of a local path, in order of the names. A missing path waits to be called.
    #[serde(default, deserialize_with = "read::endpoints")]
    pub endpoints: Vec<(String, Endpoint)>,
    /// Connections that the peer may open here: at the addresses of the paths' interfaces and the networks behind this host
    /// if nothing is said, and nothing if the list is empty. If nothing is said, a peer that every address is behind may open
    /// nothing.
    #[serde(default = "paths_alone", deserialize_with = "read::openings")]
    pub accept: Vec<Opening>,
}

fn paths_alone() -> Vec<Opening> {
    vec![Opening::PATHS]
}

/// A bump: built in, or a `[[bump]]`.
#[derive(Clone, Debug)]
pub struct BumpConfig {
    /// Unique.
    pub name: String,
    /// Kind of the bump.
    pub kind: BumpKind,
}

/// Kind of a bump.
#[derive(Clone, Debug)]
pub enum BumpKind {
    /// One that exists without being listed.
    BuiltIn(BuiltIn),
    /// That of somebody else's TUN or TAP device of this name; dibs only steers to it.
    Device(String),
}

/// Directory for what outlives a start of the host, unless the file says otherwise.
const STATE_DIR: &str = "/var/lib/dibs";

/// The kind of bumps that are devices, in the file.
const DEVICE: &str = "device";

/// A `[[rule]]`: connections that match in everything it names take its bump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleConfig {
    /// A name out of [`Config::bumps`], or [`DIRECT`].
    pub bump: String,
    /// Selection of the connections.
    pub selection: Selection,
    /// 0; of rules that select the same connection the one with the highest decides, then the first.
    pub priority: i32,
    /// Neither `require = true` nor `prefer = true`: the usual one.
    pub level: Level,
    /// How new data of these connections is shared out over the paths; none: as `[daemon]` says.
    pub scheduler: Option<Scheduler>,
}

/// Reads and checks the file.
pub fn load(path: &Path) -> Result<Config, Error> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| Error::unread(path, &error))?;
    parse(&name, &text)
}

/// Directory of [`Daemon::state_dir`], even of a file that is not right: what a line of it names, or else the usual one.
pub fn state_dir(file: &Path) -> PathBuf {
    let text = std::fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let mut named = text.lines().filter_map(|line| {
        let line: toml::Table = toml::from_str(line).ok()?;
        Some(PathBuf::from(line.get("state_dir")?.as_str()?))
    });
    let named = named.find(|directory| directory.is_absolute());
    named.unwrap_or_else(|| PathBuf::from(STATE_DIR))
}

/// True if a `[[path]]` can name this interface.
pub fn is_interface_name(text: &str) -> bool {
    dibs_settings::interface(text).is_ok()
}

/// Checks `text`; `name` is what errors call the file.
pub fn parse(name: &str, text: &str) -> Result<Config, Error> {
    parse::config(name, text)
}

impl Config {
    /// The bump of that name.
    pub fn bump(&self, name: &str) -> Option<&BumpConfig> {
        self.bumps.iter().find(|bump| bump.name == name)
    }

    /// The ports that the daemon listens at: that of the paths, and that of the metrics.
    pub fn listens_at(&self) -> impl Iterator<Item = u16> {
        let metrics = self.daemon.metrics.map(|address| address.port());
        std::iter::once(self.daemon.port).chain(metrics)
    }

    /// Refuses a file that uses, as the default or in a rule, a bump that it has too few paths, or no trusted one, for.
    pub fn check_carried(&self) -> Result<(), Error> {
        for (key, bump) in self.bumps_used() {
            if let Some(lack) = self.lack(bump) {
                let message = format!("the bump \"{}\" {lack}", bump.name);
                let hint = "write \"seal\", or add such a path".to_owned();
                return Err(self.refuse(&key, message, Some(hint)));
            }
        }
        Ok(())
    }

    /// Lack of this file for a bump to be carried.
    pub fn lack(&self, bump: &BumpConfig) -> Option<String> {
        let built_in = bump.built_in()?;
        if built_in == BuiltIn::Scramble && !self.has_trusted() {
            return Some("needs a trusted path, and the file has none".to_owned());
        }
        let (_, least) = built_in.shares()?;
        let few = self.paths.len() < least.into();
        few.then(|| format!("needs {least} paths or more"))
    }

    /// True if a path is trusted.
    pub fn has_trusted(&self) -> bool {
        self.paths.iter().any(|path| path.trust == Trust::Trusted)
    }

    /// Refuses a file by which no keys could be agreed with some peer.
    fn check_handshake(&self) -> Result<(), Error> {
        if self.has_trusted() {
            return Ok(());
        }
        let hint = "leave handshake out: without a trusted path the default is \"any\"";
        let refuse = |message: String, hint: String| {
            Err(self.refuse("daemon.handshake", message, Some(hint)))
        };
        match self.daemon.handshake {
            Handshake::Any => Ok(()),
            Handshake::Trusted => {
                let message =
                    "handshake \"trusted\" allows no handshake, because no path is trusted";
                refuse(message.to_owned(), hint.to_owned())
            }
            Handshake::Chained => {
                let mut peers = self.peers.iter();
                let Some(peer) = peers.find(|peer| peer.preshared_key_file.is_none()) else {
                    return Ok(());
                };
                let message = format!(
                    "handshake \"chained\" allows no first handshake with peer \"{}\", because no path is trusted and it \
                     has no preshared_key_file",
                    peer.name
                );
                refuse(
                    message,
                    format!("{hint}; or give the peer a preshared_key_file"),
                )
            }
        }
    }

    /// The default and each rule's, by the key that names it.
    fn bumps_used(&self) -> impl Iterator<Item = (String, &BumpConfig)> {
        let default = self.daemon.default_bump.iter();
        let default = default.map(|name| ("daemon.default_bump".to_owned(), name));
        let rules = self.rules.iter().enumerate();
        let rules = rules.filter(|(_, rule)| rule.bump != DIRECT);
        let rules = rules.map(|(i, rule)| (format!("rule.{i}.bump"), &rule.bump));
        default.chain(rules).map(|(key, name)| {
            let bump = self.bump(name);
            let bump = bump.expect("parse() lets only known bumps through");
            (key, bump)
        })
    }

    /// Warnings for the user at each load, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings_with(|path| self.paths[path].usage.role)
    }

    /// The same where paths, by index, have other roles than the file gives them.
    pub fn warnings_with(&self, role: impl Fn(usize) -> Role) -> Vec<String> {
        let mut warnings = Vec::new();
        let trusted = self.paths.iter().enumerate();
        let mut trusted = trusted.filter(|(_, path)| path.trust == Trust::Trusted);
        if !self.has_trusted() {
            warnings.push(
                "no path is trusted: scramble cannot be used, and an attacker who records the paths, and can one day \
                 break Curve25519, can read what was sent to peers without a preshared_key_file"
                    .to_owned(),
            );
        } else if trusted.all(|(index, _)| role(index) == Role::Never) {
            warnings.push(
                "every trusted path is off: scramble cannot be used, and a first handshake needs a \
                 preshared_key_file or handshake = \"any\""
                    .to_owned(),
            );
        }
        for (_, bump) in self.bumps_used() {
            let warning = bump.built_in().and_then(BuiltIn::warning);
            if let Some(warning) = warning.map(str::to_owned)
                && !warnings.contains(&warning)
            {
                warnings.push(warning);
            }
        }
        if self.daemon.integrity == Integrity::Off {
            warnings.push(
                "integrity = \"off\": scrambled data is not authenticated, so an attacker on an untrusted path can \
                 change it"
                    .to_owned(),
            );
        }
        if self.daemon.on_trusted_down == OnTrustedDown::Untrusted {
            warnings.push(
                "on_trusted_down = \"untrusted\": while the trusted paths are down, scrambled data goes over \
                 untrusted paths alone"
                    .to_owned(),
            );
        }
        if self.daemon.fail == Fail::Open {
            warnings.push(
                "fail = \"open\": while dibsd does not run, connections continue unprotected"
                    .to_owned(),
            );
        }
        let mut reached = self.peers.iter().flat_map(|peer| &peer.addresses);
        if self.daemon.refuse_quic && !reached.any(|net| net.prefix_len() == 0) {
            warnings.push(
                "refuse_quic refuses nothing: no peer has 0.0.0.0/0 or ::/0 in addresses"
                    .to_owned(),
            );
        }
        warnings
    }

    /// Why no rule can require its bump with this file's `[daemon]`, and what to do.
    pub fn excludes_require(&self) -> Option<(String, &'static str)> {
        let daemon = &self.daemon;
        let (key, hint) = if daemon.fail == Fail::Open {
            ("fail = \"open\"", "set fail = \"closed\"")
        } else if daemon.on_trusted_down == OnTrustedDown::Untrusted {
            (
                "on_trusted_down = \"untrusted\"",
                "set on_trusted_down = \"hold\"",
            )
        } else if daemon.integrity == Integrity::Off {
            ("integrity = \"off\"", "set integrity = \"on\"")
        } else {
            return None;
        };
        Some((format!("require does not work with {key}"), hint))
    }

    /// An error at the place of a key that this file is otherwise right to have, such as
    /// `daemon.scheduler` or `rule.0.bump`; a key that the file leaves out is placed at its top.
    pub fn refuse(&self, key: &str, message: String, hint: Option<String>) -> Error {
        self.origin.at_value(key, message, hint)
    }
}

impl Prefer {
    const fn weight() -> u32 {
        Hint::WEIGHT
    }

    const fn delta() -> f64 {
        Hint::DELTA
    }

    /// Refuses a weight or delta that `[prefer]` could not have, in one sentence.
    pub fn check(weight: u32, delta: f64) -> Result<(), String> {
        if i64::from(weight) > MOST_WEIGHT {
            return Err(format!("weight has to be within 0 and {MOST_WEIGHT}"));
        }
        if !(1.0..=MOST_DELTA.into()).contains(&delta) {
            return Err(format!("delta has to be within 1 and {MOST_DELTA}"));
        }
        Ok(())
    }
}

impl RuleConfig {
    /// As far as other rules can stand against it.
    pub fn claim(&self) -> Claim<'_> {
        Claim {
            selection: &self.selection,
            bump: &self.bump,
            level: self.level,
            scheduler: self.scheduler,
        }
    }
}

impl BumpConfig {
    /// The one that it is, if it is no device.
    pub fn built_in(&self) -> Option<BuiltIn> {
        match self.kind {
            BumpKind::BuiltIn(bump) => Some(bump),
            BumpKind::Device(_) => None,
        }
    }

    /// The device, if it is one.
    pub fn device(&self) -> Option<&str> {
        match &self.kind {
            BumpKind::Device(device) => Some(device),
            BumpKind::BuiltIn(_) => None,
        }
    }

    /// Its kind in the file.
    pub fn kind(&self) -> &'static str {
        self.built_in().map_or(DEVICE, BuiltIn::name)
    }
}
