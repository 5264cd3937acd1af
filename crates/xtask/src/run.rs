//! Running commands, shown as they are run.

use std::path::Path;
use std::process::Command;

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
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ");
    eprintln!("$ {line}");
    let status = command
        .status()
        .with_context(|| format!("cannot start: {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}
