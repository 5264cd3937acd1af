//! `cargo xtask deb`: packages for Debian, and a trial of them on fresh systems.

mod control;
mod tree;
mod trial;

pub(crate) use trial::{COMMON, fresh};

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::PROGRAMS;
use crate::cross::{self, Arch};
use crate::packages;
use crate::run::{cargo, make_directory, run, workspace};
use tree::Tree;

/// What packages of this version are called after.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes the packages; then, on request, tries the one for this processor.
pub(crate) fn deb(architectures: &[Arch], is_tried: bool) -> Result<()> {
    packages::ensure(&[&packages::DEB])?;
    let all = match architectures {
        [] if is_tried => Arch::ALL.into_iter().filter(|a| a.is_native()).collect(),
        [] => Arch::ALL.to_vec(),
        some => some.to_vec(),
    };
    for arch in &all {
        let staged = stage(*arch)?;
        let package = staged.package(VERSION)?;
        println!("{}", package.display());
        if is_tried && arch.is_native() {
            trial::run_all(*arch, &package, &staged.later()?)?;
        }
    }
    Ok(())
}

/// The package for such a processor, and a later one to upgrade to.
pub(crate) fn to_try(arch: Arch) -> Result<(PathBuf, PathBuf)> {
    packages::ensure(&[&packages::DEB])?;
    let staged = stage(arch)?;
    Ok((staged.package(VERSION)?, staged.later()?))
}

/// What goes into a package, as it will be below `/`.
struct Staged {
    arch: Arch,
    root: PathBuf,
    depends: String,
}

fn stage(arch: Arch) -> Result<Staged> {
    let target = workspace().join("target");
    // These write the manual and the completions, whatever the package is for.
    cargo(&PROGRAMS)?;
    let native = target.join("release");
    let built = match arch.is_native() {
        true => native.clone(),
        false => cross_build(arch, &target)?,
    };
    let root = target.join("debian").join(arch.debian());
    if root.exists() {
        fs::remove_dir_all(&root).with_context(|| format!("cannot empty {}", root.display()))?;
    }
    let tree = Tree::new(&root);
    let strip = arch.tool("strip");
    let mut programs = Vec::new();
    for name in ["dibsd", "dibsctl", "dibs-eavesdrop", "dibs-demo"] {
        let file = tree.program(&built.join(name), &strip)?;
        programs.push(fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    tree.documents(&native)?;
    tree.configuration()?;
    Ok(Staged {
        arch,
        root,
        depends: control::depends(&programs)?,
    })
}

/// Builds for another processor; returns where the programs are.
fn cross_build(arch: Arch, target: &Path) -> Result<PathBuf> {
    run(&mut cross::cargo_for(arch, &PROGRAMS)?)?;
    Ok(target.join(arch.rust_target()).join("release"))
}

impl Staged {
    /// The same, called a later version.
    fn later(&self) -> Result<PathBuf> {
        self.package(&format!("{VERSION}+later"))
    }

    /// Makes `dibs_VERSION_ARCH.deb` of it.
    fn package(&self, version: &str) -> Result<PathBuf> {
        let arch = self.arch.debian();
        let directory = self.root.join("DEBIAN");
        make_directory(&directory)?;
        let files = tree::files(&self.root)?;
        for (name, text) in control::members(&self.root, &files, version, arch, &self.depends)? {
            let is_script = text.starts_with("#!");
            let file = directory.join(name);
            tree::write(&file, text.as_bytes())?;
            if is_script {
                fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
            }
        }
        tree::open(&self.root)?;
        let package = self
            .root
            .with_file_name(format!("dibs_{version}_{arch}.deb"));
        run(Command::new("dpkg-deb")
            .args(["--root-owner-group", "-Zxz", "--build"])
            .args([&self.root, &package]))?;
        Ok(package)
    }
}
