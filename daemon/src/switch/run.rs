//! A daemon from its start to its end.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use dibs_config::Config;
use dibs_core::Time;
use dibs_core::node::Node;
use dibs_policy::Backstop;
use dibs_switch::conns::host_id;
use dibs_switch::engine::entries;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{interval, timeout};

use crate::control::{metrics, socket};
use crate::data::bumps::Bumps;
use crate::data::endpoints::Endpoints;
use crate::data::notices::Notices;
use crate::data::preferences::Preferences;
use crate::data::rpc::Rpc;
use crate::data::{Driver, thread};
use crate::host::Host;
use crate::host::interfaces::{Interfaces, Inventory};
use crate::host::{directory, privileges};
use crate::kernel::Kernel;
use crate::kernel::steering::Steerer;
use crate::kernel::{backstop, gateway};
use crate::rulebook::state_file;
use crate::rulebook::state_file::StateFile;
use crate::rulebook::{restoring, unresolved};
use crate::switch::Daemon;
use crate::switch::{
    conditions, locking, messages, metering, probing, reconcile, reloading, sessions, silence,
    startup, tracking,
};
use crate::switch::{host_changes, names, news, sweep};

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// It could not start, or cannot go on; the message is one clear sentence.
pub fn run(file: &Path) -> anyhow::Result<()> {
    let config = startup::load(file)?;
    for warning in config
        .warnings()
        .into_iter()
        .chain(gateway::faults(&config))
    {
        tracing::warn!("{warning}");
    }
    dibs_io::give_back_large_blocks();
    privileges::ensure_descriptors()?;
    privileges::restrict(config.listens_at())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let ended = tokio::task::LocalSet::new().block_on(&runtime, serve(file, config));
    // A resolver may take minutes over a name, and nobody waits for it any more.
    runtime.shutdown_background();
    ended
}

async fn serve(file: &Path, config: Config) -> anyhow::Result<()> {
    socket::ensure_place(&config.daemon.control_socket)?;
    let state_file = StateFile::open(&config.daemon.control_socket)?;
    let _alone = state_file::claim_namespace()?;
    let saved = state_file.load()?;
    let interfaces = Interfaces::open()?;
    let inventory = interfaces.list().await?;
    let preferences = Preferences::new(&config, &saved.preferences);
    let (driver, notices, thread) =
        start_data_path(&config, &inventory, &preferences, state_file.earliest())?;
    let own_id = host_id(
        dibs_config::read_private_key(&config.daemon.private_key_file)?
            .public()
            .as_bytes(),
    );
    let (file_says, left) = (config.clone(), saved.clone());
    let mut state = directory::ask(move || restoring::initial_state(&file_says, &left)).await??;
    let peers: Vec<u64> = { config.peers.iter() }
        .map(|peer| host_id(peer.public_key.as_bytes()))
        .collect();
    for (pair, why) in state.conns.make_plausible(own_id, &peers) {
        tracing::warn!(
            "the state file has a choice for {pair} that nobody can have made ({why}): it stands, as one that can be \
             overruled",
        );
        state.refused.note(why);
    }
    let mut seed = [0; 4];
    getrandom::fill(&mut seed).context("the system's random generator failed")?;
    let daemon = Rc::new(Daemon {
        host_id: own_id,
        started: Instant::now(),
        bumps: Bumps::of(&config),
        endpoints: Endpoints::of(&config),
        rpc: Rpc::new(driver.clone(), u32::from_ne_bytes(seed)),
        host: Host::new(driver.clone(), interfaces, inventory, &config),
        kernel: Kernel::new(Steerer::new(driver.clone())?, Backstop::open()?),
        state: RefCell::new(state),
        file: state_file,
        kept: Default::default(),
        preferences: RefCell::new(preferences),
        flow_schedulers: Default::default(),
        registry: Default::default(),
        answers: Default::default(),
        users: Default::default(),
        wakers: Default::default(),
        events: Default::default(),
        peer_warnings: Default::default(),
        config,
        driver,
    });
    host_changes::warn_of_own_addresses(&daemon);
    host_changes::keep_addresses(&daemon, &saved.addresses).await?;
    locking::renumber(&daemon, &saved)
        .await
        .context("cannot give connections the new numbers of their bumps")?;
    if let Err(error) = entries::adopt(&*daemon).await {
        tracing::warn!("cannot see what is on a bump: {error:#}");
    }
    probing::probe_rules(&daemon).await?;
    backstop::ensure_backed(&daemon).await?;
    reconcile::steer(&daemon).await.context("cannot steer")?;
    gateway::note_passing(&daemon);
    sessions::take_up(&daemon)
        .await
        .context("cannot take up connections")?;
    // Not before the TUNs are there and the kernel steers: peers send at once what they kept, and it
    // would be acknowledged and lost.
    daemon.host.follow_links(&daemon.config).await?;
    let socket = daemon.config.daemon.control_socket.clone();
    let listener = socket::bind(&socket)?;
    if let Some(address) = daemon.config.daemon.metrics
        && let Some(listener) = metrics::bind(address).await
    {
        tokio::task::spawn_local(metrics::serve(Rc::clone(&daemon), listener));
    }
    let ended = main_loop(&daemon, file, listener, notices).await;
    // If the data path has ended, its end is what is told.
    let _ = metering::look(&daemon, true).await;
    daemon.kernel.let_go();
    // Whoever asks from now on learns that nobody is here.
    let _ = std::fs::remove_file(&socket);
    if daemon.config.daemon.fail == dibs_config::Fail::Open {
        reconcile::remove_all(&daemon, true)
            .await
            .context("cannot let go")?;
    }
    daemon.driver.stop();
    let joined = tokio::task::spawn_blocking(move || thread.join()).await?;
    joined
        .map_err(|_| anyhow!("the data path panicked"))?
        .context("the data path failed")?;
    ended
}

/// Everything at once, until a signal to end or a failure.
async fn main_loop(
    daemon: &Rc<Daemon>,
    file: &Path,
    listener: tokio::net::UnixListener,
    notices: Notices,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let hang_up = signal(SignalKind::hangup())?;
    let own = || Rc::clone(daemon);
    tokio::task::spawn_local(socket::serve(own(), listener));
    tokio::task::spawn_local(watchdog(own()));
    let mut data_path = tokio::task::spawn_local(news::follow(own(), notices));
    tokio::task::spawn_local(reloading::keep(own(), file.to_owned(), hang_up));
    tokio::task::spawn_local(host_changes::follow(own()));
    tokio::task::spawn_local(names::keep(own()));
    tokio::task::spawn_local(sweep::keep(own()));
    tokio::task::spawn_local(conditions::follow_hours(own()));
    tokio::task::spawn_local(unresolved::keep(own()));
    tokio::task::spawn_local(conditions::follow_sessions(own()));
    tokio::task::spawn_local(metering::keep(own()));
    tokio::task::spawn_local(tracking::follow(own()));
    tokio::task::spawn_local(messages::keep_telling(own()));
    tokio::task::spawn_local(messages::keep_asking(own()));
    tokio::task::spawn_local(locking::keep(own()));
    tokio::task::spawn_local(silence::keep(own()));
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).context("cannot tell systemd")?;
    tracing::info!("ready");
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        _ = &mut data_path => Err(anyhow!("the data path has ended")),
    }
}

fn start_data_path(
    config: &Config,
    inventory: &Inventory,
    preferences: &Preferences,
    earliest: Duration,
) -> anyhow::Result<(Driver, Notices, JoinHandle<std::io::Result<()>>)> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).context("the system's random generator failed")?;
    let now = Time::from_nanos(dibs_io::boottime_ns());
    let mut node = startup::node_config(config, inventory)?;
    preferences.put_into(&mut node, config);
    let node = Node::new(now, node, seed)?;
    let names = config.paths.iter().map(|path| path.name.clone()).collect();
    let (driver, notices, thread) =
        thread::start(node, names, earliest).context("cannot start the data path")?;
    Ok((driver, notices, thread))
}

/// Tells systemd that we live, as long as the data path answers.
async fn watchdog(daemon: Rc<Daemon>) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return;
    };
    let mut ticks = interval(limit / 3);
    loop {
        ticks.tick().await;
        match timeout(limit / 3, daemon.driver.ping()).await {
            Ok(Ok(())) => {
                // Systemd is there, or it would not have set the limit.
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Watchdog]);
            }
            _ => tracing::error!("the data path does not answer"),
        }
    }
}
