//! `leave`: undoes `init` on a host that has one peer.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use dibs_config::joining::{self, Store};
use serde_json::json;

use crate::output::show;
use crate::{cleanup, init};

/// Takes everything out of the kernel, and then away what `init` wrote.
pub(crate) fn run(file: &Path, socket: &Path, force: bool, json: bool) -> Result<()> {
    let config = joining::load(file)?;
    let [peer] = &config.peers[..] else {
        bail!(
            "{} has {} peers, and leave is for hosts with one: delete the [[peer]] there, and restart dibsd",
            file.display(),
            config.peers.len()
        );
    };
    ensure!(
        !config.daemon.exit,
        "this host is an exit: remove its peers with `dibsctl peer remove NAME`"
    );
    cleanup::run(socket, force)?;
    let old = init::files::old(file);
    fs::rename(file, &old).with_context(|| format!("cannot rename {}", file.display()))?;
    let key = &config.daemon.private_key_file;
    match fs::remove_file(key) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot delete {}", key.display()));
        }
        _ => {}
    }
    let store = Store::new(config.daemon.state_dir.clone());
    store.forget().context("cannot delete the join token")?;
    let (peer, old, key) = (&peer.name, old.display(), key.display());
    let answer =
        json!({ "peer": peer, "old": old.to_string(), "private_key_file": key.to_string() });
    show(json, &answer, || {
        format!(
            "nothing of dibs is left in the kernel\n{key} is deleted\n{old} is the old configuration\n\nHere, run:\n    sudo \
             systemctl disable --now dibsd dibs-guard\nOn {peer}, with the name that `dibsctl peer \
             list` has for this host there, run:\n    sudo dibsctl peer remove NAME\nIf this host stands in the file of {peer}, delete its [[peer]] there \
             instead, and restart dibsd.\n"
        )
    })
}
