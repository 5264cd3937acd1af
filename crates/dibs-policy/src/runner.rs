//! Running programs: by absolute path, with an empty environment, bounded in time.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use crate::Error;

/// A program to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Its name, without a directory.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Bytes that it reads on standard input.
    pub input: String,
}

impl Command {
    /// `program` with `arguments`, reading `input`.
    pub fn new(program: impl Into<String>, arguments: &[&str], input: impl Into<String>) -> Self {
        Self {
            program: program.into(),
            arguments: arguments
                .iter()
                .map(|&argument| argument.to_owned())
                .collect(),
            input: input.into(),
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.program)?;
        self.arguments
            .iter()
            .try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// Runs programs. There is one besides [`System`] only in tests.
pub trait CommandRunner {
    /// Runs `command` and gives what it printed; an exit code other than 0 is an error.
    fn run(&self, command: &Command) -> impl Future<Output = Result<String, Error>> + Send;
}

/// Runs programs of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

const DIRECTORIES: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Longer than a busy host's iptables ever holds its lock.
const TIME_LIMIT: Duration = Duration::from_secs(10);

impl CommandRunner for System {
    async fn run(&self, command: &Command) -> Result<String, Error> {
        let path =
            find(&command.program).ok_or_else(|| Error::NotInstalled(command.program.clone()))?;
        let failed = |error| Error::Run(command.to_string(), error);
        let output = tokio::time::timeout(TIME_LIMIT, run(path, command))
            .await
            .map_err(|_| Error::TimedOut(command.to_string(), TIME_LIMIT))?
            .map_err(failed)?;
        let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let line = line_number(&stderr)
            .and_then(|number| command.input.lines().nth(number.checked_sub(1)?))
            .map(str::to_owned);
        Err(Error::Command {
            command: command.to_string(),
            line,
            stderr,
        })
    }
}

fn find(program: &str) -> Option<PathBuf> {
    DIRECTORIES
        .iter()
        .map(|directory| PathBuf::from(directory).join(program))
        .find(|p| p.exists())
}

async fn run(path: PathBuf, command: &Command) -> io::Result<std::process::Output> {
    let mut child = tokio::process::Command::new(path)
        .args(&command.arguments)
        .env_clear()
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut stdin = child.stdin.take().expect("stdin was asked to be a pipe");
    let input = command.input.as_bytes();
    let write = async move {
        match stdin.write_all(input).await {
            // It stopped reading: its exit code and stderr say why.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    };
    let (written, output) = tokio::join!(write, child.wait_with_output());
    written?;
    output
}

/// The line that iptables-restore complains about: `line 4 failed`, `Error occurred at line: 4`.
fn line_number(stderr: &str) -> Option<usize> {
    let rest = &stderr[stderr.find("line")? + 4..];
    let digits = rest.trim_start_matches([':', ' ']);
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    digits[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_numbers_are_found_in_what_iptables_says() {
        assert_eq!(line_number("iptables-restore: line 12 failed"), Some(12));
        assert_eq!(line_number("x\nError occurred at line: 4\nTry"), Some(4));
        assert_eq!(line_number("line 3: CHAIN_ADD failed"), Some(3));
        assert_eq!(line_number("cannot open /run/xtables.lock"), None);
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(future)
    }

    #[test]
    fn input_output_and_an_empty_environment() {
        let copied = block_on(System.run(&Command::new("cat", &[], "one\ntwo\n"))).unwrap();
        assert_eq!(copied, "one\ntwo\n");
        assert_eq!(
            block_on(System.run(&Command::new("env", &[], ""))).unwrap(),
            "LC_ALL=C\n"
        );
    }

    #[test]
    fn failures_carry_the_command_its_line_and_its_words() {
        let script = "cat >/dev/null; echo 'line 2 failed' >&2; exit 3";
        let command = Command::new("sh", &["-c", script], "first\nsecond\n");
        let error = block_on(System.run(&command)).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("sh -c {script} failed at `second`: line 2 failed")
        );
        let error = block_on(System.run(&Command::new("no-such-program", &[], ""))).unwrap_err();
        assert!(matches!(error, Error::NotInstalled(_)));
    }
}
