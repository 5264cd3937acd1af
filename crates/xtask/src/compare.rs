//! The programs of another revision, for `bench --compare REV`.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::{PROGRAMS, release, run};

const OPTION: &str = "--compare";

/// The benchmark's options, in which a revision to compare with has got the place of its programs, built now.
///
/// # Errors
/// If it is no revision, or cannot be built.
pub(crate) fn built(options: &[OsString]) -> Result<Vec<OsString>> {
    let mut options = options.to_vec();
    let joined = |option: &OsString| {
        let value = option.to_str()?.strip_prefix(OPTION)?.strip_prefix('=')?;
        Some(value.to_owned())
    };
    let behind = options.iter().position(|option| option == OPTION);
    let (at, revision) = match options.iter().position(|option| joined(option).is_some()) {
        Some(at) => (at, joined(&options[at])),
        None => match behind.map(|at| at + 1) {
            Some(at) => (
                at,
                options
                    .get(at)
                    .and_then(|it| it.to_str())
                    .map(str::to_owned),
            ),
            None => return Ok(options),
        },
    };
    // Without a revision the benchmark says what it misses.
    let Some(revision) = revision else {
        return Ok(options);
    };
    let directory = programs(&revision)?;
    let mut value = OsString::from(format!("{revision}="));
    value.push(directory);
    options[at] = match behind {
        Some(_) => value,
        None => [OsStr::new("--compare="), &value].into_iter().collect(),
    };
    Ok(options)
}

/// Builds a revision's programs in a checkout below cargo's target directory; returns where they are.
fn programs(revision: &str) -> Result<OsString> {
    let commit = commit(revision)?;
    let own = release("")?;
    let place = own
        .parent()
        .context("cargo's target directory")?
        .join("compare");
    let (tree, target) = (place.join("tree"), place.join("target"));
    if !tree.join(".git").exists() {
        // What is left of one that was removed by hand.
        run::run(&mut git(&["worktree", "prune"]))?;
        run::run(
            git(&["worktree", "add", "--detach", "--force"])
                .arg(&tree)
                .arg(&commit),
        )?;
    }
    // The same place for all revisions: what they have in common is compiled once.
    run::run(
        git(&["-C"])
            .arg(&tree)
            .args(["checkout", "--detach", "--force", &commit]),
    )?;
    let mut build = run::cargo_command(&PROGRAMS);
    build
        .arg("--locked")
        .current_dir(&tree)
        .env("CARGO_TARGET_DIR", &target);
    run::run(&mut build)?;
    let kept = place.join(&commit[..12]);
    std::fs::create_dir_all(&kept).with_context(|| kept.display().to_string())?;
    for program in ["dibsd", "dibsctl"] {
        copy(&target.join("release").join(program), &kept.join(program))?;
    }
    Ok(kept.into_os_string())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = std::fs::copy(from, to);
    copied.with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

fn commit(revision: &str) -> Result<String> {
    let mut command = git(&["rev-parse", "--verify", "--end-of-options"]);
    command
        .arg(format!("{revision}^{{commit}}"))
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot start git")?;
    ensure!(output.status.success(), "git knows no revision {revision}");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn git(arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.current_dir(run::workspace()).args(arguments);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_without_a_revision_stay_as_they_are() {
        let options = ["peers", "--rounds", "3"].map(OsString::from);
        assert_eq!(built(&options).unwrap(), options);
        let cut = ["peers", "--compare"].map(OsString::from);
        assert_eq!(built(&cut).unwrap(), cut);
    }

    #[test]
    fn what_is_no_revision_is_named() {
        for options in [
            &["--compare", "--no-such-thing"][..],
            &["--compare=no-such-thing"],
        ] {
            let options: Vec<OsString> = options.iter().map(Into::into).collect();
            let error = format!("{:#}", built(&options).unwrap_err());
            assert!(error.contains("no-such-thing"), "{error}");
        }
    }
}
