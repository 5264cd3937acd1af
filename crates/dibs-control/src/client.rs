//! The blocking client.

use std::io::{self, ErrorKind as Io, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::codec::{LineBuffer, MAX_REPLY, decode_reply, encode_request};
use crate::{
    BumpInfo, Changed, ConnInfo, Event, Failure, Measure, Measured, NewRule, PathChange, PathInfo,
    PeerInfo, Preferences, Reply, Request, RuleGone, RuleId, RuleInfo, RuleMade, Selector, Status,
};

/// How long the daemon may say nothing. While it deals with a request it says each second that it does.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("dibsd is not running: nothing answers at {}; start it with sudo systemctl start dibsd (on a new host after sudo dibsctl init)", .0.display())]
    NotRunning(PathBuf),
    /// The socket there is not for this user.
    #[error("no access to {}: use sudo, or join the group dibs (sudo adduser $USER dibs) and log in again", .0.display())]
    NoAccess(PathBuf),
    /// Silence of a daemon that listens there, for this time.
    #[error("dibsd did not answer at {} within {} s: see journalctl -u dibsd", .0.display(), .1.as_secs_f32())]
    Timeout(PathBuf, Duration),
    /// End of the daemon that listened there.
    #[error("dibsd closed the connection at {}: see journalctl -u dibsd", .0.display())]
    Closed(PathBuf),
    /// Answer of something that does not speak this protocol, with what was wrong.
    #[error("{} is answered by no dibsd of this version ({}): restart it with sudo systemctl restart dibsd", .0.display(), .1)]
    Garbage(PathBuf, String),
    /// The system did not let us.
    #[error("{}: {}", .0.display(), .1)]
    Io(PathBuf, io::Error),
    /// The daemon refused, or failed.
    #[error(transparent)]
    Refused(#[from] Failure),
}

/// Methods that ask for one thing each, and what their answers hold.
macro_rules! asks {
    ($($(#[$doc:meta])* $name:ident($($value:ident: $type:ty),*) -> $held:ty:
        $request:expr => Reply::$reply:ident;)*) => {$(
        $(#[$doc])*
        pub fn $name(&mut self, $($value: $type),*) -> Result<$held, ClientError> {
            match self.request(&$request)? {
                Reply::$reply(held) => Ok(held),
                other => Err(self.unexpected(&other)),
            }
        }
    )*};
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
        let stream = connect().map_err(|error| failed(socket, timeout, error))?;
        let lines = LineBuffer::new(MAX_REPLY);
        Ok(Client {
            stream,
            socket: socket.to_owned(),
            lines,
            timeout,
            on_progress: None,
        })
    }

    /// Has `tell` called each second while a change takes long, with how many connections were dealt with, and of how many; 0 before
    /// that is known.
    pub fn on_progress(&mut self, tell: fn(u64, u64)) {
        self.on_progress = Some(tell);
    }

    /// Asks, and waits for the answer, as long as the daemon says that it is at it.
    pub fn request(&mut self, request: &Request) -> Result<Reply, ClientError> {
        request.check()?;
        let sent = self.stream.write_all(encode_request(request).as_bytes());
        if let Err(error) = sent {
            return Err(self.farewell().unwrap_or(self.failed(error)));
        }
        loop {
            match self.answer(Some(Instant::now() + self.timeout))? {
                Reply::Progress { done, of } => {
                    if let Some(tell) = self.on_progress {
                        tell(done, of);
                    }
                }
                reply => return Ok(reply),
            }
        }
    }

    asks! {
        /// [`Request::Status`]
        status() -> Status: Request::Status => Reply::Status;
        /// [`Request::ConnList`]
        conns() -> Vec<ConnInfo>: Request::ConnList => Reply::Conns;
        /// [`Request::Enable`]
        enable(selector: Selector, bump: Option<String>) -> Changed:
            Request::Enable { selector, bump } => Reply::Changed;
        /// [`Request::Disable`]
        disable(selector: Selector, force: bool) -> Changed:
            Request::Disable { selector, force } => Reply::Changed;
        /// [`Request::RuleAdd`]
        add_rule(rule: NewRule) -> RuleMade: Request::RuleAdd(rule) => Reply::Rule;
        /// [`Request::RuleList`]
        rules() -> Vec<RuleInfo>: Request::RuleList => Reply::Rules;
        /// [`Request::RuleDel`]
        delete_rule(id: RuleId, force: bool) -> RuleGone:
            Request::RuleDel { id, force } => Reply::RuleGone;
        /// [`Request::PathList`]
        paths() -> Vec<PathInfo>: Request::PathList => Reply::Paths;
        /// [`Request::PathPreferences`]
        preferences() -> Preferences: Request::PathPreferences => Reply::Preferences;
        /// [`Request::PathChange`]
        change_paths(change: PathChange) -> Preferences:
            Request::PathChange(change) => Reply::Preferences;
        /// [`Request::Measure`]
        measure(wanted: Measure) -> Measured: Request::Measure(wanted) => Reply::Measured;
        /// [`Request::PeerList`]
        peers() -> Vec<PeerInfo>: Request::PeerList => Reply::Peers;
        /// [`Request::BumpList`]
        bumps() -> Vec<BumpInfo>: Request::BumpList => Reply::Bumps;
    }

    /// [`Request::Cleanup`], or [`Request::ForceCleanup`]
    pub fn cleanup(&mut self, force: bool) -> Result<(), ClientError> {
        self.done(&match force {
            true => Request::ForceCleanup,
            false => Request::Cleanup,
        })
    }

    /// [`Request::PeerRemove`].
    pub fn remove_peer(&mut self, name: String, force: bool) -> Result<(), ClientError> {
        self.done(&Request::PeerRemove { name, force })
    }

    fn done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.request(request)? {
            Reply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// [`Request::Events`]: returns once the daemon follows, so that nothing after is missed.
    pub fn events(mut self) -> Result<Events, ClientError> {
        match self.request(&Request::Events)? {
            Reply::Following => Ok(Events { client: Some(self) }),
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
            self.read(deadline).map_err(|error| self.failed(error))?;
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

    fn failed(&self, error: io::Error) -> ClientError {
        failed(&self.socket, self.timeout, error)
    }

    fn garbage(&self, what: String) -> ClientError {
        ClientError::Garbage(self.socket.clone(), what)
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

/// An error of the system at a socket, of whom an answer was expected within a time.
fn failed(socket: &Path, timeout: Duration, error: io::Error) -> ClientError {
    let socket = socket.to_owned();
    match error.kind() {
        Io::NotFound | Io::ConnectionRefused => ClientError::NotRunning(socket),
        Io::PermissionDenied => ClientError::NoAccess(socket),
        Io::TimedOut | Io::WouldBlock => ClientError::Timeout(socket, timeout),
        Io::UnexpectedEof | Io::BrokenPipe | Io::ConnectionReset => ClientError::Closed(socket),
        _ => ClientError::Io(socket, error),
    }
}
