//! The control socket: JSON lines from root and the members of a group.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use dibs_control::{
    ErrorKind, Failure, LineBuffer, MAX_REQUEST, Reply, Request, decode_request, encode_reply,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::control::events::Told;
use crate::control::{CLIENTS_OF_UID, Caller, Progress, TurnedAway};

/// Clients of members of the group that are served at once: they cannot keep root out.
const CLIENTS: usize = 64;
/// How long a client may ask nothing, or leave an answer unread; who follows the events may wait for ever.
const IDLE: Duration = Duration::from_secs(60);
/// Who waits is told how far it is as often.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Trouble with accepting is logged once it has been away for as long.
const LOG_AFTER: Duration = Duration::from_secs(60);

/// Refuses where what is at `path` is not what an earlier daemon left.
pub(crate) fn ensure_place(path: &Path) -> anyhow::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) => ensure!(
            found.file_type().is_socket(),
            "control_socket {} is there, and is no socket; name another place",
            path.display()
        ),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            return Err(error).with_context(|| format!("cannot look at {}", path.display()));
        }
    }
    Ok(())
}

/// Listens at `path`, for the owner and the group. The caller made sure that no other daemon does.
pub(crate) fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    ensure_place(path)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("cannot open {} to its group", path.display()))?;
    Ok(listener)
}

/// What serves the requests that come by the socket.
pub(crate) trait Serves: 'static {
    /// Who is at the other end.
    fn caller(&self, uid: u32) -> Caller {
        Caller { uid }
    }

    /// Answers a request; [`Request::Events`] is not among them.
    async fn serve(
        &self,
        caller: Caller,
        request: Request,
        progress: &Progress,
    ) -> Result<Reply, Failure>;

    /// Events from now on.
    fn follow(&self) -> broadcast::Receiver<Told>;

    /// Counts who is let go.
    fn turned_away(&self) -> &TurnedAway;
}

/// The places of members of the group, by uid.
#[derive(Default)]
struct Places(RefCell<BTreeMap<u32, usize>>);

/// A client's place until this is dropped.
struct Place {
    places: Rc<Places>,
    uid: u32,
}

impl Places {
    /// A place for a client; root needs none, so that nobody keeps it out.
    fn take(self: &Rc<Self>, caller: Caller) -> Result<Option<Place>, Failure> {
        let Caller { uid } = caller;
        if caller.is_root() {
            return Ok(None);
        }
        let full = |what: String| Failure::new(ErrorKind::Refused, what);
        let mut places = self.0.borrow_mut();
        if places.get(&uid).is_some_and(|own| *own >= CLIENTS_OF_UID) {
            return Err(full(format!(
                "uid {uid} has {CLIENTS_OF_UID} clients, which is the limit: close one"
            )));
        }
        if places.values().sum::<usize>() >= CLIENTS {
            return Err(full(format!(
                "dibsd has {CLIENTS} clients, which is the limit: try again later"
            )));
        }
        *places.entry(uid).or_default() += 1;
        Ok(Some(Place {
            places: Rc::clone(self),
            uid,
        }))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.places.0.borrow_mut();
        let own = places.get_mut(&self.uid).expect("it has this place");
        *own -= 1;
        if *own == 0 {
            places.remove(&self.uid);
        }
    }
}

/// Serves clients without end. Runs inside a [`tokio::task::LocalSet`].
pub(crate) async fn serve<S: Serves>(served: Rc<S>, listener: UnixListener) {
    serve_within(served, listener, IDLE).await;
}

/// The same; a client has `idle` to ask something, and to read the answer.
async fn serve_within<S: Serves>(daemon: Rc<S>, listener: UnixListener, idle: Duration) {
    let places = Rc::new(Places::default());
    let mut failed = Seldom::default();
    let mut full = Seldom::default();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: those in use have to end first.
                if failed.is_news() {
                    tracing::warn!("control socket: cannot accept clients: {error}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = stream.peer_cred() else {
            continue;
        };
        let caller = daemon.caller(peer.uid());
        let place = match places.take(caller) {
            Ok(place) => place,
            Err(why) => {
                daemon.turned_away().refused.update(|count| count + 1);
                if full.is_news() {
                    tracing::warn!("control socket: {why}");
                }
                say(&stream, why);
                continue;
            }
        };
        let daemon = Rc::clone(&daemon);
        tokio::task::spawn_local(async move {
            let _place = place;
            if let Err(error) = client(&*daemon, caller, stream, idle).await {
                tracing::debug!("control socket: {error}");
            }
        });
    }
}

/// What is not to fill the log.
#[derive(Default)]
struct Seldom(Option<Instant>);

impl Seldom {
    /// Whether it was away for [`LOG_AFTER`].
    fn is_news(&mut self) -> bool {
        let known = self.0.replace(Instant::now());
        known.is_none_or(|known| known.elapsed() >= LOG_AFTER)
    }
}

/// Says why a client is let go, if it takes that at once.
fn say(stream: &UnixStream, why: Failure) {
    // The kernel takes so little whole, or not at all.
    let _ = stream.try_write(encode_reply(&Err(why)).as_bytes());
}

async fn client<S: Serves>(
    daemon: &S,
    caller: Caller,
    mut stream: UnixStream,
    idle: Duration,
) -> std::io::Result<()> {
    let let_go = || daemon.turned_away().idle.update(|count| count + 1);
    let mut lines = LineBuffer::new(MAX_REQUEST);
    let mut piece = vec![0; 4096];
    let mut until = tokio::time::Instant::now() + idle;
    loop {
        loop {
            let line = match lines.next_line() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => {
                    let failure = Failure::new(ErrorKind::BadRequest, error.to_string());
                    return answer(&mut stream, &Err(failure), idle).await;
                }
            };
            let reply = match decode_request(&line) {
                Ok(Request::Events) => {
                    let followed = follow(daemon, caller, stream, idle).await;
                    if is_timeout(&followed) {
                        let_go();
                    }
                    return followed;
                }
                Ok(request) => serve_telling(daemon, caller, request, &stream).await,
                Err(failure) => Err(failure),
            };
            let answered = answer(&mut stream, &reply, idle).await;
            if is_timeout(&answered) {
                let_go();
            }
            answered?;
            until = tokio::time::Instant::now() + idle;
        }
        let Ok(read) = tokio::time::timeout_at(until, stream.read(&mut piece)).await else {
            let_go();
            let said = format!("nothing was asked within {} s", idle.as_secs_f32());
            say(&stream, Failure::new(ErrorKind::Refused, said));
            return Ok(());
        };
        match read? {
            0 => return Ok(()),
            len => lines.extend(&piece[..len]),
        }
    }
}

fn is_timeout(done: &std::io::Result<()>) -> bool {
    let kind = done.as_ref().err().map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::TimedOut)
}

/// Does what is asked for, and tells how far it is while it takes long: also that it goes on where no more was done, for
/// on a busy host a change waits for many programs, each of which has its time. What has begun goes on, whether the client
/// listens or not.
async fn serve_telling(
    daemon: &impl Serves,
    caller: Caller,
    request: Request,
    stream: &UnixStream,
) -> Result<Reply, Failure> {
    let progress = Progress::default();
    let mut serving = std::pin::pin!(daemon.serve(caller, request, &progress));
    loop {
        if let Ok(reply) = tokio::time::timeout(TELL_EVERY, &mut serving).await {
            return reply;
        }
        let (done, of) = progress.counts();
        let line = encode_reply(&Ok(Reply::Progress { done, of }));
        // The kernel takes so little whole, or not at all.
        let _ = stream.try_write(line.as_bytes());
    }
}

/// Answers who reads that within a time.
async fn answer(
    stream: &mut UnixStream,
    reply: &Result<Reply, Failure>,
    idle: Duration,
) -> std::io::Result<()> {
    let line = encode_reply(reply);
    tokio::time::timeout(idle, stream.write_all(line.as_bytes())).await?
}

/// Tells of events until the client goes, or reads no more. There may be none for long.
async fn follow(
    daemon: &impl Serves,
    caller: Caller,
    mut stream: UnixStream,
    idle: Duration,
) -> std::io::Result<()> {
    let mut events = daemon.follow();
    answer(&mut stream, &Ok(Reply::Following), idle).await?;
    let mut byte = [0];
    loop {
        tokio::select! {
            told = events.recv() => match told.map(|told| told.to(caller)) {
                Ok(Some(event)) => answer(&mut stream, &Ok(Reply::Event(event)), idle).await?,
                Ok(None) => {}
                // Too slow for some; it goes on with the latest.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            },
            read = stream.read(&mut byte) => if read? == 0 {
                return Ok(());
            },
        }
    }
}

#[cfg(test)]
mod tests;
