//! A host: a network namespace, a `/run` of its own, and the thread that lives there.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::isolate::require_inside;
use crate::process::{HANG, Process, describe};

/// Where system commands live; an ordinary user's PATH may lack it.
const SYSTEM_PATHS: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";

/// A host. Clones are the same host; the last one dropped takes its processes along.
#[derive(Clone, Debug)]
pub struct Host {
    inner: Arc<Inner>,
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
struct Inner {
    name: String,
    net: File,
    mnt: File,
    jobs: Option<mpsc::Sender<Job>>,
    resident: Option<JoinHandle<()>>,
    started: AtomicU64,
}

/// Counters of one interface since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets received; a superpacket of an offload counts once.
    pub rx_packets: u64,
    /// Packets dropped on receipt.
    pub rx_dropped: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Packets dropped when sending.
    pub tx_dropped: u64,
}

impl Host {
    /// A new host with nothing but `lo`.
    ///
    /// # Errors
    /// If the process is not in namespaces of its own ([`enter`](crate::enter), [`isolated`](crate::isolated)), or
    /// the name is taken or not a host's name (letters, digits, hyphens).
    pub fn new(name: &str) -> Result<Self> {
        require_inside()?;
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '-';
        ensure!(
            !name.is_empty() && name.chars().all(valid),
            "not a name for a host: {name:?}"
        );
        let run = PathBuf::from("/run/hosts").join(name);
        std::fs::create_dir(&run).with_context(|| format!("host {name} exists"))?;

        let (jobs, inbox) = mpsc::channel::<Job>();
        let (ready, made) = mpsc::channel();
        let resident = std::thread::Builder::new()
            .name(format!("host {name}"))
            .spawn(move || {
                // Received only by `new`, which waits for it.
                let _ = ready.send(settle(&run));
                for job in inbox {
                    job();
                }
            })
            .context("thread")?;
        let (net, mnt) = made
            .recv()
            .map_err(|_| anyhow!("the thread of host {name} died"))?
            .with_context(|| format!("namespaces of host {name}"))?;

        let host = Self {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                net,
                mnt,
                jobs: Some(jobs),
                resident: Some(resident),
                started: AtomicU64::new(0),
            }),
        };
        host.publish()?;
        host.run("ip link set lo up")?;
        // Addresses usable at once, and no packets that nobody asked for.
        for family in ["all", "default"] {
            host.sysctl(&format!("net.ipv6.conf.{family}.accept_dad"), "0")?;
            host.sysctl(&format!("net.ipv6.conf.{family}.router_solicitations"), "0")?;
        }
        // What one measurement learns of a destination must not shape the next.
        host.sysctl("net.ipv4.tcp_no_metrics_save", "1")?;
        Ok(host)
    }

    /// Its name, also for `ip netns exec NAME` inside this process's namespaces.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The host's `/run`, as seen from this process.
    pub fn run_dir(&self) -> PathBuf {
        Path::new("/run/hosts").join(self.name())
    }

    /// A command that will run on this host, whoever starts it.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        with_system_paths(&mut command);
        let inner = Arc::clone(&self.inner);
        #[allow(unsafe_code)]
        // SAFETY: `go_there` makes system calls only; it neither allocates nor takes locks.
        unsafe {
            command.pre_exec(move || inner.go_there());
        }
        command
    }

    /// Starts a command; its output is kept for [`Process::stdout`]. It dies with its handle, and
    /// with the host.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn spawn(&self, command: Command) -> Result<Process> {
        let number = self.inner.started.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("/run/hosts/{}.{number}", self.name());
        Process::start(command, &prefix, |command| self.spawn_here(command))
    }

    /// Starts a command from the host's own thread, the end of which kills it.
    fn spawn_here(&self, mut command: Command) -> std::io::Result<Child> {
        let parent = nix::unistd::getpid();
        #[allow(unsafe_code)]
        // SAFETY: system calls only.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
                // Its maker may have died before the line above.
                if nix::unistd::getppid() != parent {
                    return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        let (reply, started) = mpsc::channel();
        let job: Job = Box::new(move || {
            let child = command.spawn();
            // It holds the host, whose last owner must not be the host's own thread.
            drop(command);
            let _ = reply.send(child);
        });
        let jobs = self
            .inner
            .jobs
            .as_ref()
            .expect("the channel closes only on drop");
        jobs.send(job)
            .expect("the thread serves as long as the channel is open");
        started.recv().expect("a job always replies")
    }

    /// Runs a command to its end.
    ///
    /// # Errors
    /// If it cannot be started, fails, or takes longer than `timeout`; with what it printed.
    pub fn run_within(&self, timeout: Duration, command: Command) -> Result<Output> {
        let line = describe(&command);
        let output = self.spawn(command)?.output(timeout)?;
        if !output.status.success() {
            bail!(
                "{line}\non host {}: {}\n{}{}",
                self.name(),
                output.status,
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(output)
    }

    /// Runs a command line (split at white space, no shell) and returns its standard output.
    ///
    /// # Errors
    /// As [`run_within`](Self::run_within), with [`HANG`].
    pub fn run(&self, line: &str) -> Result<String> {
        let mut words = line.split_ascii_whitespace();
        let program = words.next().context("an empty command")?;
        let mut command = self.command(program);
        command.args(words);
        self.printed_by(command)
    }

    /// Runs lines of a shell, until the first that fails, and returns their standard output.
    ///
    /// # Errors
    /// As [`run_within`](Self::run_within), with [`HANG`].
    pub fn shell(&self, lines: &str) -> Result<String> {
        let mut command = self.command("sh");
        command.args(["-ec", lines]);
        self.printed_by(command)
    }

    fn printed_by(&self, command: Command) -> Result<String> {
        let output = self.run_within(HANG, command)?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `work` on a thread of this host: sockets that it opens belong to the host's network.
    ///
    /// # Panics
    /// If `work` does.
    pub fn in_ns<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let result = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.settle_thread();
                work()
            });
            thread.join()
        });
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Starts a thread of this host.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn thread<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        let host = self.clone();
        let name = format!("{} {name}", self.name());
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            host.settle_thread();
            // The work may outlive its maker's interest in the host.
            drop(host);
            work()
        });
        thread.context("thread")
    }

    fn settle_thread(&self) {
        let moved = unshare(CloneFlags::CLONE_FS)
            .map_err(std::io::Error::from)
            .and_then(|()| self.inner.go_there());
        moved.expect("who made a namespace may enter it");
    }

    /// Writes a sysctl, such as `net.ipv4.tcp_congestion_control`.
    ///
    /// # Errors
    /// If it does not exist here or refuses the value.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        self.in_ns(|| std::fs::write(&path, value))
            .with_context(|| format!("sysctl {key}={value} on host {}", self.name()))
    }

    /// Counters of an interface.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn counters(&self, interface: &str) -> Result<Counters> {
        // /proc/net would be that of the process's first thread.
        let table = self.in_ns(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        parse_counters(&table, interface)
            .with_context(|| format!("no interface {interface} on host {}", self.name()))
    }

    /// True if something listens on a TCP port, on any address of either family.
    ///
    /// # Errors
    /// If the kernel's table cannot be read.
    pub fn is_listening(&self, port: u16) -> Result<bool> {
        let tables = self.in_ns(|| -> std::io::Result<String> {
            let v4 = std::fs::read_to_string("/proc/thread-self/net/tcp")?;
            Ok(v4 + &std::fs::read_to_string("/proc/thread-self/net/tcp6")?)
        })?;
        // Columns: number, local address:port in hexadecimal, remote, state (0A: listen).
        let port = format!(":{port:04X}");
        Ok(tables.lines().any(|line| {
            let mut columns = line.split_ascii_whitespace().skip(1);
            let local = columns.next().is_some_and(|local| local.ends_with(&port));
            local && columns.nth(1) == Some("0A")
        }))
    }

    /// Makes the namespace known to `ip netns`.
    fn publish(&self) -> Result<()> {
        let path = Path::new("/run/netns").join(self.name());
        File::create(&path).with_context(|| path.display().to_string())?;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&self.inner.net);
        let source = format!("/proc/self/fd/{fd}");
        mount(
            Some(source.as_str()),
            &path,
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .with_context(|| format!("bind mount of {}", path.display()))
    }
}

impl Inner {
    /// Moves the calling thread into the host. System calls only: it also runs after a fork.
    fn go_there(&self) -> std::io::Result<()> {
        // Entering a mount namespace resets the working directory, which has the same name there.
        let mut path = [0u8; libc::PATH_MAX as usize];
        #[allow(unsafe_code)]
        // SAFETY: the buffer is writable for the length given.
        let known = unsafe { !libc::getcwd(path.as_mut_ptr().cast(), path.len()).is_null() };
        setns(&self.net, CloneFlags::CLONE_NEWNET)?;
        setns(&self.mnt, CloneFlags::CLONE_NEWNS)?;
        if known {
            let path = std::ffi::CStr::from_bytes_until_nul(&path).expect("getcwd terminates it");
            nix::unistd::chdir(path)?;
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(resident) = self.resident.take() {
            let _ = resident.join();
        }
        let path = Path::new("/run/netns").join(&self.name);
        let _ = umount2(&path, MntFlags::MNT_DETACH);
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_dir_all(Path::new("/run/hosts").join(&self.name));
    }
}

/// Has a command be looked for where system commands live, too.
pub(crate) fn with_system_paths(command: &mut Command) -> &mut Command {
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:{SYSTEM_PATHS}"))
}

/// Moves the calling thread into a new network and a new mount namespace, in which `run` is `/run`.
fn settle(run: &Path) -> Result<(File, File)> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).context("unshare")?;
    mount(
        Some(run),
        "/run",
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .context("/run")?;
    Ok((
        File::open("/proc/thread-self/ns/net")?,
        File::open("/proc/thread-self/ns/mnt")?,
    ))
}

/// Columns after `name:`: eight of receipt (bytes, packets, errors, drops, ...), then the same of
/// sending.
fn parse_counters(table: &str, interface: &str) -> Option<Counters> {
    let mut lines = table.lines().filter_map(|line| line.split_once(':'));
    let (_, numbers) = lines.find(|(name, _)| name.trim() == interface)?;
    let numbers: Vec<u64> = numbers.split_whitespace().flat_map(str::parse).collect();
    let of = |column: usize| numbers.get(column).copied();
    Some(Counters {
        rx_bytes: of(0)?,
        rx_packets: of(1)?,
        rx_dropped: of(3)?,
        tx_bytes: of(8)?,
        tx_packets: of(9)?,
        tx_dropped: of(11)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_the_whole_name() {
        let table = "Inter-|   Receive  |  Transmit\n face |bytes packets\n\
            eth10: 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9\n  eth1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n";
        let counters = parse_counters(table, "eth1").unwrap();
        let expected = Counters {
            rx_bytes: 1,
            rx_packets: 2,
            rx_dropped: 4,
            tx_bytes: 9,
            tx_packets: 10,
            tx_dropped: 12,
        };
        assert_eq!(counters, expected);
        assert_eq!(parse_counters(table, "eth"), None);
    }
}
