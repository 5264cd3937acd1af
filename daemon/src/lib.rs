//! The daemon: a thread for packets ([`driver`]), and this one for everything else.

pub mod driver;
pub mod interfaces;
pub mod rules;
pub mod startup;
pub mod steering;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context as _;
use dibs_core::Time;
use dibs_core::node::Node;
use tokio::signal::unix::{SignalKind, signal};

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// It could not start, or cannot go on; the message is one clear sentence.
pub fn run(file: &Path) -> anyhow::Result<()> {
    let config = startup::load(file)?;
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    tokio::task::LocalSet::new().block_on(&runtime, serve(config))
}

async fn serve(config: dibs_config::Config) -> anyhow::Result<()> {
    let interfaces = interfaces::Interfaces::open()?;
    let inventory = interfaces.list().await?;
    let addresses = inventory.host_addresses(startup::is_our_tun);
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).context("the system's random generator")?;
    let now = Time::from_nanos(dibs_io::monotonic_ns());
    let node = Node::new(now, startup::node_config(&config, &inventory)?, seed)?;
    let names = config.paths.iter().map(|path| path.name.clone()).collect();
    let (driver, mut notices, thread) =
        driver::start(node, names).context("start the data path")?;
    for (index, path) in config.paths.iter().enumerate() {
        if let Some(socket) = startup::open_socket(&config, path)? {
            let set = driver.set_socket(index, socket).await?;
            set.with_context(|| format!("watch path {}", path.name))?;
        }
    }
    let mut rules = Vec::new();
    for (index, rule) in config.rules.iter().enumerate() {
        let bump = startup::carried()
            .into_iter()
            .find(|bump| bump.name == rule.bump)
            .expect("others were refused");
        let id = index as u64 + 1;
        rules.push(
            rules::of_file(id, rule, bump.id)
                .map_err(|message| config.refuse(&format!("rule.{index}"), message, None))?,
        );
    }
    let mut steerer = steering::Steerer::new(driver.clone())?;
    let in_use: BTreeSet<_> = startup::carried().iter().map(|bump| bump.id).collect();
    let wish = steering::desired(&config, &rules, &in_use, &addresses);
    steerer.set(&wish).await?;
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).context("sd_notify")?;
    tracing::info!("ready");
    let mut term = signal(SignalKind::terminate())?;
    loop {
        tokio::select! {
            notice = notices.recv() => match notice {
                Some(driver::Notice::Node(dibs_core::node::Event::PeerUp { .. })) => tracing::info!("session is established"),
                Some(driver::Notice::Node(event)) => tracing::info!(?event),
                Some(driver::Notice::TunLost { error, .. }) => tracing::warn!("{error}"),
                None => break,
            },
            _ = term.recv() => { driver.stop(); }
        }
    }
    let ended = thread.join();
    ended
        .map_err(|_| anyhow::anyhow!("the data path panicked"))?
        .context("the data path")
}
