//! Letting go of everything that is installed, with or without a daemon.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use dibs_control::{Client, ClientError};
use dibs_policy::{Backstop, MarkLayout, Steering};

use crate::output::runtime;

/// Where the marks of a daemon that does not run are looked up.
const CONFIG: &str = "/etc/dibs/dibsd.toml";

/// Has the daemon let go, whatever breaks if `force`; where none runs, what it left is removed from here.
pub(crate) fn run(socket: &Path, force: bool) -> Result<()> {
    match Client::connect(socket) {
        Ok(mut client) => Ok(client.cleanup(force)?),
        Err(ClientError::NotRunning { .. }) => offline(socket),
        Err(error) => Err(error.into()),
    }
}

fn offline(socket: &Path) -> Result<()> {
    let marks = marks()?;
    runtime()?.block_on(async {
        Steering::system(None)?.cleanup(marks).await?;
        Backstop::open()?.remove().await
    })?;
    // Rules and choices made at runtime would be installed again at the next start.
    let state = socket.with_extension("state");
    match fs::remove_file(&state) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", state.display()))
        }
        _ => Ok(()),
    }
}

/// The configured marks, or the default ones where there is no configuration.
fn marks() -> Result<MarkLayout> {
    if !Path::new(CONFIG).exists() {
        return Ok(MarkLayout::default());
    }
    let config = dibs_config::load(Path::new(CONFIG))?;
    Ok(MarkLayout::new(config.daemon.mark_mask)?)
}
