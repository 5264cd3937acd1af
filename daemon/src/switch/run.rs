//! A daemon from its start to its end, and what it does from time to time: it forgets what ended, and looks for what no event
//! tells of.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use dibs_config::Config;
use dibs_core::Time;
use dibs_core::node::Node;
use dibs_policy::Backstop;
use dibs_switch::conns::host_id;
use dibs_switch::engine::{self, tasks};
use dibs_switch::table::Conn;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval, interval_at, timeout};

use crate::control::{Caller, ROOT, metrics, socket};
use crate::data::bumps::Bumps;
use crate::data::{Notices, Rpc, thread};
use crate::host::endpoints::Endpoints;
use crate::host::interfaces::{Interfaces, Inventory};
use crate::host::preferences::Preferences;
use crate::host::{Host, process};
use crate::kernel::{Kernel, Steerer, connections};
use crate::rulebook::state_file;
use crate::rulebook::state_file::{Saved, StateFile};
use crate::switch::{
    Daemon, Task, entries, initial_state, knocking, listing, marking, messages, paths,
    rule_changes, sessions, startup, steering,
};

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// It could not start, or cannot go on; the message is one clear sentence.
pub fn run(file: &Path) -> anyhow::Result<()> {
    let config = startup::load(file)?;
    for warning in config
        .warnings()
        .into_iter()
        .chain(connections::faults(&config))
    {
        tracing::warn!("{warning}");
    }
    dibs_io::give_back_large_blocks();
    process::ensure_descriptors()?;
    process::restrict(config.listens_at())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let served = |config| {
        let tasks = tokio::task::LocalSet::new();
        tasks.block_on(&runtime, serve(file, config))
    };
    let mut ended = served(config);
    while let Ok(End::Restart) = ended {
        ended = startup::load(file).map_err(Into::into).and_then(served);
    }
    // A resolver may take minutes over a name, and nobody waits for it any more.
    runtime.shutdown_background();
    ended.map(drop)
}

/// Cause for which a daemon ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Stop of the daemon.
    Stop,
    /// Start anew, because its peers are others.
    Restart,
}

async fn serve(file: &Path, config: Config) -> anyhow::Result<End> {
    socket::ensure_place(&config.daemon.control_socket)?;
    let state_file = StateFile::open(&config.daemon.control_socket)?;
    let _alone = state_file::claim_namespace()?;
    let saved = state_file.load()?;
    let interfaces = Interfaces::open()?;
    let listed = interfaces.list().await?;
    let inventory = listed.shared_out(&config.paths, &Inventory::default());
    let preferences = Preferences::new(&config, &saved.preferences);
    let node = data_path(&config, &inventory, &preferences, &saved)?;
    let names = config.paths.iter().map(|path| path.name.clone()).collect();
    let (driver, notices, thread) =
        thread::start(node, names, state_file.earliest()).context("cannot start the data path")?;
    let own_id = host_id(
        dibs_config::read_private_key(&config.daemon.private_key_file)?
            .public()
            .as_bytes(),
    );
    let (file_says, left) = (config.clone(), saved.clone());
    let mut state = process::ask_directory(move || initial_state(&file_says, &left)).await??;
    let peers: Vec<u64> = { config.peers.iter() }
        .map(|peer| host_id(peer.public_key.as_bytes()))
        .collect();
    for (pair, why) in state.conns.make_plausible(own_id, &peers) {
        tracing::warn!(
            "the state file has an impossible entry for {pair} ({why}): it is kept, and can be overruled",
        );
        state.refused.note(why);
    }
    let mut seed = [0; 4];
    getrandom::fill(&mut seed).context("the system's random generator failed")?;
    let config = Rc::new(config);
    let host = Host::new(Rc::clone(&config), driver.clone(), interfaces, inventory);
    let host = Rc::new(host);
    let daemon = Rc::new(Daemon {
        host_id: own_id,
        started: Instant::now(),
        bumps: Bumps::of(&config),
        endpoints: Endpoints::of(&config),
        rpc: Rpc::new(driver.clone(), u32::from_ne_bytes(seed)),
        kernel: Kernel::new(
            Rc::clone(&host),
            Steerer::new(driver.clone())?,
            Backstop::open()?,
        ),
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
        host,
        driver,
    });
    steering::warn_of_own_addresses(&daemon);
    steering::keep_addresses(&daemon, &saved.addresses).await?;
    knocking::restore(&daemon, &saved.matched)
        .await
        .context("cannot take over connections that peers know by other addresses")?;
    entries::renumber(&daemon, &saved)
        .await
        .context("cannot renumber the bumps of connections")?;
    if let Err(error) = engine::entries::adopt(&*daemon).await {
        tracing::warn!("cannot list the connections on bumps: {error:#}");
    }
    rule_changes::probe_rules(&daemon).await?;
    marking::ensure_backed(&daemon).await?;
    steering::steer(&daemon).await.context("cannot steer")?;
    connections::note_passing(&daemon.config);
    sessions::take_up(&daemon)
        .await
        .context("cannot take over connections")?;
    // Not before the TUNs are there and the kernel steers: peers send at once what they kept, and it
    // would be acknowledged and lost.
    daemon.host.follow_links().await?;
    let socket = daemon.config.daemon.control_socket.clone();
    let listener = socket::bind(&socket)?;
    serve_metrics(&daemon).await;
    let ended = main_loop(&daemon, file, listener, notices).await;
    // If the data path has ended, its end is what is told.
    let _ = paths::look_at_volumes(&daemon, true).await;
    daemon.kernel.let_go();
    // Whoever asks from now on learns that nobody is here.
    let _ = std::fs::remove_file(&socket);
    let goes_on = matches!(ended, Ok(End::Restart));
    if !goes_on && daemon.config.daemon.fail == dibs_settings::Fail::Open {
        steering::remove_all(&daemon, true)
            .await
            .context("cannot return connections to plain")?;
    }
    daemon.driver.stop();
    let joined = tokio::task::spawn_blocking(move || thread.join()).await?;
    joined
        .map_err(|_| anyhow!("the data path panicked"))?
        .context("the data path failed")?;
    ended
}

/// Has metrics served, if the file names an address for them.
async fn serve_metrics(daemon: &Rc<Daemon>) {
    if let Some(address) = daemon.config.daemon.metrics
        && let Some(listener) = metrics::bind(address).await
    {
        let own = Rc::clone(daemon);
        let ask = async move || listing::status(&own, Caller { uid: ROOT }).await;
        tokio::task::spawn_local(metrics::serve(ask, listener));
    }
}

/// Everything at once, until a signal to end or a failure.
async fn main_loop(
    daemon: &Rc<Daemon>,
    file: &Path,
    listener: tokio::net::UnixListener,
    notices: Notices,
) -> anyhow::Result<End> {
    let signals = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
    let [terminate, interrupt] = signals;
    let mut stops = Stops {
        terminate: terminate?,
        interrupt: interrupt?,
    };
    let hang_up = signal(SignalKind::hangup())?;
    let own = || Rc::clone(daemon);
    tokio::task::spawn_local(socket::serve(own(), listener));
    tokio::task::spawn_local(watchdog(own()));
    let data_path = messages::follow_data_path(own(), file.to_owned(), notices);
    let mut data_path = tokio::task::spawn_local(data_path);
    tokio::task::spawn_local(rule_changes::keep_reloading(
        own(),
        file.to_owned(),
        hang_up,
    ));
    tokio::task::spawn_local(steering::follow_host(own()));
    tokio::task::spawn_local(paths::follow_names(own()));
    tokio::task::spawn_local(sweep(own()));
    tasks::begin(daemon);
    tokio::task::spawn_local(rule_changes::follow_hours(own()));
    tokio::task::spawn_local(rule_changes::keep_resolving(own()));
    tokio::task::spawn_local(paths::follow_volumes(own()));
    tokio::task::spawn_local(entries::follow_entries(own()));
    tokio::task::spawn_local(sessions::follow_silence(own()));
    sd_notify::notify(&[sd_notify::NotifyState::Ready]).context("cannot tell systemd")?;
    tracing::info!("ready");
    tokio::select! {
        () = stops.meant(daemon) => Ok(End::Stop),
        () = daemon.wakers.woken(Task::Restart) => Ok(End::Restart),
        _ = &mut data_path => Err(anyhow!("the data path has ended")),
    }
}

/// Time that a stop waits at most for the peers to say what plain carries; systemd gives it 15 s in all.
const STOP_ASKS: Duration = Duration::from_secs(6);

/// Signals that stop a daemon.
struct Stops {
    terminate: Signal,
    interrupt: Signal,
}

impl Stops {
    /// Waits for the next one; true if it is SIGINT, which a terminal sends.
    async fn next(&mut self) -> bool {
        tokio::select! {
            _ = self.terminate.recv() => false,
            _ = self.interrupt.recv() => true,
        }
    }

    /// Waits until a stop is meant. With `fail = "open"` it takes connections to plain, so it says first which may break by that; SIGINT
    /// has to come again then, as `cleanup` asks for `--force`.
    async fn meant(&mut self, daemon: &Daemon) {
        let by_hand = self.next().await;
        if daemon.config.daemon.fail != dibs_settings::Fail::Open {
            return;
        }
        let asked = timeout(STOP_ASKS, knocking::breaks_in_plain(daemon));
        let breaks = tokio::select! {
            _ = self.next() => return,
            breaks = asked => breaks,
        };
        let breaks = match breaks {
            Ok(Ok(None)) => return,
            Ok(Ok(Some(breaks))) => breaks,
            Ok(Err(fault)) => format!("connections on bumps may break: {fault:#}"),
            Err(_) => format!(
                "connections on bumps may break: the peers did not say within {} s what plain carries",
                STOP_ASKS.as_secs()
            ),
        };
        let and = match by_hand {
            true => "; dibsd goes on: SIGINT again stops it anyway",
            false => "",
        };
        let text = format!("with fail = \"open\" a stop takes connections to plain; {breaks}{and}");
        daemon.events.tell("stop", text, &[]);
        if by_hand {
            self.next().await;
        }
    }
}

/// The data path, which is to be started.
fn data_path(
    config: &Config,
    inventory: &Inventory,
    preferences: &Preferences,
    saved: &Saved,
) -> anyhow::Result<Node> {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).context("the system's random generator failed")?;
    let now = Time::from_nanos(dibs_io::boottime_ns());
    let mut node = startup::node_config(config, inventory)?;
    preferences.put_into(&mut node, config);
    let mut node = Node::new(now, node, seed)?;
    for (number, peer) in config.peers.iter().enumerate() {
        node.set_moved_ports(number, &saved.moved_ports(&peer.public_key));
        if let Some(ticket) = startup::own_ticket(config, number) {
            node.set_ticket(number, ticket);
        }
    }
    Ok(node)
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

/// Time between two sweeps.
const EVERY: Duration = Duration::from_secs(2);
/// Sweeps between two looks for what no event tells of; with iptables-legacy each is one.
const SWEEPS_PER_CHECK: u32 = 15;

/// Forgets connections by two names that ended, and bumps that nobody uses.
async fn sweep(daemon: Rc<Daemon>) {
    // At the start there is more urgent work.
    let mut ticks = interval_at(tokio::time::Instant::now() + EVERY, EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut round = 0;
    loop {
        ticks.tick().await;
        if daemon.file.is_behind() {
            daemon.events.note("save", daemon.save());
        }
        let unmatched = knocking::forget_ended(&daemon).await;
        daemon
            .events
            .note("look for connections by two names that ended", unmatched);
        let idle = {
            let state = daemon.state.borrow();
            let conns = || state.conns.iter().map(|(_, conn)| conn);
            let moves = |conn: &Conn| conn.choice.get().is_some() || conn.place.has_left();
            state.installed.is_empty() && !conns().any(moves)
        };
        if idle {
            continue;
        }
        daemon.events.note(
            "take down bumps that nobody uses",
            steering::retire(&daemon).await,
        );
        let cleared = daemon.kernel.steerer().await.clear_others().await;
        daemon
            .events
            .note("remove what an earlier run left", cleared);
        round = (round + 1) % SWEEPS_PER_CHECK;
        if round == 0 {
            let tried = rule_changes::widen_rules(&daemon).await;
            daemon
                .events
                .note("try rules again that one IP version lacks", tried);
        }
        if round == 0 || !daemon.kernel.steerer().await.is_told().await {
            steering::repair(&daemon, true).await;
        }
    }
}
