//! Letting go of everything that is installed, with or without a daemon.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use dibs_control::{Client, ClientError};
use dibs_policy::conntrack::{Connection, Conntrack};
use dibs_policy::{Backstop, MarkLayout, Steering, claim};

use crate::output::runtime;

/// Where the marks of a daemon that does not run are looked up.
const CONFIG: &str = "/etc/dibs/dibsd.toml";
/// States of TCP in which conntrack has a connection that goes on (nf_conntrack_tcp.h): ESTABLISHED, FIN_WAIT, CLOSE_WAIT.
const OPEN: std::ops::RangeInclusive<u8> = 3..=5;

/// Has the daemon let go, whatever breaks if `force`; where none runs, what it left is removed from here.
pub(crate) fn run(socket: &Path, force: bool) -> Result<()> {
    match Client::connect(socket) {
        Ok(mut client) => Ok(client.cleanup(force)?),
        Err(ClientError::NotRunning { .. }) => offline(socket, force),
        Err(error) => Err(error.into()),
    }
}

fn offline(socket: &Path, force: bool) -> Result<()> {
    let claimed = claim::namespace().context("cannot make sure that no dibsd runs here")?;
    let _alone = claimed.with_context(|| {
        format!(
            "dibsd runs here, but not with the control socket {}: name its own with --socket",
            socket.display()
        )
    })?;
    let marks = marks()?;
    runtime()?.block_on(async {
        if !force {
            let bumped = bumped(marks).await?;
            ensure!(
                bumped == 0,
                "connections are on bumps ({bumped} of them), and without dibsd nobody sees whether plain carries them: start \
                 it (sudo systemctl start dibsd), and repeat the command; --force takes them to plain, and they may break"
            );
        }
        Steering::system(None)?.cleanup(marks).await?;
        Backstop::open()?.remove().await?;
        anyhow::Ok(())
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

/// Number of open connections that the kernel has on bumps.
async fn bumped(marks: MarkLayout) -> Result<usize> {
    let is_open = |entry: &Connection| entry.tcp_state.is_some_and(|state| OPEN.contains(&state));
    let is_bumped = |entry: Connection| {
        let bump = marks.bump_of(entry.mark);
        bump.filter(|_| is_open(&entry)).map(drop)
    };
    Ok(Conntrack::open()?.list(is_bumped).await?.len())
}

/// The configured marks, or the default ones where there is no configuration.
fn marks() -> Result<MarkLayout> {
    if !Path::new(CONFIG).exists() {
        return Ok(MarkLayout::default());
    }
    let config = dibs_config::load(Path::new(CONFIG))?;
    Ok(MarkLayout::new(config.daemon.mark_mask)?)
}
