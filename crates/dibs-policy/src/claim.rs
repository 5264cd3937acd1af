//! Claims to what only one process may do at a time: locks that end with their process.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Time for which the lock of a daemon that was killed may stay: a child that it was just starting has the descriptor until
/// it becomes another program.
const HANDOVER: Duration = Duration::from_millis(500);
/// Time between two attempts.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Directory of the locks of network namespaces: that of the usual control socket.
const LOCKS: &str = "/run/dibs";

/// Claim, until it is dropped.
pub type Claim = Flock<File>;

/// Claim to steer this network namespace, whatever the control socket: two would undo each other's rules. Nothing if another
/// process has it.
///
/// # Errors
/// The file cannot be made or locked.
pub fn namespace() -> io::Result<Option<Claim>> {
    let namespace = fs::metadata("/proc/self/ns/net")?;
    // The directory is that of the usual control socket, which another one's need not be there.
    fs::create_dir_all(LOCKS)?;
    take(&PathBuf::from(format!(
        "{LOCKS}/netns-{}.lock",
        namespace.ino()
    )))
}

/// Claim by a file, which is made. Nothing if another process has it, and keeps it for longer than it takes to end.
///
/// # Errors
/// The file cannot be opened or locked.
pub fn take(path: &Path) -> io::Result<Option<Claim>> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)?;
    let deadline = Instant::now() + HANDOVER;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((unlocked, Errno::EWOULDBLOCK)) if Instant::now() < deadline => {
                file = unlocked;
                std::thread::sleep(LOOK_EVERY);
            }
            Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
            Err((_, error)) => return Err(error.into()),
        }
    }
}
