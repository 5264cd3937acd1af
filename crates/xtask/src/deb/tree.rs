//! The files of a package, where they will be.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::run::{printed, run, workspace};

/// From below `configs` to below the root. What other programs read is in /etc, where an administrator may
/// change it; what is dibs's own is in /usr, and changed by a file of the same name in /etc.
const CONFIGURATION: [(&str, &str); 10] = [
    ("dibsd.service", "usr/lib/systemd/system/dibsd.service"),
    (
        "dibs-guard.service",
        "usr/lib/systemd/system/dibs-guard.service",
    ),
    ("sysusers.d/dibs.conf", "usr/lib/sysusers.d/dibs.conf"),
    (
        "modules-load.d/dibs.conf",
        "usr/lib/modules-load.d/dibs.conf",
    ),
    (
        "NetworkManager/dibs.conf",
        "etc/NetworkManager/conf.d/dibs.conf",
    ),
    (
        "networkd.conf.d/dibs.conf",
        "etc/systemd/networkd.conf.d/dibs.conf",
    ),
    ("host-a.toml", "usr/share/doc/dibs/examples/host-a.toml"),
    ("host-b.toml", "usr/share/doc/dibs/examples/host-b.toml"),
    ("minimal.toml", "usr/share/doc/dibs/examples/minimal.toml"),
    ("grafana/dibs.json", "usr/share/doc/dibs/grafana/dibs.json"),
];

/// Shells, and where they look for completions of `dibsctl`.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/dibsctl"),
    ("zsh", "usr/share/zsh/vendor-completions/_dibsctl"),
    ("fish", "usr/share/fish/vendor_completions.d/dibsctl.fish"),
];

/// A directory that is filled.
pub(super) struct Tree<'a> {
    root: &'a Path,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path) -> Self {
        Self { root }
    }

    /// Puts a program in, without what only debuggers read; returns where it is.
    pub(super) fn program(&self, built: &Path, strip: &str) -> Result<PathBuf> {
        let name = built.file_name().context("a program's name")?;
        let file = self.root.join("usr/bin").join(name);
        copy(built, &file)?;
        run(Command::new(strip).arg("--strip-unneeded").arg(&file))?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        Ok(file)
    }

    /// Puts in what the programs say of themselves, and the documents of the project.
    pub(super) fn documents(&self, programs: &Path) -> Result<()> {
        let man = self.root.join("usr/share/man");
        for (program, section) in [("dibsd", "man8"), ("dibsctl", "man1")] {
            let directory = man.join(section);
            fs::create_dir_all(&directory)?;
            let option = if program == "dibsd" { "--man" } else { "man" };
            run(Command::new(programs.join(program))
                .arg(option)
                .arg(&directory))?;
            let pages = files(&directory)?;
            let pages: Vec<_> = pages.iter().map(|page| directory.join(page)).collect();
            compress(&pages)?;
        }
        for (shell, to) in COMPLETIONS {
            let mut command = Command::new(programs.join("dibsctl"));
            let script = printed(command.args(["completions", shell]))?;
            write(&self.root.join(to), &script)?;
        }
        let doc = self.root.join("usr/share/doc/dibs");
        for (from, to) in [
            ("packaging/deb/copyright", "copyright"),
            ("CHANGELOG.md", "changelog"),
            ("README.md", "README.md"),
        ] {
            copy(&workspace().join(from), &doc.join(to))?;
        }
        compress(&[doc.join("changelog")])?;
        let documents = workspace().join("docs");
        for file in files(&documents)? {
            copy(&documents.join(&file), &doc.join("docs").join(&file))?;
        }
        Ok(())
    }

    /// Puts in units, snippets and examples.
    pub(super) fn configuration(&self) -> Result<()> {
        let configs = workspace().join("configs");
        for (from, to) in CONFIGURATION {
            copy(&configs.join(from), &self.root.join(to))?;
        }
        Ok(())
    }
}

/// Opens a directory, and those below, to everyone, whatever the umask was.
pub(super) fn open(directory: &Path) -> Result<()> {
    let open = || {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
        fs::read_dir(directory)?.collect::<std::io::Result<Vec<_>>>()
    };
    let entries = open().with_context(|| format!("cannot open {}", directory.display()))?;
    let paths = entries.iter().map(fs::DirEntry::path);
    { paths.filter(|path| path.is_dir()) }.try_for_each(|path| self::open(&path))
}

/// All files below a directory but those of DEBIAN, relative to it, in order.
pub(super) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(&directory);
        for entry in entries.with_context(|| format!("cannot list {}", directory.display()))? {
            let path = entry?.path();
            let below = path.strip_prefix(root)?.to_owned();
            match path.is_dir() {
                true if below.as_os_str() == "DEBIAN" => {}
                true => directories.push(path),
                false => found.push(below),
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Writes a file for everyone to read, and the directories above it.
pub(super) fn write(file: &Path, content: &[u8]) -> Result<()> {
    let directory = file.parent().context("a file is in a directory")?;
    let write = || {
        fs::create_dir_all(directory)?;
        fs::write(file, content)?;
        fs::set_permissions(file, fs::Permissions::from_mode(0o644))
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    write(to, &content)
}

/// Makes FILE.gz of each file, the same from the same content.
fn compress(files: &[PathBuf]) -> Result<()> {
    let mut gzip = Command::new("gzip");
    gzip.args(["-9", "--no-name", "--force"]).args(files);
    printed(&mut gzip).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a package has is not named in two places and forgotten in one.
    #[test]
    fn all_of_configs_is_packaged() {
        let all = files(&workspace().join("configs")).unwrap();
        let packaged = CONFIGURATION.map(|(from, _)| PathBuf::from(from));
        for file in all {
            assert!(packaged.contains(&file), "{}", file.display());
        }
    }
}
