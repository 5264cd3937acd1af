//! What dpkg is told of a package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::run::printed;

/// What dibsd runs, and what makes the group where there is no systemd.
const DEPENDS: &str = "iptables, passwd";
/// What `dibsctl demo` makes its hosts with; dibsd itself runs iptables alone.
const RECOMMENDS: &str = "ethtool, iproute2";

const SCRIPTS: [(&str, &str); 3] = [
    (
        "postinst",
        include_str!("../../../../packaging/deb/postinst"),
    ),
    ("prerm", include_str!("../../../../packaging/deb/prerm")),
    ("postrm", include_str!("../../../../packaging/deb/postrm")),
];

/// The files of DEBIAN/, of a package of these files.
pub(super) fn members(
    root: &Path,
    files: &[PathBuf],
    version: &str,
    arch: &str,
    depends: &str,
) -> Result<Vec<(&'static str, String)>> {
    let size = files
        .iter()
        .map(|file| fs::metadata(root.join(file)).map(|metadata| metadata.len().div_ceil(1024)))
        .sum::<std::io::Result<u64>>()
        .context("the size of the package")?;
    let control = format!(
        "Package: dibs\n\
         Version: {version}\n\
         Architecture: {arch}\n\
         Maintainer: the dibs authors <dibs@localhost>\n\
         Installed-Size: {size}\n\
         Depends: {depends}\n\
         Recommends: {RECOMMENDS}\n\
         Section: net\n\
         Priority: optional\n\
         Description: protect running TCP connections, over several paths\n \
         dibs puts a bump into TCP connections that are already running, and takes it out\n \
         again, without the applications noticing: encryption, secret sharing over several\n \
         network paths, or scrambling. A daemon, dibsd, runs on both hosts; dibsctl steers it.\n"
    );
    // What an administrator may have changed is asked about before it is replaced.
    let conffiles = files.iter().filter(|file| file.starts_with("etc"));
    let conffiles = conffiles.map(|file| format!("/{}\n", file.display()));
    let mut members = vec![
        ("control", control),
        ("conffiles", conffiles.collect()),
        ("md5sums", md5sums(root, files)?),
    ];
    members.extend(SCRIPTS.map(|(name, text)| (name, text.to_owned())));
    Ok(members)
}

fn md5sums(root: &Path, files: &[PathBuf]) -> Result<String> {
    let mut command = Command::new("md5sum");
    command.current_dir(root);
    command.args(files.iter().filter(|file| !file.starts_with("etc")));
    Ok(String::from_utf8(printed(&mut command)?)?)
}

/// What programs need of other packages, by the versions of symbols that they are linked to: so the package
/// fits whatever system is not older than the one that built it, and says so elsewhere.
pub(super) fn depends(programs: &[Vec<u8>]) -> Result<String> {
    let libc = programs.iter().filter_map(|program| newest_glibc(program));
    let (major, minor) = libc.max().context("the programs are not linked to glibc")?;
    let libgcc = programs
        .iter()
        .any(|p| find(p, b"libgcc_s.so.1").next().is_some());
    let libgcc = if libgcc { ", libgcc-s1" } else { "" };
    Ok(format!("libc6 (>= {major}.{minor}){libgcc}, {DEPENDS}"))
}

/// The highest of the names `GLIBC_2.34` in an executable.
fn newest_glibc(program: &[u8]) -> Option<(u32, u32)> {
    const PREFIX: &[u8] = b"GLIBC_";
    let versions = find(program, PREFIX).filter_map(|at| {
        let name = &program[at + PREFIX.len()..];
        let name = &name[..name.iter().position(|byte| *byte == 0)?.min(16)];
        let mut numbers = std::str::from_utf8(name).ok()?.split('.');
        let mut number = || numbers.next()?.parse().ok();
        Some((number()?, number()?))
    });
    versions.max()
}

fn find<'a>(bytes: &'a [u8], wanted: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
    let windows = bytes.windows(wanted.len()).enumerate();
    windows.filter_map(move |(at, window)| (window == wanted).then_some(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_are_those_of_the_symbols() {
        let old = b"\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_PRIVATE\0libgcc_s.so.1\0".to_vec();
        let new = b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_ABI_DT_RELR\0GLIBC_".to_vec();
        assert_eq!(newest_glibc(&old), Some((2, 17)));
        assert_eq!(newest_glibc(&new), Some((2, 34)));
        assert_eq!(
            depends(&[old, new.clone()]).unwrap(),
            "libc6 (>= 2.34), libgcc-s1, iptables, passwd"
        );
        assert_eq!(
            depends(&[new]).unwrap(),
            "libc6 (>= 2.34), iptables, passwd"
        );
        assert!(depends(&[Vec::new()]).is_err());
    }

    #[test]
    fn what_is_below_etc_is_kept_as_it_was_changed() {
        let files = [PathBuf::from("etc/a.conf"), PathBuf::from("usr/b")];
        let root = std::env::temp_dir().join(format!("dibs-control-{}", std::process::id()));
        for file in &files {
            super::super::tree::write(&root.join(file), b"x").unwrap();
        }
        let members = members(&root, &files, "1.2", "arm64", "libc6").unwrap();
        let member = |name| {
            let mut named = members.iter().filter(|(other, _)| *other == name);
            named.next().unwrap().1.as_str()
        };
        assert_eq!(member("conffiles"), "/etc/a.conf\n");
        assert!(member("md5sums").ends_with("  usr/b\n") && !member("md5sums").contains("etc"));
        assert!(
            member("control").starts_with("Package: dibs\nVersion: 1.2\nArchitecture: arm64\n")
        );
        for script in ["postinst", "prerm", "postrm"] {
            assert!(member(script).starts_with("#!/bin/sh\n"));
        }
        fs::remove_dir_all(root).unwrap();
    }
}
