//! The files of `init`: whole, or not there.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use dibs_config::{PrivateKey, PublicKey};
use tempfile::NamedTempFile;

/// The public key of the private one in `file`, and whether that was made now. One that is there is kept.
pub(crate) fn key(file: &Path) -> Result<(PublicKey, bool)> {
    if is_there(file)? {
        return Ok((dibs_config::read_private_key(file)?.public(), false));
    }
    let key = PrivateKey::generate();
    let mut text = key.to_base64();
    text.push('\n');
    let named = || file.display().to_string();
    make_directory_of(file)?;
    // For its owner alone from the first byte.
    let made = temporary(file, 0o600)
        .and_then(|mut new| {
            new.write_all(text.as_bytes())?;
            new.as_file().sync_all()?;
            Ok(new.persist_noclobber(file)?)
        })
        .with_context(|| format!("cannot write {}", named()));
    made.map_err(as_root)?;
    Ok((key.public(), true))
}

/// Writes a new configuration; one that is there becomes `FILE.old` if it may be replaced.
pub(crate) fn create(file: &Path, text: &str, replace: bool) -> Result<()> {
    make_directory_of(file)?;
    let write = || -> io::Result<()> {
        let mut new = temporary(file, 0o644)?;
        new.write_all(text.as_bytes())?;
        new.as_file().sync_all()?;
        if replace && file.try_exists()? {
            fs::copy(file, old(file))?;
            new.persist(file)?;
        } else {
            new.persist_noclobber(file)?;
        }
        Ok(())
    };
    let written = write().with_context(|| format!("cannot write {}", file.display()));
    written.map_err(as_root)
}

/// Puts another text in the place of a configuration's; owner and mode stay.
pub(crate) fn change(file: &Path, text: &str) -> Result<()> {
    let write = || -> io::Result<()> {
        // What a link leads to is changed, not the link.
        let file = file.canonicalize()?;
        let metadata = fs::metadata(&file)?;
        let mut new = temporary(&file, metadata.mode() & 0o7777)?;
        new.write_all(text.as_bytes())?;
        chown(new.path(), Some(metadata.uid()), Some(metadata.gid()))?;
        new.as_file().sync_all()?;
        new.persist(&file)?;
        Ok(())
    };
    let written = write().with_context(|| format!("cannot write {}", file.display()));
    written.map_err(as_root)
}

/// Where the replaced configuration goes.
pub(crate) fn old(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".old");
    name.into()
}

/// Whether there is something of this name; a link that leads nowhere is something, too.
pub(crate) fn is_there(file: &Path) -> Result<bool> {
    match file.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => {
            let said = Err(error).with_context(|| format!("cannot look at {}", file.display()));
            said.map_err(as_root)
        }
    }
}

fn make_directory_of(file: &Path) -> Result<()> {
    let Some(directory) = file.parent() else {
        bail!("{} is not a file", file.display());
    };
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory);
    made.with_context(|| format!("cannot make {}", directory.display()))
        .map_err(as_root)
}

/// A file beside `file`, of this mode whatever the umask.
fn temporary(file: &Path, mode: u32) -> io::Result<NamedTempFile> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    let new = NamedTempFile::with_prefix_in(".dibs-", directory)?;
    fs::set_permissions(new.path(), fs::Permissions::from_mode(mode))?;
    Ok(new)
}

/// Says what helps where the system refused it to others than root.
fn as_root(error: anyhow::Error) -> anyhow::Error {
    let refused = error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
    match refused && !nix::unistd::geteuid().is_root() {
        true => anyhow::anyhow!("{error:#}; init is for root: sudo dibsctl init"),
        false => error,
    }
}
