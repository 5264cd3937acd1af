//! Building for another processor than this one, and running what was built by QEMU.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::packages;
use crate::run::{cargo_command, run, succeeds};

/// A kind of processor that dibs is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    /// x86-64
    Amd64,
    /// 64-bit ARM
    Arm64,
}

impl Arch {
    pub(crate) const ALL: [Arch; 2] = [Arch::Amd64, Arch::Arm64];

    /// Debian's name.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Arch::Amd64 => "amd64",
            Arch::Arm64 => "arm64",
        }
    }

    /// The processor, as Rust and GNU call it.
    fn processor(self) -> &'static str {
        match self {
            Arch::Amd64 => "x86_64",
            Arch::Arm64 => "aarch64",
        }
    }

    /// Where cargo builds for it, and what it builds for.
    pub(crate) fn rust_target(self) -> String {
        format!("{}-unknown-linux-gnu", self.processor())
    }

    pub(crate) fn is_native(self) -> bool {
        std::env::consts::ARCH == self.processor()
    }

    /// What emulates a machine with such a processor, and the package it comes in.
    pub(crate) fn machine(self) -> packages::Need {
        match self {
            Arch::Amd64 => ("qemu-system-x86_64", "qemu-system-x86"),
            Arch::Arm64 => ("qemu-system-aarch64", "qemu-system-arm"),
        }
    }

    /// The compiler to build for it elsewhere, and the packages that it comes in.
    fn cross_compiler(self) -> (&'static str, &'static str) {
        match self {
            Arch::Amd64 => (
                "x86_64-linux-gnu-gcc",
                "gcc-x86-64-linux-gnu libc6-dev-amd64-cross",
            ),
            Arch::Arm64 => (
                "aarch64-linux-gnu-gcc",
                "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
            ),
        }
    }
}

/// What runs programs for 64-bit ARM, and the Debian package it comes in.
const EMULATOR: packages::Need = ("qemu-aarch64", "qemu-user");
/// The same that needs no library, so that it also works in another root file system; and what mmdebstrap asks whether it
/// does.
const STATIC_EMULATOR: [packages::Need; 2] = [
    ("qemu-aarch64-static", "qemu-user-static"),
    ("arch-test", "arch-test"),
];
/// Where the kernel is told what runs programs that are not for this processor.
const BINFMT: &str = "/proc/sys/fs/binfmt_misc";
/// binfmt_misc's registration of programs for 64-bit ARM: their ELF header, which of its bits count, and F to open what runs
/// them at once.
const PROGRAMS_OF_ARM64: &str = concat!(
    r"M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00",
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff",
    ":/usr/bin/qemu-aarch64-static:F"
);
/// The crates that make no system calls of their own but for files, or none that the emulator does not know.
const PURE: [&str; 12] = [
    "dibs-scramble",
    "dibs-share",
    "dibs-gcm",
    "dibs-wire",
    "dibs-settings",
    "dibs-core",
    "dibs-switch",
    "dibs-netem",
    "dibs-sim",
    "dibs-eavesdrop",
    "dibs-config",
    "dibs-control",
];

/// A cargo command for that processor; installs what it needs.
pub(crate) fn cargo_for(arch: Arch, arguments: &[&str]) -> Result<Command> {
    let mut command = cargo_command(arguments);
    let target = arch.rust_target();
    command.args(["--target", &target]);
    if arch.is_native() {
        return Ok(command);
    }
    let compiler = arch.cross_compiler();
    packages::ensure(&[&[compiler]])?;
    if !succeeds(Command::new("rustc").args(["--print", "target-libdir", "--target", &target])) {
        bail!("this Rust does not know {target}");
    }
    // Does nothing where it is installed; a Rust without rustup brings its own.
    if succeeds(Command::new("rustup").arg("--version")) {
        run(Command::new("rustup").args(["target", "add", &target]))?;
    }
    let shouted = target.to_uppercase().replace('-', "_");
    command.env(format!("CARGO_TARGET_{shouted}_LINKER"), compiler.0);
    command.env(format!("CC_{}", target.replace('-', "_")), compiler.0);
    Ok(command)
}

/// Runs the unit tests and the simulator as programs for 64-bit ARM.
pub(crate) fn aarch64(seeds: u32) -> Result<()> {
    let arch = Arch::Arm64;
    if !arch.is_native() {
        packages::ensure(&[&[EMULATOR]])?;
    }
    let mut tests = vec!["test", "--lib", "--tests", "--no-fail-fast"];
    tests.extend(PURE.iter().flat_map(|name| ["--package", name]));
    run(emulated(&mut cargo_for(arch, &tests)?, arch))?;
    let simulator = ["run", "--release", "--package", "dibs-sim"];
    let mut simulator = cargo_for(arch, &simulator)?;
    run(emulated(&mut simulator, arch).args(["--", "--seeds", &seeds.to_string()]))
}

/// Has cargo run what it builds for that processor.
fn emulated(command: &mut Command, arch: Arch) -> &mut Command {
    if arch.is_native() {
        return command;
    }
    let shouted = arch.rust_target().to_uppercase().replace('-', "_");
    let runner = format!("{} -L /usr/{}-linux-gnu", EMULATOR.0, arch.processor());
    command.env(format!("CARGO_TARGET_{shouted}_RUNNER"), runner)
}

/// As long as it is there, the kernel has QEMU run programs of another processor, in whatever root file system.
#[derive(Debug)]
pub(crate) struct Emulation(PathBuf);

impl Emulation {
    /// For programs of this processor; nothing if this machine runs them by itself, or is set up for it already.
    pub(crate) fn of(arch: Arch) -> Result<Option<Self>> {
        if arch.is_native() {
            return Ok(None);
        }
        if arch != Arch::Arm64 {
            bail!(
                "programs for {} run on such a processor only",
                arch.debian()
            );
        }
        packages::ensure(&[&STATIC_EMULATOR])?;
        let place = PathBuf::from(BINFMT);
        if !place.join("register").exists() {
            run(Command::new("mount").args(["-t", "binfmt_misc", "binfmt_misc", BINFMT]))?;
        }
        // As Debian's packages call it.
        if place.join("qemu-aarch64").exists() {
            return Ok(None);
        }
        let register = place.join("register");
        let name = "dibs-aarch64";
        fs::write(&register, format!(":{name}:{PROGRAMS_OF_ARM64}"))
            .with_context(|| register.display().to_string())?;
        Ok(Some(Self(place.join(name))))
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        if let Err(error) = fs::write(&self.0, "-1") {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}
