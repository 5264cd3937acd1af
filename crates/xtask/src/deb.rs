//! `cargo xtask deb`: packages for Debian by cargo-deb, and a trial of them on fresh systems. `daemon/Cargo.toml` lists what is
//! in them.

mod trial;

pub(crate) use trial::{COMMON, fresh};

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::cross::{self, Arch};
use crate::packages;
use crate::run::{cargo, make_directory, printed, run, workspace};
use crate::{PROGRAMS, man, release};

/// What packages of this version are called after.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The version of cargo-deb.
const CARGO_DEB: &str = "3.8.0";
/// Shells, and the names under which they look for completions of `dibsctl`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "dibsctl"),
    ("zsh", "_dibsctl"),
    ("fish", "dibsctl.fish"),
];

/// Makes the packages; then, on request, tries the one for this processor.
pub(crate) fn deb(architectures: &[Arch], is_tried: bool) -> Result<()> {
    let all = match architectures {
        [] if is_tried => Arch::ALL.into_iter().filter(|a| a.is_native()).collect(),
        [] => Arch::ALL.to_vec(),
        some => some.to_vec(),
    };
    for arch in all {
        let is_tried = is_tried && arch.is_native();
        build(arch)?;
        let later = is_tried.then(|| later(arch)).transpose()?;
        let package = package(arch, VERSION, "debian")?;
        println!("{}", package.display());
        if let Some(later) = later {
            trial::run_all(arch, &package, &later)?;
        }
    }
    Ok(())
}

/// The package for such a processor, and a later one to upgrade to.
pub(crate) fn to_try(arch: Arch) -> Result<(PathBuf, PathBuf)> {
    build(arch)?;
    let later = later(arch)?;
    Ok((package(arch, VERSION, "debian")?, later))
}

/// The same package, called a later version. Made first and elsewhere, because cargo-deb deletes all other versions
/// in `target/debian`.
fn later(arch: Arch) -> Result<PathBuf> {
    package(arch, &format!("{VERSION}+later"), "debian/later")
}

/// Builds the programs, and has those for this processor write the manual and the completions.
fn build(arch: Arch) -> Result<()> {
    packages::ensure(&[&packages::DEB])?;
    let target = workspace().join("target");
    let [pages, completions] = ["man", "completions"].map(|name| target.join(name));
    if pages.exists() {
        // It may have pages of commands that are gone.
        fs::remove_dir_all(&pages).with_context(|| format!("cannot empty {}", pages.display()))?;
    }
    man(&pages)?;
    make_directory(&completions)?;
    for (shell, name) in COMPLETIONS {
        let script = printed(Command::new(release("dibsctl")?).args(["completions", shell]))?;
        let file = completions.join(name);
        fs::write(&file, script).with_context(|| format!("cannot write {}", file.display()))?;
    }
    match arch.is_native() {
        true => Ok(()),
        false => run(&mut cross::cargo_for(arch, &PROGRAMS)?),
    }
}

/// Makes `dibs_VERSION_ARCH.deb` of what was built, in a directory below `target`.
fn package(arch: Arch, version: &str, directory: &str) -> Result<PathBuf> {
    let target = workspace().join("target");
    let tool = target.join(format!("tools/cargo-deb-{CARGO_DEB}"));
    if !tool.join("bin/cargo-deb").exists() {
        let root = tool.display().to_string();
        cargo(&[
            "install",
            "cargo-deb",
            "--locked",
            "--version",
            CARGO_DEB,
            "--root",
            &root,
        ])?;
    }
    let name = format!("dibs_{version}_{}.deb", arch.debian());
    let file = target.join(directory).join(name);
    let mut command = Command::new(tool.join("bin/cargo-deb"));
    command.current_dir(workspace());
    command.args([
        "--no-build",
        "--strip",
        "--package=dibsd",
        "--deb-version",
        version,
        "--output",
    ]);
    command.arg(&file);
    if !arch.is_native() {
        command.args(["--target", &arch.rust_target()]);
    }
    run(&mut command)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A package has each file of `configs`: none is forgotten.
    #[test]
    fn all_of_configs_is_packaged() {
        let manifest = include_str!("../../../daemon/Cargo.toml");
        let mut directories = vec![workspace().join("configs")];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let below = path.strip_prefix(workspace()).unwrap();
                let named = |path: &Path| manifest.contains(&format!("\"../{}", path.display()));
                let examples = below.with_file_name("*.toml");
                assert!(
                    named(below) || (below.extension() == examples.extension() && named(&examples)),
                    "{}",
                    below.display()
                );
            }
        }
    }
}
