//! The daemon: a thread for packets ([`driver`]), and this one for everything else.
//!
//! The main thread steers: it decides which connections take a bump, tells the kernel
//! ([`steering`]) and the peers' daemons ([`messages`]), and serves users ([`control_socket`]). None of
//! that stands in a packet's way.

pub mod background;
mod backstop;
pub mod bumps;
mod caller;
mod clock;
pub mod control_socket;
pub mod daemon;
mod devices;
pub mod driver;
mod events;
mod following;
mod fresh;
mod gateway;
pub mod guard;
mod hours;
pub mod interfaces;
mod listing;
pub mod live;
pub mod locking;
pub mod log;
mod metrics;
mod paths;
pub mod preferences;
mod preferring;
mod privileges;
mod probing;
mod questions;
mod recovery;
mod reloading;
pub mod requests;
mod rpc;
pub mod rules;
mod scheduling;
pub mod startup;
pub mod state_file;
pub mod steering;
mod switching;
pub mod terms;
pub mod tracking;
mod translated;
mod turns;
mod users;
mod volumes;
mod wakers;
mod wants;

use dibs_switch::conns;
use std::path::Path;
use std::rc::Rc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use dibs_config::Config;
use dibs_core::Time;
use dibs_core::node::Node;
use tokio::signal::unix::{SignalKind, signal};

use daemon::{Daemon, PeerState, Refused, State};
use driver::{Driver, Notices};
use interfaces::{Interfaces, Inventory};
use preferences::Preferences;
use rpc::Rpc;
use state_file::{Saved, StateFile};
use steering::Steerer;

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
    privileges::restrict()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    tokio::task::LocalSet::new().block_on(&runtime, serve(file, config))
}

async fn serve(file: &Path, config: Config) -> anyhow::Result<()> {
    control_socket::ensure_place(&config.daemon.control_socket)?;
    let state_file = StateFile::open(&config.daemon.control_socket)?;
    let _alone = state_file::claim_namespace()?;
    let saved = state_file.load()?;
    let interfaces = Interfaces::open()?;
    let inventory = interfaces.list().await?;
    let preferences = Preferences::new(&config, &saved.preferences);
    let (driver, notices, thread) =
        start_data_path(&config, &inventory, &preferences, state_file.earliest())?;
    let host = host_id(&dibs_config::read_private_key(&config.daemon.private_key_file)?.public());
    let mut state = initial_state(&config, &saved, inventory)?;
    let peers: Vec<u64> = { config.peers.iter() }
        .map(|peer| host_id(&peer.public_key))
        .collect();
    for (pair, why) in state.conns.make_plausible(host, &peers) {
        tracing::warn!(
            "the state file has a choice for {} to {} that nobody can have made ({why}): it stands, as \
                        one that can be overruled",
            pair.local,
            pair.remote
        );
        state.refused.note(why);
    }
    let steerer = Steerer::new(driver.clone())?;
    let mut seed = [0; 4];
    getrandom::fill(&mut seed).context("the system's random generator failed")?;
    let rpc = Rpc::new(driver.clone(), u32::from_ne_bytes(seed));
    let daemon = Rc::new(Daemon::new(
        config,
        driver,
        rpc,
        interfaces,
        steerer,
        dibs_policy::Backstop::open()?,
        state_file,
        state,
        preferences,
        host,
    ));
    background::warn_of_own_addresses(&daemon);
    background::keep_addresses(&daemon, &saved.addresses).await?;
    daemon
        .renumber(&saved)
        .await
        .context("cannot give connections the new numbers of their bumps")?;
    if let Err(error) = daemon.adopt_marks().await {
        tracing::warn!("cannot see what is on a bump: {error:#}");
    }
    daemon.probe_rules().await?;
    daemon.ensure_backed().await?;
    daemon.steer().await.context("cannot steer")?;
    daemon.note_passing();
    if !daemon.state.borrow().installed.is_empty() {
        daemon.find_followed().await?;
    }
    daemon
        .take_up()
        .await
        .context("cannot take up connections")?;
    // Not before the TUNs are there and the kernel steers: peers send at once what they kept, and it
    // would be acknowledged and lost.
    daemon.follow_links(true).await?;
    let socket = daemon.config.daemon.control_socket.clone();
    let listener = control_socket::bind(&socket)?;
    if let Some(address) = daemon.config.daemon.metrics
        && let Some(listener) = metrics::bind(address).await
    {
        tokio::task::spawn_local(metrics::serve(Rc::clone(&daemon), listener));
    }
    let ended = main_loop(&daemon, file, listener, notices).await;
    // If the data path has ended, its end is what is told.
    let _ = daemon.look_at_volumes(true).await;
    daemon.let_go();
    // Whoever asks from now on learns that nobody is here.
    let _ = std::fs::remove_file(&socket);
    if daemon.config.daemon.fail == dibs_config::Fail::Open {
        daemon.remove_all(true).await.context("cannot let go")?;
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
    let mut hang_up = signal(SignalKind::hangup())?;
    let own = || Rc::clone(daemon);
    tokio::task::spawn_local(control_socket::serve(own(), listener));
    tokio::task::spawn_local(background::watchdog(own()));
    let mut data_path = tokio::task::spawn_local(background::follow_data_path(own(), notices));
    tokio::task::spawn_local(background::follow_host(own()));
    tokio::task::spawn_local(background::sweep(own()));
    tokio::task::spawn_local(hours::keep(own()));
    tokio::task::spawn_local(preferring::keep(own()));
    tokio::task::spawn_local(volumes::keep(own()));
    tokio::task::spawn_local(tracking::follow(own()));
    tokio::task::spawn_local(switching::keep_telling(own()));
    tokio::task::spawn_local(locking::ask(own()));
    tokio::task::spawn_local(locking::keep(own()));
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).context("cannot tell systemd")?;
    tracing::info!("ready");
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hang_up.recv() => daemon.reload(file).await,
            _ = &mut data_path => return Err(anyhow!("the data path has ended")),
        }
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
        driver::start(node, names, earliest).context("cannot start the data path")?;
    Ok((driver, notices, thread))
}

/// What names a host in versions, the first bytes of its public key: another number than any other host's, but for
/// one chance in 2^64.
pub(crate) fn host_id(key: &dibs_config::PublicKey) -> u64 {
    let (first, _) = key.as_bytes().split_first_chunk().expect("32 bytes");
    u64::from_be_bytes(*first)
}

/// What the last run left, and the rules of the file.
fn initial_state(config: &Config, saved: &Saved, inventory: Inventory) -> anyhow::Result<State> {
    let carried = bumps::carried(config);
    let now = dibs_io::local_time();
    let mut rules = reloading::of_file(config, &carried, now)?;
    let user_rules = reloading::add_saved(config, &carried, &saved.rules, &mut rules);
    rules.sort_by_key(rules::Rule::order);
    let mut conns = dibs_switch::table::ConnTable::default();
    // The file may have had them in another order.
    let devices = saved.devices(&carried);
    for saved in &saved.choices {
        let bump = bumps::translated(&devices, saved.choice.bump);
        if bump == 0 || carried.iter().any(|carried| carried.id.get() == bump) {
            let choice = conns::Choice {
                bump,
                ..saved.choice
            };
            conns.update(&saved.conn, |conn| conn.choice.restore(choice));
        }
    }
    let peer_state = |peer: &dibs_config::PeerConfig| {
        let engaged = saved.engaged.get(&peer.public_key.to_string());
        let engaged = engaged.copied().unwrap_or(0);
        PeerState {
            engaged: bumps::translated_mask(&devices, engaged) & !(1 << bumps::NOBODYS),
            ..PeerState::default()
        }
    };
    Ok(State {
        rules,
        user_rules,
        utc_offset: now.utc_offset,
        next_rule: saved.next_rule,
        conns,
        refused: Refused::default(),
        peers: config.peers.iter().map(peer_state).collect(),
        addresses: inventory.host_addresses(terms::is_our_tun),
        reachable: inventory.reachable(&config.paths),
        inventory,
        links: vec![Default::default(); config.paths.len()],
        installed: Default::default(),
        pinned: Default::default(),
        suspended: false,
    })
}
