//! Keys in and out, as `wg` does it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result};
use dibs_config::{PresharedKey, PrivateKey};
use zeroize::Zeroizing;

use crate::output::say;

pub(crate) fn genkey() -> Result<()> {
    print_secret(PrivateKey::generate().to_base64())
}

pub(crate) fn genpsk() -> Result<()> {
    print_secret(PresharedKey::generate().to_base64())
}

pub(crate) fn pubkey() -> Result<()> {
    const LIMIT: usize = 256;
    let mut text = Zeroizing::new(String::with_capacity(LIMIT));
    io::stdin()
        .lock()
        .take(LIMIT as u64)
        .read_to_string(&mut text)
        .context("cannot read a key from stdin")?;
    let key = PrivateKey::from_base64(text.trim_ascii())
        .map_err(|error| anyhow::anyhow!("what came by stdin {error}"))?;
    Ok(writeln!(io::stdout(), "{}", key.public())?)
}

/// Past the buffer of stdout, which would keep a copy.
fn print_secret(mut key: Zeroizing<String>) -> Result<()> {
    let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let metadata = out.metadata()?;
    if metadata.is_file() && metadata.permissions().mode() & 0o077 != 0 {
        say("warning: others can read the file that this key goes to; set umask 077 before");
    }
    key.push('\n');
    Ok(out.write_all(key.as_bytes())?)
}
