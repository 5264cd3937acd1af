//! A kernel as Debian's package has it, and what boots it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::{Kernel, place};
use crate::cross::Arch;
use crate::run::{make_directory, printed, run};

/// The package with a shell that needs no library.
const BUSYBOX: &str = "busybox-static";
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
    arch: Arch,
    directory: PathBuf,
    kernel: PathBuf,
    /// What its modules stand below, by their release.
    modules: PathBuf,
}

impl Image {
    /// Fetches and unpacks it, unless that was done before.
    pub(super) fn get(kernel: &Kernel, arch: Arch, directory: &Path) -> Result<Self> {
        let directory = place(kernel, arch, directory);
        let unpacked = directory.join("root");
        if !unpacked.exists() {
            let apt = Apt::new(kernel.suite, arch, &directory)?;
            let package = match kernel.is_user_mode {
                true => kernel.package.to_owned(),
                false => apt.newest(&format!("{}-{}", kernel.package, arch.debian()))?,
            };
            apt.unpack(&package, &unpacked)?;
        }
        if !arch.is_native() && !directory.join(BUSYBOX).exists() {
            let apt = Apt::new(kernel.suite, arch, &directory)?;
            apt.unpack(BUSYBOX, &directory.join(BUSYBOX))?;
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
        let release = name_of(&named(&modules, "")?)?;
        let image = Self {
            arch,
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
        let mut depmod = Command::new("depmod");
        run(depmod.arg("--basedir").arg(&base).arg(&release))?;
        Ok(image)
    }

    pub(super) fn arch(&self) -> Arch {
        self.arch
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
        let busybox = match self.arch.is_native() {
            true => PathBuf::from("/bin/busybox"),
            false => {
                let root = self.directory.join(BUSYBOX);
                let places = ["bin/busybox", "usr/bin/busybox"].map(|place| root.join(place));
                let found = places.into_iter().find(|place| place.exists());
                found.with_context(|| format!("no busybox in {}", root.display()))?
            }
        };
        let shown = || busybox.display().to_string();
        fs::copy(&busybox, tree.join("bin/busybox")).with_context(shown)?;
        for name in ["sh", "mount", "umount", "insmod", "cat", "switch_root"] {
            std::os::unix::fs::symlink("busybox", tree.join("bin").join(name))?;
        }
        let release = name_of(&named(&self.modules, "")?)?;
        let base = self.directory.join("depmod");
        let mut order: Vec<String> = Vec::new();
        for module in FOR_THE_ROOT {
            let mut ask = Command::new("modprobe");
            ask.args(["--set-version", &release, "--show-depends", "--dirname"]);
            let said = printed(ask.arg(&base).arg(module))?;
            for line in String::from_utf8_lossy(&said).lines() {
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
    let name = name_of(file)?;
    let Some(bare) = name.strip_suffix(".xz") else {
        fs::copy(file, to.join(&name)).with_context(|| file.display().to_string())?;
        return Ok(name);
    };
    let mut unpack = Command::new("xz");
    let unpacked = printed(unpack.args(["--decompress", "--stdout"]).arg(file))?;
    fs::write(to.join(bare), unpacked)?;
    Ok(bare.to_owned())
}

/// The last part of a path.
fn name_of(path: &Path) -> Result<String> {
    let name = path.file_name().context("a name")?;
    Ok(name.to_string_lossy().into_owned())
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

/// An apt of its own, whatever suite and processor this machine has.
struct Apt {
    options: Vec<String>,
    directory: PathBuf,
}

impl Apt {
    fn new(suite: &str, arch: Arch, directory: &Path) -> Result<Self> {
        let apt = directory.join("apt");
        for name in ["lists/partial", "cache/archives/partial"] {
            make_directory(&apt.join(name))?;
        }
        let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let sources = format!(
            "deb [signed-by={keys}] http://deb.debian.org/debian {suite} main\n\
             deb [signed-by={keys}] http://deb.debian.org/debian-security {suite}-security main\n"
        );
        fs::write(apt.join("sources.list"), sources)?;
        fs::write(apt.join("status"), "")?;
        let (arch, apt) = (arch.debian(), apt.display());
        let options = [
            format!("APT::Architecture={arch}"),
            format!("APT::Architectures={arch}"),
            format!("Dir::Etc::sourcelist={apt}/sources.list"),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            format!("Dir::State::lists={apt}/lists"),
            format!("Dir::State::status={apt}/status"),
            format!("Dir::Cache={apt}/cache"),
            // Root's own directories are not for the user that apt fetches as.
            "APT::Sandbox::User=root".to_owned(),
        ];
        let apt = Self {
            options: options.to_vec(),
            directory: directory.to_owned(),
        };
        run(apt.command("apt-get").args(["-qq", "update"]))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    /// The kernel that this package depends on.
    fn newest(&self, package: &str) -> Result<String> {
        let said = printed(self.command("apt-cache").args(["depends", package]))?;
        let said = String::from_utf8_lossy(&said);
        let depends = said
            .lines()
            .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
        let release = depends.with_context(|| format!("{package} names no kernel"))?;
        Ok(format!("linux-image-{release}"))
    }

    /// Downloads a package, and unpacks it there.
    fn unpack(&self, package: &str, to: &Path) -> Result<()> {
        let mut download = self.command("apt-get");
        run(download
            .args(["-qq", "download", package])
            .current_dir(&self.directory))?;
        let file = named(&self.directory, &format!("{package}_"))?;
        let begun = to.with_extension("new");
        let mut unpack = Command::new("dpkg-deb");
        run(unpack.arg("--extract").arg(file).arg(&begun))?;
        fs::rename(&begun, to).with_context(|| to.display().to_string())
    }
}
