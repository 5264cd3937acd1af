//! Commands that are programs of their own, beside this one.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use dibsctl::options::Demo;

/// Becomes `dibs-eavesdrop`, with this command line.
pub(crate) fn eavesdrop() -> Result<()> {
    let mut words: Vec<OsString> = std::env::args_os().skip(1).collect();
    // The socket may be called so, too.
    let is_command =
        |at: &usize| words[*at] == "eavesdrop" && (*at == 0 || words[at - 1] != "--socket");
    let command = (0..words.len()).find(is_command);
    words.remove(command.context("the command line has its command")?);
    become_program("dibs-eavesdrop", &words)
}

/// Becomes `dibs-demo`.
pub(crate) fn demo(options: &Demo) -> Result<()> {
    become_program(
        "dibs-demo",
        &["--mebibytes".into(), options.mebibytes.to_string().into()],
    )
}

/// Goes on as a program that is installed beside this one.
///
/// # Errors
/// If it is not there, or cannot be run.
fn become_program(name: &str, words: &[OsString]) -> Result<()> {
    let own = std::env::current_exe().context("the running program's place")?;
    let program = own.with_file_name(name);
    if !program.exists() {
        bail!(
            "{} does not exist: reinstall the package dibs, or build it with cargo build --release -p dibsctl and put it there",
            program.display()
        );
    }
    let error = Command::new(&program).args(words).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
