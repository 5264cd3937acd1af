//! What the daemon tells of itself. The JSON keys are the fields' names, and stay; all are always
//! there, null where nothing is known. Times are seconds since 1970, byte counts are of payload.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

pub use dibs_settings::{Integrity, KeyOrigin, Trust};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{ConnId, RuleId};

/// The daemon at a glance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of dibsd.
    pub version: String,
    /// Id of its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime: u64,
    /// Setting that says whether scrambled data is authenticated.
    pub integrity: Integrity,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
    /// As `peer list`.
    pub peers: Vec<PeerInfo>,
    /// As `path list`.
    pub paths: Vec<PathInfo>,
    /// Ports that do not answer what comes by a bump, of this host and of peers.
    #[serde(default)]
    pub silent_ports: Vec<SilentPortInfo>,
    /// As `bump list`.
    pub bumps: Vec<BumpInfo>,
    /// Live connections to peers, plain ones too.
    pub connections: u64,
    /// Counters since the start, drops by reason among them.
    pub counters: BTreeMap<String, u64>,
    /// When those of the kernel's chains were read, which are kept for a second.
    #[serde(default)]
    pub counted: Option<f64>,
    /// State of what keeps connections in when others flush the firewall.
    pub backstop: BackstopInfo,
}

/// A port whose kernel does not answer connections that come by a bump, most likely for a firewall drops them, or refuses them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SilentPortInfo {
    /// The peer that calls, or whose port it is.
    pub peer: String,
    /// By this bump.
    pub bump: String,
    /// The device that they come out of there.
    pub device: String,
    /// The port that they are for.
    pub port: u16,
    /// True if it is a port of this host; else it is the peer's.
    pub here: bool,
    /// Connections of a port of this host that got no answer since it fell silent.
    pub connections: Option<u64>,
    /// The kernel answers with RST, because nobody listens there.
    #[serde(default)]
    pub refuses: bool,
}

/// The table of nftables that is the daemon's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackstopInfo {
    /// How it stands.
    pub state: BackstopState,
    /// Why it does not stand.
    pub reason: Option<String>,
}

/// See [`BackstopInfo::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackstopState {
    /// There is nothing to keep in.
    Idle,
    /// Nobody else can change it, and it outlives the daemon.
    Lasting,
    /// Nobody else can change it as long as the daemon runs, and it goes with the daemon.
    WhileRunning,
    /// It withstands iptables, but not `nft flush ruleset`.
    Shared,
    /// This kernel has no nftables.
    Missing,
    /// The kernel refused it, or some of it; it is tried again.
    Failed,
}

impl fmt::Display for BackstopState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackstopState::Idle => "idle",
            BackstopState::Lasting => "lasting",
            BackstopState::WhileRunning => "while_running",
            BackstopState::Shared => "shared",
            BackstopState::Missing => "missing",
            BackstopState::Failed => "failed",
        })
    }
}

/// A peer and the session with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerInfo {
    /// From the configuration.
    pub name: String,
    /// State of the session.
    pub state: PeerState,
    /// Base64.
    pub public_key: String,
    /// The hosts behind it.
    pub addresses: Vec<IpNet>,
    /// Openings that it may use here, as the configuration says it.
    #[serde(default)]
    pub accept: Vec<String>,
    /// When the session was established.
    pub since: Option<f64>,
    /// Datagram bytes over all paths.
    pub bytes_sent: u64,
    /// Datagram bytes over all paths.
    pub bytes_received: u64,
    /// Live connections that are on a bump.
    pub connections: u64,
    /// Origin of the session's keys; none: there is no session.
    #[serde(default)]
    pub keys: Option<KeyOrigin>,
    /// Places where it listens, as the configuration says it.
    #[serde(default)]
    pub endpoints: Vec<EndpointInfo>,
    /// Why the state is not "established", or a trusted path does not open that the peer asks for.
    pub reason: Option<String>,
}

impl PeerInfo {
    /// True if the Internet is behind it.
    pub fn is_exit(&self) -> bool {
        self.addresses.iter().any(|net| net.prefix_len() == 0)
    }
}

/// Place where a peer listens, seen from one of this host's paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// The name of the path.
    pub path: String,
    /// An address or a name, with the port.
    pub endpoint: String,
    /// Addresses that it stands for now, as far as the path can reach them.
    pub addresses: Vec<SocketAddr>,
    /// Reason why a name does not serve, or may be out of date.
    pub fault: Option<String>,
}

/// See [`PeerInfo::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerState {
    /// Keys are agreed and the peer answers.
    Established,
    /// A handshake is under way.
    Connecting,
    /// Nobody answers, or nobody may be called.
    Down,
}

/// A live connection to a peer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnInfo {
    /// For `--conn`.
    pub id: ConnId,
    /// Whose address the remote one is.
    pub peer: String,
    /// This host's end.
    pub local: SocketAddr,
    /// The far end.
    pub remote: SocketAddr,
    /// This host's end by the peer's name, where addresses are translated between the two hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_there: Option<SocketAddr>,
    /// The far end by the peer's name, where addresses are translated between the two hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_there: Option<SocketAddr>,
    /// State of the ordinary route, of a connection on a bump that is shown there because addresses are translated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain: Option<PlainInfo>,
    /// Its name, or "plain".
    pub bump: String,
    /// Name of the process that holds the socket.
    pub process: Option<String>,
    /// Number of the process that holds the socket.
    pub pid: Option<u32>,
    /// Owner of the socket.
    pub uid: Option<u32>,
    /// The connection of MPTCP that it is a subflow of: all of those move together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mptcp: Option<u32>,
    /// When it took the bump; for a plain one, when it was first seen.
    pub since: f64,
    /// On the bump.
    pub bytes_sent: u64,
    /// On the bump.
    pub bytes_received: u64,
    /// Segments that the local kernel sent again.
    pub retransmissions: u64,
    /// Bytes by path.
    pub paths: Vec<ConnPathInfo>,
    /// Why it does not come about, as far as is known.
    #[serde(default)]
    pub reason: Option<String>,
}

/// State of the ordinary route of a connection that is shown there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlainInfo {
    /// True if the other end is heard there.
    pub open: bool,
    /// Time at which it was last heard, in seconds since 1970.
    pub heard: f64,
}

/// A connection's part of a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnPathInfo {
    /// Name of the path.
    pub name: String,
    /// By this path.
    pub bytes_sent: u64,
    /// By this path.
    pub bytes_received: u64,
}

/// A path to a peer: a table of what `path list --json` says of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathInfo {
    /// From the configuration.
    pub name: String,
    /// Whom it leads to.
    pub peer: String,
    /// The lower label of both ends.
    pub trust: Trust,
    /// State: whether it carries data.
    pub state: PathState,
    /// Interface that its socket is bound to.
    #[serde(default)]
    pub interface: Option<String>,
    /// Address of the peer.
    pub remote: Option<SocketAddr>,
    /// Smoothed round trip in microseconds (RFC 9002, 5.3).
    pub srtt_us: Option<u64>,
    /// Least round trip in microseconds.
    pub min_rtt_us: Option<u64>,
    /// Variation of the round trip in microseconds (RFC 9002, 5.3).
    pub rttvar_us: Option<u64>,
    /// Part of the datagrams that is lost, 0 to 1, lately.
    pub loss: f64,
    /// Datagrams lost since the start.
    pub lost: u64,
    /// Datagrams that a router has marked for congestion (ECN) since the start, by the peer's count.
    #[serde(default)]
    pub marked: u64,
    /// Datagram bytes.
    pub bytes_sent: u64,
    /// Datagram bytes.
    pub bytes_received: u64,
    /// Largest UDP payload in bytes.
    pub mtu: u32,
    /// Congestion window in bytes.
    pub cwnd: u64,
    /// Bytes that wait for acknowledgement.
    pub in_flight: u64,
    /// Bytes per second; none: not paced.
    pub pacing_rate: Option<u64>,
    /// True if the kernel segments for it.
    pub gso: bool,
    /// True if the user's hint names it.
    pub preferred: bool,
    /// Role: "primary", "secondary", "backup" or "never".
    #[serde(default)]
    pub role: String,
    /// Limit of what this host sends over it, bits a second.
    #[serde(default)]
    pub rate_limit: Option<u64>,
    /// Data cap for a calendar month, to all peers, bytes.
    #[serde(default)]
    pub volume: Option<u64>,
    /// Bytes of that which it has carried.
    #[serde(default)]
    pub volume_used: Option<u64>,
    /// How new data is shared out over the paths.
    #[serde(default)]
    pub scheduler: String,
    /// Why it carries no new data; none: it may.
    #[serde(default)]
    pub unused: Option<String>,
    /// Why it is not up, or carries less than it could.
    pub reason: Option<String>,
}

/// See [`PathInfo::state`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathState {
    /// Carries data.
    Up,
    /// Is being challenged.
    Validating,
    /// Does not answer, or has no endpoint or interface.
    Down,
}

/// A bump that can be asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BumpInfo {
    /// For `--bump`.
    pub name: String,
    /// scramble, share, seal or device.
    pub kind: String,
    /// Device of kind "device".
    pub device: Option<String>,
    /// Shares that give the data of kind "share", and how many there are.
    pub needed: Option<u8>,
    /// See `needed`.
    pub shares: Option<u8>,
    /// True if `enable` takes it without `--bump`.
    pub default: bool,
    /// Live connections on it.
    pub connections: u64,
    /// For kind "device", true if anything comes back by it, as far as the connections on it show. None: nobody
    /// knows, for nothing was sent.
    pub answers: Option<bool>,
    /// Why it cannot be asked for now.
    pub reason: Option<String>,
}

/// A rule for connections to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleInfo {
    /// For `rule del`.
    pub id: RuleId,
    /// Ports and addresses that they take.
    pub bump: String,
    /// True if they may go by nothing else.
    pub require: bool,
    /// True if they are plain while there is no session.
    pub prefer: bool,
    /// The higher is tried first.
    pub priority: i32,
    /// True if it holds at this time of day.
    pub active: bool,
    /// Maker of the rule.
    pub origin: RuleOrigin,
    /// Selectors: keys as in the configuration (`dport`, `uid`, `time`, ...), values as
    /// written. Empty: all.
    pub selector: BTreeMap<String, String>,
    /// How new data of these connections is shared out over the paths; none: as that of others.
    #[serde(default)]
    pub scheduler: Option<String>,
    /// Sentence for the user, if it does not hold as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Outcome of `rule add`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleMade {
    /// The new rule.
    #[serde(flatten)]
    pub rule: RuleInfo,
    /// Rules of members of the group that contradicted one of root's, and are gone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub displaced: Vec<RuleInfo>,
    /// Warnings for the user, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Result of `rule del`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleGone {
    /// The rule that is gone.
    pub id: RuleId,
    /// Connections that stay on its bump, because plain does not carry them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Skipped>,
}

impl From<RuleInfo> for RuleMade {
    fn from(rule: RuleInfo) -> Self {
        Self {
            rule,
            displaced: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

/// See [`RuleInfo::origin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleOrigin {
    /// The configuration file; cannot be deleted by request.
    Config,
    /// `dibsctl rule add`.
    User,
}

/// Outcome of `enable` and `disable`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Changed {
    /// Bump that the connections are on now, or "plain".
    pub bump: String,
    /// Connections that were changed, as they are now.
    pub connections: Vec<ConnInfo>,
    /// Connections that match, and could not be.
    pub skipped: Vec<Skipped>,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

/// A connection that matched and stayed as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// Its id.
    pub id: ConnId,
    /// This host's end.
    pub local: SocketAddr,
    /// The far end.
    pub remote: SocketAddr,
    /// Why.
    pub reason: String,
}

/// Something happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    pub time: f64,
    /// One word for programs.
    pub kind: String,
    /// One sentence for people.
    pub text: String,
    /// Subject of the event.
    pub fields: BTreeMap<String, String>,
}
