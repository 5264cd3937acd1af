//! The programs of another revision, for `bench --compare REV`.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{PROGRAMS, release, run};

const OPTION: &str = "--compare";

/// The benchmark's options, in which a revision to compare with has got the place of its programs, built now.
///
/// # Errors
/// If it is no revision, or cannot be built.
pub(crate) fn built(options: &[OsString]) -> Result<Vec<OsString>> {
    let mut built = Vec::new();
    let mut options = options.iter();
    while let Some(option) = options.next() {
        built.push(option.clone());
        let named = option
            .to_str()
            .and_then(|option| option.strip_prefix(OPTION));
        let revision = match named {
            // Without a revision the benchmark says what it misses.
            Some("") => options.next().and_then(|next| next.to_str()),
            Some(value) => value.strip_prefix('='),
            None => None,
        };
        if let Some(revision) = revision {
            built.pop();
            let mut value = OsString::from(format!("{OPTION}={revision}="));
            value.push(programs(revision)?);
            built.push(value);
        }
    }
    Ok(built)
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
        let mut add = git(&["worktree", "add", "--detach", "--force"]);
        run::run(add.arg(&tree).arg(&commit))?;
    }
    // The same place for all revisions: what they have in common is compiled once.
    let mut check_out = git(&["checkout", "--detach", "--force", &commit]);
    run::run(check_out.current_dir(&tree))?;
    let mut build = run::cargo_command(&PROGRAMS);
    build.arg("--locked").env("CARGO_TARGET_DIR", &target);
    run::run(build.current_dir(&tree))?;
    let kept = place.join(&commit[..12]);
    run::make_directory(&kept)?;
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
    let printed = run::printed(command.arg(format!("{revision}^{{commit}}")));
    let printed = printed.with_context(|| format!("git knows no revision {revision}"))?;
    Ok(String::from_utf8(printed)?.trim().to_owned())
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
