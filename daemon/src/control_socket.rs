//! The control socket: JSON lines from root and the members of a group.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use dibs_control::{
    Failure, LineBuffer, MAX_REQUEST, Reply, Request, decode_request, encode_reply,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::sync::broadcast::error::RecvError;

use crate::daemon::Daemon;
use crate::requests::Caller;
use crate::switching::Progress;

/// Clients served at once, root not counted: the group cannot keep root out.
const CLIENTS: usize = 64;
/// Who waits is told how far it is as often.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Trouble with accepting is logged once it has been away for as long.
const LOG_AFTER: Duration = Duration::from_secs(60);

/// Refuses where what is at `path` is not what an earlier daemon left.
pub fn ensure_place(path: &Path) -> anyhow::Result<()> {
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
pub fn bind(path: &Path) -> anyhow::Result<UnixListener> {
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

/// Serves clients without end. Runs inside a [`tokio::task::LocalSet`].
pub async fn serve(daemon: Rc<Daemon>, listener: UnixListener) {
    let room = Arc::new(Semaphore::new(CLIENTS));
    let mut refused: Option<Instant> = None;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: those in use have to end first.
                let known = refused.replace(Instant::now());
                if known.is_none_or(|known| known.elapsed() >= LOG_AFTER) {
                    tracing::warn!("control socket: clients have to wait: {error}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(peer) = stream.peer_cred() else {
            continue;
        };
        let caller = Caller { uid: peer.uid() };
        let permit = Arc::clone(&room).try_acquire_owned();
        if permit.is_err() && !caller.is_root() {
            tracing::warn!(uid = caller.uid, "control socket: too many clients");
            continue;
        }
        let daemon = Rc::clone(&daemon);
        tokio::task::spawn_local(async move {
            let _permit = permit;
            if let Err(error) = client(&daemon, caller, stream).await {
                tracing::debug!("control socket: {error}");
            }
        });
    }
}

async fn client(daemon: &Daemon, caller: Caller, mut stream: UnixStream) -> std::io::Result<()> {
    let mut lines = LineBuffer::new(MAX_REQUEST);
    let mut piece = vec![0; 4096];
    loop {
        loop {
            let line = match lines.next_line() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => {
                    let kind = dibs_control::ErrorKind::BadRequest;
                    let failure = Failure::new(kind, error.to_string());
                    return answer(&mut stream, &Err(failure)).await;
                }
            };
            match decode_request(&line) {
                Ok(Request::Events) => return follow(daemon, stream).await,
                Ok(request) => {
                    let reply = serve_telling(daemon, caller, request, &stream).await;
                    answer(&mut stream, &reply).await?;
                }
                Err(failure) => answer(&mut stream, &Err(failure)).await?,
            }
        }
        match stream.read(&mut piece).await? {
            0 => return Ok(()),
            len => lines.extend(&piece[..len]),
        }
    }
}

/// Does what is asked for, and tells how far it is while it takes long. What has begun goes on, whether the
/// client listens or not.
async fn serve_telling(
    daemon: &Daemon,
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
        if let Some((done, of)) = progress.news() {
            let (done, of) = (done as u64, of as u64);
            let line = encode_reply(&Ok(Reply::Progress { done, of }));
            // The kernel takes so little whole, or not at all.
            let _ = stream.try_write(line.as_bytes());
        }
    }
}

async fn answer(stream: &mut UnixStream, reply: &Result<Reply, Failure>) -> std::io::Result<()> {
    stream.write_all(encode_reply(reply).as_bytes()).await
}

/// Tells of events until the client goes.
async fn follow(daemon: &Daemon, mut stream: UnixStream) -> std::io::Result<()> {
    let mut events = daemon.follow();
    answer(&mut stream, &Ok(Reply::Following)).await?;
    let mut byte = [0];
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Ok(event) => answer(&mut stream, &Ok(Reply::Event(event))).await?,
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
