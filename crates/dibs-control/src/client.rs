//! The blocking client.

use std::io::{self, ErrorKind as Io, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::codec::{LineBuffer, MAX_REPLY, decode_reply, encode_request};
use crate::{
    BumpInfo, Changed, ConnInfo, Event, Failure, NewRule, PathChange, PathInfo, PeerInfo,
    Preferences, Reply, Request, RuleGone, RuleId, RuleInfo, RuleMade, Selector, Status,
};

/// How long the daemon may say nothing. While it deals with a request it says each second that it does.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("dibsd is not running: nothing answers at {}", socket.display())]
    NotRunning {
        /// Where it would.
        socket: PathBuf,
    },
    /// The socket is not for this user.
    #[error("no access to {}: it is for root and the group of the socket", socket.display())]
    NoAccess {
        /// Where it listens.
        socket: PathBuf,
    },
    /// It listens, and does not answer.
    #[error("dibsd did not answer at {} within {} s", socket.display(), timeout.as_secs_f32())]
    Timeout {
        /// Where it listens.
        socket: PathBuf,
        /// How long it had.
        timeout: Duration,
    },
    /// It went away.
    #[error("dibsd closed the connection at {}", socket.display())]
    Closed {
        /// Where it listened.
        socket: PathBuf,
    },
    /// What listens there does not speak this protocol.
    #[error("what answers at {} is not this version's dibsd: {what}", socket.display())]
    Garbage {
        /// Where it listens.
        socket: PathBuf,
        /// What was wrong with its answer.
        what: String,
    },
    /// The system did not let us.
    #[error("{}: {error}", socket.display())]
    Io {
        /// Where the daemon listens.
        socket: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The daemon refused, or failed.
    #[error(transparent)]
    Refused(#[from] Failure),
}

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    socket: PathBuf,
    lines: LineBuffer,
    timeout: Duration,
    on_progress: Option<fn(u64, u64)>,
}

impl Client {
    /// Connects, and gives the daemon [`TIMEOUT`] for each answer.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        Self::connect_timeout(socket, TIMEOUT)
    }

    /// Connects, and gives the daemon `timeout` for each answer.
    pub fn connect_timeout(socket: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let connect = || {
            let stream = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            // Bounds connect() as well: it waits while the listener's backlog is full.
            stream.set_write_timeout(Some(timeout))?;
            stream.connect(&SockAddr::unix(socket)?)?;
            Ok(UnixStream::from(std::os::fd::OwnedFd::from(stream)))
        };
        let place = Place { socket, timeout };
        let stream = connect().map_err(|error: io::Error| place.error(error))?;
        let lines = LineBuffer::new(MAX_REPLY);
        Ok(Client {
            stream,
            socket: socket.to_owned(),
            lines,
            timeout,
            on_progress: None,
        })
    }

    /// Has `tell` called with how many connections were dealt with, and of how many, while a change takes
    /// long.
    pub fn on_progress(&mut self, tell: fn(u64, u64)) {
        self.on_progress = Some(tell);
    }

    /// Asks, and waits for the answer, as long as the daemon says that it is at it.
    pub fn request(&mut self, request: &Request) -> Result<Reply, ClientError> {
        request.check()?;
        let sent = self.stream.write_all(encode_request(request).as_bytes());
        if let Err(error) = sent {
            return Err(self.farewell().unwrap_or(self.place().error(error)));
        }
        loop {
            match self.answer(Some(Instant::now() + self.timeout))? {
                Reply::Progress { done, of } => {
                    if let Some(tell) = self.on_progress.filter(|_| of > 0) {
                        tell(done, of);
                    }
                }
                reply => return Ok(reply),
            }
        }
    }

    /// [`Request::Status`]
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.request(&Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::ConnList`]
    pub fn conns(&mut self) -> Result<Vec<ConnInfo>, ClientError> {
        match self.request(&Request::ConnList)? {
            Reply::Conns(conns) => Ok(conns),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::Enable`]
    pub fn enable(
        &mut self,
        selector: Selector,
        bump: Option<String>,
    ) -> Result<Changed, ClientError> {
        self.change(&Request::Enable { selector, bump })
    }

    /// [`Request::Disable`]
    pub fn disable(&mut self, selector: Selector, force: bool) -> Result<Changed, ClientError> {
        self.change(&Request::Disable { selector, force })
    }

    /// [`Request::RuleAdd`]
    pub fn add_rule(&mut self, rule: NewRule) -> Result<RuleMade, ClientError> {
        match self.request(&Request::RuleAdd(rule))? {
            Reply::Rule(rule) => Ok(rule),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::RuleList`]
    pub fn rules(&mut self) -> Result<Vec<RuleInfo>, ClientError> {
        match self.request(&Request::RuleList)? {
            Reply::Rules(rules) => Ok(rules),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::RuleDel`]
    pub fn delete_rule(&mut self, id: RuleId, force: bool) -> Result<RuleGone, ClientError> {
        match self.request(&Request::RuleDel { id, force })? {
            Reply::RuleGone(gone) => Ok(gone),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::PathList`]
    pub fn paths(&mut self) -> Result<Vec<PathInfo>, ClientError> {
        match self.request(&Request::PathList)? {
            Reply::Paths(paths) => Ok(paths),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::PathPreferences`]
    pub fn preferences(&mut self) -> Result<Preferences, ClientError> {
        self.preferences_after(&Request::PathPreferences)
    }

    /// [`Request::PathChange`]
    pub fn change_paths(&mut self, change: PathChange) -> Result<Preferences, ClientError> {
        self.preferences_after(&Request::PathChange(change))
    }

    /// [`Request::PeerList`]
    pub fn peers(&mut self) -> Result<Vec<PeerInfo>, ClientError> {
        match self.request(&Request::PeerList)? {
            Reply::Peers(peers) => Ok(peers),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::BumpList`]
    pub fn bumps(&mut self) -> Result<Vec<BumpInfo>, ClientError> {
        match self.request(&Request::BumpList)? {
            Reply::Bumps(bumps) => Ok(bumps),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::Cleanup`], or [`Request::ForceCleanup`]
    pub fn cleanup(&mut self, force: bool) -> Result<(), ClientError> {
        self.done(&match force {
            true => Request::ForceCleanup,
            false => Request::Cleanup,
        })
    }

    /// [`Request::Events`]: returns once the daemon follows, so that nothing after is missed.
    pub fn events(mut self) -> Result<Events, ClientError> {
        match self.request(&Request::Events)? {
            Reply::Following => Ok(Events { client: Some(self) }),
            other => Err(self.unexpected(&other)),
        }
    }

    fn preferences_after(&mut self, request: &Request) -> Result<Preferences, ClientError> {
        match self.request(request)? {
            Reply::Preferences(preferences) => Ok(preferences),
            other => Err(self.unexpected(&other)),
        }
    }

    fn change(&mut self, request: &Request) -> Result<Changed, ClientError> {
        match self.request(request)? {
            Reply::Changed(changed) => Ok(changed),
            other => Err(self.unexpected(&other)),
        }
    }

    fn done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.request(request)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Why a daemon that takes nothing any more closed, if it said so.
    fn farewell(&mut self) -> Option<ClientError> {
        match self.answer(Some(Instant::now() + self.timeout)) {
            Err(said @ ClientError::Refused(_)) => Some(said),
            _ => None,
        }
    }

    /// The next answer; no deadline: however long it takes.
    fn answer(&mut self, deadline: Option<Instant>) -> Result<Reply, ClientError> {
        loop {
            let line = self
                .lines
                .next_line()
                .map_err(|error| self.garbage(error.to_string()))?;
            if let Some(line) = line {
                let answer =
                    decode_reply(&line).map_err(|error| self.garbage(error.to_string()))?;
                return Ok(answer?);
            }
            self.read(deadline)
                .map_err(|error| self.place().error(error))?;
        }
    }

    fn read(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Io::TimedOut.into());
        }
        self.stream.set_read_timeout(left)?;
        let mut piece = [0; 16 * 1024];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(Io::UnexpectedEof.into()),
            Ok(length) => {
                self.lines.extend(&piece[..length]);
                Ok(())
            }
            Err(error) if error.kind() == Io::Interrupted => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn place(&self) -> Place<'_> {
        Place {
            socket: &self.socket,
            timeout: self.timeout,
        }
    }

    fn garbage(&self, what: String) -> ClientError {
        ClientError::Garbage {
            socket: self.socket.clone(),
            what,
        }
    }

    fn unexpected(&self, reply: &Reply) -> ClientError {
        let reply = serde_json::to_value(reply).expect("our types have string keys only");
        let kind = match &reply {
            serde_json::Value::Object(fields) => fields.keys().next().cloned(),
            other => other.as_str().map(str::to_owned),
        };
        self.garbage(format!(
            "it answered \"{}\" to another question",
            kind.unwrap_or_default()
        ))
    }
}

/// The daemon's events, one after the other, without end.
#[derive(Debug)]
pub struct Events {
    /// None: failed, and ended.
    client: Option<Client>,
}

impl Iterator for Events {
    type Item = Result<Event, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        let client = self.client.as_mut()?;
        let next = match client.answer(None) {
            Ok(Reply::Event(event)) => return Some(Ok(event)),
            Ok(other) => client.unexpected(&other),
            Err(error) => error,
        };
        self.client = None;
        Some(Err(next))
    }
}

/// Where an error of the system happened.
struct Place<'a> {
    socket: &'a Path,
    timeout: Duration,
}

impl Place<'_> {
    fn error(&self, error: io::Error) -> ClientError {
        let socket = self.socket.to_owned();
        match error.kind() {
            Io::NotFound | Io::ConnectionRefused => ClientError::NotRunning { socket },
            Io::PermissionDenied => ClientError::NoAccess { socket },
            Io::TimedOut | Io::WouldBlock => ClientError::Timeout {
                socket,
                timeout: self.timeout,
            },
            Io::UnexpectedEof | Io::BrokenPipe | Io::ConnectionReset => {
                ClientError::Closed { socket }
            }
            _ => ClientError::Io { socket, error },
        }
    }
}
