//! Running commands, shown as they are run.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Runs cargo in the workspace's directory.
pub(crate) fn cargo(arguments: &[&str]) -> Result<()> {
    run(&mut cargo_command(arguments))
}

/// The command that runs cargo in the workspace's directory.
pub(crate) fn cargo_command(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(workspace()).args(arguments);
    command
}

/// The workspace's directory.
pub(crate) fn workspace() -> &'static Path {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    workspace.expect("xtask is two levels below the workspace")
}

/// Runs a command to its end.
///
/// # Errors
/// If it cannot be started or fails; with the command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = shown(command);
    let status = command.status();
    let status = status.with_context(|| format!("cannot start: {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// Runs a command to its end, and returns what it prints.
///
/// # Errors
/// If it cannot be started or fails; with the command and what it said.
pub(crate) fn printed(command: &mut Command) -> Result<Vec<u8>> {
    let line = words(command);
    let output = command.output();
    let output = output.with_context(|| format!("cannot start: {line}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{line}: {}\n{said}", output.status);
    Ok(output.stdout)
}

/// Whether a command that shows nothing can be run, and does not fail.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Makes a directory, and those that it is in, where there is none.
pub(crate) fn make_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
}

/// Whether this is root's.
pub(crate) fn is_root() -> Result<bool> {
    let own = std::fs::metadata("/proc/self").context("/proc/self")?;
    Ok(own.uid() == 0)
}

/// Runs tests to their end. Returns the names of those that failed; none if all passed.
///
/// # Errors
/// If they cannot be started or built, or something else fails than a test with a name.
pub(crate) fn tests(command: &mut Command) -> Result<BTreeSet<String>> {
    let line = shown(command);
    let mut child = { command.stdout(Stdio::piped()).spawn() }
        .with_context(|| format!("cannot start: {line}"))?;
    let output = child.stdout.take().context("the tests' output")?;
    let failed = pass_on(output, std::io::stdout()).context("the tests' output")?;
    let status = child.wait().with_context(|| line.clone())?;
    ensure!(status.success() || !failed.is_empty(), "{line}: {status}");
    Ok(failed)
}

/// Passes on what tests print, byte by byte as it comes; returns the names of those that failed.
fn pass_on(mut from: impl Read, mut to: impl Write) -> std::io::Result<BTreeSet<String>> {
    let (mut failed, mut line, mut buffer) = (BTreeSet::new(), Vec::new(), [0; 4096]);
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok(failed);
        }
        to.write_all(&buffer[..read])?;
        to.flush()?;
        for &byte in &buffer[..read] {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            failed.extend(failed_test(&String::from_utf8_lossy(&line)));
            line.clear();
        }
    }
}

/// The test that a line of a harness says failed: `test name ... FAILED`.
fn failed_test(line: &str) -> Option<String> {
    let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    verdict.starts_with("FAILED").then(|| name.to_owned())
}

/// Shows a command that is about to be run; returns it as a line.
fn shown(command: &Command) -> String {
    let line = words(command);
    eprintln!("$ {line}");
    line
}

fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_that_failed_are_named_and_their_words_passed_on() {
        let said = "running 3 tests\ntest one ... ok\ntest two::three ... FAILED\n\
                    test four ... FAILED (1.20s)\ntest result: FAILED. 1 passed; 2 failed\nthe end";
        let mut heard = Vec::new();
        let failed = pass_on(said.as_bytes(), &mut heard).unwrap();
        assert_eq!(Vec::from_iter(failed), ["four", "two::three"]);
        assert_eq!(String::from_utf8(heard).unwrap(), said);
    }
}
