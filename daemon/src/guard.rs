//! `dibsd --guard`: what has to be on a bump is blocked before there is a network and before the daemon
//! runs. The daemon then finds everything as it would have made it, and adds its TUNs.

use std::path::Path;

use anyhow::Context as _;
use dibs_config::Fail;
use dibs_policy::{Backstop, Standing, Steering, Strength};

use crate::interfaces::{Interfaces, Inventory};
use crate::restoring::initial_state;
use crate::state_file::StateFile;
use crate::{privileges, probing, startup};

/// Puts into the kernel what blocks, and ends.
///
/// # Errors
/// It could not; the message is one clear sentence.
pub fn run(file: &Path) -> anyhow::Result<()> {
    let config = startup::load(file)?;
    if config.daemon.fail == Fail::Open {
        tracing::info!("nothing is to be blocked: fail is \"open\"");
        return Ok(());
    }
    privileges::ensure_descriptors()?;
    privileges::restrict([])?;
    // A daemon that runs guards already, and says so.
    let saved = StateFile::open(&config.daemon.control_socket)?.load()?;
    // Addresses go on TUNs, which come with the daemon.
    let mut state = initial_state(&config, &saved)?;
    let inventory = Inventory::default();
    if state.wish(&config, &inventory, &[], None).bumps.is_empty() {
        tracing::info!("nothing is to be blocked: no rule and no choice puts anything on a bump");
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let mut steering = Steering::system(None)?;
        let mut rules = state.rules.all().to_vec();
        probing::probe_all(&mut steering, &config, &mut rules).await?;
        state.rules.keep(rules);
        let inventory = Interfaces::open()?.list().await?;
        let wish = state.wish(&config, &inventory, &[], None);
        steering.set(&wish).await.context("cannot steer")?;
        let mut backstop = Backstop::open()?;
        match backstop.set(&wish, &state.known()).await {
            Ok(_) if *backstop.standing() == Standing::Stands(Strength::Lasting) => {}
            Ok(_) => tracing::info!("the table of nftables goes with this process"),
            Err(error) => {
                tracing::error!("{error}: what flushes the firewall lets plain packets go")
            }
        }
        steering.clear_others().await?;
        tracing::info!("blocked until the daemon runs");
        Ok(())
    })
}
