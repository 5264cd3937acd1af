//! A kernel as Debian's package has it, and what boots it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::{Kernel, place};
use crate::run::run;

/// What it takes to mount the machine's file system.
const FOR_THE_ROOT: [&str; 4] = ["virtio_pci", "9pnet_virtio", "9p", "overlay"];
/// The first process in memory: loads what it takes, mounts the machine's file system, and goes on there.
const FIRST: &str = r#"#!/bin/sh
mount -t proc proc /proc
for module in $(cat /order); do
    insmod /modules/$module
done
for word in $(cat /proc/cmdline); do
    case $word in dibs.init=*) init=${word#*=} ;; esac
done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144,cache=loose root /root
umount /proc
exec switch_root /root "$init"
"#;

/// A kernel, unpacked.
pub(crate) struct Image {
    directory: PathBuf,
    kernel: PathBuf,
    /// What its modules stand below, by their release.
    modules: PathBuf,
}

impl Image {
    /// Fetches and unpacks it, unless that was done before.
    pub(super) fn get(kernel: &Kernel, directory: &Path) -> Result<Self> {
        let directory = place(kernel, directory);
        let unpacked = directory.join("root");
        if !unpacked.exists() {
            fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
            let package = fetch(kernel, &directory)?;
            let begun = directory.join("root.new");
            let mut unpack = Command::new("dpkg-deb");
            run(unpack.arg("--extract").arg(package).arg(&begun))?;
            fs::rename(&begun, &unpacked).context("the unpacked kernel")?;
        }
        let (kernel, modules) = match kernel.is_user_mode {
            true => (
                unpacked.join("usr/bin/linux.uml"),
                unpacked.join("usr/lib/uml/modules"),
            ),
            false => {
                let boot = unpacked.join("boot");
                let modules = ["lib/modules", "usr/lib/modules"].map(|place| unpacked.join(place));
                let modules = modules.into_iter().find(|place| place.exists());
                (
                    named(&boot, "vmlinuz-")?,
                    modules.context("the kernel's modules")?,
                )
            }
        };
        let release = named(&modules, "")?;
        let release = release
            .file_name()
            .context("a release")?
            .to_string_lossy()
            .into_owned();
        let image = Self {
            directory,
            kernel,
            modules,
        };
        // depmod takes the directory that `lib/modules` stands in.
        let base = image.directory.join("depmod");
        if !base.exists() {
            fs::create_dir_all(base.join("lib"))?;
            std::os::unix::fs::symlink(&image.modules, base.join("lib/modules"))?;
        }
        run(Command::new("depmod")
            .arg("--basedir")
            .arg(&base)
            .arg(&release))?;
        Ok(image)
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn kernel(&self) -> &Path {
        &self.kernel
    }

    pub(crate) fn modules(&self) -> &Path {
        &self.modules
    }

    /// Makes the file system in memory that it boots into.
    pub(super) fn initramfs(&self) -> Result<PathBuf> {
        let tree = self.directory.join("initramfs");
        if tree.exists() {
            fs::remove_dir_all(&tree).with_context(|| tree.display().to_string())?;
        }
        for name in ["bin", "modules", "proc", "root", "dev"] {
            fs::create_dir_all(tree.join(name))?;
        }
        fs::copy("/bin/busybox", tree.join("bin/busybox")).context("/bin/busybox")?;
        for name in ["sh", "mount", "umount", "insmod", "cat", "switch_root"] {
            std::os::unix::fs::symlink("busybox", tree.join("bin").join(name))?;
        }
        let release = named(&self.modules, "")?;
        let release = release
            .file_name()
            .context("a release")?
            .to_string_lossy()
            .into_owned();
        let base = self.directory.join("depmod");
        let mut order: Vec<String> = Vec::new();
        for module in FOR_THE_ROOT {
            let mut ask = Command::new("modprobe");
            ask.args(["--set-version", &release, "--show-depends", "--dirname"]);
            let output = ask.arg(&base).arg(module).output().context("modprobe")?;
            ensure!(
                output.status.success(),
                "modprobe --show-depends {module}: {}",
                output.status
            );
            for line in String::from_utf8_lossy(&output.stdout).lines() {
                // "insmod FILE", or "builtin NAME".
                let Some(file) = line.trim().strip_prefix("insmod ") else {
                    continue;
                };
                let name = plain(Path::new(file.trim()), &tree.join("modules"))?;
                if !order.contains(&name) {
                    order.push(name);
                }
            }
        }
        fs::write(tree.join("order"), order.join("\n") + "\n")?;
        let init = tree.join("init");
        fs::write(&init, FIRST)?;
        run(Command::new("chmod").arg("755").arg(&init))?;
        let archive = self.directory.join("initramfs.cpio");
        let pack = format!(
            "cd '{}' && find . | cpio --quiet --create --format=newc > '{}'",
            tree.display(),
            archive.display()
        );
        run(Command::new("sh").args(["-c", &pack]))?;
        Ok(archive)
    }
}

/// Copies a module, unpacked where it is packed; returns its name.
fn plain(file: &Path, to: &Path) -> Result<String> {
    let name = file
        .file_name()
        .context("a module")?
        .to_string_lossy()
        .into_owned();
    let Some(bare) = name.strip_suffix(".xz") else {
        fs::copy(file, to.join(&name)).with_context(|| file.display().to_string())?;
        return Ok(name);
    };
    let output = Command::new("xz")
        .args(["--decompress", "--stdout"])
        .arg(file)
        .output();
    let output = output.context("cannot start xz")?;
    ensure!(
        output.status.success(),
        "xz --decompress {}: {}",
        file.display(),
        output.status
    );
    fs::write(to.join(bare), output.stdout)?;
    Ok(bare.to_owned())
}

/// The last entry of a directory that begins so.
fn named(directory: &Path, prefix: &str) -> Result<PathBuf> {
    let shown = || directory.display().to_string();
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).with_context(shown)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            all.push(entry.path());
        }
    }
    all.sort();
    all.pop()
        .with_context(|| format!("nothing called {prefix}* in {}", directory.display()))
}

/// Downloads the package with an apt of its own, whatever suite this machine has.
fn fetch(kernel: &Kernel, directory: &Path) -> Result<PathBuf> {
    let apt = directory.join("apt");
    for name in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(name))?;
    }
    let suite = kernel.suite;
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let sources = format!(
        "deb [signed-by={keys}] http://deb.debian.org/debian {suite} main\n\
         deb [signed-by={keys}] http://deb.debian.org/debian-security {suite}-security main\n"
    );
    fs::write(apt.join("sources.list"), sources)?;
    fs::write(apt.join("status"), "")?;
    let options = [
        format!(
            "Dir::Etc::sourcelist={}",
            apt.join("sources.list").display()
        ),
        "Dir::Etc::sourceparts=/dev/null".to_owned(),
        format!("Dir::State::lists={}", apt.join("lists").display()),
        format!("Dir::State::status={}", apt.join("status").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        // Root's own directories are not for the user that apt fetches as.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let with_options = |program: &str| {
        let mut command = Command::new(program);
        for option in &options {
            command.args(["-o", option]);
        }
        command
    };
    run(with_options("apt-get").args(["-qq", "update"]))?;
    let output = with_options("apt-cache")
        .args(["depends", kernel.package])
        .output();
    let output = output.context("cannot start apt-cache")?;
    let said = String::from_utf8_lossy(&output.stdout);
    // The package that is the newest kernel has none to depend on; others name it.
    let depends = said
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    let package = match depends {
        Some(release) => format!("linux-image-{release}"),
        None => kernel.package.to_owned(),
    };
    let mut download = with_options("apt-get");
    run(download
        .args(["-qq", "download", &package])
        .current_dir(directory))?;
    named(directory, &format!("{package}_"))
}
