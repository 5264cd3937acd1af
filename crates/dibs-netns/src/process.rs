//! Processes of a host, and waiting for conditions.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a test waits for what has to come about. A machine that is busy with other things is slow, and no
/// test of ours is about that: only what hangs takes as long.
pub const HANG: Duration = Duration::from_secs(120);

/// Pause between two looks at a condition.
const POLL: Duration = Duration::from_millis(2);

/// Waits until `condition` yields a value.
///
/// # Errors
/// After `timeout`, naming `what` was awaited.
pub fn wait_for<T>(
    timeout: Duration,
    what: &str,
    mut condition: impl FnMut() -> Option<T>,
) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("waited {timeout:?} in vain for {what}");
        }
        std::thread::sleep(POLL);
    }
}

/// Waits until `condition` holds.
///
/// # Errors
/// After `timeout`, naming `what` was awaited.
pub fn wait_until(
    timeout: Duration,
    what: &str,
    mut condition: impl FnMut() -> bool,
) -> Result<()> {
    wait_for(timeout, what, || condition().then_some(()))
}

/// Makes sure that programs are there, which are named with the Debian packages they come in.
///
/// # Errors
/// If some are not; with the packages to install.
pub fn require_programs(needed: &[(&str, &str)]) -> Result<()> {
    let is_missing = |program: &str| {
        let directories = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(Path::new);
        !directories.iter().any(|dir| dir.join(program).exists())
    };
    let missing = needed.iter().filter(|(program, _)| is_missing(program));
    let packages: BTreeSet<&str> = missing.map(|&(_, package)| package).collect();
    let packages = Vec::from_iter(packages).join(" ");
    ensure!(
        packages.is_empty(),
        "install the Debian packages: {packages}"
    );
    Ok(())
}

/// A running process of a host; killed and reaped when dropped.
///
/// Output of it is kept in files below this process's `/run`.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    /// Starts `command` with its output going to files that begin with `prefix`.
    pub(crate) fn start(
        mut command: Command,
        prefix: &str,
        spawn: impl FnOnce(Command) -> std::io::Result<Child>,
    ) -> Result<Self> {
        let name = describe(&command);
        let stdout = PathBuf::from(format!("{prefix}.out"));
        let stderr = PathBuf::from(format!("{prefix}.err"));
        command.stdin(std::process::Stdio::null());
        command.stdout(File::create(&stdout).context(prefix.to_owned())?);
        command.stderr(File::create(&stderr).context(prefix.to_owned())?);
        let child = spawn(command).with_context(|| format!("cannot start: {name}"))?;
        Ok(Self {
            name,
            child,
            stdout,
            stderr,
        })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Bytes that it has written to standard output so far.
    pub fn stdout(&self) -> String {
        read_lossy(&self.stdout)
    }

    /// Bytes that it has written to standard error so far.
    pub fn stderr(&self) -> String {
        read_lossy(&self.stderr)
    }

    /// True if it has neither exited nor been killed.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until standard output or standard error contains `text`.
    ///
    /// # Errors
    /// If the process ends first, or after `timeout`; with what it printed.
    pub fn wait_for_output(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let seen = wait_for(timeout, text, || {
            // Asked before reading, so that a last line before the end is not missed.
            let running = self.is_running();
            let seen = self.stdout().contains(text) || self.stderr().contains(text);
            (seen || !running).then_some(seen)
        });
        match seen {
            Ok(true) => Ok(()),
            Ok(false) => Err(anyhow!("{} ended without printing {text:?}", self.name)),
            Err(error) => Err(error),
        }
        .with_context(|| self.printed())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        // A reaped child's number may belong to someone else by now.
        if !self.is_running() {
            bail!("{} has ended", self.name);
        }
        kill(Pid::from_raw(self.child.id() as i32), signal)
            .with_context(|| format!("signal {signal} to {}", self.name))
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// If it has not ended after `timeout`; it is left running.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        wait_for(timeout, &format!("the end of: {}", self.name), || {
            self.child.try_wait().transpose()
        })
        .with_context(|| self.printed())?
        .with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits for the end and returns what was printed.
    ///
    /// # Errors
    /// If it has not ended after `timeout`, in which case it is killed.
    pub fn output(mut self, timeout: Duration) -> Result<Output> {
        let status = self.wait(timeout)?;
        let stdout = std::fs::read(&self.stdout).context("stdout")?;
        let stderr = std::fs::read(&self.stderr).context("stderr")?;
        Ok(Output {
            status,
            stdout,
            stderr,
        })
    }

    /// Kills it at once (SIGKILL) and reaps it.
    pub fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // Both fail only if the process has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn printed(&self) -> String {
        format!(
            "{}\n--- stdout\n{}\n--- stderr\n{}",
            self.name,
            self.stdout(),
            self.stderr()
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
        for file in [&self.stdout, &self.stderr] {
            let _ = std::fs::remove_file(file);
        }
    }
}

fn read_lossy(path: &PathBuf) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// The command line, for messages.
pub(crate) fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}
