//! Project commands: `cargo xtask COMMAND`.

mod packages;
mod run;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Project commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run every test: units, simulator, and real traffic in network namespaces.
    ///
    /// Installs missing system packages as root on Debian, and names them elsewhere.
    Test,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Test => test(),
    }
}

fn test() -> Result<()> {
    packages::ensure()?;
    // The tests on real traffic start these; cargo builds a package's binaries only for its own.
    run::cargo(&["build", "--package", "dibsd", "--package", "dibsctl"])?;
    run::cargo(&["test", "--workspace"])
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
