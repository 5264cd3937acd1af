//! What `dibsctl` and `dibsd` say to each other over the control socket, and the client's side.
//!
//! One JSON object a line. A request is `{"version":1,"request":...}`; the answer one line,
//! `{"ok":...}` or `{"error":{"kind":...,"message":...}}`. What takes longer than a second says meanwhile
//! how far it is, by lines `{"ok":{"progress":...}}` before the answer. A connection may carry several
//! requests, one after the other. [`Request::Events`] ends that: it is answered by `{"ok":"following"}`,
//! then by one `{"ok":{"event":...}}` for each event until one side closes.
//!
//! The daemon closes where it has to bound something: more clients of a user than it serves, one that asks
//! nothing for long, or does not read its answers. It says so first, by an error that nobody asked for.
//!
//! The codec ([`decode_request`], [`encode_reply`], [`LineBuffer`]) does no IO, so that the daemon
//! can drive it from any runtime; [`Client`] blocks, with a timeout. The JSON keys of the `*Info`
//! types are what `dibsctl --json` prints: they stay.

mod client;
mod codec;
mod info;
mod measure;
mod preferences;
mod selector;

pub use client::{Client, ClientError, Events, TIMEOUT};
pub use codec::{
    LineBuffer, LineError, MAX_REPLY, MAX_REQUEST, VERSION, decode_reply, decode_request,
    encode_reply, encode_request,
};
use dibs_settings::{Shows, Term};
pub use info::{
    BackstopInfo, BackstopState, BumpInfo, Changed, ConnInfo, ConnPathInfo, EndpointInfo, Event,
    Integrity, KeyOrigin, PathInfo, PathState, PeerInfo, PeerState, PlainInfo, RuleGone, RuleInfo,
    RuleMade, RuleOrigin, SilentPortInfo, Skipped, Status, Trust,
};
pub use measure::{Measure, Measured, PathCount};
pub use preferences::{Limit, PathChange, PathUsage, Preferences, Preferred};
pub use selector::{Match, Selector, Terms};
use serde::{Deserialize, Serialize};

/// Names a connection of [`ConnInfo`] as long as it lives.
pub type ConnId = u64;

/// Names a rule of [`RuleInfo`] until it is deleted.
pub type RuleId = u64;

/// What a client may ask for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    rename_all = "snake_case",
    rename_all_fields = "snake_case",
    deny_unknown_fields
)]
pub enum Request {
    /// Answered by [`Reply::Status`].
    Status,
    /// Answered by [`Reply::Conns`].
    ConnList,
    /// Puts a bump into the live connections that match. Answered by [`Reply::Changed`].
    Enable {
        /// Which.
        selector: Selector,
        /// None: the configuration's `default_bump`.
        bump: Option<String>,
    },
    /// Takes the live connections that match back to plain. Answered by [`Reply::Changed`].
    Disable {
        /// Which.
        selector: Selector,
        /// Also those that plain does not carry.
        #[serde(default, skip_serializing_if = "is_default")]
        force: bool,
    },
    /// Makes a rule for connections to come, applied to the established ones at once. Answered by
    /// [`Reply::Rule`].
    RuleAdd(NewRule),
    /// Answered by [`Reply::Rules`].
    RuleList,
    /// Deletes a rule that `RuleAdd` made. Answered by [`Reply::RuleGone`].
    RuleDel {
        /// Which.
        id: RuleId,
        /// Its connections go to plain also where plain does not carry them.
        #[serde(default, skip_serializing_if = "is_default")]
        force: bool,
    },
    /// Answered by [`Reply::Paths`].
    PathList,
    /// Answered by [`Reply::Preferences`].
    PathPreferences,
    /// Changes how paths are used. Answered by [`Reply::Preferences`].
    PathChange(PathChange),
    /// Puts load on paths. Answered by [`Reply::Measured`].
    Measure(Measure),
    /// Answered by [`Reply::Peers`].
    PeerList,
    /// Forgets a peer that joined by a token; the daemon starts again. Answered by [`Reply::Done`].
    PeerRemove {
        /// Its name.
        name: String,
        /// Its connections may break.
        force: bool,
    },
    /// Answered by [`Reply::Bumps`].
    BumpList,
    /// Answered by [`Reply::Following`], then [`Reply::Event`] without end.
    Events,
    /// Lets go of everything that is installed in the kernel, if that breaks no connection. Answered by
    /// [`Reply::Done`].
    Cleanup,
    /// The same, whatever breaks. Answered by [`Reply::Done`].
    ForceCleanup,
}

/// A rule as its user wants it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewRule {
    /// Connections that are meant; [`Selector::names_class`].
    pub selector: Selector,
    /// Terms that they also have in common.
    #[serde(default, skip_serializing_if = "Terms::is_empty")]
    pub terms: Terms,
    /// Ports and addresses that they take.
    pub bump: String,
    /// True if they may go by nothing else. Not together with `prefer`.
    #[serde(default)]
    pub require: bool,
    /// True if they are plain while there is no session.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prefer: bool,
    /// Order of rules that select the same connection: the one with the highest decides, then the oldest; those
    /// of root and of the file before those of others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i32,
    /// How their new data is shared out over the paths, as the configuration names it; none: as that of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl NewRule {
    /// The usual rule for a selector.
    pub fn new(selector: Selector, bump: impl Into<String>) -> Self {
        Self {
            selector,
            terms: Terms::default(),
            bump: bump.into(),
            require: false,
            prefer: false,
            priority: 0,
            scheduler: None,
        }
    }

    /// Why the rule cannot have the scheduler that it names: it selects by something that neither addresses nor
    /// ports show.
    pub fn scheduler_fault(&self) -> Option<String> {
        self.scheduler.as_ref()?;
        let uid = matches!(&self.selector, Selector::Match(named) if named.uid.is_some());
        let terms = self.terms.iter().map(|(key, _)| key);
        let mut named = uid.then_some("uid").into_iter().chain(terms);
        let key = named.find(|key| !matches!(Term::kind(key), Some((_, Shows::Clock))))?;
        Some(format!(
            "a rule with {key} cannot have a scheduler, because the scheduler sees only addresses and ports"
        ))
    }
}

impl Request {
    /// Refusal of what no daemon could do, for a reason that the request shows by itself.
    pub fn check(&self) -> Result<(), Failure> {
        if let Request::PathChange(PathChange::Limit {
            rate: None,
            volume: None,
            ..
        }) = self
        {
            return Err(Failure::new(
                ErrorKind::BadRequest,
                "the limit names neither a rate nor a volume",
            ));
        }
        let (Request::Enable { selector, .. }
        | Request::Disable { selector, .. }
        | Request::RuleAdd(NewRule { selector, .. })) = self
        else {
            return Ok(());
        };
        if matches!(selector, Selector::Match(wanted) if *wanted == Match::default()) {
            return Err(Failure::new(
                ErrorKind::BadRequest,
                "the selector names nothing",
            ));
        }
        let Request::RuleAdd(rule) = self else {
            return Ok(());
        };
        if rule.require && rule.prefer {
            return Err(Failure::new(
                ErrorKind::BadRequest,
                "a rule has both require and prefer",
            ));
        }
        if !selector.names_class() {
            return Err(Failure::new(
                ErrorKind::BadRequest,
                "a rule is for connections to come, and a connection's id or a process is not \
                 known beforehand",
            ));
        }
        match rule.scheduler_fault() {
            Some(why) => Err(Failure::new(ErrorKind::BadRequest, why)),
            None => Ok(()),
        }
    }
}

/// An answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::ConnList`].
    Conns(Vec<ConnInfo>),
    /// To [`Request::Enable`] and [`Request::Disable`].
    Changed(Changed),
    /// To [`Request::RuleAdd`].
    Rule(RuleMade),
    /// To [`Request::RuleDel`].
    RuleGone(RuleGone),
    /// To [`Request::RuleList`].
    Rules(Vec<RuleInfo>),
    /// To [`Request::PathList`].
    Paths(Vec<PathInfo>),
    /// To [`Request::PathPreferences`] and [`Request::PathChange`]: how paths are used now.
    Preferences(Preferences),
    /// To [`Request::Measure`].
    Measured(Measured),
    /// To [`Request::PeerList`].
    Peers(Vec<PeerInfo>),
    /// To [`Request::BumpList`].
    Bumps(Vec<BumpInfo>),
    /// To [`Request::Events`], at once.
    Following,
    /// To [`Request::Events`], each time.
    Event(Event),
    /// To [`Request::Enable`] and [`Request::Disable`], each second while they take longer: how far they
    /// are. The answer is still to come.
    Progress {
        /// Connections that were dealt with.
        done: u64,
        /// Connections that match.
        of: u64,
    },
    /// To a request that has nothing to tell.
    Done,
}

/// Why a request was not done. Displays as its message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// For programs.
    pub kind: ErrorKind,
    /// For people: one clear sentence without a full stop.
    pub message: String,
}

impl Failure {
    /// The error of that kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Failure {
            kind,
            message: message.into(),
        }
    }

    /// The error about a name that is none of the known ones.
    pub fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> Self {
        let known = known.collect::<Vec<_>>().join(", ");
        let message = format!("there is no {what} \"{name}\": choose one of {known}");
        Self::new(ErrorKind::NotFound, message)
    }
}

/// The kinds of [`Failure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The line is no request.
    BadRequest,
    /// The client speaks another version of this protocol.
    Version,
    /// The caller may not do this.
    Denied,
    /// What was named (a rule, a bump, a peer) does not exist.
    NotFound,
    /// No live connection matches.
    NoMatch,
    /// The peer's session is not established.
    NoSession,
    /// It exists, is allowed, and still cannot be; the message says why.
    Refused,
    /// The system did not let the daemon.
    Failed,
    /// A kind of a later version.
    #[serde(other)]
    Other,
}
