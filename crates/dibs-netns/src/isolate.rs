//! Namespaces of our own, entered before anything touches a network.
//!
//! Root gets a network and a mount namespace, everyone else a user namespace around them, in which
//! the caller's uid is root. A tmpfs of our own covers `/run`, so that `xtables.lock`,
//! `/run/netns` and control sockets are never the machine's; a directory in it is the proof that
//! [`Host::new`](crate::Host::new) asks for.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::fcntl::{OFlag, open};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, getegid, geteuid, mkdir, write};

/// Exists only in a `/run` that [`Isolation::apply`] mounted.
const MARKER: &str = "/run/dibs-netns";
/// Names, for a test's second process, the test that it is to run.
const TEST: &str = "DIBS_NETNS_TEST";
/// Exit status of a test's second process whose body ran and returned `Ok`. Not 0, which the test
/// harness also returns when no test has the name asked for.
const PASSED: i32 = 42;
/// A test that takes longer hangs: each of its waits has a bound of its own, [`HANG`](crate::HANG), and says
/// what it waited for.
const TEST_LIMIT: Duration = Duration::from_secs(900);

/// Moves this process into fresh network and mount namespaces (and a user namespace, if not root).
/// Call it first in `main`; does nothing if the process is inside already.
///
/// # Errors
/// If the process already has threads, or the kernel refuses: the message says what to allow.
pub fn enter() -> Result<()> {
    if is_inside() {
        return Ok(());
    }
    let threads = std::fs::read_dir("/proc/self/task")
        .context("/proc/self/task")?
        .count();
    ensure!(
        threads == 1,
        "namespaces must be entered before threads start: {threads} are running"
    );
    Isolation::new().apply().map_err(explain)
}

/// True if this process runs in namespaces that [`enter`] or [`isolated`] made.
pub fn is_inside() -> bool {
    Path::new(MARKER).is_dir()
}

/// Runs the body of a test in a process and namespaces of its own, and panics if it fails.
///
/// The test harness has threads, and a process with threads cannot enter a user namespace; so the
/// test binary starts itself again for this one test. Others run meanwhile, as many as the harness has threads, for
/// they wait more than they compute; what takes all that the machine can do is for [`isolated_alone`]. Processes left
/// behind by the body are killed with it.
///
/// ```no_run
/// #[test]
/// fn two_hosts_talk() {
///     dibs_netns::isolated(|| {
///         let a = dibs_netns::Host::new("a")?;
///         // ...
///         Ok(())
///     });
/// }
/// ```
pub fn isolated<F: FnOnce() -> Result<()>>(body: F) {
    let _among_others = TURNS.read().unwrap_or_else(PoisonError::into_inner);
    run_isolated(body);
}

/// As [`isolated`], while no other test of this binary runs: for what leaves others little of the processors.
pub fn isolated_alone<F: FnOnce() -> Result<()>>(body: F) {
    let _alone = TURNS.write().unwrap_or_else(PoisonError::into_inner);
    run_isolated(body);
}

/// Read by tests that run among others, written by those that run alone: on Linux none begins before one that waits
/// to be alone.
static TURNS: RwLock<()> = RwLock::new(());

fn run_isolated<F: FnOnce() -> Result<()>>(body: F) {
    let name = test_name::<F>();
    if std::env::var(TEST).is_ok_and(|wanted| wanted == name) {
        if let Err(error) = body() {
            panic!("{error:?}");
        }
        std::process::exit(PASSED);
    }
    let (status, output) = run_alone(name).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    println!("{output}");
    match status.code() {
        Some(PASSED) => {}
        Some(0) => panic!("the harness found no test named {name}"),
        _ => panic!("{name} failed in its namespaces: {status}"),
    }
}

/// The test that the closure `F` was written in, as the harness names it: `krate::path::test` and
/// the closure's own suffix become `path::test`.
fn test_name<F>() -> &'static str {
    let path = std::any::type_name::<F>();
    let path = path.split("::{{closure}}").next().unwrap_or(path);
    path.split_once("::").map_or(path, |(_krate, test)| test)
}

/// Runs this binary again for one test, in fresh namespaces and a process group of its own.
fn run_alone(test: &str) -> Result<(ExitStatus, String)> {
    // A pipe would have to be drained while waiting; a file need not.
    let mut output = File::from(memfd_create("output", MFdFlags::MFD_CLOEXEC).context("memfd")?);
    let isolation = Isolation::new();
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([
            "--exact",
            test,
            "--nocapture",
            "--test-threads=1",
            "--include-ignored",
        ])
        .env(TEST, test)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        .process_group(0);
    #[allow(unsafe_code)]
    // SAFETY: `apply` makes system calls only; it neither allocates nor takes locks.
    unsafe {
        command.pre_exec(move || isolation.apply());
    }
    let mut child = command.spawn().map_err(explain)?;
    let group = Pid::from_raw(child.id() as i32);
    let deadline = Instant::now() + TEST_LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() > deadline {
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // The group holds whatever the test started; ESRCH means that nothing is left.
    let _ = killpg(group, Signal::SIGKILL);
    let _ = child.wait();
    let mut text = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let status = status.ok_or_else(|| anyhow!("still running after {TEST_LIMIT:?}:\n{text}"))?;
    Ok((status, text))
}

fn explain(error: io::Error) -> anyhow::Error {
    let hint = "it takes root, or user namespaces: see /proc/sys/user/max_user_namespaces, \
        kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns";
    anyhow::Error::new(error).context(format!("cannot enter namespaces of our own ({hint})"))
}

/// Everything that has to be known before a fork, for what happens after it.
struct Isolation {
    root: bool,
    uid_map: String,
    gid_map: String,
}

impl Isolation {
    fn new() -> Self {
        let (uid, gid) = (geteuid(), getegid());
        Self {
            root: uid.is_root(),
            uid_map: format!("0 {uid} 1"),
            gid_map: format!("0 {gid} 1"),
        }
    }

    /// Leaves the machine's namespaces. System calls only: it also runs between fork and exec.
    fn apply(&self) -> io::Result<()> {
        let own = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
        // A container's root may lack CAP_SYS_ADMIN and still be allowed a user namespace.
        if !(self.root && unshare(own).is_ok()) {
            unshare(own | CloneFlags::CLONE_NEWUSER)?;
            write_file("/proc/self/setgroups", "deny")?;
            write_file("/proc/self/uid_map", &self.uid_map)?;
            write_file("/proc/self/gid_map", &self.gid_map)?;
        }
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(
            Some("tmpfs"),
            "/run",
            Some("tmpfs"),
            flags,
            Some("mode=755"),
        )?;
        for directory in [MARKER, "/run/netns", "/run/hosts"] {
            mkdir(directory, Mode::from_bits_truncate(0o755))?;
        }
        Ok(())
    }
}

fn write_file(path: &str, content: &str) -> io::Result<()> {
    let file = open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    write(&file, content.as_bytes())?;
    Ok(())
}

/// Makes sure that this process is in namespaces that [`enter`] or [`isolated`] made.
///
/// # Errors
/// If it is not; with what to do.
pub fn require_inside() -> Result<()> {
    if !is_inside() {
        bail!(
            "hosts are made only by a process in namespaces of its own: call dibs_netns::enter() first in main, or \
             wrap the test in dibs_netns::isolated"
        );
    }
    Ok(())
}
