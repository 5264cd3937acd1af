//! What happens in one run: a setup and a list of operations, both from a seed.

mod between;
mod draw;
mod preferences;
mod ruled;

use std::fmt;
use std::time::Duration;

use dibs_core::Time;
use dibs_core::bump::{Padding, SCRAMBLE};
use dibs_core::session::{Integrity, KeyLimits, Suite};
use dibs_netem::Conditions;
use dibs_settings::{BumpId, Handshake};

use crate::adversary::Tamper;
use crate::payload::Kind;
use crate::steering::ruling::Rule;
pub use preferences::{Preferences, Wish, calm_usage};

/// The first seed of histories with devices on the ordinary route.
pub const BETWEEN: u64 = 1 << 40;
/// The first seed of those in which devices follow TCP's numbers, or change them.
pub const STRICT: u64 = 2 * BETWEEN;

/// Two hosts, A and B, as they begin. Arrays of two are by host.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The paths between them.
    pub paths: Vec<PathSetup>,
    /// The ordinary route of what is in no bump.
    pub direct: Conditions,
    /// AEAD that each asks for.
    pub suite: [Suite; 2],
    /// Agreement to bare datagrams.
    pub integrity: Integrity,
    /// How much a key and a session may seal.
    pub keys: KeyLimits,
    /// There is a preshared key.
    pub preshared: bool,
    /// By which paths keys may be agreed.
    pub handshake: Handshake,
    /// Knowledge of each host where the other is.
    pub calls: [bool; 2],
    /// Least share by trusted paths.
    pub trusted_share: f64,
    /// True if data waits while there is no trusted path.
    pub hold_without_trusted: bool,
    /// MTU of the kernels' links.
    pub mtu: [usize; 2],
    /// The hosts look at what has arrived so often.
    pub tick: [Duration; 2],
    /// TSval at time zero.
    pub clock: [u32; 2],
    /// A host whose peer opens a connection in the bump moves its own direction there, too.
    pub follow: bool,
    /// How many of how many shares give the whole.
    pub share: (u8, u8),
    /// Lengths that show of what is encrypted whole.
    pub padding: Padding,
    /// How each host's user would have the paths used.
    pub preferences: [Preferences; 2],
    /// Routers mark a datagram for congestion now and then, whatever their queues hold.
    pub marks: bool,
    /// How connections leave their bumps for plain.
    pub leaving: Leaving,
    /// Devices and attackers on the ordinary route.
    pub between: Between,
}

/// Devices and attackers on the ordinary route.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Between {
    /// True if a router gives connections of host 0 another address.
    pub translates: bool,
    /// True if it follows TCP's numbers, and drops what does not fit.
    pub tracks: bool,
    /// Time after which it forgets a connection that is idle.
    pub forgets: Option<Duration>,
    /// True if it takes up a connection in its midst that goes on from its side.
    pub adopts: bool,
    /// True if it answers what it drops with a reset.
    pub resets: bool,
    /// True if a firewall gives connections other numbers.
    pub renumbers: bool,
    /// Share of what daemons send in plain that is lost.
    pub lost: f64,
    /// Most by which it is late, or comes twice.
    pub late: Option<Duration>,
    /// True if somebody sends the like of it.
    pub forges: bool,
}

/// How connections leave their bumps for plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Users force it.
    Forced,
    /// Only if plain carries them, as it does.
    Proved,
    /// Only if plain carries them; on the ordinary route there is a firewall that lets nothing pass of connections whose
    /// beginning it has not seen.
    Firewalled,
}

/// A path.
#[derive(Clone, Debug)]
pub struct PathSetup {
    /// Labels at both ends.
    pub trusted: [bool; 2],
    /// Over IPv6.
    pub v6: bool,
    /// MTU of both interfaces.
    pub mtu: u16,
    /// The link, by sending host.
    pub link: [Conditions; 2],
}

/// In which order the ends of a connection speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Both at once; each closes when it has sent everything.
    Both,
    /// The client closes its half after its request, the server answers then.
    HalfClose,
    /// The server answers the whole request, the client closes after the answer.
    Reply,
}

impl Setup {
    /// Two hosts with these paths between them, and nothing special about them.
    pub fn ordinary(paths: Vec<PathSetup>) -> Self {
        Self {
            paths,
            direct: Conditions::new(),
            suite: [Suite::Aes256Gcm; 2],
            integrity: Integrity::On,
            keys: KeyLimits::default(),
            preshared: true,
            handshake: Handshake::Chained,
            calls: [true, false],
            trusted_share: 0.05,
            hold_without_trusted: true,
            mtu: [1500; 2],
            tick: [Duration::from_micros(50); 2],
            clock: [0; 2],
            follow: false,
            share: (2, 2),
            padding: Padding::None,
            preferences: Default::default(),
            marks: false,
            leaving: Leaving::Forced,
            between: Between::default(),
        }
    }
}

impl Plan {
    /// A connection from A to B, on scramble from the start: so many bytes from either end, with
    /// CUBIC and room for `buffer` bytes.
    pub const fn ordinary(bytes: [u64; 2], order: Order, buffer: usize) -> Self {
        Self {
            client: 0,
            v6: false,
            port_of: None,
            bytes,
            order,
            kind: Kind::Marked,
            buffer,
            cubic: true,
            bump: [Some(SCRAMBLE); 2],
            pause: Duration::ZERO,
            slow: None,
            rx: 2 * buffer,
            stops: None,
            keepalive: None,
            urgent: false,
            lingers: false,
            require: [None; 2],
        }
    }
}

/// A connection.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The host of the client.
    pub client: usize,
    /// Over IPv6.
    pub v6: bool,
    /// The client's port is that of this earlier connection.
    pub port_of: Option<usize>,
    /// Bytes from the client and from the server.
    pub bytes: [u64; 2],
    /// Order in which the ends speak.
    pub order: Order,
    /// Kind of the bytes.
    pub kind: Kind,
    /// Buffers of the sockets.
    pub buffer: usize,
    /// CUBIC, or no congestion control.
    pub cubic: bool,
    /// The bump that each host's direction is on from the start; 0: plain.
    pub bump: [Option<BumpId>; 2],
    /// Halfway both ends pause so long.
    pub pause: Duration,
    /// The ends read at most 1000 bytes so often.
    pub slow: Option<Duration>,
    /// Buffers to receive into: small ones close their windows.
    pub rx: usize,
    /// Halfway each end stops reading for so long.
    pub stops: Option<Duration>,
    /// Idle ends ask so often whether the other is there; ends whose windows close always do.
    pub keepalive: Option<Duration>,
    /// Now and then something is urgent.
    pub urgent: bool,
    /// True if it is kept open until the daemons have agreed on it.
    pub lingers: bool,
    /// The bump that a rule of each host requires, if one does; otherwise 0.
    pub require: [Option<BumpId>; 2],
}

/// Something that happens. Connections by their place among the openings.
#[derive(Clone, Debug)]
pub enum Op {
    /// A connection is opened.
    Open(Plan),
    /// An end (0 client, 1 server) of a connection aborts it.
    Abort(usize, usize),
    /// Another program of a host sets the mark of a connection: to a bump or to plain, as a choice or not.
    Mark(usize, usize, Option<BumpId>, bool),
    /// The user of a host moves a connection to a bump, or to plain.
    Choose(usize, usize, Option<BumpId>),
    /// The users of both hosts do so at once.
    Cross(usize, [Option<BumpId>; 2]),
    /// A host's daemon says of a connection that this host (1 for A, 2 for B) has chosen a bump for it, in a version
    /// that nobody can have given. Histories are not drawn with it.
    Outbid(usize, usize, Option<BumpId>, u64),
    /// A host's kernel forgets what it followed.
    Flush(usize),
    /// A daemon dies, and another one starts after a while.
    Restart(usize, Duration),
    /// A host sleeps for a while: it hears and does nothing, and wakes with its clocks gone on.
    Suspend(usize, Duration),
    /// A host cannot carry out choices for a while: its state file takes nothing.
    Unable(usize, Duration),
    /// All paths are cut for a while.
    Cut(Duration),
    /// Somebody sits on a direction of a path from now on.
    Tamper(usize, usize, Tamper),
    /// Somebody sends a host plain packets of a connection; so many are forged ones, if the
    /// connection is locked or required there, and so many that were seen before.
    Plain(usize, usize, usize, usize),
    /// So many packets fall into a host's TUN that do not belong there.
    Foreign(usize, usize),
    /// A host's interface of a path goes down or up, and its daemon is told.
    Interface(usize, usize, bool),
    /// A path carries nothing, without a word, or carries again.
    Outage(usize, bool),
    /// A direction of a path changes.
    Link(usize, usize, Conditions),
    /// A path's network takes only packets up to this size; the daemons may be told.
    Mtu(usize, u16, bool),
    /// A host sends an opaque packet of so many payload bytes, or IPv6, through a bump.
    Opaque(usize, usize, bool, BumpId),
    /// A host's daemon sends the other a message.
    Control(usize, usize),
    /// Somebody sends a host so many datagrams that he saw or made up.
    Attack(usize, usize),
    /// The user of a host would have the paths used otherwise.
    Wish(usize, Wish),
    /// The users of a host have these rules from now on, in the order in which they are tried.
    Rules(usize, Vec<Rule>),
}

/// A run.
#[derive(Clone, Debug)]
pub struct History {
    /// How it begins.
    pub setup: Setup,
    /// Events, in order.
    pub ops: Vec<(Time, Op)>,
    /// From then on nothing disturbs any more, and everything has to come to an end.
    pub quiet: Time,
}

/// Conditions of a link when nothing disturbs it any more.
pub fn calm(conditions: &Conditions) -> Conditions {
    Conditions {
        rate: conditions.rate.map(|r| r.max(2_000_000)),
        queue: conditions.queue.map(|q| q.max(64 << 10)),
        loss: conditions.loss.min(0.02),
        reorder: conditions.reorder.min(0.05),
        corrupt: 0.0,
        ..conditions.clone()
    }
}

/// As a test of a regression would have it: operations as they are written there, connections by number.
impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:#?}", self.setup)?;
        let mut conns = 0;
        for (at, op) in &self.ops {
            if matches!(op, Op::Open(_)) {
                write!(f, "{conns}: ")?;
                conns += 1;
            }
            writeln!(f, "{at:?} {op:?}")?;
        }
        write!(f, "{:?} quiet", self.quiet)
    }
}

/// Name of a bump.
pub fn on(bump: impl Into<Option<BumpId>>) -> &'static str {
    let number = bump.into().map_or(0, BumpId::get);
    ["plain", "scramble", "share", "seal"][usize::from(number)]
}

/// A host's letter.
pub fn name(host: usize) -> char {
    if host == 0 { 'A' } else { 'B' }
}
